//! The runner's mask buffer as the core knows it. Who fills it: `guided`.

use crate::config::CoreConfig;
use crate::grammar::masks::MaskPool;

/// What is known of the runner's mask buffer: rows of `num_words` a slot, one behind each token that may be drafted.
#[derive(Debug)]
pub struct Masks {
    pub pool: MaskPool,
    pub num_words: usize,
    pub rows_per_slot: usize,
    /// Slots whose rows forbid nothing.
    pub is_open: Vec<bool>,
}

impl Masks {
    pub fn new(config: &CoreConfig) -> Self {
        Self {
            pool: MaskPool::default(),
            num_words: config.vocab_size.div_ceil(32) as usize,
            rows_per_slot: 1 + config.max_drafted() as usize,
            is_open: vec![false; config.max_num_seqs as usize],
        }
    }
}
