"""`--trust-remote-code`: Python that a checkpoint brings along, of which its config and model classes are run.

Only models that neither Octavo nor the installed Transformers has code for need theirs; the classes that config.json's
`auto_map` names are made known to Transformers, and run row by row like its own (transformers_rows.py). A tokenizer's
or processor's own code is never run.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from octavo.errors import ModelError
from octavo.models.config import architecture_of
from octavo.models.native import NATIVE

FLAG = "--trust-remote-code"
NEEDED = ("AutoConfig", "AutoModelForCausalLM")

logger = logging.getLogger(__name__)
_known: set[str] = set()
"""Model types whose classes were brought by a checkpoint."""


def is_own(raw: Mapping[str, Any]) -> bool:
    """The classes of a config.json are the checkpoint's."""
    return str(raw.get("model_type")) in _known


def trust(folder: Path, raw: Mapping[str, Any]) -> None:
    """Import the classes of a model that nobody else has code for; a line in the log says which.

    ModelError: `auto_map` names no class for text, one of another repository, or one that can't be imported.
    """
    import transformers  # seconds
    from transformers.dynamic_module_utils import get_class_from_dynamic_module

    model_type = str(raw.get("model_type", ""))
    is_known = model_type in transformers.CONFIG_MAPPING and model_type not in _known
    if "auto_map" not in raw or architecture_of(raw) in NATIVE or is_known:
        return
    references = _references(raw)
    logger.warning("%s: runs %s of %s", FLAG, " and ".join(references), folder)
    try:
        config_class, model_class = (get_class_from_dynamic_module(each, str(folder)) for each in references)
        config_class.model_type = model_type
        model_class.config_class = config_class
        transformers.AutoConfig.register(model_type, config_class, exist_ok=True)
        transformers.AutoModelForCausalLM.register(config_class, model_class, exist_ok=True)
    except Exception as error:  # foreign code, any error means the same
        raise ModelError(f"{FLAG}: the code of {folder} fails: {type(error).__name__}: {error}") from error
    _known.add(model_type)


def _references(raw: Mapping[str, Any]) -> list[str]:
    """What `auto_map` says of config and model: "file.Class" each."""
    places = raw["auto_map"] if isinstance(raw["auto_map"], dict) else {}
    found = [places.get(name) for name in NEEDED]
    for name, reference in zip(NEEDED, found, strict=True):
        if not isinstance(reference, str):
            raise ModelError(f"{FLAG}: auto_map in config.json names no {name}: this model does not generate text")
        if "--" in reference:
            raise ModelError(f"{FLAG}: {reference} (auto_map in config.json) is code of another repository; not run")
    return [str(reference) for reference in found]
