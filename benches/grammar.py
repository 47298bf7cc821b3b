"""What structured outputs cost on the host: masks of a full batch in each step, and compiling.

    python benches/grammar.py [--rows 256] [--vocab 128256] [--steps 200] [--json FILE]

No model: this file plays the device and picks tokens from the masks at random, closing strings and lists now and then.
The vocabulary is made up (words with and without a blank before them, capitals, digits, punctuation, runs of blanks),
with one token a byte. `masks`: `Core.fill_masks`, one call a step. `step`: `Core.step`, in which the sampled tokens are
taken in. `processor`: time of all threads together, which a busy machine does not stretch. Medians; exit code 1 when
the budget is missed. `compile`: from the request to the first token, first with the vocabulary's trie (once an engine),
then without.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from octavo import _core
from octavo.structured_outputs import StructuredOutputs

BUDGET_MS = {256: 1.0}
SYLLABLES = (
    *("ka", "lo", "mi", "ter", "sha", "ven", "dor", "pri", "sti", "on", "ing", "er", "al", "re", "un", "com", "pro"),
    *("ex", "qu", "ist", "ness", "able", "ou", "th", "est", "ar", "en"),
)
EOS = 256
PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {
        "id": {"type": "integer", "minimum": 1},
        "name": {"type": "string", "minLength": 1, "maxLength": 40},
        "email": {"type": "string", "format": "email"},
        "role": {"enum": ["admin", "editor", "viewer", "guest"]},
        "joined": {"type": "string", "format": "date"},
        "score": {"type": "number", "minimum": 0, "maximum": 100},
        "tags": {"type": "array", "items": {"type": "string"}, "maxItems": 8},
        "address": {
            "type": "object",
            "properties": {
                "street": {"type": "string"},
                "city": {"type": "string"},
                "zip": {"type": "string", "pattern": "^[0-9]{5}$"},
                "country": {"anyOf": [{"type": "string", "maxLength": 2}, {"type": "null"}]},
            },
            "required": ["street", "city"],
            "additionalProperties": False,
        },
        "notes": {"type": "string"},
    },
    "required": ["id", "name", "role", "tags", "address"],
    "additionalProperties": False,
}
PEOPLE = {"type": "array", "items": PERSON, "minItems": 100}
"""Longer than any output of a bench."""


def words(count: int) -> Iterator[str]:
    """Made-up tokens, the shorter ones first; none twice, none of one byte."""
    seen: set[str] = set()
    extra = ["\n" + " " * i for i in range(20)] + [" " * i for i in range(2, 20)] + ["0" * i for i in (2, 3)]
    extra += [
        '":',
        '",',
        '":"',
        '","',
        '{"',
        '"}',
        "}]",
        "},",
        ': "',
        ', "',
        "[]",
        "{}",
        "...",
        "--",
        " =",
        "();",
        " #",
    ]
    numbers = (f"{i:0{n}d}" for n in (2, 3) for i in range(10**n))
    plain = ("".join(parts) for n in itertools.count(1) for parts in itertools.product(SYLLABLES, repeat=n))
    spellings = (form for word in plain for form in (word, " " + word, word.capitalize(), " " + word.capitalize()))
    for word in itertools.chain(extra, numbers, spellings):
        if len(seen) == count:
            return
        if len(word) > 1 and word not in seen:
            seen.add(word)
            yield word


def write_tokenizer(path: Path, vocab_size: int) -> None:
    """A byte-level BPE tokenizer.json: 256 bytes, EOS, then words."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    spare = iter(range(256, 512))
    letters = [chr(byte) if byte in printable else chr(next(spare)) for byte in range(256)]
    vocab = {letter: byte for byte, letter in enumerate(letters)}
    for number, word in enumerate(words(vocab_size - 257), start=257):
        vocab["".join(letters[byte] for byte in word.encode())] = number
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    tokenizer = {
        "version": "1.0",
        "added_tokens": [{"id": EOS, "content": "<eos>", **flags}],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {"type": "BPE", "vocab": vocab, "merges": []},
    }
    path.write_text(json.dumps(tokenizer))


class Device:
    """A core whose tokens are picked here."""

    def __init__(self, tokenizer: Path, num_rows: int, vocab_size: int, num_steps: int) -> None:
        self.num_rows, self.vocab_size = num_rows, vocab_size
        self.core = _core.Core(
            _core.CoreConfig(
                block_size=64,
                num_blocks=num_rows * (num_steps // 64 + 3),
                max_num_seqs=num_rows,
                max_num_batched_tokens=8192,
                max_model_len=num_steps + 64,
                vocab_size=vocab_size,
                max_queued_requests=1 << 20,
                max_queued_tokens=1 << 30,
                policy="fcfs",
                enable_prefix_caching=False,
                long_prefill_token_threshold=0,
                max_itl_ms=0.0,
                depth=1,
                max_logprobs=0,
                hash_seed=1,
            )
        )
        layout, self.out = self.core.arena_layout, self.core.output_layout
        self.row_slot = layout.row_slot
        self.arenas = [np.zeros(layout.num_ints, dtype=np.int32) for _ in range(2)]
        self.outputs = [np.zeros(self.out.num_ints, dtype=np.int32) for _ in range(2)]
        for output in self.outputs:
            output[self.out.count : self.out.count + num_rows] = 1
        self.core.register([a.data for a in self.arenas], [o.data for o in self.outputs])
        self.masks = np.zeros((num_rows, self.core.mask_words), dtype=np.int32)
        self.core.register_masks(self.masks.data)
        self.core.use_tokenizer(str(tokenizer), [EOS])
        self.random = random.Random(1)
        self.closers = np.array([ord(c) for c in '",]}'])
        self.output: int | None = None

    def add(self, wire: bytes, count: int, max_tokens: int) -> None:
        for request_id in range(count):
            self.core.add(
                _core.encode_add(
                    request_id=request_id,
                    prompt_token_ids=[1],
                    n=1,
                    max_tokens=max_tokens,
                    min_tokens=0,
                    stop_token_ids=[EOS],
                    priority=0,
                    cache_salt=b"",
                    deadline_s=0.0,
                    logprobs=-1,
                    prompt_logprobs=-1,
                    params=b"{}",
                    grammar=wire,
                )
            )

    def step(self) -> tuple[int, float, float, float]:
        """(rows, seconds of `Core.step`, seconds of `Core.fill_masks`, its processor seconds) of one step."""
        start = time.perf_counter()
        plan = self.core.step(self.output)
        stepped = time.perf_counter()
        self.output = None
        if plan.num_rows:
            busy = time.process_time()
            if plan.needs_masks:
                self.core.fill_masks([])
            filled = time.perf_counter()
            busy = time.process_time() - busy
            slots = self.arenas[plan.arena][self.row_slot : self.row_slot + plan.num_sampled]
            tokens = [self.pick(self.masks[slot]) for slot in slots]
            self.outputs[plan.arena][self.out.sampled : self.out.sampled + plan.num_sampled] = tokens
            self.output = plan.arena
            self.core.take_frames()
            return plan.num_rows, stepped - start, filled - stepped, busy
        self.core.take_frames()
        return 0, stepped - start, 0.0, 0.0

    def pick(self, mask: Any) -> int:
        """An allowed token; often one that closes something, if there is one."""
        bits = np.unpackbits(mask.view(np.uint8), bitorder="little")
        closing = self.closers[bits[self.closers] == 1]
        if len(closing) and self.random.random() < 0.3:
            return int(self.random.choice(closing.tolist()))
        allowed = np.flatnonzero(bits[: self.vocab_size])
        return int(allowed[self.random.randrange(len(allowed))])


def compile_ms(device: Device, wire: bytes) -> float:
    """From the request to its first token."""
    device.add(wire, 1, 1)
    start = time.perf_counter()
    while not device.step()[0]:
        device.core.wait(1.0)
    elapsed_s = time.perf_counter() - start
    device.step()
    return 1e3 * elapsed_s


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--vocab", type=int, default=128_256)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="octavo-bench-") as folder:
        tokenizer = Path(folder) / "tokenizer.json"
        write_tokenizer(tokenizer, options.vocab)
        device = Device(tokenizer, options.rows, options.vocab, options.steps)
        first_ms = compile_ms(device, StructuredOutputs(regex="[0-9]+").to_wire())
        schema_ms = compile_ms(device, StructuredOutputs(json=PERSON).to_wire())
        device.add(StructuredOutputs(json=PEOPLE).to_wire(), options.rows, options.steps)
        full: list[tuple[float, float, float]] = []
        while len(full) < options.steps - 1:
            num_rows, *seconds = device.step()
            if num_rows == 0:
                device.core.wait(1.0)
            else:
                full.append((seconds[0], seconds[1], seconds[2]))
        full = full[5:]
    found = {
        "rows": options.rows,
        "vocabulary": options.vocab,
        "masks_ms": 1e3 * statistics.median(masks for _, masks, _ in full),
        "masks_p99_ms": 1e3 * sorted(masks for _, masks, _ in full)[int(len(full) * 0.99)],
        "masks_processor_ms": 1e3 * statistics.median(busy for _, _, busy in full),
        "step_ms": 1e3 * statistics.median(step for step, _, _ in full),
        "compile_first_ms": first_ms,
        "compile_schema_ms": schema_ms,
        "steps": len(full),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
    }
    text = json.dumps(found, indent=2)
    print(text)
    if options.json:
        options.json.write_text(text)
    budget = BUDGET_MS.get(options.rows)
    return 0 if budget is None or found["masks_ms"] <= budget else 1


if __name__ == "__main__":
    sys.exit(main())
