//! The KV write: every token at its place and nothing else touched; wrong places refused.

use octavo_cpu::kv_write::narrowing;
use octavo_cpu::{CacheDtype, Dtype, Isa, KernelError, WriteArgs, write_kv};

const BLOCKS: usize = 5;
const SIZE: usize = 4;
const HEADS: usize = 2;
const DIM: usize = 3;
const STRIDE: usize = HEADS * DIM + 1;

fn args(k: &[f32], v: &[f32], cache: &mut [f32], mapping: &[i64]) -> WriteArgs {
    WriteArgs {
        k: k.as_ptr().cast(),
        k_stride: STRIDE,
        v: v.as_ptr().cast(),
        v_stride: STRIDE,
        kv_cache: cache.as_mut_ptr().cast(),
        dtype: Dtype::F32,
        slot_mapping: mapping.as_ptr(),
        num_tokens: mapping.len(),
        num_blocks: BLOCKS,
        block_size: SIZE,
        num_kv_heads: HEADS,
        head_dim: DIM,
    }
}

fn tokens(count: usize, from: f32) -> Vec<f32> {
    (0..count * STRIDE).map(|i| from + i as f32).collect()
}

#[test]
fn tokens_land_at_their_places() {
    let mapping = [7i64, 0, 19, 12];
    let (k, v) = (tokens(4, 1.0), tokens(4, 1000.0));
    let mut cache = vec![0.0f32; BLOCKS * 2 * HEADS * SIZE * DIM];
    // SAFETY: buffers have the sizes that `args` names.
    unsafe { write_kv(&args(&k, &v, &mut cache, &mapping)) }.unwrap();
    let mut want = vec![0.0f32; cache.len()];
    for (token, &place) in mapping.iter().enumerate() {
        let (block, offset) = (place as usize / SIZE, place as usize % SIZE);
        for (half, source) in [&k, &v].into_iter().enumerate() {
            for head in 0..HEADS {
                for d in 0..DIM {
                    let target = (((block * 2 + half) * HEADS + head) * SIZE + offset) * DIM + d;
                    want[target] = source[token * STRIDE + head * DIM + d];
                }
            }
        }
    }
    assert_eq!(cache, want);
}

#[test]
fn wrong_places_are_refused_before_anything_is_written() {
    for place in [-1i64, (BLOCKS * SIZE) as i64, i64::MAX, i64::MIN] {
        let mapping = [3i64, place];
        let (k, v) = (tokens(2, 1.0), tokens(2, 1.0));
        let mut cache = vec![0.0f32; BLOCKS * 2 * HEADS * SIZE * DIM];
        // SAFETY: as above.
        let result = unsafe { write_kv(&args(&k, &v, &mut cache, &mapping)) };
        assert_eq!(
            result,
            Err(KernelError::Place {
                token: 1,
                place,
                num_places: BLOCKS * SIZE
            })
        );
        assert!(cache.iter().all(|&x| x == 0.0));
    }
}

#[test]
fn wrong_sizes_are_refused() {
    type Lie = fn(&mut WriteArgs);
    let lies: [(&str, Lie); 6] = [
        ("k is a null", |a| a.k = std::ptr::null()),
        ("kv_cache is not aligned", |a| {
            a.kv_cache = a.kv_cache.wrapping_add(2);
        }),
        ("v_stride", |a| a.v_stride = 5),
        ("block_size", |a| a.block_size = 0),
        ("too large", |a| a.num_blocks = usize::MAX),
        ("slot_mapping is a null", |a| {
            a.slot_mapping = std::ptr::null();
        }),
    ];
    for (named, lie) in lies {
        let (k, v, mapping) = (tokens(1, 1.0), tokens(1, 1.0), [0i64]);
        let mut cache = vec![0.0f32; BLOCKS * 2 * HEADS * SIZE * DIM];
        let mut call = args(&k, &v, &mut cache, &mapping);
        lie(&mut call);
        // SAFETY: the call is refused before it reads through what the lie changed.
        let error = unsafe { write_kv(&call) }.expect_err(named).to_string();
        assert!(error.contains(named), "{named}: {error}");
    }
}

#[test]
fn int8_rows_keep_half_a_step_and_no_lie() {
    let values: Vec<f32> = (0..37).map(|i| (i as f32 * 0.7).sin() * 3.0).collect();
    let count = values.len();
    let step = values.iter().fold(0.0f32, |most, v| most.max(v.abs())) / 127.0;
    for &isa in Isa::available() {
        let mut row = vec![0x55u8; CacheDtype::Int8.row_bytes(count) + 4];
        let narrow = narrowing(CacheDtype::Int8, isa);
        // SAFETY: the row has room.
        unsafe { narrow(values.as_ptr(), row.as_mut_ptr(), count) };
        let scale = f32::from_le_bytes(row[count..count + 4].try_into().unwrap());
        assert_eq!(row[count + 4..], [0x55; 4], "wrote behind the row");
        for (number, value) in row.iter().zip(&values) {
            let got = f32::from(number.cast_signed()) * scale;
            assert!(
                (got - value).abs() <= 0.501 * step,
                "{isa:?}: {value} is {got}"
            );
        }
        for bad in [f32::NAN, f32::INFINITY] {
            let mut values = values.clone();
            values[5] = bad;
            // SAFETY: as above.
            unsafe { narrow(values.as_ptr(), row.as_mut_ptr(), count) };
            let scale = f32::from_le_bytes(row[count..count + 4].try_into().unwrap());
            assert!(scale.is_nan(), "{isa:?}: {bad} has become a number");
        }
        // SAFETY: as above.
        unsafe { narrow([0.0; 37].as_ptr(), row.as_mut_ptr(), count) };
        assert!(row[..count + 4].iter().all(|&byte| byte == 0));
    }
}
