"""The built wheel, looked into and imported in a bare environment (no torch, no checkout on the path)."""

from __future__ import annotations

import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "maturin", "build", "--release", "--quiet", "--out", str(out)]
    subprocess.run(command, cwd=ROOT, check=True, timeout=900)
    (path,) = out.glob("octavo-*.whl")
    return path


def test_wheel_serves_every_python_from_3_11(wheel: Path) -> None:
    assert "-cp311-abi3-" in wheel.name


def test_wheel_holds_the_package_and_its_kernels_and_nothing_else_at_top_level(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    tops = {name.split("/")[0] for name in names}
    assert {t for t in tops if not t.endswith(".dist-info")} == {"octavo"}
    for source in [*(ROOT / "kernels").rglob("*.py"), *(ROOT / "kernels").rglob("*.md")]:
        assert f"octavo/kernels/{source.relative_to(ROOT / 'kernels')}" in names
    assert {"octavo/py.typed", "octavo/_core.pyi"} <= set(names)
    assert any(name.startswith("octavo/_core.") and name.endswith(".so") for name in names)
    assert not [name for name in names if "__pycache__" in name or name.endswith(".gguf")]


def test_extension_links_no_libtorch(wheel: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [n for n in archive.namelist() if n.endswith(".so")]
        body = archive.read(name)
    assert b"libtorch" not in body
    assert b"libc10" not in body


def test_wheel_imports_in_a_bare_environment(wheel: Path, tmp_path: Path) -> None:
    home = tmp_path / "bare"
    venv.create(home, with_pip=True)
    python = home / "bin" / "python"
    subprocess.run(
        [python, "-m", "pip", "install", "--quiet", "--no-deps", str(wheel)], check=True, timeout=300, cwd=tmp_path
    )
    code = (
        "import octavo, octavo._core, octavo.config, octavo.errors, sys;"
        "from octavo import SamplingParams; SamplingParams(temperature=0.5);"
        "import importlib.util as u; assert u.find_spec('octavo.kernels');"
        "print(octavo.__version__, 'torch' in sys.modules)"
    )
    done = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True, cwd=tmp_path)
    version, has_torch = done.stdout.split()
    assert version == octavo_version()
    assert has_torch == "False"


def octavo_version() -> str:
    import tomllib

    manifest = tomllib.loads((ROOT / "Cargo.toml").read_text())
    return str(manifest["workspace"]["package"]["version"])
