"""Tiny random checkpoints of the kinds of models that pool: a folder each, as Transformers would save it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, pre_tokenizers, processors

WORDS = ["<pad>", "<s>", "</s>", "<unk>", "yes", "no", *(f"w{i}" for i in range(90))]
ENCODER = {
    "vocab_size": len(WORDS),
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "max_position_embeddings": 66,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
DECODER = {**ENCODER, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 256}
SPECIAL: dict[str, dict[str, Any]] = {
    "BertConfig": {"type_vocab_size": 2},
    "RobertaConfig": {"type_vocab_size": 1, "pad_token_id": 0},
    "DistilBertConfig": {"dim": 32, "hidden_dim": 64, "n_layers": 2, "n_heads": 4},
    "ModernBertConfig": {"cls_token_id": 1, "sep_token_id": 2, "local_attention": 8, "global_attn_every_n_layers": 2},
}


def save_tokenizer(folder: Path, *, is_decoder: bool) -> None:
    """Words apart by spaces; encoders get <s> … </s> (and pairs segments 0 and 1), decoders </s> at the end."""
    builder = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    builder.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    single, pair = ("$A </s>", None) if is_decoder else ("<s> $A </s>", "<s> $A </s> $B:1 </s>:1")
    builder.post_processor = processors.TemplateProcessing(
        single=single, pair=pair or single + " $B:1", special_tokens=[("<s>", 1), ("</s>", 2)]
    )
    builder.enable_truncation(5)  # what a training run left must not matter
    builder.enable_padding(length=5)
    builder.save(str(folder / "tokenizer.json"))
    names = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    (folder / "tokenizer_config.json").write_text(
        json.dumps({**names, "tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 1000})
    )


def save(folder: Path, architecture: str, config_name: str, seed: int = 0, **more: Any) -> Any:
    """Write a checkpoint and its tokenizer; the model, in fp32 and ready for inference."""
    is_decoder = config_name.startswith(("Qwen", "Llama"))
    values = {**(DECODER if is_decoder else ENCODER), **SPECIAL.get(config_name, {}), **more}
    config = getattr(transformers, config_name)(**values)
    torch.manual_seed(seed)
    model = getattr(transformers, architecture)(config).float().eval()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.2)
    model.save_pretrained(folder)
    save_tokenizer(folder, is_decoder=is_decoder)
    return model


def save_modules(folder: Path, *, pooling: dict[str, Any], dense: torch.nn.Linear | None, normalize: bool) -> None:
    """sentence-transformers' description of what follows the encoder."""
    kinds = ["Transformer", "Pooling", *(["Dense"] if dense is not None else []), *(["Normalize"] if normalize else [])]
    modules = [
        {"idx": i, "name": str(i), "path": f"{i}_{kind}" if i else "", "type": f"sentence_transformers.models.{kind}"}
        for i, kind in enumerate(kinds)
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    if dense is not None:
        (folder / "2_Dense").mkdir()
        activation = {"activation_function": "torch.nn.modules.activation.Tanh"}
        (folder / "2_Dense" / "config.json").write_text(json.dumps(activation))
        tensors = {f"linear.{name}": value.detach() for name, value in dense.named_parameters()}
        save_file(tensors, str(folder / "2_Dense" / "model.safetensors"))
