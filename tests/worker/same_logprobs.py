"""Logprobs of two runs compared."""

from __future__ import annotations

from typing import Any

import numpy as np


def assert_same_logprobs(found: Any, expected: Any, atol: float = 0.0) -> None:
    """Of each token the same ids of the same ranks in the same order, and the same numbers but for `atol`."""
    assert (found is None) == (expected is None)
    for ours, theirs in zip(found or (), expected or (), strict=True):
        assert (ours is None) == (theirs is None)
        if ours is not None:
            assert list(ours) == list(theirs)
            assert [o.rank for o in ours.values()] == [t.rank for t in theirs.values()]
            found_p, wanted_p = ([entry.logprob for entry in entries.values()] for entries in (ours, theirs))
            np.testing.assert_allclose(found_p, wanted_p, rtol=0, atol=atol)
