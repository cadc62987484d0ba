"""A process that does work for another one, over its standard input and output.

[Note: processes of our own] A fork would lose the threads of torch and of tokenizers and may hang; what multiprocessing
spawns runs the user's script again, which need not be made for that, and a process that it has started itself may have
no children. So a worker is a Python of its own that imports this module alone. It ends when its input does: with the
process that it works for, however that ended.
"""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import IO, Any

from ...base.errors import DataError
from ...base.safe_path import PYTHON
from ...files.terminal import escape_messages

_LENGTH = 8


class Worker:
    """A process that has made something, and calls it with what it is sent.

    Each thread has its own: `call` waits for the answer.
    """

    def __init__(self, make: Callable[..., Callable[[Any], Any]], *args: Any) -> None:
        """Start a process that makes `make(*args)`, a function of a module and plain values."""
        code = f"import sys; sys.path[:] = {sys.path!r}; from {__name__} import serve; serve()"
        self._process = subprocess.Popen(
            [*PYTHON, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=dict(os.environ)
        )
        self._begin = (make, args)
        self._begun = False

    def call(self, argument: Any) -> Any:
        """What the made function returns of `argument`.

        Raises:
            DataError: the process has ended.
        """
        if not self._begun:
            self._begun = True
            self._ask(self._begin)
        return self._ask(argument)

    def close(self) -> None:
        """Let the process end, and wait for it."""
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with suppress(BrokenPipeError):
                    pipe.close()
        self._process.wait()

    def _ask(self, question: Any) -> Any:
        stdin, stdout = self._process.stdin, self._process.stdout
        if stdin is None or stdout is None:
            raise DataError("the process that tokenizes has no pipes.")
        try:
            _send(stdin, question)
            is_error, answer = _receive(stdout)
        except (EOFError, BrokenPipeError):
            code = self._process.wait()
            raise DataError(
                f"a process that tokenizes ended unexpectedly (exit code {code}); if it is -9, memory may have run out."
            ) from None
        if is_error:
            raise answer
        return answer


def serve() -> None:
    """Be a worker; what libraries print goes to stderr."""
    # Schedulers send these to all processes; it ends with the one that it works for.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    escape_messages()
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    function: Callable[[Any], Any] | None = None
    answer: tuple[bool, Any]
    while True:
        try:
            question = _receive(sys.stdin.buffer)
        except EOFError:
            return
        try:
            if function is None:
                make, args = question
                function = make(*args)
                answer = (False, None)
            else:
                answer = (False, function(question))
        except Exception as error:
            answer = (True, error)
        try:
            _send(answers, answer)
        except BrokenPipeError:
            return


def _send(pipe: IO[bytes], value: Any) -> None:
    content = pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)
    pipe.write(len(content).to_bytes(_LENGTH, "little"))
    pipe.write(content)
    pipe.flush()


def _receive(pipe: IO[bytes]) -> Any:
    return pickle.loads(_read(pipe, int.from_bytes(_read(pipe, _LENGTH), "little")))


def _read(pipe: IO[bytes], count: int) -> bytes:
    content = pipe.read(count)
    if len(content) < count:
        raise EOFError
    return content
