"""Tiny random image-text models with their processors, saved the way checkpoints are, and pictures to show them.

A case is a name of `CASES`; `saved` writes it once into a folder. The tokenizer knows bytes and the special tokens that
the case's processor wants.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from PIL import Image
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from octavo.multimodal.processor import load_processor

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
    """One family. `make` gives the config, the image processor, and the processor's own options."""

    processor: str
    make: Callable[[Any], tuple[Any, Any, dict[str, Any]]]
    placeholder: str = "<image>"
    specials: tuple[str, ...] = ("<image>",)
    names: dict[str, str] = field(default_factory=dict)
    """Attributes of the tokenizer that the processor asks for."""


def pil(family: str, name: str) -> Any:
    """An image processor's class with Pillow behind it."""
    module = import_module(f"transformers.models.{family}.image_processing_pil_{family}")
    return getattr(module, f"{name}ImageProcessorPil")


def make_tokenizer(case: Case) -> Any:
    """Bytes are tokens; specials follow."""
    vocab = {"<pad>": 0, "<s>": 1, "</s>": 2}
    vocab |= {name: i + 3 for i, name in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<pad>", "<s>", "</s>", *case.specials])
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
        extra_special_tokens=case.names,
    )


CLIP_SIZES = {"size": {"shortest_edge": 28}, "crop_size": {"height": 28, "width": 28}}
CLIP_OPTIONS = {"patch_size": 7, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}
PINPOINTS = [[28, 56], [56, 28], [56, 56]]


def llava(tokenizer: Any) -> tuple[Any, Any, dict[str, Any]]:
    config = transformers.LlavaConfig(
        vision_config=transformers.CLIPVisionConfig(**CLIP),
        text_config=transformers.LlamaConfig(**TEXT),
        image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
    )
    return config, pil("clip", "CLIP")(**CLIP_SIZES), CLIP_OPTIONS


def llava_next(tokenizer: Any) -> tuple[Any, Any, dict[str, Any]]:
    config = transformers.LlavaNextConfig(
        vision_config=transformers.CLIPVisionConfig(**CLIP),
        text_config=transformers.MistralConfig(**TEXT, sliding_window=None),
        image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
        image_grid_pinpoints=PINPOINTS,
    )
    return config, pil("llava_next", "LlavaNext")(**CLIP_SIZES, image_grid_pinpoints=PINPOINTS), CLIP_OPTIONS


SIGLIP = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 7,
}


def llava_onevision(tokenizer: Any) -> tuple[Any, Any, dict[str, Any]]:
    config = transformers.LlavaOnevisionConfig(
        vision_config=transformers.SiglipVisionConfig(**SIGLIP, vision_use_head=False),
        text_config=transformers.Qwen2Config(**TEXT),
        image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
        video_token_index=tokenizer.convert_tokens_to_ids("<video>"),
        image_grid_pinpoints=PINPOINTS,
        vision_feature_layer=-1,
        vision_aspect_ratio="anyres_max_9",
    )
    images = pil("llava_onevision", "LlavaOnevision")(size={"height": 28, "width": 28}, image_grid_pinpoints=PINPOINTS)
    return config, images, {"num_image_tokens": 16, "vision_feature_select_strategy": "full"}


QWEN_VISION = {"depth": 3, "num_heads": 2, "patch_size": 4, "spatial_merge_size": 2, "temporal_patch_size": 2}
QWEN_NEWER_VISION = {**QWEN_VISION, "hidden_size": 32, "intermediate_size": 48, "out_hidden_size": 64}
QWEN3_VISION = {**QWEN_NEWER_VISION, "num_position_embeddings": 16}
QWEN3_VL_VISION = {**QWEN3_VISION, "deepstack_visual_indexes": [0, 1]}
QWEN_ROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
QWEN_TOKENS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
QWEN_NAMES = {
    "image_token": "<|image_pad|>",
    "video_token": "<|video_pad|>",
    "vision_bos_token": "<|vision_start|>",
    "vision_eos_token": "<|vision_end|>",
}


def qwen_ids(tokenizer: Any) -> dict[str, int]:
    names = ("vision_start_token_id", "vision_end_token_id", "image_token_id", "video_token_id")
    return dict(zip(names, tokenizer.convert_tokens_to_ids(list(QWEN_TOKENS)), strict=True))


def qwen_images() -> Any:
    return pil("qwen2_vl", "Qwen2VL")(
        patch_size=4, merge_size=2, temporal_patch_size=2, size={"shortest_edge": 256, "longest_edge": 1600}
    )


def qwen2_vl(tokenizer: Any) -> tuple[Any, Any, dict[str, Any]]:
    config = transformers.Qwen2VLConfig(
        vision_config={**QWEN_VISION, "embed_dim": 32, "hidden_size": 64, "mlp_ratio": 2},
        text_config={**TEXT, "rope_parameters": QWEN_ROPE},
        **qwen_ids(tokenizer),
    )
    return config, qwen_images(), {}


def qwen2_5_vl(tokenizer: Any) -> tuple[Any, Any, dict[str, Any]]:
    config = transformers.Qwen2_5_VLConfig(
        vision_config={**QWEN_NEWER_VISION, "window_size": 16, "fullatt_block_indexes": [1]},
        text_config={**TEXT, "rope_parameters": QWEN_ROPE},
        **qwen_ids(tokenizer),
    )
    return config, qwen_images(), {}


def qwen3_vl(tokenizer: Any) -> tuple[Any, Any, dict[str, Any]]:
    config = transformers.Qwen3VLConfig(
        vision_config=QWEN3_VL_VISION,
        text_config={**TEXT, "head_dim": 16, "rope_parameters": QWEN_ROPE},
        **qwen_ids(tokenizer),
    )
    return config, qwen_images(), {}


def gemma3(tokenizer: Any) -> tuple[Any, Any, dict[str, Any]]:
    text = {key: value for key, value in TEXT.items() if key != "num_hidden_layers"}
    config = transformers.Gemma3Config(
        vision_config=transformers.SiglipVisionConfig(**SIGLIP, vision_use_head=False),
        text_config=transformers.Gemma3TextConfig(
            **text,
            num_hidden_layers=4,
            head_dim=16,
            sliding_window=10,
            query_pre_attn_scalar=16,
            layer_types=["sliding_attention", "full_attention"] * 2,
        ),
        mm_tokens_per_image=4,
        boi_token_index=tokenizer.convert_tokens_to_ids("<start_of_image>"),
        eoi_token_index=tokenizer.convert_tokens_to_ids("<end_of_image>"),
        image_token_index=tokenizer.convert_tokens_to_ids("<image_soft_token>"),
    )
    return config, pil("gemma3", "Gemma3")(size={"height": 28, "width": 28}), {"image_seq_length": 4}


def internvl(tokenizer: Any) -> tuple[Any, Any, dict[str, Any]]:
    config = transformers.InternVLConfig(
        vision_config=transformers.InternVLVisionConfig(
            **{**SIGLIP, "image_size": [28, 28], "patch_size": [7, 7]}, use_qk_norm=True
        ),
        text_config=transformers.Qwen2Config(**TEXT),
        image_token_id=tokenizer.convert_tokens_to_ids("<IMG_CONTEXT>"),
        downsample_ratio=0.5,
    )
    images = pil("got_ocr2", "GotOcr2")(
        size={"height": 28, "width": 28}, crop_to_patches=True, min_patches=1, max_patches=3
    )
    return config, images, {"image_seq_length": 4}


PIXTRAL = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 48,
    "patch_size": 4,
    "head_dim": 16,
}


def pixtral_images() -> Any:
    return pil("pixtral", "Pixtral")(size={"longest_edge": 40}, patch_size={"height": 4, "width": 4})


def pixtral(tokenizer: Any) -> tuple[Any, Any, dict[str, Any]]:
    config = transformers.LlavaConfig(
        vision_config=transformers.PixtralVisionConfig(**PIXTRAL),
        text_config=transformers.MistralConfig(**TEXT, sliding_window=None),
        image_token_index=tokenizer.convert_tokens_to_ids("[IMG]"),
        vision_feature_layer=-1,
        vision_feature_select_strategy="full",
    )
    return config, pixtral_images(), {"patch_size": 4}


def mistral3(tokenizer: Any) -> tuple[Any, Any, dict[str, Any]]:
    config = transformers.Mistral3Config(
        vision_config=transformers.PixtralVisionConfig(**PIXTRAL),
        text_config=transformers.MistralConfig(**TEXT, sliding_window=None),
        image_token_index=tokenizer.convert_tokens_to_ids("[IMG]"),
        spatial_merge_size=2,
    )
    return config, pixtral_images(), {"patch_size": 4, "spatial_merge_size": 2}


def vipllava(tokenizer: Any) -> tuple[Any, Any, dict[str, Any]]:
    config = transformers.VipLlavaConfig(
        vision_config=transformers.CLIPVisionConfig(**CLIP),
        text_config=transformers.LlamaConfig(**TEXT),
        image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
        vision_feature_layers=[-2, -1],
    )
    return config, pil("clip", "CLIP")(**CLIP_SIZES), CLIP_OPTIONS


def aya_vision(tokenizer: Any) -> tuple[Any, Any, dict[str, Any]]:
    config = transformers.AyaVisionConfig(
        vision_config=transformers.SiglipVisionConfig(**SIGLIP, vision_use_head=False),
        text_config=transformers.Cohere2Config(**TEXT, sliding_window=10, head_dim=16, layer_types=COHERE_LAYERS),
        image_token_index=tokenizer.convert_tokens_to_ids("<|IMG_PATCH|>"),
        downsample_factor=2,
        adapter_layer_norm_eps=1e-6,
    )
    images = pil("got_ocr2", "GotOcr2")(
        size={"height": 28, "width": 28}, crop_to_patches=True, min_patches=1, max_patches=3
    )
    return config, images, {"patch_size": 7, "img_size": 28, "downsample_factor": 2}


COHERE_LAYERS = ["sliding_attention", "full_attention", "sliding_attention"]
GLM_NAMES = {"image_token": "<|image|>", "video_token": "<|video|>"}
GLM_TOKENS = ("<|begin_of_image|>", "<|end_of_image|>", "<|image|>", "<|video|>")


def glm4v(tokenizer: Any) -> tuple[Any, Any, dict[str, Any]]:
    names = ("image_start_token_id", "image_end_token_id", "image_token_id", "video_token_id")
    config = transformers.Glm4vConfig(
        vision_config={
            "depth": 2,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_heads": 2,
            "out_hidden_size": 64,
            "patch_size": 4,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
            "image_size": 32,
        },
        text_config={
            **TEXT,
            "rope_parameters": {**QWEN_ROPE, "mrope_section": [2, 1, 1], "partial_rotary_factor": 0.5},
        },
        **dict(zip(names, tokenizer.convert_tokens_to_ids(list(GLM_TOKENS)), strict=True)),
    )
    images = pil("glm4v", "Glm4v")(
        patch_size=4, merge_size=2, temporal_patch_size=2, size={"shortest_edge": 256, "longest_edge": 1600}
    )
    return config, images, {}


def idefics_vision() -> dict[str, Any]:
    return {**SIGLIP, "num_channels": 3}


def idefics3(tokenizer: Any) -> tuple[Any, Any, dict[str, Any]]:
    config = transformers.Idefics3Config(
        vision_config=idefics_vision(),
        text_config=transformers.LlamaConfig(**TEXT),
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
        scale_factor=2,
        pad_token_id=0,
    )
    images = pil("idefics3", "Idefics3")(size={"longest_edge": 56}, max_image_size={"longest_edge": 28})
    return config, images, {"image_seq_len": 4}


def smolvlm(tokenizer: Any) -> tuple[Any, Any, dict[str, Any]]:
    config = transformers.SmolVLMConfig(
        vision_config=idefics_vision(),
        text_config=transformers.LlamaConfig(**TEXT),
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
        scale_factor=2,
        pad_token_id=0,
    )
    images = pil("smolvlm", "SmolVLM")(size={"longest_edge": 56}, max_image_size={"longest_edge": 28})
    return config, images, {"image_seq_len": 4}


QWEN = {"placeholder": "<|image_pad|>", "specials": QWEN_TOKENS, "names": QWEN_NAMES}
IDEFICS_TOKENS = ("<fake_token_around_image>", "<image>", "<end_of_utterance>", "<global-img>")
IDEFICS_NAMES = {
    "fake_image_token": "<fake_token_around_image>",
    "image_token": "<image>",
    "end_of_utterance_token": "<end_of_utterance>",
    "global_image_token": "<global-img>",
}

PIXTRAL_TOKENS = {"placeholder": "[IMG]", "specials": ("[IMG]", "[IMG_BREAK]", "[IMG_END]")}

AYA_TOKENS = ("<image>", "<|START_OF_IMG|>", "<|END_OF_IMG|>", "<|IMG_PATCH|>", "<|IMG_LINE_BREAK|>")

CASES: dict[str, Case] = {
    "llava": Case("LlavaProcessor", llava),
    "llava_next": Case("LlavaNextProcessor", llava_next),
    "llava_onevision": Case("LlavaOnevisionProcessor", llava_onevision, specials=("<image>", "<video>")),
    "qwen2_vl": Case("Qwen2VLProcessor", qwen2_vl, **QWEN),
    "qwen2_5_vl": Case("Qwen2_5_VLProcessor", qwen2_5_vl, **QWEN),
    "qwen3_vl": Case("Qwen3VLProcessor", qwen3_vl, **QWEN),
    "gemma3": Case(
        "Gemma3Processor",
        gemma3,
        "<start_of_image>",
        ("<start_of_image>", "<end_of_image>", "<image_soft_token>"),
        {"boi_token": "<start_of_image>", "eoi_token": "<end_of_image>", "image_token": "<image_soft_token>"},
    ),
    "internvl": Case(
        "InternVLProcessor",
        internvl,
        "<IMG_CONTEXT>",
        ("<img>", "</img>", "<IMG_CONTEXT>", "<video>"),
        {
            "start_image_token": "<img>",
            "end_image_token": "</img>",
            "context_image_token": "<IMG_CONTEXT>",
            "video_token": "<video>",
        },
    ),
    "llava-pixtral": Case("PixtralProcessor", pixtral, **PIXTRAL_TOKENS),
    "mistral3": Case("PixtralProcessor", mistral3, **PIXTRAL_TOKENS),
    "vipllava": Case("LlavaProcessor", vipllava),
    "aya_vision": Case("AyaVisionProcessor", aya_vision, specials=AYA_TOKENS),
    "glm4v": Case("Glm4vProcessor", glm4v, "<|image|>", GLM_TOKENS, GLM_NAMES),
    "idefics3": Case("Idefics3Processor", idefics3, "<image>", IDEFICS_TOKENS, IDEFICS_NAMES),
    "smolvlm": Case("SmolVLMProcessor", smolvlm, "<image>", IDEFICS_TOKENS, IDEFICS_NAMES),
}


def saved(name: str, folder: Path) -> tuple[Any, Any]:
    """(reference model, processor) of a case, written into the folder."""
    return saved_case(CASES[name], folder)


def saved_case(case: Case, folder: Path) -> tuple[Any, Any]:
    """As `saved`, of any case."""
    tokenizer = make_tokenizer(case)
    config, images, options = case.make(tokenizer)
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
    tokenizer.save_pretrained(folder)
    images.save_pretrained(folder)
    (folder / "processor_config.json").write_text(json.dumps({"processor_class": case.processor, **options}))
    (folder / "chat_template.jinja").write_text(TEMPLATE.replace("PLACEHOLDER", case.placeholder))
    processor = load_processor(folder)
    processor.chat_template = TEMPLATE.replace("PLACEHOLDER", case.placeholder)
    return model, processor


def picture(seed: int, size: tuple[int, int] = (60, 40)) -> Image.Image:
    """Noise of a width and height."""
    pixels = np.random.default_rng(seed).integers(0, 255, (size[1], size[0], 3), dtype=np.uint8)
    return Image.fromarray(pixels)
