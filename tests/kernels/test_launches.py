"""Launches without a GPU: what is run, what is only compiled."""

from __future__ import annotations

from typing import Any

import torch

from octavo.kernels.triton import handles
from octavo.kernels.triton.launch import Launch


class Kernel:
    """Notes how it is called."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, Any, dict[str, Any]]] = []

    def warmup(self, *args: Any, grid: tuple[int, ...], **options: Any) -> None:
        self.calls.append(("compile", grid, options))

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *args, **options: self.calls.append(("run", grid, options))


def test_launches_only_compile_within_compiling() -> None:
    kernel, x = Kernel(), torch.zeros(1)
    described = Launch(kernel, (2,), {"x": x}, {"A": 5})

    def both() -> None:
        handles.launch(kernel, (3, 1, 1), (x, 7), {"A": 5}, num_warps=4)
        described.run(pdl=False)

    with handles.compiling():
        both()
    both()
    assert [call[:2] for call in kernel.calls] == [
        ("compile", (3, 1, 1)),
        ("compile", (2,)),
        ("run", (3, 1, 1)),
        ("run", (2,)),
    ]
    compiled, _, run, _ = (call[2] for call in kernel.calls)
    assert compiled == run == {"A": 5, "num_warps": 4, "num_stages": 1}


def test_launches_run_again_after_an_error_while_compiling() -> None:
    kernel = Kernel()
    try:
        with handles.compiling():
            raise KeyError
    except KeyError:
        pass
    handles.launch(kernel, (1, 1, 1), (torch.zeros(1),), {}, num_warps=4, pdl=True)
    assert kernel.calls == [("run", (1, 1, 1), {"num_warps": 4, "num_stages": 1, "launch_pdl": True})]
