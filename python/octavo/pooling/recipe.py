"""What a checkpoint is for, and how its hidden states become vectors or scores: read from its files, without torch.

sentence-transformers keeps the steps after the encoder in modules.json and a folder a step (Pooling, Dense,
Normalize). Not here: running them (heads.py).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from octavo.config import ModelConfig
from octavo.errors import ConfigError, ModelError
from octavo.models.sources import locate, read_json
from octavo.protocol import Progress

CAUSAL = "ForCausalLM"
CLASSIFIER = "ForSequenceClassification"
ENCODERS = ("ForMaskedLM", "ForPreTraining", "Model")
"""Endings of architectures whose hidden states are what they are for …"""
GENERATORS = ("LMHeadModel", "MTModel", "EncoderDecoderModel")
"""… but for these, which end likewise and generate."""

MODES = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len",
    "pooling_mode_weightedmean_tokens": "weighted_mean",
    "pooling_mode_lasttoken": "last",
}
"""Flags of a Pooling module's config.json -> names of `heads.POOLERS`."""
FULL_NAMES = {
    "cls_token": "cls",
    "lasttoken": "last",
    "weightedmean": "weighted_mean",
    "mean_sqrt_len_tokens": "mean_sqrt_len",
}
IGNORED_MODULES = ("Transformer", "Dropout")


@dataclass(frozen=True, slots=True)
class Recipe:
    """One checkpoint's way from text to numbers."""

    task: str
    """"embed", "score" or "classify"."""
    architecture: str
    modes: tuple[str, ...] = ()
    """Poolings whose results are joined; embeddings only."""
    dense: tuple[Path, ...] = ()
    """Folders of the linear layers that follow, in order."""
    normalize: bool = True
    max_length: int | None = None
    """Most tokens a text that the checkpoint's author meant; None: the model's positions."""

    @property
    def is_causal(self) -> bool:
        return self.architecture.endswith(CAUSAL)


def choose_task(config: ModelConfig, progress: Progress) -> str:
    """ "generate", "embed", "score" or "classify": `--task`, or what the files say. ModelError as for any source."""
    if config.task != "auto":
        return config.task
    if not config.model:
        return "generate"
    path = locate(config, progress)
    raw = read_json(path / "config.json") if path.is_dir() else None
    return "generate" if raw is None else task_of(raw, has_modules=(path / "modules.json").is_file())


def task_of(raw_config: Mapping[str, Any], *, has_modules: bool) -> str:
    """By the architecture; a generator's architecture with sentence-transformers' modules makes embeddings."""
    architecture = _architecture(raw_config)
    if architecture.endswith(CLASSIFIER):
        return "score" if num_labels(raw_config) == 1 else "classify"
    is_encoder = architecture.endswith(ENCODERS) and not architecture.endswith(GENERATORS)
    return "embed" if has_modules or is_encoder else "generate"


def num_labels(raw_config: Mapping[str, Any]) -> int:
    """As Transformers reads it: 2 where the config says nothing."""
    return int(raw_config.get("num_labels") or len(raw_config.get("id2label") or ()) or 2)


def _architecture(raw_config: Mapping[str, Any]) -> str:
    names = raw_config.get("architectures")
    return str(names[0]) if isinstance(names, list) and names else ""


def read_recipe(task: str, pooling: str, folder: Path, raw_config: Mapping[str, Any]) -> Recipe:
    """The recipe of a folder for a task. ConfigError when the model can't do the task, ModelError for bad files."""
    architecture = _architecture(raw_config)
    if task == "classify" and not architecture.endswith(CLASSIFIER):
        raise ConfigError(f"--task classify needs a …{CLASSIFIER} checkpoint, this one is {architecture}", "task")
    if task == "score" and not architecture.endswith((CLASSIFIER, CAUSAL)):
        raise ConfigError(
            f"--task score needs a …{CLASSIFIER} or …{CAUSAL} checkpoint, this one is {architecture}; "
            "with --task embed it scores by the similarity of embeddings",
            "task",
        )
    if task == "score" and architecture.endswith(CLASSIFIER) and num_labels(raw_config) != 1:
        raise ConfigError(f"--task score: the model has {num_labels(raw_config)} labels: use --task classify", "task")
    length = (read_json(folder / "sentence_bert_config.json") or {}).get("max_seq_length")
    if task != "embed":
        return Recipe(task, architecture, max_length=length)
    return _embedder(architecture, pooling, folder, length)


def _embedder(architecture: str, pooling: str, folder: Path, length: int | None) -> Recipe:
    modes: tuple[str, ...] = ("last",) if architecture.endswith(CAUSAL) else ("mean",)
    dense: list[Path] = []
    modules = _modules(folder)
    normalize = not modules
    for kind, path in modules:
        if kind == "Pooling":
            modes = _modes(path)
        elif kind == "Dense":
            dense.append(path)
        elif kind == "Normalize":
            normalize = True
        elif kind not in IGNORED_MODULES:
            raise ModelError(f"{folder}: modules.json has a {kind} module, which Octavo does not run")
    if pooling != "auto":
        modes = (pooling,)
    return Recipe("embed", architecture, modes, tuple(dense), normalize, length)


def _modules(folder: Path) -> list[tuple[str, Path]]:
    """(class, folder) of each step of modules.json, in order; empty without the file."""
    if not (folder / "modules.json").is_file():
        return []
    try:
        listed = json.loads((folder / "modules.json").read_bytes())
        return [(str(step["type"]).rpartition(".")[2], folder / str(step["path"])) for step in listed]
    except (OSError, ValueError, KeyError, TypeError):
        raise ModelError(f"{folder / 'modules.json'}: is no list of modules") from None


def _modes(folder: Path) -> tuple[str, ...]:
    """The poolings that a Pooling module's config.json names."""
    config = read_json(folder / "config.json")
    if config is None:
        raise ModelError(f"{folder}: has no config.json: which pooling does the model use? (--pooling overrides it)")
    named = config.get("pooling_mode")
    listed = [named] if isinstance(named, str) else named if isinstance(named, list) else None
    if listed is not None:
        return tuple(FULL_NAMES.get(name, name) for name in listed)
    return tuple(mode for flag, mode in MODES.items() if config.get(flag)) or ("mean",)
