"""Image-text models that no table names: their class, processor and token are found in their files, two trial pictures
tell whether Octavo reads images as the class does, and images are refused in one line where it doesn't.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from in_process import InThisProcess
from tiny_images import (
    CASES,
    IDEFICS_NAMES,
    IDEFICS_TOKENS,
    QWEN,
    QWEN3_VISION,
    QWEN3_VL_VISION,
    QWEN_ROPE,
    SIGLIP,
    TEXT,
    Case,
    picture,
    pil,
    qwen_ids,
    qwen_images,
    saved,
    saved_case,
)

from octavo import LLM, SamplingParams
from octavo.errors import RequestError
from octavo.models import images as image_side
from octavo.models import native_text
from octavo.models.image_families import IMAGE_FAMILIES
from octavo.models.transformers_backend import TransformersModel
from octavo.multimodal import inputs

NUM_NEW = 8
ENGINE: dict[str, Any] = {"dtype": "float32", "device": "cpu", "cpu_threads": 1, "block_size": 8}


def qwen3_vl_moe(tokenizer: Any) -> tuple[Any, Any, dict[str, Any]]:
    config = transformers.Qwen3VLMoeConfig(
        vision_config=QWEN3_VL_VISION,
        text_config={
            **TEXT,
            "head_dim": 16,
            "rope_parameters": QWEN_ROPE,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
        },
        **qwen_ids(tokenizer),
    )
    return config, qwen_images(), {}


def qwen3_5(tokenizer: Any) -> tuple[Any, Any, dict[str, Any]]:
    """Text layers with states beside attention."""
    config = transformers.Qwen3_5Config(
        vision_config=QWEN3_VISION,
        text_config={
            **TEXT,
            "head_dim": 16,
            "rope_parameters": {**QWEN_ROPE, "partial_rotary_factor": 1.0},
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 12,
        },
        **qwen_ids(tokenizer),
    )
    return config, qwen_images(), {}


def idefics2(tokenizer: Any) -> tuple[Any, Any, dict[str, Any]]:
    config = transformers.Idefics2Config(
        vision_config={**SIGLIP, "num_channels": 3},
        perceiver_config={
            "hidden_size": 64,
            "resampler_n_latents": 4,
            "resampler_depth": 2,
            "resampler_n_heads": 2,
            "resampler_head_dim": 16,
            "num_key_value_heads": 1,
        },
        text_config=transformers.MistralConfig(**TEXT, sliding_window=None).to_dict(),
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
    )
    images = pil("idefics2", "Idefics2")(size={"longest_edge": 28, "shortest_edge": 14}, do_image_splitting=False)
    return config, images, {"image_seq_len": 4}


UNLISTED = {
    "qwen3_vl_moe": Case("Qwen3VLProcessor", qwen3_vl_moe, **QWEN),
    "qwen3_5": Case("Qwen3VLProcessor", qwen3_5, **QWEN),
    "idefics2": Case(
        "Idefics2Processor",
        idefics2,
        "<image>",
        IDEFICS_TOKENS,
        IDEFICS_NAMES | {"image_boundary_token": "<fake_token_around_image>"},
    ),
}


@pytest.fixture(autouse=True)
def _no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inputs, "ImageProcessorClient", InThisProcess)


@pytest.mark.parametrize("name", UNLISTED)
def test_a_model_that_no_table_names_reads_images(name: str, tmp_path: Path) -> None:
    assert name not in IMAGE_FAMILIES
    case = UNLISTED[name]
    model, processor = saved_case(case, tmp_path)
    image = case.placeholder
    prompts = [(f"What is {image} this?", [picture(1)]), (f"{image} and {image}", [picture(2), picture(3, (40, 90))])]
    token_id = int(model.config.image_token_id)
    greedy = SamplingParams(max_tokens=NUM_NEW, temperature=0.0, ignore_eos=True, logit_bias={token_id: -100.0})
    with LLM(str(tmp_path), **ENGINE, max_num_batched_tokens=24) as llm:
        assert llm.facts.images is not None
        assert not llm.facts.no_images
        given = [{"prompt": text, "multi_modal_data": {"image": pictures}} for text, pictures in prompts]
        found = [output.outputs[0].token_ids for output in llm.generate(given, greedy)]
    for (text, pictures), tokens in zip(prompts, found, strict=True):
        given_to_it = dict(processor(text=[text], images=pictures, return_tensors="pt"))
        assert greedy_tokens(model, given_to_it, token_id) == tokens


def greedy_tokens(model: Any, given: dict[str, Any], image_token_id: int) -> list[int]:
    """Each from the whole sequence."""
    new: list[int] = []
    for _ in range(NUM_NEW):
        with torch.inference_mode():
            logits = model(**given, use_cache=False).logits[0, -1].clone()
            logits[image_token_id] = -torch.inf
        new.append(int(logits.argmax()))
        for name, value in (("input_ids", new[-1]), ("attention_mask", 1), ("mm_token_type_ids", 0)):
            if name in given:
                given[name] = torch.cat([given[name], torch.tensor([[value]])], dim=1)
    return new


@pytest.mark.parametrize("name", ["qwen2_vl", "llava_onevision"])
def test_a_class_that_runs_the_text_itself_is_tried_out_too(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if no native family were known for its text model, either; the native one gives the same."""
    saved(name, tmp_path)
    prompt = {"prompt": f"a {CASES[name].placeholder} b", "multi_modal_data": {"image": picture(1)}}
    greedy = SamplingParams(max_tokens=NUM_NEW, temperature=0.0, ignore_eos=True)
    with LLM(str(tmp_path), **ENGINE) as llm:
        expected = llm.generate(prompt, greedy)[0].outputs[0].token_ids
    monkeypatch.setattr(image_side, "IMAGE_FAMILIES", {})
    monkeypatch.setattr(native_text, "NATIVE_TEXT", {})
    with LLM(str(tmp_path), **ENGINE) as llm:
        runner: Any = llm._loop.runner
        assert isinstance(runner._model, TransformersModel)
        assert llm.facts.images is not None, llm.facts.no_images
        assert llm.generate(prompt, greedy)[0].outputs[0].token_ids == expected


def refusal(folder: Path) -> str:
    """Why images are refused, of a model that still reads text."""
    with LLM(str(folder), **ENGINE) as llm:
        assert llm.facts.images is None
        with pytest.raises(RequestError, match="reads text only") as caught:
            llm.generate({"prompt": "a", "multi_modal_data": {"image": picture(1)}})
        assert llm.facts.no_images in str(caught.value)
        assert llm.generate("text", SamplingParams(max_tokens=2, temperature=0.0))[0].outputs[0].token_ids
        return llm.facts.no_images


def test_a_class_with_masks_of_its_own_is_refused_images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gemma 3, were it not known: its images are seen in both directions."""
    saved("gemma3", tmp_path)
    monkeypatch.setattr(image_side, "IMAGE_FAMILIES", {})
    assert "mask" in refusal(tmp_path)


def test_a_model_whose_processor_is_broken_or_absent_reads_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved("llava", tmp_path)
    monkeypatch.setattr(image_side, "IMAGE_FAMILIES", {})
    (tmp_path / "processor_config.json").write_text(json.dumps({"processor_class": "NoSuchProcessor"}))
    assert "NoSuchProcessor" in refusal(tmp_path)
    for name in ("processor_config.json", "preprocessor_config.json"):
        (tmp_path / name).unlink()
    assert "preprocessor_config.json" in refusal(tmp_path)


def test_a_limit_of_no_images_is_told(tmp_path: Path) -> None:
    saved("llava", tmp_path)
    with LLM(str(tmp_path), **ENGINE, limit_mm_per_prompt='{"image": 0}') as llm:
        with pytest.raises(RequestError, match="--limit-mm-per-prompt"):
            llm.generate({"prompt": "<image>", "multi_modal_data": {"image": picture(1)}})
        with pytest.raises(RequestError, match="--limit-mm-per-prompt"):
            llm.chat([{"role": "user", "content": [{"type": "image", "image": picture(1)}]}])


def test_a_class_that_makes_another_number_of_embeddings_is_refused_images(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved("llava", tmp_path)
    monkeypatch.setattr(image_side, "IMAGE_FAMILIES", {})
    options = json.loads((tmp_path / "processor_config.json").read_text())
    (tmp_path / "processor_config.json").write_text(json.dumps({**options, "num_additional_image_tokens": 3}))
    assert "embeddings for" in refusal(tmp_path)
