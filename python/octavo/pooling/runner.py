"""What executes batches of a pooling model: the counterpart of worker/runner.py, without cache and sampling."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import torch

from octavo.config import EngineConfig
from octavo.errors import ConfigError, ModelError
from octavo.models.sources import resolve_source
from octavo.pooling.answers import Rows
from octavo.pooling.inputs import PoolingInput
from octavo.pooling.model import PoolingModel
from octavo.pooling.recipe import read_recipe
from octavo.protocol import ModelFacts, Progress
from octavo.speculation import without_drafts
from octavo.worker.device import DeviceFacts, find_device

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
MAX_BATCHED_TOKENS = {"cpu": 2048, "cuda": 65536}
"""Tokens of a batch, padding included."""
MAX_ROWS = {"cpu": 64, "cuda": 1024}


class PoolingRunner:
    """Loads on construction. Errors: ConfigError, ModelError."""

    def __init__(self, config: EngineConfig, task: str, progress: Progress) -> None:
        source = resolve_source(config.model, progress)
        if source.folder is None:
            raise ConfigError(f"--task {task}: a .gguf file can only generate", "task")
        recipe = read_recipe(task, config.model.pooling, source.folder, source.raw_config)
        device = find_device(config.execution.device)
        if config.execution.cpu_threads or device.kind == "cpu":
            torch.set_num_threads(config.execution.cpu_threads or device.num_cores)
        dtype = _dtype(config.model.dtype, device, source.raw_config)
        progress("weights", 0.0)
        self._device = device.kind
        self._model = PoolingModel(
            recipe,
            source.folder,
            device=device.kind,
            dtype=DTYPES[dtype],
            dummy_seed=config.model.seed if config.model.load_format == "dummy" else None,
        )
        progress("weights", 1.0)
        length = _length(config.model.max_model_len, recipe.max_length, self._model.max_length)
        self.config = _resolved(config, device.kind, dtype, length)
        self.facts = ModelFacts(
            model=config.model.model,
            vocab_size=self._model.vocab_size,
            max_model_len=length,
            block_size=1,
            num_blocks=2,
            max_num_seqs=1,
            eos_token_ids=(),
            dtype=dtype,
            device=device.kind,
            max_logprobs=0,
            tokenizer_path=None if source.tokenizer_path is None else str(source.tokenizer_path),
            default_sampling_params={},
            task=task,
            pooling=self._model.facts,
        )
        self.chores: Iterator[str] = iter(())
        self.run([PoolingInput([0] * min(8, length))])  # what is slow the first time

    def run(self, inputs: Sequence[PoolingInput]) -> Rows:
        """[inputs, numbers]: one forward pass over inputs of about the same length."""
        width = max(len(one.token_ids) for one in inputs)
        ids = np.zeros((len(inputs), width), np.int64)
        mask, types = np.zeros_like(ids), np.zeros_like(ids)
        for row, one in enumerate(inputs):
            ids[row, : len(one.token_ids)] = one.token_ids
            mask[row, : len(one.token_ids)] = 1
            if one.type_ids is not None:
                types[row, : len(one.token_ids)] = one.type_ids
        tensors = [torch.from_numpy(array).to(self._device) for array in (ids, mask, types)]
        rows: Rows = self._model.forward(*tensors).cpu().numpy()
        return rows

    def close(self) -> None:
        """Release the model."""
        del self._model


def _resolved(config: EngineConfig, device: str, dtype: str, length: int) -> EngineConfig:
    most = config.scheduler.max_num_batched_tokens or max(MAX_BATCHED_TOKENS[device], length)
    if most < length:
        raise ConfigError(
            f"--max-num-batched-tokens {most} is less than the longest text ({length} tokens): lower --max-model-len",
            "max_num_batched_tokens",
        )
    scheduler = replace(
        config.scheduler,
        max_num_batched_tokens=most,
        max_num_seqs=config.scheduler.max_num_seqs or MAX_ROWS[device],
        overlap_depth=1,
        speculative_config=without_drafts(config.scheduler.speculative_config, f"task {config.model.task}"),
    )
    return replace(
        config,
        model=replace(config.model, dtype=dtype, max_model_len=length),
        execution=replace(config.execution, device=device),
        scheduler=scheduler,
    )


def _dtype(choice: str, device: DeviceFacts, raw_config: dict[str, object]) -> str:
    """auto: float32 on CPU; on CUDA bfloat16 where the checkpoint is, else float16, which is closer to float32."""
    if choice != "auto":
        return choice
    if device.kind == "cpu":
        return "float32"
    stored = raw_config.get("dtype") or raw_config.get("torch_dtype")
    return "bfloat16" if stored == "bfloat16" else "float16"


def _length(choice: int | str | None, meant: int | None, positions: int) -> int:
    """Most tokens a text."""
    if isinstance(choice, int):
        if choice > positions:
            raise ConfigError(
                f"--max-model-len {choice}: the model's positions end at {positions}; use at most {positions}",
                "max_model_len",
            )
        return choice
    if meant is not None and meant < 1:
        raise ModelError(f"sentence_bert_config.json: max_seq_length is {meant}")
    return min(meant or positions, positions)
