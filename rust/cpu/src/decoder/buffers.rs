//! The intermediate results of a step, reused by the next.

use super::description::Description;
use super::weights::Weights;
use crate::activations::Activations;

/// Numbers of a step's rows up to which each thread makes its own copy of what all threads read: that takes no longer than
/// waiting for another thread's.
const FEW: usize = 4096;

/// What products read. One for all threads, or one for each.
#[derive(Default)]
pub struct Inputs {
    pub normed: Vec<f32>,
    /// `normed` and `attended` in int8, where integer matrices read them.
    pub normed_quants: Option<Activations>,
    pub attended_quants: Option<Activations>,
}

/// f32 unless said otherwise; `[tokens, width]` each.
#[derive(Default)]
pub struct Buffers {
    /// The residual stream.
    pub hidden: Vec<f32>,
    /// At least `num_inputs`.
    pub inputs: Vec<Inputs>,
    /// 1, or the step's threads.
    pub num_inputs: usize,
    pub q: Vec<f32>,
    pub k: Vec<f32>,
    pub v: Vec<f32>,
    pub attended: Vec<f32>,
    /// A product on its way to the residual, in decoders with output norms.
    pub product: Vec<f32>,
    pub gate: Vec<f32>,
    pub up: Vec<f32>,
    /// Cosines and sines, of each rope.
    pub rotations: Vec<Vec<f32>>,
    /// `gate` in int8, where an integer matrix reads it.
    pub gate_quants: Option<Activations>,
}

impl Buffers {
    pub fn new(description: &Description, weights: &Weights, max_threads: usize) -> Self {
        let of = |is_integer: bool, width: usize| is_integer.then(|| Activations::new(0, width));
        let any = |pick: fn(&super::weights::Layer) -> Vec<&super::weights::Linear>| {
            weights
                .layers
                .iter()
                .flat_map(pick)
                .any(|linear| linear.matrix.format().is_integer())
        };
        let normed = any(|layer| vec![&layer.q, &layer.k, &layer.v, &layer.gate, &layer.up])
            || weights.head().format().is_integer();
        let attended = any(|layer| vec![&layer.o]);
        let inputs = || Inputs {
            normed: Vec::new(),
            normed_quants: of(normed, description.hidden_size),
            attended_quants: of(attended, description.query_size()),
        };
        Self {
            inputs: (0..max_threads).map(|_| inputs()).collect(),
            rotations: vec![Vec::new(); description.ropes.len()],
            gate_quants: of(
                any(|layer| vec![&layer.down]),
                description.intermediate_size,
            ),
            ..Self::default()
        }
    }

    /// Have room for exactly `count` tokens, computed by so many threads.
    pub fn resize(&mut self, description: &Description, count: usize, num_threads: usize) {
        let hidden = description.hidden_size;
        let product = if description.has_output_norms {
            hidden
        } else {
            0
        };
        let is_few = count * hidden.max(description.query_size()) <= FEW;
        self.num_inputs = if is_few { num_threads } else { 1 };
        for inputs in &mut self.inputs[..self.num_inputs] {
            inputs.normed.resize(count * hidden, 0.0);
            let quants = [&mut inputs.normed_quants, &mut inputs.attended_quants];
            for quants in quants.into_iter().flatten() {
                quants.resize(count, quants.width());
            }
        }
        let sizes = [
            (&mut self.hidden, hidden),
            (&mut self.q, description.query_size()),
            (&mut self.k, description.key_size()),
            (&mut self.v, description.key_size()),
            (&mut self.attended, description.query_size()),
            (&mut self.product, product),
            (&mut self.gate, description.intermediate_size),
            (&mut self.up, description.intermediate_size),
        ];
        for (buffer, width) in sizes {
            buffer.resize(count * width, 0.0);
        }
        for (buffer, rope) in self.rotations.iter_mut().zip(&description.ropes) {
            buffer.resize(count * 2 * rope.frequencies.len(), 0.0);
        }
        if let Some(quants) = &mut self.gate_quants {
            quants.resize(count, quants.width());
        }
    }
}
