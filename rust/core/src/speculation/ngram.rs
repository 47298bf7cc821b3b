//! Where a sequence's newest tokens have come before: prompt lookup (Saxena 2023, "Prompt lookup decoding"), with a table
//! and chains as LZ77 coders keep them, so that a look-up costs the same in a long text as in a short one.
//!
//! Places are ends: `end` stands for the tokens right before number `end`, which `end` itself followed.

use crate::ids::TokenId;

/// Places that are compared in one look-up, the newest first.
const MAX_CANDIDATES: usize = 16;
/// Entries of the smallest table.
const MIN_ENTRIES: usize = 256;

/// The places of all runs of `min` tokens in one sequence, by hash.
#[derive(Debug)]
pub struct NgramIndex {
    min: usize,
    max: usize,
    /// By hash, a power of two of entries: the newest end; 0 = none.
    heads: Vec<u32>,
    /// Of the end `min + i`: an older one with the same hash; 0 = none.
    older: Vec<u32>,
}

impl NgramIndex {
    /// Runs of `min` tokens are found, and compared up to `max`. 1 <= min <= max.
    pub fn new(min: u32, max: u32) -> Self {
        Self {
            min: min as usize,
            max: max as usize,
            heads: vec![0; MIN_ENTRIES],
            older: Vec::new(),
        }
    }

    /// Appends to `draft` what followed the newest of `len` tokens where they came before: numbers `skip` to `skip + num`
    /// behind them. Nothing when they never came. `token(i)` is token `i`; tokens never change between calls.
    pub fn look_up(
        &mut self,
        len: usize,
        token: impl Fn(usize) -> TokenId,
        (skip, num): (usize, usize),
        draft: &mut Vec<TokenId>,
    ) {
        if len <= self.min || num == 0 {
            return;
        }
        self.extend(len - 1, &token);
        let Some(end) = self.longest(len, &token) else {
            return;
        };
        // What would be behind the last token is the draft's own beginning: a period goes on.
        let period = len - end;
        draft.extend((skip..skip + num).map(|at| token(end + at % period)));
    }

    /// The place before `len` whose tokens match the longest; the newest of equal ones.
    fn longest(&self, len: usize, token: &impl Fn(usize) -> TokenId) -> Option<usize> {
        let matching = |end: usize| {
            let most = self.max.min(end);
            (0..most)
                .take_while(|back| token(end - 1 - back) == token(len - 1 - back))
                .count()
        };
        let mut best = None;
        let mut longest = self.min - 1;
        let mut end = self.heads[self.slot(len, token)] as usize;
        for _ in 0..MAX_CANDIDATES {
            if end == 0 || longest >= self.max {
                break;
            }
            let length = matching(end);
            if length > longest {
                (best, longest) = (Some(end), length);
            }
            end = self.older[end - self.min] as usize;
        }
        best
    }

    /// Takes in the ends up to `last`.
    fn extend(&mut self, last: usize, token: &impl Fn(usize) -> TokenId) {
        if last > self.heads.len() {
            let entries = (2 * last).next_power_of_two();
            self.heads = vec![0; entries];
            self.older.clear();
        }
        for end in self.min + self.older.len()..=last {
            let slot = self.slot(end, token);
            self.older.push(self.heads[slot]);
            self.heads[slot] = end as u32;
        }
    }

    /// Place of the `min` tokens before `end` in the table.
    fn slot(&self, end: usize, token: &impl Fn(usize) -> TokenId) -> usize {
        let mix = |hash: u64, at| {
            (hash ^ u64::from(token(at)))
                .wrapping_mul(0x9e37_79b9_7f4a_7c15)
                .rotate_left(23)
        };
        let hash = (end - self.min..end).fold(0x51, mix);
        (hash.wrapping_mul(0xd6e8_feb8_6659_fd93) >> 32) as usize & (self.heads.len() - 1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn draft(index: &mut NgramIndex, tokens: &[u32], skip: usize, num: usize) -> Vec<u32> {
        let mut found = vec![77];
        index.look_up(tokens.len(), |at| tokens[at], (skip, num), &mut found);
        found.split_off(1)
    }

    fn once(tokens: &[u32], num: usize) -> Vec<u32> {
        draft(&mut NgramIndex::new(2, 4), tokens, 0, num)
    }

    #[test]
    fn what_followed_follows() {
        assert_eq!(once(&[1, 2, 3, 4, 9, 1, 2], 3), [3, 4, 9]);
        assert_eq!(once(&[1, 2, 3, 4], 3), [0; 0]);
        assert_eq!(once(&[5, 5], 3), [0; 0]);
        // Two places: the longer match wins, though it is older.
        assert_eq!(once(&[7, 1, 2, 3, 8, 1, 2, 4, 7, 1, 2], 1), [3]);
        // Equal ones: the newer.
        assert_eq!(once(&[1, 2, 3, 1, 2, 4, 1, 2], 1), [4]);
    }

    #[test]
    fn a_period_goes_on() {
        assert_eq!(once(&[1, 2, 3, 1, 2, 3, 1], 7), [2, 3, 1, 2, 3, 1, 2]);
        assert_eq!(once(&[6, 6, 6], 4), [6; 4]);
        let mut index = NgramIndex::new(2, 4);
        assert_eq!(
            draft(&mut index, &[1, 2, 3, 1, 2, 3, 1], 1, 5),
            [3, 1, 2, 3, 1]
        );
        assert_eq!(draft(&mut index, &[1, 2, 3, 1, 2, 3, 1], 4, 3), [3, 1, 2]);
    }

    /// The rule without an index.
    fn plainly(tokens: &[u32], (min, max): (usize, usize), num: usize) -> Vec<u32> {
        let length = |end: usize| {
            let back = (0..max.min(end))
                .take_while(|i| tokens[end - 1 - i] == tokens[tokens.len() - 1 - i]);
            back.count()
        };
        let best = (min..tokens.len()).max_by_key(|end| (length(*end), *end));
        let Some(end) = best.filter(|end| length(*end) >= min) else {
            return vec![];
        };
        let mut all = tokens.to_vec();
        for at in 0..num {
            all.push(all[end + at]);
        }
        all.split_off(tokens.len())
    }

    proptest! {
        #[test]
        fn look_ups_follow_the_rule(
            tokens in prop::collection::vec(0_u32..6, 1..400),
            cuts in prop::collection::vec(any::<prop::sample::Index>(), 1..20),
            (min, more, num) in (3_u32..5, 0_u32..3, 1_usize..12),
        ) {
            // Few places a look-up: no more than are compared.
            let mut lens: Vec<usize> = cuts.iter().map(|cut| 1 + cut.index(tokens.len().min(60))).collect();
            lens.sort_unstable();
            let mut index = NgramIndex::new(min, min + more);
            for len in lens {
                let known = &tokens[..len];
                let expected = plainly(known, (min as usize, (min + more) as usize), num);
                prop_assert_eq!(draft(&mut index, known, 0, num), expected);
            }
            // Long ones: whatever is found has a match before it.
            let found = draft(&mut index, &tokens, 0, 1);
            if let [next] = found[..] {
                let gram = &tokens[tokens.len() - min as usize..];
                let with_next = [gram, &[next]].concat();
                prop_assert!(tokens.windows(with_next.len()).any(|part| part == with_next));
            }
        }
    }
}
