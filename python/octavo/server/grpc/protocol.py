"""`octavo.proto` as Python classes, compiled when it is first needed. ConfigError without the packages for it."""

from __future__ import annotations

from functools import cache
from typing import Any

from octavo.errors import ConfigError

PROTO = "octavo/server/grpc/octavo.proto"
SERVICE = "octavo.v1.Octavo"


@cache
def compiled() -> tuple[Any, Any]:
    """(module of the messages, module of the service)."""
    try:
        import grpc
        import grpc_tools  # noqa: F401 (the compiler)
    except ImportError as error:
        raise ConfigError(f"--grpc-port needs the package {error.name}: pip install 'octavo[grpc]'") from error
    messages, services = grpc.protos_and_services(PROTO)
    return messages, services
