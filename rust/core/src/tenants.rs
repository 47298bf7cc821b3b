//! Turns between tenants, in proportion to their weights: start-time fair queueing (Goyal, Vin and Cheng, 1996).
//!
//! A request's turn is its **start tag** on a virtual clock: the time when its tenant's earlier requests would be done
//! if every tenant had its share, but not before the clock itself. A request costs its prompt and its output; the
//! output is guessed from the tenant's earlier ones and set right when the request ends. The clock follows the tags of
//! those that start, so a tenant gains nothing by having been idle and owes nothing for having used what others left.
//! With one tenant, tags grow with arrival, and nothing changes.

use std::collections::HashMap;

use crate::ids::TenantId;
use crate::queue_load::{QueueLoad, RequestSize};

/// Virtual time that one token takes at weight 1000.
const TOKEN_TIME: u64 = 1 << 10;
/// What is guessed before a tenant's first request has ended, in tokens.
const FIRST_GUESS: f64 = 128.0;
const GUESS_WEIGHT: f64 = 0.2;

/// Who pays for a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Payer {
    pub tenant: TenantId,
    /// In thousandths, at least 1.
    pub weight: u32,
}

impl Payer {
    fn time(self, num_tokens: u64) -> u64 {
        let at_weight_one = num_tokens.saturating_mul(TOKEN_TIME * 1000);
        at_weight_one / u64::from(self.weight.max(1))
    }
}

/// What a request has been charged.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Bill {
    pub payer: Payer,
    /// The request's turn.
    pub tag: u64,
    num_prompt: u64,
    guessed_output: u64,
}

#[derive(Debug)]
struct Account {
    /// Tag of the next request, unless the clock is further.
    next: u64,
    /// Tag of the newest request: tags of one tenant never go back, even when guesses were too high.
    newest: u64,
    output_guess: f64,
    /// Requests that have not ended.
    num_open: u64,
    waiting: QueueLoad,
}

/// Everybody who has requests, or has had more than a share of late.
#[derive(Debug, Default)]
pub struct Tenants {
    clock: u64,
    accounts: HashMap<TenantId, Account>,
    /// Requests that have not ended.
    num_open: u64,
}

impl Tenants {
    /// What waits of one tenant.
    pub fn waiting(&self, tenant: TenantId) -> QueueLoad {
        let account = self.accounts.get(&tenant);
        account.map_or_else(QueueLoad::default, |account| account.waiting)
    }

    /// A request for `n` outputs of at most `max_output` tokens arrives and waits.
    pub fn arrive(&mut self, payer: Payer, size: RequestSize, n: u32, max_output: u32) -> Bill {
        let clock = self.clock;
        let account = self.accounts.entry(payer.tenant).or_insert(Account {
            next: clock,
            newest: clock,
            output_guess: FIRST_GUESS,
            num_open: 0,
            waiting: QueueLoad::default(),
        });
        let guess = (account.output_guess.round() as u64).clamp(1, u64::from(max_output.max(1)));
        let bill = Bill {
            payer,
            tag: clock.max(account.next).max(account.newest),
            num_prompt: u64::from(size.num_tokens),
            guessed_output: guess * u64::from(n),
        };
        account.newest = bill.tag;
        account.next = bill
            .tag
            .saturating_add(payer.time(bill.num_prompt + bill.guessed_output));
        account.num_open += 1;
        self.num_open += 1;
        account.waiting.add(size);
        bill
    }

    /// A request waits no longer.
    pub fn leave_queue(&mut self, tenant: TenantId, size: RequestSize) {
        self.account(tenant).waiting.remove(size);
    }

    /// A request starts; `first_waiting` is the least tag of those that go on waiting.
    pub fn start(&mut self, tag: u64, first_waiting: Option<u64>) {
        let tag = first_waiting.map_or(tag, |first| tag.min(first));
        self.clock = self.clock.max(tag);
    }

    /// All of a request's sequences have ended; they had `num_output` tokens. `n` is how many they were, and `None`
    /// says that it never started.
    pub fn end(&mut self, bill: Bill, num_output: u64, n: Option<u32>) {
        let clock = self.clock;
        let account = self.account(bill.payer.tenant);
        let charged = bill.payer.time(bill.num_prompt + bill.guessed_output);
        let used = match n {
            Some(_) => bill.payer.time(bill.num_prompt + num_output),
            None => 0,
        };
        account.next = account.next.saturating_add(used).saturating_sub(charged);
        if let Some(n) = n {
            let mean = num_output as f64 / f64::from(n.max(1));
            account.output_guess += GUESS_WEIGHT * (mean - account.output_guess);
        }
        account.num_open -= 1;
        let is_settled = account.num_open == 0 && account.next <= clock;
        self.num_open -= 1;
        if self.num_open == 0 {
            self.accounts.clear(); // nobody competes with what anybody had
        } else if is_settled {
            self.accounts.remove(&bill.payer.tenant);
        }
    }

    /// Whether the accounts agree with `open` requests and with `waiting` ones in all.
    pub fn check(&self, open: u64, waiting: QueueLoad) -> Result<(), String> {
        let mut total = QueueLoad::default();
        for account in self.accounts.values() {
            total.num_requests += account.waiting.num_requests;
            total.num_tokens += account.waiting.num_tokens;
            total.num_bytes += account.waiting.num_bytes;
        }
        let num_open: u64 = self.accounts.values().map(|a| a.num_open).sum();
        if num_open == open && self.num_open == open && total == waiting {
            return Ok(());
        }
        Err(format!(
            "tenants count {num_open} requests and {total:?}; there are {open} and {waiting:?}"
        ))
    }

    fn account(&mut self, tenant: TenantId) -> &mut Account {
        self.accounts
            .get_mut(&tenant)
            .expect("an account with open requests")
    }
}
