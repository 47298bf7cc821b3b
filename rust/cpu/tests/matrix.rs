//! Weight matrices: products against a scalar reference on random shapes, rows against the package gguf, quantization
//! against its steps, and what is refused.

mod weights;

use octavo_cpu::{
    Activations, Format, Input, Isa, KernelError, Matrix, Output, Shared, ThreadPool,
};
use proptest::prelude::*;
use weights::{Numbers, bytes, relative};

/// What stands where nothing may be written, and where nothing may be read.
const GUARD: f32 = f32::NAN;

#[derive(Clone, Debug)]
struct Case {
    format: Format,
    isa: Isa,
    rows: usize,
    n: usize,
    k: usize,
    threads: usize,
    /// Columns of the output before and behind the product's.
    margin: (usize, usize),
    bias: bool,
    add: bool,
    seed: u64,
}

fn case() -> impl Strategy<Value = Case> {
    let format = prop::sample::select(Format::ALL.to_vec());
    let isa = prop::sample::select(Isa::available().to_vec());
    let rows = prop_oneof![3 => Just(1usize), 3 => 2..9usize, 1 => 9..40usize];
    let n = prop_oneof![1..20usize, 20..140usize];
    let flags = (
        any::<bool>(),
        any::<bool>(),
        1..5usize,
        (0..20usize, 0..5usize),
    );
    (
        format,
        isa,
        rows,
        n,
        1..5usize,
        prop_oneof![1..600usize, 600..1400usize],
        flags,
        any::<u64>(),
    )
        .prop_map(
            |(format, isa, rows, n, blocks, odd_k, (bias, add, threads, margin), seed)| {
                let block = format.block().0;
                let k = if block == 1 { odd_k } else { block * blocks };
                Case {
                    format,
                    isa,
                    rows,
                    n,
                    k,
                    threads,
                    margin,
                    bias,
                    add,
                    seed,
                }
            },
        )
}

/// The product with weights as `row` gives them and the input as it is quantized, in f64; and of each result the root of its
/// terms' squares, which is its size unless they cancel.
fn reference(matrix: &Matrix, x: &[f32], rows: usize) -> (Vec<f64>, Vec<f64>) {
    let (n, k) = (matrix.n(), matrix.k());
    let x = if matrix.format().is_integer() {
        weights::rounded(x, k)
    } else {
        x.iter().map(|&x| f64::from(x)).collect()
    };
    let mut weight = vec![0.0; k];
    let (mut out, mut sizes) = (vec![0.0; rows * n], vec![0.0; rows * n]);
    for j in 0..n {
        matrix.row(j, &mut weight);
        for i in 0..rows {
            let line = &x[i * k..][..k];
            let terms = line.iter().zip(&weight).map(|(x, &w)| x * f64::from(w));
            out[i * n + j] = terms.clone().sum();
            sizes[i * n + j] = terms.map(|term| term * term).sum::<f64>().sqrt();
        }
    }
    (out, sizes)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    #[test]
    fn products_are_those_of_the_unpacked_weights(case in case()) {
        let mut numbers = Numbers(case.seed);
        let (rows, n, k) = (case.rows, case.n, case.k);
        let matrix = Matrix::pack(case.format, &bytes(case.format, n, k, &mut numbers), n, k).unwrap().with_isa(case.isa);
        let x: Vec<f32> = (0..rows * k).map(|_| numbers.float()).collect();
        let bias: Vec<f32> = (0..n).map(|_| numbers.float()).collect();
        let stride = case.margin.0 + n + case.margin.1;
        let mut out = vec![GUARD; rows * stride];
        let (mut wanted, sizes) = reference(&matrix, &x, rows);
        for i in 0..rows {
            for j in 0..n {
                let old = if case.add { numbers.float() } else { GUARD };
                out[i * stride + case.margin.0 + j] = old;
                wanted[i * n + j] += if case.add { f64::from(old) } else { 0.0 };
                wanted[i * n + j] += if case.bias { f64::from(bias[j]) } else { 0.0 };
            }
        }
        let mut quantized = Activations::new(rows, k).with_isa(case.isa);
        quantized.fill(&x);
        let input = Input { x: &x, rows, quantized: Some(&quantized) };
        let output = Output {
            to: Shared::new(&mut out),
            stride,
            column: case.margin.0,
            bias: case.bias.then_some(&bias),
            add: case.add,
        };
        // SAFETY: each thread writes its own part.
        ThreadPool::new(case.threads).run(&|team| unsafe { matrix.multiply(team, &input, &output) });
        for i in 0..rows {
            let line = &out[i * stride..][..stride];
            let (inner, behind) = line[case.margin.0..].split_at(n);
            prop_assert!(line[..case.margin.0].iter().chain(behind).all(|v| v.is_nan()));
            for j in 0..n {
                let error = relative(f64::from(inner[j]), wanted[i * n + j], &sizes[i * n..][..n]);
                prop_assert!(error < 2e-5, "row {i} output {j}: {} for {}", inner[j], wanted[i * n + j]);
            }
        }
    }
}

/// Some of many rows as a product of their own: the same bits.
fn part_of(
    case: &Case,
    matrix: &Matrix,
    x: &[f32],
    first: usize,
    rows: usize,
    threads: usize,
) -> Vec<f32> {
    let (n, k) = (case.n, case.k);
    let x = &x[first * k..][..rows * k];
    let mut out = vec![0.5; rows * n];
    let mut quantized = Activations::new(rows, k).with_isa(case.isa);
    quantized.fill(x);
    let input = Input {
        x,
        rows,
        quantized: Some(&quantized),
    };
    let output = Output {
        add: case.add,
        ..Output::dense(Shared::new(&mut out), n)
    };
    // SAFETY: each thread writes its own part.
    ThreadPool::new(threads).run(&|team| unsafe { matrix.multiply(team, &input, &output) });
    out
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    #[test]
    fn a_row_gets_the_same_bits_in_every_batch(
        case in case(), rows in 2..70usize, blocks in 1..9usize, first in any::<prop::sample::Index>(), size in 2..20usize,
    ) {
        let block = case.format.block().0;
        // Several pieces of columns.
        let k = if block == 1 { case.k + 300 * blocks } else { block * blocks.max(2600 / block * blocks / 8) };
        let case = Case { k, ..case };
        let mut numbers = Numbers(case.seed);
        let weight = bytes(case.format, case.n, k, &mut numbers);
        let matrix = Matrix::pack(case.format, &weight, case.n, k).unwrap().with_isa(case.isa);
        let x: Vec<f32> = (0..rows * k).map(|_| numbers.float()).collect();
        let all = part_of(&case, &matrix, &x, 0, rows, case.threads);
        let first = first.index(rows);
        for size in [1, size.min(rows - first)] {
            let part = part_of(&case, &matrix, &x, first, size, 1);
            let same = part.iter().zip(&all[first * case.n..]).all(|(a, b)| a.to_bits() == b.to_bits());
            prop_assert!(same, "{size} of {rows} rows");
        }
    }
}

#[test]
fn threads_pack_what_one_packs_and_floats_keep_their_bits() {
    let pool = ThreadPool::new(3);
    for format in Format::ALL {
        for (n, columns) in [(1, 1), (16, 15), (17, 16), (48, 17), (2700usize, 400usize)] {
            // Whole blocks; the last is shared.
            let k = columns.next_multiple_of(format.block().0);
            let bytes = bytes(format, n, k, &mut Numbers(7));
            let alone = Matrix::pack(format, &bytes, n, k).unwrap();
            let shared = Matrix::pack_on(Some(&pool), format, &bytes, n, k).unwrap();
            let (mut row, mut other) = (vec![0.0; k], vec![0.0; k]);
            for (i, source) in bytes.chunks_exact(bytes.len() / n).enumerate() {
                alone.row(i, &mut row);
                shared.row(i, &mut other);
                assert_eq!(row, other, "{format:?} {n} x {k}");
                if format == Format::F32 {
                    let stored = source.as_chunks().0.iter().map(|b| f32::from_le_bytes(*b));
                    assert!(row.iter().copied().eq(stored), "row {i} of {n} x {k}");
                }
                if format == Format::Bf16 {
                    let stored = source.as_chunks::<2>().0.iter();
                    let stored = stored.map(|b| u32::from(u16::from_le_bytes(*b)) << 16);
                    assert!(row.iter().map(|x| x.to_bits()).eq(stored), "row {i}");
                }
            }
        }
    }
}

#[test]
fn what_comes_next_changes_no_product() {
    let (n, k, rows) = (80, 700, 30);
    let matrix = |n: usize, k: usize| {
        Matrix::pack(
            Format::F32,
            &bytes(Format::F32, n, k, &mut Numbers(3)),
            n,
            k,
        )
        .unwrap()
    };
    let (own, pool) = (matrix(n, k), ThreadPool::new(2));
    let x: Vec<f32> = (0..rows * k).map(|i| (i % 97) as f32 / 97.0).collect();
    let mut alone = vec![0.0; rows * n];
    own.multiply_on(&pool, &x, rows, &mut alone);
    for next in [matrix(1, 1), matrix(500, 3), matrix(33, 2000)] {
        let mut out = vec![GUARD; rows * n];
        let input = Input {
            x: &x,
            rows,
            quantized: None,
        };
        let output = Output::dense(Shared::new(&mut out), n);
        // SAFETY: threads write distinct parts of `out`.
        pool.run(&|team| unsafe { own.multiply_before(team, &input, &output, Some(&next)) });
        assert_eq!(out, alone);
    }
}

#[test]
fn what_is_not_finite_reaches_every_output_of_its_row_only() {
    for format in Format::ALL {
        for &isa in Isa::available() {
            let (rows, n, k) = (3, 40, 256);
            let matrix = Matrix::pack(format, &bytes(format, n, k, &mut Numbers(7)), n, k)
                .unwrap()
                .with_isa(isa);
            let mut x = vec![1.0; rows * k];
            x[k + 77] = f32::NAN;
            let mut out = vec![0.0; rows * n];
            matrix.multiply_on(&ThreadPool::new(2), &x, rows, &mut out);
            assert!(
                out[..n].iter().chain(&out[2 * n..]).all(|v| v.is_finite()),
                "{format:?}"
            );
            assert!(out[n..2 * n].iter().all(|v| v.is_nan()), "{format:?}");
        }
    }
}

#[test]
fn wrong_sizes_are_refused() {
    let length = |given, wanted| KernelError::Length {
        name: "weight",
        given,
        wanted,
    };
    assert_eq!(
        Matrix::pack(Format::F32, &[0; 15], 2, 2).err(),
        Some(length(15, 16))
    );
    assert_eq!(
        Matrix::pack(Format::Q4K, &[0; 287], 2, 256).err(),
        Some(length(287, 288))
    );
    assert_eq!(
        Matrix::pack(Format::Q8_0, &[], 0, 32).err(),
        Some(KernelError::Zero("n"))
    );
    assert_eq!(
        Matrix::pack(Format::Q8_0, &[], 1, 0).err(),
        Some(KernelError::Zero("k"))
    );
    let columns = KernelError::Columns {
        format: "Q6_K",
        k: 128,
        block: 256,
    };
    assert_eq!(
        Matrix::pack(Format::Q6K, &[0; 105], 1, 128).err(),
        Some(columns)
    );
    for (n, k) in [(usize::MAX, 32), (1 << 40, 1 << 40), (1, usize::MAX - 31)] {
        let error = Matrix::pack(Format::Q8_0, &[0; 34], n, k).err();
        assert!(matches!(error, Some(KernelError::Overflow(_))), "{error:?}");
    }
    assert!(Matrix::pack_channels(&[0; 6], &[1.0; 3], 2, 3).is_err());
}

#[test]
#[should_panic(expected = "does not hold")]
fn an_output_that_is_too_short_is_refused() {
    let matrix = Matrix::pack(Format::F32, &[0; 64], 4, 4).unwrap();
    matrix.multiply_on(&ThreadPool::new(1), &[0.0; 8], 2, &mut [0.0; 7]);
}

fn bytes_of(hex: &str) -> Vec<u8> {
    let pairs = (0..hex.len()).step_by(2);
    pairs
        .map(|i| u8::from_str_radix(&hex[i..i + 2], 16).expect("two hexadecimal digits"))
        .collect()
}

/// The file is written by `weights/gguf_vectors.py`.
#[test]
fn rows_are_those_that_gguf_reads() {
    let mut seen = 0;
    for line in include_str!("weights/gguf.txt").lines() {
        let [name, packed, numbers] = line.split(' ').collect::<Vec<_>>()[..] else {
            panic!("a line has three parts")
        };
        let numbers = bytes_of(numbers);
        let wanted: Vec<f32> = numbers
            .as_chunks::<4>()
            .0
            .iter()
            .map(|b| f32::from_le_bytes(*b))
            .collect();
        // The middle one of three rows, so that lanes other than the first are met.
        let row = bytes_of(packed);
        let other = vec![0; row.len()];
        let all = [&other[..], &row, &other].concat();
        let matrix = Matrix::pack(name.parse().unwrap(), &all, 3, wanted.len()).unwrap();
        let mut found = vec![f32::NAN; wanted.len()];
        matrix.row(1, &mut found);
        assert_eq!(found, wanted, "{name}");
        seen += 1;
    }
    assert_eq!(seen, 7);
}

#[test]
fn quantized_weights_stay_as_near_as_their_steps() {
    let (n, k) = (5, 96);
    let mut numbers = Numbers(3);
    // All of a block between 2 and 3: a minimum is worth its bits there.
    let values: Vec<f32> = (0..n * k)
        .map(|i| numbers.float() * 0.5 + if i % k < 32 { 2.5 } else { 0.0 })
        .collect();
    let bytes: Vec<u8> = values.iter().flat_map(|v| v.to_le_bytes()).collect();
    for (format, steps) in [
        (Format::Int8, 254.0),
        (Format::Q8_0, 254.0),
        (Format::Q4_0, 15.0),
        (Format::Q4_1, 15.0),
    ] {
        let matrix = Matrix::quantize(format, Format::F32, &bytes, n, k).unwrap();
        let mut row = vec![0.0; k];
        for (index, line) in values.chunks_exact(k).enumerate() {
            matrix.row(index, &mut row);
            let width = if format == Format::Int8 { k } else { 32 };
            for (found, wanted) in row.chunks(width).zip(line.chunks(width)) {
                let most = wanted.iter().fold(0.0f32, |m, v| m.max(v.abs()));
                let span = if format == Format::Q4_1 && wanted[0] > 1.5 {
                    1.0
                } else {
                    2.0 * most
                };
                for (found, wanted) in found.iter().zip(wanted) {
                    // Half a step, and what rounding the scale to f16 may add; Q4_0's greatest is a step off on one side.
                    let allowed = span / steps * if format == Format::Q4_0 { 1.07 } else { 0.6 };
                    assert!(
                        (found - wanted).abs() <= allowed,
                        "{format:?}: {found} for {wanted}"
                    );
                }
            }
        }
    }
}

#[test]
fn what_cannot_be_quantized_is_refused() {
    let refused = |format, source, bytes: &[u8], n, k| {
        Matrix::quantize(format, source, bytes, n, k).err().unwrap()
    };
    let pair = KernelError::Quantize {
        source_format: "F32",
        format: "Q6_K",
    };
    assert_eq!(refused(Format::Q6K, Format::F32, &[0; 1024], 1, 256), pair);
    assert!(matches!(
        refused(Format::Q8_0, Format::Q4_0, &[0; 18], 1, 32),
        KernelError::Quantize { .. }
    ));
    assert!(matches!(
        refused(Format::Q8_0, Format::F32, &[0; 160], 1, 40),
        KernelError::Columns { .. }
    ));
    assert!(matches!(
        refused(Format::Q8_0, Format::F32, &[0; 127], 1, 32),
        KernelError::Length { .. }
    ));
}

#[test]
fn quantizing_what_is_not_finite_gives_nan() {
    for format in [Format::Int8, Format::Q8_0, Format::Q4_0, Format::Q4_1] {
        let mut values = vec![1.0f32; 64];
        values[40] = f32::INFINITY;
        let bytes: Vec<u8> = values.iter().flat_map(|v| v.to_le_bytes()).collect();
        let matrix = Matrix::quantize(format, Format::F32, &bytes, 1, 64).unwrap();
        let mut row = vec![0.0; 64];
        matrix.row(0, &mut row);
        assert!(row[32..].iter().all(|v| v.is_nan()), "{format:?}");
        assert!(
            format == Format::Int8 || row[..32].iter().all(|v| v.is_finite()),
            "{format:?}"
        );
    }
}
