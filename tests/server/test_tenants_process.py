"""Tenants through a real server down to the engine's queue: a flood of one does not hold up another."""

from __future__ import annotations

import asyncio
from pathlib import Path

import httpx
from serving import ServerProcess, fake_model

FILE = """
[tenants.flood]
keys = ["flood"]
[tenants.calm]
keys = ["calm"]
[tenants.heavy]
keys = ["heavy"]
weight = 4.0
"""


async def test_turns_between_tenants(model_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "keys.toml").write_text(FILE)
    flags = ("--runner", "fake", "--fake-step-ms", "3", "--max-num-seqs", "1", "--served-model-name", "tiny")
    model = fake_model(model_folder, tmp_path)
    with ServerProcess("--model", str(model), *flags, "--api-keys-file", str(tmp_path / "keys.toml")) as server:
        async with httpx.AsyncClient(base_url=server.wait_ready(), timeout=60) as client:
            ended: list[str] = []

            async def call(tenant: str, number: int) -> None:
                body = {"prompt": f"{tenant} {number}", "max_tokens": 12, "ignore_eos": True}
                answer = await client.post("/v1/completions", json=body, headers={"x-api-key": tenant})
                assert answer.status_code == 200
                ended.append(tenant)

            flood = [asyncio.create_task(call("flood", i)) for i in range(40)]
            while len(ended) < 2:
                await asyncio.sleep(0.001)
            before = len(ended)
            others = [asyncio.create_task(call(name, i)) for name in ("calm", "heavy") for i in range(4)]
            await asyncio.gather(*flood, *others)
            metrics = (await client.get("/metrics", headers={"x-api-key": "calm"})).text
    after = ended[before:]
    # In turn: one of the flood for one of the calm; the heavy tenant's four go within about two of them.
    last = {name: max(i for i, other in enumerate(after) if other == name) for name in ("calm", "heavy")}
    assert last["calm"] <= 16, after
    assert last["heavy"] <= 11, after
    assert 'octavo:tenant_generation_tokens_total{tenant="calm"} 48.0' in metrics
