"""Which errors of a rank are the consequence of what has happened to another."""

from __future__ import annotations

from collections.abc import Iterator

from ..base.errors import MeshwrightError

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
"""Lower-case texts of RuntimeErrors that gloo, NCCL and the store raise when a *peer* is gone.

Too many entries cost little: a failure that is mistaken for an echo is still reported, `rank.ECHO_WAIT_S` later.
"""

TIMEOUT_TEXTS = (
    "timed out waiting",  # gloo: a collective
    "collective operation timeout",  # NCCL: its watchdog
    "wait timeout after",  # TCPStore
)
"""Lower-case texts of errors of ranks that have waited for a peer in vain."""


def is_echo(error: BaseException) -> bool:
    """Say whether `error`, or what it was raised from, is likely the consequence of a peer's death."""
    from torch.distributed import DistError

    return any(isinstance(link, DistError) for link in _chain(error)) or reads_like(error, ECHO_TEXTS)


def reads_like(error: BaseException, texts: tuple[str, ...]) -> bool:
    """Say whether `error`, or what it was raised from, holds one of some lower-case texts."""
    links = [link for link in _chain(error) if isinstance(link, (RuntimeError, MeshwrightError))]
    return any(text in str(link).lower() for link in links for text in texts)


def _chain(error: BaseException) -> Iterator[BaseException]:
    link: BaseException | None = error
    while link is not None:
        yield link
        link = link.__cause__ or link.__context__
