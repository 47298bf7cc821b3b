"""Fetching images: allowed hosts, public addresses, no redirects, limits of size and time. A local server stands for
the internet: names are resolved by the tests.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from octavo.errors import RequestError
from octavo.multimodal import fetch
from octavo.multimodal.fetch import Fetcher, is_public
from octavo.multimodal.limits import ImageLimits
from octavo.multimodal.sources import UrlImage

LIMITS = ImageLimits(max_images=4, max_bytes=1000, max_pixels=10**6, timeout_s=0.5)
OK = b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\nabc"


class Host:
    """Answers every connection with the same bytes; keeps what it was asked."""

    def __init__(self) -> None:
        self.answer: Callable[[socket.socket], None] = lambda connection: connection.sendall(OK)
        self.asked: list[bytes] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            with connection:
                self.asked.append(connection.recv(4096))
                try:
                    self.answer(connection)
                except OSError:
                    continue

    def close(self) -> None:
        self._listener.close()


@pytest.fixture
def host() -> Iterator[Host]:
    host = Host()
    yield host
    host.close()


@pytest.fixture
def fetcher(host: Host, monkeypatch: pytest.MonkeyPatch) -> Fetcher:
    """`pictures.test` is the local server, which counts as public here."""
    lookup = socket.getaddrinfo

    def resolve(name: str, *args: Any, **options: Any) -> list[Any]:
        return lookup("127.0.0.1" if name == "pictures.test" else name, *args, **options)

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    monkeypatch.setattr(fetch, "is_public", lambda address: address == "127.0.0.1")
    return Fetcher([f"pictures.test:{host.port}"], LIMITS)


def get(fetcher: Fetcher, url: str) -> bytes:
    return fetcher.fetch(UrlImage(url, "where")).data


def test_an_allowed_host_is_asked(host: Host, fetcher: Fetcher) -> None:
    assert get(fetcher, f"http://pictures.test:{host.port}/a.png?x=1") == b"abc"
    assert host.asked[0].startswith(b"GET /a.png?x=1 HTTP/1.1\r\nHost: pictures.test")


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (b"HTTP/1.1 302 Found\r\nLocation: http://169.254.169.254/\r\nContent-Length: 0\r\n\r\n", "redirect"),
        (b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n", "status 404"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 5000\r\n\r\n" + b"x" * 5000, "--max-image-bytes"),
        (b"HTTP/1.1 200 OK\r\n\r\n" + b"x" * 5000, "--max-image-bytes"),
        (b"nonsense\r\n\r\n", "can't be fetched"),
        (b"", "can't be fetched"),
    ],
)
def test_bad_answers_are_refused(host: Host, fetcher: Fetcher, answer: bytes, message: str) -> None:
    host.answer = lambda connection: connection.sendall(answer)
    with pytest.raises(RequestError, match=message) as caught:
        get(fetcher, f"http://pictures.test:{host.port}/")
    assert caught.value.param == "where"
    assert len(host.asked) == 1


def test_a_file_that_comes_in_drops_takes_too_long(host: Host, fetcher: Fetcher) -> None:
    ended = threading.Event()

    def drip(connection: socket.socket) -> None:
        connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 900\r\n\r\n")
        while not ended.wait(0.05):
            connection.sendall(b"x")

    host.answer = drip
    start_s = time.monotonic()
    try:
        with pytest.raises(RequestError, match="too long"):
            get(fetcher, f"http://pictures.test:{host.port}/")
    finally:
        ended.set()
    assert time.monotonic() - start_s < 10 * LIMITS.timeout_s


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("http://other.test/", "not fetched from other.test"),
        ("http://pictures.test/", "not fetched from"),  # the port belongs to what is allowed
        ("http://sub.pictures.test:{port}/", "not fetched from"),
        ("http://user:word@pictures.test:{port}/", "user's name"),
        ("http://pictures.test:{port}@other.test/", "user's name"),
        ("http://pictures.test:99999/", "no valid"),
        ("http:///a", "no valid"),
        ("http://pictures.test:{port}/\r\nHost: x", "no valid"),
        ("http://pictures.test:{port}/" + "x" * 5000, "no valid"),
    ],
)
def test_other_addresses_are_not_asked(host: Host, fetcher: Fetcher, url: str, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        get(fetcher, url.replace("{port}", str(host.port)))
    assert not host.asked


def test_nothing_is_fetched_unless_a_host_is_allowed() -> None:
    with pytest.raises(RequestError, match="send a data URL"):
        get(Fetcher([], LIMITS), "https://example.com/a.png")


def test_a_name_with_a_private_address_is_refused(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also beside a public one: which of them a connection takes is chance."""
    found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, 80)) for address in ("93.184.216.34", "127.0.0.1")]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *args, **options: found)
    with pytest.raises(RequestError, match="public internet"):
        get(Fetcher(["pictures.test"], LIMITS), "http://pictures.test/")
    assert not host.asked


def test_the_checked_address_is_the_one_that_is_asked(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    """A name server that gives another answer the second time (rebinding) is not asked a second time."""
    lookups: list[str] = []
    connected: list[Any] = []

    def resolve(name: str, port: int, **options: Any) -> list[Any]:
        lookups.append(name)
        address = "93.184.216.34" if len(lookups) == 1 else "127.0.0.1"
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port))]

    def connect(address: tuple[str, int], timeout_s: float) -> socket.socket:
        connected.append(address)
        raise OSError

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    monkeypatch.setattr(socket, "create_connection", connect)
    with pytest.raises(RequestError, match="can't be fetched"):
        get(Fetcher(["pictures.test"], LIMITS), "http://pictures.test/")
    assert (lookups, connected) == (["pictures.test"], [("93.184.216.34", 80)])


def test_public_addresses() -> None:
    assert all(map(is_public, ("93.184.216.34", "2606:2800:220:1:248:1893:25c8:1946", "::ffff:8.8.8.8")))
    private = (
        "127.0.0.1 10.0.0.1 192.168.1.1 172.16.0.1 169.254.169.254 100.64.0.1 0.0.0.0 224.0.0.1 255.255.255.255 ::1 :: "
        "fe80::1 fc00::1 ::ffff:127.0.0.1 64:ff9b::7f00:1 2002:7f00:1:: ff02::1"
    )
    assert not any(map(is_public, private.split()))
