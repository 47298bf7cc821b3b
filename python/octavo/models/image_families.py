"""Families of image-text models whose images are taken; each was compared with Transformers
(tests/models/test_images.py). Other image-text models read text only. No imports: who asks may want to load nothing.
"""

from __future__ import annotations

IMAGE_FAMILIES: dict[str, bool] = {
    "llava": False,
}
"""`model_type` of config.json -> whether the tokens of an image attend to each other in both directions."""
