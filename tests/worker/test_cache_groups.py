"""Cache groups: how layers are put together, and what a model's cache then holds."""

from __future__ import annotations

from typing import Any

import pytest

from octavo._core import CoreConfig
from octavo.config import make_engine_config
from octavo.models.config import normalize_config
from octavo.models.sources import ModelSource
from octavo.worker.cache_groups import CacheLayout, Keep, lay_out, layout_of, one_group
from octavo.worker.device import DeviceFacts
from octavo.worker.memory import GIB, MemoryPlan, plan_memory
from octavo.worker.resolve import resolve_config

ALL, WINDOW = Keep(), Keep("window", 1024)
GEMMA3_27B = {
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    "vocab_size": 262208,
    "hidden_size": 5376,
    "intermediate_size": 21504,
    "num_hidden_layers": 62,
    "num_attention_heads": 32,
    "num_key_value_heads": 16,
    "head_dim": 128,
    "max_position_embeddings": 131072,
    "sliding_window": 1024,
    "sliding_window_pattern": 6,
    "query_pre_attn_scalar": 168,
    "rms_norm_eps": 1e-6,
    "hidden_activation": "gelu_pytorch_tanh",
    "dtype": "bfloat16",
}


def test_layers_of_a_kind_make_groups_of_equal_size() -> None:
    gemma3 = lay_out([ALL if i % 6 == 5 else WINDOW for i in range(26)])
    assert gemma3.keeps == (ALL, *[WINDOW] * 6)
    assert gemma3.num_lanes == 4
    gpt_oss = lay_out([WINDOW, ALL] * 12)
    assert (gpt_oss.keeps, gpt_oss.num_lanes) == ((ALL, WINDOW), 12)
    assert gpt_oss.layer_groups == (1, 0) * 12
    assert gpt_oss.layer_lanes == tuple(i // 2 for i in range(24))
    assert lay_out([ALL] * 5) == one_group(5)
    assert lay_out([WINDOW] * 5).keeps == (WINDOW,)
    uneven = lay_out([ALL, *[WINDOW] * 60])
    assert len(uneven.keeps) <= 16
    chunks = lay_out([ALL if i % 4 == 3 else Keep("chunk", 8192) for i in range(48)])
    assert (chunks.num_lanes, len(chunks.keeps)) == (12, 4)


@pytest.mark.parametrize("case", range(40))
def test_control_plane_and_plan_count_alike(case: int) -> None:
    kinds = [ALL, Keep("window", 1 + case % 7), Keep("chunk", 3 + case), Keep("window", 40)]
    layout = lay_out([kinds[(case * i + i) % (1 + case % 4)] for i in range(3 + case % 5)])
    for num_blocks in (1 + len(layout.keeps), 40, 300):
        size, depth = 1 + case % 6, 1 + case % 3
        config = CoreConfig(
            block_size=size,
            num_blocks=num_blocks,
            max_num_seqs=4,
            max_num_batched_tokens=16,
            max_model_len=500,
            vocab_size=100,
            depth=depth,
            groups=[(keep.kind, keep.size) for keep in layout.keeps],
        )
        fits = layout.tokens_in(num_blocks - 1, size, depth, 500)
        assert fits == min(config.num_positions, -(-500 // size) * size)


def gemma3(**options: Any) -> MemoryPlan:
    model, device = normalize_config(GEMMA3_27B), DeviceFacts("cuda", "GPU", 141 * GIB, 140 * GIB, 8, True)
    values = {"model": "gemma3", "dtype": "bfloat16", "max_model_len": 32768, **options}
    config = resolve_config(make_engine_config(values), device, model.max_position_embeddings)
    return plan_memory(config, ModelSource("gemma3", None, None, GEMMA3_27B, {}, None), model, device, 55 * GIB)


def test_windows_leave_room_for_sequences() -> None:
    grouped, whole = gemma3(), gemma3(cache_groups=False)
    assert grouped.concurrency(32768) > 4 * whole.concurrency(32768)
    size = grouped.limits.block_size
    held = grouped.layout.blocks_for(32768, size, grouped.limits.overlap_depth)
    windows = len(grouped.layout.keeps) - 1
    assert held == 32768 // size + windows * (1024 // size + 1)
    assert "layers keep a window of 1024 tokens" in grouped.report()
    assert grouped.kv_bytes <= whole.kv_bytes + (1 << 30)


def test_a_window_as_long_as_the_context_is_no_window() -> None:
    model = normalize_config(GEMMA3_27B)
    assert layout_of(model, 1024) == one_group(62)
    assert len(layout_of(model, 1025).keeps) == 7
    assert CacheLayout((ALL,), (0,)).of_model([]) == one_group(0)
