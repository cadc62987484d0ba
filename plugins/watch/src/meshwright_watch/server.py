"""Serve the page: files of `web/`, and answers. The server reads, and does nothing else.

[Note: who may ask] By default it listens on loopback alone. A page of another origin cannot read an answer, since no
header allows it; but a name that its owner points to this machine would make it the same origin. So the header Host
must name this machine: by an address, which no page can have as its name, or as the user does. Other users of the
machine reach loopback, too. So the printed address has a token, drawn again each time, which the browser keeps in a
cookie; without it nothing is answered.
"""

from __future__ import annotations

import ipaddress
import secrets
import socket
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from meshwright.plugin import ConfigError

from .api import BadQueryError, WatchApi, to_json
from .run import WatchedRun

try:
    import uvicorn
    from starlette.applications import Starlette
    from starlette.datastructures import QueryParams
    from starlette.middleware import Middleware
    from starlette.requests import Request
    from starlette.responses import PlainTextResponse, RedirectResponse, Response
    from starlette.routing import Route
    from starlette.types import ASGIApp, Receive, Scope, Send
except ImportError as error:
    raise ConfigError(
        f"meshwright watch needs the extra `watch`, of which something cannot be imported ({error}). Install it: "
        f"pip install -e '.[watch]' in a clone."
    ) from None

TOKEN_PARAMETER = "token"  # The parameter of the address that holds the token
WEB_DIRECTORY = Path(__file__).parent / "web"
MEDIA_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}


def open_listener(host: str, port: int | None, *, default: int) -> socket.socket:
    """Return a socket to serve on; without a port `default`, or any that is free."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, default if port is None else port), family=family)
    except (OSError, OverflowError) as error:
        if port is None:
            return open_listener(host, 0, default=default)
        raise ConfigError(
            f"--host {host} --port {port} cannot be served on: {error}. Give another port, or none "
            f"for one that is free."
        ) from None


def new_token() -> str:
    return secrets.token_urlsafe(24)


def format_url(listener: socket.socket, token: str) -> str:
    host, port = listener.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)
    return f"http://{host}:{port}/?{TOKEN_PARAMETER}={token}"


def serve(runs: Sequence[WatchedRun], listener: socket.socket, *, host: str, token: str) -> None:
    """Serve until the process is asked to end; `host` is as the user has named it."""
    config = uvicorn.Config(
        build_application(runs, host=host, port=listener.getsockname()[1], token=token),
        log_level="warning",
        access_log=False,
        lifespan="off",
        ws="none",
        http="h11",
        loop="asyncio",
        server_header=False,
        timeout_graceful_shutdown=1,
    )
    uvicorn.Server(config).run(sockets=[listener])


def build_application(runs: Sequence[WatchedRun], *, host: str, port: int, token: str) -> Starlette:
    answers = WatchApi(runs)
    names = ("state", "series", "events", "ranks", "rank", "timeline", "compare")
    files = [Route(path, _serve_file, methods=["GET"]) for path in ("/", "/web/{name}", "/web/vendor/{vendored}")]
    routes = [
        *files,
        *(Route(f"/api/{name}", _make_endpoint(getattr(answers, name)), methods=["GET"]) for name in names),
    ]
    return Starlette(routes=routes, middleware=[Middleware(_AccessMiddleware, host=host, port=port, token=token)])


def _make_endpoint(handler: Callable[[QueryParams], Any]) -> Callable[[Request], Response]:
    # Not async: each runs on a thread, so that one that reads much blocks no other.
    def endpoint(request: Request) -> Response:
        try:
            found, status = handler(request.query_params), 200
        except BadQueryError as error:
            found, status = {"error": str(error)}, 400
        except Exception as error:
            # A file is broken in an unexpected way. The page says so, and shows what else there is.
            found, status = {"error": f"the files of the run cannot be read ({type(error).__name__})"}, 400
        return Response(to_json(found), status, headers=HEADERS, media_type="application/json")

    return endpoint


def _serve_file(request: Request) -> Response:
    vendored = request.path_params.get("vendored")
    name = request.path_params.get("name", "page.html")
    directory = WEB_DIRECTORY if vendored is None else WEB_DIRECTORY / "vendor"
    # Only files that are there, by their full names: no part of a request becomes part of a path.
    path = next((each for each in directory.iterdir() if each.name == (vendored or name)), None)
    if path is None or path.suffix not in MEDIA_TYPES:
        return PlainTextResponse("not found\n", status_code=404, headers=HEADERS)
    return Response(path.read_bytes(), media_type=MEDIA_TYPES[path.suffix], headers=HEADERS)


class _AccessMiddleware:
    """Refuse requests to another name than this machine's, or without the token; see [Note: who may ask]."""

    def __init__(self, app: ASGIApp, host: str, port: int, token: str) -> None:
        # Cookies belong to a host, and pages of several commands differ by their ports alone.
        self._app, self._token, self._cookie = app, token, f"meshwright-{port}"
        self._names = {"localhost", host.lower(), socket.gethostname().lower()}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope)
        answer: ASGIApp = self._app
        if not is_this_machine(request.headers.get("host", ""), self._names):
            reported = "This is no name of this machine: use the address that meshwright watch has printed.\n"
            answer = PlainTextResponse(reported, status_code=421, headers=HEADERS)
        elif self._is_valid_token(request.query_params.get(TOKEN_PARAMETER)) and scope["path"] == "/":
            # So that the address, which people copy, has no token any more.
            answer = redirect = RedirectResponse("/", status_code=303, headers=HEADERS)
            redirect.set_cookie(self._cookie, self._token, httponly=True, samesite="strict")
        elif not self._is_valid_token(request.cookies.get(self._cookie)):
            reported = "Open the whole address that meshwright watch has printed, with its token.\n"
            answer = PlainTextResponse(reported, status_code=403, headers=HEADERS)
        await answer(scope, receive, send)

    def _is_valid_token(self, given: str | None) -> bool:
        return given is not None and secrets.compare_digest(given.encode(errors="replace"), self._token.encode())


def is_this_machine(host: str, names: set[str]) -> bool:
    """Whether a header Host is an address, or one of some names, with or without a port."""
    name, _, port = host.rpartition(":")
    if not name or not port.isdigit():
        name = host
    name = name.lower()
    try:
        ipaddress.ip_address(name.removeprefix("[").removesuffix("]"))
    except ValueError:
        return name in names
    return True
