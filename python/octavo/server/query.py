"""Query parameters of lists: numbers and choices, checked."""

from __future__ import annotations

from starlette.requests import Request

from octavo.errors import RequestError


def number(request: Request, name: str, default: int, low: int, high: int) -> int:
    """An integer parameter. `RequestError` when it is none, or out of range."""
    text = request.query_params.get(name, str(default))
    try:
        value = int(text[:20])
    except ValueError:
        raise RequestError(f"{name} must be an integer", param=name) from None
    if not low <= value <= high:
        raise RequestError(f"{name} must be between {low} and {high}", param=name)
    return value


def ascending(request: Request) -> bool:
    """`order`: asc, or desc when it is left out. `RequestError` for another."""
    order = request.query_params.get("order", "desc")
    if order not in ("asc", "desc"):
        raise RequestError("order must be asc or desc", param="order")
    return order == "asc"
