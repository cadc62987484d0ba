"""The fork server's first import: from here on Ctrl-C ends it at once and in silence, whatever it is importing.

It starts with SIGINT blocked, so that an interrupt before this line waits instead of printing a traceback. Ranks that
are forked from it die of Ctrl-C as silently, until they handle it themselves.
"""

import signal

signal.signal(signal.SIGINT, signal.SIG_DFL)
signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
