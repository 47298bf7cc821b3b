//! Checks of sizes and pointers, before anything is read.

use crate::attention::AttentionArgs;
use crate::error::KernelError;

/// `address` is not null and a multiple of `align`.
pub fn check_pointer<T>(
    name: &'static str,
    pointer: *const T,
    align: usize,
) -> Result<(), KernelError> {
    if pointer.is_null() {
        return Err(KernelError::Null(name));
    }
    if !(pointer as usize).is_multiple_of(align) {
        return Err(KernelError::Unaligned { name, align });
    }
    Ok(())
}

/// The product of sizes times the bytes of a number fits in an address space.
pub fn check_product(
    name: &'static str,
    sizes: &[usize],
    bytes: usize,
) -> Result<usize, KernelError> {
    let product = sizes
        .iter()
        .try_fold(1usize, |product, &size| product.checked_mul(size));
    product
        .filter(|p| {
            p.checked_mul(bytes)
                .is_some_and(|total| isize::try_from(total).is_ok())
        })
        .ok_or(KernelError::Overflow(name))
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
