//! Attention of a step's layers over the paged cache: where keys and values are written, and the kernels' arguments.

use super::batch::{Batch, Slots, StepView};
use super::cache::CacheShape;
use super::description::{Description, LayerKind};
use super::error::DecoderError;
use crate::attention::{AttentionArgs, StepAttention};
use crate::element::{CacheDtype, Dtype};
use crate::isa::Isa;
use crate::kv_write::{Narrow, narrowing};
use crate::shared::Shared;

/// A step's attention: checked once, run layer by layer.
pub struct Attend {
    kernels: StepAttention,
    narrow: Narrow,
    /// Windows that layers have, and their cache groups; and which of these pairs each layer has.
    windows: Vec<(usize, usize)>,
    kinds: Vec<usize>,
    /// Of each pair, then of the last layer if it computes fewer tokens; pointers to q, cache and out are filled in by the
    /// layer.
    args: Vec<AttentionArgs>,
    /// Which of the pairs the last layer has.
    last_kind: usize,
}

// SAFETY: the pointers in `args` are used in the step that set them alone, while what they point to is borrowed.
unsafe impl Send for Attend {}
// SAFETY: as above; threads read them.
unsafe impl Sync for Attend {}

impl Attend {
    pub fn new(description: &Description, dtype: CacheDtype) -> Self {
        let pair = |layer: &LayerKind| (layer.window, layer.group);
        let mut windows: Vec<(usize, usize)> = description.layers.iter().map(pair).collect();
        windows.sort_unstable();
        windows.dedup();
        let kind = |layer| windows.iter().position(|&w| w == pair(layer)).unwrap_or(0);
        let kinds: Vec<usize> = description.layers.iter().map(kind).collect();
        Self {
            kernels: StepAttention::default(),
            narrow: narrowing(dtype, Isa::best()),
            last_kind: kinds.last().copied().unwrap_or(0),
            kinds,
            windows,
            args: Vec::new(),
        }
    }

    /// Check a step, which `batch` has checked, for the kernels. `q` and `out` are `[tokens, heads, head_dim]`.
    pub fn prepare(
        &mut self,
        description: &Description,
        shape: &CacheShape,
        (step, batch): (&StepView<'_>, &Batch),
        slots: &Slots,
        num_threads: usize,
        (q, cache, out): (*const f32, *const u64, *mut f32),
    ) -> Result<(), DecoderError> {
        let args = |&(window, group): &(usize, usize)| AttentionArgs {
            q: q.cast(),
            q_stride: description.query_size(),
            kv_cache: cache.cast(),
            out: out.cast(),
            dtype: shape.dtype,
            io_dtype: Dtype::F32,
            row_slot: step.row_slot.as_ptr(),
            query_start: step.query_start.as_ptr(),
            kv_len: step.kv_len.as_ptr(),
            block_table: slots.tables(group).as_ptr(),
            num_rows: step.row_slot.len(),
            num_tokens: step.token_id.len(),
            num_slots: slots.limits.num_slots,
            max_blocks_per_slot: slots.limits.max_blocks,
            num_blocks: shape.num_blocks,
            block_size: shape.block_size,
            num_heads: description.num_heads,
            num_kv_heads: description.num_kv_heads,
            head_dim: description.head_dim,
            scale: description.attention_scale,
            window,
            soft_cap: description.attention_cap,
            num_threads,
        };
        self.args.clear();
        self.args.extend(self.windows.iter().map(args));
        let Some(last) = self.kinds.last_mut() else {
            return Ok(());
        };
        let own = self.args[self.last_kind];
        *last = self.last_kind;
        if batch.kept.len() < batch.tokens.len() {
            *last = self.args.len();
            self.args.push(AttentionArgs {
                query_start: batch.kept_start.as_ptr(),
                num_tokens: batch.kept.len(),
                ..own
            });
        }
        // SAFETY: the slices are as long as the sizes say: `Batch` checked them.
        unsafe { self.kernels.prepare(&self.args, &self.kinds)? };
        Ok(())
    }

    /// This thread's part of a layer.
    ///
    /// # Safety
    /// `prepare` came before in this step; `q`, `out` and `cache` have the sizes it was told; nobody writes to q or the
    /// cache, or touches `out`, until the next barrier.
    pub unsafe fn run(
        &self,
        layer: usize,
        q: Shared<'_, f32>,
        cache: Shared<'_, u64>,
        out: Shared<'_, f32>,
    ) {
        let kind = self.kinds[layer];
        let args = AttentionArgs {
            q: q.address(0).cast_const().cast(),
            kv_cache: cache.address(0).cast_const().cast(),
            out: out.address(0).cast(),
            ..self.args[kind]
        };
        // SAFETY: the caller's.
        unsafe { self.kernels.run(layer, kind, args) };
    }

    /// Store one token's K and V `[num_kv_heads, head_dim]` at `place`.
    ///
    /// # Safety
    /// `cache` has the shape, `place` is within it, and no other thread touches it.
    pub unsafe fn write(
        &self,
        shape: &CacheShape,
        cache: Shared<'_, u64>,
        place: usize,
        k: &[f32],
        v: &[f32],
    ) {
        let dim = shape.head_dim;
        let (block, offset) = (place / shape.block_size, place % shape.block_size);
        for (which, values) in [k, v].into_iter().enumerate() {
            for (head, values) in values.chunks_exact(dim).enumerate() {
                let row = (block * 2 + which) * shape.num_kv_heads + head;
                let start = (row * shape.block_size + offset) * shape.row_bytes();
                // SAFETY: within the block, which is within the cache.
                unsafe {
                    let target = cache.address(0).cast::<u8>().add(start);
                    (self.narrow)(values.as_ptr(), target, dim);
                }
            }
        }
    }
}
