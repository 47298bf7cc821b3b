//! What a decoder is, told once: sizes, layers, rotations, scales. Pre-norm blocks with rotary attention and a gated MLP.

use super::error::DecoderError;

/// Of the gate in the MLP.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Activation {
    Silu,
    Gelu,
    /// By the tanh approximation.
    GeluTanh,
    Relu,
}

impl std::str::FromStr for Activation {
    type Err = DecoderError;

    fn from_str(name: &str) -> Result<Self, DecoderError> {
        match name {
            "silu" => Ok(Self::Silu),
            "gelu" => Ok(Self::Gelu),
            "gelu_tanh" => Ok(Self::GeluTanh),
            "relu" => Ok(Self::Relu),
            _ => Err(DecoderError::Description(format!(
                "unknown activation {name:?}"
            ))),
        }
    }
}

/// How one kind of layer rotates q and k.
#[derive(Clone, Debug)]
pub struct Rope {
    /// Angle per position, one for each pair of dimensions (i, i + `frequencies.len()`); the others stay.
    pub frequencies: Vec<f32>,
    /// Of cosines and sines.
    pub factor: f32,
}

/// What differs between layers.
#[derive(Clone, Copy, Debug)]
pub struct LayerKind {
    /// A query sees itself and the `window - 1` tokens before; 0 = all.
    pub window: usize,
    /// Which of `Description::ropes`.
    pub rope: usize,
    /// Its cache group: layers of one have the same blocks, each in a cache of its own.
    pub group: usize,
}

#[allow(clippy::struct_excessive_bools)] // facts of a checkpoint, which do not exclude each other
#[derive(Clone, Debug)]
pub struct Description {
    pub vocab_size: usize,
    pub hidden_size: usize,
    pub intermediate_size: usize,
    pub num_heads: usize,
    pub num_kv_heads: usize,
    pub head_dim: usize,
    pub norm_eps: f32,
    pub activation: Activation,
    pub layers: Vec<LayerKind>,
    pub ropes: Vec<Rope>,
    /// The head is the embedding matrix.
    pub is_tied: bool,
    /// RMS norms over each head of q and k before the rotation.
    pub has_qk_norm: bool,
    /// Norms after attention and after the MLP too, before each is added to the residual.
    pub has_output_norms: bool,
    pub qkv_bias: bool,
    pub o_bias: bool,
    pub mlp_bias: bool,
    pub attention_scale: f32,
    pub embedding_scale: f32,
    /// 0 = off.
    pub attention_cap: f32,
    /// Logits become cap * tanh(logit / cap); 0 = off.
    pub logit_cap: f32,
}

impl Description {
    pub fn query_size(&self) -> usize {
        self.num_heads * self.head_dim
    }

    pub fn key_size(&self) -> usize {
        self.num_kv_heads * self.head_dim
    }

    pub fn num_groups(&self) -> usize {
        self.layers.iter().map(|l| l.group + 1).max().unwrap_or(0)
    }

    /// Which cache each layer has: the nth layers of all groups share one.
    pub fn lanes(&self) -> Vec<usize> {
        let before = |layer: usize| &self.layers[..layer];
        let lane = |(layer, kind): (usize, &LayerKind)| {
            let same = before(layer).iter().filter(|l| l.group == kind.group);
            same.count()
        };
        self.layers.iter().enumerate().map(lane).collect()
    }

    /// Sizes that no decoder has.
    pub fn check(&self) -> Result<(), DecoderError> {
        let sizes = [
            ("vocab_size", self.vocab_size),
            ("hidden_size", self.hidden_size),
            ("intermediate_size", self.intermediate_size),
            ("num_heads", self.num_heads),
            ("num_kv_heads", self.num_kv_heads),
            ("head_dim", self.head_dim),
            ("the number of layers", self.layers.len()),
        ];
        for (name, size) in sizes {
            if size == 0 || size >= 1 << 31 {
                return Err(DecoderError::Description(format!("{name} is {size}")));
            }
        }
        if !self.num_heads.is_multiple_of(self.num_kv_heads) {
            return Err(DecoderError::Description(format!(
                "num_heads {} is no multiple of num_kv_heads {}",
                self.num_heads, self.num_kv_heads
            )));
        }
        let numbers = [
            self.norm_eps,
            self.attention_scale,
            self.embedding_scale,
            self.attention_cap,
            self.logit_cap,
        ];
        if numbers.iter().any(|number| !number.is_finite()) {
            return Err(DecoderError::Description(
                "a scale is not finite".to_owned(),
            ));
        }
        if self
            .ropes
            .iter()
            .any(|rope| 2 * rope.frequencies.len() > self.head_dim)
        {
            return Err(DecoderError::Description(format!(
                "more than head_dim {} dimensions rotate",
                self.head_dim
            )));
        }
        if self.num_groups() > self.layers.len() {
            return Err(DecoderError::Description(
                "more cache groups than layers".to_owned(),
            ));
        }
        if self
            .layers
            .iter()
            .any(|layer| layer.rope >= self.ropes.len())
        {
            return Err(DecoderError::Description(
                "a layer has no rotation".to_owned(),
            ));
        }
        Ok(())
    }
}
