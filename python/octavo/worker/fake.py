"""A runner that makes tokens up: benches and tests of everything but the model. Needs neither torch nor weights.

A token is a hash of its prompt, its sequence's index and its position: the same whatever else runs, in whichever slot,
after a preemption too. Steps take `--fake-step-ms` each, one after another, as on a device; only `result` waits.

Shape suffixes: r sampled rows, k logprobs.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from octavo.config import EngineConfig
from octavo.protocol import Progress
from octavo.speculation import without_drafts
from octavo.worker.device import DeviceFacts
from octavo.worker.facts import model_facts
from octavo.worker.resolve import limits_of, resolve_config

if TYPE_CHECKING:
    from octavo._core import ArenaLayout, Core, NewRow, OutputLayout, StepPlan

SYNTHETIC = {"vocab_size": 32000, "max_position_embeddings": 32768}
SPIN_S = 0.0005
"""The end of a step's time is spun away: sleep is that inexact."""


class FakeRunner:
    """See `octavo.worker.base.Runner`."""

    def __init__(self, config: EngineConfig, progress: Progress) -> None:
        progress("config", 0.0)
        folder = Path(config.model.model).expanduser() if config.model.model else None
        facts = _read_facts(folder)
        kind = "cpu" if config.execution.device == "cpu" else "cuda"
        device = DeviceFacts(kind, "fake", 0, 0, num_cores=1, has_bfloat16=True)
        drafts = without_drafts(config.scheduler.speculative_config, "--runner fake")
        config = replace(config, scheduler=replace(config.scheduler, speculative_config=drafts))
        resolved = resolve_config(config, device, facts["max_position_embeddings"])
        if resolved.model.max_model_len == "auto":
            resolved = replace(resolved, model=replace(resolved.model, max_model_len=facts["max_position_embeddings"]))
        self.config = resolved
        self._limits = limits_of(resolved)
        self.num_blocks = config.cache.num_gpu_blocks_override or self._full_batch(resolved.model.max_model_len)
        self._vocab_size: int = facts["vocab_size"]
        self._step_s = config.execution.fake_step_ms / 1000
        self._key_of_slot = np.zeros(self._limits.max_num_seqs + 1, dtype=np.uint64)
        self._ready_s = [0.0] * (self._limits.overlap_depth + 1)
        self._newest_ready_s = 0.0
        self.chores: Iterator[str] = iter(())
        self.facts = model_facts(
            resolved,
            num_blocks=self.num_blocks,
            vocab_size=self._vocab_size,
            eos_token_ids=facts["eos_token_ids"],
            generation_config=facts["generation_config"],
            tokenizer_path=_tokenizer_path(config),
        )

    def _full_batch(self, max_model_len: int | str | None) -> int:
        """Blocks for a full batch of the longest context, and the null block."""
        assert isinstance(max_model_len, int), "resolved above"
        return self._limits.max_num_seqs * -(-max_model_len // self._limits.block_size) + 1

    def attach(self, core: Core) -> None:
        """See `Runner.attach`."""
        self._core = core
        count = len(self._ready_s)
        self._layout: ArenaLayout = core.arena_layout
        self._output_layout: OutputLayout = core.output_layout
        self._arenas = [np.zeros(self._layout.num_ints, dtype=np.int32) for _ in range(count)]
        self._outputs = [np.zeros(self._output_layout.num_ints, dtype=np.int32) for _ in range(count)]
        for output in self._outputs:
            output[self._output_layout.count : self._output_layout.count + self._output_layout.max_rows] = 1
        core.register([arena.data for arena in self._arenas], [output.data for output in self._outputs])
        self._masks = np.full((self._limits.max_num_seqs, core.mask_words), -1, dtype=np.int32)
        core.register_masks(self._masks.data)

    def launch(self, plan: StepPlan) -> None:
        """See `Runner.launch`: the step begins when the one before has ended."""
        for row in plan.new_rows:
            self._key_of_slot[row.slot] = _key(row)
        self._newest_ready_s = max(time.monotonic(), self._newest_ready_s) + self._step_s
        self._ready_s[plan.arena] = self._newest_ready_s

    def sample(self, plan: StepPlan) -> None:
        """See `Runner.sample`."""
        layout, arena, output = self._layout, self._arenas[plan.arena], self._outputs[plan.arena]
        count = plan.num_sampled
        slot_r = arena[layout.row_slot : layout.row_slot + count]
        position_r = arena[layout.kv_len : layout.kv_len + count]
        hash_r = _mix(self._key_of_slot[slot_r] + position_r.astype(np.uint64))
        token_r = (hash_r % self._vocab_size).astype(np.int32)
        if plan.needs_masks:
            token_r = _allowed_near(token_r, self._masks[slot_r])
        out, width = self._output_layout, self._output_layout.max_sampled
        output[out.sampled : out.sampled + count * width : width] = token_r
        if plan.needs_logprobs:
            output[out.rank : out.rank + count * width : width] = 1
            entries = 1 + out.max_logprobs
            id_rk, value_rk = _fake_logprobs(token_r, entries, self._vocab_size)
            size = out.max_rows * width * entries
            output[out.logprob_id : out.logprob_id + size].reshape(-1, width, entries)[:count, 0] = id_rk
            values = output[out.logprob_value : out.logprob_value + size].view(np.float32)
            values.reshape(-1, width, entries)[:count, 0] = value_rk
        for row in plan.prompt_logprob_rows:
            targets = np.frombuffer(row.target_ids, dtype="<i4").astype(np.int32)
            ids, values_tk = _fake_logprobs(targets, 1 + row.num_top, self._vocab_size)
            ranks = np.ones(len(targets), dtype=np.int32)
            self._core.put_prompt_logprobs(row.slot, ids.data, values_tk.data, ranks.data)

    def result(self, plan: StepPlan) -> int:
        """See `Runner.result`."""
        left_s = self._ready_s[plan.arena] - time.monotonic()
        if left_s > SPIN_S:
            time.sleep(left_s - SPIN_S)
        while time.monotonic() < self._ready_s[plan.arena]:
            pass
        return plan.arena

    def close(self) -> None:
        """Nothing is held."""


def _read_facts(folder: Path | None) -> dict[str, Any]:
    """Vocabulary, context, EOS ids and recommended sampling of a model folder; made up without one."""
    if folder is None or not (folder / "config.json").is_file():
        return {**SYNTHETIC, "eos_token_ids": (), "generation_config": {}}
    from octavo.models.config import normalize_config
    from octavo.models.sources import read_json

    generation_config = read_json(folder / "generation_config.json") or {}
    model = normalize_config(read_json(folder / "config.json") or {}, generation_config)
    return {
        "vocab_size": model.vocab_size,
        "max_position_embeddings": model.max_position_embeddings,
        "eos_token_ids": model.eos_token_ids,
        "generation_config": generation_config,
    }


def _tokenizer_path(config: EngineConfig) -> Path | None:
    """The folder of `--tokenizer`, else the model's, if it has a tokenizer.json."""
    name = config.model.tokenizer or config.model.model
    folder = Path(name).expanduser()
    return folder if name and (folder / "tokenizer.json").is_file() else None


def _key(row: NewRow) -> int:
    """What a sequence's tokens are hashed from: its prompt and index."""
    return zlib.crc32(row.token_ids[: 4 * row.num_prompt_tokens]) << 32 | row.index << 24


def _allowed_near(token_r: npt.NDArray[np.int32], mask_rw: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
    """The tokens themselves where they are allowed; else allowed ones, soon after them (the vocabulary is a circle).

    Shape suffixes: w words of 32 tokens, b bits of a word.
    """
    word_r, bit_r = np.divmod(token_r, 32)
    place_w, place_b = np.arange(mask_rw.shape[1]), np.arange(32, dtype=np.int32)
    own_r = mask_rw[np.arange(len(token_r)), word_r]
    is_allowed_r = (own_r >> bit_r) & 1 != 0
    word_r = _first_near(mask_rw != 0, place_w, word_r)
    bits_rb = (mask_rw[np.arange(len(token_r)), word_r][:, None] >> place_b) & 1 != 0
    near_r = 32 * word_r + _first_near(bits_rb, place_b, bit_r)
    return np.where(is_allowed_r, token_r, near_r).astype(np.int32)


def _first_near(
    ok_rn: npt.NDArray[np.bool_], place_n: npt.NDArray[np.integer[Any]], start_r: npt.NDArray[np.integer[Any]]
) -> npt.NDArray[np.intp]:
    """The first place from `start_r` on that is ok, else the first of all."""
    late_rn = ok_rn & (place_n >= start_r[:, None])
    near_r: npt.NDArray[np.intp] = np.where(late_rn.any(1), late_rn.argmax(1), ok_rn.argmax(1))
    return near_r


def _mix(key_r: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """The finalizer of SplitMix64 (Steele, Lea, Flood 2014): every input bit moves every output bit."""
    key_r = (key_r ^ (key_r >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    key_r = (key_r ^ (key_r >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return key_r ^ (key_r >> np.uint64(31))


def _fake_logprobs(
    token_r: npt.NDArray[np.int32], entries: int, vocab_size: int
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.float32]]:
    """The token, then the same one and the ids after it, each half as probable as the one before."""
    offset_k = np.maximum(np.arange(entries, dtype=np.int32) - 1, 0)
    value_k = (-np.log(2.0) * (1 + offset_k)).astype(np.float32)
    return (token_r[:, None] + offset_k) % np.int32(vocab_size), np.tile(value_k, (len(token_r), 1))
