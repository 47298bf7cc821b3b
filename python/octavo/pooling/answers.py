"""From the model's numbers to what callers asked for: scores, similarities, shorter embeddings. NumPy only."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Rows = NDArray[np.float32]
"""[texts, numbers]"""

SMALL = 1e-12


def activate(logits_nl: Rows, activation: str) -> Rows:
    """Probabilities (or, for "none", the logits themselves) of each row's labels."""
    if activation == "sigmoid":
        return np.asarray(1 / (1 + np.exp(-np.clip(logits_nl, -80, 80))), np.float32)
    if activation == "softmax":
        powers = np.exp(logits_nl - logits_nl.max(axis=1, keepdims=True))
        return np.asarray(powers / powers.sum(axis=1, keepdims=True), np.float32)
    return logits_nl


def shorten(rows_nd: Rows, dimensions: int) -> Rows:
    """The first numbers of each vector, of length 1 again (Matryoshka representations)."""
    return normalize(rows_nd[:, :dimensions])


def normalize(rows_nd: Rows) -> Rows:
    norms: Any = np.linalg.norm(rows_nd, axis=1, keepdims=True)
    return np.asarray(rows_nd / np.maximum(norms, SMALL), np.float32)


def similarities(first_nd: Rows, second_nd: Rows) -> Rows:
    """Cosine of the angle between the vectors of each pair, [pairs]."""
    return np.asarray((normalize(first_nd) * normalize(second_nd)).sum(axis=1), np.float32)
