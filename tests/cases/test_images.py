"""PC-07: pictures are part of what a cached prefix is, by their pixels, size and mode; their placeholders are not."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from octavo import LLM, SamplingParams
from octavo.protocol import RequestOutput
from tests.multimodal.tiny_images import CASES, picture, saved

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=0)
OPTIONS: dict[str, Any] = {"dtype": "float32", "device": "cpu", "cpu_threads": 1, "block_size": 8}
MARK = CASES["llava"].placeholder
TEXT = f"What is {MARK} this?"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("llava")
    saved("llava", found)
    return found


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    with LLM(str(folder), **OPTIONS) as made:
        yield made


def ask(llm: LLM, *pictures: Image.Image, text: str = TEXT) -> RequestOutput:
    [output] = llm.generate([{"prompt": text, "multi_modal_data": {"image": list(pictures)}}], GREEDY)
    return output


def told(output: RequestOutput) -> list[tuple[int, float]]:
    """Tokens and their log probabilities."""
    one = output.outputs[0]
    assert one.logprobs is not None
    return [(token, round(row[token].logprob, 4)) for token, row in zip(one.token_ids, one.logprobs, strict=True)]


def test_pc07_pictures_do_not_share_blocks(llm: LLM) -> None:
    """Each answer is the one after an empty cache; only the same picture hits."""
    values = np.random.default_rng(7).integers(0, 255, 30 * 100 * 3, dtype=np.uint8)
    wide, high = (Image.fromarray(values.reshape(*size, 3)) for size in ((30, 100), (100, 30)))
    colours = Image.fromarray(np.random.default_rng(8).integers(0, 200, (40, 60), dtype=np.uint8), mode="P")
    colours.putpalette([(7 * i) % 256 for i in range(768)])
    asked: list[tuple[Image.Image, ...]] = [
        (picture(1),),
        (picture(2),),
        (wide,),
        (high,),
        (colours,),
        (colours.convert("L"),),
    ]
    alone = []
    for pictures in asked:
        assert llm.reset_prefix_cache()
        alone.append(told(ask(llm, *pictures)))
    assert llm.reset_prefix_cache()
    for pictures, wanted in zip(asked, alone, strict=True):
        first, again = ask(llm, *pictures), ask(llm, *pictures)
        assert told(first) == told(again) == wanted
        assert again.num_cached_tokens > first.num_cached_tokens
        assert first.num_cached_tokens <= 8, "no more than the text before the picture"


def test_pc07_one_picture_at_two_places_and_none(llm: LLM) -> None:
    twice = f"{MARK} and a long text before {MARK}"
    assert llm.reset_prefix_cache()
    wanted = told(ask(llm, picture(1), picture(1), text=twice))
    ids = ask(llm, picture(1), picture(1), text=twice).prompt_token_ids
    [plain] = llm.generate([ids], GREEDY)
    assert plain.num_cached_tokens == 0, "the same ids without a picture are another prompt"
    assert told(ask(llm, picture(1), picture(2), text=twice)) != wanted
    assert told(ask(llm, picture(1), picture(1), text=twice)) == wanted
