"""The import matrix of the package, checked on the syntax tree: who may not import whom.

Function-level imports count too; only `if TYPE_CHECKING:` blocks are left out. The exceptions may only shrink.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "python" / "octavo"

# (importer prefix, forbidden prefixes). Prefixes are module paths; the longest matching importer rules all apply.
FORBIDDEN = [
    ("octavo.layers", ["octavo.models", "octavo.worker", "octavo.engine", "octavo.server"]),
    (
        "octavo.models",
        ["octavo.kernels", "octavo.worker", "octavo.engine", "octavo.server", "octavo.sampling"]
        + [f"octavo.attention.{name}" for name in ("triton", "cpu", "reference", "flash", "flashinfer")],
    ),
    ("octavo.sampling", ["octavo.models", "octavo.server", "octavo.engine", "octavo.worker"]),
    ("octavo.attention", ["octavo.models", "octavo.worker", "octavo.engine", "octavo.server", "octavo.layers"]),
    ("octavo.engine.client", ["torch", "octavo.worker", "octavo.models"]),
    ("octavo.engine.streams", ["torch", "octavo.worker", "octavo.models"]),
    ("octavo.server", ["torch", "octavo.worker", "octavo.models", "octavo.layers", "octavo.sampling"]),
    ("octavo.server.tools", ["octavo.server.schema", "octavo.server.routes"]),
    ("octavo.server.reasoning", ["octavo.server.schema", "octavo.server.routes"]),
    ("octavo.pooling", ["octavo.engine", "octavo.server"]),
    *(
        (f"octavo.pooling.{name}", ["torch", "transformers"])
        for name in ("recipe", "inputs", "answers", "jobs", "remote")
    ),
    *(
        (
            f"octavo.multimodal.{name}",
            ["torch", "transformers", "PIL", "octavo.models", "octavo.worker", "octavo.server"],
        )
        for name in ("client", "fetch", "inputs", "limits", "parts", "placed", "sources")
    ),
    ("octavo.config", ["torch", "octavo.worker", "octavo.models"]),
    ("octavo.chat_template", ["torch", "transformers", "octavo.models"]),
]
EXCEPTIONS: set[tuple[str, str]] = set()


def imports_of(tree: ast.AST) -> Iterator[str]:
    """Absolute module names that a tree imports, outside `if TYPE_CHECKING:`."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        yield from imports_of(node)


def python_files(folder: Path) -> list[Path]:
    return sorted(p for p in folder.rglob("*.py") if "kernels" not in p.relative_to(folder).parts)


def module_name(path: Path) -> str:
    parts = list(path.relative_to(PACKAGE.parent).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def under(name: str, prefix: str) -> bool:
    return name == prefix or name.startswith(prefix + ".")


@pytest.mark.parametrize("path", python_files(PACKAGE), ids=lambda p: str(p.relative_to(PACKAGE)))
def test_nobody_imports_what_is_forbidden(path: Path) -> None:
    importer = module_name(path)
    banned = [b for prefix, names in FORBIDDEN if under(importer, prefix) for b in names]
    tree = ast.parse(path.read_text())
    found = {
        (importer, name)
        for name in imports_of(tree)
        if any(under(name, b) for b in banned) and (importer, name) not in EXCEPTIONS
    }
    assert not found


def test_relative_imports_are_not_used() -> None:
    relative = [
        f"{path}:{node.lineno}"
        for path in python_files(PACKAGE)
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ImportFrom) and node.level
    ]
    assert not relative


def test_kernels_import_torch_and_triton_only() -> None:
    allowed = {"torch", "triton", "octavo.kernels"} | set(sys.stdlib_module_names)
    for path in (ROOT / "kernels").rglob("*.py"):
        foreign = {
            name
            for name in imports_of(ast.parse(path.read_text()))
            if name.split(".")[0] not in allowed and not under(name, "octavo.kernels")
        }
        assert not foreign, path


def test_environment_is_read_in_one_file() -> None:
    readers = {
        path.name
        for path in python_files(PACKAGE)
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute) and node.attr in {"environ", "getenv"}
    }
    assert readers <= {"envs.py"}


@pytest.mark.parametrize("crate", ["core", "ipc", "cpu"])
def test_only_the_glue_crate_knows_python(crate: str) -> None:
    manifest = (ROOT / "rust" / crate / "Cargo.toml").read_text()
    assert "pyo3" not in manifest
    if crate == "core":
        assert "#![forbid(unsafe_code)]" in (ROOT / "rust" / "core" / "src" / "lib.rs").read_text()


def test_unsafe_stays_in_its_rooms() -> None:
    rooms = ("rust/py/src/buffers.rs", "rust/py/src/cpu.rs", "rust/ipc/src/ring.rs", "rust/cpu/")
    outside = [
        str(path.relative_to(ROOT))
        for path in (ROOT / "rust").rglob("*.rs")
        if "unsafe " in path.read_text() and not str(path.relative_to(ROOT)).startswith(rooms)
    ]
    assert not outside


@pytest.mark.parametrize(
    ("statement", "absent"),
    [
        ("import octavo", ["torch", "transformers", "numpy", "octavo._core"]),
        ("import octavo.server.app", ["torch", "transformers", "octavo.worker", "octavo.models"]),
        ("import octavo.engine.client", ["torch", "transformers", "octavo.worker", "octavo.models"]),
        ("import octavo.cli", ["torch", "transformers"]),
    ],
)
def test_light_modules_stay_light(statement: str, absent: list[str]) -> None:
    code = f"{statement}; import sys; print([m for m in {absent!r} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "[]"


def test_import_is_quick() -> None:
    code = "import time; t = time.perf_counter(); import octavo; print(time.perf_counter() - t)"
    times = [
        float(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout)
        for _ in range(3)
    ]
    assert min(times) < 0.3


def test_the_mcp_package_is_imported_in_one_file() -> None:
    importers = {
        str(path.relative_to(PACKAGE))
        for path in python_files(PACKAGE)
        for name in imports_of(ast.parse(path.read_text()))
        if under(name, "mcp")
    }
    assert importers == {"server/mcp/client.py"}
