"""Every family against Transformers: the same checkpoint, the same logits, however the prompt is cut and packed."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from paged_driver import PagedDriver
from tiny_models import CASES, NATIVE_PREFIXES, load, make_reference, read_config, save
from torch import Tensor

from octavo.attention.base import AttentionSpec, StateSpec
from octavo.models.base import CausalLM
from octavo.models.decoder import Decoder

PROMPT_LEN = 40
NUM_NEW = 16


class Pair(NamedTuple):
    """A Transformers model and Octavo's model of the same checkpoint."""

    reference: Any
    model: CausalLM

    def expected(self, token_ids: list[int]) -> Tensor:
        """Logits [t, v] of the reference without a cache."""
        with torch.inference_mode():
            return self.reference(input_ids=torch.tensor([token_ids]), use_cache=False).logits[0]


@pytest.fixture(scope="module", params=CASES)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    reference = make_reference(request.param)
    folder: Path = save(reference, tmp_path_factory.mktemp(request.param))
    model = load(folder)
    assert isinstance(model, Decoder) == (CASES[request.param][0] in NATIVE_PREFIXES)
    config = read_config(folder)  # what the memory plan goes by
    for spec in (spec for spec in model.attention_specs if isinstance(spec, AttentionSpec)):
        assert (spec.num_heads, spec.num_kv_heads, spec.head_dim) == (
            config.num_heads,
            config.num_kv_heads,
            config.head_dim,
        )
    return Pair(reference, model)


def prompt(seed: int, length: int = PROMPT_LEN) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, 101, (length,), generator=generator).tolist()


def assert_close(pair: Pair, found: Tensor, expected: Tensor) -> None:
    """States sum up what rounding left of all tokens."""
    assert found.dtype == torch.float32
    has_states = any(isinstance(spec, StateSpec) for spec in pair.model.attention_specs)
    torch.testing.assert_close(found, expected, atol=5e-4 if has_states else 1e-4, rtol=0)


def test_one_chunk(pair: Pair) -> None:
    ids = prompt(1)
    expected = pair.expected(ids)
    assert expected.std() > 0.01  # the comparison below means something
    assert_close(pair, PagedDriver(pair.model).step([(0, ids)]), expected)


def test_several_chunks(pair: Pair) -> None:
    ids, driver = prompt(2), PagedDriver(pair.model)
    found = [driver.step([(2, ids[start:end])]) for start, end in ((0, 1), (1, 14), (14, 16), (16, 40))]
    assert_close(pair, torch.cat(found), pair.expected(ids))


def test_packed_with_other_rows(pair: Pair) -> None:
    first, second, third = prompt(3), prompt(4, 23), prompt(5, 9)
    driver = PagedDriver(pair.model, block_size=4)
    driver.step([(3, first[:17]), (1, second[:22])])
    found = driver.step([(1, second[22:]), (0, third), (3, first[17:])])
    expected = [pair.expected(second)[22:], pair.expected(third), pair.expected(first)[17:]]
    assert_close(pair, found, torch.cat(expected))


def test_greedy_decoding(pair: Pair) -> None:
    ids, other = prompt(6), prompt(7, 20)
    driver = PagedDriver(pair.model, seed=5)
    driver.step([(3, other)])
    ids.append(int(driver.step([(1, ids)])[-1].argmax()))
    for _ in range(NUM_NEW - 1):
        ids.append(int(driver.step([(1, ids[-1:]), (3, [5])])[0].argmax()))
    assert ids[PROMPT_LEN:] == pair.expected(ids)[PROMPT_LEN - 1 : -1].argmax(-1).tolist()
