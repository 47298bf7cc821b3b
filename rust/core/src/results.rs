//! The output arena of one step, as the runner filled it: read and checked. What becomes of it: `commit`.

use crate::arena::OutputLayout;
use crate::ids::TokenId;
use crate::protocol::TokenLogprobs;

/// The output arena of one step.
pub struct Results<'a> {
    pub ints: &'a [i32],
    pub layout: &'a OutputLayout,
    pub vocab_size: u32,
}

impl Results<'_> {
    /// What a row gained: of its draft what was right, and one token behind it.
    pub fn tokens(&self, row: usize, draft: &[TokenId]) -> Result<&[i32], String> {
        let (width, max) = (self.layout.max_sampled as usize, 1 + draft.len());
        let count = self.ints[self.layout.count as usize + row];
        if count < 1 || count as usize > max {
            return Err(format!("{count} tokens sampled, not within 1 and {max}"));
        }
        let start = self.layout.sampled as usize + row * width;
        let token_ids = &self.ints[start..start + count as usize];
        let same = |(id, drafted): &(&i32, &TokenId)| **id == drafted.cast_signed();
        if token_ids.iter().zip(draft).filter(same).count() + 1 < token_ids.len() {
            return Err(format!("{token_ids:?} were sampled behind {draft:?}"));
        }
        match token_ids.iter().find(|id| !self.is_token(**id)) {
            Some(id) => Err(format!(
                "token {id} is not in a vocabulary of {}",
                self.vocab_size
            )),
            None => Ok(token_ids),
        }
    }

    fn is_token(&self, id: i32) -> bool {
        u32::try_from(id).is_ok_and(|id| id < self.vocab_size)
    }

    /// The logprobs of a row's `nth` token, with `num_top` top ones.
    pub fn logprobs(&self, row: usize, nth: usize, num_top: usize) -> TokenLogprobs {
        let layout = self.layout;
        let place = row * layout.max_sampled as usize + nth;
        let start = place * (1 + layout.max_logprobs as usize);
        let ids = &self.ints[layout.logprob_id as usize + start..][..=num_top];
        let values = &self.ints[layout.logprob_value as usize + start..][..=num_top];
        TokenLogprobs {
            rank: self.ints[layout.rank as usize + place] as u32,
            entries: ids
                .iter()
                .zip(values)
                .map(|(id, bits)| (*id as TokenId, f32::from_bits(*bits as u32)))
                .collect(),
        }
    }
}
