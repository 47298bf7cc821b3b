"""The client's side of framing: bodies come out whole however the bytes were cut."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from octavo.engine.connection import FrameProtocol


def framed(bodies: list[bytes]) -> bytes:
    return b"".join(len(body).to_bytes(4, "little") + body for body in bodies)


def cut(data: bytes, points: list[int]) -> list[bytes]:
    edges = [0, *sorted(points), len(data)]
    return [data[a:b] for a, b in pairwise(edges)]


@pytest.mark.parametrize("seed", range(20))
def test_random_cuts(seed: int) -> None:
    r = random.Random(seed)
    bodies = [r.randbytes(r.choice([0, 1, 3, 4, 5, 100, 3000])) for _ in range(40)]
    data = framed(bodies)
    got: list[bytes] = []
    protocol = FrameProtocol(got.append, lambda: None)
    for piece in cut(data, [r.randrange(len(data) + 1) for _ in range(r.choice([0, 1, 10, 300]))]):
        if piece:
            protocol.data_received(piece)
    assert got == bodies


def test_byte_by_byte() -> None:
    bodies = [b"", b"a", b"bc" * 200]
    got: list[bytes] = []
    protocol = FrameProtocol(got.append, lambda: None)
    for byte in framed(bodies):
        protocol.data_received(bytes([byte]))
    assert got == bodies
