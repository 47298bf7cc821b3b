"""From a model's config to the class that runs it. Native families are a table; every other decoder is Transformers'
class, on packed rows where its attention can be replaced (transformers_backend.py), else row by row
(transformers_rows.py). Whatever can't run is refused here, before a weight is read.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch import nn

from octavo.attention.base import AttentionSpec, CacheSpec, StateSpec
from octavo.errors import ModelError
from octavo.layers.invariant import invariant
from octavo.layers.linear import DENSE, Choice, Choices, LinearMethod, Product, dense
from octavo.layers.quant.methods import find_method, fits
from octavo.models.base import CausalLM
from octavo.models.config import RENAMED, NormalConfig, architecture_of, normalize_config
from octavo.models.decoder import Decoder
from octavo.models.family import Family
from octavo.models.images import ImageEncoder
from octavo.models.native import FOREIGN_OPTIONS, NATIVE, STATE_SPACE
from octavo.models.own_code import is_own

logger = logging.getLogger(__name__)


def is_native(raw: Mapping[str, Any]) -> bool:
    """Octavo runs a config.json's model with its own layers."""
    architecture = architecture_of(raw)
    options = FOREIGN_OPTIONS.get(architecture, ())
    return architecture in NATIVE and str(raw.get("model_type")) not in RENAMED and not any(map(raw.get, options))


def read_config(raw: Mapping[str, Any], generation_config: Mapping[str, Any] | None = None) -> NormalConfig:
    """The normal form of any config.json; Transformers is asked for what it means where Octavo has no layers for it.
    ModelError: nobody knows the model, or a field is missing or senseless."""
    if raw.get("is_encoder_decoder"):
        raise ModelError(f"{architecture_of(raw)} is an encoder-decoder; Octavo runs decoders")
    if is_native(raw):
        return normalize_config(raw, generation_config)
    from octavo.models.transformers_config import normalize_foreign  # imports Transformers: seconds

    return normalize_foreign(raw, generation_config)


def build_model(
    config: NormalConfig,
    *,
    dtype: torch.dtype,
    device: torch.device,
    max_model_len: int | None = None,
    decode_kernels: str = "auto",
    quantization: str = "none",
    deterministic: bool = False,
) -> CausalLM:
    """The model (an nn.Module too) with parameters allocated on `device`, uninitialised.

    `max_model_len` is the longest sequence that will be served (rotary tables reach that far; types whose frequencies
    depend on the length use it); None: the config's. `decode_kernels` is for native models (see `Decoder`).
    `quantization` is how linear layers keep their weights: "none" in `dtype`, or a name of layers/quant/methods.py;
    layers that the checkpoint leaves unquantized stay so. `deterministic`: batch-invariant (layers/invariant.py).
    ModelError for an architecture that can't run.
    """
    if deterministic:
        _check_deterministic(config, quantization)
    max_length = max_model_len or config.max_position_embeddings
    if is_native(config.raw):
        return _native(
            config,
            dtype=dtype,
            device=device,
            max_length=max_length,
            choose=(lambda layer, prefix: Choices(invariant, invariant))
            if deterministic
            else partial(choose_methods, config, quantization),
            decode_kernels=decode_kernels,
            deterministic=deterministic,
        )
    seeing = _with_images(config, dtype, device, max_length, decode_kernels, quantization)
    if seeing is not None:
        return seeing
    if decode_kernels == "fused":
        raise ModelError(f"--decode-kernels fused can't run {config.architecture}: use auto or plain")
    return _foreign(config, dtype, device, max_length, quantization, has_kernels=decode_kernels != "plain")


def _native(config: NormalConfig, **options: Any) -> Decoder:
    """The decoder of a native family; `options` are `Decoder`'s."""
    module, attribute = NATIVE[config.architecture].split(":")
    family: Family = getattr(import_module(module), attribute)
    return Decoder(family, config, **options)


def _with_images(
    config: NormalConfig,
    dtype: torch.dtype,
    device: torch.device,
    max_length: int,
    decode_kernels: str,
    quantization: str,
) -> CausalLM | None:
    """An image-text model whose text model is native, else None. `quantization` is the text model's: what reads images
    stays wide."""
    from octavo.models.native_text import native_text  # these import Transformers: seconds
    from octavo.models.transformers_build import build_on_meta
    from octavo.models.transformers_names import CheckpointNames
    from octavo.models.vision_language import TextPlace, VisionLanguage

    text = native_text(config.raw)
    if text is None:
        return None
    causal = build_on_meta(config, dtype)
    place = TextPlace.find(causal, text)
    if place is None:
        return None
    names = CheckpointNames(causal)
    text = replace(text, wide_layers=config.wide_layers, quantization=place.stored(config.quantization, names))
    decoder = _native(
        text,
        dtype=dtype,
        device=device,
        max_length=max_length,
        choose=partial(choose_methods, text, quantization),
        decode_kernels=decode_kernels,
    )
    return VisionLanguage(config, causal, place, decoder, names, dtype=dtype, device=device)


def _foreign(
    config: NormalConfig,
    dtype: torch.dtype,
    device: torch.device,
    max_length: int,
    quantization: str,
    *,
    has_kernels: bool,
) -> CausalLM:
    """A model whose config is Transformers', the quickest way that it runs."""
    if config.architecture in STATE_SPACE:
        from octavo.models.transformers_config import foreign_config  # imports Transformers: seconds

        module, attribute = STATE_SPACE[config.architecture].split(":")
        model_class: Callable[..., CausalLM] = getattr(import_module(module), attribute)
        choose = partial(choose_methods, config, quantization)
        return model_class(config, foreign_config(config.raw), dtype=dtype, device=device, choose=choose)
    from octavo.models.transformers_backend import TransformersModel
    from octavo.models.transformers_build import ForeignOptions, NotPackableError
    from octavo.models.transformers_rows import TransformersRows

    kinds = partial(foreign_choice, config, quantization)
    options = ForeignOptions(dtype, device, max_length, kinds, has_kernels=has_kernels and device.type == "cuda")
    model: TransformersModel | TransformersRows
    try:
        if is_own(config.raw):
            raise NotPackableError(f"{config.architecture} is code of the checkpoint's own")
        model = TransformersModel(config, options)
    except NotPackableError as reason:
        if device.type != "meta":
            logger.warning("%s; it runs row by row with Transformers' own cache: right, not fast", reason)
        model = TransformersRows(config, options)
    if quantization != "none" and config.quantization is None and not model.replaced.can_be_rounded:
        why = "; ".join(model.replaced.left.values()) or "it has no linear layers"
        raise ModelError(f"--quantization {quantization} can't run {config.architecture} ({why}): use none")
    if device.type != "meta":
        logger.info("%s: Octavo's layers are %s", config.architecture, model.replaced)
    return model


def foreign_choice(config: NormalConfig, quantization: str, name: str, in_mixer: bool) -> Choice:
    """The methods of a linear layer of Transformers' class, by its name there: its layer is the first number in it."""
    layer = next((int(part) for part in name.split(".") if part.isdecimal()), 0)
    return choose_methods(config, quantization, layer, "")[0 if in_mixer else 1]


def _check_deterministic(config: NormalConfig, quantization: str) -> None:
    """ModelError for layers that have no batch-invariant form."""
    for problem, is_there in (
        (f"{config.architecture}, which has no native layers", not is_native(config.raw)),
        (f"--quantization {quantization}: use none", quantization != "none"),
    ):
        if is_there:
            raise ModelError(f"--deterministic can't run {problem}")


def choose_methods(config: NormalConfig, quantization: str, layer: int, prefix: str) -> Choices:
    """The methods of a block whose checkpoint names start with `prefix`; what shall stay wide is dense."""
    choice = choose_method(config, quantization, prefix)
    wide = config.wide_layers[layer] if layer < len(config.wide_layers) else (False, False)
    return Choices(*(dense if is_wide else choice for is_wide in wide))


def choose_method(config: NormalConfig, quantization: str, prefix: str) -> Choice:
    """The methods of linear layers whose checkpoint names start with `prefix`.

    A layer stays dense where the checkpoint says so, or where its sizes do not suit the method. ModelError for a layer
    that is stacked from parts of both kinds.
    """
    if quantization == "none":
        return dense
    stored = config.quantization
    method = find_method(quantization, None if stored is None else stored.block)

    def choose(layer: Product) -> LinearMethod:
        names = [f"{prefix}.{name}" if prefix else name for name in layer.shards]
        quantized = [name for name in names if stored is None or stored.covers(name)]
        if quantized and len(quantized) < len(names):
            raise ModelError(
                f"config.json quantizes {quantized[0]} but not all of {', '.join(names)}, which are one matrix "
                "in Octavo; use --quantization none"
            )
        return method if quantized and fits(layer) else DENSE

    return choose


@dataclass(frozen=True, slots=True)
class Footprint:
    """What a model takes on the device, and whether its steps can be captured in a CUDA graph."""

    weight_bytes: int
    """Of parameters and buffers, exact."""
    is_capturable: bool
    attention_specs: tuple[CacheSpec, ...]
    """Of each layer that has a cache."""
    images: ImageEncoder | None = None
    """On the meta device, of a model that has one."""


def as_attended(config: NormalConfig, specs: Sequence[CacheSpec]) -> NormalConfig:
    """The config with the heads, windows, chunks and states that layers have in fact: of Transformers' classes, only
    their calls tell. Where layers differ, heads are those of the layer that keeps most. Models that keep something else
    there (transformers_rows.py) stay as they are."""
    states = tuple(spec.size if isinstance(spec, StateSpec) else 0 for spec in specs)
    if len(specs) != config.num_layers and not any(states):
        return config
    windows, chunks = ([getattr(spec, name, 0) for spec in specs] for name in ("window", "chunk"))
    config = replace(
        config,
        state_sizes=states if any(states) else (),
        layer_windows=tuple(windows),
        layer_chunks=tuple(chunks) if any(chunks) else (),
    )
    heads = [spec for spec in specs if isinstance(spec, AttentionSpec)]
    if not heads:
        return config
    most = max(heads, key=lambda spec: math.prod(spec.cache_shape(1, 1)))
    return replace(
        config,
        num_heads=most.num_heads,
        num_kv_heads=most.num_kv_heads,
        head_dim=most.head_dim,
        value_dim=most.value_dim,
    )


def with_wide_ends(config: NormalConfig, attention: Sequence[int], mlp: Sequence[int]) -> NormalConfig:
    """A model that is rounded as it loads, but for the attention of so many (first, last) blocks, and the MLPs. A
    checkpoint that is quantized says itself what is not."""
    if config.quantization is not None:
        return config

    def is_end(layer: int, ends: Sequence[int]) -> bool:
        return layer < ends[0] or layer >= config.num_layers - ends[1]

    wide = tuple((is_end(i, attention), is_end(i, mlp)) for i in range(config.num_layers))
    return replace(config, wide_layers=wide)


def footprint(
    config: NormalConfig, dtype: torch.dtype, max_model_len: int | None = None, quantization: str = "none"
) -> Footprint:
    """Allocates nothing. ModelError as `build_model`."""
    model = build_model(
        config, dtype=dtype, device=torch.device("meta"), max_model_len=max_model_len, quantization=quantization
    )
    assert isinstance(model, nn.Module)
    tensors = [*model.parameters(), *model.buffers()]
    return Footprint(
        weight_bytes=sum(tensor.numel() * tensor.element_size() for tensor in tensors),
        is_capturable=model.is_capturable,
        attention_specs=tuple(model.attention_specs),
        images=model.images,
    )
