//! What a kernel refuses.

/// Wrong sizes or indices; the message names the argument.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum KernelError {
    #[error("{0} is a null pointer")]
    Null(&'static str),
    #[error("{name} is not aligned to {align} bytes")]
    Unaligned { name: &'static str, align: usize },
    #[error("{0} must be at least 1")]
    Zero(&'static str),
    #[error("sizes are too large: {0} does not fit in memory")]
    Overflow(&'static str),
    #[error("num_heads {heads} is not a multiple of num_kv_heads {kv_heads}")]
    HeadsNotGrouped { heads: usize, kv_heads: usize },
    #[error("{name} {stride} is less than the {least} elements of a token")]
    ShortStride {
        name: &'static str,
        stride: usize,
        least: usize,
    },
    #[error("{name} must be finite, not {value}")]
    NotFinite { name: &'static str, value: String },
    #[error(
        "unknown weight format {0:?}: F32, BF16, F16, INT8, Q8_0, Q4_0, Q4_1, Q4_K, Q5_K and Q6_K are known"
    )]
    Format(String),
    #[error("the instructions {0:?} are not this machine's, or others were chosen before")]
    Isa(String),
    #[error("{format} stores blocks of {block} columns, and {k} columns are no multiple")]
    Columns {
        format: &'static str,
        k: usize,
        block: usize,
    },
    #[error(
        "{source_format} weights cannot be quantized to {format}: floats can, to INT8, Q8_0, Q4_0 and Q4_1"
    )]
    Quantize {
        source_format: &'static str,
        format: &'static str,
    },
    #[error("{name} holds {given} bytes, but {wanted} are needed")]
    Length {
        name: &'static str,
        given: usize,
        wanted: usize,
    },
    #[error("unknown dtype {0:?}: float32, bfloat16 and float16 are known")]
    Dtype(String),
    #[error(
        "query_start[{index}] is {value}: it must start at 0, not fall, and end within num_tokens {num_tokens}"
    )]
    QueryStart {
        index: usize,
        value: i64,
        num_tokens: usize,
    },
    #[error("row_slot[{row}] is {slot}, not one of {num_slots} slots")]
    Slot {
        row: usize,
        slot: i64,
        num_slots: usize,
    },
    #[error(
        "kv_len[{row}] is {kv_len}: it must be {num_queries} (the row's queries) to {capacity} (its block table)"
    )]
    KvLen {
        row: usize,
        kv_len: i64,
        num_queries: usize,
        capacity: usize,
    },
    #[error("block_table[{slot}, {index}] is {block}, not one of {num_blocks} blocks")]
    Block {
        slot: usize,
        index: usize,
        block: i64,
        num_blocks: usize,
    },
    #[error("slot_mapping[{token}] is {place}, not one of {num_places} places")]
    Place {
        token: usize,
        place: i64,
        num_places: usize,
    },
}
