"""The fork server's first import: from here on Ctrl-C ends it at once and in silence, whatever it is importing.

It starts with SIGINT blocked, so that an interrupt before this line waits instead of printing a traceback. Ranks that
are forked from it die of Ctrl-C as silently, until they handle it themselves.

Schedulers send other signals to all processes. The server does not die of these, since it tells the launcher of the
ends of the ranks; it ends with the launcher. Ranks begin by calling `mind`.
"""

import signal

signal.signal(signal.SIGINT, signal.SIG_DFL)
signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
_TO_ALL = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


def ignore() -> None:
    """In the fork server."""
    for number in _TO_ALL:
        signal.signal(number, signal.SIG_IGN)


def mind() -> None:
    """In a rank: die of them."""
    for number in _TO_ALL:
        signal.signal(number, signal.SIG_DFL)


ignore()
