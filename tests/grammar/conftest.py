"""The tiny model of the engine's tests."""

from __future__ import annotations

from tests.engine.conftest import tiny_llama

__all__ = ["tiny_llama"]
