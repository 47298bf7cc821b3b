//! Each weight format's product beside what the machine can do: `cargo run --release -p octavo-cpu --example kernels`
//! (`-- --isa avx2 --threads 1 --rows 1,32`).
//!
//! One row: bytes of weights a second (weights larger than the caches, read in turn) against the read bandwidth measured in
//! turn with it: the median of the pairs' ratios, as other processes change both. `--cached`: weights that stay in a cache,
//! which is what the arithmetic alone takes. Many rows: multiply-adds a second against the peak rate of int8 with numbers
//! of as many bits (without VNNI, 8-bit numbers take two multiplications where 4-bit ones take one), the best of several
//! runs.

use std::time::Instant;

use octavo_cpu::limits::{PIECE_BYTES, Reading, int_macs, measure_with};
use octavo_cpu::{Activations, Format, Input, Isa, Matrix, Output, Shared, ThreadPool};

/// n x k: those of SmolLM2-135M, and a large one (`--shapes` chooses).
const SHAPES: &str = "576x576,1536x576,576x1536,49152x576,4096x4096";
/// Bits of integer weights.
const BITS: [usize; 4] = [4, 5, 6, 8];
/// Weights of one row are spread over as many bytes of matrices, so that they come from memory.
const SPREAD_BYTES: usize = 192 << 20;
const RUN_BYTES: usize = 16 << 20;
const SECONDS: f64 = 0.25;

fn option(name: &str) -> Option<String> {
    let mut args = std::env::args();
    args.find(|arg| arg == name).and_then(|_| args.next())
}

fn main() {
    let number = |text: String| text.parse().expect("a number");
    let num_threads = option("--threads").map_or_else(
        || std::thread::available_parallelism().map_or(1, usize::from),
        number,
    );
    let rows: Vec<usize> = option("--rows")
        .unwrap_or("1,32,512".to_owned())
        .split(',')
        .map(|text| number(text.to_owned()))
        .collect();
    let isa = option("--isa").map_or(Isa::best(), |name| {
        let known = Isa::available().iter().find(|isa| isa.name() == name);
        *known.expect("instructions of this machine")
    });
    let formats: Vec<Format> = option("--formats").map_or(Format::ALL.to_vec(), |names| {
        names
            .split(',')
            .map(|name| name.parse().expect("a format"))
            .collect()
    });
    let shapes: Vec<(usize, usize)> = option("--shapes")
        .unwrap_or(SHAPES.to_owned())
        .split(',')
        .map(|shape| {
            let (n, k) = shape.split_once('x').expect("n x k");
            (number(n.to_owned()), number(k.to_owned()))
        })
        .collect();
    let pool = ThreadPool::new(num_threads);
    let limits = measure_with(&pool, isa);
    let reading = Reading::new(isa);
    let peaks = BITS.map(|bits| int_macs(&pool, isa, bits));
    println!(
        "{num_threads} threads, {}: read {:.1} GB/s; GMAC/s of f32 {:.0}, of int8 with {BITS:?} bits {:.0?}",
        isa.name(),
        limits.read_bytes / 1e9,
        limits.f32_macs / 1e9,
        peaks.map(|peak| peak / 1e9)
    );
    for format in formats {
        let peak = match format {
            Format::F32 | Format::Bf16 | Format::F16 => limits.f32_macs,
            Format::Q4_0 | Format::Q4_1 | Format::Q4K => peaks[0],
            Format::Q5K => peaks[1],
            Format::Q6K => peaks[2],
            Format::Int8 | Format::Q8_0 => peaks[3],
        };
        for &(n, k) in &shapes {
            if k.is_multiple_of(format.block().0) {
                let times: Vec<String> = rows
                    .iter()
                    .map(|&rows| bench(&pool, &reading, peak, format, isa, rows, n, k))
                    .collect();
                println!("{:5} {n:5} x {k:4}  {}", format.name(), times.join("   "));
            }
        }
    }
}

fn bench(
    pool: &ThreadPool,
    reading: &Reading,
    peak: f64,
    format: Format,
    isa: Isa,
    rows: usize,
    n: usize,
    k: usize,
) -> String {
    let bytes = vec![0x11u8; n * format.row_bytes(k).expect("whole blocks")];
    let is_cached = std::env::args().any(|arg| arg == "--cached");
    let copies = if rows == 1 && !is_cached {
        (SPREAD_BYTES / bytes.len()).max(1)
    } else {
        1
    };
    let matrices: Vec<Matrix> = (0..copies)
        .map(|_| {
            Matrix::pack(format, &bytes, n, k)
                .expect("sizes fit")
                .with_isa(isa)
        })
        .collect();
    // Short runs, so that some are not interrupted.
    let calls = if rows == 1 {
        (RUN_BYTES / bytes.len()).clamp(1, if is_cached { usize::MAX } else { copies })
    } else {
        ((1 << 26) / (rows * n * k)).max(1)
    };
    let x = vec![0.5; rows * k];
    let mut out = vec![0.0; rows * n];
    let mut quantized = Activations::new(rows, k);
    quantized.fill(&x);
    let input = Input {
        x: &x,
        rows,
        quantized: Some(&quantized),
    };
    let output = Output::dense(Shared::new(&mut out), n);
    let (start, mut times) = (Instant::now(), vec![]);
    while times.len() < 5 || start.elapsed().as_secs_f64() < SECONDS {
        let limit = reading.run(pool, times.len()).as_secs_f64();
        let start = Instant::now();
        pool.run(&|team| {
            let turn = matrices.iter().cycle().skip(times.len() * calls % copies);
            for matrix in turn.take(calls) {
                // SAFETY: each thread writes its own part of `out`, the same for every matrix.
                unsafe { matrix.multiply(team, &input, &output) };
            }
        });
        times.push((start.elapsed().as_secs_f64() / calls as f64, limit));
    }
    if rows == 1 {
        let bytes = matrices[0].num_bytes() as f64;
        let speed = median(times.iter().map(|(time, _)| bytes / time));
        let share = median(
            times
                .iter()
                .map(|(time, limit)| bytes / time * limit / PIECE_BYTES as f64),
        );
        return format!("1 row {:6.1} GB/s {:3.0}%", speed / 1e9, 100.0 * share);
    }
    let time = times
        .iter()
        .map(|(time, _)| *time)
        .fold(f64::INFINITY, f64::min);
    let speed = (rows * n * k) as f64 / time;
    format!(
        "{rows} rows {:6.1} GMAC/s {:3.0}%",
        speed / 1e9,
        100.0 * speed / peak
    )
}

fn median(values: impl Iterator<Item = f64>) -> f64 {
    let mut values: Vec<f64> = values.collect();
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}
