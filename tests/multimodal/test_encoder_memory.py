"""What images take on the device: the plan's count against what an encoder allocates in fact, encoding of equal sizes
together, embeddings that live in a bounded cache, and memory that is given back."""

from __future__ import annotations

import gc
import json
import weakref
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from in_process import InThisProcess
from PIL import Image
from tiny_images import CASES, picture, saved
from torch import Tensor

from octavo import LLM, SamplingParams
from octavo.config import EngineConfig, MediaConfig, ModelConfig
from octavo.errors import RequestError
from octavo.models.image_memory import AllocationCounter, count_encoding, estimate
from octavo.models.images import ImageEncoder, kind
from octavo.models.registry import build_model, read_config
from octavo.multimodal import inputs
from octavo.multimodal.processor import ImageProcessor
from octavo.multimodal.sources import from_object
from octavo.worker.encoder_memory import MIN_VALUES, encoder_usage
from octavo.worker.media import StepMedia
from octavo.worker.memory import make_plan
from octavo.worker.output_blocks import OutputBlocks

ENGINE: dict[str, Any] = {"dtype": "float32", "device": "cpu", "cpu_threads": 1, "block_size": 4}
GREEDY = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
TEXT = "Look: <image> What?"
META = torch.device("meta")
COUNTABLE = ("llava", "llava_next", "qwen2_vl", "qwen2_5_vl", "qwen3_vl", "glm4v", "internvl", "gemma3")
UNCOUNTABLE = ("idefics3", "smolvlm")
"""Their encoders look at values (which pieces are padding)."""


def encoders(name: str, folder: Path) -> tuple[ImageEncoder, ImageEncoder]:
    """(without memory, with the checkpoint's weights)."""
    model, _ = saved(name, folder)
    config = read_config(json.loads((folder / "config.json").read_text()))
    empty, full = (build_model(config, dtype=torch.float32, device=device) for device in (META, torch.device("cpu")))
    full.load_weights(model.state_dict().items())
    assert empty.images is not None
    assert full.images is not None
    return empty.images, full.images


def allocated(encoder: ImageEncoder, tensors: dict[str, Tensor]) -> int:
    """Peak bytes of encoding in fact."""
    with AllocationCounter() as counter:
        encoder.encode(tensors, torch.device("cpu"))
    return counter.peak_bytes


@pytest.mark.parametrize("name", COUNTABLE)
def test_the_count_is_what_an_encoder_allocates(name: str, tmp_path: Path) -> None:
    empty, full = encoders(name, tmp_path)
    _, tensors = ImageProcessor(str(tmp_path), 10**6).of_size((200, 150))
    expected = allocated(full, tensors)
    counted = count_encoding(empty.base, lambda: empty.encode(tensors, META, keep_host=True))
    assert counted is not None
    assert 0.95 * expected <= counted <= 1.3 * expected
    assert estimate(empty.base.config.vision_config, tensors, 4) >= expected


@pytest.mark.parametrize("name", UNCOUNTABLE)
def test_what_can_not_be_counted_is_estimated_from_above(name: str, tmp_path: Path) -> None:
    empty, full = encoders(name, tmp_path)
    _, tensors = ImageProcessor(str(tmp_path), 10**6).of_size((200, 150))
    assert count_encoding(empty.base, lambda: empty.encode(tensors, META, keep_host=True)) is None
    assert estimate(empty.base.config.vision_config, tensors, 4) >= allocated(full, tensors)


def test_the_plan_has_the_largest_picture(tmp_path: Path) -> None:
    saved("qwen2_vl", tmp_path)
    model = ModelConfig(model=str(tmp_path), dtype="float32")
    plans = [
        make_plan(EngineConfig(model=model, media=MediaConfig(max_image_pixels=pixels))) for pixels in (400, 10**6)
    ]
    small, large = (plan.encoder for plan in plans)
    assert small is not None
    assert large is not None
    assert large.num_tokens > small.num_tokens
    assert large.is_counted
    assert plans[1].usage.image_bytes == large.work_bytes + large.output_bytes(plans[1].limits.max_num_batched_tokens)
    line = next(line for line in plans[1].report().splitlines() if line.startswith("images"))
    assert f"{large.num_tokens} tokens" in line
    none = make_plan(EngineConfig(model=model, media=MediaConfig(limit_mm_per_prompt='{"image": 0}')))
    assert none.encoder is None
    assert none.usage.image_bytes == 0


def test_a_folder_without_a_processor_plans_no_images(tmp_path: Path) -> None:
    empty, _ = encoders("llava", tmp_path)
    usage = encoder_usage(empty, tmp_path, MediaConfig())
    assert usage is not None
    assert usage.num_values == MIN_VALUES
    for name in ("processor_config.json", "preprocessor_config.json"):
        (tmp_path / name).unlink()
    assert encoder_usage(empty, tmp_path, MediaConfig()) is None


@pytest.mark.parametrize("name", ["llava", "llava_next", "qwen2_5_vl", "qwen3_vl", "idefics3", "internvl"])
def test_pictures_of_one_size_give_the_same_together(name: str, tmp_path: Path) -> None:
    _, encoder = encoders(name, tmp_path)
    processor = ImageProcessor(str(tmp_path), 10**6)
    images = [processor._run(picture(seed, (60, 40)), CASES[name].placeholder)[1] for seed in range(3)]
    other = processor._run(picture(9, (40, 90)), CASES[name].placeholder)[1]
    assert len({kind(image) for image in images}) == 1
    if name not in ("llava", "internvl"):  # theirs are pieces of one size
        assert kind(other) != kind(images[0])
    together = encoder.encode_equal(images, torch.device("cpu"))
    for image, found in zip(images, together, strict=True):
        assert torch.allclose(found, encoder.encode(image, torch.device("cpu")), atol=1e-5)


ODD_SIZES = ((1, 1), (1, 2), (1, 200), (200, 1), (13, 13), (28, 29), (400, 300))
NEED_TORCHVISION = ("llava-pixtral", "mistral3")


@pytest.mark.parametrize("name", sorted(CASES))
def test_odd_sizes_are_refused_or_encoded(name: str, tmp_path: Path) -> None:
    """One embedding for each token, alone and beside another image of that size."""
    if name in NEED_TORCHVISION and find_spec("torchvision") is None:
        pytest.skip("torchvision")
    _, encoder = encoders(name, tmp_path)
    processor, num_encoded = ImageProcessor(str(tmp_path), 10**7), 0
    for size in ODD_SIZES:
        try:
            done = processor.process(from_object(picture(1, size), "here", 1 << 30))
        except RequestError:
            continue
        tensors = safetensors.torch.load(done.data)
        (alone,), (_, second) = (encoder.encode_equal([tensors] * n, torch.device("cpu")) for n in (1, 2))
        places = np.flatnonzero(np.array(done.token_ids) == encoder.token_id)
        assert len(alone) == len(second) == len(places) > 0, size
        assert torch.allclose(alone, second, atol=1e-4), size
        if encoder.numbers_positions:
            assert encoder.positions(done.token_ids, [places], [tensors])[0].shape == (3, len(done.token_ids))
        num_encoded += 1
    assert num_encoded >= 4


@pytest.fixture
def llava(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    saved("llava", tmp_path)
    monkeypatch.setattr(inputs, "ImageProcessorClient", InThisProcess)
    return tmp_path


def media_of(llm: LLM) -> StepMedia:
    runner: Any = llm._loop.runner
    found: StepMedia = runner._media
    return found


def ask(llm: LLM, pictures: Sequence[Image.Image]) -> list[list[int]]:
    prompts = [{"prompt": TEXT, "multi_modal_data": {"image": image}} for image in pictures]
    return [output.outputs[0].token_ids for output in llm.generate(prompts, GREEDY)]


def test_pictures_that_wait_are_encoded_together(llava: Path) -> None:
    pictures = [picture(seed) for seed in range(6)]
    with LLM(str(llava), **ENGINE, max_num_batched_tokens=512) as llm:
        media = media_of(llm)
        answers = ask(llm, pictures)
        assert media.num_calls == 1
        ask(llm, pictures)
        assert media.num_calls == 1
        media._max_values = 2 * 3 * 28 * 28
        assert llm.reset_prefix_cache()
        assert ask(llm, pictures) == answers
        assert media.num_calls == 4


def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Outputs find no room among blocks."""
    monkeypatch.setattr(OutputBlocks, "block_bytes", property(lambda self: 1))


@pytest.mark.parametrize("has_room", [True, False])
def test_pictures_that_are_cut_are_encoded_once(llava: Path, has_room: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A chunk ends within each picture. Embeddings lie in free blocks, or without room last to the next step and no
    longer."""
    with LLM(str(llava), **ENGINE) as whole:
        expected = ask(whole, [picture(1)])
    if not has_room:
        small_blocks(monkeypatch)
    with LLM(str(llava), **ENGINE, max_num_batched_tokens=12, max_num_seqs=1, enable_prefix_caching=False) as llm:
        media = media_of(llm)
        assert ask(llm, [picture(1)]) == expected
        assert media.num_calls == 1
        assert not media._cut
        assert not media._slots
        assert ask(llm, [picture(1)]) == expected
        assert media.num_calls == (1 if has_room else 2)


def test_texts_take_the_blocks_of_embeddings_that_nobody_reads(llava: Path) -> None:
    """One budget: what was encoded stays as long as its blocks are not needed."""
    texts = [[5 + (i + k) % 50 for i in range(40)] for k in range(4)]
    with LLM(str(llava), **ENGINE, num_gpu_blocks_override=40, max_model_len=100) as llm:
        media = media_of(llm)
        expected = ask(llm, [picture(1)])
        assert ask(llm, [picture(1)]) == expected
        assert media.num_calls == 1
        llm.generate(texts, GREEDY)
        assert ask(llm, [picture(1)]) == expected
        assert media.num_calls == 2
        stats = llm.stats()
        assert stats["num_free_blocks"] == stats["num_blocks"]


@pytest.mark.parametrize(
    ("sizes", "dtype"), [((64, 64), torch.float32), ((24, 40, 8), torch.bfloat16), ((6,), torch.float16)]
)
def test_outputs_come_back_from_blocks_bit_by_bit(sizes: tuple[int, ...], dtype: torch.dtype) -> None:
    """However many blocks they take, and with unlike lanes."""
    lanes = [torch.full((50, size), 255, dtype=torch.uint8) for size in sizes]
    kept = OutputBlocks(lanes, 6, dtype)
    free = list(range(1, 50))
    written = []
    for count in (1, 3, 8):
        feature_im = torch.randn(count, 6).to(dtype)
        num_blocks = -(-count * kept.token_bytes // kept.block_bytes)
        blocks, free = free[:num_blocks][::-1], free[num_blocks:]
        kept.write(blocks, feature_im)
        written.append((blocks, feature_im))
    for blocks, feature_im in written:
        assert torch.equal(kept.read(blocks, len(feature_im)), feature_im)
    assert all(bool((lane[0] == 255).all()) and bool((lane[free] == 255).all()) for lane in lanes)


def test_an_encoder_that_fails_over_an_image_costs_nobody_else(
    llava: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A class that takes one image for none gets it twice; one that fails over it anyway shows nothing of it."""
    with LLM(str(llava), **ENGINE) as llm:
        media = media_of(llm)
        expected = ask(llm, [picture(1), picture(2)])
        encode, limit = media._encoder.encode, 1

        def picky(tensors: dict[str, Tensor], device: torch.device) -> Tensor:
            if len(tensors["pixel_values"]) <= limit:
                raise RuntimeError("no such image")
            return encode(tensors, device)

        monkeypatch.setattr(media._encoder, "encode", picky)
        assert llm.reset_prefix_cache()
        assert ask(llm, [picture(1)]) == expected[:1]
        limit = 99
        assert llm.reset_prefix_cache()
        assert ask(llm, [picture(2)]) != expected[1:]
        assert "can't be encoded" in caplog.text
        limit = 0
        assert llm.reset_prefix_cache()
        assert ask(llm, [picture(1), picture(2)]) == expected


def test_a_closed_engine_holds_no_weights(llava: Path) -> None:
    """Though its object is still there, and collected garbage was frozen."""
    llm = LLM(str(llava), **ENGINE)
    ask(llm, [picture(1)])
    runner: Any = llm._loop.runner
    weights = [weakref.ref(x) for x in runner._model.parameters()]
    assert weights
    gc.freeze()
    llm.close()
    assert not any(ref() is not None for ref in weights)
    assert llm.facts.images is not None
