"""SmolLM 3: Llama's block; some layers (every fourth) do not rotate."""

from __future__ import annotations

from octavo.models.family import Family, Names
from octavo.models.llama import llama_block

FAMILY = Family(names=Names(), block=llama_block)
