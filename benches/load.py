"""Many clients of all manners for minutes: nothing lost, nothing leaked, every answer what it is alone, memory flat.

Streams and plain calls on a tiny model (or any, with --model), some of which leave in the middle and some of which are
nonsense; with --kill-engine the engine is killed halfway. Prints a verdict line by line; exit code 1 when one fails.

    python benches/load.py --clients 512 --seconds 300
    python benches/load.py --clients 128 --seconds 40 --kill-engine
    python benches/load.py --gpu exact --clients 256 --seconds 90     # bf16, --deterministic: answers equal bit by bit
    python benches/load.py --gpu fused --clients 256 --seconds 90     # the usual kernels and graphs: lengths only

On a GPU the device's memory must be flat, too.

Not here: speed (serve.py).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tests.cases.tiny_chat_model import write_model

SERVE = "import sys; from octavo.cli import main; sys.exit(main())"
FLAGS = (
    *("--dtype", "float32", "--block-size", "16", "--cpu-threads", "1"),
    *("--num-gpu-blocks-override", "4096", "--max-num-seqs", "128"),
)
GPU_FLAGS = {
    "exact": ("--dtype", "bfloat16", "--max-num-seqs", "128", "--max-model-len", "1024", "--deterministic"),
    "fused": ("--dtype", "bfloat16", "--max-num-seqs", "128", "--max-model-len", "1024"),
}
PATH = "/v1/completions"
LENGTHS = (4, 24, 64)
MARGIN = 1e-3
"""Prompts whose two best tokens are closer than this anywhere are left out: rounding may choose between them."""
BUSY = ("octavo:num_requests_running", "octavo:num_requests_waiting", "octavo:tenant_calls_running")
IDLE_S = 3.0
MAX_IDLE_CPU = 0.02
MAX_GROWTH_BYTES = 24 << 20
MAX_DEVICE_GROWTH_BYTES = 64 << 20
# Body, status: what clients send by mistake.
NONSENSE: tuple[tuple[bytes, int], ...] = (
    (b"{", 400),
    (b'{"prompt": 5}', 400),
    (b'{"prompt": "x", "max_tokens": -1}', 400),
    (b'{"prompt": "x", "n": 1000000}', 400),
    (b'{"prompt": "x", "model": "another"}', 404),
    (b'{"prompt": [70000]}', 400),
    (b'{"prompt": "x", "temperature": 1e400, "stream": true}', 400),
    (b'{"prompt": "x", "stop": [' + b"[" * 2000 + b"]}", 400),
    (json.dumps({"prompt": "y" * 5000}).encode(), 400),
)


@dataclass(frozen=True, slots=True)
class Case:
    """One request that has one right answer."""

    prompt: str
    max_tokens: int

    def body(self, *, stream: bool, **more: Any) -> bytes:
        fields = {"prompt": self.prompt, "max_tokens": self.max_tokens, "temperature": 0, "stream": stream}
        return json.dumps({**fields, "ignore_eos": True, **more}).encode()


@dataclass(slots=True)
class Tally:
    """What clients saw."""

    is_loose: bool = False
    """Answers need only have their length: batches round differently."""
    counts: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    outage: bool = False
    """The engine was killed and is not back yet, or calls from before are in flight."""

    def fail(self, text: str) -> None:
        self.counts["wrong"] += 1
        if len(self.wrong) < 10:
            self.wrong.append(text)


class Server:
    """`octavo serve` in a process group of its own."""

    def __init__(self, model: Path, flags: list[str]) -> None:
        command = [sys.executable, "-c", SERVE, "serve", "--model", str(model), "--port", "0", *flags]
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        assert self.process.stderr is not None
        for line in self.process.stderr:
            if found := re.search(r"ready in .* at http://([\d.]+):(\d+)", line):
                self.host, self.port = found[1], int(found[2])
                break
        else:
            raise SystemExit("the server did not start")

    @property
    def engine_pid(self) -> int:
        pid = self.process.pid
        return int(Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0])

    def pids(self) -> list[int]:
        return [self.process.pid, self.engine_pid]


@contextmanager
def served(model: Path, flags: list[str]) -> Iterator[Server]:
    """A server until the end of the block, which ends well on SIGTERM."""
    server = Server(model, flags)
    try:
        yield server
    finally:
        server.process.kill()
        server.process.wait()


async def call(server: Server, method: str, path: str, body: bytes = b"", leave_after: int | None = None) -> bytes:
    """All bytes of an answer; with `leave_after`, hang up after so many reads (0: before the first)."""
    reader, writer = await asyncio.open_connection(server.host, server.port)
    try:
        head = f"{method} {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Type: application/json\r\n"
        writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        if leave_after is not None:
            for _ in range(leave_after):
                await reader.read(4096)
            return b""
        return await reader.read()
    finally:
        writer.close()


def unpack(answer: bytes) -> tuple[int, bytes]:
    """(status, body), chunks joined."""
    head, _, body = answer.partition(b"\r\n\r\n")
    if b"transfer-encoding: chunked" in head.lower():
        parts = []
        while body:
            size, _, body = body.partition(b"\r\n")
            length = int(size, 16)
            parts.append(body[:length])
            body = body[length + 2 :]
        body = b"".join(parts)
    return int(head[9:12]), body


def read_stream(body: bytes) -> tuple[str, str | None]:
    """(text, finish reason); ValueError for a stream that does not end as it should."""
    text, reason = "", None
    *events, rest = body.decode().split("\n\n")
    if rest or not events or events.pop() != "data: [DONE]":
        raise ValueError(f"a stream ends with {body[-200:]!r}")
    for event in events:
        for choice in json.loads(event.removeprefix("data: "))["choices"]:
            text += choice["text"]
            reason = choice["finish_reason"] or reason
    return text, reason


async def alone(server: Server, prompts: int, rng: random.Random, margin: float) -> dict[Case, str]:
    """Cases and their right answers, asked one at a time."""
    answers: dict[Case, str] = {}
    while len(answers) < prompts * len(LENGTHS):
        prompt = "".join(rng.choices("abcdefgh ijklm", k=rng.randrange(2, 60)))
        longest = Case(prompt, LENGTHS[-1])
        status, body = unpack(await call(server, "POST", PATH, longest.body(stream=False, logprobs=2)))
        assert status == 200, body
        tops = json.loads(body)["choices"][0]["logprobs"]["top_logprobs"]
        values = [sorted(top.values(), reverse=True) for top in tops]
        if any(len(two) < 2 or two[0] - two[1] < margin for two in values):
            continue
        for length in LENGTHS:
            case = Case(prompt, length)
            status, body = unpack(await call(server, "POST", PATH, case.body(stream=False)))
            assert status == 200, body
            answers[case] = json.loads(body)["choices"][0]["text"]
    return answers


async def client(server: Server, answers: dict[Case, str], tally: Tally, until_s: float, seed: int) -> None:
    """One client: call after call until the end."""
    rng = random.Random(seed)
    cases = list(answers)
    while time.monotonic() < until_s:
        kind = rng.random()
        outage = tally.outage
        try:
            if kind < 0.05:
                body, wanted = rng.choice(NONSENSE)
                status, text = unpack(await call(server, "POST", PATH, body))
                check_refusal(tally, status, text, wanted, outage or tally.outage)
            elif kind < 0.15:
                case = rng.choice(cases)
                await call(server, "POST", PATH, case.body(stream=rng.random() < 0.7), rng.randrange(0, 4))
                tally.counts["left"] += 1
            else:
                case = rng.choice(cases)
                stream = rng.random() < 0.7
                status, text = unpack(await call(server, "POST", PATH, case.body(stream=stream)))
                check_answer(tally, status, text, answers[case], stream, outage or tally.outage)
        except (OSError, ValueError) as error:
            tally.fail(f"{type(error).__name__}: {error}")


def check_refusal(tally: Tally, status: int, body: bytes, wanted: int, outage: bool) -> None:
    if outage and status == 503:
        tally.counts["unavailable"] += 1
    elif status == wanted and "message" in json.loads(body)["error"]:
        tally.counts["refused"] += 1
    else:
        tally.fail(f"{status} instead of {wanted}: {body[:200]!r}")


def check_answer(tally: Tally, status: int, body: bytes, wanted: str, stream: bool, outage: bool) -> None:
    """Equal to the answer alone; while the engine is away an error that says so."""
    if outage and status == 503:
        tally.counts["unavailable"] += 1
        return
    if status != 200:
        tally.fail(f"status {status}: {body[:200]!r}")
        return
    if outage and stream and b'"code": "engine_dead"' in body[-400:]:
        tally.counts["error events"] += 1
        return
    if stream:
        text, reason = read_stream(body)
    else:
        choice = json.loads(body)["choices"][0]
        text, reason = choice["text"], choice["finish_reason"]
    if (text != wanted and not tally.is_loose) or reason != "length":
        tally.fail(f"{text!r} ({reason}) instead of {wanted!r}")
    else:
        tally.counts["right"] += 1


async def kill_engine(server: Server, tally: Tally, delay_s: float) -> None:
    """SIGKILL in the middle; the outage lasts until the next engine serves and calls of before are over."""
    await asyncio.sleep(delay_s)
    tally.outage = True
    os.kill(server.engine_pid, signal.SIGKILL)
    start_s = time.monotonic()
    sick = 0
    while True:
        status, _ = unpack(await call(server, "GET", "/health"))
        if status == 200 and sick:
            break
        sick += status == 503
        await asyncio.sleep(0.05)
        if time.monotonic() - start_s > 120:
            tally.fail("the engine did not come back")
            break
    tally.counts["outage ms"] = round(1000 * (time.monotonic() - start_s))
    await asyncio.sleep(1)
    tally.outage = False


async def metrics(server: Server) -> dict[str, float]:
    _, body = unpack(await call(server, "GET", "/metrics"))
    lines = [line.rpartition(" ") for line in body.decode().splitlines() if not line.startswith("#")]
    return {name.partition("{")[0]: float(value) for name, _, value in lines}


def memory_bytes(pids: list[int]) -> list[int]:
    return [int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE") for pid in pids]


def cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def idle_cpu(server: Server) -> list[float]:
    """Share of a core that each process uses while nobody asks anything."""
    before = [cpu_s(pid) for pid in server.pids()]
    await asyncio.sleep(IDLE_S)
    return [(after - b) / IDLE_S for after, b in zip((cpu_s(pid) for pid in server.pids()), before, strict=True)]


async def watch_memory(server: Server, samples: list[list[int]]) -> None:
    """Bytes of the two processes, and of the device where there is one."""
    while True:
        samples.append([*memory_bytes(server.pids()), *await device_bytes()])
        await asyncio.sleep(0.5)


async def device_bytes() -> list[int]:
    """Used memory of the first GPU; empty where there is none."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return []
    asked = await asyncio.create_subprocess_exec(
        tool, "--query-gpu=memory.used", "--format=csv,noheader,nounits", stdout=subprocess.PIPE
    )
    out, _ = await asked.communicate()
    return [int(out.split()[0]) << 20] if asked.returncode == 0 else []


async def quiet(server: Server) -> dict[str, float]:
    """The metrics once nothing runs or waits any more (or after five seconds)."""
    end_s = time.monotonic() + 5
    while True:
        now = await metrics(server)
        busy = any(now[name] for name in BUSY)
        if not busy or time.monotonic() > end_s:
            return now
        await asyncio.sleep(0.05)


async def run(server: Server, options: argparse.Namespace) -> bool:
    """The whole course; whether all went well."""
    rng = random.Random(options.seed)
    answers = await alone(server, options.prompts, rng, 0.0 if options.gpu else MARGIN)
    is_loose = options.gpu == "fused"
    tally = Tally(is_loose=is_loose)
    await asyncio.gather(*(client(server, answers, tally, time.monotonic() + 3, seed) for seed in range(64)))
    at_rest = await quiet(server)
    tally = Tally(is_loose=is_loose)
    samples: list[list[int]] = []
    watcher = asyncio.create_task(watch_memory(server, samples))
    start_s = time.monotonic()
    killer = [kill_engine(server, tally, options.seconds / 2)] if options.kill_engine else []
    seeds = range(1000, 1000 + options.clients)
    clients = [client(server, answers, tally, start_s + options.seconds, seed) for seed in seeds]
    await asyncio.gather(*clients, *killer)
    watcher.cancel()
    seconds = time.monotonic() - start_s
    after = await quiet(server)
    idle = await idle_cpu(server)
    print(f"{sum(tally.counts.values())} calls in {seconds:.0f} s: {dict(tally.counts)}")
    for text in tally.wrong:
        print(f"  wrong: {text}")
    return judge(tally, samples, at_rest, after, idle, options)


def judge(
    tally: Tally,
    samples: list[list[int]],
    before: dict[str, float],
    after: dict[str, float],
    idle: list[float],
    options: argparse.Namespace,
) -> bool:
    """Print each verdict; whether all are good."""
    # Memory of the second half against that before: caches and arenas have found their size.
    half = len(samples) // 2
    early, late = samples[half // 2 : half] or samples, samples[half:]
    growth = [max(row[i] for row in late) - max(row[i] for row in early) for i in range(len(samples[0]))]
    files = [int(now["process_open_fds"]) for now in (before, after)]
    verdicts = [
        ("every answer is right", tally.counts["wrong"] == 0 and tally.counts["right"] > 0),
        ("nothing runs or waits afterwards", not any(after[name] for name in BUSY)),
        ("all blocks are free", after["octavo:kv_cache_usage_perc"] == 0),
        (f"no connections are left ({files[0]} files before, {files[1]} after)", files[1] <= files[0] + 4),
        (f"idle processes use {', '.join(f'{share:.1%}' for share in idle)}", max(idle) < MAX_IDLE_CPU),
    ]
    if options.kill_engine:
        verdicts.append(("the engine was replaced once", after["octavo:engine_restarts_total"] == 1))
        verdicts.append(("its clients were told", tally.counts["error events"] + tally.counts["unavailable"] > 0))
    else:
        shown = ", ".join(f"{grown / 2**20:+.1f}" for grown in growth)
        verdicts.append((f"memory is flat ({shown} MiB in the second half)", max(growth[:2]) < MAX_GROWTH_BYTES))
        if growth[2:]:
            verdicts.append(("the device's memory is flat", growth[2] < MAX_DEVICE_GROWTH_BYTES))
    for text, good in verdicts:
        print(f"{'ok    ' if good else 'FAILED'}  {text}")
    return all(good for _, good in verdicts)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=512)
    parser.add_argument("--seconds", type=float, default=300)
    parser.add_argument("--prompts", type=int, default=32, help="different prompts")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--model", type=Path, help="instead of the tiny one")
    parser.add_argument("--kill-engine", action="store_true", help="kill -9 halfway")
    parser.add_argument("--gpu", choices=GPU_FLAGS, help="on a GPU: which kernels")
    parser.add_argument("--flags", default="", help="more flags of octavo serve")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = options.model or write_model(Path(folder))
        flags = GPU_FLAGS[options.gpu] if options.gpu else FLAGS
        with served(model, [*flags, *options.flags.split()]) as server:
            good = asyncio.run(run(server, options))
            server.process.send_signal(signal.SIGTERM)
            code = server.process.wait(60)
            print(f"{'ok    ' if code == 0 else 'FAILED'}  exit code {code} on SIGTERM")
    return 0 if good and code == 0 else 1


if __name__ == "__main__":
    sys.exit(main())
