"""A step's rows through the model: as they are, or padded to the size of a captured graph and through that.

Not here: which graphs there are (step_graphs.py), what comes after the hidden states (step_sampling.py), when it is
run (runner.py for requests, warm_up.py over null rows).

Shape suffixes: t tokens, s sampled rows, m model dim.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from torch import Tensor

from octavo.attention.base import AttentionBackend
from octavo.attention.media import MediaInput
from octavo.models.base import CausalLM
from octavo.worker.batch import StepArenas, StepArrays
from octavo.worker.fixed_rows import FixedRows
from octavo.worker.kv_cache import KvCache
from octavo.worker.media import StepMedia
from octavo.worker.slots import Slots
from octavo.worker.step_context import HeaderParts, step_context
from octavo.worker.step_graphs import StepGraphs
from octavo.worker.step_kernels import StepKernels
from octavo.worker.step_kinds import StepKind, decode_kind

if TYPE_CHECKING:
    from octavo._core import StepPlan


@dataclass(frozen=True, slots=True)
class Launched:
    """What sampling needs of a step that runs."""

    hidden_tm: Tensor
    arrays: StepArrays
    graph_rows: int = 0
    """Rows, padding included, of a decode step that a graph replayed: its tensors stay where they are. Else 0."""
    is_fixed: bool = False
    """`FixedRows` holds the rows that are sampled."""


Way = Callable[[Tensor], Launched]
"""Runs a step whose arena, on the device, it is given."""


@dataclass(frozen=True, slots=True)
class StepForward:
    """Of one runner. Everything that its methods read lies in the arena, so that a graph replays them for any step."""

    model: CausalLM
    backend: AttentionBackend
    kernels: StepKernels
    slots: Slots
    cache: KvCache
    block_size: int
    media: StepMedia | None
    fixed_rows: FixedRows
    graphs: StepGraphs
    arenas: StepArenas

    def way_of(self, plan: StepPlan, media: MediaInput | None) -> Way:
        """How a step runs. Its arena on the host, which must not be uploaded yet, is padded for that."""
        graphs, arenas = self.graphs, self.arenas
        has_prompts = plan.num_rows > plan.num_decode_rows
        shares = self.model.reads_together and arenas.share_blocks(plan)
        if media is None and shares and (together := graphs.together.choose(plan)) is not None:
            arenas.pad(plan.arena, plan.num_rows, together.num_rows)
            return partial(self.together, kind=together)
        if media is None and not has_prompts and (decode := graphs.decode.choose(plan.num_rows, plan.max_kv_len)):
            size, bound = decode
            arenas.pad(plan.arena, plan.num_rows, size)
            return partial(self.decode, size=size, bound=bound)
        if media is None and has_prompts and (mixed := graphs.mixed.choose(plan)) is not None:
            arenas.pad_empty(plan.arena, plan.num_rows, mixed.num_rows, plan.num_tokens)
            return partial(self.mixed, kind=mixed)
        sizes = plan.num_rows, plan.num_decode_rows, plan.num_tokens, plan.max_query_len, plan.max_kv_len
        return partial(self.as_it_is, kind=StepKind(*sizes, reads_together=shares), media=media)

    def as_it_is(self, arena: Tensor, kind: StepKind, media: MediaInput | None = None) -> Launched:
        """Run rows of any kind, kernel by kernel."""
        arrays = self.arenas.arrays(arena, kind.num_rows, kind.num_tokens)
        tokens = self.kernels.prepare(arrays, self.slots)
        header = HeaderParts(self.arenas.counts(arena)[0], self.arenas.shared_blocks(arena))
        ctx = step_context(kind, arrays, tokens, self.slots, self.cache.layers, header, self.block_size)
        if self.media is not None:
            ctx.media, ctx.rope_position_3t = media, self.media.rope_positions(tokens.position_t, arrays, media)
        self.backend.prepare(ctx)
        return Launched(self.model.forward(tokens.token_id_t, tokens.position_t, ctx), arrays)

    def decode(self, arena: Tensor, size: int, bound: int) -> Launched:
        """Run `size` decode rows, padding included, with contexts up to `bound`, through their graph. The arena has one
        address and `prepare` makes its tensors inside the graph, so a replay reads the step's own values."""
        graph_rows = size if self.graphs.decode.has(size, bound) else 0
        kind = decode_kind(size, bound)
        hidden_tm = self.graphs.decode.run(size, bound, lambda: self.as_it_is(arena, kind).hidden_tm)
        return Launched(hidden_tm, self.arenas.arrays(arena, size, size), graph_rows)

    def together(self, arena: Tensor, kind: StepKind) -> Launched:
        """As `decode`, for rows that begin with the same blocks."""
        size = kind.num_rows
        graph_rows = size if self.graphs.together.has(kind) else 0
        hidden_tm = self.graphs.together.run(kind, lambda: self.as_it_is(arena, kind).hidden_tm)
        return Launched(hidden_tm, self.arenas.arrays(arena, size, size), graph_rows)

    def mixed(self, arena: Tensor, kind: StepKind) -> Launched:
        """Run a step with prompts through the graph of its kind, which leaves the rows to sample in `FixedRows`."""

        def forward() -> Tensor:
            launched = self.as_it_is(arena, kind)
            _, num_sampled_1 = self.arenas.counts(arena)
            return self.fixed_rows.fill(launched.hidden_tm, launched.arrays, num_sampled_1, kind.num_rows)[0]

        hidden_sm = self.graphs.mixed.run(kind, forward)
        return Launched(hidden_sm, self.arenas.arrays(arena, kind.num_rows, kind.num_tokens), is_fixed=True)
