"""The README is checked like code: its option table is the config tree's, its Python parses, its files exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from octavo.config import options_markdown

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, flags=re.DOTALL)


def test_option_table_is_the_config_tree() -> None:
    assert options_markdown() in README, "run `python -m octavo.config` and paste its table into README.md"


def test_python_examples_parse_and_use_public_names() -> None:
    import octavo

    examples = blocks("python")
    assert examples
    for example in examples:
        for node in ast.walk(ast.parse(example)):
            if isinstance(node, ast.ImportFrom) and node.module == "octavo":
                for alias in node.names:
                    assert alias.name in octavo.__all__


@pytest.mark.parametrize("path", sorted(set(re.findall(r"`((?:python|rust|kernels|tests|benches)/[\w./-]+)`", README))))
def test_named_files_exist(path: str) -> None:
    assert (ROOT / path).exists()
