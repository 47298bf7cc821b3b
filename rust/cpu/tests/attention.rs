//! Paged attention against a scalar reference on random shapes, with NaN wherever nothing may be read.

mod paged;

use octavo_cpu::attention::paged_attention_with;
use octavo_cpu::{CacheDtype, Dtype, Isa, KernelError};
use paged::{Case, Shape};
use proptest::prelude::*;

fn shape() -> impl Strategy<Value = Shape> {
    let rows = prop::collection::vec(
        (
            prop_oneof![4 => Just(1usize), 2 => 2..9usize, 1 => 9..90usize],
            0..300usize,
        ),
        1..6,
    );
    let heads = (
        1..4usize,
        prop_oneof![
            Just(1usize),
            Just(2),
            Just(3),
            Just(4),
            Just(7),
            Just(9),
            Just(70)
        ],
    );
    let dims = prop_oneof![
        Just(64usize),
        Just(8),
        Just(16),
        Just(80),
        Just(128),
        Just(5),
        Just(33)
    ];
    let dtypes = prop_oneof![
        Just(CacheDtype::Plain(Dtype::F32)),
        Just(CacheDtype::Plain(Dtype::Bf16)),
        Just(CacheDtype::Plain(Dtype::F16)),
        Just(CacheDtype::Int8)
    ];
    let windows = prop_oneof![2 => Just(0usize), 1 => 1..200usize];
    let caps = prop_oneof![2 => Just(0.0f32), 1 => 0.5f32..30.0];
    (
        (rows, heads, dims, dtypes),
        (
            windows,
            caps,
            prop_oneof![Just(1usize), Just(3), Just(16), Just(64)],
            1..6usize,
            any::<u64>(),
        ),
    )
        .prop_map(
            |(
                (rows, (kv_heads, group), dim, dtype),
                (window, soft_cap, block_size, num_threads, seed),
            )| Shape {
                rows: rows
                    .into_iter()
                    .map(|(queries, earlier)| (queries, queries + earlier))
                    .collect(),
                shared: vec![],
                kv_heads,
                group,
                dim,
                dtype,
                window,
                soft_cap,
                block_size,
                num_threads,
                seed,
            },
        )
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 96, ..ProptestConfig::default() })]

    #[test]
    fn equals_the_scalar_reference(shape in shape()) {
        let case = Case::new(shape);
        let want = case.reference();
        for &isa in Isa::available() {
            let got = case.run(isa).unwrap();
            let worst = want.iter().zip(&got).map(|(w, g)| (w - g).abs()).fold(0.0, f32::max);
            prop_assert!(got.iter().all(|x| x.is_finite()), "{isa:?}: not finite");
            prop_assert!(worst <= case.tolerance(), "{isa:?}: off by {worst}");
        }
    }
}

fn plain(rows: Vec<(usize, usize)>) -> Shape {
    Shape {
        rows,
        shared: vec![],
        kv_heads: 2,
        group: 3,
        dim: 64,
        dtype: CacheDtype::Plain(Dtype::F32),
        window: 0,
        soft_cap: 0.0,
        block_size: 16,
        num_threads: 3,
        seed: 1,
    }
}

#[test]
fn a_long_row_is_split_and_merged() {
    for (rows, window) in [
        (vec![(1, 5000)], 0),
        (vec![(1, 3000), (4, 2000)], 0),
        (vec![(1, 5000)], 1100),
    ] {
        let case = Case::new(Shape {
            window,
            num_threads: 8,
            ..plain(rows)
        });
        let (want, got) = (case.reference(), case.run(Isa::best()).unwrap());
        let worst = want
            .iter()
            .zip(&got)
            .map(|(w, g)| (w - g).abs())
            .fold(0.0, f32::max);
        assert!(worst < 1e-5, "off by {worst}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 96, ..ProptestConfig::default() })]

    /// A query's output does not depend on what else is computed with it, nor by how many threads.
    #[test]
    fn a_query_gets_the_same_bits_in_every_batch(
        shape in shape(), earlier in 0..1500usize, size in 1..80usize, threads in 1..9usize,
    ) {
        let mut shape = shape;
        shape.rows[0].1 += earlier;
        let case = Case::new(shape);
        for &isa in Isa::available() {
            let whole = case.run(isa).unwrap();
            for row in 0..case.shape.rows.len() {
                let queries = case.shape.rows[row].0;
                let (start, width) = case.outputs(row, 0);
                for query in [0, queries / 2, queries - 1] {
                    let alone = case.run_parts(isa, &[(row, query, 1)], threads);
                    let wanted = &whole[start + query * width..][..width];
                    prop_assert!(alone == wanted, "{isa:?}: query {query} of row {row} alone");
                }
                // The row in pieces, each beside a piece of another row.
                for first in (0..queries).step_by(size) {
                    let piece = (row, first, size.min(queries - first));
                    let other = ((row + 1) % case.shape.rows.len(), 0, 1);
                    let parts = if other.0 == row { vec![piece] } else { vec![other, piece] };
                    let found = case.run_parts(isa, &parts, threads);
                    let wanted = &whole[start + first * width..][..piece.2 * width];
                    let found = &found[found.len() - wanted.len()..];
                    prop_assert!(found == wanted, "{isa:?}: queries from {first} on of row {row}, {size} at a time");
                }
            }
        }
    }
}

/// Rows that share some of their first segments, or nearly: most with few queries, as those that attend together have.
fn sharing() -> impl Strategy<Value = Shape> {
    let row = (
        prop_oneof![4 => Just(1usize), 2 => 2..9usize, 1 => 20..40usize],
        prop_oneof![3 => 500..1300usize, 1 => 0..500usize],
        prop_oneof![4 => 256..1100usize, 1 => 0..256usize],
    );
    (shape(), prop::collection::vec(row, 2..9)).prop_map(|(shape, rows)| Shape {
        shared: rows[1..].iter().map(|row| row.2).collect(),
        rows: rows
            .into_iter()
            .map(|(queries, earlier, _)| (queries, queries + earlier))
            .collect(),
        kv_heads: shape.kv_heads.min(2),
        group: shape.group.min(9),
        // Windows end sharing.
        window: if shape.seed.is_multiple_of(8) {
            shape.window
        } else {
            0
        },
        ..shape
    })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, ..ProptestConfig::default() })]

    /// Rows whose sequences begin alike are right, and get the bits that each has alone.
    #[test]
    fn a_query_gets_the_same_bits_beside_rows_that_share_its_keys(shape in sharing(), threads in 1..9usize) {
        let case = Case::new(shape);
        let want = case.reference();
        for &isa in Isa::available() {
            let whole = case.run(isa).unwrap();
            let worst = want.iter().zip(&whole).map(|(w, g)| (w - g).abs()).fold(0.0, f32::max);
            prop_assert!(worst <= case.tolerance(), "{isa:?}: off by {worst}");
            for (row, &(queries, _)) in case.shape.rows.iter().enumerate() {
                let (start, width) = case.outputs(row, 0);
                let alone = case.run_parts(isa, &[(row, 0, queries)], threads);
                prop_assert!(alone == whole[start..][..queries * width], "{isa:?}: row {row} alone");
            }
        }
    }
}

#[test]
fn tokens_of_no_row_are_zeros() {
    let mut case = Case::new(plain(vec![(2, 9)]));
    case.pad_tokens(3);
    let out = case.run(Isa::best()).unwrap();
    let used = 2 * 6 * 64;
    assert!(out[..used].iter().all(|&x| x != 0.0));
    assert!(out[used..].len() == 3 * 6 * 64 && out[used..].iter().all(|&x| x == 0.0));
}

#[test]
fn no_rows_no_work() {
    let mut case = Case::new(plain(vec![]));
    assert_eq!(case.run(Isa::best()), Ok(vec![]));
    case.pad_tokens(1);
    assert_eq!(case.run(Isa::best()), Ok(vec![0.0; 6 * 64]));
}

/// Every way to lie about a size or an index is an error that names it, and leaves the output alone.
#[test]
fn lies_are_refused() {
    type Lie = fn(&mut Case);
    let lies: [(&str, Lie); 21] = [
        ("row_slot[1]", |c| c.row_slot[1] = 99),
        ("row_slot[0]", |c| c.row_slot[0] = -1),
        ("query_start[0]", |c| c.query_start[0] = 1),
        ("query_start[1]", |c| c.query_start[1] = -3),
        ("query_start[2]", |c| c.query_start[2] = 3),
        ("query_start[2]", |c| c.query_start[2] = 1_000),
        ("kv_len[0]", |c| c.kv_len[0] = 0),
        ("kv_len[0]", |c| c.kv_len[0] = -5),
        ("kv_len[1]", |c| c.kv_len[1] = i32::MAX),
        ("block_table", |c| c.set_block(0, 0, -1)),
        ("block_table", |c| c.set_block(1, 2, 100_000)),
        ("num_heads", |c| c.args_override = |a| a.num_heads = 5),
        ("head_dim", |c| c.args_override = |a| a.head_dim = 0),
        ("block_size", |c| c.args_override = |a| a.block_size = 0),
        ("num_threads", |c| c.args_override = |a| a.num_threads = 0),
        ("kv_cache is a null", |c| {
            c.args_override = |a| a.kv_cache = std::ptr::null();
        }),
        ("q is a null", |c| {
            c.args_override = |a| a.q = std::ptr::null();
        }),
        ("out is not aligned", |c| {
            c.args_override = |a| a.out = a.out.wrapping_add(1);
        }),
        ("q_stride", |c| c.args_override = |a| a.q_stride = 383),
        ("too large", |c| {
            c.args_override = |a| a.num_blocks = usize::MAX / 8;
        }),
        ("scale", |c| c.args_override = |a| a.scale = f32::NAN),
    ];
    for (named, lie) in lies {
        let mut case = Case::new(plain(vec![(4, 40), (2, 50)]));
        lie(&mut case);
        let error = case.run(Isa::best()).expect_err(named).to_string();
        assert!(error.contains(named), "{named}: {error}");
    }
}

#[test]
fn dtypes_have_names() {
    assert_eq!("bfloat16".parse(), Ok(Dtype::Bf16));
    assert_eq!(
        "int8".parse::<Dtype>(),
        Err(KernelError::Dtype("int8".into()))
    );
}

#[test]
fn nan_in_a_query_reaches_its_output_only() {
    let mut case = Case::new(plain(vec![(1, 40), (30, 50)]));
    case.poison_query(0);
    case.poison_query(5);
    let out = case.run(Isa::best()).unwrap();
    for token in 0..31 {
        let row = &out[token * 6 * 64..(token + 1) * 6 * 64];
        assert_eq!(
            row.iter().all(|x| x.is_nan()),
            token == 0 || token == 5,
            "token {token}"
        );
        assert!(
            token == 0 || token == 5 || row.iter().all(|x| x.is_finite()),
            "token {token}"
        );
    }
}

#[test]
fn callers_of_many_threads_take_turns() {
    let case = Case::new(plain(vec![(1, 700), (50, 120)]));
    let want = case.run(Isa::best()).unwrap();
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                for _ in 0..20 {
                    assert_eq!(case.run(Isa::best()).unwrap(), want);
                }
            });
        }
    });
}

#[test]
fn unsafe_entry_rejects_unknown_isa_gracefully() {
    // Portable is always there; asking for what may be missing must not crash.
    let case = Case::new(plain(vec![(1, 10)]));
    for isa in [Isa::Avx512, Isa::Avx2, Isa::Portable] {
        let mut out = vec![0.0f32; 6 * 64];
        let mut args = case.args();
        args.out = out.as_mut_ptr().cast();
        // SAFETY: the case owns every buffer, of the sizes in its arguments.
        unsafe { paged_attention_with(&args, isa) }.unwrap();
        assert!(out.iter().all(|x| x.is_finite()));
    }
}
