//! `Core` and `CoreConfig`: the control plane behind a lock that is held without the GIL when a step is long.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use octavo_core::config::{self, Policy};
use octavo_core::core::{Call, PromptLogprobs};
use octavo_core::errors::{ConfigError, StepError};
use octavo_core::frames::{decode_inbound, encode_outbound};
use octavo_core::groups::Keep;
use octavo_core::ids::{ClientId, SlotId};
use octavo_core::mailbox::{Inbox, Outbox};
use octavo_core::media::OutputBytes;
use octavo_core::protocol::EngineStats;
use octavo_core::speculation::SpeculationConfig;
use octavo_core::step_sizes::StepSizes;
use octavo_core::{core, plan};
use octavo_ipc::Server;
use pyo3::buffer::PyBuffer;
use pyo3::exceptions::{PyRuntimeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict};

use crate::buffers::{IntBuffer, check_disjoint};
use crate::plan::{ArenaLayout, NewRow, OutputLayout, PlacedOutputs, PromptLogprobRow, StepPlan};

/// From so many running sequences on, a step takes long enough (20 us and more) to let other Python threads run.
const DETACH_FROM: u32 = 64;

/// Longest sleep while grammars are being compiled: their time limits must be looked at.
const COMPILING_WAIT: Duration = Duration::from_secs(1);

/// After such a sleep the engine is thought to be idle: time to get ready for structured outputs.
const IDLE_BEFORE_WARMING: Duration = Duration::from_millis(500);

fn config_error(error: ConfigError) -> PyErr {
    PyValueError::new_err(error.to_string())
}

/// Attributes of `octavo.speculation.Speculation`.
#[derive(FromPyObject)]
struct SpeculationFields {
    num_tokens: u32,
    lookup_min: u32,
    lookup_max: u32,
    is_measured: bool,
}

impl From<SpeculationFields> for SpeculationConfig {
    fn from(fields: SpeculationFields) -> Self {
        Self {
            num_tokens: fields.num_tokens,
            lookup_min: fields.lookup_min,
            lookup_max: fields.lookup_max,
            is_measured: fields.is_measured,
        }
    }
}

/// What is left out is off or without limits.
#[pyclass(frozen, module = "octavo._core")]
struct CoreConfig {
    inner: config::CoreConfig,
}

#[pymethods]
impl CoreConfig {
    #[new]
    #[pyo3(signature = (
        *, block_size, num_blocks, max_num_seqs, max_num_batched_tokens, max_model_len, vocab_size,
        max_queued_requests = 1_073_741_824, max_queued_tokens = 1_125_899_906_842_624, policy = "fcfs",
        enable_prefix_caching = false, long_prefill_token_threshold = 0, max_itl_ms = Some(0.0), depth = 1,
        max_logprobs = 0, hash_seed = 1, speculation = None, groups = None,
        step_sizes = None, plans_late = false, output_bytes = None,
    ))]
    fn new(
        block_size: u32,
        num_blocks: u32,
        max_num_seqs: u32,
        max_num_batched_tokens: u32,
        max_model_len: u32,
        vocab_size: u32,
        max_queued_requests: u64,
        max_queued_tokens: u64,
        policy: &str,
        enable_prefix_caching: bool,
        long_prefill_token_threshold: u32,
        max_itl_ms: Option<f64>,
        depth: u32,
        max_logprobs: u32,
        hash_seed: u64,
        speculation: Option<SpeculationFields>,
        groups: Option<Vec<(String, u32)>>,
        step_sizes: Option<Vec<u32>>,
        plans_late: bool,
        output_bytes: Option<(u64, u64)>,
    ) -> PyResult<Self> {
        let groups = groups.unwrap_or_else(|| vec![("all".to_owned(), 0)]);
        let groups = groups
            .iter()
            .map(|(name, size)| Keep::from_name(name, *size));
        let inner = config::CoreConfig {
            block_size,
            num_blocks,
            groups: groups.collect::<Result<_, _>>().map_err(config_error)?,
            output_bytes: output_bytes
                .map(|(of_token, of_block)| OutputBytes { of_token, of_block }),
            max_num_seqs,
            max_num_batched_tokens,
            max_model_len,
            vocab_size,
            max_queued_requests,
            max_queued_tokens,
            policy: Policy::from_name(policy).map_err(config_error)?,
            enable_prefix_caching,
            long_prefill_token_threshold,
            max_itl_ms,
            plans_late,
            step_sizes: StepSizes::new(step_sizes.unwrap_or_default()),
            depth,
            max_logprobs,
            hash_seed,
            speculation: speculation.map(Into::into),
        };
        inner.validate().map_err(config_error)?;
        Ok(Self { inner })
    }

    /// Positions that one sequence can have when the cache is its own.
    #[getter]
    fn num_positions(&self) -> u32 {
        self.inner.num_positions()
    }
}

/// The control plane and the buffers that it fills and reads.
struct Engine {
    core: core::Core,
    arenas: Vec<IntBuffer>,
    outputs: Vec<IntBuffer>,
    /// Rows of words a slot, one behind each token that may be drafted.
    masks: Option<IntBuffer>,
}

/// What can go wrong in a step.
enum Failure {
    NotRegistered,
    NoMasks,
    NoSuchOutput(usize),
    Step(StepError),
    /// An invariant broke; the engine can't go on, but it can still be dumped.
    Broken(String),
}

impl From<Failure> for PyErr {
    fn from(failure: Failure) -> Self {
        match failure {
            Failure::NotRegistered => PyValueError::new_err("step: no arenas are registered"),
            Failure::NoMasks => PyValueError::new_err("fill_masks: no mask buffer is registered"),
            Failure::NoSuchOutput(index) => {
                PyValueError::new_err(format!("step: there is no output arena {index}"))
            }
            Failure::Step(error) => PyRuntimeError::new_err(error.to_string()),
            Failure::Broken(message) => {
                PyRuntimeError::new_err(format!("step: a broken invariant: {message}"))
            }
        }
    }
}

impl Engine {
    fn fill_masks(&mut self, outputs: &[usize]) -> Result<(), Failure> {
        let mut arenas = Vec::with_capacity(outputs.len());
        for index in outputs {
            let buffer = self.outputs.get(*index);
            arenas.push(buffer.ok_or(Failure::NoSuchOutput(*index))?.ints());
        }
        let masks = self.masks.as_mut().ok_or(Failure::NoMasks)?;
        self.core
            .fill_masks(&arenas, masks.ints_mut())
            .map_err(Failure::Step)
    }

    fn step(&mut self, output: Option<usize>) -> Result<plan::StepPlan, Failure> {
        let output = match output {
            None => None,
            Some(index) => {
                let buffer = self.outputs.get(index);
                Some(buffer.ok_or(Failure::NoSuchOutput(index))?.ints())
            }
        };
        let arena = self.core.next_arena() as usize;
        let arena = self.arenas.get_mut(arena).ok_or(Failure::NotRegistered)?;
        self.core
            .step(output, arena.ints_mut())
            .map_err(Failure::Step)
    }
}

#[pyclass(frozen, module = "octavo._core")]
struct Core {
    engine: Mutex<Engine>,
    inbox: Arc<Inbox>,
    outbox: Arc<Outbox>,
    server: Mutex<Option<Server>>,
    #[pyo3(get)]
    arena_layout: ArenaLayout,
    #[pyo3(get)]
    output_layout: OutputLayout,
}

/// After a panic the state may be broken, but a crash report must still be able to read it.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Core {
    /// A panic becomes an ordinary error: the loop reports it with a dump instead of tearing the process down.
    fn guarded<T>(
        &self,
        work: impl FnOnce(&mut Engine) -> Result<T, Failure>,
    ) -> Result<T, Failure> {
        let work = AssertUnwindSafe(|| work(&mut lock(&self.engine)));
        catch_unwind(work).unwrap_or_else(|panic| {
            let text = panic.downcast_ref::<String>().cloned();
            let literal = || panic.downcast_ref::<&str>().map(ToString::to_string);
            Err(Failure::Broken(text.or_else(literal).unwrap_or_default()))
        })
    }
}

/// One numeric buffer as a vector.
fn values<T: pyo3::buffer::Element + Copy>(
    object: &Bound<'_, PyAny>,
    what: &str,
) -> PyResult<Vec<T>> {
    PyBuffer::<T>::get(object)
        .and_then(|buffer| buffer.to_vec(object.py()))
        .map_err(|error| PyValueError::new_err(format!("{what}: {error}")))
}

#[pymethods]
impl Core {
    #[new]
    fn new(config: &CoreConfig) -> PyResult<Self> {
        let core = core::Core::new(config.inner.clone()).map_err(config_error)?;
        Ok(Self {
            inbox: core.inbox(),
            outbox: core.outbox(),
            server: Mutex::new(None),
            arena_layout: (&core.arena_layout()).into(),
            output_layout: core.output_layout().into(),
            engine: Mutex::new(Engine {
                core,
                arenas: Vec::new(),
                outputs: Vec::new(),
                masks: None,
            }),
        })
    }

    fn register(
        &self,
        arenas: Vec<Bound<'_, PyAny>>,
        outputs: Vec<Bound<'_, PyAny>>,
    ) -> PyResult<()> {
        let mut engine = lock(&self.engine);
        let needed = engine.core.config().depth as usize + 1;
        for (what, given) in [("arenas", arenas.len()), ("outputs", outputs.len())] {
            if given < needed {
                return Err(PyValueError::new_err(format!(
                    "register: {given} {what}, at least {needed} (depth + 1) are needed"
                )));
            }
        }
        let arena_ints = engine.core.arena_layout().num_ints;
        let output_ints = engine.core.output_layout().num_ints;
        let mut buffers = Vec::with_capacity(arenas.len() + outputs.len());
        for arena in &arenas {
            buffers.push(IntBuffer::new(arena, arena_ints, "register: an arena")?);
        }
        for output in &outputs {
            buffers.push(IntBuffer::new(
                output,
                output_ints,
                "register: an output arena",
            )?);
        }
        check_disjoint(&buffers)?;
        engine.core.set_num_arenas(arenas.len() as u32);
        engine.outputs = buffers.split_off(arenas.len());
        engine.arenas = buffers;
        Ok(())
    }

    #[pyo3(signature = (output))]
    fn step(&self, py: Python<'_>, output: Option<usize>) -> PyResult<StepPlan> {
        let is_long = {
            let core = &lock(&self.engine).core;
            core.may_hold() || core.num_running() >= DETACH_FROM
        };
        // The lock is let go before the GIL is taken again: whoever waits for the lock may hold the GIL.
        let plan = if is_long {
            py.detach(|| self.guarded(|engine| engine.step(output)))
        } else {
            self.guarded(|engine| engine.step(output))
        };
        StepPlan::new(py, &plan?)
    }

    #[getter]
    fn mask_words(&self) -> u32 {
        lock(&self.engine).core.mask_words()
    }

    fn register_masks(&self, masks: &Bound<'_, PyAny>) -> PyResult<()> {
        let mut engine = lock(&self.engine);
        let config = engine.core.config();
        let num_rows = config.max_num_seqs * (1 + config.max_drafted());
        let num_ints = num_rows * engine.core.mask_words();
        let buffer = IntBuffer::new(masks, num_ints, "register_masks: the buffer")?;
        engine.masks = Some(buffer);
        Ok(())
    }

    fn fill_masks(&self, py: Python<'_>, outputs: Vec<usize>) -> PyResult<()> {
        py.detach(|| self.guarded(|engine| engine.fill_masks(&outputs)))?;
        Ok(())
    }

    fn use_tokenizer(&self, path: PathBuf, eos_token_ids: Vec<u32>) {
        lock(&self.engine).core.use_tokenizer(path, eos_token_ids);
    }

    fn put_prompt_logprobs(
        &self,
        slot: u32,
        ids: &Bound<'_, PyAny>,
        values: &Bound<'_, PyAny>,
        ranks: &Bound<'_, PyAny>,
    ) -> PyResult<()> {
        let ids = self::values::<i32>(ids, "ids")?;
        let values = self::values::<f32>(values, "values")?;
        let ranks = self::values::<i32>(ranks, "ranks")?;
        let logprobs = PromptLogprobs {
            ids: &ids,
            values: &values,
            ranks: &ranks,
        };
        lock(&self.engine)
            .core
            .put_prompt_logprobs(SlotId(slot), logprobs)
            .map_err(PyValueError::new_err)
    }

    fn add(&self, frame: &[u8]) -> PyResult<()> {
        let message =
            decode_inbound(frame).map_err(|error| PyValueError::new_err(error.to_string()))?;
        self.inbox.offer(ClientId::LOCAL, message, &self.outbox);
        Ok(())
    }

    fn take_frames<'py>(&self, py: Python<'py>) -> Vec<Bound<'py, PyBytes>> {
        let messages = self.outbox.take_local();
        messages
            .iter()
            .map(|message| PyBytes::new(py, &encode_outbound(message)))
            .collect()
    }

    fn has_work(&self) -> bool {
        lock(&self.engine).core.has_work()
    }

    fn wait(&self, py: Python<'_>, timeout_s: f64) -> PyResult<bool> {
        let timeout = Duration::try_from_secs_f64(timeout_s)
            .map_err(|error| PyValueError::new_err(format!("timeout_s: {error}")))?;
        let is_compiling = lock(&self.engine).core.is_compiling();
        let timeout = if is_compiling {
            timeout.min(COMPILING_WAIT)
        } else {
            timeout
        };
        Ok(py.detach(|| {
            let first = timeout.min(IDLE_BEFORE_WARMING);
            if self.inbox.wait(first) {
                return true;
            }
            if first < timeout {
                lock(&self.engine).core.warm_grammars();
            }
            self.inbox.wait(timeout.saturating_sub(first))
        }))
    }

    fn take_calls<'py>(&self, py: Python<'py>) -> Vec<(u32, u64, Bound<'py, PyBytes>)> {
        let calls: Vec<Call> = lock(&self.engine).core.take_calls();
        calls
            .into_iter()
            .map(|call| (call.client.0, call.call_id, PyBytes::new(py, &call.body)))
            .collect()
    }

    fn reply(&self, client: u32, call_id: u64, body: &[u8]) {
        lock(&self.engine)
            .core
            .reply(ClientId(client), call_id, body.to_vec());
    }

    fn drain(&self) {
        lock(&self.engine).core.drain();
    }

    fn reset_prefix_cache(&self) -> bool {
        lock(&self.engine).core.reset_prefix_cache()
    }

    fn stats<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let stats = lock(&self.engine).core.stats();
        let dict = PyDict::new(py);
        for (name, value) in entries(&stats) {
            dict.set_item(name, value)?;
        }
        Ok(dict)
    }

    fn check(&self) -> PyResult<()> {
        lock(&self.engine)
            .core
            .check()
            .map_err(PyRuntimeError::new_err)
    }

    fn dump(&self) -> String {
        lock(&self.engine).core.dump()
    }

    fn serve(&self, path: &str, hello: &[u8]) -> PyResult<()> {
        let server = Server::start(
            Path::new(path),
            hello.to_vec(),
            Arc::clone(&self.inbox),
            Arc::clone(&self.outbox),
        )?;
        *lock(&self.server) = Some(server);
        Ok(())
    }

    fn close(&self, py: Python<'_>) {
        py.detach(|| {
            if let Some(mut server) = lock(&self.server).take() {
                server.close();
            }
        });
    }
}

fn entries(stats: &EngineStats) -> [(&'static str, u64); 16] {
    [
        ("num_steps", stats.num_steps),
        ("num_running", stats.num_running.into()),
        ("num_waiting", stats.num_waiting.into()),
        ("num_blocks", stats.num_blocks.into()),
        ("num_free_blocks", stats.num_free_blocks.into()),
        ("num_preemptions", stats.num_preemptions),
        ("num_prompt_tokens", stats.num_prompt_tokens),
        ("num_output_tokens", stats.num_output_tokens),
        ("prefix_queried_tokens", stats.prefix_queried_tokens),
        ("prefix_hit_tokens", stats.prefix_hit_tokens),
        ("num_finished", stats.num_finished),
        ("num_aborted", stats.num_aborted),
        ("num_refused", stats.num_refused),
        ("num_drafts", stats.num_drafts),
        ("num_draft_tokens", stats.num_draft_tokens),
        ("num_accepted_tokens", stats.num_accepted_tokens),
    ]
}

pub fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<CoreConfig>()?;
    module.add_class::<ArenaLayout>()?;
    module.add_class::<OutputLayout>()?;
    module.add_class::<NewRow>()?;
    module.add_class::<PromptLogprobRow>()?;
    module.add_class::<PlacedOutputs>()?;
    module.add_class::<StepPlan>()?;
    module.add_class::<Core>()
}
