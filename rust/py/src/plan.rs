//! Plain data that a step hands to Python: layouts and plans.

use octavo_core::{arena, media, plan};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyList};

/// A class with the fields named, as they are in the control plane's own layout.
macro_rules! layout {
    ($name:ident { $($field:ident),* $(,)? }) => {
        #[pyclass(frozen, get_all, module = "octavo._core")]
        #[derive(Clone, Copy)]
        pub struct $name {
            $(pub $field: u32,)*
        }

        impl From<&arena::$name> for $name {
            fn from(layout: &arena::$name) -> Self {
                Self { $($field: layout.$field,)* }
            }
        }
    };
}

layout!(ArenaLayout {
    num_ints,
    max_rows,
    max_tokens,
    max_block_updates,
    max_block_copies,
    max_new_rows,
    num_groups,
    header,
    row_slot,
    query_start,
    kv_len,
    new_row,
    block_copy,
    block_update,
    token_id,
    position,
    num_drafted,
});
layout!(OutputLayout {
    num_ints,
    max_rows,
    max_sampled,
    max_logprobs,
    sampled,
    count,
    rank,
    logprob_id,
    logprob_value,
});

#[pyclass(frozen, get_all, module = "octavo._core")]
pub struct NewRow {
    pub slot: u32,
    pub params: Py<PyBytes>,
    pub index: u32,
    pub token_ids: Py<PyBytes>,
    pub num_prompt_tokens: u32,
    pub media_data: Py<PyBytes>,
}

#[pyclass(frozen, get_all, module = "octavo._core")]
pub struct PromptLogprobRow {
    pub row: u32,
    pub slot: u32,
    pub token_start: u32,
    pub num_tokens: u32,
    pub num_top: u32,
    pub target_ids: Py<PyBytes>,
}

#[pyclass(frozen, get_all, module = "octavo._core")]
pub struct PlacedOutputs {
    pub digest: Py<PyBytes>,
    pub blocks: Vec<u32>,
    pub is_filled: bool,
}

#[pyclass(frozen, get_all, module = "octavo._core")]
pub struct StepPlan {
    pub step_id: u64,
    pub arena: u32,
    pub num_rows: u32,
    pub num_decode_rows: u32,
    pub num_sampled: u32,
    pub num_tokens: u32,
    pub max_query_len: u32,
    pub max_kv_len: u32,
    pub num_block_updates: u32,
    pub num_block_copies: u32,
    pub num_new_rows: u32,
    pub num_draft_tokens: u32,
    pub needs_logprobs: bool,
    pub new_rows: Py<PyList>,
    pub prompt_logprob_rows: Py<PyList>,
    pub outputs: Py<PyList>,
    pub has_calls: bool,
    pub needs_masks: bool,
}

/// int32 little-endian.
fn int_bytes(py: Python<'_>, token_ids: &[u32]) -> Py<PyBytes> {
    let bytes: Vec<u8> = token_ids.iter().flat_map(|id| id.to_le_bytes()).collect();
    PyBytes::new(py, &bytes).unbind()
}

fn new_row(py: Python<'_>, row: &plan::NewRow) -> NewRow {
    NewRow {
        slot: row.slot.0,
        params: PyBytes::new(py, &row.params).unbind(),
        index: row.index,
        token_ids: int_bytes(py, &row.token_ids),
        num_prompt_tokens: row.num_prompt_tokens,
        media_data: PyBytes::new(py, &row.media_data).unbind(),
    }
}

fn prompt_logprob_row(py: Python<'_>, row: &plan::PromptLogprobRow) -> PromptLogprobRow {
    PromptLogprobRow {
        row: row.row,
        slot: row.slot.0,
        token_start: row.token_start,
        num_tokens: row.target_ids.len() as u32,
        num_top: row.num_top,
        target_ids: int_bytes(py, &row.target_ids),
    }
}

fn placed_outputs(py: Python<'_>, outputs: &media::PlacedOutputs) -> PlacedOutputs {
    PlacedOutputs {
        digest: PyBytes::new(py, &outputs.digest.to_le_bytes()).unbind(),
        blocks: outputs.blocks.iter().map(|block| block.0).collect(),
        is_filled: outputs.is_filled,
    }
}

impl StepPlan {
    pub fn new(py: Python<'_>, plan: &plan::StepPlan) -> PyResult<Self> {
        let new_rows = PyList::empty(py);
        for row in &plan.new_rows {
            new_rows.append(new_row(py, row))?;
        }
        let prompt_logprob_rows = PyList::empty(py);
        for row in &plan.prompt_logprob_rows {
            prompt_logprob_rows.append(prompt_logprob_row(py, row))?;
        }
        let outputs = PyList::empty(py);
        for placed in &plan.outputs {
            outputs.append(placed_outputs(py, placed))?;
        }
        let totals = &plan.totals;
        Ok(Self {
            step_id: plan.step_id,
            arena: plan.arena,
            num_rows: totals.num_rows,
            num_decode_rows: totals.num_decode_rows,
            num_sampled: totals.num_sampled,
            num_tokens: totals.num_tokens,
            max_query_len: totals.max_query_len,
            max_kv_len: totals.max_kv_len,
            num_block_updates: totals.num_block_updates,
            num_block_copies: totals.num_block_copies,
            num_new_rows: totals.num_new_rows,
            num_draft_tokens: totals.num_draft_tokens,
            needs_logprobs: plan.needs_logprobs,
            new_rows: new_rows.unbind(),
            prompt_logprob_rows: prompt_logprob_rows.unbind(),
            outputs: outputs.unbind(),
            has_calls: plan.has_calls,
            needs_masks: plan.needs_masks,
        })
    }
}
