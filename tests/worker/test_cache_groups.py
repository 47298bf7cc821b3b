"""Cache groups: how layers are put together, and what a model's cache then holds."""

from __future__ import annotations

from typing import Any

import pytest

from octavo._core import CoreConfig
from octavo.config import make_engine_config
from octavo.errors import ConfigError
from octavo.models.config import normalize_config
from octavo.models.sources import ModelSource
from octavo.worker import memory
from octavo.worker.cache_groups import STATE, CacheLayout, Keep, lane_bytes, lay_out, layout_of, one_group
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
    kinds = [ALL, Keep("window", 1 + case % 7), Keep("chunk", 3 + case), Keep("window", 40), STATE]
    layout = lay_out([kinds[(case * i + i) % (1 + case % 5)] for i in range(3 + case % 5)])
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


NEMOTRON_H_8B = {
    "architectures": ["NemotronHForCausalLM"],
    "model_type": "nemotron_h",
    "vocab_size": 131072,
    "hidden_size": 4096,
    "intermediate_size": 21504,
    "hybrid_override_pattern": "M-M-M-M*-" + 3 * "M-M-M-M-M*-" + "M-M-M-M-M-",
    "num_attention_heads": 32,
    "max_position_embeddings": 8192,
    "dtype": "bfloat16",
}


def nemotron(monkeypatch: pytest.MonkeyPatch, **options: Any) -> memory.MemoryPlan:
    """Of a GPU with 141 GB."""
    device = DeviceFacts("cuda", "GPU", 141 * GIB, 140 * GIB, 8, True)
    monkeypatch.setattr(memory, "find_device", lambda name: device)
    monkeypatch.setattr(memory, "check_backend", lambda backend, device: None)
    source = ModelSource("nemotron", None, None, NEMOTRON_H_8B, {}, None)
    values = {"model": "nemotron", "dtype": "bfloat16", "max_num_seqs": 4096, **options}
    return memory.make_plan(make_engine_config(values), source=source)


def test_shorter_blocks_find_shorter_prefixes_for_more_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """The figures of python/octavo/models/README.md."""
    fit = {}
    for size in (1088, 544, 272):
        plan = nemotron(monkeypatch, block_size=size)
        fit[size] = [int(plan.concurrency(length)) for length in (250, 1000, 8192)]
    assert nemotron(monkeypatch).limits.block_size == 1088
    assert fit == {1088: [870, 870, 304], 544: [898, 449, 224], 272: [898, 392, 146]}


def test_states_and_keys_share_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """24 layers with states, 4 that attend: seven groups of four, whose blocks have room for either."""
    plan = nemotron(monkeypatch)
    assert plan.layout.keeps == (ALL, *[STATE] * 6)
    assert (plan.layout.num_lanes, len(plan.layout.layer_groups)) == (4, 28)
    state_bytes, token_bytes = 4 * (128 * 64 * 128 + 3 * (128 * 64 + 2 * 8 * 128)), 2 * 8 * 128 * 2
    size = plan.limits.block_size
    assert state_bytes <= size * token_bytes < state_bytes + 64 * token_bytes
    assert plan.block_bytes == 4 * size * token_bytes
    assert "24 layers keep states" in plan.report()
    longer = 2 * 8192 // size
    assert plan.layout.blocks_for(2 * 8192, size, 2) == longer + 1 + 6 * 2
    with pytest.raises(ConfigError, match=r"--block-size 40.*multiple of 16"):
        nemotron(monkeypatch, block_size=40)


def test_lanes_of_unlike_layers_fit_the_larger() -> None:
    layout = lay_out([ALL, STATE, STATE, ALL, STATE])
    assert layout.num_lanes == 2
    assert lane_bytes(layout, [1000, 700, 700, 1000, 700]) == [1024, 1024]
    assert lane_bytes(lay_out([STATE] * 2), [700, 700]) == [700, 700]
