//! Collects what a step has to tell each client, one frame a client.

use crate::ids::{ClientId, RequestId};
use crate::mailbox::Outbox;
use crate::protocol::{
    EngineStats, FinishReason, Outbound, OutputFrame, Refusal, RefusalKind, SequenceOutput,
};

/// An output that says nothing yet. It does not allocate.
pub fn empty_output(request_id: RequestId, index: u32) -> SequenceOutput {
    SequenceOutput {
        request_id,
        index,
        token_ids: Vec::new(),
        logprobs: Vec::new(),
        finish: None,
        stop_token_id: None,
        num_cached_tokens: None,
        prompt_logprobs: None,
        queue_s: None,
        error: None,
    }
}

#[derive(Debug, Default)]
pub struct Outputs {
    frames: Vec<(ClientId, OutputFrame)>,
    /// Frame that was used last: outputs of one client mostly come together.
    latest: usize,
    /// Outputs of the biggest frame of the last step, as a first guess for this one's.
    capacity: usize,
    /// Clients whose newest statistics show work that has ended since.
    outdated: Vec<ClientId>,
}

impl Outputs {
    fn frame(&mut self, client: ClientId) -> &mut OutputFrame {
        let fits = |entry: Option<&(ClientId, OutputFrame)>| entry.is_some_and(|e| e.0 == client);
        if !fits(self.frames.get(self.latest)) {
            let found = self.frames.iter().position(|entry| entry.0 == client);
            self.latest = found.unwrap_or_else(|| {
                let frame = OutputFrame {
                    outputs: Vec::with_capacity(self.capacity),
                    ..OutputFrame::default()
                };
                self.frames.push((client, frame));
                self.frames.len() - 1
            });
        }
        &mut self.frames[self.latest].1
    }

    pub fn push(&mut self, client: ClientId, output: SequenceOutput) {
        self.frame(client).outputs.push(output);
    }

    /// The client gets the newest statistics with this step, whatever else it gets.
    pub fn tell_stats(&mut self, client: ClientId) {
        self.frame(client);
    }

    /// A sequence ends without a new token.
    pub fn push_end(
        &mut self,
        client: ClientId,
        request_id: RequestId,
        index: u32,
        finish: FinishReason,
    ) {
        let mut output = empty_output(request_id, index);
        output.finish = Some(finish);
        self.push(client, output);
    }

    pub fn refuse(
        &mut self,
        client: ClientId,
        request_id: RequestId,
        kind: RefusalKind,
        message: String,
        retry_after_s: f32,
    ) {
        self.frame(client).refusals.push(Refusal {
            request_id,
            kind,
            message,
            retry_after_s,
        });
    }

    /// Nothing more is sent to a client that is gone.
    pub fn forget_client(&mut self, client: ClientId) {
        self.frames.retain(|entry| entry.0 != client);
        self.outdated.retain(|other| *other != client);
        self.latest = 0;
    }

    /// Sends the frames. When the engine has become idle, clients that saw it busy get the final statistics.
    pub fn flush(&mut self, stats: &EngineStats, is_idle: bool, outbox: &Outbox) {
        if is_idle {
            for client in std::mem::take(&mut self.outdated) {
                self.frame(client);
            }
        }
        self.latest = 0;
        self.capacity = 0;
        for (client, mut frame) in self.frames.drain(..) {
            self.capacity = self.capacity.max(frame.outputs.len());
            frame.stats = *stats;
            if !is_idle && !self.outdated.contains(&client) {
                self.outdated.push(client);
            }
            outbox.post(client, Outbound::Output(frame));
        }
    }
}
