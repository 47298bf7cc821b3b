"""LLaVA-1.5-7B's true shape with random weights, and a picture of 336 pixels: loading, prefill, decode, memory.

    python benches/vision.py                 # on a CUDA device; about a minute
    python benches/vision.py --tiny          # the same steps with a small model, on any machine

Prints one JSON object. Times are medians of `--repeat` runs; a run's prompts have pictures that were never seen before,
unless it says cached.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch
from PIL import Image
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from octavo import LLM, SamplingParams
from octavo.models.images import num_values
from octavo.worker.media import StepMedia
from octavo.worker.runner import TorchRunner

CLIP = {"model_type": "clip_vision_model", "projection_dim": 768}
SHAPES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "llava-1.5-7b": (
        {
            "hidden_size": 1024,
            "intermediate_size": 4096,
            "num_hidden_layers": 24,
            "num_attention_heads": 16,
            "image_size": 336,
            "patch_size": 14,
        },
        {
            "hidden_size": 4096,
            "intermediate_size": 11008,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 32,
            "vocab_size": 32064,
            "max_position_embeddings": 4096,
        },
    ),
    "tiny": (
        {
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 3,
            "num_attention_heads": 2,
            "image_size": 336,
            "patch_size": 14,
        },
        {
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "vocab_size": 512,
            "max_position_embeddings": 4096,
        },
    ),
}
PROMPT = "USER: <image>\nWhat is in this picture? ASSISTANT:"
NUM_NEW = 64
SPECIALS = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}


def write_model(shape: str, folder: Path) -> None:
    """config.json, a tokenizer of bytes, and the processor's files."""
    vision, text = SHAPES[shape]
    vocab = {"<pad>": 0, "<s>": 1, "</s>": 2}
    vocab |= {name: i + 3 for i, name in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<pad>", "<s>", "</s>", "<image>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "architectures": ["LlavaForConditionalGeneration"],
        "model_type": "llava",
        "image_token_index": tokenizer.token_to_id("<image>"),
        "vision_config": {**CLIP, **vision},
        "text_config": {"model_type": "llama", "rms_norm_eps": 1e-5, "bos_token_id": 1, "eos_token_id": 2, **text},
        "vision_feature_layer": -2,
        "vision_feature_select_strategy": "default",
    }
    size = {"height": 336, "width": 336}
    files = {
        "config.json": config,
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": "<s>",
            "eos_token": "</s>",
        },
        "preprocessor_config.json": {
            "image_processor_type": "CLIPImageProcessor",
            "crop_size": size,
            "size": {"shortest_edge": 336},
        },
        "processor_config.json": {
            "processor_class": "LlavaProcessor",
            "patch_size": 14,
            "num_additional_image_tokens": 1,
            "vision_feature_select_strategy": "default",
        },
    }
    for name, value in files.items():
        (folder / name).write_text(json.dumps(value))


def picture(seed: int) -> Image.Image:
    """Noise, 336 pixels square."""
    return Image.fromarray(np.random.default_rng(seed).integers(0, 255, (336, 336, 3), dtype=np.uint8))


def median_s(work: Callable[[], Any], repeat: int) -> float:
    times = []
    for _ in range(repeat):
        start_s = time.perf_counter()
        work()
        times.append(time.perf_counter() - start_s)
    return statistics.median(times)


class Bench:
    """One engine and its pictures."""

    def __init__(self, llm: LLM, repeat: int) -> None:
        self.llm = llm
        self.repeat = repeat
        self._seed = 0

    def ask(self, num_prompts: int, num_new: int, *, seed: int | None = None) -> Any:
        """Prompts with a new picture each, or with the picture of `seed`."""
        prompts = []
        for _ in range(num_prompts):
            self._seed += 1
            shown = picture(self._seed if seed is None else seed)
            prompts.append({"prompt": PROMPT, "multi_modal_data": {"image": shown}})
        return self.llm.generate(prompts, SamplingParams(max_tokens=num_new, temperature=0.0, ignore_eos=True))

    def run(self) -> dict[str, float]:
        """Seconds unless named otherwise."""
        self.ask(1, NUM_NEW)
        text = {"prompt_token_ids": [5] * len(self.ask(1, 1, seed=10**6)[0].prompt_token_ids)}
        one = SamplingParams(max_tokens=1, temperature=0.0)
        results = {
            "prompt_tokens": float(len(text["prompt_token_ids"])),
            "processing_s": median_s(self._process, self.repeat),
            "first_token_s": median_s(lambda: self.ask(1, 1), self.repeat),
            "first_token_cached_s": median_s(lambda: self.ask(1, 1, seed=10**6), self.repeat),
            "first_tokens_of_8_s": median_s(lambda: self.ask(8, 1), self.repeat),
        }
        self.llm.reset_prefix_cache()
        results["first_token_text_s"] = median_s(
            lambda: (self.llm.reset_prefix_cache(), self.llm.generate(text, one)), self.repeat
        )
        whole_s = median_s(lambda: self.ask(1, NUM_NEW, seed=10**6), self.repeat)
        results |= self.encoder()
        results["decode_ms_a_token"] = 1e3 * (whole_s - results["first_token_cached_s"]) / (NUM_NEW - 1)
        return results

    def encoder(self) -> dict[str, float]:
        """The encoder's peak beside weights, for as many pictures as it takes at once, and what was planned for it."""
        runner = self.llm._loop.runner
        assert isinstance(runner, TorchRunner)
        media, plan = runner._media, runner.plan.encoder
        assert media is not None
        assert plan is not None
        assert self.llm._images is not None
        tensors = safetensors.torch.load(self.llm._images.process([_source(picture(7))])[0].data)
        count, device = max(1, plan.num_values // num_values(tensors)), torch.device(self.llm.config.execution.device)
        times = [median_s(lambda n=n: _encode(media, [tensors] * n, device), self.repeat) for n in (1, count)]
        before = used_bytes()
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        _encode(media, [tensors] * count, device)
        peak = torch.cuda.max_memory_allocated() - before if device.type == "cuda" else 0
        return {
            "encode_1_s": times[0],
            "encode_together": float(count),
            "encode_together_s": times[1],
            "encoder_peak_bytes": float(peak),
            "encoder_planned_bytes": float(plan.work_bytes),
        }

    def _process(self) -> None:
        self._seed += 1
        images = self.llm._images
        assert images is not None
        images.process([_source(picture(self._seed))])


def _encode(media: StepMedia, images: list[Any], device: torch.device) -> None:
    media._encoder.encode_equal(images, device)
    if device.type == "cuda":
        torch.cuda.synchronize()


def _source(image: Image.Image) -> Any:
    from octavo.multimodal.sources import from_object

    return from_object(image, "image", 1 << 30)


def used_bytes() -> int:
    return torch.cuda.memory_allocated() if torch.cuda.is_available() else 0


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--tiny", action="store_true", help="a small model on the CPU")
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    shape = "tiny" if options.tiny else "llava-1.5-7b"
    device: dict[str, Any] = {"device": "cpu", "cpu_threads": 1, "dtype": "float32"} if options.tiny else {}
    before = used_bytes()
    with tempfile.TemporaryDirectory() as folder:
        write_model(shape, Path(folder))
        start_s = time.perf_counter()
        with LLM(folder, load_format="dummy", **device) as llm:
            results: dict[str, Any] = {"shape": shape, "load_s": time.perf_counter() - start_s}
            bench = Bench(llm, options.repeat)
            results |= bench.run()
            full = used_bytes()
            for _ in range(3):
                bench.ask(8, 4)
            results["grown_bytes"] = used_bytes() - full
            stats = llm.stats()
            results["blocks_held"] = stats["num_blocks"] - stats["num_free_blocks"]
        results["left_bytes"] = used_bytes() - before  # closed, and still there
    text = json.dumps({name: round(x, 5) if isinstance(x, float) else x for name, x in results.items()})
    print(text)
    if options.out is not None:
        options.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
