"""Every family of image-text models whose images are taken, as a tiny random model, against Transformers: logits of the
prompt and greedy tokens, at once, in chunks that cut images, beside other requests, and from the prefix cache.
"""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from in_process import InThisProcess
from tiny_images import CASES, picture, saved

from octavo import LLM, SamplingParams
from octavo.models.image_families import IMAGE_FAMILIES
from octavo.multimodal import inputs

NUM_NEW = 16
GREEDY = SamplingParams(max_tokens=NUM_NEW, temperature=0.0, ignore_eos=True)
TOLERANCE = 2e-3
HAS_TORCHVISION = find_spec("torchvision") is not None
"""Transformers' Pixtral processor does not load without it (`pip install octavo[vision]`)."""
TYPES = ("token_type_ids", "mm_token_type_ids")
"""What a processor says of each token; 0: text."""


class Reference:
    """What Transformers makes of a prompt with pictures."""

    def __init__(self, name: str, folder: Path) -> None:
        self.model, self.processor = saved(name, folder)
        self.placeholder = CASES[name].placeholder
        self.image_token_id = int(self.model.config.image_token_id)

    def inputs(self, text: str, pictures: list[Any]) -> Any:
        if not pictures:
            return self.processor.tokenizer(text, return_tensors="pt")
        return self.processor(text=[text], images=pictures, return_tensors="pt")

    def greedy(self, text: str, pictures: list[Any]) -> list[int]:
        """Each from the whole sequence: `generate` numbers the positions after an image that ends a prompt in its own
        way (each dimension goes on from its last), unlike the model itself."""
        inputs, new = dict(self.inputs(text, pictures)), []
        for _ in range(NUM_NEW):
            with torch.inference_mode():
                logits = self.model(**inputs, use_cache=False).logits[0, -1]
                logits[self.image_token_id] = -torch.inf
            new.append(int(logits.argmax()))
            for name, value in (("input_ids", new[-1]), ("attention_mask", 1), *((name, 0) for name in TYPES)):
                if name in inputs:
                    inputs[name] = torch.cat([inputs[name], torch.tensor([[value]])], dim=1)
        return new

    def prompt_logprobs(self, text: str, pictures: list[Any]) -> torch.Tensor:
        """Of each prompt token but the first."""
        inputs = self.inputs(text, pictures)
        with torch.inference_mode():
            logits = self.model(**inputs, use_cache=False).logits[0]
        chosen = inputs["input_ids"][0, 1:, None]
        return logits.float().log_softmax(-1)[:-1].gather(1, chosen)[:, 0]


NEED_TORCHVISION = ("llava-pixtral", "mistral3")
PARAMS = [
    pytest.param(name, marks=pytest.mark.skipif(name in NEED_TORCHVISION and not HAS_TORCHVISION, reason="torchvision"))
    for name in sorted(CASES)
]


@pytest.fixture(scope="module", params=PARAMS)
def reference(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Reference, Path]:
    folder = tmp_path_factory.mktemp(request.param)
    return Reference(request.param, folder), folder


@pytest.fixture(autouse=True)
def _no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inputs, "ImageProcessorClient", InThisProcess)


def test_every_family_is_tried() -> None:
    assert {name.split("-")[0] for name in CASES} == set(IMAGE_FAMILIES)


def test_tokens_and_logits_are_those_of_transformers(reference: tuple[Reference, Path]) -> None:
    model, folder = reference
    image = model.placeholder
    prompts: list[tuple[str, list[Any]]] = [
        (f"What is {image} this?", [picture(1)]),
        (f"What is {image} this?", [picture(2, (40, 90))]),
        (f"{image} and a long text before {image}", [picture(1), picture(3)]),
        ("no picture at all", []),
        (f"the end is {image}", [picture(4)]),
    ]
    given = [
        {"prompt": text, "multi_modal_data": {"image": pictures}} if pictures else text for text, pictures in prompts
    ]
    expected = [model.greedy(*prompt) for prompt in prompts]
    greedy = replace(GREEDY, logit_bias={model.image_token_id: -100.0})  # Transformers takes it for an image
    for options in ({"max_num_batched_tokens": 2048}, {"max_num_batched_tokens": CUT, "max_num_seqs": 3}):
        with LLM(str(folder), dtype="float32", device="cpu", cpu_threads=1, block_size=8, **options) as llm:
            alone = [llm.generate(prompt, greedy)[0].outputs[0].token_ids for prompt in given]
            assert alone == expected
            assert llm.reset_prefix_cache()
            together = llm.generate(given, greedy)
            assert [output.outputs[0].token_ids for output in together] == expected
            again = llm.generate(given, greedy)
            assert [output.outputs[0].token_ids for output in again] == expected
            assert all(output.num_cached_tokens >= 8 for output in again)
            scored = llm.generate(given[2], SamplingParams(max_tokens=1, prompt_logprobs=0))[0]
    assert scored.prompt_logprobs is not None
    found = torch.tensor([next(iter(entry.values())).logprob for entry in scored.prompt_logprobs[1:] if entry])
    assert (found - model.prompt_logprobs(*prompts[2])).abs().max() < TOLERANCE


def processed(llm: LLM, data: object) -> list[Any]:
    """What the model's processor makes of a prompt's images."""
    assert llm._images is not None
    return llm._images.process(inputs.images_of(data))


CUT = 20
"""Tokens a step: less than most prompts have."""


@pytest.mark.parametrize("name", ["qwen2_vl", "qwen3_vl", "glm4v", "llava"])
def test_images_without_text_between(name: str, tmp_path: Path) -> None:
    """Transformers takes them for one image where positions have three dimensions, and fails; here the second begins
    where the first one's positions end, as after any token."""
    Reference(name, tmp_path)
    text = "a" + 2 * CASES[name].placeholder + "b"
    prompt = {"prompt": text, "multi_modal_data": {"image": [picture(1), picture(2, (90, 40))]}}
    answers = []
    for budget in (512, CUT):
        with LLM(str(tmp_path), dtype="float32", device="cpu", cpu_threads=1, max_num_batched_tokens=budget) as llm:
            (output,) = llm.generate(prompt, GREEDY)
            answers.append(output.outputs[0].token_ids)
            encoder = llm._loop.runner._media._encoder  # type: ignore[attr-defined]
            if budget == CUT or not encoder.numbers_positions:
                continue
            ids = np.array(output.prompt_token_ids)
            place = np.flatnonzero(ids == encoder.token_id)
            tensors = [safetensors.torch.load(done.data) for done in processed(llm, prompt["multi_modal_data"])]
            count = int(tensors[0]["image_grid_thw"].prod()) // 4
            split = [place[:count], place[count:]]
            position_3p, shift = encoder.positions(ids, split, tensors)
            first, second = (position_3p[:, each] for each in split)
            assert int(second.min()) == int(first.max()) + 1
            assert int(position_3p[0, -1]) == int(second.max()) + 1
            assert int(position_3p.max()) + 1 - len(ids) == shift
    assert answers[0] == answers[1]
