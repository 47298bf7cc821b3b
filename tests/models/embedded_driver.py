"""Runs the embedded decoder over packed rows, with the interface of `PagedDriver`."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from octavo.config import make_engine_config
from octavo.worker.embedded import EmbeddedRunner


class EmbeddedDriver:
    """Slots 0 .. 3 of 80 positions each, whose blocks are handed out in shuffled order."""

    def __init__(
        self,
        folder: Path,
        *,
        dtype: str = "float32",
        block_size: int = 8,
        num_threads: int = 2,
        quantization: str = "auto",
        kv_cache_dtype: str = "auto",
    ) -> None:
        per_slot = -(-80 // block_size)
        config = make_engine_config(
            {
                "model": str(folder),
                "device": "cpu",
                "dtype": dtype,
                "quantization": quantization,
                "kv_cache_dtype": kv_cache_dtype,
                "block_size": block_size,
                "max_model_len": 80,
                "max_num_seqs": 4,
                "max_num_batched_tokens": 200,
                "num_gpu_blocks_override": 32 * per_slot + 1,
                "cpu_threads": num_threads,
            }
        )
        self.block_size = block_size
        runner = EmbeddedRunner(config, lambda stage, fraction: None)
        self.decoder = runner.decoder
        blocks = list(range(1, 32 * per_slot + 1))
        random.Random(0).shuffle(blocks)
        # Each cache group (at most eight) has tables of its own, [4 slots and one of none], and blocks of its own.
        self.rows = [5 * group for group in sorted(set(runner.plan.layout.layer_groups))]
        self.tables = {row + slot: [blocks.pop() for _ in range(per_slot)] for row in self.rows for slot in range(4)}
        self.lengths = [0] * 4

    def step(self, rows: Sequence[tuple[int, Sequence[int]]]) -> Tensor:
        """Append tokens to slots, [(slot, token ids)]; logits [t, v] of all tokens. Rows of one token come first."""
        updates, tokens, positions, starts, lengths = [], [], [], [0], []
        for slot, ids in rows:
            first, last = self.lengths[slot], self.lengths[slot] + len(ids)
            for index in range(-(-first // self.block_size), -(-last // self.block_size)):
                for row in self.rows:
                    updates += [row + slot, index, self.tables[row + slot][index]]
            positions += range(first, last)
            tokens += ids
            starts.append(len(tokens))
            lengths.append(last)
            self.lengths[slot] = last
        self.decoder.forward_lists(
            row_slot=[slot for slot, _ in rows],
            query_start=starts,
            kv_len=lengths,
            token_id=tokens,
            position=positions,
            block_updates=updates,
        )
        logits = np.frombuffer(self.decoder.logits(), dtype=np.float32).reshape(len(tokens), -1)
        return torch.from_numpy(logits.copy())
