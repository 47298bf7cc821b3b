"""A real `octavo serve` process for tests, and a model folder that the fake runner serves."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import Self

START = "import sys; from octavo.cli import main; sys.exit(main())"
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 259,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "bos_token_id": 257,
    "eos_token_id": 258,
    "dtype": "float32",
}


class ServerProcess:
    """Started on construction; `wait_ready` gives the address. Ends with the `with` block. `start`: what it runs."""

    def __init__(self, *arguments: str, start: str = START) -> None:
        command = [sys.executable, "-c", start, "serve", "--port", "0", *arguments]
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        self.log: list[str] = []
        self.url = ""

    def wait_ready(self) -> str:
        """Read the log up to the line that says where the server listens."""
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.log.append(line)
            found = re.search(r"ready in .* at (http://[\w.:]+)", line)
            if found:
                self.url = found.group(1)
                return self.url
        raise AssertionError("the server ended before it was ready:\n" + "".join(self.log))

    def end(self) -> tuple[int, str]:
        """Wait for the process's end: exit code and the rest of its log."""
        assert self.process.stderr is not None
        rest = self.process.stderr.read()
        return self.process.wait(30), rest

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.process.kill()
        self.process.wait()
        if self.process.stderr is not None:
            self.process.stderr.close()


def fake_model(tokenizer_folder: Path, folder: Path) -> Path:
    """A folder with a config and the tests' tokenizer, without weights."""
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_text((tokenizer_folder / name).read_text())
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return folder
