"""Families of image-text models whose images were compared with Transformers (tests/multimodal/test_image_models.py).
Others are tried out when they are loaded (image_trial.py). No imports: who asks may want to load nothing.
"""

from __future__ import annotations

IMAGE_FAMILIES: dict[str, bool] = {
    "aya_vision": False,
    "gemma3": True,
    "glm4v": False,
    "idefics3": False,
    "internvl": False,
    "llava": False,
    "llava_next": False,
    "llava_onevision": False,
    "mistral3": False,
    "qwen2_5_vl": False,
    "qwen2_vl": False,
    "qwen3_vl": False,
    "smolvlm": False,
    "vipllava": False,
}
"""`model_type` of config.json -> whether the tokens of an image attend to each other in both directions."""
