//! Compiles grammars on threads of its own and remembers them, the failed ones too.
//!
//! The engine loop only asks (`request`) and collects (`take_done`); it never waits. A grammar that takes too long is
//! given up: its requests are refused, and its thread is free again when the parser's own limits stop it.

use std::collections::HashMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::PathBuf;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use llguidance::Matcher;
use llguidance::api::TopLevelGrammar;
use rayon::{ThreadPool, ThreadPoolBuilder};

use super::GrammarError;
use super::json_schema::find_fault;
use super::lanes::num_lanes;
use super::spec::{Spec, StartAfter};
use super::vocabulary::Vocabulary;
use crate::ids::TokenId;

/// Grammars kept although nobody uses them now.
const MAX_KEPT: usize = 256;
/// Total size of what requests wrote of them.
const MAX_KEPT_BYTES: usize = 64 << 20;
/// After that a grammar is refused.
pub const TIME_LIMIT: Duration = Duration::from_secs(10);
const NUM_THREADS: usize = 2;
/// Parsers recurse over what a client wrote.
const STACK_BYTES: usize = 64 << 20;

/// A grammar, ready to be used by any number of sequences.
pub struct Compiled {
    pub vocabulary: Arc<Vocabulary>,
    pub start_after: Option<Arc<StartAfter>>,
    /// Parsers at the start of the grammar, one a lane, and how many were given out.
    lanes: Mutex<(Vec<Matcher>, usize)>,
}

impl std::fmt::Debug for Compiled {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Compiled")
    }
}

impl Compiled {
    /// A parser for a new sequence, and its lane. Lanes take turns.
    pub fn matcher(&self) -> (usize, Matcher) {
        let mut lanes = self.lanes.lock().unwrap_or_else(PoisonError::into_inner);
        let lane = lanes.1 % lanes.0.len();
        lanes.1 += 1;
        (lane, lanes.0[lane].clone())
    }

    fn new(spec: &Spec, vocabulary: &Arc<Vocabulary>) -> Result<Self, GrammarError> {
        let matcher = first_parser(spec, vocabulary)?;
        let lanes = (0..num_lanes()).map(|_| matcher.deep_clone()).collect();
        Ok(Self {
            vocabulary: Arc::clone(vocabulary),
            start_after: spec.start_after.clone().map(Arc::new),
            lanes: Mutex::new((lanes, 0)),
        })
    }
}

/// A parser that can make its first step.
fn first_parser(spec: &Spec, vocabulary: &Vocabulary) -> Result<Matcher, GrammarError> {
    let compile = |grammar| -> Result<Matcher, String> {
        let mut matcher = Matcher::new(vocabulary.factory().create_parser(grammar));
        match matcher.get_error() {
            Some(error) => Err(error),
            None if matcher.is_stopped() => Err("it allows nothing but an empty output".into()),
            None => {
                let mask = matcher.compute_mask();
                mask.map_err(|error| {
                    format!("no token can begin it ({})", brief(&error.to_string()))
                })?;
                Ok(matcher)
            }
        }
    };
    compile(spec.grammar(vocabulary)?).map_err(|error| {
        let message = brief(&error);
        let fault = spec.schema().and_then(|schema| {
            find_fault(schema, &spec.schema_options(), |part| {
                let error = compile(TopLevelGrammar::from_json_schema(part)).err();
                error.map(|error| brief(&error))
            })
        });
        match fault {
            Some(fault) => GrammarError::at("json", fault),
            None if spec.schema().is_some() => GrammarError::at("json", format!("at #: {message}")),
            None => GrammarError::at(spec.form(), message),
        }
    })
}

/// The parser's messages go on with its state.
fn brief(message: &str) -> String {
    let message = message.split("\n<").next().unwrap_or_default().trim();
    let message = match message {
        text if text.starts_with("oneOf constraints") => {
            "keyword \"oneOf\" is supported only where it shows that its schemas exclude each other (by type, by const, \
             or by a required property's const or enum)"
        }
        text => text,
    };
    message.chars().take(600).collect()
}

/// What became of a grammar.
pub type Outcome = Result<Arc<Compiled>, GrammarError>;

/// Where a grammar stands. Keys are what requests wrote.
#[derive(Debug)]
enum Entry {
    Pending { since: Instant },
    Done { outcome: Outcome, last_use: u64 },
}

/// Called on a compiling thread when something is done.
pub type Notify = Arc<dyn Fn() + Send + Sync>;

/// What compiling threads share with the loop.
struct Workshop {
    path: PathBuf,
    vocab_size: u32,
    eos: Vec<TokenId>,
    vocabulary: OnceLock<Result<Arc<Vocabulary>, GrammarError>>,
    done: Mutex<Vec<(Arc<[u8]>, Outcome)>>,
    notify: Notify,
}

impl Workshop {
    fn compile(&self, key: &Arc<[u8]>) {
        let outcome = catch_unwind(AssertUnwindSafe(|| self.outcome(key)));
        let outcome = outcome.unwrap_or_else(|_| {
            Err(GrammarError(
                "structured_outputs: the grammar can't be compiled".into(),
            ))
        });
        let mut done = self.done.lock().unwrap_or_else(PoisonError::into_inner);
        done.push((Arc::clone(key), outcome));
        drop(done);
        (self.notify)();
    }

    fn outcome(&self, key: &[u8]) -> Outcome {
        let spec = Spec::parse(key)?;
        let vocabulary = self.vocabulary().as_ref().map_err(Clone::clone)?;
        Compiled::new(&spec, vocabulary).map(Arc::new)
    }

    fn vocabulary(&self) -> &Result<Arc<Vocabulary>, GrammarError> {
        self.vocabulary
            .get_or_init(|| Vocabulary::read(&self.path, self.vocab_size, &self.eos).map(Arc::new))
    }
}

/// The grammars of one engine.
pub struct Grammars {
    workshop: Arc<Workshop>,
    entries: HashMap<Arc<[u8]>, Entry>,
    num_bytes: usize,
    num_pending: usize,
    num_uses: u64,
    /// The vocabulary is read, or being read.
    is_warm: bool,
    pool: Option<ThreadPool>,
}

impl std::fmt::Debug for Grammars {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Grammars({})", self.entries.len())
    }
}

impl Grammars {
    /// The tokenizer.json at `path` is read by `warm`, or when the first grammar comes.
    pub fn new(path: PathBuf, vocab_size: u32, eos: Vec<TokenId>, notify: Notify) -> Self {
        let workshop = Workshop {
            path,
            vocab_size,
            eos,
            vocabulary: OnceLock::new(),
            done: Mutex::default(),
            notify,
        };
        Self {
            workshop: Arc::new(workshop),
            entries: HashMap::new(),
            num_bytes: 0,
            num_pending: 0,
            num_uses: 0,
            is_warm: false,
            pool: None,
        }
    }

    /// The grammar if it is ready (or known to be bad); `None`: it is being compiled, and `take_done` will have it.
    pub fn request(&mut self, key: &Arc<[u8]>, now: Instant) -> Option<Outcome> {
        self.num_uses += 1;
        match self.entries.get_mut(key) {
            Some(Entry::Done { outcome, last_use }) => {
                *last_use = self.num_uses;
                return Some(outcome.clone());
            }
            Some(Entry::Pending { .. }) => return None,
            None => {}
        }
        if let Err(error) = self.start_threads() {
            return Some(Err(error));
        }
        self.entries
            .insert(Arc::clone(key), Entry::Pending { since: now });
        self.num_bytes += key.len();
        self.num_pending += 1;
        self.is_warm = true;
        if let Some(pool) = &self.pool {
            let (workshop, key) = (Arc::clone(&self.workshop), Arc::clone(key));
            pool.spawn_fifo(move || workshop.compile(&key));
        }
        None
    }

    /// Reads the vocabulary on a thread of its own, so that the first constrained request does not wait for it; once.
    pub fn warm(&mut self) {
        if !std::mem::replace(&mut self.is_warm, true)
            && self.start_threads().is_ok()
            && let Some(pool) = &self.pool
        {
            let workshop = Arc::clone(&self.workshop);
            pool.spawn_fifo(move || {
                // What is wrong with it, the first request is told.
                let _ = catch_unwind(AssertUnwindSafe(|| workshop.vocabulary().is_ok()));
                (workshop.notify)();
            });
        }
    }

    fn start_threads(&mut self) -> Result<(), GrammarError> {
        if self.pool.is_none() {
            let builder = ThreadPoolBuilder::new()
                .num_threads(NUM_THREADS)
                .stack_size(STACK_BYTES)
                .thread_name(|index| format!("octavo-grammar-{index}"));
            self.pool = Some(
                builder
                    .build()
                    .map_err(|error| GrammarError(error.to_string()))?,
            );
        }
        Ok(())
    }

    /// Whether something is being compiled.
    pub fn is_busy(&self) -> bool {
        self.num_pending > 0
    }

    /// Grammars that became ready, turned out bad, or took too long.
    pub fn take_done(&mut self, now: Instant) -> Vec<(Arc<[u8]>, Outcome)> {
        if self.num_pending == 0 {
            return Vec::new();
        }
        let mut workshop = self
            .workshop
            .done
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        let mut done = std::mem::take(&mut *workshop);
        drop(workshop);
        // One that was given up may be done after all: it is kept, but nobody waits for it.
        for (key, entry) in &self.entries {
            let Entry::Pending { since } = entry else {
                continue;
            };
            if now.duration_since(*since) > TIME_LIMIT
                && !done.iter().any(|(other, _)| other == key)
            {
                let message = format!(
                    "structured_outputs: the grammar took more than {} s to compile",
                    TIME_LIMIT.as_secs()
                );
                done.push((Arc::clone(key), Err(GrammarError(message))));
            }
        }
        for (key, outcome) in &done {
            let entry = Entry::Done {
                outcome: outcome.clone(),
                last_use: self.num_uses,
            };
            match self.entries.insert(Arc::clone(key), entry) {
                Some(Entry::Pending { .. }) => self.num_pending -= 1,
                Some(Entry::Done { .. }) => {}
                None => self.num_bytes += key.len(),
            }
        }
        if !done.is_empty() {
            self.forget_some();
        }
        done
    }

    /// Drops what was used longest ago.
    fn forget_some(&mut self) {
        while self.entries.len() > MAX_KEPT || self.num_bytes > MAX_KEPT_BYTES {
            let oldest = self.entries.iter().filter_map(|(key, entry)| match entry {
                Entry::Done { last_use, .. } => Some((*last_use, key)),
                Entry::Pending { .. } => None,
            });
            let Some((_, key)) = oldest.min_by_key(|(last_use, _)| *last_use) else {
                return;
            };
            let key = Arc::clone(key);
            self.entries.remove(&key);
            self.num_bytes -= key.len();
        }
    }
}
