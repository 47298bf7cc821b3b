"""SmolLM 3: Llama's block; some layers (every fourth) do not rotate."""

from __future__ import annotations

from octavo.models.family import Family, Names
from octavo.models.llama import llama_block

DEFAULTS = {
    "smollm3": {
        "max_position_embeddings": 32768,
        "num_key_value_heads": 4,
        "rope_theta": 2_000_000.0,
        "no_rope_layer_interval": 4,
        "use_sliding_window": False,
        "tie_word_embeddings": True,
    },
}
"""model_type -> what its config.json means where it is silent."""

FAMILY = Family(names=Names(), block=llama_block)
