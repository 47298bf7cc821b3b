"""Keys files, limits of tenants and what clients are told of them, the way to the engine; with a clock that is set."""

from __future__ import annotations

import asyncio
import hashlib
import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
import pytest
from asgi_call import AsgiCall
from fake_engine import FakeDelta, FakeLLM, Item, Submitted
from starlette.applications import Starlette
from starlette.datastructures import Headers

from octavo.config import ServerConfig
from octavo.errors import ConfigError
from octavo.sampling_params import SamplingParams
from octavo.server.app import make_app
from octavo.server.context import ServerContext
from octavo.server.generation import Generation
from octavo.server.prompt import Prompt
from octavo.server.tenants.bucket import Bucket
from octavo.server.tenants.caller import Caller, calling
from octavo.server.tenants.keyring import Keyring
from octavo.server.tenants.spec import read_keys_file

FILE = f"""
[tenants.slow]
keys = ["slow-key", "sha256:{hashlib.sha256(b"hashed-key").hexdigest()}"]
requests_per_minute = 2
max_tokens = 8
priority = 5

[tenants.thrifty]
keys = ["thrifty-key"]
tokens_per_minute = 20
weight = 2.5

[tenants.single]
keys = ["single-key"]
max_concurrent = 1
"""
HI = [{"role": "user", "content": "hi"}]


class Clock:
    """Seconds that pass when told to."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    file = tmp_path / "keys.toml"
    file.write_text(FILE)
    return file


@pytest.fixture
def app(llm: FakeLLM, path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> Starlette:
    def keyring(keys: list[str], file: str | None) -> Keyring:
        return Keyring(keys, file, clock=clock)

    monkeypatch.setattr("octavo.server.context.Keyring", keyring)
    return make_app(llm, ServerConfig(api_keys_file=str(path), api_key=["own-key"]))  # type: ignore[arg-type]


async def ask(client: httpx.AsyncClient, key: str, **body: Any) -> httpx.Response:
    headers = {"authorization": f"Bearer {key}"}
    return await client.post("/v1/completions", json={"prompt": "abcd", **body}, headers=headers)


async def test_a_rate_of_requests(client: httpx.AsyncClient, clock: Clock) -> None:
    answers = [await ask(client, key, max_tokens=1) for key in ("slow-key", "hashed-key", "slow-key")]
    assert [answer.status_code for answer in answers] == [200, 200, 429]
    assert [answer.headers["x-ratelimit-remaining-requests"] for answer in answers] == ["1", "0", "0"]
    refused = answers[2]
    assert refused.headers["x-ratelimit-limit-requests"] == "2"
    assert refused.headers["x-ratelimit-reset-requests"] == "60.000s"
    assert 30 <= int(refused.headers["retry-after"]) <= 31
    assert refused.json()["error"]["code"] == "rate_limit_exceeded"
    clock.now_s += 30
    assert (await ask(client, "slow-key")).status_code == 200
    assert (await ask(client, "slow-key")).status_code == 429
    assert (await ask(client, "own-key")).status_code == 200


async def test_anthropic_callers_are_told_in_their_words(client: httpx.AsyncClient, clock: Clock) -> None:
    body = {"model": "tiny", "max_tokens": 3, "messages": HI}
    before = datetime.now(UTC).replace(microsecond=0)
    slow, thrifty = [
        await client.post("/v1/messages", json=body, headers={"x-api-key": key}) for key in ("slow-key", "thrifty-key")
    ]
    assert slow.headers["anthropic-ratelimit-requests-limit"] == "2"
    assert slow.headers["anthropic-ratelimit-requests-remaining"] == "1"
    reset = datetime.fromisoformat(slow.headers["anthropic-ratelimit-requests-reset"])
    assert 30 <= (reset - before).total_seconds() <= 35
    assert thrifty.headers["anthropic-ratelimit-tokens-limit"] == "20"
    assert not [name for answer in (slow, thrifty) for name in answer.headers if name.startswith("x-ratelimit")]


async def test_questions_about_the_server_are_not_counted(client: httpx.AsyncClient) -> None:
    for _ in range(5):
        answer = await client.get("/v1/models", headers={"x-api-key": "slow-key"})
        assert answer.status_code == 200
        assert "x-ratelimit-limit-requests" not in answer.headers
    assert (await ask(client, "slow-key")).status_code == 200


async def test_a_rate_of_tokens_counts_prompts_and_outputs(client: httpx.AsyncClient, clock: Clock) -> None:
    first = await ask(client, "thrifty-key", max_tokens=10)
    assert first.headers["x-ratelimit-remaining-tokens"] == "6"
    assert (await ask(client, "thrifty-key", max_tokens=10)).status_code == 200
    refused = await ask(client, "thrifty-key")
    assert refused.status_code == 429
    assert refused.headers["x-ratelimit-remaining-tokens"] == "0"
    clock.now_s += 28  # nine and a bit: the debt of eight is paid
    assert (await ask(client, "thrifty-key")).status_code == 200


async def test_calls_at_a_time(app: Starlette, client: httpx.AsyncClient, llm: FakeLLM) -> None:
    gate = asyncio.Event()

    def script(request: Submitted) -> list[Item]:
        return [[FakeDelta(text="a", token_ids=[97])], gate, [FakeDelta(finish_reason="stop")]]

    llm.script = script
    held = asyncio.create_task(ask(client, "single-key"))
    while not llm.submitted:
        await asyncio.sleep(0)
    refused = await ask(client, "single-key")
    assert refused.status_code == 429
    assert "1 calls at a time" in refused.json()["error"]["message"]
    gate.set()
    assert (await held).status_code == 200
    assert (await ask(client, "single-key")).status_code == 200
    context: ServerContext = app.state.context
    assert context.keyring.tenants["single"].num_live == 0


async def test_what_goes_on_after_the_answer_counts_until_its_end(
    app: Starlette, client: httpx.AsyncClient, llm: FakeLLM
) -> None:
    context: ServerContext = app.state.context
    tenant = context.keyring.tenants["single"]
    gate = asyncio.Event()
    llm.script = lambda request: [gate, [FakeDelta(text="a", token_ids=[97], finish_reason="stop")]]
    call = Caller(tenant, counts=True)
    call.hold()
    with calling(call):
        background = Generation(context, [Prompt([1], None)], SamplingParams())
    call.release()
    assert tenant.num_live == 1
    assert (await ask(client, "single-key")).status_code == 429
    background.close()
    background.close()
    assert tenant.num_live == 0
    gate.set()
    assert (await ask(client, "single-key")).status_code == 200


async def test_a_client_that_leaves_gives_its_place_back(app: Starlette, llm: FakeLLM) -> None:
    llm.script = lambda request: [[FakeDelta(text="a", token_ids=[97])], asyncio.Event()]
    context: ServerContext = app.state.context
    tenant = context.keyring.everybody
    call = AsgiCall(app, "/v1/completions", {"prompt": "x", "stream": True}, [(b"x-api-key", b"own-key")])
    await call.next()
    assert tenant.num_live == 1
    call.disconnect()
    await call.task
    assert tenant.num_live == 0


async def test_output_tokens_are_limited_but_never_silently(client: httpx.AsyncClient, llm: FakeLLM) -> None:
    refused = await ask(client, "slow-key", max_tokens=9)
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "max_tokens"
    chat = {"messages": HI}
    assert (await client.post("/v1/chat/completions", json=chat, headers={"x-api-key": "slow-key"})).status_code == 200
    assert [request.params.max_tokens for request in llm.submitted] == [8]


async def test_the_engine_learns_whose_request_it_is(client: httpx.AsyncClient, llm: FakeLLM) -> None:
    for key, priority in (("own-key", -3), ("slow-key", -3), ("slow-key", 9), ("thrifty-key", -3)):
        assert (await ask(client, key, priority=priority, max_tokens=1)).status_code == 200
    own, slow, modest, thrifty = (request.terms for request in llm.submitted)
    assert [terms.priority for terms in (own, slow, modest, thrifty)] == [-3, 5, 9, -3]
    assert own.tenant == 0
    assert slow.tenant == modest.tenant
    assert len({own.tenant, slow.tenant, thrifty.tenant}) == 3
    assert [own.weight, slow.weight, thrifty.weight] == [1.0, 1.0, 2.5]


async def test_usage_is_counted_by_tenant(client: httpx.AsyncClient) -> None:
    for _ in range(3):
        await ask(client, "slow-key", max_tokens=2)
    text = (await client.get("/metrics", headers={"x-api-key": "own-key"})).text
    for line in (
        'octavo:tenant_calls_total{tenant="slow"} 2.0',
        'octavo:tenant_prompt_tokens_total{tenant="slow"} 8.0',
        'octavo:tenant_generation_tokens_total{tenant="slow"} 4.0',
        'octavo:tenant_cached_tokens_total{tenant="slow"} 32.0',
        'octavo:tenant_calls_refused_total{limit="requests",tenant="slow"} 1.0',
        'octavo:tenant_calls_running{tenant="slow"} 0.0',
        'octavo:tenant_calls_total{tenant="single"} 0.0',
    ):
        assert line in text.splitlines(), line


def test_reloading(path: Path, clock: Clock) -> None:
    ring = Keyring(["own-key"], str(path), clock=clock)
    slow = ring.tenants["slow"]
    slow.enter()
    path.write_text(FILE.replace("slow-key", "new-key").replace("max_tokens = 8", "max_tokens = 9"))
    assert ring.reload() == 3

    def find(key: str) -> object:
        return ring.find(Headers({"x-api-key": key}))

    assert find("slow-key") is None
    assert find("new-key") is slow
    assert slow.spec.max_tokens == 9
    assert slow.requests is not None
    assert slow.requests.level == 1, "what was used stays used"
    path.write_text("[tenants.x]\nkeys = []")
    with pytest.raises(ConfigError, match="at least one key"):
        ring.reload()
    assert find("new-key") is slow, "a bad file changes nothing"


def test_a_json_file_says_the_same(path: Path, tmp_path: Path) -> None:
    file = tmp_path / "keys.json"
    file.write_text(json.dumps({"tenants": {"one": {"keys": ["a"], "weight": 3}}}))
    assert read_keys_file(file)["one"].weight == 3


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no tables"),
        ("tenants = 5", "no tables"),
        ("[tenants.a", "not valid TOML"),
        ("[tenants.a]", "keys is missing"),
        ("[tenants.a]\nkeys = 'k'", "keys is missing or is no list"),
        ("[tenants.a]\nkeys = ['']", "a key is empty"),
        ("[tenants.a]\nkeys = ['k']\nrequests_per_minut = 1", "did you mean requests_per_minute"),
        ("[tenants.a]\nkeys = ['k']\nmax_tokens = 0", "max_tokens: 0 is below 1"),
        ("[tenants.a]\nkeys = ['k']\nweight = nan", "weight: nan"),
        ("[tenants.a]\nkeys = ['k']\nweight = 'x'", "weight must be a number"),
        ("[tenants.'a b']\nkeys = ['k']", "names have"),
        ("[tenants.a]\nkeys = ['secret']\n[tenants.b]\nkeys = ['secret']", "a and b have a key in common"),
    ],
)
def test_bad_files_are_refused_and_keys_are_not_shown(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "keys.toml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=message) as error:
        read_keys_file(file)
    assert "secret" not in str(error.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.toml"):
        read_keys_file(tmp_path / "none.toml")


def test_buckets_pay_debts_off(clock: Clock) -> None:
    bucket = Bucket(60, clock)
    bucket.take(90)
    assert bucket.level == -30
    assert bucket.wait_s(1) == 31
    clock.now_s += 31
    assert bucket.level == 1
    clock.now_s += 1000
    assert bucket.level == 60


def test_the_readmes_example_is_one(tmp_path: Path) -> None:
    readme = (Path(__file__).parents[2] / "python/octavo/server/README.md").read_text()
    file = tmp_path / "keys.toml"
    file.write_text(readme.split("```toml\n", 1)[1].split("```", 1)[0])
    spec = read_keys_file(file)["research"]
    assert spec.hashes()[1] == hashlib.sha256(b"test").digest()
    assert None not in (spec.requests_per_minute, spec.tokens_per_minute, spec.max_concurrent, spec.max_tokens)
