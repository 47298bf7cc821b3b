"""The embedded runner through the whole engine: the same tokens and logprobs as the torch runner, without torch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file
from same_logprobs import assert_same_logprobs

from octavo import LLM, SamplingParams
from octavo.config import make_engine_config
from octavo.errors import ConfigError
from octavo.worker.base import make_runner as build_runner
from octavo.worker.device import core_cpus
from octavo.worker.embedded import EmbeddedRunner

OPTIONS: dict[str, Any] = {
    "device": "cpu",
    "dtype": "float32",
    "block_size": 4,
    "num_gpu_blocks_override": 128,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 32,
    "cpu_threads": 1,
}
PROMPTS = [[5, 9, 17, 23, 4], list(range(20, 70)), [99] * 9, [7, 7, 8]]
CASES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "sampled": {"temperature": 1.0},
    "cold": {"temperature": 0.3},
    "top-k": {"top_k": 5},
    "top-p": {"top_p": 0.6},
    "top-k, top-p, hot": {"temperature": 1.7, "top_k": 40, "top_p": 0.9},
    "min-p": {"min_p": 0.2},
    "penalties": {"temperature": 0.0, "presence_penalty": 0.7, "frequency_penalty": 0.5, "repetition_penalty": 1.3},
    "bias": {"logit_bias": {5: 6.0, 7: -100.0}},
    "allowed": {"allowed_token_ids": [3, 50, 51, 52, 130]},
    "min-tokens": {"temperature": 0.0, "min_tokens": 12, "stop_token_ids": list(range(3, 60))},
    "several": {"n": 3, "temperature": 0.9},
    "logprobs": {"temperature": 0.0, "logprobs": 4},
    "prompt-logprobs": {"temperature": 0.0, "prompt_logprobs": 3},
}


@pytest.fixture(scope="module")
def engines(folder: Path) -> Iterator[tuple[LLM, LLM]]:
    """(torch, embedded) over one checkpoint."""
    with (
        LLM(str(folder), runner="torch", **OPTIONS) as torch_llm,
        LLM(str(folder), runner="embedded", **OPTIONS) as llm,
    ):
        yield torch_llm, llm


@pytest.mark.parametrize("case", CASES)
def test_same_as_torch(engines: tuple[LLM, LLM], case: str) -> None:
    params = SamplingParams(**{"max_tokens": 20, "seed": 11, "detokenize": False, **CASES[case]})
    expected, found = (llm.generate(PROMPTS, params) for llm in engines)
    for want, got in zip(expected, found, strict=True):
        assert [o.token_ids for o in got.outputs] == [o.token_ids for o in want.outputs]
        assert [o.finish_reason for o in got.outputs] == [o.finish_reason for o in want.outputs]
        for ours, theirs in zip(got.outputs, want.outputs, strict=True):
            assert_same_logprobs(ours.logprobs, theirs.logprobs, 2e-4)
        assert_same_logprobs(got.prompt_logprobs, want.prompt_logprobs, 2e-4)


def test_prefixes_are_reused(engines: tuple[LLM, LLM]) -> None:
    _, llm = engines
    params = SamplingParams(max_tokens=6, temperature=0.0, detokenize=False)
    prompt = [3 + i % 90 for i in range(61)]
    first, second = llm.generate([prompt], params)[0], llm.generate([prompt], params)[0]
    assert second.num_cached_tokens >= 56
    assert second.outputs[0].token_ids == first.outputs[0].token_ids


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "int8"])
def test_preempted_and_chunked_requests_get_the_tokens_they_get_alone(folder: Path, kv_cache_dtype: str) -> None:
    generator = np.random.default_rng(3)
    prompts = [generator.integers(3, 120, size=size).tolist() for size in generator.integers(2, 40, size=24)]
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, detokenize=False)
    options = {**OPTIONS, "runner": "embedded", "max_model_len": 80, "kv_cache_dtype": kv_cache_dtype}
    with LLM(str(folder), **options) as roomy:
        expected = [roomy.generate([prompt], params)[0].outputs[0].token_ids for prompt in prompts]
    with LLM(str(folder), **{**options, "num_gpu_blocks_override": 30, "max_num_batched_tokens": 16}) as crowded:
        found = [output.outputs[0].token_ids for output in crowded.generate(prompts, params)]
        stats = crowded.stats()
    assert found == expected
    assert stats["num_preemptions"] > 0
    assert stats["num_free_blocks"] == stats["num_blocks"]


def test_auto_takes_it_on_the_cpu_and_says_why_not(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    options = {**OPTIONS, "model": str(folder), "runner": "auto"}
    runner = build_runner(make_engine_config(options), lambda stage, fraction: None)
    assert isinstance(runner, EmbeddedRunner)
    runner.close()
    with caplog.at_level("INFO", logger="octavo.worker.choice"):
        config = make_engine_config({**options, "attention_backend": "reference"})
        other = build_runner(config, lambda stage, fraction: None)
    assert not isinstance(other, EmbeddedRunner)
    assert "--attention-backend is reference" in caplog.text
    other.close()


def test_what_it_cannot_run_is_refused(folder: Path) -> None:
    config = make_engine_config({**OPTIONS, "model": str(folder), "runner": "embedded", "quantization": "fp8"})
    with pytest.raises(ConfigError, match=r"--quantization fp8.*--runner auto"):
        build_runner(config, lambda stage, fraction: None)


PROGRAMS = {
    "generate": (
        "from octavo import LLM, SamplingParams\n"
        "with LLM({model!r}, runner='embedded', device='cpu', max_model_len=64) as llm:\n"
        "    llm.generate([[5, 6, 7]], SamplingParams(max_tokens=3, detokenize=False))\n"
    ),
    "plan": "from octavo.cli import main\nassert main(['plan', {model!r}, '--device', 'cpu']) == 0\n",
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_torch_is_not_imported(folder: Path, name: str) -> None:
    code = PROGRAMS[name].format(model=str(folder))
    code += "import sys\nassert not {'torch', 'transformers'} & set(sys.modules)\n"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


MEMORY = """
import re, sys
from pathlib import Path
from octavo.config import make_engine_config
from octavo.engine.build import build_engine
loop = build_engine(make_engine_config({{"model": {model!r}, "device": "cpu", "runner": "embedded", "dtype": "float32",
    "max_model_len": 256, "max_num_seqs": 8, "max_num_batched_tokens": 128}}), lambda stage, fraction: None)
status = Path("/proc/self/status").read_text()
peak = int(re.search(r"VmHWM:\\s+(\\d+)", status).group(1)) * 1024
print(peak, loop.runner.decoder.weight_bytes())
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads the peak from /proc")
def test_memory_beyond_the_weights_is_small(tmp_path: Path) -> None:
    """A mapped file's pages do not stay beside the packed copy; the cache is not resident before it is used."""
    hidden, inner, vocab, num_layers = 512, 2048, 40000, 6
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
        "num_hidden_layers": num_layers,
        "vocab_size": vocab,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
        "torch_dtype": "float32",
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    shapes = {"model.embed_tokens.weight": (vocab, hidden), "model.norm.weight": (hidden,)}
    for layer in range(num_layers):
        parts = {f"self_attn.{name}_proj": (hidden, hidden) for name in "qkvo"}
        parts |= {"mlp.gate_proj": (inner, hidden), "mlp.up_proj": (inner, hidden), "mlp.down_proj": (hidden, inner)}
        parts |= {"input_layernorm": (hidden,), "post_attention_layernorm": (hidden,)}
        shapes |= {f"model.layers.{layer}.{name}.weight": shape for name, shape in parts.items()}
    save_file({name: np.ones(shape, np.float32) for name, shape in shapes.items()}, tmp_path / "model.safetensors")
    code = MEMORY.format(model=str(tmp_path))
    done = subprocess.run([sys.executable, "-c", code], check=True, timeout=120, capture_output=True, text=True)
    peak, weights = map(int, done.stdout.split())
    assert weights > 180e6
    assert peak - weights < 150e6, f"{peak / 1e6:.0f} MB with {weights / 1e6:.0f} MB of weights"


def workers() -> set[int]:
    """Second threads of this process's pools; a thread names itself as it begins."""
    tasks = Path("/proc/self/task").iterdir()
    return {int(task.name) for task in tasks if (task / "comm").read_text() == "octavo-cpu-1\n"}


@pytest.mark.skipif(len(core_cpus()) < 2, reason="needs two cores of a system with affinity masks")
def test_threads_are_pinned_on_request(folder: Path) -> None:
    for pin, wanted in ((False, os.sched_getaffinity(0)), (True, {core_cpus()[1]})):
        others = workers()
        with LLM(str(folder), runner="embedded", **{**OPTIONS, "cpu_threads": 2}, cpu_pin=pin):
            deadline = time.monotonic() + 30
            while [os.sched_getaffinity(worker) for worker in workers() - others] != [wanted]:
                assert time.monotonic() < deadline
                os.sched_yield()
    with pytest.raises(ConfigError, match=r"--cpu-pin: 1000 threads have \d+ cores; set --cpu-threads"):
        LLM(str(folder), runner="embedded", **{**OPTIONS, "cpu_threads": 1000}, cpu_pin=True)
