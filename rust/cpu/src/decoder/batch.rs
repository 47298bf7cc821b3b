//! A step's rows and tokens, checked against the slots before anything uses them as an index; block tables and newest
//! tokens of the slots.

use std::ops::Range;

use super::error::DecoderError;

/// The runner's arena as it came: nothing of it is trusted.
#[derive(Clone, Copy, Debug)]
pub struct StepView<'a> {
    /// Slot of each row.
    pub row_slot: &'a [i32],
    /// First token of each row, and one more.
    pub query_start: &'a [i32],
    /// Tokens of each row's sequence, this step's included.
    pub kv_len: &'a [i32],
    /// -1: the slot's newest token.
    pub token_id: &'a [i32],
    pub position: &'a [i32],
    /// How many of each row's last tokens are drafted.
    pub num_drafted: &'a [i32],
    /// How many of each row's last tokens are sampled, or scored, behind: of others the last layer gives keys and values
    /// alone.
    pub num_needed: &'a [i32],
    /// (row of all groups' tables, index, block) each.
    pub block_updates: &'a [i32],
    /// (source, destination) each.
    pub block_copies: &'a [i32],
}

/// Sizes that indices are checked against.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    pub num_slots: usize,
    pub num_groups: usize,
    pub max_blocks: usize,
    pub num_blocks: usize,
    pub block_size: usize,
    pub vocab_size: usize,
    /// Most tokens of a step.
    pub max_tokens: usize,
}

#[derive(Clone, Copy, Debug)]
pub struct Row {
    pub slot: usize,
    /// Index of its first token in the step.
    pub start: usize,
    pub num_tokens: usize,
    pub kv_len: usize,
    /// Of its last tokens.
    pub num_drafted: usize,
    pub num_needed: usize,
    /// The first of those that are needed, among all that the step keeps.
    pub first_kept: usize,
}

impl Row {
    /// The step's tokens that are sampled behind when the row is: its last one that is not drafted, and the draft.
    pub fn sampled(&self) -> Range<usize> {
        let end = self.start + self.num_tokens;
        end - 1 - self.num_drafted..end
    }

    /// Where `tokens` of the step are among those that it keeps, if they all are.
    pub fn kept(&self, tokens: &Range<usize>) -> Option<Range<usize>> {
        let end = self.start + self.num_tokens;
        let first = end - self.num_needed;
        let place = |token: usize| token - first + self.first_kept;
        (first <= tokens.start && tokens.end <= end).then(|| place(tokens.start)..place(tokens.end))
    }
}

#[derive(Clone, Copy, Debug)]
pub struct Token {
    pub id: usize,
    pub position: usize,
}

/// Per slot: which blocks its sequence has in each cache group, and its newest token.
pub struct Slots {
    pub limits: Limits,
    /// `[num_groups, num_slots + 1, max_blocks]`, each below `num_blocks`. (The last row of a group is of no slot.)
    tables: Vec<i32>,
    newest: Vec<u32>,
}

impl Slots {
    pub fn new(limits: Limits) -> Self {
        Self {
            limits,
            tables: vec![0; limits.num_groups * (limits.num_slots + 1) * limits.max_blocks],
            newest: vec![0; limits.num_slots],
        }
    }

    /// Of all slots in a group, `[num_slots + 1, max_blocks]`.
    pub fn tables(&self, group: usize) -> &[i32] {
        let len = (self.limits.num_slots + 1) * self.limits.max_blocks;
        &self.tables[group * len..][..len]
    }

    /// block * `block_size` + offset of a position's key and value in a group.
    fn place(&self, group: usize, slot: usize, position: usize) -> usize {
        let Limits {
            max_blocks,
            block_size,
            ..
        } = self.limits;
        let block = self.tables(group)[slot * max_blocks + position / block_size];
        block as usize * block_size + position % block_size
    }

    pub fn set_newest(&mut self, slot: usize, token: u32) {
        self.newest[slot] = token;
    }

    /// Take over (row, index, block) updates.
    pub fn update(&mut self, updates: &[i32]) -> Result<(), DecoderError> {
        let limits = self.limits;
        for update in updates.chunks_exact(3) {
            let num_rows = limits.num_groups * (limits.num_slots + 1);
            let row = below(update[0], num_rows, "row of a block update")?;
            let index = below(update[1], limits.max_blocks, "index of a block update")?;
            let block = below(update[2], limits.num_blocks, "block of a block update")?;
            self.tables[row * limits.max_blocks + index] = block as i32;
        }
        Ok(())
    }
}

/// A checked step. Reused, so that a steady state allocates nothing.
#[derive(Default)]
pub struct Batch {
    pub rows: Vec<Row>,
    pub tokens: Vec<Token>,
    /// Tokens that are sampled or scored behind.
    pub kept: Vec<usize>,
    /// Of each row, its first token of these, and one more.
    pub kept_start: Vec<i32>,
    /// Of each token in each cache group, `[tokens, num_groups]`.
    places: Vec<usize>,
    num_groups: usize,
    /// Per slot: the last batch that had a row of it.
    seen: Vec<u64>,
    count: u64,
}

impl Batch {
    /// Check a step and take it over. Slots of different rows differ.
    pub fn fill(&mut self, step: &StepView<'_>, slots: &Slots) -> Result<(), DecoderError> {
        let limits = slots.limits;
        let (num_rows, num_tokens) = (step.row_slot.len(), step.token_id.len());
        if step.query_start.len() != num_rows + 1
            || step.kv_len.len() != num_rows
            || step.num_drafted.len() != num_rows
            || step.num_needed.len() != num_rows
            || step.position.len() != num_tokens
            || num_tokens > limits.max_tokens
        {
            return Err(DecoderError::Step(format!(
                "{num_rows} rows and {num_tokens} tokens do not fit"
            )));
        }
        self.rows.clear();
        self.tokens.clear();
        self.kept.clear();
        self.kept_start.clear();
        self.kept_start.push(0);
        self.places.clear();
        self.num_groups = limits.num_groups;
        self.seen.resize(limits.num_slots, 0);
        self.count += 1;
        for row in 0..num_rows {
            self.add_row(step, slots, row)?;
        }
        if self.tokens.len() != num_tokens {
            return Err(DecoderError::Step(format!(
                "{num_tokens} tokens, rows end at {}",
                self.tokens.len()
            )));
        }
        Ok(())
    }

    /// block * `block_size` + offset of a token's key and value in a cache group.
    pub fn place(&self, group: usize, token: usize) -> usize {
        self.places[token * self.num_groups + group]
    }

    /// Where a token of the step, as a range, is among those that it keeps, if it is.
    pub fn kept_token(&self, token: &Range<usize>) -> Option<Range<usize>> {
        let next = self.rows.partition_point(|row| row.start <= token.start);
        self.rows[next.checked_sub(1)?].kept(token)
    }

    fn add_row(
        &mut self,
        step: &StepView<'_>,
        slots: &Slots,
        row: usize,
    ) -> Result<(), DecoderError> {
        let limits = slots.limits;
        let slot = below(step.row_slot[row], limits.num_slots, "slot of a row")?;
        let seen = std::mem::replace(&mut self.seen[slot], self.count);
        if seen == self.count {
            return Err(DecoderError::Step(format!("slot {slot} has two rows")));
        }
        let start = self.tokens.len();
        let end = below(
            step.query_start[row + 1],
            step.token_id.len() + 1,
            "end of a row",
        )?;
        let capacity = limits.max_blocks * limits.block_size;
        let kv_len = below(step.kv_len[row], capacity + 1, "length of a row")?;
        if usize::try_from(step.query_start[row]) != Ok(start)
            || end <= start
            || kv_len < end - start
        {
            return Err(DecoderError::Step(format!(
                "row {row} has tokens {start}..{end} of {kv_len}"
            )));
        }
        let num_drafted = below(step.num_drafted[row], end - start, "draft of a row")?;
        for token in start..end {
            let id = match step.token_id[token] {
                -1 => slots.newest[slot] as usize,
                id => below(id, limits.vocab_size, "token id")?,
            };
            let position = below(step.position[token], kv_len, "position")?;
            if position != kv_len - (end - token) {
                return Err(DecoderError::Step(format!(
                    "token {token} of row {row} is at {position}"
                )));
            }
            self.tokens.push(Token { id, position });
            let places = (0..limits.num_groups).map(|group| slots.place(group, slot, position));
            self.places.extend(places);
        }
        let num_needed = below(step.num_needed[row], end - start + 1, "needed of a row")?;
        self.rows.push(Row {
            slot,
            start,
            num_tokens: end - start,
            kv_len,
            num_drafted,
            num_needed,
            first_kept: self.kept.len(),
        });
        self.kept.extend(end - num_needed..end);
        self.kept_start.push(self.kept.len() as i32);
        Ok(())
    }
}

/// `value` as an index below `limit`.
pub fn below(value: i32, limit: usize, what: &str) -> Result<usize, DecoderError> {
    usize::try_from(value)
        .ok()
        .filter(|&index| index < limit)
        .ok_or_else(|| DecoderError::Step(format!("{what} is {value}, not below {limit}")))
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMITS: Limits = Limits {
        num_slots: 4,
        num_groups: 2,
        max_blocks: 2,
        num_blocks: 5,
        block_size: 4,
        vocab_size: 10,
        max_tokens: 8,
    };

    const STEP: StepView<'static> = StepView {
        row_slot: &[2, 0],
        query_start: &[0, 1, 4],
        kv_len: &[6, 3],
        token_id: &[-1, 7, 8, 9],
        position: &[5, 0, 1, 2],
        num_drafted: &[0, 2],
        num_needed: &[0, 3],
        block_updates: &[],
        block_copies: &[],
    };

    fn slots() -> Slots {
        let mut slots = Slots::new(LIMITS);
        slots.update(&[2, 0, 4, 2, 1, 3, 0, 0, 1]).unwrap();
        slots.update(&[7, 1, 1, 5, 0, 2]).unwrap();
        slots.set_newest(2, 6);
        slots
    }

    #[test]
    fn tokens_find_their_places() {
        let mut batch = Batch::default();
        batch.fill(&STEP, &slots()).unwrap();
        let tokens: Vec<_> = batch.tokens.iter().map(|t| (t.id, t.position)).collect();
        assert_eq!(tokens, [(6, 5), (7, 0), (8, 1), (9, 2)]);
        let places = |group| [0, 1, 2, 3].map(|token| batch.place(group, token));
        assert_eq!((places(0), places(1)), ([13, 4, 5, 6], [5, 8, 9, 10]));
        assert_eq!(
            (batch.kept.as_slice(), batch.kept_start.as_slice()),
            (&[1, 2, 3][..], &[0, 0, 3][..])
        );
        assert_eq!(batch.rows[0].kept(&(0..1)), None);
        assert_eq!(batch.rows[1].kept(&(2..4)), Some(1..3));
        assert_eq!(batch.rows[1].kept(&(0..1)), None);
    }

    #[test]
    fn what_breaks_the_contract_is_refused() {
        let bad = [
            StepView {
                row_slot: &[2, 2],
                ..STEP
            },
            StepView {
                row_slot: &[2, 4],
                ..STEP
            },
            StepView {
                row_slot: &[2, -1],
                ..STEP
            },
            StepView {
                row_slot: &[2],
                ..STEP
            },
            StepView {
                query_start: &[0, 1, 5],
                ..STEP
            },
            StepView {
                query_start: &[0, 1, 3],
                ..STEP
            },
            StepView {
                query_start: &[1, 1, 4],
                ..STEP
            },
            StepView {
                query_start: &[0, 0, 4],
                ..STEP
            },
            StepView {
                kv_len: &[6, 2],
                ..STEP
            },
            StepView {
                kv_len: &[9, 3],
                ..STEP
            },
            StepView {
                token_id: &[-1, 7, 10, 9],
                ..STEP
            },
            StepView {
                token_id: &[-2, 7, 8, 9],
                ..STEP
            },
            StepView {
                position: &[5, 0, 2, 2],
                ..STEP
            },
            StepView {
                position: &[5, 0, 1],
                ..STEP
            },
            StepView {
                num_drafted: &[1, 0],
                ..STEP
            },
            StepView {
                num_drafted: &[0, -1],
                ..STEP
            },
            StepView {
                num_drafted: &[0],
                ..STEP
            },
            StepView {
                num_needed: &[0, 4],
                ..STEP
            },
            StepView {
                num_needed: &[0],
                ..STEP
            },
        ];
        for step in bad {
            let result = Batch::default().fill(&step, &slots());
            assert!(matches!(result, Err(DecoderError::Step(_))), "{step:?}");
        }
        for update in [[10, 0, 0], [0, 2, 0], [0, 0, 5], [0, 0, -1]] {
            assert!(slots().update(&update).is_err());
        }
    }
}
