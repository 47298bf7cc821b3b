"""The command line: flags mirror the config tree, mistakes are one line with the fix, and nothing heavy is imported."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest

from octavo import cli
from octavo.config import EngineConfig, ServerConfig, engine_options, section_options


def run(*argv: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "octavo", *argv], capture_output=True, text=True, timeout=60)


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[tuple[EngineConfig, ServerConfig]]:
    """What `octavo serve` would have started."""
    calls: list[tuple[EngineConfig, ServerConfig]] = []

    def serve(values: dict[str, Any]) -> int:
        calls.append(cli.split_configs(values))
        return 0

    monkeypatch.setitem(cli.COMMANDS, "serve", cli.Command("", cli.COMMANDS["serve"].sections, serve))
    return calls


def test_flags_become_the_config_tree(served: list[tuple[EngineConfig, ServerConfig]]) -> None:
    argv = ["serve", "m", "--max-num-seqs", "7", "--no-enable-prefix-caching", "--enforce-eager", "--port=0"]
    argv += ["--cuda-graph-sizes", "1,2", "--cuda-graph-sizes", "8", "--api-key", "a", "--api-key", "b"]
    argv += ["--gpu-memory-utilization", "0.5", "--max-model-len", "auto", "--drain-timeout-s", "3"]
    assert cli.main(argv) == 0
    engine, server = served[0]
    assert engine.model.model == "m"
    assert engine.model.max_model_len == "auto"
    assert engine.scheduler.max_num_seqs == 7
    assert engine.cache.enable_prefix_caching is False
    assert engine.cache.gpu_memory_utilization == 0.5
    assert engine.execution.enforce_eager is True
    assert engine.execution.cuda_graph_sizes == [1, 2, 8]
    assert server.api_key == ["a", "b"]
    assert server.port == 0
    assert server.drain_timeout_s == 3


def test_nothing_given_is_the_defaults(served: list[tuple[EngineConfig, ServerConfig]]) -> None:
    assert cli.main(["serve", "--model", "m"]) == 0
    engine, server = served[0]
    assert engine.scheduler == EngineConfig().scheduler
    assert server == ServerConfig()


def test_a_model_length_is_a_number(served: list[tuple[EngineConfig, ServerConfig]]) -> None:
    assert cli.main(["serve", "m", "--max-model-len", "4096"]) == 0
    assert served[0][0].model.max_model_len == 4096


MISTAKES = {
    "nearest flag": (["serve", "m", "--max-model-length", "3"], "--max-model-length (did you mean --max-model-len?)"),
    "nearest negated flag": (["serve", "m", "--no-enforce-eagre"], "did you mean --no-enforce-eager?"),
    "server flag of plan": (["plan", "m", "--port", "3"], "unknown flag --port"),
    "nearest command": (["serv", "m"], "unknown command 'serv' (did you mean serve?)"),
    "no abbreviations": (["serve", "m", "--max-num", "3"], "unknown flag --max-num"),
    "not a number": (["serve", "m", "--port", "http"], "--port: 'http' is not an integer"),
    "not a list of numbers": (["serve", "m", "--cuda-graph-sizes", "1,x"], "--cuda-graph-sizes: 'x' is not an integer"),
    "NaN": (["serve", "m", "--gpu-memory-utilization", "nan"], "--gpu-memory-utilization: nan is below"),
    "out of range": (["serve", "m", "--port", "70000"], "--port: 70000 is above the greatest value, 65535"),
    "no choice": (["plan", "m", "--dtype", "int3"], "--dtype: 'int3' is not one of auto, float32, bfloat16, float16"),
    "model length": (["plan", "m", "--max-model-len", "long"], "'long' is neither a number nor auto"),
    "contradiction": (
        ["plan", "m", "--attention-backend", "cpu", "--device", "cuda"],
        "--attention-backend cpu contradicts --device cuda",
    ),
    "empty key": (["serve", "m", "--api-key", ""], "--api-key: a value is empty"),
    "empty text": (["serve", "m", "--batch-dir", ""], "--batch-dir: the value is empty: leave the flag out"),
    "a switch with a value": (
        ["plan", "m", "--enable-prefix-caching=false"],
        "--enable-prefix-caching takes no value: --enable-prefix-caching turns it on, --no-enable-prefix-caching off",
    ),
    "more than 64 bits": (["plan", "m", "--seed", "9" * 30], "is above the greatest value, 9223372036854775807"),
    "more than the core holds": (
        ["plan", "m", "--long-prefill-token-threshold", "4294967296"],
        "--long-prefill-token-threshold: 4294967296 is above the greatest value, 16777216",
    ),
    "an address for a host": (
        ["serve", "m", "--allowed-media-domains", "a.example.com,https://b.example.com/x"],
        "--allowed-media-domains: 'https://b.example.com/x' is no host: give the name alone",
    ),
    "images": (["plan", "m", "--limit-mm-per-prompt", "3"], "--limit-mm-per-prompt: '3' is not JSON like"),
    "empty name": (["serve", "m", "--served-model-name", "a,,b"], "--served-model-name: a value is empty"),
    "two models": (["plan", "a", "--model", "b"], "the model is given twice: a and --model b"),
    "two words": (["plan", "a", "b"], "unexpected argument 'b'"),
    "no value": (["serve", "m", "--port"], "argument --port: expected one argument"),
    "no model": (["serve", "--port", "1"], "no model given"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_are_one_line(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    argv, expected = MISTAKES[name]
    assert cli.main(argv) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    *before, last = shown.err.splitlines()
    assert last.startswith("octavo: error: ")
    assert expected in last
    assert before == (["usage: octavo serve MODEL [options]"] if name == "no model" else [])


def test_help_shows_every_option_with_its_default(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as done:
        cli.main(["serve", "--help"])
    assert done.value.code == 0
    words = " ".join(capsys.readouterr().out.split())
    for opt in [*engine_options(), *section_options("server")]:
        assert opt.flag in words
        assert " ".join(cli.shown_help(opt).replace("%%", "%").split()) in words.replace("- ", "-")


def test_an_unknown_variable_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("OCTAVO_CACHEE", "x")
    assert cli.main(["--version"]) == 2
    assert "unknown environment variable OCTAVO_CACHEE" in capsys.readouterr().err


def test_module_and_exit_codes() -> None:
    version = run("--version")
    assert version.returncode == 0
    assert version.stdout.startswith("octavo ")
    bad = run("serve", "m", "--prot", "1")
    assert bad.returncode == 2
    assert bad.stdout == ""
    assert bad.stderr == "octavo: error: unknown flag --prot (did you mean --port?)\n"
    empty = run()
    assert empty.returncode == 2
    assert empty.stderr.startswith("usage: octavo")


def test_the_log_level_of_the_environment(
    served: list[tuple[EngineConfig, ServerConfig]], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OCTAVO_LOG_LEVEL", "error")
    assert [cli.main(["serve", "m"]), cli.main(["serve", "m", "--log-level", "debug"])] == [0, 0]
    assert [server.log_level for _, server in served] == ["error", "debug"]
    monkeypatch.setenv("OCTAVO_LOG_LEVEL", "loud")
    assert cli.main(["serve", "m"]) == 2
    assert "OCTAVO_LOG_LEVEL: 'loud' is not one of debug, info, warning, error" in capsys.readouterr().err


@pytest.mark.parametrize("when", ["octavo.config", "octavo.worker.choice"])
def test_ctrl_c_while_modules_are_imported(when: str) -> None:
    code = f"""
import sys
class Interrupt:
    def find_spec(self, name, *more):
        if name == {when!r}:
            raise KeyboardInterrupt
sys.meta_path.insert(0, Interrupt())
sys.argv = ["octavo", "plan", "m"]
from octavo.__main__ import main
sys.exit(main())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


@pytest.mark.parametrize("arguments", [["--help"], ["--version"]])
def test_a_reader_that_has_seen_enough(arguments: list[str]) -> None:
    """As `octavo plan MODEL | head -1`: the pipe is closed when the command writes."""
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "octavo", *arguments]
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, timeout=60)
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, "")


def test_answers_about_flags_import_no_torch() -> None:
    code = """
import sys
from octavo.cli import main
codes = [main(["--version"]), main(["serve", "m", "--prot", "1"]), main(["--help"])]
print(codes, [name for name in ("torch", "transformers", "starlette", "numpy") if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.splitlines()[-1] == "[0, 2, 0] []"
