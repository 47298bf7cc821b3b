"""`octavo bench`: what it prints is measured, consistent, and stands beside the machine's limits."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from octavo import bench
from octavo.cli import main
from octavo.config import BenchConfig
from octavo.worker.device import cpu_facts
from octavo.worker.limits import measure_limits

SMALL = ["--device", "cpu", "--dtype", "float32", "--max-model-len", "64", "--cpu-threads", "1", "--input-len", "9"]


def numbers(pattern: str, text: str) -> list[float]:
    found = re.search(pattern, text)
    assert found is not None, f"{pattern} is not in:\n{text}"
    return [float(part.replace(",", "")) for part in found.groups()]


def test_latency(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--output-len", "49", "--batch-size", "2", "--num-iters", "3"]
    assert main(["bench", "latency", str(folder), *SMALL, *sizes]) == 0
    shown = capsys.readouterr().out
    read, int8, f32 = numbers(r"1 thread, \w+: reads ([\d.]+) GB/s, int8 ([\d,]+) GMAC/s, f32 ([\d,]+) GMAC/s", shown)
    assert min(read, int8, f32) > 0
    assert "batch 2, 9 in, 49 out" in shown
    median, least, most = numbers(r"median ([\d.,]+) ms, from ([\d.,]+) to ([\d.,]+) \(3 runs\)", shown)
    assert 0 < least <= median <= most
    token_ms, rate = numbers(r"decoding +([\d.]+) ms a token, ([\d.,]+) tokens/s", shown)
    assert rate * (token_ms - 0.006) < 2000 < rate * (token_ms + 0.006)
    num_steps, step_ms = numbers(r"reading .* in (\d+) steps of ([\d.]+) ms", shown)
    assert 0 < num_steps <= 48
    assert num_steps * step_ms == pytest.approx(48 * token_ms, abs=0.006 * (48 + num_steps))


def test_drafted_tokens_are_no_steps(capsys: pytest.CaptureFixture[str]) -> None:
    """A step that verifies drafts reads the weights once for several tokens: 20 tokens in 10 steps of 0.2 s here."""
    limits = SimpleNamespace(read_bytes=1e9)
    timed: Any = SimpleNamespace(bench=BenchConfig(output_len=21, batch_size=3), weight_bytes=1e8, limits=limits)
    bench._print_decoding(timed, bench.Run(2.0, 10))
    decoding, reading = capsys.readouterr().out.splitlines()
    assert decoding == "decoding    100.00 ms a token, 30.0 tokens/s"
    assert reading == "reading     0.5 GB/s of weights in 10 steps of 200.00 ms, 50% of what the machine reads"


def test_throughput(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "throughput", str(folder), *SMALL, "--output-len", "5", "--num-prompts", "6"]) == 0
    shown = capsys.readouterr().out
    (seconds,) = numbers(r"6 x \(9 in, 5 out\): ([\d.]+) s", shown)
    requests, tokens = numbers(r"([\d.]+) requests/s, ([\d,]+) tokens/s", shown)
    assert tokens == pytest.approx(requests * 14, rel=0.05, abs=1)
    assert seconds < 60


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["bench", "latency", "m", "--num-iters", "0"], "--num-iters: 0 is below the least value, 1"),
        (["bench", "speed", "m"], "bench speed: octavo bench latency MODEL"),
        (["bench"], "bench: octavo bench latency MODEL, or octavo bench throughput MODEL"),
        (["plan", "m", "--input-len", "3"], "unknown flag --input-len"),
    ],
)
def test_mistakes(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--output-len", "56"], "--input-len 9 and --output-len 56: together more than the context of 64 tokens"),
        (
            ["--output-len", "9", "--batch-size", "65"],
            "--batch-size 65: a step has at most 64 sequences; add --max-num-seqs 65",
        ),
        (["--task", "embed"], "this model's task is embed: bench times models that generate text"),
    ],
)
def test_shapes_without_room(flags: list[str], message: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "latency", str(folder), *SMALL, *flags]) == 2
    assert message in capsys.readouterr().err


def test_bytes_are_multiplied_faster_than_floats() -> None:
    limits = measure_limits(cpu_facts(), 1)
    assert limits.read_bytes > 1e8
    assert limits.macs["int8"] > limits.macs["f32"] > 1e8
