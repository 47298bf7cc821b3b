"""Text models inside image-text classes that a native family runs, and what of their configs differs from the family's.

`native_text` gives the text model as a config of its own. Not here: what surrounds it (vision_language.py), and the
families themselves. That the classes mean the same is held by tests/models/architectures/survey.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

from octavo.models.config import NormalConfig, normalize_config
from octavo.models.transformers_config import foreign_config

Turns = Literal["", "runs", "turns"]


@dataclass(frozen=True, slots=True)
class TextModel:
    """The native twin of a text model."""

    model_type: str
    architecture: str
    axes: Turns = ""
    """How angles are dealt to time, height and width: in runs, or in turns; "": positions have one dimension."""
    changes: Mapping[str, Any] = field(default_factory=dict)
    """Fields that the twin would read otherwise."""


NATIVE_TEXT: dict[str, TextModel] = {
    "llama": TextModel("llama", "LlamaForCausalLM"),
    "mistral": TextModel("mistral", "MistralForCausalLM"),
    "qwen2": TextModel("qwen2", "Qwen2ForCausalLM"),
    "qwen3": TextModel("qwen3", "Qwen3ForCausalLM"),
    "gemma3_text": TextModel("gemma3_text", "Gemma3ForCausalLM"),
    "exaone4": TextModel("exaone4", "Exaone4ForCausalLM"),
    "deepseek_v3": TextModel("deepseek_v3", "DeepseekV3ForCausalLM"),
    "cohere2": TextModel("cohere2", "Cohere2ForCausalLM", changes={"logit_scale": 1.0}),
    "llama4_text": TextModel("llama4_text", "Llama4ForCausalLM"),
    "qwen2_vl_text": TextModel("qwen2", "Qwen2ForCausalLM", "runs"),
    "qwen2_5_vl_text": TextModel("qwen2", "Qwen2ForCausalLM", "runs"),
    "qwen2_5_omni_text": TextModel("qwen2", "Qwen2ForCausalLM", "runs"),
    "qwen3_vl_text": TextModel("qwen3", "Qwen3ForCausalLM", "turns"),
    "qwen3_vl_moe_text": TextModel("qwen3_moe", "Qwen3MoeForCausalLM", "turns", {"norm_topk_prob": True}),
    "qwen3_omni_moe_text": TextModel("qwen3_moe", "Qwen3MoeForCausalLM", "turns"),
    "qwen3_5_text": TextModel("qwen3_5_text", "Qwen3_5ForCausalLM", "turns"),
    "qwen3_5_moe_text": TextModel("qwen3_5_moe_text", "Qwen3_5MoeForCausalLM", "turns"),
    "qwen3_next": TextModel("qwen3_next", "Qwen3NextForCausalLM"),
    "bamba": TextModel("bamba", "BambaForCausalLM"),
    "granitemoehybrid": TextModel("granitemoehybrid", "GraniteMoeHybridForCausalLM"),
    "glm4v_text": TextModel("glm4", "Glm4ForCausalLM", "runs", {"attention_bias": True}),
    "glm_ocr_text": TextModel("glm4", "Glm4ForCausalLM", "runs", {"attention_bias": False}),
    "glm4v_moe_text": TextModel("glm4_moe", "Glm4MoeForCausalLM", "runs"),
}
"""`model_type` of an image-text model's text config -> its twin. Of Command R's kin, only classes of text models scale
logits."""

DEFAULT_SECTIONS = {"runs": (16, 24, 24), "turns": (24, 20, 20)}
"""Of a config without `mrope_section`."""


def native_text(raw: Mapping[str, Any]) -> NormalConfig | None:
    """The text model of an image-text model, as a config of its own; None where no native family is known to run it."""
    if raw.get("model_type") not in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES:
        return None
    whole = foreign_config(raw)
    part = whole.get_text_config(decoder=True)
    twin = NATIVE_TEXT.get(part.model_type)
    if part is whole or twin is None:
        return None
    text = {**part.to_dict(), **twin.changes, "model_type": twin.model_type, "architectures": [twin.architecture]}
    text["tie_word_embeddings"] = bool(getattr(whole, "tie_word_embeddings", False))
    text.setdefault("partial_rotary_factor", 1.0)
    if text.get("head_dim") is None:
        text["head_dim"] = text["hidden_size"] // text["num_attention_heads"]
    config = normalize_config(text)
    if not twin.axes:
        return config
    num_angles = int(config.head_dim * config.rope.partial_rotary_factor) // 2
    sections = (part.rope_parameters or {}).get("mrope_section") or DEFAULT_SECTIONS[twin.axes]
    axes = angle_axes(twin.axes, sections, num_angles)
    return None if axes is None else replace(config, rope=replace(config.rope, axes=axes))


def angle_axes(how: Turns, sections: Sequence[int], num_angles: int) -> tuple[int, ...] | None:
    """`RotarySpec.axes` of so many angles, of which time, height and width have `sections`: in runs one after the other
    (more than three begin again with time), or in turns as long as height's and width's last, and time has the rest.
    None where the numbers don't say it of every angle."""
    if how == "runs":
        axes = [i % 3 for i, count in enumerate(sections) for _ in range(count)]
        return tuple(axes) if len(axes) == num_angles else None
    if len(sections) != 3:
        return None
    return tuple(i % 3 if i < 3 * sections[i % 3] else 0 for i in range(num_angles))
