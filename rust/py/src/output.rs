//! `OutputProcessor` and what it makes of a frame. A delta's lists become Python objects only when they are asked for.

use std::sync::{Arc, Mutex, PoisonError};

use octavo_core::frames::{FrameError, decode_outbound};
use octavo_core::ids::{RequestId, TokenId};
use octavo_core::output_processor::{
    Delta as CoreDelta, OutputProcessor as CoreProcessor, StopReason, TextOptions,
};
use octavo_core::protocol::{
    EngineStats as CoreStats, FinishReason, Outbound, Refusal as CoreRefusal, RefusalKind,
    TokenLogprobs,
};
use pyo3::IntoPyObjectExt;
use pyo3::exceptions::PyValueError;
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyList, PyString};

use crate::tokenizer::Tokenizer;

/// (rank, [(token id, log probability)]) per token.
type Logprobs = Vec<(u32, Vec<(TokenId, f32)>)>;

#[pyclass(module = "octavo._core", frozen, get_all)]
struct EngineStats {
    num_steps: u64,
    num_running: u32,
    num_waiting: u32,
    num_blocks: u32,
    num_free_blocks: u32,
    num_preemptions: u64,
    num_prompt_tokens: u64,
    num_output_tokens: u64,
    prefix_queried_tokens: u64,
    prefix_hit_tokens: u64,
    num_finished: u64,
    num_aborted: u64,
    num_refused: u64,
    num_drafts: u64,
    num_draft_tokens: u64,
    num_accepted_tokens: u64,
}

impl From<CoreStats> for EngineStats {
    fn from(stats: CoreStats) -> Self {
        Self {
            num_steps: stats.num_steps,
            num_running: stats.num_running,
            num_waiting: stats.num_waiting,
            num_blocks: stats.num_blocks,
            num_free_blocks: stats.num_free_blocks,
            num_preemptions: stats.num_preemptions,
            num_prompt_tokens: stats.num_prompt_tokens,
            num_output_tokens: stats.num_output_tokens,
            prefix_queried_tokens: stats.prefix_queried_tokens,
            prefix_hit_tokens: stats.prefix_hit_tokens,
            num_finished: stats.num_finished,
            num_aborted: stats.num_aborted,
            num_refused: stats.num_refused,
            num_drafts: stats.num_drafts,
            num_draft_tokens: stats.num_draft_tokens,
            num_accepted_tokens: stats.num_accepted_tokens,
        }
    }
}

#[pyclass(module = "octavo._core", frozen)]
struct Delta(CoreDelta);

#[pymethods]
impl Delta {
    #[getter]
    fn request_id(&self) -> u64 {
        self.0.request_id.0
    }

    #[getter]
    fn index(&self) -> u32 {
        self.0.index
    }

    #[getter]
    fn text(&self) -> &str {
        &self.0.text
    }

    #[getter]
    fn token_ids<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyList>> {
        PyList::new(py, &self.0.token_ids)
    }

    #[getter]
    fn logprobs(&self) -> Option<Logprobs> {
        self.0.logprobs.as_deref().map(to_logprobs)
    }

    #[getter]
    fn prompt_logprobs(&self) -> Option<Logprobs> {
        self.0.prompt_logprobs.as_deref().map(to_logprobs)
    }

    #[getter]
    fn finish_reason<'py>(&self, py: Python<'py>) -> Option<&Bound<'py, PyString>> {
        Some(match self.0.finish_reason? {
            FinishReason::Stop => intern!(py, "stop"),
            FinishReason::Length => intern!(py, "length"),
            FinishReason::Abort => intern!(py, "abort"),
            FinishReason::Error => intern!(py, "error"),
        })
    }

    #[getter]
    fn stop_reason<'py>(&self, py: Python<'py>) -> PyResult<Option<Bound<'py, PyAny>>> {
        let reason = self.0.stop_reason.as_ref();
        let object = reason.map(|reason| match reason {
            StopReason::Token(id) => id.into_bound_py_any(py),
            StopReason::Text(text) => text.into_bound_py_any(py),
        });
        object.transpose()
    }

    #[getter]
    fn num_cached_tokens(&self) -> Option<u32> {
        self.0.num_cached_tokens
    }

    #[getter]
    fn queue_s(&self) -> Option<f32> {
        self.0.queue_s
    }

    #[getter]
    fn must_abort(&self) -> bool {
        self.0.must_abort
    }
}

fn to_logprobs(logprobs: &[TokenLogprobs]) -> Logprobs {
    logprobs
        .iter()
        .map(|token| (token.rank, token.entries.clone()))
        .collect()
}

#[pyclass(module = "octavo._core", frozen)]
struct Refusal(CoreRefusal);

#[pymethods]
impl Refusal {
    #[getter]
    fn request_id(&self) -> u64 {
        self.0.request_id.0
    }

    #[getter]
    fn kind(&self) -> &'static str {
        match self.0.kind {
            RefusalKind::Invalid => "invalid",
            RefusalKind::QueueFull => "queue_full",
            RefusalKind::Deadline => "deadline",
            RefusalKind::Draining => "draining",
        }
    }

    #[getter]
    fn message(&self) -> &str {
        &self.0.message
    }

    #[getter]
    fn retry_after_s(&self) -> f32 {
        self.0.retry_after_s
    }
}

#[pyclass(module = "octavo._core", frozen, get_all)]
struct Frame {
    kind: &'static str,
    body: Py<PyBytes>,
    call_id: u64,
    stats: Option<Py<EngineStats>>,
    deltas: Py<PyList>,
    refusals: Py<PyList>,
}

/// A frame after the work that needs no GIL.
enum Processed {
    Hello(Vec<u8>),
    Output(CoreStats, Vec<CoreDelta>, Vec<CoreRefusal>),
    Reply(u64, Vec<u8>),
}

impl Frame {
    fn new(py: Python<'_>, processed: Processed) -> PyResult<Self> {
        let mut frame = Self {
            kind: "hello",
            body: PyBytes::new(py, &[]).unbind(),
            call_id: 0,
            stats: None,
            deltas: PyList::empty(py).unbind(),
            refusals: PyList::empty(py).unbind(),
        };
        match processed {
            Processed::Hello(body) => frame.body = PyBytes::new(py, &body).unbind(),
            Processed::Reply(call_id, body) => {
                frame.kind = "reply";
                frame.call_id = call_id;
                frame.body = PyBytes::new(py, &body).unbind();
            }
            Processed::Output(stats, deltas, refusals) => {
                frame.kind = "output";
                frame.stats = Some(Py::new(py, EngineStats::from(stats))?);
                frame.deltas = PyList::new(py, deltas.into_iter().map(Delta))?.unbind();
                frame.refusals = PyList::new(py, refusals.into_iter().map(Refusal))?.unbind();
            }
        }
        Ok(frame)
    }
}

#[pyclass(module = "octavo._core", frozen)]
struct OutputProcessor(Mutex<CoreProcessor>);

#[pymethods]
impl OutputProcessor {
    #[new]
    fn new(tokenizer: Option<&Bound<'_, Tokenizer>>, eos_token_ids: Vec<TokenId>) -> Self {
        let pieces = tokenizer.map(|tokenizer| Arc::clone(tokenizer.get().core.pieces()));
        Self(Mutex::new(CoreProcessor::new(pieces, eos_token_ids)))
    }

    #[pyo3(signature = (
        request_id, *, n, prompt_token_ids, stop, include_stop_str_in_output, skip_special_tokens, detokenize,
        min_tokens = 0,
    ))]
    fn add(
        &self,
        request_id: u64,
        n: u32,
        prompt_token_ids: Vec<TokenId>,
        stop: Vec<String>,
        include_stop_str_in_output: bool,
        skip_special_tokens: bool,
        detokenize: bool,
        min_tokens: u32,
    ) {
        let options = TextOptions {
            stop,
            min_tokens,
            include_stop_str_in_output,
            skip_special_tokens,
            detokenize,
        };
        self.lock(|core| core.add(RequestId(request_id), n, &prompt_token_ids, options));
    }

    fn process(&self, py: Python<'_>, body: &[u8]) -> PyResult<Frame> {
        let processed = py.detach(|| self.decode(body));
        Frame::new(
            py,
            processed.map_err(|error| PyValueError::new_err(error.to_string()))?,
        )
    }

    fn remove(&self, request_id: u64) {
        self.lock(|core| core.remove(RequestId(request_id)));
    }

    fn __len__(&self) -> usize {
        self.lock(|core| core.len())
    }
}

impl OutputProcessor {
    fn decode(&self, body: &[u8]) -> Result<Processed, FrameError> {
        Ok(match decode_outbound(body)? {
            Outbound::Hello(body) => Processed::Hello(body),
            Outbound::Reply { call_id, body } => Processed::Reply(call_id, body),
            Outbound::Output(mut frame) => {
                let deltas = self.lock(|core| core.process(&mut frame));
                Processed::Output(frame.stats, deltas, frame.refusals)
            }
        })
    }

    /// Whoever holds the lock never waits for the GIL.
    fn lock<T>(&self, action: impl FnOnce(&mut CoreProcessor) -> T) -> T {
        action(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

pub fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<EngineStats>()?;
    module.add_class::<Delta>()?;
    module.add_class::<Refusal>()?;
    module.add_class::<Frame>()?;
    module.add_class::<OutputProcessor>()
}
