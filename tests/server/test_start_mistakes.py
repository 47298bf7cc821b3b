"""Mistakes in the server's options are told in one line, before the model is loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from fake_engine import FakeLLM

from octavo.config import ServerConfig
from octavo.errors import ConfigError, OctavoError
from octavo.server.batch.database import Database
from octavo.server.context import ServerContext
from octavo.server.listening import listen, listen_as_asked
from octavo.server.start import check_admin, check_needs


def test_mistakes_are_found_before_anything_is_loaded(tmp_path: Path) -> None:
    broken = tmp_path / "broken.jinja"
    broken.write_text("a\n{% if %}")
    keys = tmp_path / "keys.toml"
    keys.write_text("[tenants.a]\nkeys = secret\n")
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"chat_template": str(tmp_path / "none.jinja")}, "none.jinja: No such file or directory$"),
        ({"chat_template": str(broken)}, "^--chat-template: .* line 2"),
        ({"otlp_traces_endpoint": "collector"}, "'collector' is not http"),
        ({"api_keys_file": str(tmp_path / "none.toml")}, "can't be read: No such file or directory$"),
        ({"api_keys_file": str(keys)}, r"keys.toml is not valid TOML \(line 2\)$"),
    ]
    for options, message in wrong:
        with pytest.raises(OctavoError, match=message):
            ServerContext(FakeLLM(None, None), ServerConfig(**options))  # type: ignore[arg-type]


def test_options_of_admin_routes_that_are_not_there_are_refused() -> None:
    check_admin(ServerConfig(admin_port=0, profile_dir="traces", admin_key="root"))
    with pytest.raises(ConfigError, match=r"^--admin-port needs --admin-key \(or OCTAVO_ADMIN_KEY\)$"):
        check_admin(ServerConfig(admin_port=0))
    with pytest.raises(ConfigError, match=r"^--profile-dir needs --admin-key \(or OCTAVO_ADMIN_KEY\)$"):
        check_admin(ServerConfig(profile_dir="traces"))


def test_options_without_the_one_that_they_are_about_are_named(caplog: pytest.LogCaptureFixture) -> None:
    check_needs(ServerConfig(batch_dir="batches", batch_concurrency=2, responses_store=5, responses_store_bytes=9))
    assert not caplog.records
    check_needs(ServerConfig(batch_concurrency=2, max_tool_turns=3))
    assert [record.getMessage() for record in caplog.records] == [
        "--batch-concurrency does nothing without --batch-dir",
        "--max-tool-turns does nothing without --tool-server",
    ]


def test_a_file_for_a_folder_is_told_in_few_words(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(ConfigError, match=r"^--batch-dir: .*/file is a file, not a folder$"):
        Database(file)
    with pytest.raises(ConfigError, match=r"^--batch-dir: can't use .*/file/deeper: Not a directory$"):
        Database(file / "deeper")


def test_an_address_in_use_is_told_in_few_words() -> None:
    with listen("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"can't listen on 127.0.0.1:{port}: Address already in use \(choose"):
            listen_as_asked("127.0.0.1", port, "--port")
