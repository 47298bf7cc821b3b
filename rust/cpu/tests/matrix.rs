//! Weight matrices: products against a scalar reference on random shapes, and what is refused.

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
        1..600usize,
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

/// The product with weights as `row` gives them and the input as it is quantized, in f64.
fn reference(matrix: &Matrix, x: &[f32], rows: usize) -> Vec<f64> {
    let (n, k) = (matrix.n(), matrix.k());
    let x = if matrix.format().is_integer() {
        weights::rounded(x, k)
    } else {
        x.iter().map(|&x| f64::from(x)).collect()
    };
    let mut weight = vec![0.0; k];
    let mut out = vec![0.0; rows * n];
    for j in 0..n {
        matrix.row(j, &mut weight);
        for i in 0..rows {
            let line = &x[i * k..][..k];
            out[i * n + j] = line
                .iter()
                .zip(&weight)
                .map(|(x, &w)| x * f64::from(w))
                .sum();
        }
    }
    out
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
        let mut wanted = reference(&matrix, &x, rows);
        for i in 0..rows {
            for j in 0..n {
                let old = if case.add { numbers.float() } else { GUARD };
                out[i * stride + case.margin.0 + j] = old;
                wanted[i * n + j] += if case.add { f64::from(old) } else { 0.0 };
                wanted[i * n + j] += if case.bias { f64::from(bias[j]) } else { 0.0 };
            }
        }
        let mut quantized = Activations::new(rows, k);
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
                let error = relative(f64::from(inner[j]), wanted[i * n + j], &wanted[i * n..][..n]);
                prop_assert!(error < 2e-5, "row {i} output {j}: {} for {}", inner[j], wanted[i * n + j]);
            }
        }
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
