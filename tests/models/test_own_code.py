"""`--trust-remote-code`: a model that only its checkpoint has code for answers as its own classes do. Without the flag
that code is never run: tests/cases/test_foreign_code.py."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from octavo import LLM, SamplingParams
from octavo.errors import ModelError

CODE = """
from transformers import LlamaConfig, LlamaForCausalLM
class {name}Config(LlamaConfig):
    model_type = "{name}"
class {name}ForCausalLM(LlamaForCausalLM):
    config_class = {name}Config
    def forward(self, *args, **kwargs):
        output = super().forward(*args, **kwargs)
        output.logits = output.logits.roll({shift}, -1)
        return output
"""
IDS = [5, 17, 33, 60, 2, 91, 44]


def make(folder: Path, name: str, *, shift: int = 7, **fields: Any) -> transformers.LlamaForCausalLM:
    """A tiny Llama, whose checkpoint says that it is something else; its code moves logits by `shift` tokens."""
    torch.manual_seed(3)
    config = transformers.LlamaConfig(
        vocab_size=101,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
    )
    plain = transformers.LlamaForCausalLM(config).eval()
    plain.save_pretrained(folder)
    (folder / f"code_{name}.py").write_text(CODE.format(name=name, shift=shift))
    raw = json.loads((folder / "config.json").read_text())
    places = {"AutoConfig": f"code_{name}.{name}Config", "AutoModelForCausalLM": f"code_{name}.{name}ForCausalLM"}
    raw |= {"model_type": name, "architectures": [f"{name}ForCausalLM"], "auto_map": places, **fields}
    (folder / "config.json").write_text(json.dumps(raw))
    return plain


def expected(plain: transformers.LlamaForCausalLM, count: int, shift: int = 7) -> list[int]:
    ids = list(IDS)
    for _ in range(count):
        with torch.inference_mode():
            ids.append(int(plain(torch.tensor([ids])).logits[0, -1].roll(shift, -1).argmax()))
    return ids[len(IDS) :]


def test_own_classes_are_run_and_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    folder = tmp_path / "model"
    plain = make(folder, "novelty")
    options = {"device": "cpu", "dtype": "float32", "trust_remote_code": True}
    with caplog.at_level(logging.WARNING, "octavo"), LLM(str(folder), **options) as llm:
        params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
        outputs = llm.generate([{"prompt_token_ids": IDS}, {"prompt_token_ids": IDS[:4]}], params)
    assert outputs[0].outputs[0].token_ids == expected(plain, 12)
    assert "runs code_novelty.noveltyConfig and code_novelty.noveltyForCausalLM of" in caplog.text


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"auto_map": {"AutoModel": "a.B"}}, "auto_map in config.json names no AutoConfig"),
        ({"auto_map": {"AutoConfig": "some/one--a.B", "AutoModelForCausalLM": "a.C"}}, "code of another repository"),
        ({"auto_map": {"AutoConfig": "absent.B", "AutoModelForCausalLM": "absent.C"}}, "the code of .* fails"),
    ],
)
def test_code_that_cannot_run(fields: dict[str, Any], reason: str, tmp_path: Path) -> None:
    make(tmp_path, "missing", **fields)
    with pytest.raises(ModelError, match=f"^--trust-remote-code: .*{reason}"):
        LLM(str(tmp_path), device="cpu", trust_remote_code=True)


def test_trust_is_given_to_one_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In one process: another checkpoint of that type runs its own code, and none runs it without the flag."""
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    for shift in (7, 5):
        folder = tmp_path / f"model{shift}"
        plain = make(folder, "twice", shift=shift)
        with LLM(str(folder), device="cpu", dtype="float32", trust_remote_code=True) as llm:
            output = llm.generate([{"prompt_token_ids": IDS}], params)[0].outputs[0]
        assert output.token_ids == expected(plain, 4, shift)
    with pytest.raises(ModelError, match="does not run without --trust-remote-code"):
        LLM(str(folder), device="cpu", dtype="float32")


def test_known_models_do_not_need_it(tmp_path: Path) -> None:
    """Code beside a model that Octavo has stays unread: it would end the load."""
    plain = make(tmp_path, "llama", architectures=["LlamaForCausalLM"])
    (tmp_path / "code_llama.py").write_text("raise SystemExit")
    with LLM(str(tmp_path), device="cpu", runner="torch", dtype="float32", trust_remote_code=True) as llm:
        params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
        (token_id,) = llm.generate([{"prompt_token_ids": IDS}], params)[0].outputs[0].token_ids
    with torch.inference_mode():
        assert token_id == int(plain(torch.tensor([IDS])).logits[0, -1].argmax())
