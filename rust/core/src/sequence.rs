//! One sequence: its tokens, how far they are computed, and what it holds on the device.
//!
//! `num_computed` runs ahead (positions that a plan covers), `num_committed` follows (positions whose step has
//! retired). Prefill, decode and recomputation are the same thing: computed catches up with the number of tokens.
//! Invariant: 0 <= committed <= computed <= known tokens + pending tokens.

use std::sync::Arc;

use crate::grammar::guide::Guide;
use crate::holding::Holding;
use crate::ids::{BlockHash, ClientId, RequestId, RequestIdx, TokenId};
use crate::protocol::TokenLogprobs;
use crate::queue::QueueKey;
use crate::speculation::Drafting;

/// Where a sequence is in its life. Only states that may have rows in flight hold anything; a finished sequence is
/// not in the table.
#[derive(Debug)]
pub enum State {
    /// Waits until the request's first sequence has computed the prompt.
    Parked,
    /// In the queue.
    Waiting,
    Running(Holding),
    /// Ended, but dead rows in flight still write to its blocks.
    Ending(Holding),
}

/// What a request says of all its sequences.
#[derive(Clone, Debug)]
pub struct Limits {
    pub max_output: u32,
    pub min_output: u32,
    /// Sorted.
    pub stop_token_ids: Arc<[TokenId]>,
    /// -1 = none.
    pub logprobs: i32,
}

#[derive(Debug)]
pub struct Sequence {
    pub state: State,
    /// Valid until the sequence ends; a sequence that is `Ending` may outlive its request.
    pub request: RequestIdx,
    pub client: ClientId,
    pub request_id: RequestId,
    pub key: QueueKey,
    pub prompt: Arc<[TokenId]>,
    pub output: Vec<TokenId>,
    /// Sampled in steps in flight: they exist on the device, their ids are not known here.
    pub num_pending: u32,
    pub num_computed: u32,
    pub num_committed: u32,
    /// Rows in flight.
    pub in_flight: u32,
    /// Step in which it got its slot.
    pub first_step: u64,
    /// Step that planned its newest row, and where that row started.
    pub last_step: u64,
    pub last_start: u32,
    pub limits: Limits,
    /// Hashes of full blocks, and how many of them have been published.
    pub hashes: Vec<BlockHash>,
    pub num_published: u32,
    /// Parked sequences wait for this one.
    pub leads: bool,
    /// Nothing has been sent to the client yet.
    pub is_silent: bool,
    /// Prompt logprobs received so far, until they are sent; `None` = not asked for or sent.
    pub prompt_logprobs: Option<Vec<TokenLogprobs>>,
    /// Its place in the request's grammar, if there is one, from its first start on.
    pub guide: Option<Box<Guide>>,
    pub drafting: Drafting,
}

impl Sequence {
    /// A parked sequence of which nothing is computed.
    pub fn new(
        (request, client, request_id): (RequestIdx, ClientId, RequestId),
        key: QueueKey,
        prompt: Arc<[TokenId]>,
        limits: Limits,
    ) -> Self {
        Self {
            state: State::Parked,
            request,
            client,
            request_id,
            key,
            prompt,
            output: Vec::new(),
            num_pending: 0,
            num_computed: 0,
            num_committed: 0,
            in_flight: 0,
            first_step: 0,
            last_step: 0,
            last_start: 0,
            limits,
            hashes: Vec::new(),
            num_published: 0,
            leads: false,
            is_silent: true,
            prompt_logprobs: None,
            guide: None,
            drafting: Drafting::default(),
        }
    }

    pub fn num_prompt_tokens(&self) -> u32 {
        self.prompt.len() as u32
    }

    /// Tokens whose ids are known.
    pub fn num_known(&self) -> u32 {
        (self.prompt.len() + self.output.len()) as u32
    }

    pub fn token(&self, position: u32) -> TokenId {
        let position = position as usize;
        match self.prompt.get(position) {
            Some(token_id) => *token_id,
            None => self.output[position - self.prompt.len()],
        }
    }

    pub fn known_tokens(&self) -> impl Iterator<Item = TokenId> {
        self.prompt.iter().chain(&self.output).copied()
    }

    /// Tokens that the next row may cover; 0 when the outputs in flight already reach the limit, or when it is open how
    /// many there are.
    pub fn num_remaining(&self) -> u32 {
        let is_full = self.output.len() as u32 + self.num_pending >= self.limits.max_output;
        if is_full || self.drafting.num_in_flight > 0 {
            return 0;
        }
        self.num_known() + self.num_pending - self.num_computed
    }

    pub fn holding(&self) -> Option<&Holding> {
        match &self.state {
            State::Running(holding) | State::Ending(holding) => Some(holding),
            State::Parked | State::Waiting => None,
        }
    }

    pub fn is_running(&self) -> bool {
        matches!(self.state, State::Running(_))
    }

    /// The running sequence's slot and blocks.
    pub fn running_mut(&mut self) -> &mut Holding {
        match &mut self.state {
            State::Running(holding) => holding,
            state => panic!("a row for a sequence that is {state:?}"),
        }
    }

    /// Whether an output token ends the sequence, `num_output` counting it.
    pub fn stops_at(&self, token_id: TokenId, num_output: u32) -> bool {
        num_output >= self.limits.min_output && self.names_stop(token_id)
    }

    /// Whether the request lists the token as one that ends it.
    pub fn names_stop(&self, token_id: TokenId) -> bool {
        self.limits.stop_token_ids.binary_search(&token_id).is_ok()
    }

    /// Back to the start: what was computed is given up, the tokens stay.
    pub fn forget_computed(&mut self) {
        debug_assert!(self.in_flight == 0 && self.num_pending == 0);
        self.num_computed = 0;
        self.num_committed = 0;
        self.num_published = 0;
        if let Some(logprobs) = &mut self.prompt_logprobs {
            logprobs.clear();
        }
    }

    /// The rules at the top of this file.
    pub fn check(&self) -> Result<(), String> {
        let end = self.num_known() + self.num_pending;
        if self.num_committed > self.num_computed || self.num_computed > end {
            return Err(format!(
                "{:?}: committed {} <= computed {} <= tokens {end} is broken",
                self.key, self.num_committed, self.num_computed
            ));
        }
        if self.output.len() as u32 + self.num_pending > self.limits.max_output {
            return Err(format!("{:?}: more outputs than allowed", self.key));
        }
        match self.holding() {
            Some(holding) if self.num_computed > holding.capacity => Err(format!(
                "{:?}: computed positions without a block",
                self.key
            )),
            None if self.num_computed > 0 || self.in_flight > 0 => {
                Err(format!("{:?}: computed without blocks", self.key))
            }
            _ => Ok(()),
        }
    }
}
