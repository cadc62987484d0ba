"""Serve the page: the files of `web/` and the API. The server only reads.

[Note: who may ask] By default, the server listens on loopback only. A page of another origin cannot read its responses,
since no header allows it. But a domain name that resolves to this machine would make that page the same origin (DNS
rebinding). So the header Host must be an IP address, which no page can have as its domain name, or a name of this
machine. Other users of the machine can reach loopback, too. So the printed address has a random token, new for each
start, which the browser keeps in a cookie; requests without it are rejected.
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
        f"meshwright watch needs the extra `watch`, and a part of it cannot be imported ({error}). Install it: "
        f"pip install -e '.[watch]' in a clone."
    ) from None

TOKEN_PARAMETER = "token"  # Query parameter that holds the token
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
    """Return a listening socket. `port` None: `default` if it is free, else any free port. Raises ConfigError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, default if port is None else port), family=family)
    except (OSError, OverflowError) as error:
        if port is None:
            return open_listener(host, 0, default=default)
        raise ConfigError(
            f"cannot listen on --host {host} --port {port}: {error}. Give another port, or none to use a free one."
        ) from None


def new_token() -> str:
    return secrets.token_urlsafe(24)


def format_url(listener: socket.socket, token: str) -> str:
    host, port = listener.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)
    return f"http://{host}:{port}/?{TOKEN_PARAMETER}={token}"


def serve(runs: Sequence[WatchedRun], listener: socket.socket, *, host: str, token: str) -> None:
    """Serve until a signal stops the process; `host` is the name that the user gave."""
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
    api = WatchApi(runs)
    names = ("state", "series", "settings", "events", "ranks", "rank", "timeline", "compare")
    files = [Route(path, _serve_file, methods=["GET"]) for path in ("/", "/web/{name}", "/web/vendor/{vendored}")]
    routes = [
        *files,
        *(Route(f"/api/{name}", _make_endpoint(getattr(api, name)), methods=["GET"]) for name in names),
    ]
    return Starlette(routes=routes, middleware=[Middleware(_AccessMiddleware, host=host, port=port, token=token)])


def _make_endpoint(handler: Callable[[QueryParams], Any]) -> Callable[[Request], Response]:
    # Not async: each request runs on a thread, so that a slow one blocks no other.
    def endpoint(request: Request) -> Response:
        try:
            content, status = handler(request.query_params), 200
        except BadQueryError as error:
            content, status = {"error": str(error)}, 400
        except Exception as error:
            # A file is broken in an unexpected way. The page reports it, and shows everything else.
            content, status = {"error": f"the files of the run cannot be read ({type(error).__name__})"}, 400
        return Response(to_json(content), status, headers=HEADERS, media_type="application/json")

    return endpoint


def _serve_file(request: Request) -> Response:
    vendored = request.path_params.get("vendored")
    name = request.path_params.get("name", "page.html")
    directory = WEB_DIRECTORY if vendored is None else WEB_DIRECTORY / "vendor"
    # Compare with the names of existing files: no part of a request becomes part of a path.
    path = next((each for each in directory.iterdir() if each.name == (vendored or name)), None)
    if path is None or path.suffix not in MEDIA_TYPES:
        return PlainTextResponse("not found\n", status_code=404, headers=HEADERS)
    return Response(path.read_bytes(), media_type=MEDIA_TYPES[path.suffix], headers=HEADERS)


class _AccessMiddleware:
    """Reject requests whose Host is not this machine, or without the token; see [Note: who may ask]."""

    def __init__(self, app: ASGIApp, host: str, port: int, token: str) -> None:
        # Cookies belong to a host, and the pages of several commands differ only by their ports.
        self._app, self._token, self._cookie = app, token, f"meshwright-{port}"
        self._names = {"localhost", host.lower(), socket.gethostname().lower()}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope)
        response: ASGIApp = self._app
        if not is_this_machine(request.headers.get("host", ""), self._names):
            reported = "The host is not a name of this machine. Use the address that meshwright watch printed.\n"
            response = PlainTextResponse(reported, status_code=421, headers=HEADERS)
        elif self._is_valid_token(request.query_params.get(TOKEN_PARAMETER)) and scope["path"] == "/":
            # Remove the token from the address, which people copy.
            response = redirect = RedirectResponse("/", status_code=303, headers=HEADERS)
            redirect.set_cookie(self._cookie, self._token, httponly=True, samesite="strict")
        elif not self._is_valid_token(request.cookies.get(self._cookie)):
            reported = "Open the full address that meshwright watch printed, with its token.\n"
            response = PlainTextResponse(reported, status_code=403, headers=HEADERS)
        await response(scope, receive, send)

    def _is_valid_token(self, given: str | None) -> bool:
        return given is not None and secrets.compare_digest(given.encode(errors="replace"), self._token.encode())


def is_this_machine(host: str, names: set[str]) -> bool:
    """Return whether a Host header is an IP address or one of `names`, with or without a port."""
    name, _, port = host.rpartition(":")
    if not name or not port.isdigit():
        name = host
    name = name.lower()
    try:
        ipaddress.ip_address(name.removeprefix("[").removesuffix("]"))
    except ValueError:
        return name in names
    return True
