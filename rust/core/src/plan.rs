//! What one step runs: the plan that goes to the runner, and the record of its rows that waits for the result.

use std::fmt;
use std::sync::Arc;
use std::time::Instant;

use crate::arena::Totals;
use crate::ids::{SeqIdx, SlotId, TokenId};
use crate::media::PlacedOutputs;
use crate::step_cost::StepShape;

/// One row of a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Row {
    pub seq: SeqIdx,
    pub slot: SlotId,
    /// Positions `start .. start + len` are computed.
    pub start: u32,
    pub len: u32,
    /// The first token of a decode row as the arena shows it.
    pub token: i32,
    /// The last so many of the positions hold drafted tokens.
    pub num_drafted: u32,
}

/// A planned step whose result is not known yet. The first `num_sampled` rows gain tokens.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct InFlight {
    pub step_id: u64,
    pub rows: Vec<Row>,
    /// The drafted tokens of its rows, one row after the other.
    pub drafts: Vec<TokenId>,
    pub num_sampled: u32,
    /// Some sampled row has a grammar.
    pub needs_masks: bool,
    pub planned: Instant,
    pub shape: StepShape,
}

impl InFlight {
    /// The rows that gain tokens, with their drafts.
    pub fn sampled_rows(&self) -> impl Iterator<Item = (&Row, &[TokenId])> {
        let mut drafts = self.drafts.as_slice();
        self.rows[..self.num_sampled as usize]
            .iter()
            .map(move |row| {
                let draft;
                (draft, drafts) = drafts.split_at(row.num_drafted as usize);
                (row, draft)
            })
    }
}

/// A sequence that got its slot in this step.
#[derive(Clone, PartialEq, Eq)]
pub struct NewRow {
    pub slot: SlotId,
    pub params: Arc<[u8]>,
    pub index: u32,
    pub token_ids: Vec<TokenId>,
    pub num_prompt_tokens: u32,
    /// `AddRequest::media_data`.
    pub media_data: Arc<[u8]>,
}

/// For a crash report: images may be large, and are nobody's business there.
impl fmt::Debug for NewRow {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("NewRow")
            .field("slot", &self.slot)
            .field("index", &self.index)
            .field("token_ids", &self.token_ids)
            .field("num_prompt_tokens", &self.num_prompt_tokens)
            .field("media_bytes", &self.media_data.len())
            .finish_non_exhaustive()
    }
}

/// A row whose prompt tokens' logprobs are wanted; see `_core.pyi`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PromptLogprobRow {
    pub row: u32,
    pub slot: SlotId,
    pub token_start: u32,
    pub num_top: u32,
    /// The prompt tokens that the row's hidden states predict.
    pub target_ids: Vec<TokenId>,
}

/// The plan of one step; the arrays are in arena number `arena`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct StepPlan {
    pub step_id: u64,
    pub arena: u32,
    pub totals: Totals,
    pub needs_logprobs: bool,
    pub new_rows: Vec<NewRow>,
    pub prompt_logprob_rows: Vec<PromptLogprobRow>,
    /// Of images that the rows reach; those that found no room are not among them.
    pub outputs: Vec<PlacedOutputs>,
    pub has_calls: bool,
    /// Sampled rows are constrained: masks must be filled before sampling.
    pub needs_masks: bool,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_crash_report_shows_no_images() {
        let row = NewRow {
            slot: SlotId(3),
            params: Arc::from(*b"{}"),
            index: 0,
            token_ids: vec![5],
            num_prompt_tokens: 1,
            media_data: Arc::from(vec![207; 1000]),
        };
        let shown = format!("{row:?}");
        assert!(shown.contains("media_bytes: 1000"));
        assert!(!shown.contains("207"));
    }
}
