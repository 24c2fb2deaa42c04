"""The web application: routes, security headers, and the check of the Host header."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from vt_dagster.errors import VtDagsterError
from vt_dagster.explore.pages import Pages
from vt_dagster.storage.arrow_reader import asset_names

HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "img-src 'self'; connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-store",
}
"""In each response: a page loads only files of this server, and runs no inline scripts."""
_HOST = re.compile(r"(127\.0\.0\.1|localhost|\[::1\])(:\d{1,5})?")


class Guard:
    """Rejects requests whose Host is not this machine. A foreign site whose name resolves to this
    machine (DNS rebinding) sends its own name as Host."""

    def __init__(self, app: Any) -> None:
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def with_headers(message: Any) -> None:
            if message["type"] == "http.response.start":
                message["headers"] += [(k.encode(), v.encode()) for k, v in HEADERS.items()]
            await send(message)

        refusal = _refusal(scope)
        await (refusal or self._app)(scope, receive, with_headers)


def _refusal(scope: Any) -> Response | None:
    hosts = [value.decode("latin-1") for name, value in scope["headers"] if name == b"host"]
    if len(hosts) != 1 or not _HOST.fullmatch(hosts[0]):
        return PlainTextResponse("expected this machine's own name as Host: open 127.0.0.1\n", 421)
    return None


def application(warehouse: str) -> Starlette:
    """Returns the pages for a warehouse as an ASGI application.

    Args:
        warehouse: the directory or URL of the tables.

    Raises:
        StorageError: the path cannot be a warehouse.
    """
    asset_names(warehouse)
    pages = Pages(warehouse)

    def refused(request: Request, error: Exception) -> Response:
        """Returns the error page for an error of this library, with status 400."""
        return pages.page("error.html", 400, said=str(error))

    def missing(request: Request, error: Exception) -> Response:
        status = error.status_code if isinstance(error, HTTPException) else 404
        said = f"expected GET and a page, got {request.method} {request.url.path}"
        return pages.page("error.html", status, said=said)

    routes = [
        Route("/", pages.start),
        Route("/compare", pages.compare),
        Route("/table/{name:path}", pages.table),
        Route("/key/{name:path}", pages.key),
        Route("/row/{name:path}", pages.row),
        Route("/lateness/{name:path}", pages.lateness),
        Mount("/static", StaticFiles(directory=Path(__file__).with_name("static"))),
    ]
    return Starlette(
        routes=routes,
        middleware=[Middleware(Guard)],
        exception_handlers={VtDagsterError: refused, HTTPException: missing},
    )
