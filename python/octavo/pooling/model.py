"""A pooling model in torch: a Transformers class, and what follows it. One call a batch.

Shapes: b texts, s positions of the longest, n numbers a text. Not here: batches (runner.py) and files (recipe.py).
"""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

from octavo.errors import ModelError
from octavo.models.transformers_config import with_own_kernels
from octavo.pooling.heads import EmbeddingHead, last_token, num_positions
from octavo.pooling.recipe import Recipe
from octavo.protocol import PoolingFacts

YES, NO = "yes", "no"
AUTO_CLASSES = {
    "embed": transformers.AutoModel,
    "classify": transformers.AutoModelForSequenceClassification,
    "score": transformers.AutoModelForSequenceClassification,
}


class PoolingModel:
    """`forward` gives one row of numbers a text."""

    def __init__(
        self, recipe: Recipe, folder: Path, *, device: str, dtype: torch.dtype, dummy_seed: int | None
    ) -> None:
        self._is_question = recipe.task == "score" and recipe.is_causal
        auto = transformers.AutoModelForCausalLM if self._is_question else AUTO_CLASSES[recipe.task]
        self._model = _load(auto, folder, dtype, dummy_seed).to(device).eval()
        config: Any = self._model.config
        if config.is_encoder_decoder or not hasattr(config, "hidden_size"):
            raise ModelError(f"{folder}: {recipe.architecture} is no text encoder or decoder that pools")
        self._base = self._model.base_model
        self._takes_types = (
            getattr(config, "type_vocab_size", 0) > 1
            and "token_type_ids" in inspect.signature(self._model.forward).parameters
        )
        self.vocab_size = int(config.vocab_size)
        self.max_length = num_positions(self._model, int(getattr(config, "max_position_embeddings", 512)))
        self._embed = EmbeddingHead(recipe, int(config.hidden_size), device) if recipe.task == "embed" else None
        self._answers = _answer_ids(folder) if self._is_question else (0, 0)
        self.facts = self._facts(config)

    def _facts(self, config: Any) -> PoolingFacts:
        if self._embed is not None:
            return PoolingFacts(self._embed.num_outputs)
        if self._is_question:
            return PoolingFacts(1, (YES,), "sigmoid", "yes_no")
        labels = tuple(str(config.id2label[i]) for i in range(config.num_labels))
        return PoolingFacts(len(labels), labels, _activation(config))

    @torch.inference_mode()
    def forward(self, ids_bs: Tensor, mask_bs: Tensor, types_bs: Tensor | None) -> Tensor:
        """[b, n] in fp32: embeddings, or logits of the labels."""
        inputs: dict[str, Any] = {"input_ids": ids_bs, "attention_mask": mask_bs}
        if self._takes_types and types_bs is not None:
            inputs["token_type_ids"] = types_bs
        if self._embed is not None:
            embedded: Tensor = self._embed(self._hidden(inputs), mask_bs)
            return embedded
        if self._is_question:
            last_bh = last_token(self._hidden(inputs), mask_bs)
            logits_bv = self._model.get_output_embeddings()(last_bh).float()
            yes, no = self._answers
            return torch.as_tensor(logits_bv[:, yes] - logits_bv[:, no]).unsqueeze(1)
        if hasattr(self._model, "score"):  # a decoder's head: Transformers finds the last token by the padding id
            return torch.as_tensor(self._model.score(last_token(self._hidden(inputs), mask_bs))).float()
        return torch.as_tensor(self._model(**inputs).logits).float()

    def _hidden(self, inputs: dict[str, Any]) -> Tensor:
        """[b, s, h]"""
        if "use_cache" in inspect.signature(self._base.forward).parameters:
            inputs["use_cache"] = False
        return torch.as_tensor(self._base(**inputs).last_hidden_state)


def _load(auto: Any, folder: Path, dtype: torch.dtype, dummy_seed: int | None) -> Any:
    transformers.utils.logging.disable_progress_bar()  # Octavo shows its own, and reports what is missing below
    transformers.utils.logging.set_verbosity_error()
    reading: dict[str, Any] = {"use_safetensors": True, "output_loading_info": True}
    try:
        config = with_own_kernels(transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False))
        if dummy_seed is not None:
            torch.manual_seed(dummy_seed)
            return auto.from_config(config, dtype=dtype, trust_remote_code=False)
        model, info = auto.from_pretrained(folder, config=config, dtype=dtype, trust_remote_code=False, **reading)
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        if "trust_remote_code" in str(error):
            raise ModelError(f"{folder}: comes with its own code (auto_map), which Octavo does not run") from None
        raise ModelError(f"{folder}: Transformers can't load it: {' '.join(str(error).split())[:300]}") from None
    missing = sorted(name for name in info["missing_keys"] if "pooler" not in name)
    if missing:
        raise ModelError(f"{folder}: the checkpoint lacks {len(missing)} tensors, such as {missing[0]}")
    return model


def _answer_ids(folder: Path) -> tuple[int, int]:
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    ids = [tokenizer.encode(word, add_special_tokens=False) for word in (YES, NO)]
    if any(len(each) != 1 for each in ids):
        raise ModelError(f"{folder}: --task score with a generator needs single tokens for {YES!r} and {NO!r}")
    return ids[0][0], ids[1][0]


def _activation(config: Any) -> str:
    """What turns logits into scores; sentence-transformers writes its own choice into the config."""
    own = getattr(config, "sentence_transformers", None) or {}
    named = str(own.get("activation_fn") or getattr(config, "sbert_ce_default_activation_function", None) or "")
    for ending, name in {"Identity": "none", "Sigmoid": "sigmoid", "Softmax": "softmax"}.items():
        if named.endswith(ending):
            return name
    if config.problem_type == "regression":
        return "none"
    many = config.num_labels > 1 and config.problem_type != "multi_label_classification"
    return "softmax" if many else "sigmoid"
