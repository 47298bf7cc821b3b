"""A real server with JSON logs and the operator's routes on a port of their own: nothing of one leaks to the other."""

from __future__ import annotations

import gzip
import json
import re
from pathlib import Path
from typing import Any

import httpx
from serving import ServerProcess, fake_model

KEY = {"x-api-key": "root"}
PROFILER = "DeviceProperties.cpp"  # torch's profiler writes a line of its own where there is no GPU


def test_two_ports_json_logs_profile_and_exit(model_folder: Path, tmp_path: Path) -> None:
    model = fake_model(model_folder, tmp_path)
    flags = (
        *("--runner", "fake", "--served-model-name", "tiny", "--log-format", "json", "--log-requests"),
        *("--admin-key", "root", "--admin-port", "0", "--profile-dir", str(tmp_path / "traces")),
    )
    with ServerProcess("--model", str(model), *flags) as server:
        url = server.wait_ready()
        found = re.search(r"/admin routes listen on (http://[\w.:]+)", "".join(server.log))
        assert found
        admin = httpx.Client(base_url=found[1], headers=KEY, timeout=60)
        assert httpx.get(f"{url}/admin/info", headers=KEY).status_code == 404
        assert httpx.get(f"{found[1]}/admin/info").status_code == 401
        assert admin.get("/v1/models").status_code == 404
        assert admin.get("/admin/info").json()["server"]["admin_port"] == 0
        assert admin.patch("/admin/settings", json={"log_level": "debug"}).status_code == 200
        assert admin.post("/admin/profile/stop").status_code == 409
        assert admin.post("/admin/profile/start").json() == {}
        assert admin.post("/admin/profile/start").status_code == 409
        answer = httpx.post(
            f"{url}/v1/completions", json={"prompt": "x", "max_tokens": 4}, headers={"x-request-id": "mine"}
        )
        assert answer.status_code == 200
        trace = Path(admin.post("/admin/profile/stop").json()["path"])
        assert trace.parent == tmp_path / "traces"
        with gzip.open(trace) as file:
            assert json.load(file)["traceEvents"]
        assert admin.post("/admin/drain", json={"exit": True}).status_code == 200
        code, rest = server.end()
    assert code == 0
    lines: list[dict[str, Any]] = [
        json.loads(line) for line in [*server.log, *rest.splitlines()] if PROFILER not in line
    ]
    (call,) = [line for line in lines if line.get("request_id") == "mine"]
    assert call["output_tokens"] == 4
    assert any("shutting down" in line["message"] for line in lines)
