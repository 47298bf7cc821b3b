"""Every kind of model that pools against Transformers, one text at a time without padding: tiny random weights."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers.models.auto import modeling_auto

from octavo import LLM
from octavo.cli import run_command
from octavo.errors import ConfigError, ModelError, RequestError
from octavo.pooling.inputs import YES_NO_HEAD, YES_NO_TAIL
from octavo.pooling.recipe import task_of
from tests.pooling.tiny_models import WORDS, save, save_modules

# Lengths that share no batch shape by chance: 1 to 50 tokens, and one text twice.
TEXTS = [" ".join(f"w{(7 * i + j) % 90}" for j in range(n)) for i, n in enumerate([1, 9, 50, 3, 17, 2, 33])] + ["w0"]
GENERATORS = ("MODEL_FOR_CAUSAL_LM_MAPPING_NAMES", "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES")
ENCODERS = ["Bert", "Roberta", "XLMRoberta", "MPNet", "ModernBert", "DistilBert", "Electra"]
IDS = {word: i for i, word in enumerate(WORDS)}


def ids_of(text: str) -> list[int]:
    return [IDS[word] for word in text.split()]


def hidden(model: Any, ids: list[int], **more: Any) -> Tensor:
    """[tokens, hidden] of one text."""
    with torch.inference_mode():
        states: Tensor = torch.as_tensor(model.base_model(input_ids=torch.tensor([ids]), **more).last_hidden_state[0])
    return states


def embed(folder: Path, **options: Any) -> np.ndarray[Any, Any]:
    with LLM(str(folder), **options) as llm:
        return np.array([each.outputs.embedding for each in llm.embed(TEXTS)])


def unit(row: Tensor) -> Tensor:
    return torch.as_tensor(row / row.norm())


@pytest.mark.parametrize("family", ENCODERS)
def test_encoders(tmp_path: Path, family: str) -> None:
    model = save(tmp_path, f"{family}Model", f"{family}Config")
    wanted = [unit(hidden(model, [1, *ids_of(text), 2]).mean(0)).numpy() for text in TEXTS]
    rows = embed(tmp_path, device="cpu")
    np.testing.assert_allclose(rows, wanted, atol=1e-5)
    np.testing.assert_allclose(rows[0], rows[-1], atol=1e-6)
    cls = embed(tmp_path, device="cpu", pooling="cls", max_num_batched_tokens=256)
    np.testing.assert_allclose(cls, [unit(hidden(model, [1, *ids_of(t), 2])[0]).numpy() for t in TEXTS], atol=1e-5)


def weighted(states: Tensor) -> Tensor:
    weights = torch.arange(1, len(states) + 1).unsqueeze(1)
    return (states * weights).sum(0) / weights.sum()


POOLINGS: dict[str, Callable[[Tensor], Tensor]] = {
    "pooling_mode_cls_token": lambda states: states[0],
    "pooling_mode_mean_tokens": lambda states: states.mean(0),
    "pooling_mode_max_tokens": lambda states: states.amax(0),
    "pooling_mode_mean_sqrt_len_tokens": lambda states: states.sum(0) / len(states) ** 0.5,
    "pooling_mode_weightedmean_tokens": weighted,
    "pooling_mode_lasttoken": lambda states: states[-1],
}


@pytest.mark.parametrize("flag", POOLINGS)
def test_poolings_of_modules(tmp_path: Path, flag: str) -> None:
    model = save(tmp_path, "BertModel", "BertConfig")
    flags = {name: name == flag for name in POOLINGS}
    save_modules(tmp_path, pooling=flags, dense=None, normalize=False)
    wanted = [POOLINGS[flag](hidden(model, [1, *ids_of(text), 2])).numpy() for text in TEXTS]
    np.testing.assert_allclose(embed(tmp_path, device="cpu"), wanted, atol=1e-4)


def test_joined_poolings_dense_and_normalize(tmp_path: Path) -> None:
    model = save(tmp_path, "BertModel", "BertConfig")
    torch.manual_seed(1)
    dense = torch.nn.Linear(64, 12)
    save_modules(tmp_path, pooling={"pooling_mode": ["cls", "mean"]}, dense=dense, normalize=True)
    states = [hidden(model, [1, *ids_of(text), 2]) for text in TEXTS]
    with torch.inference_mode():
        wanted = [unit(torch.tanh(dense(torch.cat([each[0], each.mean(0)])))).numpy() for each in states]
    np.testing.assert_allclose(embed(tmp_path, device="cpu"), wanted, atol=1e-5)


def test_decoder_embedder(tmp_path: Path) -> None:
    """The Qwen3-Embedding shape: a generator's checkpoint whose modules.json says last token, then length 1."""
    model = save(tmp_path, "Qwen3ForCausalLM", "Qwen3Config")
    wanted = [unit(hidden(model, [*ids_of(text), 2])[-1]).numpy() for text in TEXTS]
    np.testing.assert_allclose(embed(tmp_path, device="cpu", task="embed"), wanted, atol=1e-5)
    save_modules(tmp_path, pooling={"pooling_mode_lasttoken": True}, dense=None, normalize=True)
    np.testing.assert_allclose(embed(tmp_path, device="cpu"), wanted, atol=1e-5)


@pytest.mark.parametrize("family", ["Bert", "Roberta", "ModernBert", "DistilBert", "MPNet"])
@pytest.mark.parametrize("num_labels", [1, 3])
def test_classifiers(tmp_path: Path, family: str, num_labels: int) -> None:
    model = save(tmp_path, f"{family}ForSequenceClassification", f"{family}Config", num_labels=num_labels)
    with torch.inference_mode():
        logits = [model(input_ids=torch.tensor([[1, *ids_of(text), 2]])).logits[0] for text in TEXTS]
    wanted = [each.sigmoid() if num_labels == 1 else each.softmax(0) for each in logits]
    with LLM(str(tmp_path), device="cpu") as llm:
        assert llm.facts.task == ("score" if num_labels == 1 else "classify")
        outputs = llm.classify(TEXTS)
        numbers = llm.encode(TEXTS, pooling_task="classify")
        assert [each.outputs.data for each in llm.encode(TEXTS)] == [each.outputs.data for each in numbers]
        with pytest.raises(RequestError, match="this one's task is"):
            llm.encode(TEXTS, pooling_task="embed")
        with pytest.raises(RequestError, match="pooling_task must be one of embed, classify, score"):
            llm.encode(TEXTS, pooling_task="token_embed")
    np.testing.assert_allclose([each.outputs.probs for each in outputs], torch.stack(wanted).numpy(), atol=1e-5)
    np.testing.assert_allclose([each.outputs.data for each in numbers], torch.stack(wanted).numpy(), atol=1e-5)
    assert [each.outputs.label for each in outputs] == [f"LABEL_{int(each.argmax())}" for each in wanted]


@pytest.mark.parametrize("pad_token_id", [0, 2])
def test_reward_heads_of_decoders(tmp_path: Path, pad_token_id: int) -> None:
    """The last token's number, also where the padding id is the token that ends every text."""
    model = save(tmp_path, "Qwen3ForSequenceClassification", "Qwen3Config", num_labels=1, pad_token_id=pad_token_id)
    with torch.inference_mode():
        wanted = [model.score(hidden(model, [*ids_of(text), 2])[-1]).sigmoid().tolist() for text in TEXTS]
    with LLM(str(tmp_path), device="cpu") as llm:
        np.testing.assert_allclose([each.outputs.probs for each in llm.classify(TEXTS)], wanted, atol=1e-5)


def test_cross_encoder_pairs(tmp_path: Path) -> None:
    """Segments 0 and 1 reach the model, and truncation takes from the document."""
    model = save(tmp_path, "BertForSequenceClassification", "BertConfig", num_labels=1)

    def logit(first: str, second: str) -> float:
        a, b = [1, *ids_of(first), 2], [*ids_of(second), 2]
        types = torch.tensor([[0] * len(a) + [1] * len(b)])
        with torch.inference_mode():
            return float(model(input_ids=torch.tensor([[*a, *b]]), token_type_ids=types).logits[0, 0].sigmoid())

    with LLM(str(tmp_path), device="cpu") as llm:
        got = [each.score for each in llm.score("w1 w2 w3", TEXTS[:5])]
        cut = llm.score("w1 w2 w3", "w4 w5 w6 w7 w8", truncate_prompt_tokens=8)[0].score
        with pytest.raises(RequestError, match="text_1 has 2 texts and text_2 3"):
            llm.score(["w1", "w2"], ["w1", "w2", "w3"])
    np.testing.assert_allclose(got, [logit("w1 w2 w3", text) for text in TEXTS[:5]], atol=1e-5)
    np.testing.assert_allclose(cut, logit("w1 w2 w3", "w4 w5"), atol=1e-5)


def test_yes_no_reranker(tmp_path: Path) -> None:
    model = save(tmp_path, "Qwen3ForCausalLM", "Qwen3Config")

    def tokens(text: str) -> list[int]:
        return [IDS.get(word, IDS["<unk>"]) for word in text.split()]

    def probability(query: str, document: str, instruction: str) -> float:
        asked = f"<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {document}"
        ids = [*tokens(YES_NO_HEAD), *tokens(asked), *tokens(YES_NO_TAIL)]
        with torch.inference_mode():
            last = model(input_ids=torch.tensor([ids])).logits[0, -1]
        return float(torch.stack([last[IDS["yes"]], last[IDS["no"]]]).softmax(0)[0])

    documents = [text for text in TEXTS if text]
    with LLM(str(tmp_path), device="cpu", task="score") as llm:
        got = [each.score for each in llm.score("w1 w2", documents, instruction="w9 w8")]
    np.testing.assert_allclose(got, [probability("w1 w2", each, "w9 w8") for each in documents], atol=1e-5)


def test_embedding_models_score_by_cosine(tmp_path: Path) -> None:
    save(tmp_path, "BertModel", "BertConfig")
    with LLM(str(tmp_path), device="cpu") as llm:
        rows = np.array([each.outputs.embedding for each in llm.embed(["w1", "w2 w3"])])
        scores = [each.score for each in llm.score("w1", ["w1", "w2 w3"])]
        with pytest.raises(RequestError, match="task is embed"):
            llm.classify("w1")
        with pytest.raises(RequestError, match="does not generate text"):
            llm.generate("w1")
        with pytest.raises(RequestError, match=r"prompts\[1\] has 80 tokens, the model takes at most 66"):
            llm.embed(["w1", "w1 " * 78])
        with pytest.raises(RequestError, match="not empty"):
            llm.embed([])
    np.testing.assert_allclose(scores, [1.0, rows[0] @ rows[1]], atol=1e-5)


@pytest.mark.parametrize("family", ["Roberta", "XLMRoberta", "MPNet"])
def test_positions_that_begin_after_the_padding_id(tmp_path: Path, family: str) -> None:
    """66 rows of positions hold 65 tokens with padding id 0; the longest text runs."""
    save(tmp_path, f"{family}Model", f"{family}Config")
    with LLM(str(tmp_path), device="cpu") as llm:
        longest = llm.facts.max_model_len
        padding_id = 1 if family == "MPNet" else 0
        assert longest == 66 - padding_id - 1
        assert len(llm.embed("w1 " * (longest - 2))[0].prompt_token_ids) == longest


def test_generators_stay_generators() -> None:
    """Every causal and image-text architecture of Transformers, however its name ends."""
    tables = [names for name, names in vars(modeling_auto).items() if name in GENERATORS]
    listed = [each if isinstance(each, tuple) else (each,) for table in tables for each in table.values()]
    architectures = {name for names in listed for name in names}
    assert len(architectures) > 200
    for name in architectures:
        assert task_of({"architectures": [name]}, has_modules=False) == "generate", name
    assert task_of({"architectures": ["GPT2Model"]}, has_modules=False) == "embed"
    assert task_of({"architectures": ["GPT2LMHeadModel"]}, has_modules=True) == "embed"
    assert task_of({}, has_modules=False) == "generate"


def test_what_a_checkpoint_can_not_do(tmp_path: Path) -> None:
    save(tmp_path, "BertModel", "BertConfig")
    with pytest.raises(ConfigError, match="--task classify needs a …ForSequenceClassification checkpoint"):
        LLM(str(tmp_path), device="cpu", task="classify")
    with pytest.raises(ConfigError, match="with --task embed it scores by the similarity"):
        LLM(str(tmp_path), device="cpu", task="score")
    with pytest.raises(ConfigError, match="use at most 66"):
        LLM(str(tmp_path), device="cpu", max_model_len=67)
    with pytest.raises(ConfigError, match="this model's task is embed: it has no KV cache to plan"):
        run_command(["plan", str(tmp_path)])
    (tmp_path / "modules.json").write_text(json.dumps([{"type": "x.models.CNN", "path": "1_CNN"}]))
    with pytest.raises(ModelError, match="has a CNN module, which Octavo does not run"):
        LLM(str(tmp_path), device="cpu")
    (tmp_path / "modules.json").write_text("{")
    with pytest.raises(ModelError, match="is no list of modules"):
        LLM(str(tmp_path), device="cpu")
    (tmp_path / "modules.json").unlink()
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ModelError, match="Transformers can't load it"):
        LLM(str(tmp_path), device="cpu")


def test_encoder_decoders_are_refused(tmp_path: Path) -> None:
    sizes = {"d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32}
    save(tmp_path, "BartModel", "BartConfig", **sizes, encoder_attention_heads=4, decoder_attention_heads=4)
    with pytest.raises(ModelError, match="BartModel is no text encoder or decoder that pools"):
        LLM(str(tmp_path), device="cpu")


def test_missing_head(tmp_path: Path) -> None:
    """An encoder whose config claims a head would otherwise answer with random numbers."""
    save(tmp_path, "BertModel", "BertConfig")
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "architectures": ["BertForSequenceClassification"]}))
    with pytest.raises(ModelError, match=r"the checkpoint lacks 2 tensors, such as classifier\.bias"):
        LLM(str(tmp_path), device="cpu")


def test_dummy_weights(tmp_path: Path) -> None:
    save(tmp_path, "BertModel", "BertConfig")
    (tmp_path / "model.safetensors").unlink()
    assert embed(tmp_path, device="cpu", load_format="dummy").shape == (len(TEXTS), 32)
