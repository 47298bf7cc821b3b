"""Mistral (7B, Nemo, Small): Llama without biases, with a sliding window on every layer where the config sets one."""

from __future__ import annotations

from octavo.models.family import Family, Names, block_spec

FAMILY = Family(names=Names(), block=block_spec)
