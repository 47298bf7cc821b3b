"""Images and the prefix cache (case PC-07 of the collected failures): what may share blocks does, what may not never
does; and images with several choices, preemption, and ids instead of text.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from in_process import InThisProcess
from PIL import Image
from tiny_images import picture, saved

from octavo import LLM, SamplingParams
from octavo.errors import RequestError
from octavo.multimodal import inputs
from octavo.protocol import RequestOutput

GREEDY = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
TEXT = "Look: <image> What?"
IMAGE_TOKENS = 16


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llava")
    saved("llava", folder)
    return folder


def engine(folder: Path, **options: Any) -> LLM:
    return LLM(str(folder), dtype="float32", device="cpu", cpu_threads=1, block_size=4, **options)


@pytest.fixture(scope="module")
def llms(folder: Path) -> Iterator[tuple[LLM, LLM]]:
    """(with a prefix cache, without)."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(inputs, "ImageProcessorClient", InThisProcess)
        with engine(folder) as llm, engine(folder, enable_prefix_caching=False) as fresh:
            yield llm, fresh


def ask(llm: LLM, *images: Image.Image, text: str = TEXT) -> RequestOutput:
    return llm.generate({"prompt": text, "multi_modal_data": {"image": list(images)}}, GREEDY)[0]


def tokens(output: RequestOutput) -> list[int]:
    return output.outputs[0].token_ids


def test_other_pictures_are_other_prefixes(llms: tuple[LLM, LLM]) -> None:
    llm, fresh = llms
    llm.reset_prefix_cache()
    a, b = picture(1), picture(2)
    for image, cached in ((a, 0), (b, 4), (a, 24), (b, 24)):  # "Look", and all but the last block of 28 tokens
        output = ask(llm, image)
        assert tokens(output) == tokens(ask(fresh, image))
        assert output.num_cached_tokens == cached
    assert tokens(ask(llm, a)) != tokens(ask(llm, b))


def test_sizes_and_modes_count_as_far_as_the_model_sees_them(llms: tuple[LLM, LLM]) -> None:
    llm, fresh = llms
    llm.reset_prefix_cache()
    wide = picture(3, (100, 30))
    high = Image.frombytes("RGB", (30, 100), wide.tobytes())
    palette = wide.convert("P")
    for image, is_known in ((wide, False), (high, False), (palette, False), (palette.convert("RGB"), True)):
        output = ask(llm, image)
        assert tokens(output) == tokens(ask(fresh, image))
        assert (output.num_cached_tokens >= IMAGE_TOKENS) == is_known


def test_one_picture_at_two_places(llms: tuple[LLM, LLM]) -> None:
    llm, fresh = llms
    llm.reset_prefix_cache()
    a, b, text = picture(1), picture(2), "<image>, then <image>!"
    for images in ((a, a), (a, b), (b, a), (a, a)):
        assert tokens(ask(llm, *images, text=text)) == tokens(ask(fresh, *images, text=text))


def test_ids_without_a_picture_share_nothing_with_one(llms: tuple[LLM, LLM]) -> None:
    llm, fresh = llms
    llm.reset_prefix_cache()
    token_ids = ask(llm, picture(1)).prompt_token_ids
    output = llm.generate({"prompt_token_ids": token_ids}, GREEDY)[0]
    assert output.num_cached_tokens <= 4
    assert tokens(output) == tokens(fresh.generate({"prompt_token_ids": token_ids}, GREEDY)[0])


def test_choices_of_one_prompt_see_its_picture(llms: tuple[LLM, LLM]) -> None:
    llm, fresh = llms
    expected = tokens(ask(fresh, picture(4)))
    several = SamplingParams(n=3, max_tokens=12, temperature=0.0, ignore_eos=True)
    (output,) = llm.generate({"prompt": TEXT, "multi_modal_data": {"image": picture(4)}}, several)
    assert [choice.token_ids for choice in output.outputs] == [expected] * 3


def test_pictures_survive_preemption(folder: Path, llms: tuple[LLM, LLM], monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache too small for all: sequences give their blocks up and are computed again, pictures and all."""
    _, fresh = llms
    monkeypatch.setattr(inputs, "ImageProcessorClient", InThisProcess)
    prompts = [{"prompt": TEXT, "multi_modal_data": {"image": picture(seed)}} for seed in range(6)]
    long = SamplingParams(max_tokens=30, temperature=0.0, ignore_eos=True)
    expected = [tokens(output) for output in fresh.generate(prompts, long)]
    small = {"num_gpu_blocks_override": 40, "max_model_len": 64, "enable_prefix_caching": False}
    with engine(folder, **small) as llm:
        assert [tokens(output) for output in llm.generate(prompts, long)] == expected
        stats = llm.stats()
        assert stats["num_preemptions"] > 0
        assert stats["num_free_blocks"] == stats["num_blocks"]


def test_pictures_and_places_must_agree(llms: tuple[LLM, LLM]) -> None:
    llm, _ = llms
    for text, images in (("no place", [picture(1)]), ("<image><image>", [picture(1)])):
        with pytest.raises(RequestError, match="places for"):
            ask(llm, *images, text=text)
    with pytest.raises(RequestError, match="multi_modal_data"):
        llm.generate({"prompt": TEXT, "multi_modal_data": {"video": 1}}, GREEDY)
    with pytest.raises(RequestError, match="must be a PIL image"):
        llm.generate({"prompt": TEXT, "multi_modal_data": {"image": "a.png"}}, GREEDY)
    with pytest.raises(RequestError, match="--limit-mm-per-prompt"):
        ask(llm, *[picture(1)] * 17, text="<image>" * 17)
