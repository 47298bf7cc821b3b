//! A decoder's weights, gathered by role and checked against its description.

use std::collections::HashMap;

use super::description::Description;
use super::error::DecoderError;
use crate::matrix::Matrix;
use crate::matrix::format::Format;
use crate::pool::ThreadPool;

/// The layer of what belongs to none.
pub const TOP: i32 = -1;

/// A product's weights.
pub struct Linear {
    pub matrix: Matrix,
    pub bias: Option<Vec<f32>>,
}

pub struct Layer {
    pub input_norm: Vec<f32>,
    pub q: Linear,
    pub k: Linear,
    pub v: Linear,
    /// Of q and of k.
    pub qk_norm: Option<(Vec<f32>, Vec<f32>)>,
    pub o: Linear,
    pub mlp_norm: Vec<f32>,
    pub gate: Linear,
    pub up: Linear,
    pub down: Linear,
    /// Of attention's and of the MLP's result.
    pub output_norms: Option<(Vec<f32>, Vec<f32>)>,
}

impl Layer {
    fn matrices(&self) -> [&Matrix; 7] {
        [
            &self.q, &self.k, &self.v, &self.o, &self.gate, &self.up, &self.down,
        ]
        .map(|linear| &linear.matrix)
    }
}

pub struct Weights {
    pub embed: Matrix,
    pub layers: Vec<Layer>,
    pub final_norm: Vec<f32>,
    /// None: the embedding matrix.
    pub head: Option<Matrix>,
}

impl Weights {
    pub fn head(&self) -> &Matrix {
        self.head.as_ref().unwrap_or(&self.embed)
    }

    /// Numbers in the matrices of all layers: multiply-adds of a token.
    pub fn num_layer_weights(&self) -> usize {
        let matrices = self.layers.iter().flat_map(Layer::matrices);
        matrices.map(|matrix| matrix.n() * matrix.k()).sum()
    }

    pub fn num_bytes(&self) -> usize {
        let matrices = self.layers.iter().flat_map(Layer::matrices);
        matrices.map(Matrix::num_bytes).sum::<usize>()
            + self.embed.num_bytes()
            + self.head.as_ref().map_or(0, Matrix::num_bytes)
    }
}

/// Tensors on their way into a decoder.
pub struct WeightsBuilder {
    /// Packs matrices.
    pool: ThreadPool,
    matrices: HashMap<(i32, String), Matrix>,
    vectors: HashMap<(i32, String), Vec<f32>>,
}

impl WeightsBuilder {
    /// Matrices are packed by so many threads.
    pub fn new(num_threads: usize) -> Self {
        Self {
            pool: ThreadPool::new(num_threads),
            matrices: HashMap::new(),
            vectors: HashMap::new(),
        }
    }

    /// A matrix `[n, k]`, kept in its own format or, if that is one of floats or `keep` is f32, in the format `keep`.
    pub fn matrix(
        &mut self,
        layer: i32,
        role: &str,
        format: Format,
        bytes: &[u8],
        n: usize,
        k: usize,
        keep: Option<Format>,
    ) -> Result<(), DecoderError> {
        let pool = Some(&self.pool);
        let matrix = match keep {
            Some(keep) if keep.is_integer() && !format.is_integer() => {
                Matrix::quantize_on(pool, keep, format, bytes, n, k)?
            }
            Some(Format::F32) if format != Format::F32 => {
                widened(pool, &Matrix::pack_on(pool, format, bytes, n, k)?)?
            }
            _ => Matrix::pack_on(pool, format, bytes, n, k)?,
        };
        self.matrices.insert((layer, role.to_owned()), matrix);
        Ok(())
    }

    pub fn vector(&mut self, layer: i32, role: &str, values: Vec<f32>) {
        self.vectors.insert((layer, role.to_owned()), values);
    }

    /// The weights of the decoder that `description` tells.
    pub fn finish(mut self, description: &Description) -> Result<Weights, DecoderError> {
        let (vocab, hidden) = (description.vocab_size, description.hidden_size);
        let layers = (0..description.layers.len() as i32)
            .map(|layer| self.layer(layer, description))
            .collect::<Result<_, _>>()?;
        let weights = Weights {
            embed: self.take_matrix(TOP, "embed", vocab, hidden)?,
            layers,
            final_norm: self.take_vector(TOP, "final_norm", hidden)?,
            head: if description.is_tied {
                None
            } else {
                Some(self.take_matrix(TOP, "head", vocab, hidden)?)
            },
        };
        let left = self.matrices.keys().chain(self.vectors.keys()).next();
        match left {
            Some((layer, role)) => Err(DecoderError::Weights(format!(
                "layer {layer} has no {role}"
            ))),
            None => Ok(weights),
        }
    }

    #[allow(clippy::many_single_char_names)] // q, k, v, o are what they are called
    fn layer(&mut self, layer: i32, d: &Description) -> Result<Layer, DecoderError> {
        let (hidden, inner) = (d.hidden_size, d.intermediate_size);
        let (query, key) = (d.query_size(), d.key_size());
        let mut linear = |role: &str, n, k, biased| self.linear(layer, role, n, k, biased);
        let (q, k, v) = (
            linear("q", query, hidden, d.qkv_bias)?,
            linear("k", key, hidden, d.qkv_bias)?,
            linear("v", key, hidden, d.qkv_bias)?,
        );
        let o = linear("o", hidden, query, d.o_bias)?;
        let (gate, up, down) = (
            linear("gate", inner, hidden, d.mlp_bias)?,
            linear("up", inner, hidden, d.mlp_bias)?,
            linear("down", hidden, inner, d.mlp_bias)?,
        );
        let mut norms = |wanted: bool, first: &str, second: &str, size| {
            if !wanted {
                return Ok(None);
            }
            let first = self.take_vector(layer, first, size)?;
            let second = self.take_vector(layer, second, size)?;
            Ok::<_, DecoderError>(Some((first, second)))
        };
        let qk_norm = norms(d.has_qk_norm, "q_norm", "k_norm", d.head_dim)?;
        let output_norms = norms(
            d.has_output_norms,
            "attention_out_norm",
            "mlp_out_norm",
            hidden,
        )?;
        Ok(Layer {
            input_norm: self.take_vector(layer, "input_norm", hidden)?,
            q,
            k,
            v,
            qk_norm,
            o,
            mlp_norm: self.take_vector(layer, "mlp_norm", hidden)?,
            gate,
            up,
            down,
            output_norms,
        })
    }

    fn linear(
        &mut self,
        layer: i32,
        role: &str,
        n: usize,
        k: usize,
        biased: bool,
    ) -> Result<Linear, DecoderError> {
        let matrix = self.take_matrix(layer, role, n, k)?;
        let bias = if biased {
            Some(self.take_vector(layer, &format!("{role}_bias"), n)?)
        } else {
            None
        };
        Ok(Linear { matrix, bias })
    }

    fn take_matrix(
        &mut self,
        layer: i32,
        role: &str,
        n: usize,
        k: usize,
    ) -> Result<Matrix, DecoderError> {
        match self.matrices.remove(&(layer, role.to_owned())) {
            Some(matrix) if (matrix.n(), matrix.k()) == (n, k) => Ok(matrix),
            Some(matrix) => Err(DecoderError::Weights(format!(
                "{role} of layer {layer} is {} x {}, not {n} x {k}",
                matrix.n(),
                matrix.k()
            ))),
            None => Err(missing(layer, role)),
        }
    }

    fn take_vector(
        &mut self,
        layer: i32,
        role: &str,
        len: usize,
    ) -> Result<Vec<f32>, DecoderError> {
        match self.vectors.remove(&(layer, role.to_owned())) {
            Some(values) if values.len() == len => Ok(values),
            Some(values) => Err(DecoderError::Weights(format!(
                "{role} of layer {layer} has {} numbers, not {len}",
                values.len()
            ))),
            None => Err(missing(layer, role)),
        }
    }
}

fn missing(layer: i32, role: &str) -> DecoderError {
    DecoderError::Weights(format!("{role} of layer {layer} is missing"))
}

/// The matrix with its values as f32.
fn widened(pool: Option<&ThreadPool>, matrix: &Matrix) -> Result<Matrix, DecoderError> {
    let (n, k) = (matrix.n(), matrix.k());
    let (mut bytes, mut row) = (Vec::with_capacity(4 * n * k), vec![0.0f32; k]);
    for index in 0..n {
        matrix.row(index, &mut row);
        bytes.extend(row.iter().flat_map(|x| x.to_ne_bytes()));
    }
    Ok(Matrix::pack_on(pool, Format::F32, &bytes, n, k)?)
}
