"""Decoders that can't be run on packed rows (state-space models, linear attention, biases of the scores, kinds of masks
of their own): the Transformers class, one row at a time, with the cache that it brings. Right, not fast.

The paged cache holds the token ids of every position, and nothing else. So a row may begin anywhere (after a prefix
hit, a fork, or a preemption): when the state at hand is not that of the tokens before it, it is computed again from
them. Models without any cache read the whole sequence at each step.

Shape suffixes: t tokens of the step, p positions of a row, v vocabulary.
"""

from __future__ import annotations

import inspect
import logging
import re
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from octavo.attention.base import AttentionBackend, AttentionSpec, ForwardContext
from octavo.errors import ModelError
from octavo.models.config import NormalConfig
from octavo.models.images import ImageEncoder
from octavo.models.transformers_build import ForeignOptions, build_on_meta
from octavo.models.transformers_guess import without_values
from octavo.models.transformers_layers import Replaced, replace_layers, use_kernels
from octavo.models.transformers_memory import freeze_rope, materialize
from octavo.models.transformers_names import CheckpointNames
from octavo.models.transformers_watch import Calls, experts_on_meta
from octavo.models.transformers_weights import Checkpoint
from octavo.models.weights import linears_of

TOKEN_IDS = AttentionSpec(layer=0, num_heads=1, num_kv_heads=1, head_dim=8, scale=1.0)
"""What the paged cache holds as this model's only layer: a token's id in the first bytes of its K."""

STATE_NAMES = ("past_key_values", "cache_params", "state")
"""Arguments of `forward`, and fields of its output, under which classes keep what they remember."""

TEXT_ARGUMENTS = ("input_ids", "inputs_embeds", "attention_mask", "position_ids", "cache_position", *STATE_NAMES)

MIXER = re.compile("attention|attn|mixer|mamba|conv|delta", re.IGNORECASE)
"""Names of classes that bring tokens together."""

TRIAL_TOKENS, TRIAL_CUTS = 24, (13, 14)
"""A loaded model is tried on so many tokens, cut before these."""

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class State:
    """What a slot's model remembers, and of which tokens."""

    token_id_p: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int32))
    memory: Any = None


class TransformersRows(nn.Module):
    """A Transformers causal LM behind `models.base.CausalLM`."""

    is_capturable = False
    images: ImageEncoder | None = None
    reads_together = False

    def __init__(self, config: NormalConfig, options: ForeignOptions) -> None:
        super().__init__()
        self.architecture = config.architecture
        self.vocab_size = config.vocab_size
        self.attention_specs = [TOKEN_IDS]
        causal = build_on_meta(config, options.dtype)
        _check_reads_text(config, options.dtype)
        frozen = freeze_rope(causal, options.max_length)
        names = CheckpointNames(causal)
        self.causal = causal
        taken = inspect.signature(causal.forward).parameters
        self.state_name = next((name for name in STATE_NAMES if name in taken), None)
        self.takes_use_cache = "use_cache" in taken
        self.by_token = has_recurrence(causal)
        self.replaced = self._replace(config, options)
        materialize(causal, options.device, frozen)
        if options.has_kernels:
            use_kernels(causal)
        self.checkpoint = Checkpoint(causal, names, config.quantization)
        self.states: OrderedDict[int, State] = OrderedDict()

    def _replace(self, config: NormalConfig, options: ForeignOptions) -> Replaced:
        """Put our layers into the class, where a copy of it can be watched while it reads a prompt and goes on."""
        calls, state, causal = Calls(), State(), self.causal
        self.causal = copy = build_on_meta(config, options.dtype)
        try:
            with without_values(), calls.recorded(copy), experts_on_meta(copy):
                for num_tokens in (2, 1):
                    self._advance(state, torch.zeros(num_tokens, dtype=torch.int64))
        except Exception as error:  # foreign code on tensors without values
            reason = f"it can't be watched ({type(error).__name__}: {error})"
            return Replaced(self.architecture, left={"its layers": " ".join(reason.split())[:120]})
        finally:
            self.causal = causal
        mixers = {module for module in causal.modules() if MIXER.search(type(module).__name__)}
        base = next((name for name, module in causal.named_modules() if module is causal.base_model), "")
        return replace_layers(causal, f"{base}." if base else "", calls, mixers, options.choose, options.dtype)

    def set_attention_backend(self, backend: AttentionBackend) -> None:
        """The class attends itself."""

    def load_weights(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """See `CausalLM.load_weights`."""
        self.checkpoint.load(self, tensors)
        self._try_out()

    @torch.inference_mode()
    def _try_out(self) -> None:
        """Read some tokens at once and cut, and keep to the quickest way that gives the same: continue with several
        tokens, continue by single ones, or begin anew each time. ModelError for a model that looks ahead."""
        token_id_p = torch.arange(TRIAL_TOKENS, dtype=torch.int32) % self.vocab_size
        state_name, self.state_name = self.state_name, None
        try:
            whole_pv = self._advance(State(), token_id_p)
        except Exception as error:  # foreign code, any error means the same
            reason = f"{type(error).__name__}: {error}"
            raise ModelError(f"Transformers' {self.architecture} fails on a prompt of text alone: {reason}") from error
        if not self._agree(self._advance(State(), token_id_p[: TRIAL_CUTS[0]]), whole_pv):
            raise ModelError(f"{self.architecture} attends to later tokens (is_decoder is false in config.json?)")
        if state_name is None:
            return
        self.state_name = state_name
        if self.by_token or not self._continues(token_id_p, whole_pv):
            self.by_token = True
            if not self._continues(token_id_p, whole_pv):
                self.state_name = None

    def _continues(self, token_id_p: Tensor, whole_pv: Tensor) -> bool:
        """Whether reading on from what is remembered gives what reading all at once gave."""
        state = State()
        try:
            parts = [self._advance(state, part) for part in token_id_p.tensor_split(TRIAL_CUTS)]
        except Exception as error:  # foreign code, any error means the same
            logger.info("%s can't go on from its cache: %s", self.architecture, error)
            return False
        return self._agree(torch.cat(parts), whole_pv)

    def _agree(self, found_pv: Tensor, whole_pv: Tensor) -> bool:
        """Logits are equal but for rounding; `whole_pv` may go on after those found."""
        error_pv = (found_pv - whole_pv[: len(found_pv)]).float().abs()
        spread = whole_pv.float().std()
        rounds = any(layer.weight_scale is not None for layer in linears_of(self))
        if whole_pv.dtype == torch.float32 and not rounds:
            return bool(error_pv.max() <= 0.01 * spread)
        return bool(error_pv.mean() <= 0.1 * spread)

    def forward(self, token_id_t: Tensor, position_t: Tensor, ctx: ForwardContext) -> Tensor:
        """Logits [t, v], which stand for the hidden states."""
        token_ids = ctx.kv_cache[0][:, 0, 0].view(torch.int32)[..., 0]
        token_ids[ctx.slot_mapping_t // ctx.block_size, ctx.slot_mapping_t % ctx.block_size] = token_id_t.int()
        table_sb = ctx.block_table_sb.cpu()
        starts, slots = ctx.query_start_r.tolist(), ctx.row_slot_r.tolist()
        logits = []
        for row, kv_len in enumerate(ctx.kv_len_r.tolist()[: ctx.num_rows]):
            blocks = table_sb[slots[row], : -(-kv_len // ctx.block_size)].long().to(token_ids.device)
            token_id_p = token_ids[blocks].flatten()[:kv_len].cpu()
            logits.append(self._continue(slots[row], token_id_p, starts[row + 1] - starts[row]))
        self._forget(token_ids.numel())
        return torch.cat(logits)

    def logits(self, hidden_sm: Tensor) -> Tensor:
        """See `CausalLM.logits`."""
        return hidden_sm.float()

    def _continue(self, slot: int, token_id_p: Tensor, num_new: int) -> Tensor:
        """Logits [num_new, v] of the last tokens of a sequence."""
        state, known = self.states.pop(slot, State()), len(token_id_p) - num_new
        if self.state_name is None or not torch.equal(state.token_id_p, token_id_p[:known]):
            state = State()
        logits_pv = self._advance(state, token_id_p[len(state.token_id_p) :])[-num_new:]
        state.token_id_p = token_id_p
        self.states[slot] = state
        return logits_pv

    def _advance(self, state: State, token_id_p: Tensor) -> Tensor:
        """Read tokens after those of the state; their logits [p, v]. Recurrent classes drop what they remember when
        they are given several tokens at once."""
        if self.by_token and state.memory is not None and len(token_id_p) > 1:
            return torch.cat([self._advance(state, token_id) for token_id in token_id_p.unsqueeze(1)])
        options: dict[str, Any] = {"use_cache": False} if self.takes_use_cache else {}
        if self.state_name is not None:
            options = {self.state_name: state.memory, "use_cache": True}
        output = self.causal(input_ids=token_id_p.long().unsqueeze(0).to(self.causal.device), **options)
        if self.state_name is not None:
            state.memory = getattr(output, self.state_name)
        logits_pv: Tensor = output.logits[0]
        return logits_pv

    def _forget(self, max_tokens: int) -> None:
        """Drop the states that were used longest ago, so that together they have no more tokens than the cache."""
        total = sum(len(state.token_id_p) for state in self.states.values())
        while total > max_tokens and len(self.states) > 1:
            total -= len(self.states.popitem(last=False)[1].token_id_p)


def _check_reads_text(config: NormalConfig, dtype: torch.dtype) -> None:
    """ModelError for a class that wants images (or sound) with every prompt: it has other arguments without a default,
    or complains of one. Other errors may be the meta device's; they show when weights are there."""
    causal, architecture = build_on_meta(config, dtype), config.architecture
    parameters = [x for name, x in inspect.signature(causal.forward).parameters.items() if name not in TEXT_ARGUMENTS]
    missing = [x.name for x in parameters if x.default is x.empty and x.kind is x.POSITIONAL_OR_KEYWORD]
    if missing:
        raise ModelError(f"{architecture} can't read a prompt of text alone: it needs {', '.join(missing)}")
    if not any("pixel" in x.name or "image" in x.name for x in parameters):
        return
    try:
        causal(input_ids=torch.zeros((1, 2), dtype=torch.int64, device="meta"))
    except Exception as error:  # foreign code on tensors without values
        if isinstance(error, ValueError) and any(x.name in str(error) for x in parameters):
            raise ModelError(f"{architecture} can't read a prompt of text alone: {error}") from error
        logger.debug("%s on the meta device: %s", architecture, error)


def has_recurrence(causal: Any) -> bool:
    """The model remembers more than keys and values."""
    return bool(getattr(causal, "_is_stateful", False)) or any(
        isinstance(module, nn.Conv1d) for module in causal.modules()
    )
