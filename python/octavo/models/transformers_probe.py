"""One run of a Transformers model on the meta device: finds out what its attention asks for, and where its decoder is.

Also here: the attention function that Transformers calls, which passes every call to the handler of the moment (the
probe, or a step). No mask function is registered for it, so Transformers builds no masks.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.utils import ModelOutput

from octavo.attention.base import AttentionSpec
from octavo.errors import ModelError
from octavo.models.config import NormalConfig
from octavo.models.transformers_build import NotPackableError
from octavo.models.transformers_watch import Calls, experts_on_meta

ATTENTION = "octavo"
"""Our attention's name in Transformers."""

UNSUPPORTED_OPTIONS = {
    "position_bias": "an attention bias",
    "alibi": "an attention bias",
    "bias": "an attention bias",
    "indices": "sparse attention",
}
"""Keyword of an attention call -> what it asks for; refused unless None."""


class Handler(Protocol):
    """Answers the attention calls of a forward pass."""

    def attend(
        self, module: nn.Module, q_1htd: Tensor, k_1gtd: Tensor, v_1gtd: Tensor, mask: Any, options: dict[str, Any]
    ) -> Tensor:
        """Attention output [1, t, h, d]."""


_HANDLER: ContextVar[Handler] = ContextVar("attention_handler")


@contextmanager
def handled_by(handler: Handler) -> Iterator[None]:
    """Attention calls inside go to `handler`."""
    token = _HANDLER.set(handler)
    try:
        yield
    finally:
        _HANDLER.reset(token)


def _attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **options: Any
) -> tuple[Tensor, None]:
    return _HANDLER.get().attend(module, query, key, value, attention_mask, options), None


def register_attention() -> None:
    """Make `attn_implementation="octavo"` known to Transformers."""
    AttentionInterface.register(ATTENTION, _attention)


@dataclass(slots=True)
class Probe:
    """Turns the attention calls of one forward pass into specs. ModelError for what Octavo's attention can't do."""

    architecture: str
    layer_types: list[str] | None
    """The Transformers config's, where it has them."""
    window: int
    """Of its sliding layers."""
    specs: dict[nn.Module, AttentionSpec] = field(default_factory=dict)

    def attend(
        self, module: nn.Module, q_1htd: Tensor, k_1gtd: Tensor, v_1gtd: Tensor, mask: Any, options: dict[str, Any]
    ) -> Tensor:
        """See `Handler.attend`; the output is empty."""
        head_dim = q_1htd.shape[-1]
        self._check(module, k_1gtd, v_1gtd, mask, options)
        layer = len(self.specs)
        scale = options.get("scaling")
        self.specs[module] = AttentionSpec(
            layer=layer,
            num_heads=q_1htd.shape[1],
            num_kv_heads=k_1gtd.shape[1],
            head_dim=max(head_dim, v_1gtd.shape[-1]),
            scale=head_dim**-0.5 if scale is None else float(scale),
            window=self._window(layer, options),
            soft_cap=float(options.get("softcap") or 0.0),
        )
        return q_1htd.new_empty((1, q_1htd.shape[2], q_1htd.shape[1], v_1gtd.shape[-1]))

    def _check(self, module: nn.Module, k_1gtd: Tensor, v_1gtd: Tensor, mask: Any, options: dict[str, Any]) -> None:
        if getattr(module, "is_causal", True) is False or options.get("is_causal") is False:
            raise ModelError(f"{self.architecture} attends to later tokens (is_decoder is false in config.json?)")
        asked = [what for name, what in UNSUPPORTED_OPTIONS.items() if options.get(name) is not None]
        if mask is not None:
            asked.append("its own attention mask")
        if k_1gtd.shape[:3] != v_1gtd.shape[:3]:
            asked.append("keys and values of different heads")
        if module in self.specs:
            asked.append("one attention layer at two places")
        if asked:
            raise NotPackableError(f"{self.architecture} needs {asked[0]}, which Octavo's attention does not do")

    def _window(self, layer: int, options: dict[str, Any]) -> int:
        """Layer types decide where there are any (some classes pass their window to every layer, or to none)."""
        if self.layer_types is None:
            return int(options.get("sliding_window") or 0)
        kind = self.layer_types[layer]
        if kind not in ("full_attention", "sliding_attention"):
            raise NotPackableError(f"{self.architecture} needs layers of type {kind}, which Octavo does not have")
        return self.window if kind == "sliding_attention" else 0


@dataclass(frozen=True, slots=True)
class Probed:
    """What a probe found: specs in the order of the calls, the decoder's path in the model, its output's class, and
    all calls."""

    specs: dict[nn.Module, AttentionSpec]
    decoder: str
    output_class: type[ModelOutput]
    calls: Calls


def probe(causal: Any, config: NormalConfig) -> Probed:
    """Run a causal LM, which is on the meta device, on two tokens. NotPackableError when Octavo can't run it so.

    The decoder is the first module that the causal LM's forward calls; what follows it there is the head.
    """
    if any(isinstance(module, nn.Conv1d) for module in causal.modules()):
        raise NotPackableError(f"{config.architecture} has convolutions over tokens, whose state Octavo does not keep")
    handler = Probe(
        architecture=config.architecture,
        layer_types=getattr(causal.config, "layer_types", None),
        window=getattr(causal.config, "sliding_window", None) or 0,
    )
    calls = Calls()
    token_id = torch.zeros((1, 2), dtype=torch.int64, device="meta")
    try:
        with handled_by(handler), calls.recorded(causal), experts_on_meta(causal):
            causal(input_ids=token_id, position_ids=token_id, use_cache=False)
    except ModelError:
        raise
    except Exception as error:  # foreign code, any error means the same
        raise NotPackableError(f"{config.architecture} can't run on packed tokens: {error}") from error
    if len(handler.specs) != config.num_layers:
        raise NotPackableError(
            f"{config.architecture}: {len(handler.specs)} of {config.num_layers} layers let their attention be "
            "replaced; Octavo needs all of them"
        )
    decoder = calls.names[0]
    output = calls.outputs[decoder]
    if numbers_positions(causal.get_submodule(decoder)):
        raise NotPackableError(f"{config.architecture} numbers positions itself")
    if not isinstance(output, ModelOutput) or "last_hidden_state" not in output:
        raise NotPackableError(f"{config.architecture}: its decoder can't be told from its head")
    return Probed(handler.specs, decoder, type(output), calls)


def numbers_positions(decoder: Any) -> bool:
    """It takes no positions, or counts them from somewhere else than 0 (RoBERTa and its kin, after the padding id)."""
    takes_none = "position_ids" not in inspect.signature(decoder.forward).parameters
    return takes_none or any(hasattr(module, "create_position_ids_from_input_ids") for module in decoder.modules())
