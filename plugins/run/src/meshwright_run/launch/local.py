"""Start the ranks of one machine and wait for them: the parent's side of `meshwright train`.

torch's elastic agent starts the processes, hosts their rendezvous store and watches them. This module adds a fork
server that has imported torch once for all ranks, an exit code, and silence: the failing rank reports what went wrong
(see [Note: one report per failure] in `rank`), or this module if a signal killed it. Torch is imported only where it is
used, so that the fork server can import it while the parent validates.

[Note: nobody is left behind] After the failure of a peer the agent sends SIGTERM, and `_Reaper` kills a rank that does
not respect it; after a signal to the parent the agent passes it on and then kills; after an exception in the parent
`_kill_leftover_children` kills; after the parent's sudden death a thread in each rank does.

[Note: signals that are waited for] torch's agent would kill ranks soon after a signal. A signal that asks them to stop
in order (see [Note: stopping] in `meshwright.base.stopping`) is passed on here; the second one is the agent's.

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

from .rank_process import INTERRUPTED, run_guarded

if TYPE_CHECKING:
    from multiprocessing.queues import SimpleQueue

    from torch.distributed.launcher.api import LaunchConfig

    StatusQueue: TypeAlias = SimpleQueue[tuple[int, tuple[int, str] | None]]
    """A rank signs with its pid and identity when it starts, and with None when it is done."""

PRELOAD = (
    "meshwright_run.launch.forkserver_signals",
    "torch",
    "torch.distributed.launcher.api",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
    "transformers.modeling_utils",
    "transformers.models.auto.modeling_auto",
)
"""Modules that the fork server imports once for all ranks. If one is missing, the ranks report it."""

MONITOR_INTERVAL_S = 0.1

KILL_DELAY_S = 2
"""From the first death, or the signal, to SIGKILL for the ranks that remain; less than
`rank_process.PEER_FAILURE_WAIT_S`."""

_NOISY_LOGGERS = ("torch.distributed.elastic", "torch.distributed.launcher", "torch.multiprocessing")


def start_fork_server(preload: Sequence[str] = ()) -> None:
    """Start the fork server, which imports torch, transformers and `preload` in the background, and return at once.

    Ranks are forked from it, so they see this process's environment as it is now. A second call does nothing.
    """
    multiprocessing.set_forkserver_preload([*PRELOAD, *preload])
    threads = os.environ.get("OMP_NUM_THREADS")
    # With one thread, torch and numpy start no thread pool on import: threads do not survive the fork into a rank.
    os.environ["OMP_NUM_THREADS"] = "1"
    try:
        with safe_path_enabled():
            # The server would start the tracker otherwise, and that ends with SIGINT let through.
            resource_tracker.ensure_running()
            # The server inherits the mask; see meshwright_run.launch.forkserver_signals.
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
    """Run `main(store, *args)` on `nproc` ranks of this machine, each in a process of its own, and wait for them.

    Each rank runs it under `rank_process.run_guarded`; `main` is at the top level of a module, and pickled with `args`.
    The ranks handle the signals in `forwarded_signals` as `StopSignals` does: the first is passed on, and they take all
    the time they need. A second one ends the job, as any other signal does at once. Returns 0, the exit code of the
    rank that failed first (1 when a signal killed it), or 128 plus the number of the signal that ended the wait (130
    for Ctrl-C).
    """
    if nproc < 1:
        raise ConfigError(f"no rank to start: nproc={nproc}. It must be at least 1.")
    try:
        start_fork_server()
        with block_interrupts():  # torch's import can swallow a KeyboardInterrupt
            from torch.distributed.elastic.multiprocessing import SignalException
        _wait_for_fork_server()
    except KeyboardInterrupt:
        return INTERRUPTED
    try:
        with restore_signal_handlers(), _silence_agent_logs(), _kill_leftover_children():
            return _run_agent(main, args, nproc, show_traceback, forwarded_signals)
    except SignalException as stop:
        return 128 + stop.sigval
    except KeyboardInterrupt:
        return INTERRUPTED


def _wait_for_fork_server() -> None:
    """Return when the fork server has imported all: on Ctrl-C the agent would forget a rank that waits for it."""
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

    roll: StatusQueue = multiprocessing.get_context("forkserver").SimpleQueue()
    order = _RankTask(main, args, _threads_per_rank(nproc), show_traceback, roll)
    try:
        with _Reaper(roll) as reaper, forward_signals(forwarded_signals, reaper.unfinished_ranks) as passed:
            elastic_launch(_launch_config(nproc, forwarded_signals), _run_rank)(order)
    except ChildFailedError as failed:
        rank, failure = failed.get_first_failure()
        if failure.exitcode < 0 and passed:
            # Killed before they could save anything.
            return 128 + passed[0]
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
    """All arguments of a rank as one: the agent substitutes macros in arguments that are strings."""

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
        exit_code = INTERRUPTED
    if exit_code:
        exit_process(exit_code)
    task.status_queue.put((rank, None))


class _Reaper(threading.Thread):
    """Kills ranks that still live KILL_DELAY_S after one has died before it was done; the agent would wait 30 s."""

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
        """Return the ranks that have started, and not ended well."""
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
    """Return OMP_NUM_THREADS where the user has set it, else an equal share of the CPUs."""
    wish = os.environ.get("OMP_NUM_THREADS", "")
    if wish.isdecimal() and int(wish) > 0:
        return int(wish)
    return max(1, count_usable_cores() // nproc)


@contextmanager
def _kill_leftover_children() -> Iterator[None]:
    """Kill processes that the context leaves behind; on the main thread, since polling races with the agent's."""
    others = set(multiprocessing.active_children())
    try:
        yield
    finally:
        for child in set(multiprocessing.active_children()) - others:
            child.kill()
            child.join()


@contextmanager
def _silence_agent_logs() -> Iterator[None]:
    """Silence the agent's logs about failures: its ranks have reported them, or `launch` will."""
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
"""Signals that the agent passes on before it kills."""
_SIGNALS_VARIABLE = "TORCHELASTIC_SIGNALS_TO_HANDLE"


@contextmanager
def forward_signals(names: Sequence[str], find_processes: Callable[[], Sequence[ProcessHandle]]) -> Iterator[list[int]]:
    """Pass on the first of some signals to the ranks; yield a list that gets the numbers of those passed on."""
    from torch.distributed.elastic.multiprocessing import SignalException

    passed: list[int] = []
    first_s = 0.0

    def handle(number: int, frame: FrameType | None) -> None:
        nonlocal first_s
        again, ranks = bool(passed) and time.monotonic() - first_s > SIGNAL_DEBOUNCE_S, find_processes()
        if again or not ranks:
            raise SignalException(f"got {get_signal_name(number)}", sigval=signal.Signals(number))
        if not passed:
            first_s = time.monotonic()
            passed.append(number)
            # Not by a stream, which the handler may have interrupted.
            os.write(2, f"{format_stop_notice(number)}\n".encode())
            for each in ranks:
                each.send_signal(number)

    before = {name: signal.signal(signal.Signals[name], handle) for name in names}
    try:
        yield passed
    finally:
        for name, handler in before.items():
            signal.signal(signal.Signals[name], handler)


@contextmanager
def block_interrupts() -> Iterator[None]:
    """Keep Ctrl-C waiting until the end of the context."""
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


@contextmanager
def restore_signal_handlers() -> Iterator[None]:
    """Restore the signal handlers, and the variable naming them, that the agent leaves behind."""
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
