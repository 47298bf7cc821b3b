"""Tiny random image-text models with their processors, saved the way checkpoints are, and pictures to show them.

A case is a name of `CASES`; `saved` writes it once into a folder. The tokenizer knows bytes and the special tokens that
the case's processor wants.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from PIL import Image
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
TEXT = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "vocab_size": 320,
    **TOKENS,
}
CLIP = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 7,
    "projection_dim": 32,
}
TEMPLATE = (
    "{% for message in messages %}<{{ message.role }}>"
    "{% if message.content is string %}{{ message.content }}{% else %}"
    "{% for part in message.content %}"
    "{% if part.type == 'image' %}PLACEHOLDER{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}\n"
    "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)


@dataclass(frozen=True)
class Case:
    """One family. `make` gives (config, processor) for a tokenizer with `specials`."""

    make: Callable[[Any], tuple[Any, Any]]
    specials: tuple[str, ...]
    placeholder: str
    tokenizer_names: dict[str, str] = field(default_factory=dict)


def make_tokenizer(case: Case) -> Any:
    """Bytes are tokens; specials follow."""
    names = [c for _, c in sorted((ord(c), c) for c in pre_tokenizers.ByteLevel.alphabet())]
    vocab = {"<pad>": 0, "<s>": 1, "</s>": 2} | {name: i + 3 for i, name in enumerate(names)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<pad>", "<s>", "</s>", *case.specials])
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
        extra_special_tokens=case.tokenizer_names,
    )


def llava(tokenizer: Any, text: Any = None) -> tuple[Any, Any]:
    config = transformers.LlavaConfig(
        vision_config=transformers.CLIPVisionConfig(**CLIP),
        text_config=text or transformers.LlamaConfig(**TEXT),
        image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
    )
    processor = transformers.LlavaProcessor(
        image_processor=CLIPImageProcessorPil(size={"shortest_edge": 28}, crop_size={"height": 28, "width": 28}),
        tokenizer=tokenizer,
        patch_size=7,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
    )
    return config, processor


CASES: dict[str, Case] = {
    "llava": Case(llava, ("<image>",), "<image>"),
}


def saved(name: str, folder: Path) -> tuple[Any, Any]:
    """(reference model, processor) of a case, written into the folder."""
    case = CASES[name]
    config, processor = case.make(make_tokenizer(case))
    processor.chat_template = TEMPLATE.replace("PLACEHOLDER", case.placeholder)
    torch.manual_seed(0)
    model_class = transformers.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING[type(config)]
    model = model_class._from_config(config, attn_implementation="eager", dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.2 * torch.randn_like(parameter))
            else:
                parameter.normal_(0.0, 0.15)
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    return model, processor


def picture(seed: int, size: tuple[int, int] = (60, 40)) -> Image.Image:
    """Noise of a width and height."""
    pixels = np.random.default_rng(seed).integers(0, 255, (size[1], size[0], 3), dtype=np.uint8)
    return Image.fromarray(pixels)
