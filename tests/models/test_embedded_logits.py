"""Every family of the embedded decoder against Transformers: the same checkpoint, the same logits, in chunks and beside
other rows too."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from embedded_driver import EmbeddedDriver
from tiny_models import CASES, make_reference, save
from torch import Tensor

PREFIXES = ("Llama", "Mistral", "Qwen2", "Qwen3", "Gemma", "Gemma2", "Gemma3")
PROMPT_LEN = 40


class Pair(NamedTuple):
    """A Transformers model and its checkpoint."""

    reference: Any
    folder: Path

    def expected(self, token_ids: list[int]) -> Tensor:
        """Logits [t, v] of the reference without a cache."""
        with torch.inference_mode():
            return self.reference(input_ids=torch.tensor([token_ids]), use_cache=False).logits[0]


@pytest.fixture(scope="module", params=[case for case, (prefix, _) in CASES.items() if prefix in PREFIXES])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    reference = make_reference(request.param)
    return Pair(reference, save(reference, tmp_path_factory.mktemp(request.param)))


def prompt(seed: int, length: int = PROMPT_LEN) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, 101, (length,), generator=generator).tolist()


def assert_close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)


def test_one_chunk(pair: Pair) -> None:
    ids = prompt(1)
    expected = pair.expected(ids)
    assert expected.std() > 0.01  # the comparison below means something
    assert_close(EmbeddedDriver(pair.folder).step([(0, ids)]), expected)


def test_chunks_packed_with_other_rows(pair: Pair) -> None:
    first, second, third = prompt(3), prompt(4, 23), prompt(5, 9)
    driver = EmbeddedDriver(pair.folder, block_size=4, num_threads=3)
    driver.step([(3, first[:17]), (1, second[:22])])
    found = driver.step([(1, second[22:]), (0, third), (3, first[17:])])
    expected = [pair.expected(second)[22:], pair.expected(third), pair.expected(first)[17:]]
    assert_close(found, torch.cat(expected))


@pytest.mark.parametrize(("dtype", "tolerance"), [("float16", 0.02), ("bfloat16", 0.15)])
def test_narrow_weights_and_cache(pair: Pair, dtype: str, tolerance: float) -> None:
    """Weights and keys and values rounded to 16 bits: near the reference, relative to how its logits spread."""
    ids = prompt(6)
    expected = pair.expected(ids)
    found = EmbeddedDriver(pair.folder, dtype=dtype).step([(2, ids)])
    assert (found - expected).std() < tolerance * expected.std()
    assert not torch.equal(found, expected)
