"""Start the ranks of one node and wait for them: the parent's side of `meshwright train`.

torch's elastic agent starts the processes, hosts their rendezvous store and watches them. This module adds a fork
server that imports torch once for all ranks, and an exit code. It silences the agent: the failing rank reports its
error (see [Note: one report per failure] in `rank_process`), or this module if a signal killed it. Torch is imported
only where it is used, so that the fork server can import it while the parent validates.

[Note: no leftover processes] After the failure of a peer, the agent sends SIGTERM, and `_Reaper` kills ranks that do
not exit. After a signal to the parent, the agent forwards it and then kills. After an exception in the parent,
`_kill_leftover_children` kills. If the parent is killed, a thread in each rank ends the rank.

[Note: forwarded signals] torch's agent would kill ranks soon after a signal. This module forwards the first signal that
asks the run to stop (see [Note: stopping] in `meshwright.base.stopping`); the agent handles the second one.

Source: torch.distributed.launcher.api; multiprocessing.forkserver.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from multiprocessing import forkserver, resource_tracker
from types import FrameType
from typing import TYPE_CHECKING, Any, TypeAlias

from meshwright.plugin import (
    INTERRUPTED_EXIT_CODE,
    LOOPBACK,
    SIGNAL_DEBOUNCE_S,
    SINGLE_NODE_BACKEND,
    ConfigError,
    ProcessHandle,
    count_usable_cores,
    echo,
    exit_process,
    exit_with_launcher,
    format_stop_notice,
    get_process_identity,
    register_single_node_backend,
    safe_path_enabled,
)

from .rank_process import run_guarded

if TYPE_CHECKING:
    from multiprocessing.queues import SimpleQueue

    from torch.distributed.launcher.api import LaunchConfig

    StatusQueue: TypeAlias = SimpleQueue[tuple[int, tuple[int, str] | None]]
    """Each rank puts its number and, when it starts, its pid and identity; when it is done, None."""

PRELOAD = (
    "meshwright_run.launch.forkserver_signals",
    "torch",
    "torch.distributed.launcher.api",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
    "transformers.modeling_utils",
    "transformers.models.auto.modeling_auto",
)
"""Modules that the fork server imports once for all ranks. If one is missing, the ranks raise the error."""

MONITOR_INTERVAL_S = 0.1

KILL_DELAY_S = 2
"""Time from the end of the first rank, or the signal, to SIGKILL for the remaining ranks; less than
`rank_process.PEER_FAILURE_WAIT_S`."""

_NOISY_LOGGERS = ("torch.distributed.elastic", "torch.distributed.launcher", "torch.multiprocessing")


def start_fork_server(preload: Sequence[str] = ()) -> None:
    """Start the fork server, which imports torch, transformers and `preload` in the background. Returns at once.

    Ranks are forked from it, so they have the environment that this process has now. A second call does nothing.
    """
    multiprocessing.set_forkserver_preload([*PRELOAD, *preload])
    threads = os.environ.get("OMP_NUM_THREADS")
    # With one thread, torch and numpy start no thread pool on import; threads would not survive the fork into a rank.
    os.environ["OMP_NUM_THREADS"] = "1"
    try:
        with safe_path_enabled():
            # Otherwise the server would start the tracker, which unblocks SIGINT.
            resource_tracker.ensure_running()
            # The server inherits the signal mask; see `forkserver_signals`.
            with block_interrupts():
                forkserver.ensure_running()
    finally:
        if threads is None:
            del os.environ["OMP_NUM_THREADS"]
        else:
            os.environ["OMP_NUM_THREADS"] = threads


def launch_ranks(
    main: Callable[..., object],
    args: tuple[Any, ...],
    *,
    nproc: int,
    show_traceback: bool = False,
    forwarded_signals: Sequence[str] = (),
) -> int:
    """Run `main(store, *args)` on `nproc` ranks of this node, each in its own process, and wait for them.

    Each rank runs it under `rank_process.run_guarded`. `main` must be at the top level of a module; it is pickled with
    `args`. The ranks handle the signals in `forwarded_signals` as `StopSignals` does: the first one is forwarded, and
    there is no limit on the time until they stop. A second one, or any other signal, ends the job at once. Returns 0,
    the exit code of the rank that failed first (1 if a signal killed it), or 128 plus the number of the signal that
    ended the wait (130 for Ctrl-C).
    """
    if nproc < 1:
        raise ConfigError(f"nproc={nproc} starts no rank. It must be at least 1.")
    try:
        start_fork_server()
        with block_interrupts():  # torch's import can swallow a KeyboardInterrupt
            from torch.distributed.elastic.multiprocessing import SignalException
        _wait_for_fork_server()
    except KeyboardInterrupt:
        return INTERRUPTED_EXIT_CODE
    try:
        with restore_signal_handlers(), _silence_agent_logs(), _kill_leftover_children():
            return _run_agent(main, args, nproc, show_traceback, forwarded_signals)
    except SignalException as stop:
        return 128 + stop.sigval
    except KeyboardInterrupt:
        return INTERRUPTED_EXIT_CODE


def _wait_for_fork_server() -> None:
    """Wait until the fork server has imported its modules. On Ctrl-C, the agent would miss a rank that waits for it."""
    probe = multiprocessing.get_context("forkserver").Process(target=int, daemon=True)
    probe.start()
    probe.join()


def _run_agent(
    main: Callable[..., object],
    args: tuple[Any, ...],
    nproc: int,
    show_traceback: bool,
    forwarded_signals: Sequence[str],
) -> int:
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import elastic_launch

    status_queue: StatusQueue = multiprocessing.get_context("forkserver").SimpleQueue()
    task = _RankTask(main, args, _threads_per_rank(nproc), show_traceback, status_queue)
    try:
        with _Reaper(status_queue) as reaper, forward_signals(forwarded_signals, reaper.unfinished_ranks) as forwarded:
            elastic_launch(_launch_config(nproc, forwarded_signals), _run_rank)(task)
    except ChildFailedError as failed:
        rank, failure = failed.get_first_failure()
        if failure.exitcode < 0 and forwarded:
            # The rank was killed before it could save.
            return 128 + forwarded[0]
        if failure.exitcode > 0:
            return failure.exitcode
        hint = " (for instance: out of memory)" if -failure.exitcode == signal.SIGKILL else ""
        echo(f"rank {rank} was killed by {get_signal_name(-failure.exitcode)}{hint}\n", stderr=True)
        return 1
    return 0


def _launch_config(nproc: int, forwarded_signals: Sequence[str]) -> LaunchConfig:
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
    from torch.distributed.launcher.api import LaunchConfig

    register_single_node_backend()
    options: dict[str, Any] = {}
    if "shutdown_timeout" in {field.name for field in fields(LaunchConfig)}:  # older versions wait 30 s
        options["shutdown_timeout"] = KILL_DELAY_S
    return LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=nproc,
        run_id=uuid.uuid4().hex,
        rdzv_backend=SINGLE_NODE_BACKEND,
        local_addr=LOOPBACK,
        max_restarts=0,
        monitor_interval=MONITOR_INTERVAL_S,
        start_method="forkserver",
        signals_to_handle=",".join(name for name in AGENT_SIGNALS if name not in forwarded_signals),
        logs_specs=DefaultLogsSpecs(log_dir=os.devnull),  # no redirection, and no directory left behind
        **options,
    )


@dataclass(frozen=True)
class _RankTask:
    """All arguments of a rank in one object, since the agent substitutes macros in arguments that are strings."""

    main: Callable[..., object]
    args: tuple[Any, ...]
    num_threads: int
    show_traceback: bool
    status_queue: StatusQueue


def _run_rank(task: _RankTask) -> None:
    """Main function of a rank's process."""
    from .forkserver_signals import restore_signals

    restore_signals()
    import torch

    rank = int(os.environ["RANK"])
    task.status_queue.put((rank, (os.getpid(), get_process_identity(os.getpid()))))
    exit_with_launcher()
    torch.set_num_threads(task.num_threads)
    os.environ["OMP_NUM_THREADS"] = str(task.num_threads)  # for processes that this rank starts
    try:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        exit_code = run_guarded(task.main, task.args, show_traceback=task.show_traceback)
    except KeyboardInterrupt:
        exit_code = INTERRUPTED_EXIT_CODE
    if exit_code:
        exit_process(exit_code)
    task.status_queue.put((rank, None))


class _Reaper(threading.Thread):
    """Thread that kills ranks which still run KILL_DELAY_S after a rank has failed; the agent would wait 30 s."""

    def __init__(self, status_queue: StatusQueue) -> None:
        super().__init__(name="meshwright-reaper", daemon=True)
        self._status_queue = status_queue
        self._ranks: dict[int, ProcessHandle] = {}
        self._stop_event = threading.Event()

    def __enter__(self) -> _Reaper:
        self.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._stop_event.set()
        self.join()

    def unfinished_ranks(self) -> list[ProcessHandle]:
        """Return the ranks that have started and are not done."""
        return list(self._ranks.values())

    def run(self) -> None:
        deadline_s = None
        while not self._stop_event.wait(MONITOR_INTERVAL_S):
            self._read_status_queue()
            alive = {rank: each for rank, each in self._ranks.items() if each.is_alive()}
            if deadline_s is None and len(alive) < len(self._ranks):
                deadline_s = time.monotonic() + KILL_DELAY_S
            if deadline_s is not None and time.monotonic() > deadline_s:
                for each in alive.values():
                    each.send_signal(signal.SIGKILL)
                self._ranks = {}

    def _read_status_queue(self) -> None:
        while not self._status_queue.empty():
            rank, process = self._status_queue.get()
            if process is not None:
                self._ranks[rank] = ProcessHandle(*process)
            elif rank in self._ranks:
                self._ranks.pop(rank).close()


def _threads_per_rank(nproc: int) -> int:
    """Return OMP_NUM_THREADS if it is set, otherwise an equal share of the CPU cores."""
    setting = os.environ.get("OMP_NUM_THREADS", "")
    if setting.isdecimal() and int(setting) > 0:
        return int(setting)
    return max(1, count_usable_cores() // nproc)


@contextmanager
def _kill_leftover_children() -> Iterator[None]:
    """Kill child processes that the context leaves behind. Call it in the main thread: polling races with the agent."""
    others = set(multiprocessing.active_children())
    try:
        yield
    finally:
        for child in set(multiprocessing.active_children()) - others:
            child.kill()
            child.join()


@contextmanager
def _silence_agent_logs() -> Iterator[None]:
    """Silence the agent's logs about failures, which its ranks have reported, or `_run_agent` will report."""
    loggers = [logging.getLogger(name) for name in _NOISY_LOGGERS]
    propagated = [logger.propagate for logger in loggers]
    silence = logging.NullHandler()
    for logger in loggers:
        logger.addHandler(silence)
        logger.propagate = False
    try:
        yield
    finally:
        for logger, propagate in zip(loggers, propagated, strict=True):
            logger.removeHandler(silence)
            logger.propagate = propagate


# -- signals to this process

AGENT_SIGNALS = ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT")
"""Signals that the agent forwards before it kills."""
_SIGNALS_VARIABLE = "TORCHELASTIC_SIGNALS_TO_HANDLE"


@contextmanager
def forward_signals(names: Sequence[str], find_processes: Callable[[], Sequence[ProcessHandle]]) -> Iterator[list[int]]:
    """Forward the first of some signals to the ranks; yield a list to which the number of that signal is added."""
    from torch.distributed.elastic.multiprocessing import SignalException

    forwarded: list[int] = []
    first_s = 0.0

    def handle(number: int, frame: FrameType | None) -> None:
        nonlocal first_s
        again, ranks = bool(forwarded) and time.monotonic() - first_s > SIGNAL_DEBOUNCE_S, find_processes()
        if again or not ranks:
            raise SignalException(f"got {get_signal_name(number)}", sigval=signal.Signals(number))
        if not forwarded:
            first_s = time.monotonic()
            forwarded.append(number)
            # Streams are not reentrant: the handler may have interrupted a write to this one.
            os.write(2, f"{format_stop_notice(number)}\n".encode())
            for each in ranks:
                each.send_signal(number)

    before = {name: signal.signal(signal.Signals[name], handle) for name in names}
    try:
        yield forwarded
    finally:
        for name, handler in before.items():
            signal.signal(signal.Signals[name], handler)


@contextmanager
def block_interrupts() -> Iterator[None]:
    """Delay Ctrl-C until the end of the context."""
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


@contextmanager
def restore_signal_handlers() -> Iterator[None]:
    """Restore the signal handlers that the agent replaces, and the environment variable that lists them."""
    before = os.environ.get(_SIGNALS_VARIABLE)
    handlers = {name: signal.getsignal(signal.Signals[name]) for name in AGENT_SIGNALS}
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():
            for name, handler in handlers.items():
                if handler is not None:  # None: not installed from Python
                    signal.signal(signal.Signals[name], handler)
        if before is None:
            os.environ.pop(_SIGNALS_VARIABLE, None)
        else:
            os.environ[_SIGNALS_VARIABLE] = before


def get_signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal has no name
        return f"signal {number}"
