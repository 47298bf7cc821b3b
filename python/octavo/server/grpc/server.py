"""The gRPC server beside the HTTP server: one port, the methods, health, and reflection."""

from __future__ import annotations

import asyncio

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1._async import HealthServicer
from grpc_reflection.v1alpha import reflection

from octavo.errors import ConfigError
from octavo.server.context import ServerContext
from octavo.server.grpc.calls import KeyGuard
from octavo.server.grpc.protocol import SERVICE, compiled
from octavo.server.grpc.servicer import Servicer

CHECK_S = 0.2
"""Between two looks at whether the engine takes requests."""
FLUSH_S = 2.0
"""After the drain, how long calls get to take their last message."""


class GrpcServer:
    """`start` listens; the health service says SERVING while requests are taken."""

    def __init__(self, context: ServerContext, host: str, port: int) -> None:
        self.should_exit = False
        self._context = context
        self._server = grpc.aio.server(
            interceptors=[KeyGuard(context)],
            options=[("grpc.max_receive_message_length", context.config.max_body_bytes), ("grpc.so_reuseport", 0)],
        )
        _, services = compiled()
        services.add_OctavoServicer_to_server(Servicer(context), self._server)
        self._health = HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        reflection.enable_server_reflection((SERVICE, "grpc.health.v1.Health", reflection.SERVICE_NAME), self._server)
        address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        try:
            self.port: int = self._server.add_insecure_port(address)
        except RuntimeError as error:
            raise ConfigError(f"can't listen on {address}: choose another with --grpc-port", "grpc_port") from error

    async def serve(self) -> None:
        """Until `should_exit` is set."""
        await self._server.start()
        while not self.should_exit:
            await self._tell_health()
            await asyncio.sleep(CHECK_S)
        await self._server.stop(FLUSH_S)

    async def _tell_health(self) -> None:
        ready = self._context.state == "ready"
        status = health_pb2.HealthCheckResponse.SERVING if ready else health_pb2.HealthCheckResponse.NOT_SERVING
        for name in ("", SERVICE):
            await self._health.set(name, status)
