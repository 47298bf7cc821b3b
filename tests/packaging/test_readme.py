"""The READMEs are checked like code: the option table is the config tree's, their Python parses, their files exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from octavo.config.table import options_markdown

ROOT = Path(__file__).resolve().parents[2]
PARTS = ["", "benches", "kernels", "python/octavo", "python/octavo/models", "python/octavo/server", "rust/cpu"]
READMES = {f"{part}/README.md".lstrip("/"): (ROOT / part / "README.md").read_text() for part in PARTS}
NAMED = sorted(
    {
        path
        for text in READMES.values()
        for path in re.findall(r"`((?:python|rust|kernels|tests|benches)/[\w./-]+)`", text)
    }
)


def blocks(language: str) -> list[str]:
    return [
        block for text in READMES.values() for block in re.findall(rf"```{language}\n(.*?)```", text, flags=re.DOTALL)
    ]


def test_option_table_is_the_config_tree() -> None:
    assert options_markdown() in READMES["python/octavo/README.md"], (
        "run `python -m octavo.config` and paste its table into python/octavo/README.md"
    )


def test_python_examples_parse_and_use_public_names() -> None:
    import octavo

    examples = blocks("python")
    assert examples
    for example in examples:
        for node in ast.walk(ast.parse(example)):
            if isinstance(node, ast.ImportFrom) and node.module == "octavo":
                for alias in node.names:
                    assert alias.name in octavo.__all__


@pytest.mark.parametrize("path", NAMED)
def test_named_files_exist(path: str) -> None:
    assert (ROOT / path).exists()
