"""The side of a rank in a launched world: connect to the store, run a main function, and report a failure once.

[Note: one report per failure] When one rank fails, its peers fail too, but only the first failure matters. So a failing
rank posts its exit code in the rendezvous store before it exits. Only the rank that posts first writes to stderr; the
others exit with its exit code. If a failure looks like the consequence of a peer's failure, the rank waits for that
peer's post. A rank that is killed by a signal posts nothing: its launcher ends the waiting peers and names it. A rank
that hangs is named by its peers; see [Note: heartbeats] in `heartbeat`.
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
    INTERRUPTED_EXIT_CODE,
    Hang,
    MeshwrightError,
    Progress,
    RankError,
    Stopped,
    connect_store,
    echo,
    exit_process,
    exit_with_launcher,
    format_error,
    format_exception_only,
    get_rank_variable,
    get_store_host,
    get_world_size,
    install_output_escaping,
    is_launched,
    is_launched_by_torchrun,
    is_launched_externally,
)

from .external_watchdog import ExternalWatchdog
from .hang_detection import describe_hung_rank
from .heartbeat import Heartbeat

STORE_TIMEOUT_S = 5.0
"""Timeout for the store when a failure is reported: it was reachable before, so it answers at once or is gone."""

PEER_FAILURE_WAIT_S = 6.0
"""Time that a failure caused by a peer waits for the peer's post; longer than a launcher takes to end peers of a killed
rank."""

LOST_PEER_WAIT_S = 1.5
"""The same if no `local` launcher ends the peers: once its connections close, a failing peer has posted already."""

PEER_FAILURE_TEXTS = (
    "closed by peer",  # gloo: the peer's process ended, which closed its sockets
    "reset by peer",  # gloo and TCPStore: the peer was killed with data in flight
    "broken pipe",  # gloo and TCPStore: write to a peer that is gone
    "socket closed",  # gloo: the connection was shut down after an error of another operation
    "connectfullmesh failed",  # gloo: a peer ended while the group was being formed
    "connection was likely closed",  # TCPStore client: the process that hosts the store is gone
    "nccl communicator was aborted",  # NCCL: its watchdog aborts collectives that wait for a failed peer
    "remote process exited",  # NCCL: the text of ncclRemoteError
)
"""Lower-case texts in errors of gloo, NCCL and the store if a *peer* is gone. A false match only causes a delay."""

TIMEOUT_TEXTS = (
    "timed out waiting",  # gloo: a collective
    "collective operation timeout",  # NCCL: its watchdog
    "wait timeout after",  # TCPStore
)
"""Lower-case texts in errors of ranks whose wait for a peer has timed out."""

_HEARTBEAT_PREFIX = "meshwright/pulse"
"""Prefix of the heartbeats in the rendezvous store."""


def run_guarded(
    main: Callable[..., object],
    args: tuple[Any, ...] = (),
    *,
    show_traceback: bool = False,
    timeout_s: float = CONNECT_TIMEOUT_S,
) -> int:
    """Run `main(store, *args)` as this rank's part of the job; see [Note: one report per failure].

    After a failure, nothing is shut down, since that could wait for peers: end the process at once, with
    `exit_process`. `store`: the store of the launched world; None outside of one. `timeout_s`: limit for reaching it.
    Returns 0, the exit code of the failure that was reported (on any rank), or INTERRUPTED_EXIT_CODE.
    """
    install_output_escaping()
    if is_launched_by_torchrun():
        # Ranks of `local` call this themselves, and other launchers end their ranks.
        exit_with_launcher()
    try:
        store = connect_store(timeout_s) if is_launched() else None
    except RankError as error:
        # Without a store, the ranks cannot agree on which one reports, and this may be the only one without it.
        failure = RankFailure.from_exception(error, show_traceback)
        write_stderr(f"rank {get_rank_variable()}: {failure.text}")
        return failure.exit_code
    except KeyboardInterrupt:
        return INTERRUPTED_EXIT_CODE
    try:
        main(store, *args)
    except Stopped as stopped:
        # This is no failure, and all ranks have agreed to stop.
        return int(stopped.code or 0)
    except BaseException as error:
        failure = RankFailure.from_exception(error, show_traceback)
    else:
        return 0
    try:
        return _report_failure(failure)
    except KeyboardInterrupt:
        return INTERRUPTED_EXIT_CODE


@contextmanager
def heartbeat(timeout_s: float, watchdog_s: float | None = None) -> Iterator[Progress]:
    """End this process, and name the rank that hangs, if a rank sends no heartbeat or, with a watchdog, stalls.

    Each rank enters the context, and its main thread updates the `Progress` that it yields. Arguments as in
    `Heartbeat`.
    """
    progress, size = Progress(), get_world_size() if is_launched() else 1
    if size == 1 and watchdog_s is None:
        yield progress
        return
    from torch.distributed import HashStore, PrefixStore

    def end(hang: Hang) -> None:
        failure = RankFailure(1, f"{format_error(RankError(hang.message))}\n")
        if hang.is_store_down:
            write_stderr(failure.text)
        exit_process(failure.exit_code if hang.is_store_down else _report_failure(failure))

    thread = Heartbeat(
        PrefixStore(_HEARTBEAT_PREFIX, connect_store(timeout_s)) if size > 1 else HashStore(),
        int(get_rank_variable()) if size > 1 else 0,
        size,
        timeout_s=timeout_s,
        on_hang=end,
        watchdog_s=watchdog_s,
        progress=progress,
        host=get_store_host() if size > 1 else None,
    )
    # `local` ends its ranks itself.
    with (
        ExternalWatchdog(thread.get_silence_limit_s, thread.interval_s)
        if is_launched_externally()
        else nullcontext() as watchdog,
        thread,
    ):
        if watchdog is not None:
            progress.on_warmed_up = watchdog.ping
        yield progress


def is_peer_failure(error: BaseException) -> bool:
    """Return whether `error`, or an error that caused it, is likely the consequence of a peer's failure."""
    from torch.distributed import DistError

    return any(isinstance(link, DistError) for link in _iter_exception_chain(error)) or _matches_any(
        error, PEER_FAILURE_TEXTS
    )


def _matches_any(error: BaseException, texts: tuple[str, ...]) -> bool:
    links = [link for link in _iter_exception_chain(error) if isinstance(link, (RuntimeError, MeshwrightError))]
    return any(text in str(link).lower() for link in links for text in texts)


def _iter_exception_chain(error: BaseException) -> Iterator[BaseException]:
    link: BaseException | None = error
    while link is not None:
        yield link
        link = link.__cause__ or link.__context__


@dataclass(frozen=True)
class RankFailure:
    """Failure of a rank's main function. `peer_failure`: "Type: message" if it is likely caused by a peer's failure."""

    exit_code: int
    text: str
    peer_failure: str = ""
    is_timeout: bool = False

    @classmethod
    def from_exception(cls, error: BaseException, show_traceback: bool) -> RankFailure:
        if isinstance(error, KeyboardInterrupt):
            return cls(INTERRUPTED_EXIT_CODE, "")
        if isinstance(error, SystemExit):
            # As in the interpreter: None is success, an int is the code, anything else is a message.
            if error.code is None or isinstance(error.code, int):
                return cls(error.code or 0, "")
            return cls(1, f"{error.code}\n")
        peer_failure = format_exception_only(error) if is_peer_failure(error) else ""
        timed_out = _matches_any(error, TIMEOUT_TEXTS)
        if isinstance(error, MeshwrightError):
            text = _format_failure(error, format_error(error), with_traceback=show_traceback)
            return cls(error.exit_code, text, peer_failure, timed_out)
        who = f"rank {get_rank_variable()} failed: " if is_launched() else ""
        return cls(
            1, _format_failure(error, who + format_exception_only(error), with_traceback=True), peer_failure, timed_out
        )


def _report_failure(failure: RankFailure) -> int:
    """Post `failure`, print it if it is the first, and return the exit code of the first failure."""
    if failure.exit_code == 0 or not is_launched():
        write_stderr(failure.text)
        return failure.exit_code
    try:
        board = _FailureBoard()
        if failure.is_timeout and (hangs := board.describe_hung_rank()):
            failure = RankFailure(1, f"{format_error(RankError(hangs))}\n")
        is_lost = is_launched_externally() and not failure.is_timeout
        patience_s = (LOST_PEER_WAIT_S if is_lost else PEER_FAILURE_WAIT_S) if failure.peer_failure else 0.0
        first = board.post_or_get_first(failure.exit_code, wait_s=patience_s)
    except (RankError, RuntimeError):
        # The store ended with the rank that hosted it. Two reports are better than none, but should be short.
        write_stderr(
            f"rank {get_rank_variable()} lost its peers and their store: {failure.peer_failure}\n"
            if failure.peer_failure
            else failure.text
        )
        if failure.is_timeout:
            write_stderr(
                "The process that hosts the rendezvous store does not answer either: it may be the one that hangs.\n"
            )
        return failure.exit_code
    if first is None:
        lost = (
            "This rank lost a peer, and no rank has reported why: one may have been killed.\n"
            if failure.peer_failure
            else ""
        )
        write_stderr(failure.text + (lost if failure.text else ""))
        return failure.exit_code
    return first


class _FailureBoard:
    """Key in the store with the first failure of the world. Has its own connection, since others may be blocked."""

    _KEY = "first"

    def __init__(self) -> None:
        from torch.distributed import PrefixStore

        # If nobody listens, torch would print pages of C++ frames.
        address = (os.environ.get("MASTER_ADDR", ""), int(os.environ.get("MASTER_PORT", "0")))
        try:
            socket.create_connection(address, timeout=STORE_TIMEOUT_S).close()
        except OSError as error:
            raise RankError(f"the rendezvous store at {address[0]}:{address[1]} is gone: {error}.") from error
        self._store = PrefixStore("meshwright/failure", connect_store(STORE_TIMEOUT_S))

    def post_or_get_first(self, exit_code: int, *, wait_s: float) -> int | None:
        """Return the exit code that another rank has posted, or post this one and return None."""
        if wait_s:
            with suppress(RuntimeError):  # nobody posted in time; if the store is gone, the next call raises
                self._store.wait([self._KEY], timedelta(seconds=wait_s))
        # Two threads of a rank may both fail.
        mine = f"{get_rank_variable()} {exit_code} {threading.get_ident()}"
        first = self._store.compare_set(self._KEY, "", mine).decode()
        return None if first == mine else int(first.split()[1])

    def describe_hung_rank(self) -> str | None:
        """Return a message that names the rank for which this one has waited too long; None if none stands out."""
        from torch.distributed import PrefixStore

        me, size = int(get_rank_variable()), get_world_size()
        self._store.set(f"waited/{me}", "")
        pulses = PrefixStore(_HEARTBEAT_PREFIX, connect_store(STORE_TIMEOUT_S))
        return describe_hung_rank(
            pulses, me, size, lambda: [each for each in range(size) if self._store.check([f"waited/{each}"])]
        )


def _format_failure(error: BaseException, last_line: str, *, with_traceback: bool) -> str:
    """Return `last_line`. With a traceback, it replaces the traceback's last line."""
    if not with_traceback:
        return f"{last_line}\n"
    text = "".join(traceback.format_exception(error)).rstrip("\n")
    return f"{text.removesuffix(format_exception_only(error))}{last_line}\n"


def write_stderr(text: str) -> None:
    """Write `text` in one call, so that lines of several ranks do not mix."""
    echo(text, stderr=True)
    sys.stderr.flush()
