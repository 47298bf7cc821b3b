//! The decoder's layers as one parallel region: every thread of the team runs `Region::run`, and barriers order what one
//! writes and another reads. Between two barriers a buffer is either read by all or written in disjoint parts. Where rows
//! are few, each thread makes its own copy of a product's input, and a layer has six barriers in place of nine.

use std::ops::Range;

use super::attend::Attend;
use super::batch::Batch;
use super::buffers::Buffers;
use super::cache::{Cache, CacheShape};
use super::description::{Description, LayerKind};
use super::rows::{add_rms_norm, cos_sin, gated, rms_norm, rms_norm_in_place, rotate};
use super::weights::{Layer, Linear, Weights};
use crate::activations::Activations;
use crate::matrix::{Input, Output};
use crate::pool::Team;
use crate::shared::Shared;

/// Rows of f32 that threads share.
#[derive(Clone, Copy)]
struct Rows<'a> {
    all: Shared<'a, f32>,
    width: usize,
}

impl<'a> Rows<'a> {
    fn new(buffer: &'a mut [f32], width: usize) -> Self {
        Self {
            all: Shared::new(buffer),
            width,
        }
    }

    /// # Safety
    /// Nobody writes to the row while the result lives.
    unsafe fn row(&self, row: usize) -> &'a [f32] {
        // SAFETY: the caller's.
        unsafe { self.all.part(row * self.width..(row + 1) * self.width) }
    }

    /// # Safety
    /// Nobody else touches the row while the result lives.
    #[allow(clippy::mut_from_ref)] // as Shared
    unsafe fn row_mut(&self, row: usize) -> &'a mut [f32] {
        // SAFETY: the caller's.
        unsafe { self.all.part_mut(row * self.width..(row + 1) * self.width) }
    }

    /// The first `count` rows.
    ///
    /// # Safety
    /// Nobody writes to any of them while the result lives.
    unsafe fn first(&self, count: usize) -> &'a [f32] {
        // SAFETY: the caller's.
        unsafe { self.all.part(0..count * self.width) }
    }

    /// Move rows `from` (ascending) to the front, of this thread's columns.
    ///
    /// # Safety
    /// Nobody else touches these columns meanwhile.
    unsafe fn gather(&self, from: &[usize], columns: Range<usize>) {
        for (to, &from) in from.iter().enumerate().filter(|&(to, &from)| to < from) {
            let place =
                |row: usize| row * self.width + columns.start..row * self.width + columns.end;
            // SAFETY: the caller's; two rows.
            unsafe {
                self.all
                    .part_mut(place(to))
                    .copy_from_slice(self.all.part(place(from)));
            };
        }
    }
}

/// What products read, one for all threads or one for each.
struct Inputs<'a> {
    normed: Rows<'a>,
    normed_quants: Option<&'a Activations>,
    attended_quants: Option<&'a Activations>,
}

/// A step, as all threads see it.
pub struct Region<'a> {
    description: &'a Description,
    weights: &'a Weights,
    batch: &'a Batch,
    attend: &'a Attend,
    shape: CacheShape,
    caches: Vec<Shared<'a, u64>>,
    hidden: Rows<'a>,
    inputs: Vec<Inputs<'a>>,
    q: Rows<'a>,
    k: Rows<'a>,
    v: Rows<'a>,
    attended: Rows<'a>,
    product: Rows<'a>,
    gate: Rows<'a>,
    up: Rows<'a>,
    rotations: Vec<Rows<'a>>,
    gate_quants: Option<&'a Activations>,
}

impl<'a> Region<'a> {
    pub fn new(
        description: &'a Description,
        weights: &'a Weights,
        batch: &'a Batch,
        attend: &'a Attend,
        cache: &'a mut Cache,
        buffers: &'a mut Buffers,
    ) -> Self {
        let d = description;
        let (hidden, query, key, inner) = (
            d.hidden_size,
            d.query_size(),
            d.key_size(),
            d.intermediate_size,
        );
        let rotations = buffers.rotations.iter_mut().zip(&d.ropes);
        Self {
            description,
            weights,
            batch,
            attend,
            shape: cache.shape,
            caches: cache.share(),
            hidden: Rows::new(&mut buffers.hidden, hidden),
            inputs: buffers.inputs[..buffers.num_inputs]
                .iter_mut()
                .map(|inputs| Inputs {
                    normed: Rows::new(&mut inputs.normed, hidden),
                    normed_quants: inputs.normed_quants.as_ref(),
                    attended_quants: inputs.attended_quants.as_ref(),
                })
                .collect(),
            q: Rows::new(&mut buffers.q, query),
            k: Rows::new(&mut buffers.k, key),
            v: Rows::new(&mut buffers.v, key),
            attended: Rows::new(&mut buffers.attended, query),
            product: Rows::new(&mut buffers.product, hidden),
            gate: Rows::new(&mut buffers.gate, inner),
            up: Rows::new(&mut buffers.up, inner),
            rotations: rotations
                .map(|(buffer, rope)| Rows::new(buffer, 2 * rope.frequencies.len()))
                .collect(),
            gate_quants: buffers.gate_quants.as_ref(),
        }
    }

    fn num_tokens(&self) -> usize {
        self.batch.tokens.len()
    }

    /// What this thread's products read; it has to fill `rows` of them, and to `meet` the others who fill theirs.
    fn inputs(&self, team: &Team<'_>) -> &Inputs<'a> {
        &self.inputs[if self.are_own() { team.index() } else { 0 }]
    }

    fn are_own(&self) -> bool {
        self.inputs.len() > 1
    }

    fn rows(&self, team: &Team<'_>, count: usize) -> Range<usize> {
        if self.are_own() {
            0..count
        } else {
            team.share(count, 1)
        }
    }

    fn meet(&self, team: &Team<'_>) {
        if !self.are_own() {
            team.barrier();
        }
    }

    /// From the tokens to the residual stream behind the last layer.
    pub fn run(&self, team: &Team<'_>) {
        self.embed(team);
        team.barrier();
        let kinds = &self.description.layers;
        let layers = &self.weights.layers;
        for (index, (layer, kind)) in layers.iter().zip(kinds).enumerate() {
            self.keys(team, index, layer, *kind);
            team.barrier();
            let is_last = index + 1 == layers.len();
            let count = if is_last {
                self.keep(team)
            } else {
                self.num_tokens()
            };
            if count == 0 {
                return;
            }
            self.attention(team, index, layer, count);
            team.barrier();
            let next = layers.get(index + 1).map(|next| &next.q);
            self.mlp(team, layer, count, next);
            team.barrier();
        }
    }

    /// Have the queries and the residual stream of the tokens that are needed behind the last layer alone, in front; how many
    /// they are.
    fn keep(&self, team: &Team<'_>) -> usize {
        let kept = self.batch.kept.as_slice();
        if !kept.is_empty() && kept.len() < self.num_tokens() {
            for rows in [self.q, self.hidden] {
                // SAFETY: each thread has its columns, between barriers.
                unsafe { rows.gather(kept, team.share(rows.width, 1)) };
            }
            team.barrier();
        }
        kept.len()
    }

    fn embed(&self, team: &Team<'_>) {
        let description = self.description;
        for index in team.share(self.num_tokens(), 1) {
            let token = self.batch.tokens[index];
            // SAFETY: each token's rows are written by one thread.
            let row = unsafe { self.hidden.row_mut(index) };
            self.weights.embed.row(token.id, row);
            for x in row.iter_mut() {
                *x *= description.embedding_scale;
            }
            for (rope, rotations) in description.ropes.iter().zip(&self.rotations) {
                // SAFETY: as above.
                cos_sin(rope, token.position, unsafe { rotations.row_mut(index) });
            }
        }
    }

    /// Norm, q k v, rotation; keys and values into the cache.
    fn keys(&self, team: &Team<'_>, index: usize, layer: &Layer, kind: LayerKind) {
        let inputs = self.inputs(team);
        let count = self.num_tokens();
        self.norm(team, &layer.input_norm, count);
        self.meet(team);
        for (linear, to, next) in [
            (&layer.q, self.q, Some(&layer.k)),
            (&layer.k, self.k, Some(&layer.v)),
            (&layer.v, self.v, None),
        ] {
            let from = (inputs.normed, inputs.normed_quants);
            multiply(team, linear, count, from, to, false, next);
        }
        team.barrier();
        for token in team.share(count, 1) {
            self.rotate_and_write(layer, kind, self.caches[index], token);
        }
    }

    /// Attention and output product of the first `count` rows.
    fn attention(&self, team: &Team<'_>, index: usize, layer: &Layer, count: usize) {
        let (cache, inputs) = (self.caches[index], self.inputs(team));
        // SAFETY: the region's attention was prepared for these buffers; barriers are around it.
        unsafe { (self.attend).run(index, self.q.all, cache, self.attended.all) };
        team.barrier();
        if let Some(quants) = inputs.attended_quants {
            let columns = if self.are_own() {
                0..self.attended.width
            } else {
                team.share(self.attended.width, crate::activations::BLOCK)
            };
            // SAFETY: nobody writes `attended` now, and each thread has its columns, or its quants.
            unsafe { quants.fill_part(self.attended.all, 0..count, columns) };
            self.meet(team);
        }
        let norm = layer.output_norms.as_ref().map(|(norm, _)| norm.as_slice());
        let from = (self.attended, inputs.attended_quants);
        self.add(team, &layer.o, count, from, norm, Some(&layer.gate));
    }

    /// Norm, gate and up, activation, down, of the first `count` rows; `next` is multiplied then.
    fn mlp(&self, team: &Team<'_>, layer: &Layer, count: usize, next: Option<&Linear>) {
        let inputs = self.inputs(team);
        self.norm(team, &layer.mlp_norm, count);
        self.meet(team);
        for (linear, to, next) in [
            (&layer.gate, self.gate, &layer.up),
            (&layer.up, self.up, &layer.down),
        ] {
            let from = (inputs.normed, inputs.normed_quants);
            multiply(team, linear, count, from, to, false, Some(next));
        }
        let (rows, columns) = layer.gate.matrix.part(team, count);
        let is_same = layer.up.matrix.part(team, count) == (rows.clone(), columns.clone());
        debug_assert!(is_same, "gate and up have one shape");
        for row in rows.clone() {
            let place = |columns: &Range<usize>| {
                row * self.gate.width + columns.start..row * self.gate.width + columns.end
            };
            // SAFETY: this thread's own part of both, just written by itself.
            let (gate, up) = unsafe {
                (
                    self.gate.all.part_mut(place(&columns)),
                    self.up.all.part(place(&columns)),
                )
            };
            gated(self.description.activation, gate, up);
        }
        if let Some(quants) = self.gate_quants {
            // SAFETY: reads this thread's own part alone, and writes the same part of the quants.
            unsafe { quants.fill_part(self.gate.all, rows, columns) };
        }
        team.barrier();
        let norm = layer.output_norms.as_ref().map(|(_, norm)| norm.as_slice());
        let from = (self.gate, self.gate_quants);
        self.add(team, &layer.down, count, from, norm, next);
    }

    /// The normalized residual stream, and its quants, of the first `count` rows.
    fn norm(&self, team: &Team<'_>, gain: &[f32], count: usize) {
        let (inputs, rows) = (self.inputs(team), self.rows(team, count));
        for row in rows.clone() {
            // SAFETY: nobody writes `hidden` now, and each row of the inputs is normalized by one thread.
            unsafe {
                let (x, out) = (self.hidden.row(row), inputs.normed.row_mut(row));
                rms_norm(x, gain, self.description.norm_eps, out);
            }
        }
        if let Some(quants) = inputs.normed_quants {
            // SAFETY: reads and writes this thread's own rows.
            unsafe { quants.fill_part(inputs.normed.all, rows, 0..inputs.normed.width) };
        }
    }

    /// Add a product to the residual stream, normalized first where there is a norm.
    fn add(
        &self,
        team: &Team<'_>,
        linear: &Linear,
        count: usize,
        from: (Rows<'_>, Option<&Activations>),
        norm: Option<&[f32]>,
        next: Option<&Linear>,
    ) {
        let Some(gain) = norm else {
            return multiply(team, linear, count, from, self.hidden, true, next);
        };
        multiply(team, linear, count, from, self.product, false, next);
        team.barrier();
        for row in team.share(count, 1) {
            // SAFETY: nobody writes `product` now, and each row is added by one thread.
            unsafe {
                let (x, sum) = (self.product.row(row), self.hidden.row_mut(row));
                add_rms_norm(x, gain, self.description.norm_eps, sum);
            }
        }
    }

    fn rotate_and_write(
        &self,
        layer: &Layer,
        kind: LayerKind,
        cache: Shared<'_, u64>,
        token: usize,
    ) {
        let (dim, eps) = (self.description.head_dim, self.description.norm_eps);
        // SAFETY: each token's rows, and its place in the cache, are one thread's.
        unsafe {
            let cos_sin = self.rotations[kind.rope].row(token);
            let (q, k) = (self.q.row_mut(token), self.k.row_mut(token));
            if let Some((q_gain, k_gain)) = &layer.qk_norm {
                q.chunks_exact_mut(dim)
                    .for_each(|head| rms_norm_in_place(head, q_gain, eps));
                k.chunks_exact_mut(dim)
                    .for_each(|head| rms_norm_in_place(head, k_gain, eps));
            }
            for head in q.chunks_exact_mut(dim).chain(k.chunks_exact_mut(dim)) {
                rotate(head, cos_sin);
            }
            let place = self.batch.place(kind.group, token);
            self.attend
                .write(&self.shape, cache, place, k, self.v.row(token));
        }
    }
}

/// A product of the first `count` rows, and of the same quantized where the matrix reads these.
fn multiply(
    team: &Team<'_>,
    linear: &Linear,
    count: usize,
    (from, quantized): (Rows<'_>, Option<&Activations>),
    to: Rows<'_>,
    add: bool,
    next: Option<&Linear>,
) {
    // SAFETY: nobody writes `from` between the barriers around a product.
    let x = unsafe { from.first(count) };
    let input = Input {
        x,
        rows: count,
        quantized,
    };
    let output = Output {
        to: to.all,
        stride: to.width,
        column: 0,
        bias: linear.bias.as_deref(),
        add,
    };
    // SAFETY: threads write disjoint parts of `to`, and nobody reads it before the next barrier.
    unsafe {
        let next = next.map(|next| &next.matrix);
        linear.matrix.multiply_before(team, &input, &output, next);
    };
}
