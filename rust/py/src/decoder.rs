//! The embedded decoder: weights come in as bytes, then steps as plans over registered arenas.

use octavo_cpu::decoder::{
    Activation, Choice, Decoder, DecoderError, Description, LayerKind, Masks, Rope, Serving,
    StepView, WeightsBuilder,
};
use octavo_cpu::sampling::{Params, SlotSampling};
use pyo3::exceptions::{PyRuntimeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use crate::buffers::{ByteBuffer, IntBuffer};
use crate::plan::{ArenaLayout, NewRow, OutputLayout, PromptLogprobRow, StepPlan};

fn to_py(error: DecoderError) -> PyErr {
    match error {
        DecoderError::Step(_) => PyRuntimeError::new_err(error.to_string()),
        _ => PyValueError::new_err(error.to_string()),
    }
}

/// Attributes of `octavo.models.description.Description`.
#[allow(clippy::struct_excessive_bools)] // as Description
#[derive(FromPyObject)]
struct DescriptionFields {
    vocab_size: usize,
    hidden_size: usize,
    intermediate_size: usize,
    num_heads: usize,
    num_kv_heads: usize,
    head_dim: usize,
    norm_eps: f32,
    activation: String,
    layer_windows: Vec<usize>,
    layer_ropes: Vec<usize>,
    ropes: Vec<(Vec<f32>, f32)>,
    is_tied: bool,
    has_qk_norm: bool,
    has_output_norms: bool,
    qkv_bias: bool,
    o_bias: bool,
    mlp_bias: bool,
    attention_scale: f32,
    embedding_scale: f32,
    attention_cap: f32,
    logit_cap: f32,
}

impl TryFrom<DescriptionFields> for Description {
    type Error = DecoderError;

    fn try_from(fields: DescriptionFields) -> Result<Self, DecoderError> {
        let kinds = fields.layer_windows.into_iter().zip(fields.layer_ropes);
        let ropes = fields.ropes.into_iter();
        Ok(Self {
            vocab_size: fields.vocab_size,
            hidden_size: fields.hidden_size,
            intermediate_size: fields.intermediate_size,
            num_heads: fields.num_heads,
            num_kv_heads: fields.num_kv_heads,
            head_dim: fields.head_dim,
            norm_eps: fields.norm_eps,
            activation: fields.activation.parse::<Activation>()?,
            layers: kinds
                .map(|(window, rope)| LayerKind {
                    window,
                    rope,
                    group: 0,
                })
                .collect(),
            ropes: ropes
                .map(|(frequencies, factor)| Rope {
                    frequencies,
                    factor,
                })
                .collect(),
            is_tied: fields.is_tied,
            has_qk_norm: fields.has_qk_norm,
            has_output_norms: fields.has_output_norms,
            qkv_bias: fields.qkv_bias,
            o_bias: fields.o_bias,
            mlp_bias: fields.mlp_bias,
            attention_scale: fields.attention_scale,
            embedding_scale: fields.embedding_scale,
            attention_cap: fields.attention_cap,
            logit_cap: fields.logit_cap,
        })
    }
}

/// Attributes of `octavo.worker.embedded.RowSampling`.
#[derive(FromPyObject)]
struct SamplingFields {
    temperature: f32,
    top_k: usize,
    top_p: f64,
    min_p: f64,
    presence_penalty: f32,
    frequency_penalty: f32,
    repetition_penalty: f32,
    seed: i64,
    first_choice: u32,
    num_logprobs: Option<usize>,
    bias: Vec<(u32, f32)>,
    allowed: Option<Vec<u32>>,
    bad_words: Vec<Vec<u32>>,
    stops: Vec<u32>,
    stops_from: u32,
}

impl SamplingFields {
    fn into_params(self, index: u32) -> Params {
        Params {
            temperature: self.temperature,
            top_k: self.top_k,
            top_p: self.top_p,
            min_p: self.min_p,
            presence_penalty: self.presence_penalty,
            frequency_penalty: self.frequency_penalty,
            repetition_penalty: self.repetition_penalty,
            seed: self.seed,
            index: self.first_choice + index,
            num_logprobs: self.num_logprobs,
            bias: self.bias,
            allowed: self.allowed,
            bad_words: self.bad_words,
            stops: self.stops,
            stops_from: self.stops_from,
        }
    }
}

/// The arenas that steps come in and results go to.
struct Arenas {
    steps: Vec<IntBuffer>,
    outputs: Vec<IntBuffer>,
    layout: ArenaLayout,
    output_layout: OutputLayout,
    /// Rows of words a slot: behind its own tokens, and behind each that may be drafted.
    masks: IntBuffer,
    mask_words: usize,
}

#[pyclass(module = "octavo._core")]
struct EmbeddedDecoder {
    weights: Option<WeightsBuilder>,
    decoder: Option<Decoder>,
    arenas: Option<Arenas>,
}

impl EmbeddedDecoder {
    fn built(&mut self) -> PyResult<&mut Decoder> {
        self.decoder
            .as_mut()
            .ok_or_else(|| PyRuntimeError::new_err("build comes first"))
    }

    fn loading(&mut self) -> PyResult<&mut WeightsBuilder> {
        self.weights
            .as_mut()
            .ok_or_else(|| PyRuntimeError::new_err("weights are loaded before build"))
    }
}

#[pymethods]
impl EmbeddedDecoder {
    #[new]
    #[pyo3(signature = (num_threads=1))]
    fn new(num_threads: usize) -> Self {
        Self {
            weights: Some(WeightsBuilder::new(num_threads.max(1))),
            decoder: None,
            arenas: None,
        }
    }

    #[pyo3(signature = (layer, role, format, data, n, k, *, keep=None))]
    fn load_matrix(
        &mut self,
        py: Python<'_>,
        layer: i32,
        role: &str,
        format: &str,
        data: &Bound<'_, PyAny>,
        n: usize,
        k: usize,
        keep: Option<&str>,
    ) -> PyResult<()> {
        let parse = |name: &str| name.parse().map_err(|e| to_py(DecoderError::Kernel(e)));
        let (format, keep) = (parse(format)?, keep.map(parse).transpose()?);
        let data = ByteBuffer::new(data, role)?;
        let weights = self.loading()?;
        py.detach(|| weights.matrix(layer, role, format, data.bytes(), n, k, keep))
            .map_err(to_py)
    }

    fn load_vector(&mut self, layer: i32, role: &str, data: &Bound<'_, PyAny>) -> PyResult<()> {
        let data = ByteBuffer::new(data, role)?;
        let values = data.bytes().as_chunks().0.iter();
        let values = values.map(|bytes| f32::from_le_bytes(*bytes)).collect();
        self.loading()?.vector(layer, role, values);
        Ok(())
    }

    #[pyo3(signature = (description, *, num_slots, num_blocks, block_size, max_length, max_tokens, cache_dtype,
        num_threads, cpus=None, layer_groups=None))]
    fn build(
        &mut self,
        py: Python<'_>,
        description: DescriptionFields,
        num_slots: usize,
        num_blocks: usize,
        block_size: usize,
        max_length: usize,
        max_tokens: usize,
        cache_dtype: &str,
        num_threads: usize,
        cpus: Option<Vec<usize>>,
        layer_groups: Option<Vec<usize>>,
    ) -> PyResult<()> {
        let weights = self.weights.take();
        let weights = weights.ok_or_else(|| PyRuntimeError::new_err("built already"))?;
        let serving = Serving {
            num_slots,
            num_blocks,
            block_size,
            max_length,
            max_tokens,
            cache_dtype: cache_dtype
                .parse()
                .map_err(|e| to_py(DecoderError::Kernel(e)))?,
            num_threads,
            cpus: cpus.unwrap_or_default(),
        };
        let mut description: Description = description.try_into().map_err(to_py)?;
        for (layer, group) in description
            .layers
            .iter_mut()
            .zip(layer_groups.into_iter().flatten())
        {
            layer.group = group;
        }
        let decoder = py.detach(|| Decoder::new(description, weights, serving));
        self.decoder = Some(decoder.map_err(to_py)?);
        Ok(())
    }

    /// Bytes of packed matrices.
    fn weight_bytes(&mut self) -> PyResult<usize> {
        Ok(self.built()?.weight_bytes())
    }

    fn register(
        &mut self,
        arenas: Vec<Bound<'_, PyAny>>,
        outputs: Vec<Bound<'_, PyAny>>,
        layout: &ArenaLayout,
        output_layout: &OutputLayout,
        masks: &Bound<'_, PyAny>,
        mask_words: u32,
    ) -> PyResult<()> {
        let buffers = |objects: &[Bound<'_, PyAny>], num_ints, what| {
            let one = |object| IntBuffer::new(object, num_ints, what);
            objects.iter().map(one).collect::<PyResult<Vec<_>>>()
        };
        self.arenas = Some(Arenas {
            steps: buffers(&arenas, layout.num_ints, "arena")?,
            outputs: buffers(&outputs, output_layout.num_ints, "output arena")?,
            layout: *layout,
            output_layout: *output_layout,
            masks: IntBuffer::new(
                masks,
                layout.max_rows * output_layout.max_sampled * mask_words,
                "masks",
            )?,
            mask_words: mask_words as usize,
        });
        Ok(())
    }

    fn admit(&mut self, row: &NewRow, py: Python<'_>, sampling: SamplingFields) -> PyResult<()> {
        let ids: Vec<u32> = int_ids(row.token_ids.as_bytes(py));
        let (prompt, output) = ids.split_at(ids.len().min(row.num_prompt_tokens as usize));
        let decoder = self.built()?;
        let params = sampling.into_params(row.index);
        let slot = SlotSampling::new(params, prompt, output, decoder.vocab_size());
        decoder.admit(row.slot as usize, slot).map_err(to_py)
    }

    /// Run a step's tokens through the layers.
    fn forward(&mut self, py: Python<'_>, plan: &StepPlan) -> PyResult<()> {
        let Self {
            decoder: Some(decoder),
            arenas: Some(arenas),
            ..
        } = self
        else {
            return Err(PyRuntimeError::new_err("build and register come first"));
        };
        let layout = &arenas.layout;
        let ints = arena(&arenas.steps, plan.arena)?.ints();
        let part = |start: u32, len: u32| part(ints, start, len);
        let view = StepView {
            row_slot: part(layout.row_slot, plan.num_rows)?,
            query_start: part(layout.query_start, plan.num_rows + 1)?,
            kv_len: part(layout.kv_len, plan.num_rows)?,
            token_id: part(layout.token_id, plan.num_tokens)?,
            position: part(layout.position, plan.num_tokens)?,
            num_drafted: part(layout.num_drafted, plan.num_rows)?,
            num_needed: &[],
            block_updates: part(layout.block_update, 3 * plan.num_block_updates)?,
            block_copies: part(layout.block_copy, 2 * plan.num_block_copies)?,
        };
        let needed = num_needed(py, plan, &view)?;
        let view = StepView {
            num_needed: &needed,
            ..view
        };
        py.detach(|| decoder.forward(&view)).map_err(to_py)
    }

    /// Run a step given as lists, without arenas; all tokens are needed.
    #[pyo3(signature = (*, row_slot, query_start, kv_len, token_id, position, block_updates, num_drafted=None))]
    fn forward_lists(
        &mut self,
        py: Python<'_>,
        row_slot: Vec<i32>,
        query_start: Vec<i32>,
        kv_len: Vec<i32>,
        token_id: Vec<i32>,
        position: Vec<i32>,
        block_updates: Vec<i32>,
        num_drafted: Option<Vec<i32>>,
    ) -> PyResult<()> {
        let num_drafted = num_drafted.unwrap_or_else(|| vec![0; row_slot.len()]);
        let num_needed: Vec<i32> = query_start
            .windows(2)
            .map(|pair| pair[1].saturating_sub(pair[0]))
            .collect();
        let decoder = self.built()?;
        let view = StepView {
            row_slot: &row_slot,
            query_start: &query_start,
            kv_len: &kv_len,
            token_id: &token_id,
            position: &position,
            num_drafted: &num_drafted,
            num_needed: &num_needed,
            block_updates: &block_updates,
            block_copies: &[],
        };
        py.detach(|| decoder.forward(&view)).map_err(to_py)
    }

    /// Choose the tokens of the step's sampled rows, into its output arena.
    fn sample(&mut self, py: Python<'_>, plan: &StepPlan) -> PyResult<()> {
        let Self {
            decoder: Some(decoder),
            arenas: Some(arenas),
            ..
        } = self
        else {
            return Err(PyRuntimeError::new_err("build and register come first"));
        };
        let layout = arenas.output_layout;
        let output = arenas
            .outputs
            .get_mut(plan.arena as usize)
            .ok_or_else(|| PyRuntimeError::new_err("no such arena"))?
            .ints_mut();
        let masks = plan.needs_masks.then(|| Masks {
            words: arenas.masks.ints(),
            rows_per_slot: layout.max_sampled as usize,
            words_per_row: arenas.mask_words,
        });
        py.detach(|| {
            let choices = decoder.sample(plan.num_sampled as usize, masks)?;
            write_choices(choices, output, &layout)
        })
        .map_err(to_py)
    }

    /// Logprobs of int32 targets behind the last step's tokens from `start` on: ids, values and ranks as bytes.
    fn score<'py>(
        &mut self,
        py: Python<'py>,
        start: usize,
        targets: &[u8],
        num_top: usize,
    ) -> PyResult<(
        Bound<'py, PyBytes>,
        Bound<'py, PyBytes>,
        Bound<'py, PyBytes>,
    )> {
        let targets = int_ids(targets);
        let decoder = self.built()?;
        let scores = py.detach(|| decoder.score(start, &targets, num_top));
        let scores = scores.map_err(to_py)?;
        let ids = scores.iter().flat_map(|score| &score.ids);
        let values = scores.iter().flat_map(|score| &score.logprobs);
        let ids: Vec<u8> = ids.flat_map(|id| id.to_ne_bytes()).collect();
        let values: Vec<u8> = values.flat_map(|value| value.to_ne_bytes()).collect();
        let ranks: Vec<u8> = scores.iter().flat_map(|s| s.rank.to_ne_bytes()).collect();
        Ok((
            PyBytes::new(py, &ids),
            PyBytes::new(py, &values),
            PyBytes::new(py, &ranks),
        ))
    }

    /// Logits of the last step's needed tokens as bytes of float32: for tests and comparisons.
    fn logits<'py>(&mut self, py: Python<'py>) -> PyResult<Bound<'py, PyBytes>> {
        let decoder = self.built()?;
        let logits = py.detach(|| decoder.logits());
        let bytes: Vec<u8> = logits.iter().flat_map(|x| x.to_ne_bytes()).collect();
        Ok(PyBytes::new(py, &bytes))
    }
}

fn arena(arenas: &[IntBuffer], index: u32) -> PyResult<&IntBuffer> {
    arenas
        .get(index as usize)
        .ok_or_else(|| PyRuntimeError::new_err("no such arena"))
}

/// How many of each row's last tokens are sampled behind, or all where the prompt's logprobs are wanted.
fn num_needed(py: Python<'_>, plan: &StepPlan, view: &StepView<'_>) -> PyResult<Vec<i32>> {
    let is_sampled = |row: usize| row < plan.num_sampled as usize;
    let drafted = view.num_drafted.iter().enumerate();
    let mut needed: Vec<i32> = drafted
        .map(|(row, drafted)| if is_sampled(row) { 1 + drafted } else { 0 })
        .collect();
    for scored in plan.prompt_logprob_rows.bind(py) {
        let row = scored.cast::<PromptLogprobRow>()?.get().row as usize;
        let bounds = view.query_start.get(row..row + 2);
        if let (Some(place), Some(bounds)) = (needed.get_mut(row), bounds) {
            *place = bounds[1] - bounds[0];
        }
    }
    Ok(needed)
}

fn part(ints: &[i32], start: u32, len: u32) -> PyResult<&[i32]> {
    ints.get(start as usize..)
        .and_then(|rest| rest.get(..len as usize))
        .ok_or_else(|| PyRuntimeError::new_err("the plan leaves its arena"))
}

/// int32 little-endian.
fn int_ids(bytes: &[u8]) -> Vec<u32> {
    let chunks = bytes.as_chunks().0.iter();
    chunks.map(|bytes| u32::from_le_bytes(*bytes)).collect()
}

/// Sampled tokens of each row; counts, ranks and logprobs.
fn write_choices(
    choices: &[Vec<Choice>],
    output: &mut [i32],
    layout: &OutputLayout,
) -> Result<(), DecoderError> {
    let width = layout.max_sampled as usize;
    let entries = 1 + layout.max_logprobs as usize;
    let fits = choices.len() <= layout.max_rows as usize
        && choices.iter().all(|chosen| chosen.len() <= width)
        && choices
            .iter()
            .flatten()
            .all(|choice| choice.ids.len() <= entries);
    if !fits {
        return Err(DecoderError::Step(
            "the output arena is too small".to_owned(),
        ));
    }
    for (row, chosen) in choices.iter().enumerate() {
        output[layout.count as usize + row] = chosen.len() as i32;
        for (place, choice) in (row * width..).zip(chosen) {
            output[layout.sampled as usize + place] = choice.token;
            output[layout.rank as usize + place] = choice.rank;
            let ids = &mut output[layout.logprob_id as usize + place * entries..];
            ids[..choice.ids.len()].copy_from_slice(&choice.ids);
            let values = &mut output[layout.logprob_value as usize + place * entries..];
            for (value, logprob) in values.iter_mut().zip(&choice.logprobs) {
                *value = logprob.to_bits() as i32;
            }
        }
    }
    Ok(())
}

pub fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<EmbeddedDecoder>()
}
