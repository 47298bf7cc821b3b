"""SE-07: Python that a checkpoint brings along is never run, not even for a user at a terminal who would say yes.

Transformers asks the terminal where `trust_remote_code` is left out. Pickles: tests/sources/test_safetensors.py.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from octavo import LLM, SamplingParams
from octavo.errors import ModelError
from octavo.models.tokenizer_folder import find
from octavo.models.transformers_config import foreign_config
from tests.cases.tiny_chat_model import write_model
from tests.pooling.tiny_models import save

PACKAGE = Path(__file__).resolve().parents[2] / "python" / "octavo"
FOREIGN = """
from pathlib import Path
from transformers import BertConfig, BertModel, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
Path({mark!r}).touch()
class Config(BertConfig):
    model_type = "novel"
class Encoder(BertModel):
    config_class = Config
class Words(PreTrainedTokenizerFast): ...
"""
CODE = {"AutoConfig": "foreign.Config", "AutoModel": "foreign.Encoder", "AutoModelForCausalLM": "foreign.Encoder"}
WORDS = {"AutoTokenizer": [None, "foreign.Words"]}


def change(file: Path, **fields: Any) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **fields}))


def encoder(folder: Path) -> None:
    save(folder, "BertModel", "BertConfig")
    change(folder / "config.json", model_type="novel", architectures=["Encoder"], auto_map=CODE)


def decoder(folder: Path) -> None:
    write_model(folder)
    change(folder / "config.json", model_type="novel", architectures=["NovelForCausalLM"], auto_map=CODE)


@pytest.fixture
def mark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What foreign.py leaves behind when it runs."""
    monkeypatch.setattr("builtins.input", lambda prompt="": "y")
    return tmp_path / "mark"


def bring_code(folder: Path, mark: Path) -> Path:
    (folder / "foreign.py").write_text(FOREIGN.format(mark=str(mark)))
    return folder


@pytest.mark.parametrize("make", [encoder, decoder])
@pytest.mark.parametrize("options", [{}, {"load_format": "dummy"}], ids=str)
def test_se07_a_model_with_code_of_its_own(
    make: Callable[[Path], None], options: dict[str, Any], tmp_path: Path, mark: Path
) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    make(folder)
    with pytest.raises(ModelError, match=r"with its own code \(auto_map.*\), which Octavo does not run"):
        LLM(str(bring_code(folder, mark)), device="cpu", task="embed" if make is encoder else "auto", **options)
    assert not mark.exists()


@pytest.mark.parametrize("runner", ["torch", "embedded"])
def test_se07_code_beside_a_known_model_is_left_alone(runner: str, tmp_path: Path, mark: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    write_model(folder)
    change(folder / "config.json", auto_map=CODE)
    change(folder / "tokenizer_config.json", auto_map=WORDS)
    with LLM(str(bring_code(folder, mark)), device="cpu", runner=runner) as llm:
        assert llm.generate("a", SamplingParams(max_tokens=2, ignore_eos=True))[0].outputs[0].token_ids
    assert not mark.exists()


def test_se07_a_tokenizer_with_code_of_its_own(tmp_path: Path, mark: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    write_model(folder)
    (folder / "tokenizer.json").rename(folder / "vocab.json")
    (folder / "merges.txt").write_text("#version: 0.2\n")
    change(
        folder / "tokenizer_config.json", tokenizer_class="Words", auto_map={"AutoTokenizer": [None, "foreign.Words"]}
    )
    change(folder / "config.json", model_type="novel")
    with pytest.raises(ModelError, match="its tokenizer can't be converted"):
        find(bring_code(folder, mark))
    assert not mark.exists()


def test_se07_attention_that_would_be_fetched_is_the_models_own(tmp_path: Path) -> None:
    """With the package `kernels`, Transformers fetches and runs what `attn_implementation` names."""
    fetched = {"attn_implementation": "some/one", "experts_implementation": "some/one"}
    save(tmp_path, "BertModel", "BertConfig")
    with LLM(str(tmp_path), device="cpu", task="embed") as llm:
        expected = llm.embed(["w1 w2"])[0].outputs.embedding
    change(tmp_path / "config.json", **fetched)
    with LLM(str(tmp_path), device="cpu", task="embed") as llm:
        assert llm.embed(["w1 w2"])[0].outputs.embedding == expected
    for raw in (
        {"model_type": "bloom", **fetched},
        {"model_type": "llava", "text_config": {"model_type": "llama", **fetched}, **fetched},
    ):
        config = foreign_config(raw)
        for part in (config, config.get_text_config()):
            assert (part._attn_implementation, part._experts_implementation) == (None, None)


def test_se07_every_auto_class_is_told() -> None:
    """Also those that the tests above don't reach."""
    told = 0
    for file in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
                continue
            owner = ast.unparse(node.func.value).rpartition(".")[2]
            if node.func.attr in ("from_pretrained", "from_config") and owner.lower().startswith("auto"):
                words = {word.arg: ast.unparse(word.value) for word in node.keywords}
                assert words.get("trust_remote_code") == "False", f"{file.name}:{node.lineno}"
                told += 1
    assert told >= 7
