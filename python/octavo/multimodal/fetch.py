"""Images from http(s) addresses: only from hosts that the operator allows, only from public addresses, never off by a
redirect, and within time and size.

A name is resolved once; the connection goes to the very address that was checked, so that a second answer of the name
server changes nothing. Certificates are checked against the name.
"""

from __future__ import annotations

import http.client
import ipaddress
import socket
import ssl
import time
from collections.abc import Sequence
from urllib.parse import SplitResult, urlsplit

from octavo.errors import RequestError
from octavo.multimodal.limits import ImageLimits
from octavo.multimodal.sources import FileImage, UrlImage, too_large

CHUNK_BYTES = 64 * 1024
MAX_URL_CHARS = 4096
PORTS = {"http": 80, "https": 443}


def is_public(address: str) -> bool:
    """Whether an address is one of the open internet: not private, this machine's, the link's, or a cloud's own."""
    ip = ipaddress.ip_address(address.split("%")[0])
    if isinstance(ip, ipaddress.IPv6Address):
        inner = ip.ipv4_mapped or ip.sixtofour or (ip.teredo[1] if ip.teredo else None)
        if inner is not None:
            return is_public(str(inner))
        if ip in _NAT64:
            return is_public(str(ipaddress.IPv4Address(int(ip) & 0xFFFFFFFF)))
    return ip.is_global and not (ip.is_multicast or ip.is_reserved or ip.is_unspecified)


_NAT64 = ipaddress.ip_network("64:ff9b::/96")


class Fetcher:
    """`hosts`: names from which images may come, compared as a whole; port 80 or 443 as the scheme says, unless a host
    is given with its port."""

    def __init__(self, hosts: Sequence[str], limits: ImageLimits) -> None:
        self._hosts = frozenset(host.lower().rstrip(".") for host in hosts)
        self._limits = limits
        self._tls = ssl.create_default_context()

    def fetch(self, image: UrlImage) -> FileImage:
        """RequestError: the address is not allowed, can't be reached, answers with something else than a file, or the
        file is too large or too slow."""
        where, deadline_s = image.where, time.monotonic() + self._limits.timeout_s
        parts, host, port = self._checked(image)
        address = self._resolve(host, port, where)
        connection = _PinnedConnection(host, port, address, self._tls if parts.scheme == "https" else None, deadline_s)
        try:
            connection.connect()
            path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
            connection.request("GET", path, headers={"User-Agent": "octavo", "Accept": "image/*"})
            return FileImage(self._read(connection, deadline_s, where), where)
        except (OSError, http.client.HTTPException, ValueError) as error:
            if isinstance(error, RequestError):
                raise
            reason = "it took too long" if isinstance(error, TimeoutError) else type(error).__name__
            raise RequestError(f"{where}: the image at {host} can't be fetched: {reason}", where) from None
        finally:
            connection.close()

    def _checked(self, image: UrlImage) -> tuple[SplitResult, str, int]:
        """(the parts of the address, host, port), if the operator allows them."""
        where = image.where
        try:
            parts = urlsplit(image.url)
            host, port = (parts.hostname or "").rstrip("."), parts.port or PORTS[parts.scheme.lower()]
        except (ValueError, KeyError):
            host = ""
        if (
            not host
            or len(image.url) > MAX_URL_CHARS
            or not image.url.isascii()
            or not image.url.isprintable()
            or " " in image.url
        ):
            raise RequestError(f"{where}: this is no valid http(s) address", where)
        if parts.username is not None or parts.password is not None:
            raise RequestError(f"{where}: addresses with a user's name are not taken", where)
        if host not in self._hosts if port == PORTS[parts.scheme.lower()] else f"{host}:{port}" not in self._hosts:
            if not self._hosts:
                raise RequestError(
                    f"{where}: this server fetches no images; send a data URL (--allowed-media-domains)", where
                )
            raise RequestError(f"{where}: images are not fetched from {host[:100]} (--allowed-media-domains)", where)
        return parts, host, port

    def _resolve(self, host: str, port: int, where: str) -> str:
        """A public address of the host. One that is not public among its addresses is reason enough to refuse it."""
        try:
            found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except OSError:
            raise RequestError(f"{where}: {host} has no address", where) from None
        addresses = [str(entry[4][0]) for entry in found]
        if not all(is_public(address) for address in addresses):
            raise RequestError(f"{where}: {host} is not an address of the public internet", where)
        return addresses[0]

    def _read(self, connection: _PinnedConnection, deadline_s: float, where: str) -> bytes:
        response = connection.getresponse()
        if response.status != 200:
            what = "a redirect, which is not followed" if 300 <= response.status < 400 else f"status {response.status}"
            raise RequestError(f"{where}: {connection.host} answered with {what}", where)
        data = bytearray()
        while chunk := response.read1(CHUNK_BYTES):
            data += chunk
            if len(data) > self._limits.max_bytes:
                raise too_large(where, self._limits.max_bytes)
            connection.set_deadline(deadline_s)
        return bytes(data)


class _PinnedConnection(http.client.HTTPConnection):
    """To one address, whatever the host's name means by now."""

    def __init__(self, host: str, port: int, address: str, tls: ssl.SSLContext | None, deadline_s: float) -> None:
        super().__init__(host, port)
        self._address = address
        self._tls = tls
        self._deadline_s = deadline_s

    def connect(self) -> None:
        left_s = self._deadline_s - time.monotonic()
        self.sock = socket.create_connection((self._address, self.port), max(0.01, left_s))
        if self._tls is not None:
            self.sock = self._tls.wrap_socket(self.sock, server_hostname=self.host)
        self.set_deadline(self._deadline_s)

    def set_deadline(self, deadline_s: float) -> None:
        """TimeoutError when it has passed; else the next read waits no longer than up to it."""
        left_s = deadline_s - time.monotonic()
        if left_s <= 0:
            raise TimeoutError
        if self.sock is not None:
            self.sock.settimeout(left_s)
