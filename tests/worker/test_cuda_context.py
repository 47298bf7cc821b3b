"""The context is made by the driver where there is one, and by nobody where there is none."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest

from octavo.worker.cuda_context import start_context


class Driver:
    """Counts calls; every one succeeds, but for those in `broken`."""

    def __init__(self, *broken: str) -> None:
        self.calls: list[str] = []
        self._broken = broken

    def __getattr__(self, name: str) -> Any:
        def call(*_: Any) -> int:
            self.calls.append(name)
            return 100 if name in self._broken else 0

        return call


@pytest.mark.parametrize(
    ("driver", "calls"),
    [
        (Driver(), ["cuInit", "cuDeviceGet", "cuDevicePrimaryCtxRetain"]),
        (Driver("cuInit"), ["cuInit"]),
        (Driver("cuDeviceGet"), ["cuInit", "cuDeviceGet"]),
    ],
)
def test_what_the_driver_is_asked(driver: Driver, calls: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda name: driver)
    start_context().join(10)
    assert driver.calls == calls


def test_without_a_driver_nothing_happens(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def missing(name: str) -> None:
        raise OSError(name)

    monkeypatch.setattr(ctypes, "CDLL", missing)
    start_context().join(10)
    assert capsys.readouterr().err == ""
