"""The memory plan as arithmetic: what fits, what doesn't, and that every way out an error names really works."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
import torch

from octavo.config import EngineConfig, make_engine_config
from octavo.errors import ConfigError
from octavo.models.config import NormalConfig, normalize_config
from octavo.models.registry import footprint
from octavo.models.sources import ModelSource
from octavo.worker.cache_bytes import kv_token_bytes
from octavo.worker.device import DeviceFacts
from octavo.worker.memory import GIB, MemoryPlan, memory_errors, plan_memory
from octavo.worker.resolve import graph_sizes, limits_of, resolve_config
from octavo.worker.usage import rows_at_a_time, usage_of

LLAMA_8B = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "dtype": "bfloat16",
}
NUM_PARAMETERS = 8_030_261_248


def cuda(total_gib: float, used_gib: float = 0.5) -> DeviceFacts:
    total = int(total_gib * GIB)
    return DeviceFacts("cuda", "GPU", total, total - int(used_gib * GIB), num_cores=8, has_bfloat16=True)


def cpu(free_gib: float, has_bfloat16: bool = False) -> DeviceFacts:
    return DeviceFacts("cpu", "CPU", int(64 * GIB), int(free_gib * GIB), num_cores=4, has_bfloat16=has_bfloat16)


def make(device: DeviceFacts, **options: Any) -> MemoryPlan:
    """The plan of Llama-3.1-8B's shape."""
    model = normalize_config(LLAMA_8B)
    source = ModelSource("llama-8b", None, None, LLAMA_8B, {}, None)
    config = resolve(device, model, **options)
    item = 4 if config.model.dtype == "float32" else 2
    return plan_memory(config, source, model, device, NUM_PARAMETERS * item)


def resolve(device: DeviceFacts, model: NormalConfig, **options: Any) -> EngineConfig:
    return resolve_config(make_engine_config({"model": "llama-8b", **options}), device, model.max_position_embeddings)


def read(value: str) -> int | float | str:
    """A flag's value as the command line would read it."""
    return float(value) if "." in value else int(value) if value.isdigit() else value


def test_a_large_device_takes_the_models_context() -> None:
    plan = make(cuda(139.8))
    assert kv_token_bytes(normalize_config(LLAMA_8B), "bfloat16") == 2 * 32 * 8 * 128 * 2 == plan.kv_token_bytes
    assert plan.usage.weight_bytes == 2 * NUM_PARAMETERS
    assert plan.max_model_len == 131072
    everything = plan.usage.total + plan.kv_bytes
    assert 0.85 * 139.8 * GIB < everything <= 0.9 * 139.8 * GIB - 0.5 * GIB
    assert plan.concurrency(131072) == pytest.approx(plan.num_kv_tokens / 131072)
    assert plan.concurrency(64) == 256


def test_experts_count() -> None:
    """Qwen3-30B-A3B: 30.5 billion parameters; 8 experts' rows of each token beside what a dense model makes."""
    raw = {
        **LLAMA_8B,
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "vocab_size": 151936,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 48,
        "num_key_value_heads": 4,
        "head_dim": 128,
    }
    model = normalize_config(raw)
    assert model.experts is not None
    rotary_table = 131072 * 128 * 4
    assert footprint(model, torch.bfloat16).weight_bytes == 2 * 30_532_122_624 + rotary_table
    dense = replace(model, experts=None)
    device = cuda(140)
    config = resolve(device, model, max_num_batched_tokens=8192)
    sparse, plain = (usage_of(config, which, device, 0).activation_bytes for which in (model, dense))
    difference = sparse - plain
    pairs = 8192 * 8
    assert 2 * pairs * (2048 + 768) < difference < 2 * pairs * (2048 + 768) + (40 << 20)


def test_the_plan_resolves_the_whole_config() -> None:
    config = make(cuda(139.8)).config
    assert limits_of(config).overlap_depth == 2
    assert (config.model.dtype, config.execution.device, config.execution.attention_backend) == (
        "bfloat16",
        "cuda",
        "triton",
    )
    assert config.execution.cuda_graph_sizes[-1] == 256
    on_cpu = make(cpu(60), max_model_len=4096).config
    assert limits_of(on_cpu).cpu_threads == 4
    assert (on_cpu.model.dtype, on_cpu.cache.block_size, on_cpu.execution.enforce_eager) == ("float32", 16, True)
    assert on_cpu.execution.cuda_graph_sizes == []
    assert make(cpu(60, has_bfloat16=True), max_model_len=4096).config.model.dtype == "bfloat16"


def test_auto_takes_the_longest_context_that_fits() -> None:
    plan = make(cuda(24), max_model_len="auto")
    assert plan.max_model_len == plan.num_kv_tokens < 131072
    assert plan.max_model_len % 64 == 0
    assert plan.config.model.max_model_len == plan.max_model_len
    assert make(cuda(24), max_model_len=plan.max_model_len).num_blocks == plan.num_blocks
    with pytest.raises(ConfigError):
        make(cuda(24), max_model_len=plan.max_model_len + 1)


@pytest.mark.parametrize(
    ("device", "options"),
    [
        (cuda(24), {}),
        (cuda(24), {"dtype": "float32"}),
        (cuda(40), {"dtype": "float32", "max_model_len": 8192}),
        (cuda(18.2), {"max_model_len": 2048}),
        (cuda(19.5), {"max_num_batched_tokens": 32768, "max_model_len": 1024}),
        (cuda(139.8, used_gib=115), {}),
        (cuda(139.8), {"gpu_memory_utilization": 0.1}),
        (cuda(139.8), {"gpu_memory_utilization": 0.2}),
        (cuda(139.8), {"num_gpu_blocks_override": 100}),
        (cuda(139.8), {"num_gpu_blocks_override": 10**6}),
        (cuda(139.8), {"kv_cache_memory_bytes": GIB}),
        (cuda(139.8), {"kv_cache_memory_bytes": 200 * GIB}),
        (cpu(60), {}),
        (cpu(24), {"max_model_len": 4096}),
        (cpu(60), {"kv_cache_memory_bytes": 1 << 20}),
        (cpu(60), {"num_gpu_blocks_override": 10**6, "max_model_len": 4096}),
    ],
)
def test_every_way_that_an_error_names_leads_out(device: DeviceFacts, options: dict[str, Any]) -> None:
    def ways_out(changed: dict[str, Any], depth: int) -> None:
        """Follow each way alone: after at most three errors the plan must stand."""
        message = ""
        try:
            plan = make(device, **changed)
        except ConfigError as error:
            message = str(error)
        if not message:
            assert depth > 0, "the case was meant not to fit"
            assert plan.num_kv_tokens >= plan.max_model_len
            return
        assert depth < 3, message
        for way in message.split("; use ")[1].split(" or "):
            changes = {flag.replace("-", "_"): read(value) for flag, value in re.findall(r"--([a-z-]+) (\S+)", way)}
            assert changes, message
            ways_out({**changed, **changes}, depth + 1)

    ways_out(options, 0)


def test_no_way_out_names_the_memory_that_is_needed() -> None:
    with pytest.raises(ConfigError, match=r"a device with 18\.\d+ GiB free"):
        make(cuda(12))


def test_a_context_past_the_models_positions_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"--max-model-len 131073.*at most 131072"):
        make(cuda(139.8), max_model_len=131073)


def test_the_report_says_what_was_asked_for() -> None:
    report = make(cuda(139.8)).report()
    lines = dict(re.split(r"  +", line, maxsplit=1) for line in report.splitlines())
    assert lines["weights"] == "14.96 GiB"
    assert "128.0 KiB a token" in lines["KV cache"]
    assert "131072" in lines["longest context"]
    assert re.search(r"256\.0 x 1024, .* x 131072 tokens", lines["concurrency"])
    assert {len(re.match(r"\S+( \S+)* +", line)[0]) for line in report.splitlines()} == {17}  # type: ignore[index]


def test_running_out_of_memory_at_start_names_the_flag() -> None:
    message = r"Tried to allocate.*--gpu-memory-utilization 0\.85 instead of 0\.9"
    with pytest.raises(ConfigError, match=message), memory_errors(make_engine_config({"model": "m"})):
        raise torch.OutOfMemoryError("Tried to allocate 20.00 GiB")


def test_graph_sizes_end_with_the_largest_batch() -> None:
    assert graph_sizes(1) == [1]
    assert graph_sizes(48) == [1, 2, 4, 8, 16, 24, 32, 48]
    assert graph_sizes(100) == [1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 100]
    with pytest.raises(ConfigError, match="--cuda-graph-sizes 2048: a step has at most 256 rows"):
        make(cuda(139.8), cuda_graph_sizes=[8, 2048])


def test_contradictions_with_the_device_are_named() -> None:
    with pytest.raises(ConfigError, match="--attention-backend cpu"):
        make(cuda(139.8), attention_backend="cpu")
    assert make(cuda(139.8), attention_backend="reference").config.execution.enforce_eager


def test_large_devices_sample_the_usual_batches_at_once() -> None:
    assert rows_at_a_time(cuda(140), 151_936, 256) == 256
    assert rows_at_a_time(cuda(24), 151_936, 256) == (1 << 24) // 151_936
    assert rows_at_a_time(cpu(24), 1 << 30, 256) == 1
