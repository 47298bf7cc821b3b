//! The intermediate results of a step, reused by the next.

use super::description::Description;
use super::weights::Weights;
use crate::activations::Activations;

/// f32 unless said otherwise; `[tokens, width]` each.
#[derive(Default)]
pub struct Buffers {
    /// The residual stream.
    pub hidden: Vec<f32>,
    pub normed: Vec<f32>,
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
    /// `normed`, `attended` and `gate` in int8, where integer matrices read them.
    pub normed_quants: Option<Activations>,
    pub attended_quants: Option<Activations>,
    pub gate_quants: Option<Activations>,
}

impl Buffers {
    pub fn new(description: &Description, weights: &Weights) -> Self {
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
        Self {
            rotations: vec![Vec::new(); description.ropes.len()],
            normed_quants: of(normed, description.hidden_size),
            attended_quants: of(any(|layer| vec![&layer.o]), description.query_size()),
            gate_quants: of(
                any(|layer| vec![&layer.down]),
                description.intermediate_size,
            ),
            ..Self::default()
        }
    }

    /// Have room for exactly `count` tokens.
    pub fn resize(&mut self, description: &Description, count: usize) {
        let hidden = description.hidden_size;
        let product = if description.has_output_norms {
            hidden
        } else {
            0
        };
        let sizes = [
            (&mut self.hidden, hidden),
            (&mut self.normed, hidden),
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
        let quants = [
            &mut self.normed_quants,
            &mut self.attended_quants,
            &mut self.gate_quants,
        ];
        for quants in quants.into_iter().flatten() {
            quants.resize(count, quants.width());
        }
    }
}
