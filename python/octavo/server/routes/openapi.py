"""GET /openapi.json: the API as an OpenAPI document."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from octavo.server.openapi import document


async def openapi(request: Request) -> JSONResponse:
    """This document."""
    return JSONResponse(document(route for route in request.app.routes if isinstance(route, Route)))


ROUTES = [Route("/openapi.json", openapi, methods=["GET"])]
ADMIN_ROUTES = [Route("/admin/openapi.json", openapi, methods=["GET"])]
