"""Random bodies of POST /v1/responses: whatever is sent, the answer is 200 or a 4xx in OpenAI's words."""

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
    max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
_WORDS = (
    "message reasoning function_call function_call_output mcp_call mcp_list_tools item_reference "
    "mcp_approval_request mcp_approval_response input_text "
    "output_text input_image refusal user assistant system developer auto none required function mcp web_search "
    "json_schema json_object text low high f 1 reasoning_text summary_text "
    "message.output_text.logprobs disabled allowed_tools"
)
_KEYS = (
    "type text id name call_id arguments output content role summary encrypted_content refusal parameters strict "
    "format schema effort tools mode server_label error verbosity"
)
WORDS = st.sampled_from(_WORDS.split())
KEYS = st.sampled_from(_KEYS.split())
LEAVES = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), WORDS, st.text(max_size=8))
VALUES = st.recursive(
    LEAVES, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(KEYS, inner, max_size=5), max_leaves=12
)
ITEMS = st.fixed_dictionaries(
    {}, optional=dict.fromkeys(("type", "role", "content", "call_id", "name", "arguments", "output"), WORDS | VALUES)
)
TOOLS = st.fixed_dictionaries({"type": WORDS, "name": WORDS}, optional={"parameters": VALUES, "strict": VALUES})
FIELDS = (
    "instructions tool_choice parallel_tool_calls max_tool_calls text reasoning max_output_tokens top_logprobs "
    "metadata store previous_response_id background include truncation user temperature top_p stream top_k stop"
)
BODIES = st.fixed_dictionaries(
    {"input": WORDS | st.lists(ITEMS, max_size=4) | VALUES},
    optional={"tools": st.lists(TOOLS, max_size=3) | VALUES, **dict.fromkeys(FIELDS.split(), VALUES)},
)


@SETTINGS
@given(body=BODIES, keeps=st.booleans())
async def test_no_body_is_a_server_error(llm: FakeLLM, body: dict[str, Any], keeps: bool) -> None:
    app = make_app(llm, ServerConfig(responses_store=int(keeps)))  # type: ignore[arg-type]
    transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://octavo") as client:
        headers = {"content-type": "application/json"}
        answer = await client.post("/v1/responses", content=json.dumps(body), headers=headers)
        assert answer.status_code in (200, 400), (answer.text, body)
        if answer.status_code != 200:
            assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
    app.state.context.close()
