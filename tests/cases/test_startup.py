"""Public failures at the start: lengths that can't fit, missing or damaged files, no chat template."""

from __future__ import annotations

import json
import re
import shutil
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from octavo import LLM
from octavo.errors import ConfigError, ModelError, OctavoError
from tests.cases.calls import CHAT, TEXT
from tests.cases.conftest import FLAGS
from tests.server.serving import START, ServerProcess

HI = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}


def serve_fails(*arguments: str) -> str:
    """The last line of an `octavo serve` that must end by itself, soon, with one clear line and no traceback."""
    start_s = time.monotonic()
    command = [sys.executable, "-c", START, "serve", "--port", "0", *arguments]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode in (1, 2), ended.stderr
    assert time.monotonic() - start_s < 30
    assert "Traceback" not in ended.stderr
    return ended.stderr.rstrip().splitlines()[-1]


def test_su01_lengths_that_do_not_fit(model: Path) -> None:
    """The message names the largest length that fits; it works, and one more does not."""
    memory = ("--kv-cache-memory-bytes", str(300 << 10))
    line = serve_fails("--model", str(model), *FLAGS, *memory, "--max-model-len", "1000")
    numbers = [int(found) for found in re.findall(r"\d+", line)]
    options: dict[str, Any] = {
        "dtype": "float32",
        "block_size": 16,
        "cpu_threads": 1,
        "kv_cache_memory_bytes": 300 << 10,
    }
    fitting = []
    for length in sorted({number for number in numbers if 16 <= number < 1000}):
        try:
            with LLM(str(model), max_model_len=length, **options) as llm:
                assert len(llm.generate(["x"])) == 1
                fitting.append(length)
        except ConfigError:
            pass
    assert fitting, line
    with pytest.raises(ConfigError):
        LLM(str(model), max_model_len=max(fitting) + 16, **options).close()


@pytest.mark.parametrize("length", ["0", "-5", "abc", "100000"])
def test_su01_lengths_that_are_none(model: Path, length: str) -> None:
    line = serve_fails("--model", str(model), *FLAGS, "--max-model-len", length)
    assert length in line or "max-model-len" in line


Change = Callable[[Path], object]
"""Of a copy of the model's folder."""


def broken(change: Change, model: Path, folder: Path) -> Path:
    """A changed copy of the model."""
    copy = folder / "copy"
    shutil.copytree(model, copy)
    change(copy)
    return copy


def _write(name: str, text: str) -> Change:
    return lambda folder: (folder / name).write_text(text)


def _remove(name: str) -> Change:
    return lambda folder: (folder / name).rename(folder / "removed")


def _weights(change: Callable[[bytes], bytes]) -> Change:
    def apply(folder: Path) -> None:
        file = folder / "model.safetensors"
        file.write_bytes(change(file.read_bytes()))

    return apply


def _index(folder: Path) -> None:
    """An index that names a shard which is not there."""
    (folder / "model.safetensors").unlink()
    index = {"weight_map": {"model.norm.weight": "model-00001-of-00002.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:" + "0" * 64 + "\nsize 1234\n"
# What is wrong with a copy of the model -> what the message must name.
DAMAGES: dict[str, tuple[Change, str]] = {
    "no config": (_remove("config.json"), "config.json"),
    "no weights": (_remove("model.safetensors"), "safetensors"),
    "broken config": (_write("config.json", "{"), "config.json"),
    "unknown architecture": (_write("config.json", '{"architectures": ["Nonesuch"], "model_type": "none"}'), "one"),
    "broken tokenizer": (_write("tokenizer.json", "{"), "tokenizer.json"),
    "cut weights": (_weights(lambda body: body[:-1000]), "model.safetensors"),
    "only a header": (_weights(lambda body: body[: 8 + struct.unpack("<Q", body[:8])[0]]), "model.safetensors"),
    "lfs pointer": (_weights(lambda body: POINTER.encode()), "LFS"),
    "huge header": (_weights(lambda body: struct.pack("<Q", 2**60) + body[8:]), "model.safetensors"),
    "broken header": (_weights(lambda body: body[:8] + b"#" + body[9:]), "model.safetensors"),
    "trailing bytes": (_weights(lambda body: body + b"\0" * 100), "model.safetensors"),
    "an index without its shard": (_index, "model-00001-of-00002.safetensors"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_su03_su04_damaged_folders(damage: str, model: Path, tmp_path: Path) -> None:
    change, named = DAMAGES[damage]
    folder = broken(change, model, tmp_path)
    with pytest.raises(OctavoError, match=re.escape(named)) as error:
        LLM(str(folder), dtype="float32", cpu_threads=1).close()
    assert isinstance(error.value, ModelError | ConfigError)


@pytest.mark.parametrize("path", ["/does/not/exist", "./missing"])
def test_su03_missing_paths(path: str, tmp_path: Path) -> None:
    assert path in serve_fails("--model", path)
    empty = tmp_path / "empty"
    empty.mkdir()
    assert str(empty) in serve_fails("--model", str(empty))


async def test_su06_no_chat_template(model: Path, tmp_path: Path) -> None:
    def change(folder: Path) -> None:
        config = json.loads((folder / "tokenizer_config.json").read_text())
        del config["chat_template"]
        (folder / "tokenizer_config.json").write_text(json.dumps(config))

    folder = broken(change, model, tmp_path)
    with ServerProcess("--model", str(folder), *FLAGS) as server:
        async with httpx.AsyncClient(base_url=server.wait_ready(), timeout=30) as client:
            refused = await client.post(CHAT, json=HI)
            assert refused.status_code == 400
            assert "--chat-template" in refused.json()["error"]["message"]
            assert (await client.post(TEXT, json={"prompt": "x", "max_tokens": 2})).status_code == 200
        assert any("no chat template" in line for line in server.log)


async def test_su06_templates_that_raise_or_are_broken(model: Path, tmp_path: Path) -> None:
    raising = tmp_path / "raising.jinja"
    raising.write_text("{{ raise_exception('only one tool call') }}")
    with ServerProcess("--model", str(model), *FLAGS, "--chat-template", str(raising)) as server:
        async with httpx.AsyncClient(base_url=server.wait_ready(), timeout=30) as client:
            refused = await client.post(CHAT, json=HI)
    assert refused.status_code == 400
    assert "only one tool call" in refused.json()["error"]["message"]
    wrong = tmp_path / "wrong.jinja"
    wrong.write_text("fine\n{% for %}")
    assert "line 2" in serve_fails("--model", str(model), *FLAGS, "--chat-template", str(wrong))
    assert "none.jinja" in serve_fails("--model", str(model), *FLAGS, "--chat-template", str(tmp_path / "none.jinja"))
