//! Client frames, as bodies without the length prefix.

use octavo_core::frames::encode_inbound;
use octavo_core::ids::{RequestId, TenantId, TokenId};
use octavo_core::media::MediaSpan;
use octavo_core::protocol::{Abort, AddRequest, Inbound};
use pyo3::prelude::*;
use pyo3::types::PyBytes;

#[pyfunction]
#[pyo3(signature = (
    *, request_id, prompt_token_ids, n, max_tokens, min_tokens, stop_token_ids, priority, cache_salt, deadline_s,
    logprobs, prompt_logprobs, params, tenant = 0, weight = 1000, grammar = None, media = Vec::new(), media_data = None,
))]
fn encode_add<'py>(
    py: Python<'py>,
    request_id: u64,
    prompt_token_ids: Vec<TokenId>,
    n: u32,
    max_tokens: u32,
    min_tokens: u32,
    stop_token_ids: Vec<TokenId>,
    priority: i32,
    cache_salt: &[u8],
    deadline_s: f64,
    logprobs: i32,
    prompt_logprobs: i32,
    params: &[u8],
    tenant: u64,
    weight: u32,
    grammar: Option<&[u8]>,
    media: Vec<(u32, u32, u128, bool)>,
    media_data: Option<&[u8]>,
) -> Bound<'py, PyBytes> {
    encode(
        py,
        &Inbound::Add(AddRequest {
            request_id: RequestId(request_id),
            prompt_token_ids,
            n,
            max_tokens,
            min_tokens,
            stop_token_ids,
            priority,
            tenant: TenantId(tenant),
            weight,
            cache_salt: cache_salt.to_vec(),
            deadline_s,
            logprobs,
            prompt_logprobs,
            grammar: grammar.unwrap_or_default().to_vec(),
            params: params.to_vec(),
            media: media.into_iter().map(media_span).collect(),
            media_data: media_data.unwrap_or_default().to_vec(),
        }),
    )
}

fn media_span((start, len, digest, is_whole): (u32, u32, u128, bool)) -> MediaSpan {
    MediaSpan {
        start,
        len,
        digest,
        is_whole,
    }
}

#[pyfunction]
#[pyo3(signature = (request_id, index = None))]
fn encode_abort(py: Python<'_>, request_id: u64, index: Option<u32>) -> Bound<'_, PyBytes> {
    let request_id = RequestId(request_id);
    encode(py, &Inbound::Abort(Abort { request_id, index }))
}

#[pyfunction]
fn encode_call<'py>(py: Python<'py>, call_id: u64, body: &[u8]) -> Bound<'py, PyBytes> {
    let body = body.to_vec();
    encode(py, &Inbound::Call { call_id, body })
}

fn encode<'py>(py: Python<'py>, message: &Inbound) -> Bound<'py, PyBytes> {
    PyBytes::new(py, &encode_inbound(message))
}

pub fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_function(wrap_pyfunction!(encode_add, module)?)?;
    module.add_function(wrap_pyfunction!(encode_abort, module)?)?;
    module.add_function(wrap_pyfunction!(encode_call, module)?)
}
