"""OpenAI's own client, talking to an app in this process."""

from __future__ import annotations

import httpx2
import openai
from starlette.applications import Starlette


def client_of(app: Starlette, api_key: str = "none") -> openai.AsyncOpenAI:
    transport = httpx2.ASGITransport(app=app, raise_app_exceptions=False)
    http_client = httpx2.AsyncClient(transport=transport)
    return openai.AsyncOpenAI(base_url="http://octavo/v1", api_key=api_key, max_retries=0, http_client=http_client)
