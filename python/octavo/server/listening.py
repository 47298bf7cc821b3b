"""Sockets that a server listens on. Imports nothing of the server: they are taken before all else."""

from __future__ import annotations

import os
import socket

from octavo.errors import ConfigError

BACKLOG = 4096


def listen(host: str, port: int) -> socket.socket:
    """A listening socket. OSError when the address can't be had."""
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    return socket.create_server((str(address[0]), port), family=family, backlog=BACKLOG)


def listen_as_asked(host: str, port: int, flag: str) -> socket.socket:
    """The same; a ConfigError names the option."""
    try:
        return listen(host, port)
    except OSError as error:
        number = error.errno or 0  # those below 0 are of the resolver of names
        reason = os.strerror(number) if number > 0 else error.strerror or str(error)
        raise ConfigError(f"can't listen on {host}:{port}: {reason} (choose another with {flag} or --host)") from None
