"""benches/serve.py against a spawned server: counts are exact, percentiles (latencies.py) are those of the samples."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
from serving import fake_model

BENCH = Path(__file__).parents[2] / "benches" / "serve.py"


@pytest.fixture(scope="module")
def latencies() -> Iterator[ModuleType]:
    """Its latencies.py as a module, found beside its siblings as when it is run."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCH.parent))
        yield importlib.import_module("latencies")


def test_percentiles(latencies: ModuleType) -> None:
    values = [float(i) for i in range(101)]
    assert latencies.percentile(values, 50) == 50
    assert latencies.percentile(values, 99) == 99
    assert latencies.percentile([1.0, 2.0], 50) == 1.5
    assert latencies.percentile([3.0], 99) == 3


def test_latencies(latencies: ModuleType) -> None:
    result = latencies.Result(start_s=1.0, num_output_tokens=3, arrivals_s=[1.5, 1.6, 1.9], end_s=1.9)
    samples = latencies.latencies_ms([result])
    assert samples["ttft"] == pytest.approx([500])
    assert samples["itl"] == pytest.approx([100, 300])
    assert samples["tpot"] == pytest.approx([200])
    assert samples["e2e"] == pytest.approx([900])


def test_a_shape_needs_a_server_to_start() -> None:
    done = subprocess.run([sys.executable, str(BENCH), "--shape", "qwen3-0.6b"], capture_output=True, text=True)
    assert done.returncode == 2
    assert "--shape is for a server that --spawn starts" in done.stderr


def test_run(model_folder: Path, tmp_path: Path, unused_tcp_port: int) -> None:
    model = fake_model(model_folder, tmp_path)
    summary_file, picture = tmp_path / "out.json", tmp_path / "out.png"
    command = [sys.executable, str(BENCH), "--spawn", f"--model {model} --runner fake --fake-step-ms 1"]
    command += ["--url", f"http://127.0.0.1:{unused_tcp_port}", "--num-requests", "12", "--rate", "200"]
    command += [
        "--concurrency",
        "4",
        "--input-len",
        "8",
        "--output-len",
        "5",
        "--vocab-low",
        "0",
        "--vocab-high",
        "256",
    ]
    subprocess.run([*command, "--json", str(summary_file), "--plot", str(picture)], check=True, timeout=60)
    summary = json.loads(summary_file.read_text())
    assert summary["num_failed"] == 0
    assert summary["num_output_tokens"] == 60
    assert summary["ttft_ms"]["p50"] <= summary["e2e_ms"]["p99"]
    assert set(summary["cpu_s"]) == {"api", "engine-0", "client"}
    assert picture.read_bytes().startswith(b"\x89PNG")
