"""One rank's side of a launched world: find the world, run a main function in it, report its failure once.

[Note: one report per failure] When one rank fails, its peers fail too; only the first failure is worth reading. So a
failing rank posts its exit code in the rendezvous store before it exits. Only the rank of the first post writes to
stderr, and the others leave with its exit code. A failure that looks like the consequence of a peer's death waits for
that peer's post. A rank that dies of a signal posts nothing: its launcher ends the waiting peers and names it. A rank
that hangs is named by its peers; see [Note: signs of life] in `pulse`.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from meshwright.plugin import (
    CONNECT_TIMEOUT_S,
    Hang,
    MeshwrightError,
    Progress,
    RankError,
    Stopped,
    connect_store,
    end_with_launcher,
    escape_messages,
    headline,
    host_of_store,
    leave,
    rank,
    said,
    say,
    started_by_launcher,
    started_by_torchrun,
    started_elsewhere,
    world_size,
)

from .companion import Companion
from .hang import who_hangs
from .pulse import Pulse

INTERRUPTED = 130
"""Exit code after Ctrl-C: 128 + SIGINT, as in shells."""

BOARD_TIMEOUT_S = 5.0
"""The board's store was there at the start: it answers at once or is gone."""

ECHO_WAIT_S = 6.0
"""How long an echo waits for the cause; longer than a launcher takes to end the peers of a rank that was killed."""

LOST_WAIT_S = 1.5
"""The same where a peer's connections have closed and no launcher here ends the others: a failing rank has posted."""

ECHO_TEXTS = (
    "closed by peer",  # gloo: the peer's process ended and its sockets with it
    "reset by peer",  # gloo and TCPStore: the peer was killed with data still in flight
    "broken pipe",  # gloo and TCPStore: writing to a peer that is gone
    "socket closed",  # gloo: the connection was torn down after an error on another operation
    "connectfullmesh failed",  # gloo: a peer went away while the group was being formed
    "connection was likely closed",  # TCPStore client: the process that hosts the store is gone
    "nccl communicator was aborted",  # NCCL: its watchdog aborts what waits for a peer that failed
    "remote process exited",  # NCCL: the text of ncclRemoteError
)
"""Lower-case texts of errors that gloo, NCCL and the store raise when a *peer* is gone; a false match costs a delay."""

TIMEOUT_TEXTS = (
    "timed out waiting",  # gloo: a collective
    "collective operation timeout",  # NCCL: its watchdog
    "wait timeout after",  # TCPStore
)
"""Lower-case texts of errors of ranks that have waited for a peer in vain."""

_PULSES = "meshwright/pulse"
"""Prefix of the signs of life in the rendezvous store."""


def guarded(
    main: Callable[..., object],
    args: tuple[Any, ...] = (),
    *,
    show_traceback: bool = False,
    timeout_s: float = CONNECT_TIMEOUT_S,
) -> int:
    """Run `main(store, *args)` as this rank's share of the job; see [Note: one report per failure].

    Nothing is torn down after a failure, since that could wait for peers: leave the process promptly, with `leave`.
    `store` is that of the launched world, or None outside of one; `timeout_s` the limit for reaching it. Returns 0, the
    exit code of the failure that was reported (on whatever rank), or INTERRUPTED.
    """
    escape_messages()
    if started_by_torchrun():
        # `local` does this itself, and other launchers end their ranks.
        end_with_launcher()
    try:
        store = connect_store(timeout_s) if started_by_launcher() else None
    except RankError as error:
        # Without a store the ranks cannot agree on who reports, and this one may be the only one cut off.
        failure = Failure.of(error, show_traceback)
        say_whole(f"rank {rank()}: {failure.text}")
        return failure.exit_code
    except KeyboardInterrupt:
        return INTERRUPTED
    try:
        main(store, *args)
    except Stopped as stopped:
        # Not a failure, and all ranks have agreed on it.
        return int(stopped.code or 0)
    except BaseException as error:
        failure = Failure.of(error, show_traceback)
    else:
        return 0
    try:
        return _settle(failure)
    except KeyboardInterrupt:
        return INTERRUPTED


@contextmanager
def signs_of_life(timeout_s: float, watchdog_s: float | None = None) -> Iterator[Progress]:
    """End this process, with the name of the rank that hangs, if a rank falls silent or, with a watchdog, stands still.

    Each rank enters the context, and its main thread updates the `Progress` that it gets. Arguments as of `Pulse`.
    """
    progress, size = Progress(), world_size() if started_by_launcher() else 1
    if size == 1 and watchdog_s is None:
        yield progress
        return
    from torch.distributed import HashStore, PrefixStore

    def end(hang: Hang) -> None:
        failure = Failure(1, f"{said(RankError(hang.text))}\n")
        if hang.is_alone:
            say_whole(failure.text)
        leave(failure.exit_code if hang.is_alone else _settle(failure))

    pulse = Pulse(
        PrefixStore(_PULSES, connect_store(timeout_s)) if size > 1 else HashStore(),
        int(rank()) if size > 1 else 0,
        size,
        timeout_s=timeout_s,
        on_hang=end,
        watchdog_s=watchdog_s,
        progress=progress,
        host=host_of_store() if size > 1 else None,
    )
    # `local` ends the ranks that it has started.
    with Companion(pulse.named_after_s, pulse.interval_s) if started_elsewhere() else nullcontext() as companion, pulse:
        if companion is not None:
            progress.on_settled = companion.tell
        yield progress


def is_echo(error: BaseException) -> bool:
    """Return whether `error`, or what it was raised from, is likely the consequence of a peer's death."""
    from torch.distributed import DistError

    return any(isinstance(link, DistError) for link in _chain(error)) or _reads_like(error, ECHO_TEXTS)


def _reads_like(error: BaseException, texts: tuple[str, ...]) -> bool:
    links = [link for link in _chain(error) if isinstance(link, (RuntimeError, MeshwrightError))]
    return any(text in str(link).lower() for link in links for text in texts)


def _chain(error: BaseException) -> Iterator[BaseException]:
    link: BaseException | None = error
    while link is not None:
        yield link
        link = link.__cause__ or link.__context__


@dataclass(frozen=True)
class Failure:
    """What ended a rank's main function. `echo`: "Type: message" if it looks like the consequence of a peer's death."""

    exit_code: int
    text: str
    echo: str = ""
    timed_out: bool = False

    @classmethod
    def of(cls, error: BaseException, show_traceback: bool) -> Failure:
        if isinstance(error, KeyboardInterrupt):
            return cls(INTERRUPTED, "")
        if isinstance(error, SystemExit):
            # As in the interpreter: None is success, an int is the code, anything else is a message.
            if error.code is None or isinstance(error.code, int):
                return cls(error.code or 0, "")
            return cls(1, f"{error.code}\n")
        echo = headline(error) if is_echo(error) else ""
        timed_out = _reads_like(error, TIMEOUT_TEXTS)
        if isinstance(error, MeshwrightError):
            text = _render(error, said(error), with_traceback=show_traceback)
            return cls(error.exit_code, text, echo, timed_out)
        who = f"rank {rank()} failed: " if started_by_launcher() else ""
        return cls(1, _render(error, who + headline(error), with_traceback=True), echo, timed_out)


def _settle(failure: Failure) -> int:
    """Post `failure`, show it if it is the first, and return the exit code of the first."""
    if failure.exit_code == 0 or not started_by_launcher():
        say_whole(failure.text)
        return failure.exit_code
    try:
        board = _Board()
        if failure.timed_out and (hangs := board.who_hangs()):
            failure = Failure(1, f"{said(RankError(hangs))}\n")
        is_lost = started_elsewhere() and not failure.timed_out
        patience_s = (LOST_WAIT_S if is_lost else ECHO_WAIT_S) if failure.echo else 0.0
        first = board.first(failure.exit_code, patience_s=patience_s)
    except (RankError, RuntimeError):
        # The store went away with the rank that hosted it. Two reports are better than none, but need not be long.
        say_whole(f"rank {rank()} lost its peers and their store: {failure.echo}\n" if failure.echo else failure.text)
        if failure.timed_out:
            say_whole(
                "The process that hosts the rendezvous store gives no answer either: it may be the one that hangs.\n"
            )
        return failure.exit_code
    if first is None:
        lost = "This rank lost a peer, and no rank has said why: one may have been killed.\n" if failure.echo else ""
        say_whole(failure.text + (lost if failure.text else ""))
        return failure.exit_code
    return first


class _Board:
    """The first failure of the world, as a key in the store, by a connection of its own: another may be blocked."""

    _KEY = "first"

    def __init__(self) -> None:
        from torch.distributed import PrefixStore

        # Where nobody listens, torch would say so with pages of C++ frames.
        address = (os.environ.get("MASTER_ADDR", ""), int(os.environ.get("MASTER_PORT", "0")))
        try:
            socket.create_connection(address, timeout=BOARD_TIMEOUT_S).close()
        except OSError as error:
            raise RankError(f"no rendezvous store at {address[0]}:{address[1]} any more: {error}.") from error
        self._store = PrefixStore("meshwright/failure", connect_store(BOARD_TIMEOUT_S))

    def first(self, exit_code: int, *, patience_s: float) -> int | None:
        """Return the exit code that another rank has posted, or post this one and return None."""
        if patience_s:
            with suppress(RuntimeError):  # nobody posted in time; if the store itself is gone, what follows says so
                self._store.wait([self._KEY], timedelta(seconds=patience_s))
        # Two threads of a rank may both fail.
        mine = f"{rank()} {exit_code} {threading.get_ident()}"
        first = self._store.compare_set(self._KEY, "", mine).decode()
        return None if first == mine else int(first.split()[1])

    def who_hangs(self) -> str | None:
        """Return the message about the rank that this one has waited for in vain; None if none stands out."""
        from torch.distributed import PrefixStore

        me, size = int(rank()), world_size()
        self._store.set(f"waited/{me}", "")
        pulses = PrefixStore(_PULSES, connect_store(BOARD_TIMEOUT_S))
        return who_hangs(
            pulses, me, size, lambda: [each for each in range(size) if self._store.check([f"waited/{each}"])]
        )


def _render(error: BaseException, last: str, *, with_traceback: bool) -> str:
    """Return `last`, after the traceback if wanted, in place of the interpreter's own last line."""
    if not with_traceback:
        return f"{last}\n"
    whole = "".join(traceback.format_exception(error)).rstrip("\n")
    return f"{whole.removesuffix(headline(error))}{last}\n"


def say_whole(text: str) -> None:
    """Write in one piece, so that the lines of two ranks do not mix."""
    say(text, stderr=True)
    sys.stderr.flush()
