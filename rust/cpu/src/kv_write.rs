//! Stores a step's K and V in the paged cache.

use crate::checks::{check_pointer, check_product};
use crate::element::{Bf16, CacheDtype, Dtype, F16, Rounded};
use crate::error::KernelError;
use crate::isa::Isa;
use crate::simd::{Simd, by_isa};

/// One call. Lengths in elements.
#[derive(Clone, Copy, Debug)]
pub struct WriteArgs {
    /// `[num_tokens, num_kv_heads, head_dim]`, tokens `k_stride` elements apart.
    pub k: *const u8,
    pub k_stride: usize,
    /// As k.
    pub v: *const u8,
    pub v_stride: usize,
    /// `[num_blocks, 2 (K, V), num_kv_heads, block_size, head_dim]`.
    pub kv_cache: *mut u8,
    pub dtype: Dtype,
    /// `[num_tokens]` block * `block_size` + offset.
    pub slot_mapping: *const i64,
    pub num_tokens: usize,
    pub num_blocks: usize,
    pub block_size: usize,
    pub num_kv_heads: usize,
    pub head_dim: usize,
}

/// Write K and V of every token at its place.
///
/// # Errors
/// A size is impossible, or a place is out of range; nothing is written then.
///
/// # Safety
/// Pointers are valid for the sizes given (writes for `kv_cache`), nothing else uses the cache during the call, and k
/// and v do not overlap it.
pub unsafe fn write_kv(args: &WriteArgs) -> Result<(), KernelError> {
    let head = check(args)?;
    let bytes = args.dtype.bytes();
    let num_places = args.num_blocks * args.block_size;
    for token in 0..args.num_tokens {
        // SAFETY: slot_mapping holds num_tokens numbers.
        let place = unsafe { *args.slot_mapping.add(token) };
        if usize::try_from(place).map_or(true, |p| p >= num_places) {
            return Err(KernelError::Place {
                token,
                place,
                num_places,
            });
        }
    }
    let value = args.num_kv_heads * args.block_size * head;
    for token in 0..args.num_tokens {
        // SAFETY: the place is read again and used modulo the checked range, so that a writer elsewhere can do no harm;
        // head indices stay below num_kv_heads.
        unsafe {
            let place = *args.slot_mapping.add(token) as usize % num_places;
            let (block, offset) = (place / args.block_size, place % args.block_size);
            let k = args.k.add(token * args.k_stride * bytes);
            let v = args.v.add(token * args.v_stride * bytes);
            for kv_head in 0..args.num_kv_heads {
                let row =
                    ((block * 2 * args.num_kv_heads + kv_head) * args.block_size + offset) * head;
                let target = args.kv_cache.add(row);
                target.copy_from_nonoverlapping(k.add(kv_head * head), head);
                target
                    .add(value)
                    .copy_from_nonoverlapping(v.add(kv_head * head), head);
            }
        }
    }
    Ok(())
}

/// Check sizes and pointers; the bytes of one head's vector.
fn check(args: &WriteArgs) -> Result<usize, KernelError> {
    for (name, size) in [
        ("num_blocks", args.num_blocks),
        ("block_size", args.block_size),
        ("num_kv_heads", args.num_kv_heads),
        ("head_dim", args.head_dim),
    ] {
        if size == 0 {
            return Err(KernelError::Zero(name));
        }
    }
    let bytes = args.dtype.bytes();
    let token = check_product(
        "num_kv_heads * head_dim",
        &[args.num_kv_heads, args.head_dim],
        bytes,
    )?;
    for (name, stride) in [("k_stride", args.k_stride), ("v_stride", args.v_stride)] {
        if stride < token {
            return Err(KernelError::ShortStride {
                name,
                stride,
                least: token,
            });
        }
        check_product(name, &[args.num_tokens, stride], bytes)?;
    }
    check_product(
        "kv_cache",
        &[
            args.num_blocks,
            2,
            args.num_kv_heads,
            args.block_size,
            args.head_dim,
        ],
        bytes,
    )?;
    check_product("slot_mapping", &[args.num_tokens], 8)?;
    if args.num_tokens > 0 {
        check_pointer("k", args.k, bytes)?;
        check_pointer("v", args.v, bytes)?;
        check_pointer("kv_cache", args.kv_cache.cast_const(), bytes)?;
        check_pointer("slot_mapping", args.slot_mapping, 8)?;
    }
    Ok(args.head_dim * bytes)
}

/// Round f32 numbers into a row of a cache.
///
/// # Safety
/// The source is readable for as many numbers as the last argument says and the target writable for a row of them; the
/// machine has the instructions that it was chosen for.
pub type Narrow = unsafe fn(*const f32, *mut u8, usize);

/// The `Narrow` for a dtype, with chosen instructions if the machine has them.
pub fn narrowing(dtype: CacheDtype, isa: Isa) -> Narrow {
    let isa = isa.or_best();
    match dtype {
        CacheDtype::Plain(Dtype::F32) => narrow_to::<f32>(isa),
        CacheDtype::Plain(Dtype::Bf16) => narrow_to::<Bf16>(isa),
        CacheDtype::Plain(Dtype::F16) => narrow_to::<F16>(isa),
        CacheDtype::Int8 => narrow_to_int8(isa),
    }
}

by_isa! {
    fn narrow_to[E: Rounded](source: *const f32, target: *mut u8, count: usize) -> () = floats (narrow)
}

by_isa! {
    fn narrow_to_int8[](source: *const f32, target: *mut u8, count: usize) -> () = floats (narrow_int8)
}

/// # Safety
/// As `Narrow`.
#[inline(always)]
unsafe fn narrow<S: Simd, E: Rounded>(source: *const f32, target: *mut u8, count: usize) {
    let target = target.cast::<E>();
    let mut i = 0;
    // SAFETY: i stays below count.
    unsafe {
        while i + S::LANES <= count {
            E::store::<S>(target.add(i), S::load(source.add(i)));
            i += S::LANES;
        }
        while i < count {
            target.add(i).write(E::from_f32(*source.add(i)));
            i += 1;
        }
    }
}

/// # Safety
/// As `Narrow`.
#[inline(always)]
unsafe fn narrow_int8<S: Simd>(source: *const f32, target: *mut u8, count: usize) {
    // SAFETY: the caller's; i stays below count, and the scale may lie anywhere.
    unsafe {
        let values = std::slice::from_raw_parts(source, count);
        let greatest = values.iter().fold(0.0f32, |most, v| most.max(v.abs()));
        let is_finite = values.iter().fold(true, |all, v| all & v.is_finite());
        let scale = greatest / 127.0;
        let factor = if scale >= f32::MIN_POSITIVE && is_finite {
            1.0 / scale
        } else {
            0.0
        };
        let mut i = 0;
        while i + S::LANES <= count && is_finite {
            let scaled = S::mul(S::load(source.add(i)), S::splat(factor));
            S::store_i8(target.add(i).cast(), S::to_i32(scaled));
            i += S::LANES;
        }
        while i < count {
            let number = (values[i] * factor).round_ties_even().clamp(-127.0, 127.0) as i8;
            target.add(i).write(number.cast_unsigned());
            i += 1;
        }
        let scale = if is_finite { scale } else { f32::NAN };
        target.add(count).cast::<f32>().write_unaligned(scale);
    }
}
