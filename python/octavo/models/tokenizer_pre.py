"""What `tokenizer.ggml.pre` names: how a byte-level BPE tokenizer cuts text before merging, in tokenizer.json's terms.

Facts of the models' own tokenizer.json files; for "default" (converted without a name), of the format's reader. A name
that is not here is refused: a wrong cut is silently worse text.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

Json = dict[str, Any]

CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
TAIL = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
GPT4_DIGITS = rf"{CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{TAIL}"
GPT4_DIGIT = rf"{CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{TAIL}"
MARKS_DIGIT = (
    rf"{CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
CASED_TAIL = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def _cased(suffix: str, digits: str) -> str:
    """Words cut where lower case turns to upper case (GPT-4o and its kin)."""
    lead = r"[^\r\n\p{L}\p{N}]?"
    return f"{lead}{UPPER}*{LOWER}+{suffix}|{lead}{UPPER}+{LOWER}*{suffix}|{digits}|{CASED_TAIL}"


GPT4O = _cased(CONTRACTION + "?", r"\p{N}{1,3}")
TEKKEN = _cased("", r"\p{N}")
BAILING = r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"
SEED_CODER = (
    rf"{CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+"
)
DEEPSEEK3 = (
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*"""
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
DEEPSEEK_LETTERS = (
    "A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚḀ-ἕἘ-Ἕἠ-ὅὈ-Ὅὐ-ὗὙὛὝὟ-ώᾀ-ᾴᾶ-ᾼιῂ-ῄῆ-ῌῐ-ΐῖ-Ίῠ-Ῥῲ-ῴῶ-ῼ"
    "ℂℇℊ-ℓℕℙ-ℝℤΩℨK-ℭℯ-ℴℹℼ-ℿⅅ-ⅉⅎↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-ꞎꭰ-ꮿﬀ-ﬆﬓ-ﬗＡ-Ｚａ-ｚ𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃"
)
BLOOM = r" ?[^(\s|.,!?…。，、।۔،)]+"


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """`steps` are applied one after the other, each cutting the pieces of the one before.

    `ignore_merges`: a piece that is a whole vocabulary entry is taken as it is. `add_bos` is the default where the file
    has no flag. `nfc`: text is brought to composed form first.
    """

    steps: tuple[Json, ...]
    ignore_merges: bool = False
    add_bos: bool = False
    nfc: bool = False


def _split(pattern: str) -> Json:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


def _byte_level(use_regex: bool) -> Json:
    """Bytes to printable characters; `use_regex` cuts by GPT-2's pattern first."""
    return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": use_regex}


BYTES = _byte_level(False)
GPT2 = _byte_level(True)
ONE_DIGIT: Json = {"type": "Digits", "individual_digits": True}
DIGIT_RUN: Json = {"type": "Digits", "individual_digits": False}

_GPT2 = PreTokenizer((GPT2,))
_NEOX = PreTokenizer((GPT2,), nfc=True)
_DIGITS_GPT2 = PreTokenizer((ONE_DIGIT, GPT2))
_LLAMA3 = PreTokenizer((_split(GPT4_DIGITS), BYTES), ignore_merges=True, add_bos=True)
_GPT4 = PreTokenizer((_split(GPT4_DIGITS), BYTES))
_QWEN2 = PreTokenizer((_split(GPT4_DIGIT), BYTES), nfc=True)
_GPT4O = PreTokenizer((_split(GPT4O), BYTES))
_BLOOM = PreTokenizer((_split(BLOOM), BYTES))
_BAILING = PreTokenizer((_split(BAILING), BYTES))
_DEEPSEEK3 = PreTokenizer((_split(r"\p{N}{1,3}"), _split("[一-龥぀-ゟ゠-ヿ]+"), _split(DEEPSEEK3), BYTES))
_FALCON = PreTokenizer(
    ({"type": "Punctuation", "behavior": "Contiguous"}, GPT2, DIGIT_RUN, _split("[0-9][0-9][0-9]")),
)
_DEFAULT = PreTokenizer(
    (
        _split(r"[\p{P}\$\+<=>\^~\|]+"),
        _split(r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"),
        _split(r"\p{N}+"),
        _split("[0-9][0-9][0-9]"),
        BYTES,
    )
)
_DEEPSEEK_LLM = PreTokenizer(
    (
        _split("[\r\n]"),
        _split(rf"\s?[{DEEPSEEK_LETTERS}]+"),
        _split(r"\s?[!-/:-~！-／：-～‘-‟　-。]+"),
        _split(r"\s+$"),
        _split("[一-龥ࠀ-一가-퟿]+"),
        ONE_DIGIT,
        BYTES,
    )
)
_DEEPSEEK_CODER = PreTokenizer(
    (
        _split("[\r\n]"),
        _split(r"\s?\p{L}+"),
        _split(r"\s?\p{P}+"),
        _split("[一-龥ࠀ-一가-퟿]+"),
        ONE_DIGIT,
        BYTES,
    )
)

PRE_TOKENIZERS: dict[str, PreTokenizer] = {
    "default": _DEFAULT,
    **dict.fromkeys(("gpt-2", "phi-2", "jais", "trillion", "granite-docling", "gigachat", "exaone4", "mellum"), _GPT2),
    **dict.fromkeys(("mpt", "olmo"), _NEOX),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"), _DIGITS_GPT2),
    **dict.fromkeys(
        ("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2"), _LLAMA3
    ),
    **dict.fromkeys(("dbrx", "smaug-bpe", "chatglm-bpe", "glm4"), _GPT4),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "megrez", "stablelm2"), _QWEN2),
    **dict.fromkeys(("hunyuan", "solar-open", "grok-2"), PreTokenizer((_split(GPT4_DIGIT), BYTES))),
    "qwen35": PreTokenizer((_split(MARKS_DIGIT), BYTES), nfc=True),
    **dict.fromkeys(("gpt-4o", "llama4", "kanana2", "minimax-m2"), _GPT4O),
    "tekken": PreTokenizer((_split(TEKKEN), BYTES), ignore_merges=True, add_bos=True),
    **dict.fromkeys(("deepseek-v3", "hunyuan-dense", "joyai-llm"), _DEEPSEEK3),
    "deepseek-llm": _DEEPSEEK_LLM,
    "deepseek-coder": _DEEPSEEK_CODER,
    "falcon": _FALCON,
    **dict.fromkeys(("bloom", "poro-chat", "gpt3-finnish"), _BLOOM),
    "viking": PreTokenizer((_split(BLOOM), ONE_DIGIT, BYTES)),
    **dict.fromkeys(("bailingmoe", "bailingmoe2", "llada-moe"), _BAILING),
    "seed-coder": PreTokenizer((_split(SEED_CODER), BYTES)),
}
"""Name in the file -> how text is cut."""
