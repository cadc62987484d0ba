"""Hook and command `meshwright watch`: a local page that shows runs, during and after training. Imports no torch."""

from __future__ import annotations

import os
import sys
import threading
import webbrowser
from pathlib import Path
from typing import Annotated

import typer

from meshwright.plugin import TracebackOption, echo, exit_on_error, hookimpl

PORT = 6420
LOOPBACK = ("127.0.0.1", "localhost", "::1")


def watch(
    directories: Annotated[
        list[Path], typer.Argument(metavar="RUN...", help="Directories of runs (their output_dir).")
    ],
    port: Annotated[
        int | None,
        typer.Option(
            min=0, max=65535, help=f"Port to listen on; default: {PORT} if free, else any free port; 0: any free port."
        ),
    ] = None,
    host: Annotated[
        str, typer.Option(help="Address to listen on. Anyone who has the page's token can read the page.")
    ] = LOOPBACK[0],
    no_browser: Annotated[bool, typer.Option("--no-browser", help="Do not open a browser.")] = False,
    traceback: TracebackOption = False,
) -> None:
    """Serve a local page that shows runs: loss, norms, learning rates, memory, stragglers, timelines, comparisons.

    \b
    Examples:
      meshwright watch runs/a
      meshwright watch runs/a runs/b --port 8080 --no-browser
    """
    with exit_on_error(traceback):
        from .run import open_runs
        from .server import format_url, new_token, open_listener, serve

        runs = open_runs(directories)
        listener = open_listener(host, port, default=PORT)
        token = new_token()
        url = format_url(listener, token)
        echo(f"watching {', '.join(run.name for run in runs)} at {url} (Ctrl-C stops it)\n")
        if host not in LOOPBACK:
            echo("note: anyone who has this address can see these runs; the connection is not encrypted\n", stderr=True)
        if not no_browser and _has_display():
            # The socket is already listening, so a fast browser waits for the server.
            threading.Thread(target=webbrowser.open, args=(url,), daemon=True).start()
        try:
            serve(runs, listener, host=host, token=token)
        except KeyboardInterrupt:
            echo("\n")


def _has_display() -> bool:
    """Return whether a browser can show a page; without a display, a text browser could take over the terminal."""
    return sys.platform != "linux" or any(os.environ.get(name) for name in ("DISPLAY", "WAYLAND_DISPLAY"))


@hookimpl
def register_commands(app: typer.Typer) -> None:
    app.command()(watch)
