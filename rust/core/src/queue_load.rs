//! How much waits, and how much may wait: requests, prompt tokens and bytes. A queue is refused to, never left to grow.
//!
//! Not here: who waits in which order (`queue`), and whose turn it is between tenants (`tenants`).

use crate::protocol::AddRequest;

/// Most bytes of parameters, salts and stop ids that may wait. Prompt tokens have a bound of their own.
pub const MAX_QUEUED_BYTES: u64 = 256 << 20;

/// What one waiting request takes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RequestSize {
    pub num_tokens: u32,
    /// Beside the prompt.
    pub num_bytes: u32,
}

impl RequestSize {
    pub fn of(request: &AddRequest) -> Self {
        let written = request.params.len() + request.grammar.len() + request.cache_salt.len();
        let bytes = written + 4 * request.stop_token_ids.len();
        Self {
            num_tokens: request.prompt_token_ids.len() as u32,
            num_bytes: u32::try_from(bytes).unwrap_or(u32::MAX),
        }
    }
}

/// Requests that have not started, and what they take.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct QueueLoad {
    pub num_requests: u64,
    pub num_tokens: u64,
    pub num_bytes: u64,
}

impl QueueLoad {
    pub fn add(&mut self, size: RequestSize) {
        self.num_requests += 1;
        self.num_tokens += u64::from(size.num_tokens);
        self.num_bytes += u64::from(size.num_bytes);
    }

    pub fn remove(&mut self, size: RequestSize) {
        self.num_requests -= 1;
        self.num_tokens -= u64::from(size.num_tokens);
        self.num_bytes -= u64::from(size.num_bytes);
    }
}

/// How much may wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QueueBounds {
    pub max_requests: u64,
    pub max_tokens: u64,
    pub max_bytes: u64,
}

/// One tenant may fill this many times the room that is left. So a single one gets most of the queue, several get
/// equal parts, and there is always room for one more (the dynamic threshold of shared-memory switches: Choudhury and
/// Hahne, 1998).
const SHARE_OF_ROOM: u64 = 4;

impl QueueBounds {
    /// Whether one more request may wait beside those of `load`. An empty queue takes any.
    pub fn has_room(&self, load: QueueLoad, size: RequestSize) -> bool {
        let within = |used: u64, more: u32, most: u64| used.saturating_add(u64::from(more)) <= most;
        load.num_requests == 0
            || (load.num_requests < self.max_requests
                && within(load.num_tokens, size.num_tokens, self.max_tokens)
                && within(load.num_bytes, size.num_bytes, self.max_bytes))
    }

    /// Whether one more request of a tenant that has `own` of `load` leaves room for others. Its first one always does.
    pub fn leaves_room(&self, load: QueueLoad, own: QueueLoad, size: RequestSize) -> bool {
        let within = |used: u64, more: u32, own: u64, most: u64| {
            let more = u64::from(more);
            let room = most.saturating_sub(used.saturating_add(more));
            own.saturating_add(more) <= room.saturating_mul(SHARE_OF_ROOM)
        };
        own.num_requests == 0
            || (within(load.num_requests, 1, own.num_requests, self.max_requests)
                && within(
                    load.num_tokens,
                    size.num_tokens,
                    own.num_tokens,
                    self.max_tokens,
                )
                && within(
                    load.num_bytes,
                    size.num_bytes,
                    own.num_bytes,
                    self.max_bytes,
                ))
    }

    /// What a refused client is told.
    pub fn refusal(&self) -> String {
        format!(
            "too many requests wait (--max-queued-requests {}, --max-queued-tokens {}); try again later",
            self.max_requests, self.max_tokens
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BOUNDS: QueueBounds = QueueBounds {
        max_requests: 100,
        max_tokens: 1000,
        max_bytes: 50,
    };

    fn size(num_tokens: u32, num_bytes: u32) -> RequestSize {
        RequestSize {
            num_tokens,
            num_bytes,
        }
    }

    #[test]
    fn each_bound_refuses_by_itself() {
        let mut load = QueueLoad::default();
        assert!(
            BOUNDS.has_room(load, size(5000, 5000)),
            "an empty queue takes any"
        );
        load.add(size(600, 20));
        assert!(BOUNDS.has_room(load, size(400, 30)));
        assert!(!BOUNDS.has_room(load, size(401, 30)));
        assert!(!BOUNDS.has_room(load, size(400, 31)));
        load.remove(size(600, 20));
        assert_eq!(load, QueueLoad::default());
    }

    #[test]
    fn greedy_tenants_leave_room_for_one_more() {
        let mut load = QueueLoad::default();
        for num_tenants in 1..4_u64 {
            let mut own = QueueLoad::default();
            while BOUNDS.has_room(load, size(1, 0)) && BOUNDS.leaves_room(load, own, size(1, 0)) {
                load.add(size(1, 0));
                own.add(size(1, 0));
            }
            assert!(own.num_requests > 0, "tenant {num_tenants} got nothing");
            assert!(BOUNDS.has_room(load, size(1, 0)), "nothing is left");
        }
    }
}
