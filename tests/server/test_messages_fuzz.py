"""Random bodies of the Messages routes: whatever is sent, the answer is 200 or a 4xx in Anthropic's words."""

from __future__ import annotations

import json
from typing import Any

import httpx
from fake_engine import FakeLLM
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from octavo.config import ServerConfig
from octavo.server.app import make_app

SETTINGS = settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
_WORDS = (
    "text image document tool_use tool_result thinking user assistant system auto any tool none enabled disabled "
    "adaptive f 1 custom json_schema base64 low"
)
_KEYS = (
    "type text id name input tool_use_id content is_error source data thinking signature role input_schema "
    "budget_tokens display schema format effort description"
)
WORDS = st.sampled_from(_WORDS.split())
KEYS = st.sampled_from(_KEYS.split())
LEAVES = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), WORDS, st.text(max_size=8))
VALUES = st.recursive(
    LEAVES, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(KEYS, inner, max_size=5), max_leaves=12
)
BLOCKS = st.fixed_dictionaries({"type": WORDS}, optional=dict.fromkeys(("text", "id", "name", "input"), VALUES)) | (
    st.fixed_dictionaries({"type": WORDS, "tool_use_id": WORDS, "content": VALUES})
)
MESSAGES = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "assistant", "system"]), "content": WORDS | st.lists(BLOCKS | VALUES, max_size=4)}
)
TOOLS = st.fixed_dictionaries({"name": WORDS, "input_schema": VALUES}, optional={"type": WORDS, "strict": VALUES})
BODIES = st.fixed_dictionaries(
    {"messages": st.lists(MESSAGES, max_size=4) | VALUES, "max_tokens": st.integers(-1, 70) | VALUES},
    optional={
        "system": VALUES,
        "tools": st.lists(TOOLS, max_size=3) | VALUES,
        "tool_choice": VALUES,
        "thinking": VALUES,
        "stop_sequences": VALUES,
        "output_config": VALUES,
        "stream": st.booleans() | VALUES,
        "temperature": VALUES,
        "metadata": VALUES,
        "model": st.just("tiny") | VALUES,
    },
)


@SETTINGS
@given(body=BODIES)
async def test_no_body_is_a_server_error(llm: FakeLLM, body: dict[str, Any]) -> None:
    app = make_app(llm, ServerConfig())  # type: ignore[arg-type]
    transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://octavo") as client:
        for path in ("/v1/messages", "/v1/messages/count_tokens"):
            answer = await client.post(path, content=json.dumps(body), headers={"content-type": "application/json"})
            assert answer.status_code in (200, 400, 404), (answer.text, body)
            if answer.status_code != 200:
                assert answer.json()["type"] == "error"
    app.state.context.close()


async def test_deep_values(client: httpx.AsyncClient) -> None:
    for depth in (100, 900, 1500, 50_000):
        deep = '{"a":' * depth + "1" + "}" * depth
        used = f'{{"type":"tool_use","id":"1","name":"f","input":{deep}}}'
        result = '{"type":"tool_result","tool_use_id":"1"}'
        for body in (
            f'{{"max_tokens":1,"messages":[{{"role":"assistant","content":[{used}]}},'
            f'{{"role":"user","content":[{result}]}}]}}',
            f'{{"max_tokens":1,"messages":[{{"role":"user","content":"a"}}],"tools":[{{"name":"f","input_schema":{deep}}}]}}',
        ):
            answer = await client.post("/v1/messages", content=body, headers={"content-type": "application/json"})
            assert answer.status_code in (200, 400), answer.text
