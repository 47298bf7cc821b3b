"""Load on an OpenAI-compatible server: open loop, latency percentiles, throughput, JSON, a plot.

Requests arrive by a clock (Poisson, evenly, or all at once), not when earlier ones end, so a slow server shows its
queue. The client is one asyncio protocol a request that looks at as few bytes as it can: 256 streams and the server
share a small machine. Examples:

    python benches/serve.py --url http://127.0.0.1:8000 --num-requests 200 --rate 4 --input-len 512 --output-len 128
    python benches/serve.py --shape llama-3.1-8b --spawn "--runner fake --fake-step-ms 12 --max-num-seqs 256" \\
        --num-requests 256 --input-len 16 --output-len 400
    python benches/serve.py --shape llama-3.1-8b --spawn "" --warm --rate 10 --num-requests 200 --input-len 1024 \\
        --timeline timeline.json      # where the time to each first token went (timeline.py)

`--warm` lets the server be as other servers are when they say they are ready: it waits until the server is quiet
(kernels built, CUDA graphs captured), sends a short load of the same kind, and waits again.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import shlex
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast
from urllib.parse import urlsplit

import timeline
from latencies import Result, plot, show, summarize
from shapes import SHAPES, write_shape

LOOK_S, QUIET_LOOKS, QUIET_SHARE = 0.25, 4, 0.2
"""A server is quiet when its processes take less than such a share of a core at so many looks, so far apart."""
WARM = {"num_requests": 96, "output_len": 64, "rate": 24.0, "seed": 99}
"""The load of --warm, where it differs from the one that is measured."""
WORDS = ("sea", "old", "book", "eight", "leaves", "sheet", "paper", "ink", "stone", "light", "wind", "bread", "house")


class StreamProtocol(asyncio.Protocol):
    """Sends one request and times what comes back; `done` is set at the end."""

    def __init__(self, request: bytes, result: Result, done: asyncio.Future[None]) -> None:
        self._request = request
        self._result = result
        self._done = done
        self._head = b""
        self._in_body = False
        self._tail = b""
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        now_s = time.perf_counter()
        if not self._in_body:
            self._head += data
            head, separator, data = self._head.partition(b"\r\n\r\n")
            if not separator:
                return
            self._in_body = True
            status = head[9:12]
            if status != b"200":
                self._result.error = f"HTTP {status.decode()}: {data[:200].decode(errors='replace')}"
                self._finish(now_s)
                return
            if not data:
                return
        self._result.arrivals_s.append(now_s)
        self._tail = (self._tail[-600:] if len(data) < 600 else b"") + data[-1200:]
        if b"data: [DONE]" in data or b"data: [DONE]" in self._tail[-40:]:
            self._read_usage()
            self._finish(now_s)

    def _read_usage(self) -> None:
        at = self._tail.rfind(b'"usage":{')
        if at < 0:
            self._result.error = "no usage in the last chunk"
            return
        usage, _ = json.JSONDecoder().raw_decode(self._tail[at + len(b'"usage":') :].decode())
        self._result.num_prompt_tokens = usage["prompt_tokens"]
        self._result.num_output_tokens = usage["completion_tokens"]

    def _finish(self, now_s: float) -> None:
        self._result.end_s = now_s
        assert self._transport is not None
        self._transport.close()
        if not self._done.done():
            self._done.set_result(None)

    def connection_lost(self, exc: Exception | None) -> None:
        if not self._done.done():
            self._result.error = self._result.error or f"connection lost: {exc}"
            self._result.end_s = time.perf_counter()
            self._done.set_result(None)


def make_prompts(args: argparse.Namespace) -> list[Any]:
    """Random prompts; the first --prefix-len tokens or words are the same in all."""
    rng = random.Random(args.seed)

    def draw(count: int) -> list[Any]:
        if args.prompt_kind == "ids":
            return [rng.randrange(args.vocab_low, args.vocab_high) for _ in range(count)]
        return rng.choices(WORDS, k=count)

    prefix = draw(args.prefix_len)
    prompts = [prefix + draw(args.input_len - args.prefix_len) for _ in range(args.num_requests)]
    return prompts if args.prompt_kind == "ids" else [" ".join(words) for words in prompts]


def make_request(args: argparse.Namespace, prompt: Any, model: str, request_id: str) -> bytes:
    """The bytes of one HTTP request."""
    body = {
        "model": model,
        "max_tokens": args.output_len,
        "temperature": args.temperature,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    body |= args.body
    if args.endpoint == "chat":
        body["messages"] = [{"role": "user", "content": prompt}]
        path = "/v1/chat/completions"
    else:
        body["prompt"] = prompt
        path = "/v1/completions"
    payload = json.dumps(body).encode()
    key = f"Authorization: Bearer {args.api_key}\r\n" if args.api_key else ""
    head = (
        f"POST {path} HTTP/1.1\r\nHost: {urlsplit(args.url).netloc}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(payload)}\r\nX-Request-Id: {request_id}\r\n{key}\r\n"
    )
    return head.encode() + payload


def arrival_times(args: argparse.Namespace) -> list[float]:
    """Seconds from the start at which requests are sent."""
    rng = random.Random(args.seed + 1)
    at = 0.0
    times = []
    for _ in range(args.num_requests):
        times.append(at)
        if args.rate != float("inf"):
            at += rng.expovariate(args.rate) if args.arrivals == "poisson" else 1 / args.rate
    return times


async def run_load(args: argparse.Namespace, requests: dict[str, bytes]) -> list[Result]:
    """Send all requests (by id); the results in the order of sending."""
    url = urlsplit(args.url)
    host, port = url.hostname or "127.0.0.1", url.port or 80
    loop = asyncio.get_running_loop()
    slots = asyncio.Semaphore(args.concurrency or len(requests))
    begin_s = time.perf_counter()

    async def one(request_id: str, request: bytes, delay_s: float) -> Result:
        wait_s = begin_s + delay_s - time.perf_counter()
        if wait_s > 0:
            await asyncio.sleep(wait_s)
        async with slots:
            result = Result(time.perf_counter(), request_id=request_id, due_s=begin_s + delay_s)
            done: asyncio.Future[None] = loop.create_future()
            try:
                await loop.create_connection(lambda: StreamProtocol(request, result, done), host, port)
            except OSError as error:
                result.error, result.end_s = str(error), time.perf_counter()
                return result
            await done
            return result

    return await asyncio.gather(*map(one, requests.keys(), requests.values(), arrival_times(args)))


def get(url: str, api_key: str | None) -> Any:
    request = urllib.request.Request(url, headers={"Authorization": f"Bearer {api_key}"} if api_key else {})
    with urllib.request.urlopen(request, timeout=10) as answer:
        return json.load(answer)


class Spawned:
    """`octavo serve` as a child of the bench, ready on entry."""

    def __init__(self, arguments: list[str], port: int, timeout_s: float, log: Path | None = None) -> None:
        """`log`: a file that gets a JSON line of every call."""
        code = "import sys; from octavo.cli import main; sys.exit(main())"
        command = [sys.executable, "-c", code, "serve", *arguments, "--port", str(port)]
        self._log = log
        if log is None:
            self._process = subprocess.Popen(command)
        else:
            with log.open("wb") as file:
                self._process = subprocess.Popen([*command, "--log-requests", "--log-format=json"], stderr=file)
        self._url = f"http://127.0.0.1:{port}"
        self._timeout_s = timeout_s

    def __enter__(self) -> Spawned:
        deadline_s = time.monotonic() + self._timeout_s
        while time.monotonic() < deadline_s and self._process.poll() is None:
            try:
                get(f"{self._url}/ready", None)
            except (OSError, urllib.error.HTTPError):
                time.sleep(0.1)
            else:
                return self
        self._process.kill()
        raise SystemExit(f"the spawned server was not ready within {self._timeout_s:g} s")

    def __exit__(self, *exc: object) -> None:
        self._process.send_signal(signal.SIGTERM)
        self._process.wait(30)

    @property
    def log(self) -> Path | None:
        return self._log

    def settle(self, timeout_s: float = 60.0) -> float:
        """Wait until its processes do nothing any more: kernels are built, graphs captured. Seconds waited."""
        begun_s = time.monotonic()
        quiet, before = 0, sum(self.cpu_s().values())
        while quiet < QUIET_LOOKS and time.monotonic() - begun_s < timeout_s:
            time.sleep(LOOK_S)
            after = sum(self.cpu_s().values())
            quiet = quiet + 1 if after - before < QUIET_SHARE * LOOK_S else 0
            before = after
        return time.monotonic() - begun_s

    def cpu_s(self) -> dict[str, float]:
        """CPU seconds so far of the API process and of its child, the engine."""
        pid = self._process.pid
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        return {"api": _cpu_s(pid), **{f"engine-{i}": _cpu_s(int(child)) for i, child in enumerate(children)}}


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def parse_args(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line's arguments, or those given."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    target = parser.add_argument_group("server")
    target.add_argument("--url", default="http://127.0.0.1:8000")
    target.add_argument("--spawn", help="start `octavo serve` with these arguments and stop it at the end")
    target.add_argument("--shape", choices=SHAPES, help="spawn it with random weights (and a tokenizer) of this shape")
    target.add_argument("--spawn-timeout", type=float, default=600.0, metavar="S")
    target.add_argument("--model", help="default: the first of /v1/models")
    target.add_argument("--api-key")
    target.add_argument("--endpoint", choices=("completions", "chat"), default="completions")
    load = parser.add_argument_group("load")
    load.add_argument("--body", type=json.loads, default={}, metavar="JSON", help="further fields of every request")
    load.add_argument("--num-requests", type=int, default=256)
    load.add_argument("--rate", type=float, default=float("inf"), help="requests a second; default: all at once")
    load.add_argument("--arrivals", choices=("poisson", "even"), default="poisson")
    load.add_argument("--concurrency", type=int, default=0, help="most requests in flight; 0: no limit")
    load.add_argument("--input-len", type=int, default=128, help="tokens (or words) of a prompt")
    load.add_argument("--output-len", type=int, default=128)
    load.add_argument("--prefix-len", type=int, default=0, help="tokens (or words) that all prompts share")
    load.add_argument("--prompt-kind", choices=("ids", "text"), default="ids")
    load.add_argument("--vocab-low", type=int, default=300)
    load.add_argument("--vocab-high", type=int, default=10_000)
    load.add_argument("--warm", action="store_true", help="warm the server that --spawn started (see above)")
    load.add_argument("--temperature", type=float, default=0.0)
    load.add_argument("--seed", type=int, default=0)
    output = parser.add_argument_group("output")
    output.add_argument("--json", type=Path, help="write the summary here")
    output.add_argument("--plot", type=Path, help="write distributions here (PNG; needs matplotlib)")
    output.add_argument("--timeline", type=Path, help="write each request's times here (JSON; needs --spawn)")
    args = parser.parse_args(arguments)
    if args.spawn is None and (args.warm or args.timeline):
        parser.error("--warm and --timeline are for a server that --spawn starts (--spawn '' adds no flags)")
    if args.shape and args.spawn is None:
        parser.error("--shape is for a server that --spawn starts (--spawn '' adds no flags)")
    if args.endpoint == "chat":
        args.prompt_kind = "text"
    return args


def measure(args: argparse.Namespace, spawned: Spawned | None) -> dict[str, Any]:
    """Run the load and report; the summary."""
    model = args.model or get(f"{args.url}/v1/models", args.api_key)["data"][0]["id"]
    ids = [f"bench-{args.seed}-{number}" for number in range(args.num_requests)]
    prompts = make_prompts(args)
    requests = {name: make_request(args, prompt, model, name) for name, prompt in zip(ids, prompts, strict=True)}
    before = spawned.cpu_s() if spawned else {}
    results = run(run_load(args, requests))
    after = spawned.cpu_s() if spawned else {}
    summary = summarize(results, args)
    if spawned:
        summary["cpu_s"] = {name: after[name] - before.get(name, 0.0) for name in after}
        summary["cpu_s"]["client"] = time.process_time()
    print(show(summary))
    if args.json:
        args.json.write_text(json.dumps(summary, indent=2) + "\n")
    if args.plot:
        plot(results, args.plot)
    if args.timeline and spawned and spawned.log:
        entries = make_timeline(results, spawned.log)
        print(timeline.show(entries))
        args.timeline.write_text(json.dumps([asdict(entry) for entry in entries], indent=1) + "\n")
    return summary


def make_timeline(results: list[Result], log: Path) -> list[timeline.Entry]:
    """What became of the requests that were answered."""
    good = [result for result in results if result.arrivals_s and not result.error]
    begin_s = min((result.due_s for result in good), default=0.0)
    seen = [
        timeline.Seen(r.request_id, r.due_s - begin_s, r.start_s - begin_s, r.arrivals_s[0] - begin_s) for r in good
    ]
    return timeline.join(seen, [result.end_s - begin_s for result in good], log)


def warm(args: argparse.Namespace, spawned: Spawned) -> None:
    """A short load between two times of quiet."""
    before_s = spawned.settle()
    load = argparse.Namespace(**{**vars(args), **WARM, "json": None, "plot": None, "timeline": None})
    measure(load, spawned)
    print(
        f"warm: the server was quiet after {before_s:.1f} s, and {spawned.settle():.1f} s after that load\n", flush=True
    )


def run(load: Any) -> Any:
    """On uvloop where it is installed."""
    try:
        import uvloop
    except ImportError:
        return asyncio.run(load)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(load)


def main() -> None:
    """Start a server if asked to, and measure."""
    args = parse_args()
    if args.spawn is None:
        measure(args, None)
        return
    with tempfile.TemporaryDirectory(prefix="octavo-bench-") as folder:
        arguments = shlex.split(args.spawn)
        if args.shape:
            write_shape(args.shape, Path(folder))
            arguments = [folder, "--load-format", "dummy", *arguments]
        log = Path(folder, "calls.log") if args.timeline else None
        with Spawned(arguments, urlsplit(args.url).port or 8000, args.spawn_timeout, log) as server:
            if args.warm:
                warm(args, server)
            measure(args, server)


if __name__ == "__main__":
    main()
