//! The arguments of a call, and the checks of their sizes and pointers, before anything is read.

use crate::checks::{check_pointer, check_product};
use crate::element::{CacheDtype, Dtype};
use crate::error::KernelError;

/// One call. Lengths in elements; arrays are dense and row-major unless said otherwise.
#[derive(Clone, Copy, Debug)]
pub struct AttentionArgs {
    /// `[num_tokens, num_heads, head_dim]`, tokens `q_stride` elements apart.
    pub q: *const u8,
    pub q_stride: usize,
    /// `[num_blocks, 2 (K, V), num_kv_heads, block_size]` rows.
    pub kv_cache: *const u8,
    /// `[num_tokens, num_heads, head_dim]`, written in full; tokens of no row get zeros.
    pub out: *mut u8,
    /// Of the cache.
    pub dtype: CacheDtype,
    /// Of q and out.
    pub io_dtype: Dtype,
    /// `[num_rows]` slot of each row.
    pub row_slot: *const i32,
    /// `[num_rows + 1]` first token of each row.
    pub query_start: *const i32,
    /// `[num_rows]` tokens of each row, this step's included.
    pub kv_len: *const i32,
    /// `[num_slots, max_blocks_per_slot]` block ids.
    pub block_table: *const i32,
    pub num_rows: usize,
    pub num_tokens: usize,
    pub num_slots: usize,
    pub max_blocks_per_slot: usize,
    pub num_blocks: usize,
    pub block_size: usize,
    pub num_heads: usize,
    pub num_kv_heads: usize,
    pub head_dim: usize,
    pub scale: f32,
    /// A query sees itself and the `window - 1` tokens before; 0 = all.
    pub window: usize,
    /// Scores become cap * tanh(score / cap); 0 = off.
    pub soft_cap: f32,
    /// The caller's thread is one of them.
    pub num_threads: usize,
}

/// Everything about a call that can be known without reading its arrays.
pub fn check_sizes(args: &AttentionArgs) -> Result<(), KernelError> {
    for (name, size) in [
        ("num_slots", args.num_slots),
        ("max_blocks_per_slot", args.max_blocks_per_slot),
        ("num_blocks", args.num_blocks),
        ("block_size", args.block_size),
        ("num_heads", args.num_heads),
        ("num_kv_heads", args.num_kv_heads),
        ("head_dim", args.head_dim),
        ("num_threads", args.num_threads),
    ] {
        if size == 0 {
            return Err(KernelError::Zero(name));
        }
    }
    if !args.num_heads.is_multiple_of(args.num_kv_heads) {
        return Err(KernelError::HeadsNotGrouped {
            heads: args.num_heads,
            kv_heads: args.num_kv_heads,
        });
    }
    for (name, value) in [("scale", args.scale), ("soft_cap", args.soft_cap)] {
        if !value.is_finite() {
            return Err(KernelError::NotFinite {
                name,
                value: value.to_string(),
            });
        }
    }
    check_products(args)?;
    check_pointers(args)
}

/// Strides and products of sizes.
fn check_products(args: &AttentionArgs) -> Result<(), KernelError> {
    let bytes = args.io_dtype.bytes();
    let token = check_product(
        "num_heads * head_dim",
        &[args.num_heads, args.head_dim],
        bytes,
    )?;
    if args.q_stride < token {
        return Err(KernelError::ShortStride {
            name: "q_stride",
            stride: args.q_stride,
            least: token,
        });
    }
    check_product("q", &[args.num_tokens, args.q_stride], bytes)?;
    check_product(
        "kv_cache",
        &[
            args.num_blocks,
            2,
            args.num_kv_heads,
            args.block_size,
            args.dtype.row_bytes(args.head_dim),
        ],
        1,
    )?;
    check_product(
        "block_table",
        &[args.num_slots, args.max_blocks_per_slot],
        4,
    )?;
    check_product(
        "block_table * block_size",
        &[args.max_blocks_per_slot, args.block_size],
        1,
    )?;
    check_product("query_start", &[args.num_rows.saturating_add(1)], 4).map(|_| ())
}

fn check_pointers(args: &AttentionArgs) -> Result<(), KernelError> {
    let bytes = args.io_dtype.bytes();
    check_pointer("query_start", args.query_start, 4)?;
    if args.num_tokens > 0 {
        check_pointer("q", args.q, bytes)?;
        check_pointer("out", args.out.cast_const(), bytes)?;
    }
    if args.num_rows > 0 {
        check_pointer("kv_cache", args.kv_cache, args.dtype.align())?;
        check_pointer("row_slot", args.row_slot, 4)?;
        check_pointer("kv_len", args.kv_len, 4)?;
        check_pointer("block_table", args.block_table, 4)?;
    }
    Ok(())
}
