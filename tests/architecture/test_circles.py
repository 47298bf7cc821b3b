"""No two files of the package need each other, not even for the types they name: every import can be read top down."""

from __future__ import annotations

import ast
from graphlib import TopologicalSorter
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[2] / "python" / "octavo"


def modules() -> dict[str, Path]:
    """Name -> file, kernels included."""
    names: dict[str, Path] = {}
    for path in [*PACKAGE.rglob("*.py"), *(PACKAGE / "kernels").rglob("*.py")]:
        parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
        names[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return names


def imported(tree: ast.AST, names: dict[str, Path]) -> set[str]:
    """Modules of the package that a file imports anywhere, under TYPE_CHECKING and in functions too."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            inner = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= (inner & names.keys()) or {node.module}
    return found & names.keys()


def test_imports_have_no_circles() -> None:
    names = modules()
    assert len(names) > 300
    needs = {name: imported(ast.parse(path.read_text()), names) - {name} for name, path in names.items()}
    TopologicalSorter(needs).prepare()  # CycleError names the files
