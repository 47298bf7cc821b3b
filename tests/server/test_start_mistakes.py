"""Mistakes in the server's options are told in one line, before the model is loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from fake_engine import FakeLLM

from octavo.config import ServerConfig
from octavo.errors import ConfigError, OctavoError
from octavo.server.context import ServerContext
from octavo.server.service import _listen, listen


def test_mistakes_are_found_before_anything_is_loaded(tmp_path: Path) -> None:
    broken = tmp_path / "broken.jinja"
    broken.write_text("a\n{% if %}")
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"chat_template": str(tmp_path / "none.jinja")}, "none.jinja: No such file or directory$"),
        ({"chat_template": str(broken)}, "line 2"),
        ({"otlp_traces_endpoint": "collector"}, "'collector' is not http"),
        ({"api_keys_file": str(tmp_path / "none.toml")}, "can't be read: No such file or directory$"),
    ]
    for options, message in wrong:
        with pytest.raises(OctavoError, match=message):
            ServerContext(FakeLLM(None, None), ServerConfig(**options))  # type: ignore[arg-type]


def test_an_address_in_use_is_told_in_few_words() -> None:
    with listen("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"can't listen on 127.0.0.1:{port}: Address already in use \(choose"):
            _listen("127.0.0.1", port, "--port")
