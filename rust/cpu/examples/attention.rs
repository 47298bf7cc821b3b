//! Speed of attention: multiply-adds a second of steps like those of a small model, beside what the machine multiplies at
//! most; caches of as many layers as one has, so that keys come from where they lie then.
//!
//!     cargo run --release -p octavo-cpu --example attention -- --threads 1 --isa avx2

use std::time::{Duration, Instant};

use octavo_cpu::attention::{AttentionArgs, paged_attention_with};
use octavo_cpu::limits::measure_with;
use octavo_cpu::pool::ThreadPool;
use octavo_cpu::{CacheDtype, Dtype, Isa};

const KV_HEADS: usize = 3;
const GROUP: usize = 3;
const DIM: usize = 64;
const BLOCK: usize = 16;
const LAYERS: usize = 30;

/// Rows of (queries, length), of which the first `shared` positions are the same in all.
struct Step {
    name: &'static str,
    rows: Vec<(usize, usize)>,
    shared: usize,
}

fn steps() -> Vec<Step> {
    let step = |name, rows, shared| Step { name, rows, shared };
    vec![
        step("decode 32 x 190", vec![(1, 190); 32], 0),
        step("decode 16 x 1064, 1024 shared", vec![(1, 1064); 16], 1024),
        step("decode 16 x 1064", vec![(1, 1064); 16], 0),
        step("decode 1 x 1500", vec![(1, 1500)], 0),
        step("prefill 4 x 128", vec![(128, 128); 4], 0),
        step("prefill 512 behind 512", vec![(512, 1024)], 0),
        step("prefill 16 x 32 behind 1024", vec![(32, 1056); 16], 1024),
    ]
}

fn main() {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let value = |name: &str| {
        let at = args.iter().position(|arg| arg == name)?;
        args.get(at + 1).cloned()
    };
    let num_threads = value("--threads").map_or(1, |text| text.parse().expect("a number"));
    let isa = value("--isa").map_or(Isa::best(), |name| {
        let found = Isa::available().iter().find(|isa| isa.name() == name);
        *found.expect("an instruction set that runs here")
    });
    let seconds: f64 = value("--seconds").map_or(1.0, |text| text.parse().expect("a number"));
    let limits = measure_with(&ThreadPool::new(num_threads), isa);
    println!(
        "{}, {num_threads} threads: {:.0} GMAC/s of f32, {:.0} GB/s",
        isa.name(),
        limits.f32_macs / 1e9,
        limits.read_bytes / 1e9
    );
    for step in steps() {
        let (time, macs, bytes) = fastest(&step, isa, num_threads, seconds);
        println!(
            "{:<30} {:8.1} us a layer, {:6.1} GMAC/s ({:3.0}%), {:5.1} GB/s of keys and values",
            step.name,
            time * 1e6,
            macs / time / 1e9,
            100.0 * macs / time / limits.f32_macs,
            bytes / time / 1e9
        );
    }
}

/// Seconds of a layer at best, of several passes by all layers; its multiply-adds, and bytes of keys and values.
fn fastest(step: &Step, isa: Isa, num_threads: usize, seconds: f64) -> (f64, f64, f64) {
    let width = step
        .rows
        .iter()
        .map(|row| row.1.div_ceil(BLOCK))
        .max()
        .unwrap_or(1);
    let (mut table, mut num_blocks) = (vec![], 0);
    for row in 0..step.rows.len() {
        for index in 0..width {
            if row > 0 && (index + 1) * BLOCK <= step.shared {
                table.push(index as i32);
            } else {
                table.push(num_blocks);
                num_blocks += 1;
            }
        }
    }
    let num_blocks = num_blocks as usize;
    let words = num_blocks * 2 * KV_HEADS * BLOCK * DIM;
    let caches: Vec<Vec<f32>> = (0..LAYERS)
        .map(|layer| {
            (0..words)
                .map(|i| ((i * 7 + layer) % 13) as f32 * 0.1 - 0.6)
                .collect()
        })
        .collect();
    let num_tokens: usize = step.rows.iter().map(|row| row.0).sum();
    let heads = KV_HEADS * GROUP;
    let q: Vec<f32> = (0..num_tokens * heads * DIM)
        .map(|i| (i % 17) as f32 * 0.1 - 0.8)
        .collect();
    let mut out = vec![0.0f32; q.len()];
    let row_slot: Vec<i32> = (0..step.rows.len() as i32).collect();
    let kv_len: Vec<i32> = step.rows.iter().map(|row| row.1 as i32).collect();
    let mut query_start = vec![0];
    for row in &step.rows {
        query_start.push(query_start[query_start.len() - 1] + row.0 as i32);
    }
    let mut args = AttentionArgs {
        q: q.as_ptr().cast(),
        q_stride: heads * DIM,
        kv_cache: caches[0].as_ptr().cast(),
        out: out.as_mut_ptr().cast(),
        dtype: CacheDtype::Plain(Dtype::F32),
        io_dtype: Dtype::F32,
        row_slot: row_slot.as_ptr(),
        query_start: query_start.as_ptr(),
        kv_len: kv_len.as_ptr(),
        block_table: table.as_ptr(),
        num_rows: step.rows.len(),
        num_tokens,
        num_slots: step.rows.len(),
        max_blocks_per_slot: width,
        num_blocks,
        block_size: BLOCK,
        num_heads: heads,
        num_kv_heads: KV_HEADS,
        head_dim: DIM,
        scale: 0.125,
        window: 0,
        soft_cap: 0.0,
        num_threads,
    };
    let mut best = vec![Duration::MAX; LAYERS];
    let begun = Instant::now();
    while begun.elapsed().as_secs_f64() < seconds {
        for (cache, best) in caches.iter().zip(&mut best) {
            args.kv_cache = cache.as_ptr().cast();
            let start = Instant::now();
            // SAFETY: every buffer lives, of the sizes in the arguments.
            unsafe { paged_attention_with(&args, isa) }.expect("the arguments are right");
            *best = start.elapsed().min(*best);
        }
    }
    best.sort();
    let visible = |row: &(usize, usize)| (0..row.0).map(|i| row.1 - i).sum::<usize>();
    let keys: usize = step.rows.iter().map(visible).sum();
    let unique =
        step.rows.iter().map(|row| row.1).sum::<usize>() - step.shared * (step.rows.len() - 1);
    (
        best[LAYERS / 2].as_secs_f64(),
        (keys * heads * DIM * 2) as f64,
        (unique * 2 * KV_HEADS * DIM * 4) as f64,
    )
}
