"""The tokenizer inside a .gguf file, rebuilt as tokenizer.json, tokenizer_config.json and chat_template.jinja.

Byte-level BPE, SentencePiece BPE (merges are recovered from the pieces' scores) and SentencePiece unigram, kept in the
cache. Not here: how byte-level text is cut before merging (tokenizer_pre.py). Transformers is not imported.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from octavo.errors import ModelError
from octavo.models import tokenizer_folder
from octavo.models.gguf_file import GGUFFile
from octavo.models.tokenizer_pre import PRE_TOKENIZERS, Json

FORMAT = 1
"""Part of the cache key: raise it when the same file must be rebuilt differently."""

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
"""Token types of the format."""

SPACE = "▁"
"""SentencePiece writes a blank so."""

NEVER_MATCHED = -1e6
"""Score of unigram pieces that stand for bytes: text that spells one out must not become it."""

USER_DEFINED_SCORE = -0.1
"""SentencePiece's constant, whatever the file says: better than any log probability, and few pieces beat many."""

ROLES = ("bos", "eos", "unk", "pad")
ROLE_KEYS = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """Pieces by id, their types and scores, and the ids of bos, eos, unk and pad where the file names them."""

    path: Path
    meta: dict[str, Any]
    tokens: list[str]
    types: list[int]
    scores: list[float]
    roles: dict[str, int]

    def flag(self, name: str, default: bool) -> bool:
        return bool(self.meta.get(f"tokenizer.ggml.{name}", default))

    def has_bytes(self) -> bool:
        """Whether every byte has a piece, so that nothing is unknown."""
        return self.types.count(BYTE) == 256


@dataclass(frozen=True, slots=True)
class Kind:
    """What a `tokenizer.ggml.model` builds, which types of tokens come before it, and defaults of absent flags."""

    build: Callable[[Vocabulary], Json]
    added: tuple[int, ...]
    add_bos: Callable[[Vocabulary], bool]
    add_eos: bool = False


def build_folder(file: GGUFFile) -> Path | None:
    """The cached tokenizer folder of a file, built at the first call; None for a file without a tokenizer.

    ModelError: an unknown tokenizer model or pre-tokenizer (named), or a vocabulary that contradicts itself.
    """
    model = file.metadata.get("tokenizer.ggml.model", "none")
    if model in ("none", "no_vocab"):
        return None
    if model not in KINDS:
        raise ModelError(
            f"{file.path}: tokenizer.ggml.model {model!r} is not one of {', '.join(KINDS)}; "
            "give the original tokenizer with --tokenizer"
        )
    digest = hashlib.blake2b(file.header, digest_size=16, salt=FORMAT.to_bytes(4, "little")).hexdigest()
    return tokenizer_folder.cached(f"{file.path.stem}-{digest}", lambda folder: _write(file, KINDS[model], folder))


def _write(file: GGUFFile, kind: Kind, folder: Path) -> None:
    vocabulary = read_vocabulary(file)
    add_bos = vocabulary.flag("add_bos_token", kind.add_bos(vocabulary)) and "bos" in vocabulary.roles
    add_eos = vocabulary.flag("add_eos_token", kind.add_eos) and "eos" in vocabulary.roles
    tokenizer: Json = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": _added_tokens(vocabulary, kind.added),
        **kind.build(vocabulary),
        "post_processor": _post_processor(vocabulary, add_bos, add_eos),
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer, ensure_ascii=False), encoding="utf-8")
    config: Json = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": add_bos,
        "add_eos_token": add_eos,
        "clean_up_tokenization_spaces": False,
        **{f"{role}_token": vocabulary.tokens[i] for role, i in vocabulary.roles.items()},
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, ensure_ascii=False, indent=1), encoding="utf-8")
    template = file.metadata.get("tokenizer.chat_template")
    if template:
        (folder / "chat_template.jinja").write_text(template, encoding="utf-8")


def read_vocabulary(file: GGUFFile) -> Vocabulary:
    """The file's vocabulary. ModelError: missing or of odd length, a piece twice, an id out of range."""
    meta, path = file.metadata, file.path
    tokens = meta.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, list) or not tokens or not isinstance(tokens[0], str):
        raise ModelError(f"{path}: tokenizer.ggml.tokens is missing")
    types = meta.get("tokenizer.ggml.token_type") or [NORMAL] * len(tokens)
    scores = meta.get("tokenizer.ggml.scores") or [0.0] * len(tokens)
    if not len(tokens) == len(types) == len(scores):
        raise ModelError(f"{path}: tokenizer.ggml.tokens, token_type and scores have different lengths")
    if len(set(tokens)) != len(tokens):
        twice = next(t for t in tokens if tokens.count(t) > 1)
        raise ModelError(f"{path}: tokenizer.ggml.tokens has {twice!r} twice")
    roles = {}
    for role, key in ROLE_KEYS.items():
        token_id = meta.get(f"tokenizer.ggml.{key}_token_id")
        if token_id is None:
            continue
        if not 0 <= token_id < len(tokens):
            raise ModelError(f"{path}: tokenizer.ggml.{key}_token_id {token_id} is not in the vocabulary")
        roles[role] = token_id
    return Vocabulary(path, meta, tokens, types, scores, roles)


def _added_tokens(vocabulary: Vocabulary, kinds: tuple[int, ...]) -> list[Json]:
    """Tokens of these types, found in text before anything else: user-defined ones are text, others are special."""
    out = []
    for token_id, (token, kind) in enumerate(zip(vocabulary.tokens, vocabulary.types, strict=True)):
        if kind in kinds:
            flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
            out.append({"id": token_id, "content": token, **flags, "special": kind != USER_DEFINED})
    return out


def _post_processor(vocabulary: Vocabulary, add_bos: bool, add_eos: bool) -> Json | None:
    """BOS in front and EOS behind, where the flags say so."""
    single: list[Json] = [{"Sequence": {"id": "A", "type_id": 0}}]
    pair: list[Json] = [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}]
    special = {}
    for role, wanted, at in (("bos", add_bos, 0), ("eos", add_eos, 99)):
        if wanted:
            token_id = vocabulary.roles[role]
            token = vocabulary.tokens[token_id]
            special[token] = {"id": token, "ids": [token_id], "tokens": [token]}
            for template in (single, pair):
                template.insert(at, {"SpecialToken": {"id": token, "type_id": 0}})
    if not special:
        return None
    return {"type": "TemplateProcessing", "single": single, "pair": pair, "special_tokens": special}


def _bpe_model(vocabulary: Vocabulary, merges: list[list[str]], **fields: Any) -> Json:
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": False,
        **fields,
        "vocab": {token: i for i, token in enumerate(vocabulary.tokens)},
        "merges": merges,
    }


def _byte_level(vocabulary: Vocabulary) -> Json:
    pre = _pre_tokenizer(vocabulary)
    return {
        "normalizer": {"type": "NFC"} if pre.nfc else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": list(pre.steps)},
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": _bpe_model(vocabulary, _listed_merges(vocabulary), ignore_merges=pre.ignore_merges),
    }


def _listed_merges(vocabulary: Vocabulary) -> list[list[str]]:
    """The file's list of merges, each checked to join two tokens into a third."""
    merges = vocabulary.meta.get("tokenizer.ggml.merges")
    if not isinstance(merges, list):
        raise ModelError(f"{vocabulary.path}: tokenizer.ggml.merges is missing")
    pairs = [merge.split(" ") for merge in merges]
    known = set(vocabulary.tokens)
    for pair in pairs:
        if len(pair) != 2 or pair[0] not in known or pair[1] not in known or pair[0] + pair[1] not in known:
            raise ModelError(f"{vocabulary.path}: tokenizer.ggml.merges has {' '.join(pair)!r}, which is no merge")
    return pairs


def _pre_tokenizer(vocabulary: Vocabulary) -> Any:
    name = vocabulary.meta.get("tokenizer.ggml.pre", "default")
    if name not in PRE_TOKENIZERS:
        raise ModelError(
            f"{vocabulary.path}: the pre-tokenizer {name!r} (tokenizer.ggml.pre) is not known to this version; "
            "give the original tokenizer with --tokenizer"
        )
    return PRE_TOKENIZERS[name]


def _sentencepiece_bpe(vocabulary: Vocabulary) -> Json:
    unk = vocabulary.roles.get("unk")
    listed = "tokenizer.ggml.merges" in vocabulary.meta
    model = _bpe_model(
        vocabulary,
        _listed_merges(vocabulary) if listed else merges_of_scores(vocabulary),
        unk_token=None if unk is None else vocabulary.tokens[unk],
        fuse_unk=True,
        byte_fallback=vocabulary.has_bytes(),
        ignore_merges=USER_DEFINED in vocabulary.types,
    )
    prefix = vocabulary.flag("add_space_prefix", True)
    return {
        "normalizer": _normalizer(vocabulary, prefix),
        "pre_tokenizer": _user_defined(vocabulary),
        "decoder": _decoder(prefix),
        "model": model,
    }


def _user_defined(vocabulary: Vocabulary) -> Json | None:
    """Cuts normalized text at user-defined pieces, the longest first, as SentencePiece's BPE does.

    Added tokens would not do: they are found in raw text (without U+2581), and text after one gets a blank in front.
    The model takes a cut-out piece whole (`ignore_merges`).
    """
    pieces = [t for t, kind in zip(vocabulary.tokens, vocabulary.types, strict=True) if kind == USER_DEFINED]
    if not pieces:
        return None
    pattern = "|".join(re.escape(piece) for piece in sorted(pieces, key=len, reverse=True))
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


def merges_of_scores(vocabulary: Vocabulary) -> list[list[str]]:
    """The merges that SentencePiece's scores imply: every way to cut a piece into two pieces, best score first.

    Equal scores: the longer left part first, which is the leftmost in a run of one character. ModelError: the scores
    are a placeholder, as some converters write.
    """
    mergeable = {
        token: score
        for token, kind, score in zip(vocabulary.tokens, vocabulary.types, vocabulary.scores, strict=True)
        if kind in (NORMAL, USER_DEFINED)
    }
    if len(mergeable) > 1 and len(set(mergeable.values())) == 1:
        raise ModelError(
            f"{vocabulary.path}: tokenizer.ggml.scores are all equal, so they do not tell how to merge; "
            "give the original tokenizer with --tokenizer"
        )
    merges: list[tuple[float, int, str, str]] = []
    for token, score in mergeable.items():
        for cut in range(1, len(token)):
            left = token[:cut]
            if left in mergeable and token[cut:] in mergeable:
                merges.append((-score, -cut, left, token[cut:]))
    merges.sort(key=lambda merge: merge[:2])
    return [[left, right] for _, _, left, right in merges]


def _unigram(vocabulary: Vocabulary) -> Json:
    prefix = vocabulary.flag("add_space_prefix", False)
    return {
        "normalizer": _normalizer(vocabulary, prefix),
        "pre_tokenizer": None,
        "decoder": _decoder(prefix),
        "model": {
            "type": "Unigram",
            "unk_id": vocabulary.roles.get("unk"),
            "vocab": [[t, score] for t, score in zip(vocabulary.tokens, _unigram_scores(vocabulary), strict=True)],
            "byte_fallback": vocabulary.has_bytes(),
        },
    }


def _unigram_scores(vocabulary: Vocabulary) -> list[float]:
    """The pieces' scores as SentencePiece uses them; log probabilities but for user-defined and byte pieces."""
    fixed = {USER_DEFINED: USER_DEFINED_SCORE, BYTE: NEVER_MATCHED}
    return [fixed.get(kind, score) for kind, score in zip(vocabulary.types, vocabulary.scores, strict=True)]


def _normalizer(vocabulary: Vocabulary, prefix: bool) -> Json:
    """SentencePiece's: the file's character map, blanks stripped and collapsed, a blank in front, blanks as U+2581.

    The tokenizers library applies a character map to a mapped character and a combining mark after it as one, and
    loses the mark; models of the supported families have no map.
    """
    steps: list[Json] = []
    charsmap = vocabulary.meta.get("tokenizer.ggml.precompiled_charsmap")
    if charsmap:
        body = base64.b64encode(bytes(b & 0xFF for b in charsmap)).decode()
        steps.append({"type": "Precompiled", "precompiled_charsmap": body})
    if vocabulary.flag("remove_extra_whitespaces", False):
        for pattern, content in ((r"\A +| +\z", ""), (" {2,}", " ")):
            steps.append({"type": "Replace", "pattern": {"Regex": pattern}, "content": content})
    if prefix:
        steps.append({"type": "Prepend", "prepend": SPACE})
    steps.append({"type": "Replace", "pattern": {"String": " "}, "content": SPACE})
    return {"type": "Sequence", "normalizers": steps}


def _decoder(prefix: bool) -> Json:
    steps: list[Json] = [
        {"type": "Replace", "pattern": {"String": SPACE}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if prefix:
        steps.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    return {"type": "Sequence", "decoders": steps}


SPECIAL = (CONTROL, UNKNOWN)

KINDS = {
    "gpt2": Kind(_byte_level, (*SPECIAL, USER_DEFINED), add_bos=lambda v: bool(_pre_tokenizer(v).add_bos)),
    "llama": Kind(_sentencepiece_bpe, SPECIAL, add_bos=lambda v: True),
    "t5": Kind(_unigram, SPECIAL, add_bos=lambda v: False, add_eos=True),
}
"""`tokenizer.ggml.model` -> how it is rebuilt."""
