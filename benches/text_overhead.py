"""What text costs the API process per engine step, and how long a frame takes from the engine's loop to its reader.

    python benches/text_overhead.py [--rows 256,1024] [--json FILE]

`process`: one frame with one new token per sequence becomes deltas (decoding, detokenization, stop strings). `read`: a
Python loop that reads the fields of every delta as a server does. `frame latency`: from `Core.reply` with 10 kB to the
last byte read from the socket by the same thread, through the IO thread. Medians; exit code 1 when a budget is missed.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from octavo import _core

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests" / "text"))
from engine_frames import Output, output_frame  # noqa: E402

BUDGET_PROCESS_US_PER_ROW = 200 / 256
BUDGET_LATENCY_US = 100
NUM_FRAMES = 400
STOPS = {"no stop strings": [], "two stop strings": ["\n\n", "User:"]}


def tokenizer() -> _core.Tokenizer:
    """A byte-level BPE of the design page's words."""
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trained.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=4000, initial_alphabet=alphabet, show_progress=False)
    trained.train_from_iterator([path.read_text() for path in ROOT.glob("python/octavo/*.py")], trainer)
    return _core.Tokenizer.from_json(trained.to_str().encode())


def median_us(action: Callable[[], object], count: int) -> float:
    times = []
    for _ in range(count):
        start = time.perf_counter()
        action()
        times.append(time.perf_counter() - start)
    return statistics.median(times) * 1e6


def read_fields(deltas: list[_core.Delta]) -> int:
    num_chars = 0
    for delta in deltas:
        fields = (delta.request_id, delta.index, delta.token_ids, delta.finish_reason, delta.logprobs)
        num_chars += len(delta.text) + (fields[1] or 0)
    return num_chars


def processing(words: _core.Tokenizer, num_rows: int, stops: list[str]) -> dict[str, float]:
    r = random.Random(1)
    core = _core.OutputProcessor(words, [])
    for row in range(num_rows):
        core.add(
            row,
            n=1,
            prompt_token_ids=[5] * 100,
            stop=[stop + "~" for stop in stops],  # never complete, so that no sequence ends
            include_stop_str_in_output=False,
            skip_special_tokens=True,
            detokenize=True,
        )
    bodies = [
        output_frame([Output(row, [r.randrange(words.vocab_size)]) for row in range(num_rows)])
        for _ in range(NUM_FRAMES)
    ]
    frames: list[_core.Frame] = []
    waiting = iter(bodies)
    process = median_us(lambda: frames.append(core.process(next(waiting))), NUM_FRAMES)
    done = iter(frames)
    return {"process_us": process, "read_us": median_us(lambda: read_fields(next(done).deltas), NUM_FRAMES)}


def frame_latency_us() -> float:
    config = _core.CoreConfig(
        block_size=16,
        num_blocks=8,
        max_num_seqs=2,
        max_num_batched_tokens=32,
        max_model_len=64,
        vocab_size=100,
    )
    core = _core.Core(config)
    arenas = [np.zeros(core.arena_layout.num_ints, np.int32) for _ in range(2)]
    core.register(arenas, [np.zeros(core.output_layout.num_ints, np.int32) for _ in range(2)])
    body = bytes(10_000)
    with tempfile.TemporaryDirectory() as folder, socket.socket(socket.AF_UNIX) as client:
        path = f"{folder}/engine.sock"
        core.serve(path, b"{}")
        client.connect(path)
        stream = client.makefile("rb")

        def receive() -> bytes:
            return stream.read(int.from_bytes(stream.read(4), "little"))

        def round_trip() -> None:
            core.reply(1, 7, body)
            receive()

        receive()
        result = median_us(round_trip, 2000)
        core.close()
    return result


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default="256,1024", help="numbers of sequences, comma-separated")
    parser.add_argument("--json", type=Path, help="write the numbers to this file")
    options = parser.parse_args()
    words = tokenizer()
    results: dict[str, object] = {"machine": f"{platform.machine()}, Python {platform.python_version()}"}
    is_within = True
    for num_rows in map(int, options.rows.split(",")):
        for name, stops in STOPS.items():
            times = processing(words, num_rows, stops)
            results[f"{num_rows} rows, {name}"] = times
            is_within &= times["process_us"] <= BUDGET_PROCESS_US_PER_ROW * num_rows
            print(f"{num_rows} rows, {name}: process {times['process_us']:.0f} us, read {times['read_us']:.0f} us")
    latency = frame_latency_us()
    results["frame_latency_us"] = latency
    is_within &= latency <= BUDGET_LATENCY_US
    print(f"frame latency: {latency:.0f} us")
    if options.json:
        options.json.write_text(json.dumps(results, indent=1) + "\n")
    print("within the budgets" if is_within else "OVER A BUDGET")
    return 0 if is_within else 1


if __name__ == "__main__":
    sys.exit(main())
