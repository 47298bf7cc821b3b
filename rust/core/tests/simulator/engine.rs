//! The engine loop over the fake device, and what a client sees of it.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::thread;
use std::time::{Duration, Instant};

use octavo_core::arena::Totals;
use octavo_core::config::{CoreConfig, Policy};
use octavo_core::core::{Core, PromptLogprobs};
use octavo_core::groups::Keep;
use octavo_core::ids::{ClientId, RequestId, TenantId};
use octavo_core::plan::StepPlan;
use octavo_core::protocol::{
    Abort, AddRequest, EngineStats, FinishReason, Inbound, Outbound, Refusal, SequenceOutput,
};
use octavo_core::step_sizes::StepSizes;

use super::device::Device;

/// Everything that one sequence's client got.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Received {
    pub tokens: Vec<u32>,
    pub finish: Option<FinishReason>,
    pub outputs: Vec<SequenceOutput>,
}

pub struct Engine {
    pub core: Core,
    pub device: Device,
    pub received: BTreeMap<(u64, u32), Received>,
    pub refusals: HashMap<u64, Refusal>,
    pub stats: EngineStats,
    pub plans: Vec<StepPlan>,
    /// When each sequence's first token came, as a number of turns.
    pub first_turn: BTreeMap<(u64, u32), usize>,
    pub num_turns: usize,
    /// How long the device runs a step.
    pub step_time: fn(&Totals) -> Duration,
    pub now: Instant,
    depth: usize,
    arenas: Vec<Vec<i32>>,
    pending: VecDeque<(StepPlan, Vec<i32>)>,
    was_empty: bool,
}

pub fn config() -> CoreConfig {
    CoreConfig {
        block_size: 4,
        num_blocks: 65,
        groups: vec![Keep::All],
        output_bytes: None,
        max_num_seqs: 8,
        max_num_batched_tokens: 64,
        max_model_len: 128,
        vocab_size: 50,
        max_queued_requests: 1 << 20,
        max_queued_tokens: 1 << 40,
        policy: Policy::Fcfs,
        enable_prefix_caching: true,
        long_prefill_token_threshold: 0,
        max_itl_ms: Some(0.0),
        plans_late: false,
        step_sizes: StepSizes::default(),
        depth: 1,
        max_logprobs: 3,
        hash_seed: 11,
        speculation: None,
    }
}

pub fn request(request_id: u64, prompt: &[u32], max_tokens: u32) -> AddRequest {
    AddRequest {
        request_id: RequestId(request_id),
        prompt_token_ids: prompt.to_vec(),
        n: 1,
        max_tokens,
        min_tokens: 0,
        stop_token_ids: vec![],
        priority: 0,
        tenant: TenantId::NOBODY,
        weight: 1000,
        cache_salt: vec![],
        deadline_s: 0.0,
        logprobs: -1,
        prompt_logprobs: -1,
        grammar: vec![],
        params: request_id.to_le_bytes().to_vec(),
        media: vec![],
        media_data: vec![],
    }
}

impl Engine {
    pub fn new(config: &CoreConfig) -> Self {
        let core = Core::new(config.clone()).unwrap();
        let depth = config.depth as usize;
        Self {
            device: Device::new(config),
            arenas: vec![vec![-9; core.arena_layout().num_ints as usize]; depth + 1],
            core,
            received: BTreeMap::new(),
            refusals: HashMap::new(),
            stats: EngineStats::default(),
            plans: Vec::new(),
            first_turn: BTreeMap::new(),
            num_turns: 0,
            step_time: |_| Duration::from_millis(1),
            now: Instant::now(),
            depth,
            pending: VecDeque::new(),
            was_empty: false,
        }
    }

    pub fn send(&self, message: Inbound) {
        self.core.inbox().push(ClientId::LOCAL, message);
    }

    pub fn add(&self, request: AddRequest) {
        self.send(Inbound::Add(request));
    }

    pub fn abort(&self, request_id: u64, index: Option<u32>) {
        let request_id = RequestId(request_id);
        self.send(Inbound::Abort(Abort { request_id, index }));
    }

    /// One turn of the loop.
    pub fn step(&mut self) {
        let is_full = self.pending.len() == self.depth;
        let oldest = if is_full || self.was_empty {
            self.pending.pop_front()
        } else {
            None
        };
        self.num_turns += 1;
        self.now += Duration::from_micros(1);
        if let Some((plan, _)) = &oldest {
            self.now += (self.step_time)(&plan.totals);
            self.put_prompt_logprobs(&plan.clone());
        }
        let output = oldest.as_ref().map(|(_, output)| output.as_slice());
        let arena = &mut self.arenas[self.core.next_arena() as usize];
        let plan = self.core.step_at(output, arena, self.now).unwrap();
        self.core.check().unwrap();
        self.was_empty = plan.totals.num_rows == 0;
        if !self.was_empty {
            let output = self.device.run(&plan, &self.arenas[plan.arena as usize]);
            self.pending.push_back((plan.clone(), output));
            self.plans.push(plan);
        }
        self.receive();
    }

    /// One turn of the loop by the clock of the machine: the device has its next result ready `time` after the last.
    pub fn live_step(&mut self, time: Duration) {
        let is_full = self.pending.len() == self.depth;
        let oldest = if is_full {
            self.pending.pop_front()
        } else {
            None
        };
        if oldest.is_some() {
            thread::sleep((self.now + time).saturating_duration_since(Instant::now()));
            self.now = Instant::now();
        }
        let output = oldest.as_ref().map(|(_, output)| output.as_slice());
        let arena = &mut self.arenas[self.core.next_arena() as usize];
        let plan = self.core.step(output, arena).unwrap();
        self.core.check().unwrap();
        let output = self.device.run(&plan, &self.arenas[plan.arena as usize]);
        self.pending.push_back((plan.clone(), output));
        self.plans.push(plan);
    }

    fn put_prompt_logprobs(&mut self, plan: &StepPlan) {
        for row in &plan.prompt_logprob_rows {
            let width = 1 + row.num_top as usize;
            let ids: Vec<i32> = row
                .target_ids
                .iter()
                .flat_map(|id| vec![*id as i32; width])
                .collect();
            let logprobs = PromptLogprobs {
                ids: &ids,
                values: &vec![-0.5; ids.len()],
                ranks: &vec![2; row.target_ids.len()],
            };
            self.core.put_prompt_logprobs(row.slot, logprobs).unwrap();
        }
    }

    fn receive(&mut self) {
        for message in self.core.outbox().take_local() {
            let Outbound::Output(frame) = message else {
                panic!("unexpected {message:?}");
            };
            self.stats = frame.stats;
            for refusal in frame.refusals {
                self.refusals.insert(refusal.request_id.0, refusal);
            }
            for output in frame.outputs {
                let received = self
                    .received
                    .entry((output.request_id.0, output.index))
                    .or_default();
                assert_eq!(received.finish, None, "an output after the end");
                if received.tokens.is_empty() && !output.token_ids.is_empty() {
                    let name = (output.request_id.0, output.index);
                    self.first_turn.insert(name, self.num_turns);
                }
                received.tokens.extend(&output.token_ids);
                received.finish = output.finish;
                received.outputs.push(output);
            }
        }
    }

    /// Steps until nothing is left to do.
    pub fn run(&mut self, max_steps: usize) {
        for _ in 0..max_steps {
            if !self.core.has_work() {
                self.check_empty();
                return;
            }
            self.step();
        }
        panic!("no end after {max_steps} steps:\n{}", self.core.dump());
    }

    fn check_empty(&mut self) {
        let stats = self.core.stats();
        assert_eq!(stats.num_free_blocks, stats.num_blocks, "blocks leaked");
        assert_eq!((stats.num_running, stats.num_waiting), (0, 0));
        if stats.num_steps > 0 {
            assert_eq!(self.stats, stats, "the client's last statistics are old");
        }
    }

    pub fn tokens(&self, request_id: u64, index: u32) -> &[u32] {
        &self.received[&(request_id, index)].tokens
    }
}
