"""The runner with Triton's attention and step kernels, in the interpreter, which must be chosen before triton is
imported: hence a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from octavo import LLM, SamplingParams
from octavo.config import make_engine_config
from octavo.errors import ConfigError
from octavo.worker.memory import make_plan

SCRIPT = """
import json, sys, torch
from octavo import LLM, SamplingParams
from octavo.layers import recurrent
from octavo.worker import step_graphs
from octavo.worker import step_kinds
from octavo.worker.graphs import DecodeGraphs
from octavo.worker.mixed_graphs import MixedGraphs

class StandIn(DecodeGraphs):
    '''What a device would capture and replay, run each time, padding and all.'''
    keys = []

    def __init__(self, sizes, max_model_len):
        super().__init__([], max_model_len)
        self._sizes = [3, 4]

    def has(self, size, bound):
        return (size, bound) in self._graphs

    def run(self, size, bound, forward):
        self._graphs[size, bound] = None
        return forward()

    def wants(self, key):
        return True

    def run_sampling(self, key, sample):
        StandIn.keys.append((key[0], key[2]))
        sample()

class Mixed(MixedGraphs):
    ran = []

    def __init__(self, captures, sizes, max_tokens, max_model_len):
        super().__init__(captures, [3, 4], 16, max_model_len)

    def run(self, kind, forward):
        Mixed.ran.append(kind)
        self._graphs[kind] = None
        return forward()

recurrent.runs_kernels = lambda device: True
step_kinds.GRAPH_TOKENS = (6, 16)
step_graphs.MixedGraphs = Mixed
step_graphs.DecodeGraphs = StandIn
torch.cuda.synchronize = lambda: None
prompts, options, drawing = json.loads(sys.argv[1])
with LLM(**options) as llm:
    chores = list(llm._loop.runner.chores)
    ahead = set(StandIn.keys)
    assert {kind.num_tokens for kind in Mixed.ran} == {6, 16}
    StandIn.keys.clear()
    Mixed.ran.clear()
    outputs = llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True))
    greedy = len(StandIn.keys), len(set(StandIn.keys))
    assert chores and set(StandIn.keys) <= ahead, "idle time leaves nothing for greedy steps to capture"
    drawn = llm.generate(prompts, [SamplingParams(seed=seed, **drawing) for seed in range(3)])
    sampled = len(StandIn.keys) - greedy[0], len(set(StandIn.keys)) - greedy[1]
tokens = [[output.outputs[0].token_ids for output in both] for both in (outputs, drawn)]
assert len(Mixed.ran) >= 3, Mixed.ran
print(json.dumps([*tokens, greedy, sampled]))
"""


DRAWING: dict[str, Any] = {
    "temperature": 0.9,
    "top_p": 0.9,
    "presence_penalty": 0.5,
    "logprobs": 2,
    "max_tokens": 6,
    "ignore_eos": True,
}


OPTIONS: dict[str, Any] = {
    "device": "cpu",
    "dtype": "float32",
    "attention_backend": "triton",
    "block_size": 16,
    "num_gpu_blocks_override": 60,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 16,
    "overlap_depth": 2,
    "cpu_threads": 1,
    "use_tqdm": False,
}


def run_interpreted(prompts: list[list[int]], options: dict[str, Any]) -> Any:
    """(greedy tokens, drawn tokens, steps and graphs of both) by `SCRIPT`."""
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, json.dumps([prompts, options, DRAWING])],
        capture_output=True,
        text=True,
        env={**os.environ, "TRITON_INTERPRET": "1"},
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_triton_steps_give_transformers_tokens(folder: Path, greedy: Any) -> None:
    prompts = [[5, 6, 7, 8] * 5, [9, 10, 11], [12]]
    options = {**OPTIONS, "model": str(folder)}
    tokens, drawn, greedy_graphs, drawn_graphs = run_interpreted(prompts, options)
    assert tokens == [greedy(prompt, 6) for prompt in prompts]
    with LLM(**{**options, "attention_backend": "reference"}) as llm:
        outputs = llm.generate(prompts, [SamplingParams(seed=seed, **DRAWING) for seed in range(3)])
    assert drawn == [output.outputs[0].token_ids for output in outputs]
    for num_steps, num_graphs in (greedy_graphs, drawn_graphs):
        assert num_steps >= 4
        assert num_graphs <= 2, "one way of sampling, in at most two sizes"


def check_steps(model: Any, length: int, folder: Path, **plain: Any) -> None:
    """With random weights and three prompts, one of a length: tokens of the reference backend with `plain` options."""
    for parameter in model.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, 0.0, 0.15)
    model.save_pretrained(folder)
    prompts = [[5 + i * i % 90 for i in range(length)], [9, 10, 11], [12]]
    options = {**OPTIONS, "model": str(folder)}
    tokens, drawn, *_ = run_interpreted(prompts, options)
    greedy = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
    with LLM(**{**options, "attention_backend": "reference", **plain}) as llm:
        assert tokens == [output.outputs[0].token_ids for output in llm.generate(prompts, greedy)]
        outputs = llm.generate(prompts, [SamplingParams(seed=seed, **DRAWING) for seed in range(3)])
    assert drawn == [output.outputs[0].token_ids for output in outputs]


def test_cache_groups_have_tables_of_their_own(tmp_path: Path) -> None:
    """Three groups, of layers that keep all and of windows, through steps as graphs would run them."""
    config = transformers.Gemma3TextConfig(
        vocab_size=131, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, sliding_window=20, query_pre_attn_scalar=16, max_position_embeddings=256,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"], pad_token_id=0, bos_token_id=1,
        eos_token_id=2,
    )  # fmt: skip
    torch.manual_seed(5)
    check_steps(transformers.Gemma3ForCausalLM(config), 61, tmp_path, cache_groups=False)


def test_states_beside_attention(tmp_path: Path) -> None:
    """The kernels of gated delta nets beside attention in one pool, through steps as graphs would run them."""
    config = transformers.Qwen3NextConfig(
        vocab_size=131, hidden_size=32, intermediate_size=48, moe_intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, head_dim=16, linear_num_key_heads=1, linear_num_value_heads=2,
        linear_key_head_dim=16, linear_value_head_dim=16, num_experts=4, num_experts_per_tok=2,
        shared_expert_intermediate_size=32, layer_types=["linear_attention", "full_attention"],
        max_position_embeddings=256, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    torch.manual_seed(5)
    check_steps(transformers.Qwen3NextForCausalLM(config), 45, tmp_path)


def test_triton_without_a_device_is_refused(folder: Path) -> None:
    values = {"model": str(folder), "device": "cpu", "attention_backend": "triton"}
    with pytest.raises(ConfigError, match="--attention-backend triton needs a CUDA device"):
        make_plan(make_engine_config(values))
