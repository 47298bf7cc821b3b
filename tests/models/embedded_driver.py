"""Runs the embedded decoder over packed rows, with the interface of `PagedDriver`."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from octavo._core import EmbeddedDecoder
from octavo.config import make_engine_config
from octavo.worker.embedded_plan import find_model, make_plan
from octavo.worker.embedded_weights import load_weights


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
    ) -> None:
        values = {
            "model": str(folder),
            "dtype": dtype,
            "max_model_len": 80,
            "device": "cpu",
            "block_size": block_size,
            "quantization": quantization,
        }
        config = make_engine_config(values)
        plan = make_plan(config, find_model(config, lambda stage, fraction: None))
        per_slot = -(-80 // block_size)
        self.block_size = block_size
        self.decoder = EmbeddedDecoder()
        load_weights(
            self.decoder, plan.description, plan.weights, plan.memory.config.model, lambda stage, fraction: None
        )
        self.decoder.build(
            plan.description,
            num_slots=4,
            num_blocks=4 * per_slot + 1,
            block_size=block_size,
            max_length=80,
            max_tokens=200,
            cache_dtype=plan.memory.config.model.dtype,
            num_threads=num_threads,
        )
        blocks = list(range(1, 4 * per_slot + 1))
        random.Random(0).shuffle(blocks)
        self.tables = [blocks[slot * per_slot : (slot + 1) * per_slot] for slot in range(4)]
        self.lengths = [0] * 4

    def step(self, rows: Sequence[tuple[int, Sequence[int]]]) -> Tensor:
        """Append tokens to slots, [(slot, token ids)]; logits [t, v] of all tokens. Rows of one token come first."""
        updates, tokens, positions, starts, lengths = [], [], [], [0], []
        for slot, ids in rows:
            first, last = self.lengths[slot], self.lengths[slot] + len(ids)
            for index in range(-(-first // self.block_size), -(-last // self.block_size)):
                updates += [slot, index, self.tables[slot][index]]
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
