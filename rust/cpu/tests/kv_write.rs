//! The KV write: every token at its place and nothing else touched; wrong places refused.

use octavo_cpu::{Dtype, KernelError, WriteArgs, write_kv};

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
