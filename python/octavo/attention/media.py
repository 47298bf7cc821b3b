"""What a step's tokens take from images: embeddings in the place of token ids, positions in three dimensions, and spans
whose tokens see each other. The runner builds one where a step has such tokens; models and backends read it.

Shape suffixes: t tokens of the step, i tokens that stand for images, m model dim.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class WholeSpan:
    """Tokens [first, first + count) of the step stand for one image, and attend to all of its positions
    [start, end), the later ones too."""

    slot: int
    first: int
    count: int
    start: int
    end: int


@dataclass(slots=True)
class MediaInput:
    """Filled row by row on the host, then `finish`ed."""

    spans: list[WholeSpan] = field(default_factory=list)
    _tokens: list[npt.NDArray[np.int64]] = field(default_factory=list)
    _features: list[Tensor] = field(default_factory=list)
    _placed: list[npt.NDArray[np.int64]] = field(default_factory=list)
    _positions: list[Tensor] = field(default_factory=list)
    _index_i: Tensor | None = None
    _feature_im: Tensor | None = None
    _placed_p: Tensor | None = None
    _position_3p: Tensor | None = None

    @property
    def has_any(self) -> bool:
        """Some token of the step takes something."""
        return bool(self._tokens or self._placed)

    def add_features(self, token_i: npt.NDArray[np.int64], feature_im: Tensor) -> None:
        """Tokens of the step take an encoder's outputs."""
        self._tokens.append(token_i)
        self._features.append(feature_im)

    def add_positions(self, token_p: npt.NDArray[np.int64], position_3p: Tensor) -> None:
        """Tokens of the step have positions in three dimensions."""
        self._placed.append(token_p)
        self._positions.append(position_3p)

    def finish(self, device: torch.device) -> MediaInput:
        """Bring it to the device; nothing is added after that."""
        if self._tokens:
            self._index_i = torch.from_numpy(np.concatenate(self._tokens)).to(device)
            self._feature_im = torch.cat(self._features)
        if self._placed:
            self._placed_p = torch.from_numpy(np.concatenate(self._placed)).to(device)
            self._position_3p = torch.cat(self._positions, dim=1).to(device)
        return self

    def embedded(self, hidden_tm: Tensor) -> Tensor:
        """Token embeddings with those of images in their places; wider outputs of encoders are cut to the model's
        width (the rest is `deep_features`)."""
        if self._index_i is None or self._feature_im is None:
            return hidden_tm
        feature_im = self._feature_im[:, : hidden_tm.shape[-1]].to(hidden_tm.dtype)
        return hidden_tm.index_copy(0, self._index_i, feature_im)

    def deepened(self, hidden_tm: Tensor, layer: int) -> Tensor:
        """What a layer gives, with what the encoder adds to it there (deep features: Qwen3-VL)."""
        if self._index_i is None or self._feature_im is None:
            return hidden_tm
        width = hidden_tm.shape[-1]
        deep_im = self._feature_im[:, (layer + 1) * width : (layer + 2) * width]
        return hidden_tm.index_add(0, self._index_i, deep_im.to(hidden_tm.dtype)) if deep_im.numel() else hidden_tm

    def deep_features(self, num_tokens: int, width: int) -> tuple[Tensor, list[Tensor]] | None:
        """(mask [t] of the tokens that stand for images, what each of the first layers adds to them [i, m])."""
        if self._index_i is None or self._feature_im is None or self._feature_im.shape[1] == width:
            return None
        order_i = self._index_i.argsort()
        mask_t = torch.zeros(num_tokens, dtype=torch.bool, device=self._index_i.device)
        mask_t[self._index_i] = True
        return mask_t, list(torch.split(self._feature_im[order_i], width, dim=1)[1:])

    def with_positions(self, position_3t: Tensor) -> Tensor:
        """Positions of all tokens [3, t] with those of prompts with images in their places."""
        if self._placed_p is None or self._position_3p is None:
            return position_3t
        return position_3t.index_copy(1, self._placed_p, self._position_3p)
