"""Texts that tokenizers get wrong, and a stream of random ones."""

from __future__ import annotations

import random
from collections.abc import Iterator

NASTY = [
    "",
    " ",
    "  ",
    "\n",
    "\n\n",
    "\t",
    "\r\n",
    "a",
    "Hello, world!",
    " leading blank",
    "trailing blank ",
    "  two   three    four",
    "tab\tand\t\ttabs",
    "line\nline\n\nline\r\nline\r",
    "digits 1 12 123 1234 12345 1234567890",
    "after\n1\n 2\n  3\t4",
    "x1y22z333",
    "3.14159, 1,000,000 and 1e-5",
    "١٢٣ ४५६ Ⅷ ½ ² ①",
    "don't I'LL we've they'Re it's 'S 's' ''",
    "snake_case camelCase PascalCase SCREAMING_CASE kebab-case",
    "def f(x):\n    return x ** 2  # comment\n\n\n        y = {'a': [1, 2]}\n",
    "!!! ??? ... --- ((())) [[{}]] <> @#$%^&*~`|\\/",
    "价格是 123 元，今天天气很好。",
    "日本語のテキストとカタカナ",
    "한국어 텍스트 문장입니다",
    "Ελληνικά Русский العربية עברית हिन्दी ไทย",
    "🙂🙃 👩‍👩‍👧‍👦 🏳️‍🌈 e\u0301 n\u0303 Z͑ͫ̓ͪ̂a̐l̓g̈o",
    "caf\u00e9 cafe\u0301 \ufb01 \u212b \u00c5 A\u030a",
    "\x00\x01\x07\x1b[0m\x7f\x85\xa0\u2028\u2029\u200b\ufeff",
    "\u3000full\u3000width\uff11\uff12",
    "a" * 300,
    "ab" * 200,
    " " * 100,
    "\n" * 50,
    "1" * 64,
    "= " * 60,
    "▁ ▁▁ a▁b ▁c",
    "<0x41> <unk> <s> </s> <pad>",
    "https://example.org/a?b=c&d=1#e",
]

ALPHABETS = [
    "abc ABC 123 .,'\n",
    "aé中あ🙂 \t\n0",
    "'sStTrReEvVmMlLdD ",
    "0123456789 .,-",
    "  \n\n\t\r\u00a0\u3000x",
    "".join(chr(c) for c in (0x0301, 0x200D, 0xFE0F, 0x1F468, 0x0915, 0x094D, 0x20)),
]


def random_texts(seed: int, count: int) -> Iterator[str]:
    """`count` texts of up to 60 characters, each from one alphabet or from all of Unicode."""
    rng = random.Random(seed)
    for _ in range(count):
        length = rng.randrange(1, 60)
        if rng.random() < 0.2:
            points = (rng.randrange(1, 0x11000) for _ in range(length))
            yield "".join(chr(p) for p in points if not 0xD800 <= p < 0xE000)
        else:
            yield "".join(rng.choices(rng.choice(ALPHABETS), k=length))
