//! Requests, their sequences, and the table that finds both.
//!
//! Places are reused; nothing keeps an index beyond the life of what it names: a request knows its living sequences, a
//! sequence its request, the queue and the running list only living sequences.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Instant;

use crate::grammar::compiler::Compiled;
use crate::ids::{BlockHash, ClientId, RequestId, RequestIdx, SeqIdx};
use crate::media::MediaSpan;
use crate::sequence::Sequence;
use crate::tenants::Bill;

/// What a request's output must look like.
#[derive(Clone, Debug)]
pub enum Constraint {
    Free,
    /// The grammar is being compiled; what the request wrote.
    Awaited(Arc<[u8]>),
    Grammar(Arc<Compiled>),
}

#[derive(Debug)]
pub struct Request {
    pub client: ClientId,
    pub request_id: RequestId,
    pub params: Arc<[u8]>,
    pub constraint: Constraint,
    pub media: Arc<[MediaSpan]>,
    pub media_data: Arc<[u8]>,
    /// Parent of the first block's hash.
    pub root: BlockHash,
    pub arrival: Instant,
    /// When its first sequence got a slot.
    pub started: Option<Instant>,
    /// Prompt tokens found in the cache at the start.
    pub num_cached_tokens: u32,
    /// -1 = none.
    pub prompt_logprobs: i32,
    /// Those that have not ended, by index.
    pub sequences: Vec<Option<SeqIdx>>,
    pub num_live: u32,
    /// What its tenant has been charged.
    pub bill: Bill,
    /// Tokens of the sequences that have ended.
    pub num_output: u64,
}

/// A vector whose free places are used again.
#[derive(Debug)]
struct Slab<T> {
    entries: Vec<Option<T>>,
    free: Vec<u32>,
}

impl<T> Slab<T> {
    const fn new() -> Self {
        Self {
            entries: Vec::new(),
            free: Vec::new(),
        }
    }

    fn insert(&mut self, value: T) -> u32 {
        if let Some(index) = self.free.pop() {
            self.entries[index as usize] = Some(value);
            return index;
        }
        self.entries.push(Some(value));
        self.entries.len() as u32 - 1
    }

    fn remove(&mut self, index: u32) -> T {
        let value = self.entries[index as usize].take().expect("a place in use");
        self.free.push(index);
        value
    }

    fn get(&self, index: u32) -> &T {
        self.entries[index as usize]
            .as_ref()
            .expect("a place in use")
    }

    fn get_mut(&mut self, index: u32) -> &mut T {
        self.entries[index as usize]
            .as_mut()
            .expect("a place in use")
    }

    fn iter(&self) -> impl Iterator<Item = (u32, &T)> {
        (0..)
            .zip(&self.entries)
            .filter_map(|(index, entry)| entry.as_ref().map(|value| (index, value)))
    }
}

/// Every request and sequence that has not ended.
#[derive(Debug)]
pub struct Table {
    requests: Slab<Request>,
    sequences: Slab<Sequence>,
    by_id: HashMap<(ClientId, RequestId), RequestIdx>,
}

impl Default for Table {
    fn default() -> Self {
        Self {
            requests: Slab::new(),
            sequences: Slab::new(),
            by_id: HashMap::new(),
        }
    }
}

impl Table {
    pub fn add_request(&mut self, request: Request) -> RequestIdx {
        let id = (request.client, request.request_id);
        let index = RequestIdx(self.requests.insert(request));
        self.by_id.insert(id, index);
        index
    }

    /// Adds sequence `key.index` of its request.
    pub fn add_sequence(&mut self, sequence: Sequence) -> SeqIdx {
        let (request, index) = (sequence.request, sequence.key.index as usize);
        let seq = SeqIdx(self.sequences.insert(sequence));
        let request = self.request_mut(request);
        request.sequences[index] = Some(seq);
        request.num_live += 1;
        seq
    }

    /// The sequence has ended; its request goes with the last one, and is returned. The sequence itself stays until
    /// `remove_sequence`.
    pub fn end_sequence(&mut self, seq: SeqIdx) -> Option<Request> {
        let sequence = self.seq(seq);
        let (index, place) = (sequence.request, sequence.key.index as usize);
        let num_output = sequence.output.len() as u64;
        let request = self.request_mut(index);
        request.sequences[place] = None;
        request.num_live -= 1;
        request.num_output += num_output;
        if request.num_live > 0 {
            return None;
        }
        let request = self.requests.remove(index.0);
        self.by_id.remove(&(request.client, request.request_id));
        Some(request)
    }

    /// Frees the place of an ended sequence that holds nothing any more.
    pub fn remove_sequence(&mut self, seq: SeqIdx) -> Sequence {
        self.sequences.remove(seq.0)
    }

    pub fn seq(&self, seq: SeqIdx) -> &Sequence {
        self.sequences.get(seq.0)
    }

    pub fn seq_mut(&mut self, seq: SeqIdx) -> &mut Sequence {
        self.sequences.get_mut(seq.0)
    }

    /// Whether the place holds a running sequence.
    pub fn is_running(&self, seq: SeqIdx) -> bool {
        let entry = &self.sequences.entries[seq.0 as usize];
        entry.as_ref().is_some_and(Sequence::is_running)
    }

    pub fn request(&self, request: RequestIdx) -> &Request {
        self.requests.get(request.0)
    }

    pub fn request_mut(&mut self, request: RequestIdx) -> &mut Request {
        self.requests.get_mut(request.0)
    }

    pub fn find(&self, client: ClientId, request_id: RequestId) -> Option<RequestIdx> {
        self.by_id.get(&(client, request_id)).copied()
    }

    pub fn requests_of(&self, client: ClientId) -> Vec<RequestIdx> {
        self.requests
            .iter()
            .filter(|(_, request)| request.client == client)
            .map(|(index, _)| RequestIdx(index))
            .collect()
    }

    pub fn num_requests(&self) -> usize {
        self.by_id.len()
    }

    pub fn sequences(&self) -> impl Iterator<Item = (SeqIdx, &Sequence)> {
        self.sequences
            .iter()
            .map(|(index, sequence)| (SeqIdx(index), sequence))
    }

    pub fn requests(&self) -> impl Iterator<Item = (RequestIdx, &Request)> {
        self.requests
            .iter()
            .map(|(index, request)| (RequestIdx(index), request))
    }
}
