"""First import of the fork server: afterwards Ctrl-C ends it at once and silently, whatever it is importing.

It starts with SIGINT blocked, so that an earlier interrupt is delayed instead of printing a traceback. It ignores the
other signals that schedulers send to all processes, since it reports ends of ranks to the launcher. It ends with the
launcher. Ranks are forked from it and first call `restore_signals`.
"""

import signal

_SCHEDULER_SIGNALS = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


def restore_signals() -> None:
    """Restore the default handlers of the ignored signals, in a rank."""
    for number in _SCHEDULER_SIGNALS:
        signal.signal(number, signal.SIG_DFL)


signal.signal(signal.SIGINT, signal.SIG_DFL)
signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
for _number in _SCHEDULER_SIGNALS:
    signal.signal(_number, signal.SIG_IGN)
