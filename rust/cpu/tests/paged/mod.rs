//! A random paged cache with rows over it, and the scalar reference in f64.

use octavo_cpu::attention::{AttentionArgs, paged_attention_with};
use octavo_cpu::element::{Bf16, Element, F16, Rounded};
use octavo_cpu::kv_write::narrowing;
use octavo_cpu::{CacheDtype, Dtype, Isa, KernelError};

/// What a case looks like. Rows are (queries, kv length).
#[derive(Clone, Debug)]
pub struct Shape {
    pub rows: Vec<(usize, usize)>,
    /// Of each row but the first, how many positions' keys it has from the row before, at most: of whole blocks before both
    /// rows' queries.
    pub shared: Vec<usize>,
    pub kv_heads: usize,
    pub group: usize,
    pub dim: usize,
    pub dtype: CacheDtype,
    pub window: usize,
    pub soft_cap: f32,
    pub block_size: usize,
    pub num_threads: usize,
    pub seed: u64,
}

impl Shape {
    /// Of q and the output: the cache's, or f32.
    fn io_dtype(&self) -> Dtype {
        match self.dtype {
            CacheDtype::Plain(dtype) if !self.seed.is_multiple_of(2) => dtype,
            _ => Dtype::F32,
        }
    }
}

/// xorshift64*, good enough for test data.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    /// In -2 .. 2.
    fn float(&mut self) -> f32 {
        (self.next() >> 40) as f32 / (1u64 << 22) as f32 - 2.0
    }
}

/// Numbers as the kernel stores them, and what they are.
pub struct Stored {
    bytes: Vec<u64>,
    dtype: Dtype,
    len: usize,
}

impl Stored {
    fn new(values: &[f32], dtype: Dtype) -> Self {
        let mut stored = Stored {
            bytes: vec![0; (values.len() * dtype.bytes()).div_ceil(8)],
            dtype,
            len: values.len(),
        };
        for (i, &value) in values.iter().enumerate() {
            stored.set(i, value);
        }
        stored
    }

    fn pointer(&self) -> *const u8 {
        self.bytes.as_ptr().cast()
    }

    fn set(&mut self, i: usize, value: f32) {
        assert!(i < self.len);
        let start = self.bytes.as_mut_ptr();
        // SAFETY: i < len, and the buffer holds len numbers of the dtype.
        unsafe {
            match self.dtype {
                Dtype::F32 => start.cast::<f32>().add(i).write(value),
                Dtype::Bf16 => start.cast::<Bf16>().add(i).write(Bf16::from_f32(value)),
                Dtype::F16 => start.cast::<F16>().add(i).write(F16::from_f32(value)),
            }
        }
    }

    fn get(&self, i: usize) -> f32 {
        assert!(i < self.len);
        let start = self.bytes.as_ptr();
        // SAFETY: as in `set`.
        unsafe {
            match self.dtype {
                Dtype::F32 => *start.cast::<f32>().add(i),
                Dtype::Bf16 => (*start.cast::<Bf16>().add(i)).to_f32(),
                Dtype::F16 => (*start.cast::<F16>().add(i)).to_f32(),
            }
        }
    }
}

/// The rows of a cache.
struct Rows {
    bytes: Vec<u8>,
    dtype: CacheDtype,
    dim: usize,
}

impl Rows {
    fn new(values: &[f32], dtype: CacheDtype, dim: usize) -> Self {
        let width = dtype.row_bytes(dim);
        let mut bytes = vec![0; values.len() / dim * width + 8];
        let narrow = narrowing(dtype, Isa::Portable);
        let start = align(&mut bytes);
        for (row, target) in values.chunks_exact(dim).zip(start.chunks_exact_mut(width)) {
            // SAFETY: the row has dim numbers, and the target is as wide as a row.
            unsafe { narrow(row.as_ptr(), target.as_mut_ptr(), dim) };
        }
        Rows { bytes, dtype, dim }
    }

    fn row(&self, row: usize) -> &[u8] {
        let width = self.dtype.row_bytes(self.dim);
        let skip = self.bytes.as_ptr().align_offset(8);
        &self.bytes[skip + row * width..][..width]
    }

    fn pointer(&self) -> *const u8 {
        self.row(0).as_ptr()
    }

    fn get(&self, row: usize, d: usize) -> f32 {
        let bytes = self.row(row);
        let half = || u16::from_le_bytes([bytes[2 * d], bytes[2 * d + 1]]);
        let word = |at: usize| f32::from_le_bytes(std::array::from_fn(|i| bytes[at + i]));
        match self.dtype {
            CacheDtype::Plain(Dtype::F32) => word(4 * d),
            CacheDtype::Plain(Dtype::Bf16) => Bf16(half()).to_f32(),
            CacheDtype::Plain(Dtype::F16) => F16(half()).to_f32(),
            CacheDtype::Int8 => f32::from(bytes[d].cast_signed()) * word(self.dim),
        }
    }
}

fn align(bytes: &mut [u8]) -> &mut [u8] {
    let skip = bytes.as_ptr().align_offset(8);
    &mut bytes[skip..]
}

pub struct Case {
    pub shape: Shape,
    pub row_slot: Vec<i32>,
    pub query_start: Vec<i32>,
    pub kv_len: Vec<i32>,
    pub args_override: fn(&mut AttentionArgs),
    table: Vec<i32>,
    width: usize,
    num_slots: usize,
    num_blocks: usize,
    num_tokens: usize,
    q: Stored,
    cache: Rows,
}

/// Two more than `head_dim` * heads: tokens are not dense in q.
const Q_PADDING: usize = 2;

impl Case {
    pub fn new(shape: Shape) -> Self {
        let mut random = Random(shape.seed | 1);
        let (size, heads) = (shape.block_size, shape.kv_heads * shape.group);
        let num_slots = shape.rows.len() + 2;
        let width = shape
            .rows
            .iter()
            .map(|r| r.1.div_ceil(size))
            .max()
            .unwrap_or(1)
            + 1;
        let num_blocks = 3 + shape.rows.iter().map(|r| r.1.div_ceil(size)).sum::<usize>();
        let mut free: Vec<i32> = (1..num_blocks as i32).collect();
        let mut cache = vec![f32::NAN; num_blocks * 2 * shape.kv_heads * size * shape.dim];
        // Entries that no row may use name no block.
        let mut table = vec![-1; num_slots * width];
        let (mut row_slot, mut kv_len, mut query_start) = (vec![], vec![], vec![0]);
        for (row, &(queries, length)) in shape.rows.iter().enumerate() {
            let slot = num_slots - 1 - row;
            let oldest = if shape.window > 0 {
                (length - queries + 1).saturating_sub(shape.window)
            } else {
                0
            };
            let shared = match row.checked_sub(1) {
                Some(before) => {
                    let (others, end) = shape.rows[before];
                    let most = shape.shared.get(before).copied().unwrap_or(0);
                    most.min(length - queries).min(end - others) / size
                }
                None => 0,
            };
            for index in 0..length.div_ceil(size) {
                let mut block = free.swap_remove(random.next() as usize % free.len());
                let before = (index < shared).then(|| table[(slot + 1) * width + index]);
                if let Some(before) = before.filter(|&before| before >= 0) {
                    free.push(std::mem::replace(&mut block, before));
                }
                if (index + 1) * size > oldest {
                    table[slot * width + index] = block;
                }
                for position in (index * size).max(oldest)..length.min((index + 1) * size) {
                    for half in 0..2 * shape.kv_heads {
                        let start = ((block as usize * 2 * shape.kv_heads + half) * size
                            + position % size)
                            * shape.dim;
                        cache[start..start + shape.dim].fill_with(|| random.float());
                    }
                }
            }
            row_slot.push(slot as i32);
            kv_len.push(length as i32);
            query_start.push(query_start[row] + queries as i32);
        }
        let num_tokens = query_start[shape.rows.len()] as usize;
        let q: Vec<f32> = (0..num_tokens * (heads * shape.dim + Q_PADDING))
            .map(|_| random.float())
            .collect();
        let (q, cache) = (
            Stored::new(&q, shape.io_dtype()),
            Rows::new(&cache, shape.dtype, shape.dim),
        );
        let args_override = |_: &mut AttentionArgs| ();
        Case {
            shape,
            row_slot,
            query_start,
            kv_len,
            args_override,
            table,
            width,
            num_slots,
            num_blocks,
            num_tokens,
            q,
            cache,
        }
    }

    fn heads(&self) -> usize {
        self.shape.kv_heads * self.shape.group
    }

    fn q_stride(&self) -> usize {
        self.heads() * self.shape.dim + Q_PADDING
    }

    fn scale(&self) -> f32 {
        1.0 / (self.shape.dim as f32).sqrt()
    }

    /// Add tokens that belong to no row.
    pub fn pad_tokens(&mut self, count: usize) {
        self.num_tokens += count;
        self.q = Stored::new(
            &vec![1.0; self.num_tokens * self.q_stride()],
            self.shape.io_dtype(),
        );
    }

    pub fn poison_query(&mut self, token: usize) {
        let stride = self.q_stride();
        for i in 0..stride {
            self.q.set(token * stride + i, f32::NAN);
        }
    }

    /// Change the table entry of a row.
    pub fn set_block(&mut self, row: usize, index: usize, block: i32) {
        self.table[self.row_slot[row] as usize * self.width + index] = block;
    }

    pub fn args(&self) -> AttentionArgs {
        AttentionArgs {
            q: self.q.pointer(),
            q_stride: self.q_stride(),
            kv_cache: self.cache.pointer(),
            out: std::ptr::null_mut(),
            dtype: self.shape.dtype,
            io_dtype: self.shape.io_dtype(),
            row_slot: self.row_slot.as_ptr(),
            query_start: self.query_start.as_ptr(),
            kv_len: self.kv_len.as_ptr(),
            block_table: self.table.as_ptr(),
            num_rows: self.row_slot.len(),
            num_tokens: self.num_tokens,
            num_slots: self.num_slots,
            max_blocks_per_slot: self.width,
            num_blocks: self.num_blocks,
            block_size: self.shape.block_size,
            num_heads: self.heads(),
            num_kv_heads: self.shape.kv_heads,
            head_dim: self.shape.dim,
            scale: self.scale(),
            window: self.shape.window,
            soft_cap: self.shape.soft_cap,
            num_threads: self.shape.num_threads,
        }
    }

    pub fn run(&self, isa: Isa) -> Result<Vec<f32>, KernelError> {
        let count = self.num_tokens * self.heads() * self.shape.dim;
        let marked = vec![-7.0; count];
        let mut out = Stored::new(&marked, self.shape.io_dtype());
        let mut args = self.args();
        args.out = out.bytes.as_mut_ptr().cast();
        (self.args_override)(&mut args);
        // SAFETY: the case owns every buffer, of the sizes in its arguments; overrides only make calls that are refused.
        let result = unsafe { paged_attention_with(&args, isa) };
        let values: Vec<f32> = (0..count).map(|i| out.get(i)).collect();
        if result.is_err() {
            assert_eq!(values, marked, "a refused call wrote");
        }
        result.map(|()| values)
    }

    /// Output of some queries of some rows, (row, first query, number of queries) each, in a batch of their own.
    pub fn run_parts(
        &self,
        isa: Isa,
        parts: &[(usize, usize, usize)],
        num_threads: usize,
    ) -> Vec<f32> {
        let stride = self.q_stride();
        let (mut row_slot, mut kv_len, mut query_start, mut q) = (vec![], vec![], vec![0], vec![]);
        for &(row, first, count) in parts {
            let (queries, length) = self.shape.rows[row];
            row_slot.push(self.row_slot[row]);
            kv_len.push((length - queries + first + count) as i32);
            query_start.push(query_start[query_start.len() - 1] + count as i32);
            let token = self.query_start[row] as usize + first;
            q.extend((token * stride..(token + count) * stride).map(|i| self.q.get(i)));
        }
        let q = Stored::new(&q, self.shape.io_dtype());
        let num_tokens = query_start[parts.len()] as usize;
        let count = num_tokens * self.heads() * self.shape.dim;
        let mut out = Stored::new(&vec![-7.0; count], self.shape.io_dtype());
        let args = AttentionArgs {
            q: q.pointer(),
            out: out.bytes.as_mut_ptr().cast(),
            row_slot: row_slot.as_ptr(),
            query_start: query_start.as_ptr(),
            kv_len: kv_len.as_ptr(),
            num_rows: parts.len(),
            num_tokens,
            num_threads,
            ..self.args()
        };
        // SAFETY: every buffer lives, of the sizes in the arguments.
        unsafe { paged_attention_with(&args, isa) }.expect("the arguments are right");
        (0..count).map(|i| out.get(i)).collect()
    }

    /// Where a query's outputs begin, and how many they are.
    pub fn outputs(&self, row: usize, query: usize) -> (usize, usize) {
        let width = self.heads() * self.shape.dim;
        ((self.query_start[row] as usize + query) * width, width)
    }

    /// Greatest deviation allowed: rounding of the output, for values below 2.
    pub fn tolerance(&self) -> f32 {
        match self.shape.io_dtype() {
            Dtype::F32 => 2e-5,
            Dtype::F16 => 2e-3,
            Dtype::Bf16 => 1.2e-2,
        }
    }

    fn cached(&self, row: usize, position: usize, half: usize, d: usize) -> f64 {
        let size = self.shape.block_size;
        let block = self.table[self.row_slot[row] as usize * self.width + position / size] as usize;
        let place = (block * 2 * self.shape.kv_heads + half) * size + position % size;
        f64::from(self.cache.get(place, d))
    }

    fn score(&self, row: usize, token: usize, head: usize, key: usize) -> f64 {
        let dim = self.shape.dim;
        let at = token * self.q_stride() + head * dim;
        let half = head / self.shape.group;
        let dot: f64 = (0..dim)
            .map(|d| f64::from(self.q.get(at + d)) * self.cached(row, key, half, d))
            .sum();
        let (score, cap) = (
            dot * f64::from(self.scale()),
            f64::from(self.shape.soft_cap),
        );
        if cap > 0.0 {
            cap * (score / cap).tanh()
        } else {
            score
        }
    }

    /// The same function, one number at a time.
    pub fn reference(&self) -> Vec<f32> {
        let (dim, heads) = (self.shape.dim, self.heads());
        let mut out = vec![0.0; self.num_tokens * heads * dim];
        for row in 0..self.shape.rows.len() {
            let (queries, length) = self.shape.rows[row];
            for query in 0..queries {
                let (token, position) = (
                    self.query_start[row] as usize + query,
                    length - queries + query,
                );
                let low = if self.shape.window > 0 {
                    (position + 1).saturating_sub(self.shape.window)
                } else {
                    0
                };
                for head in 0..heads {
                    let scores: Vec<f64> = (low..=position)
                        .map(|key| self.score(row, token, head, key))
                        .collect();
                    let top = scores.iter().copied().fold(f64::MIN, f64::max);
                    let weights: Vec<f64> = scores.iter().map(|s| (s - top).exp()).collect();
                    let sum: f64 = weights.iter().sum();
                    let half = self.shape.kv_heads + head / self.shape.group;
                    for d in 0..dim {
                        let total: f64 = weights
                            .iter()
                            .zip(low..)
                            .map(|(w, key)| w * self.cached(row, key, half, d))
                            .sum();
                        out[(token * heads + head) * dim + d] = (total / sum) as f32;
                    }
                }
            }
        }
        out
    }
}
