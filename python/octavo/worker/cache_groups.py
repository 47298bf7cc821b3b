"""Cache groups: which layers share a block table, and where their keys and values lie. Pure.

Layers that keep the same positions (all, a window, a chunk) or states are put into groups of equally many layers, so
that blocks of all groups have equal bytes and one pool serves them: the nth layers of all groups share a tensor, the
nth lane, and a block is a place in every lane, for the layers of the group that holds it. Where keys and values lie
beside states, a block has room for either. Who holds what is the control plane's business (rust/core/src/groups.rs).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from octavo.attention.base import CacheSpec
    from octavo.models.config import NormalConfig

MAX_GROUPS = 16
"""Every group costs a block table, and the host time of its updates."""
ALMOST_EQUAL = 1.25
"""Kinds whose numbers of layers differ by less are one group each, filled up."""

LANE_STEP = 512
"""Bytes of a block are a multiple of so many in lanes of unlike layers: kernels load many bytes at a time."""


@dataclass(frozen=True, slots=True)
class Keep:
    """What a layer reads of a sequence: `kind` is "all", "window" (`size` tokens), "chunk" (from the last multiple of
    `size` on) or "state" (one, of `STATE.size` positions: the one before and its own)."""

    kind: str = "all"
    size: int = 0

    def max_blocks(self, block_size: int, depth: int) -> int | None:
        """Blocks with which a sequence of any length goes on, with `depth` steps in flight; None: there is no limit."""
        return None if self.kind == "all" else math.ceil((self.size + depth - 2) / block_size) + 1

    def serves(self, spec: CacheSpec) -> bool:
        """Whether a layer finds all that it reads."""
        from octavo.attention.base import StateSpec  # imports torch, which plans do without

        if isinstance(spec, StateSpec):
            return self.kind == "state"
        if self.kind == "chunk":
            return spec.chunk == self.size
        return self.kind == "all" or (self.kind == "window" and 0 < spec.window <= self.size)


STATE = Keep("state", 2)


@dataclass(frozen=True, slots=True)
class CacheLayout:
    """`keeps[g]` is what group g keeps, `layer_groups[i]` the group of layer i; a group of all comes first."""

    keeps: tuple[Keep, ...]
    layer_groups: tuple[int, ...]

    @property
    def layer_lanes(self) -> tuple[int, ...]:
        """Of each layer: its place in its group."""
        return tuple(self.layer_groups[:layer].count(group) for layer, group in enumerate(self.layer_groups))

    @property
    def num_lanes(self) -> int:
        """Layers of a group, at most; a block has so many layers' bytes."""
        return max(self.layer_lanes) + 1

    def blocks_for(self, num_tokens: int, block_size: int, depth: int) -> int:
        """Blocks that a sequence of so many tokens needs when it is alone."""
        blocks = math.ceil(num_tokens / block_size)
        most = (keep.max_blocks(block_size, depth) for keep in self.keeps)
        return sum(blocks if limit is None else min(blocks, limit) for limit in most)

    def tokens_in(self, num_blocks: int, block_size: int, depth: int, most: int) -> int:
        """Tokens of the longest sequence that so many blocks hold, counted up to `most`."""
        fit, over = 0, math.ceil(most / block_size) + 1
        while over - fit > 1:
            middle = (fit + over) // 2
            fits = self.blocks_for(middle * block_size, block_size, depth) <= num_blocks
            fit, over = (middle, over) if fits else (fit, middle)
        return fit * block_size

    def of_model(self, specs: Sequence[CacheSpec]) -> CacheLayout:
        """The layout of a model with these caches: the plan was made from its config. Only where all layers keep all
        may there be more or fewer than the config says."""
        if self.keeps == (Keep(),):
            return one_group(len(specs))
        for spec in specs:
            keep = self.keeps[self.layer_groups[spec.layer]]
            assert keep.serves(spec), f"layer {spec.layer} reads more than {keep} keeps"
        return self


def lane_bytes(layout: CacheLayout, layer_bytes: Sequence[int]) -> list[int]:
    """Of a block in each lane: the most that one of its layers has in a block (`layer_bytes`), which is all that there
    is where they have equally much."""
    sizes: list[set[int]] = [set() for _ in range(layout.num_lanes)]
    for lane, size in zip(layout.layer_lanes, layer_bytes, strict=True):
        sizes[lane].add(size)
    return [found.pop() if len(found) == 1 else -(-max(found) // LANE_STEP) * LANE_STEP for found in sizes]


def one_group(num_layers: int) -> CacheLayout:
    """All layers keep all."""
    return CacheLayout((Keep(),), (0,) * num_layers)


def lay_out(keeps: Sequence[Keep]) -> CacheLayout:
    """Groups of layers that keep `keeps[i]` each."""
    layers_of: dict[Keep, list[int]] = {}
    for layer, keep in enumerate(keeps):
        layers_of.setdefault(keep, []).append(layer)
    kinds = sorted(layers_of, key=lambda keep: (keep.kind != "all", layers_of[keep][0]))
    counts = [len(layers_of[keep]) for keep in kinds]
    lanes = max(counts) if max(counts) < ALMOST_EQUAL * min(counts) else min(counts)
    while sum(math.ceil(count / lanes) for count in counts) > max(MAX_GROUPS, len(kinds)):
        lanes += 1
    groups = [
        (keep, layers_of[keep][start : start + lanes])
        for keep in kinds
        for start in range(0, len(layers_of[keep]), lanes)
    ]
    group_of = {layer: group for group, (_, layers) in enumerate(groups) for layer in layers}
    return CacheLayout(tuple(keep for keep, _ in groups), tuple(group_of[layer] for layer in range(len(keeps))))


def layout_of(model: NormalConfig, max_length: int) -> CacheLayout:
    """Groups of a model that Octavo has the layers of, for sequences up to `max_length`."""
    nothing = (0,) * len(model.layer_windows)
    layers = zip(model.layer_windows, model.layer_chunks or nothing, model.state_sizes or nothing, strict=True)
    return lay_out([STATE if state else _keep(window, chunk, max_length) for window, chunk, state in layers])


def _keep(window: int, chunk: int, max_length: int) -> Keep:
    sizes = {"window": window, "chunk": chunk}
    kind = min((kind for kind, size in sizes.items() if size), key=lambda kind: sizes[kind], default="all")
    size = sizes.get(kind, 0)
    return Keep(kind, size) if 0 < size < max_length else Keep()
