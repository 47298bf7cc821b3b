"""A control plane without a model: the caller picks every token, from what the masks allow.

The vocabulary is a byte-level tokenizer by default: ids 0 to 255 are bytes (in GPT-2's alphabet), then special tokens.
"""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from octavo._core import Core, CoreConfig, OutputProcessor, Tokenizer, encode_add
from octavo.structured_outputs import StructuredOutputs
from tests.engine.conftest import byte_alphabet

SPECIALS = ("<eos>", "<eot>", "<tool_call>", "</think>")
EOS = (256, 257)
VOCAB_SIZE = 256 + len(SPECIALS)
ALPHABET = byte_alphabet()
Allowed = npt.NDArray[np.intp]
Chooser = Callable[["Row", Allowed], int]


def byte_tokenizer() -> dict[str, Any]:
    """One token a byte, in the order of byte values, then the special tokens."""
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    return {
        "version": "1.0",
        "added_tokens": [{"id": 256 + i, "content": name, **flags} for i, name in enumerate(SPECIALS)],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {"type": "BPE", "vocab": {letter: i for i, letter in enumerate(ALPHABET)}, "merges": []},
    }


@dataclass
class Row:
    """A sequence under way."""

    choose: Chooser
    chosen: list[int] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    """Those that came back."""
    finish: str | None = None
    reason: str | int | None = None
    refusal: str | None = None
    accepts_end: bool = False
    """EOS was allowed by the newest mask."""

    @property
    def content(self) -> bytes:
        return bytes(token_id for token_id in self.token_ids if token_id < 256)

    @property
    def text(self) -> str:
        return self.content.decode()


class Driver:
    """An engine core whose device is the caller."""

    def __init__(
        self,
        folder: Path,
        *,
        tokenizer: dict[str, Any] | None = None,
        vocab_size: int = VOCAB_SIZE,
        eos: Sequence[int] = EOS,
        num_rows: int = 16,
        max_tokens: int = 2000,
    ) -> None:
        path = folder / "tokenizer.json"
        path.write_text(json.dumps(tokenizer or byte_tokenizer()))
        self.eos = eos
        self.vocab_size = vocab_size
        self.max_tokens = max_tokens
        self.num_rows = num_rows
        config = CoreConfig(
            block_size=64,
            num_blocks=num_rows * (max_tokens // 64 + 2) + 1,
            max_num_seqs=num_rows,
            max_num_batched_tokens=4 * num_rows,
            max_model_len=max_tokens + 8,
            vocab_size=vocab_size,
        )
        self.core = Core(config)
        layout, self._out = self.core.arena_layout, self.core.output_layout
        self._layout = layout
        self._arenas = [np.zeros(layout.num_ints, dtype=np.int32) for _ in range(2)]
        self._outputs = [np.zeros(self._out.num_ints, dtype=np.int32) for _ in range(2)]
        for output in self._outputs:
            output[self._out.count : self._out.count + num_rows] = 1
        self.core.register([a.data for a in self._arenas], [o.data for o in self._outputs])
        self.masks = np.zeros((num_rows, self.core.mask_words), dtype=np.int32)
        self.core.register_masks(self.masks.data)
        self.core.use_tokenizer(str(path), eos)
        self._processor = OutputProcessor(Tokenizer.from_file(str(path)), eos)
        self._ids = itertools.count(1)

    def add(self, wire: bytes, choose: Chooser, rows: dict[int, Row]) -> Row:
        """One constrained request; its row goes into `rows`."""
        request_id = next(self._ids)
        frame = encode_add(
            request_id=request_id,
            prompt_token_ids=[0],
            n=1,
            max_tokens=self.max_tokens,
            min_tokens=0,
            stop_token_ids=list(self.eos),
            priority=0,
            cache_salt=b"",
            deadline_s=0.0,
            logprobs=-1,
            prompt_logprobs=-1,
            params=str(request_id).encode(),
            grammar=wire,
        )
        self._processor.add(
            request_id,
            n=1,
            prompt_token_ids=[0],
            stop=[],
            include_stop_str_in_output=False,
            skip_special_tokens=True,
            detokenize=False,
        )
        self.core.add(frame)
        row = rows[request_id] = Row(choose)
        return row

    def run(self, requests: Iterable[tuple[dict[str, Any], Chooser]]) -> list[Row]:
        """Run requests (fields of `StructuredOutputs`, and who chooses) to their ends."""
        rows: dict[int, Row] = {}
        made = [self.add(StructuredOutputs(**fields).to_wire(), choose, rows) for fields, choose in requests]
        by_slot: dict[int, Row] = {}
        output: int | None = None
        while any(row.finish is None and row.refusal is None for row in made):
            plan = self.core.step(output)
            output = None
            for new in plan.new_rows:
                by_slot[new.slot] = rows[int(new.params)]
            if plan.num_rows:
                if plan.needs_masks:
                    self.core.fill_masks([])
                self._sample(plan.arena, plan.num_sampled, by_slot)
                output = plan.arena
            else:
                self.core.wait(0.05)
            self._receive(rows)
        if output is not None:
            self.core.step(output)
        self.core.check()
        return made

    def _sample(self, arena: int, num_sampled: int, by_slot: dict[int, Row]) -> None:
        slots = self._arenas[arena][self._layout.row_slot : self._layout.row_slot + num_sampled]
        for place, slot in enumerate(slots.tolist()):
            row = by_slot[slot]
            allowed = self.allowed(slot)
            row.accepts_end = bool(np.isin(self.eos, allowed).any())
            row.chosen.append(row.choose(row, allowed))
            self._outputs[arena][self._out.sampled + place] = row.chosen[-1]

    def allowed(self, slot: int) -> Allowed:
        """Token ids that the slot's mask allows."""
        bits = np.unpackbits(self.masks[slot].view(np.uint8), bitorder="little")[: self.vocab_size]
        return np.flatnonzero(bits)

    def _receive(self, rows: dict[int, Row]) -> None:
        for body in self.core.take_frames():
            frame = self._processor.process(body)
            for delta in frame.deltas:
                row = rows[delta.request_id]
                row.token_ids += delta.token_ids
                row.finish, row.reason = delta.finish_reason, delta.stop_reason
            for refusal in frame.refusals:
                rows[refusal.request_id].refusal = refusal.message


def spell(text: str | bytes) -> Chooser:
    """Takes these bytes one by one, then EOS, whatever is allowed: what is not ends the sequence with an error."""
    content = text.encode() if isinstance(text, str) else text

    def choose(row: Row, allowed: Allowed) -> int:
        return content[len(row.chosen)] if len(row.chosen) < len(content) else EOS[0]

    return choose


def wander(seed: int, *, end: float = 0.3) -> Chooser:
    """Picks allowed tokens at random; ends with probability `end` where it may."""
    picks = random.Random(seed)

    def choose(row: Row, allowed: Allowed) -> int:
        assert len(allowed), "nothing is allowed"
        if row.accepts_end and picks.random() < end:
            return EOS[picks.randrange(2)]
        inner = [token_id for token_id in allowed.tolist() if token_id < 256]
        closers = [token_id for token_id in inner if chr(token_id) in '"]}']
        if closers and picks.random() < 0.3:
            return picks.choice(closers)
        plain = [token_id for token_id in inner if 32 <= token_id < 127]
        return picks.choice(plain or inner or allowed.tolist())

    return choose


def accepted(row: Row, text: str | bytes) -> bool:
    """Whether `spell(text)` got through and could end there."""
    content = text.encode() if isinstance(text, str) else text
    return row.finish == "stop" and row.content == content
