"""A run that a signal asks to stop saves, leaves with the code that was asked for, and continues as if it had not.

Which signals do so in a run, and how much time they leave it, is documented in `OnSignalConfig`.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from support.checkpoints import step_directory
from support.commands import copy_environment
from support.kill_sweep import (
    LAYOUTS,
    SweptLayout,
    TrainingRun,
    end_session,
    find_ranks,
    find_session_processes,
    hash_weights,
    make_run,
    read_stat,
    run_to_end,
)
from support.kill_sweep import run_sweep as kill_and_resume
from support.stacks import STACKS

from meshwright import (
    Checkpointer,
    ConfigError,
    Loop,
    OptimizerConfig,
    Stopped,
    StopSignals,
    fit,
    load_checkpoint,
    optimizer_factory,
)
from meshwright.base.stopping import SIGNAL_DEBOUNCE_S
from meshwright.checkpoint.manifest import list_steps
from meshwright.events.step import StepResult
from meshwright.optim.build import build_scheduler
from meshwright.strategy.contract import StrategyManager
from meshwright.strategy.hooks import hookimpl
from meshwright.strategy.registry import get_registry
from meshwright.testing import Case
from meshwright_run.data.parallel_tokenization import TokenizerWorker
from meshwright_run.run_file import ScheduleConfig
from meshwright_run.run_sections import CheckpointConfig
from meshwright_testing import pool
from meshwright_testing.case import rank_microbatches
from meshwright_testing.parity import build_manager, build_manager_and_optimizer, full_weights

STEPS = 60
LAYOUT: dict[str, Any] = {
    "strategy": "fsdp2",
    "nproc": 2,
    "steps": STEPS,
    "schedule": {"name": "cosine", "warmup_steps": 4},
    "checkpoint": {"every": 11, "keep_last": 2, "on_signal": {"exit_code": 75}},
    "eval": {"every": 25, "max_sequences": 4},
}
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
PROMPT_S = 60.0


def _stop(run: TrainingRun, after: int, number: int, victim: str, *, launcher: Sequence[str] = ()) -> tuple[int, str]:
    """Train until so many steps are done, and send a signal; the exit code, and what was said."""
    environment = copy_environment()
    process = subprocess.Popen(
        [sys.executable, *launcher, "-m", "meshwright", "train", str(run.file)],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        text=True,
    )
    try:
        deadline_s = time.monotonic() + PROMPT_S * 2
        while run.count_steps() < after:
            assert process.poll() is None, process.communicate()[0]
            assert time.monotonic() < deadline_s
            time.sleep(0.002)
        if victim == "all":
            os.killpg(process.pid, number)
        else:
            os.kill(process.pid if victim == "parent" else _rank_1(process.pid), number)
        said, _ = process.communicate(timeout=PROMPT_S)
        return process.returncode, said
    finally:
        end_session(process)


def _rank_1(launcher: int) -> int:
    """Its process, of those that torchrun has started, each in a session of its own."""
    for pid in (int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()):
        with suppress(OSError):
            is_child = read_stat(pid)[1:2] == [str(launcher)]
            if is_child and b"\0RANK=1\0" in b"\0" + Path(f"/proc/{pid}/environ").read_bytes():
                return pid
    raise AssertionError(f"{launcher} has no rank 1")


@pytest.mark.slow
def test_a_run_stopped_time_and_again_ends_as_one_that_was_not(tmp_path: Path) -> None:
    whole, run = (make_run(tmp_path, name, LAYOUT) for name in ("whole", "stopped"))
    run_to_end("train", str(whole.file))
    # Whoever gets the signal, all ranks save the same step: between checkpoints, and in the middle of an epoch.
    for after, number, victim, launcher, expected in (
        (5, signal.SIGTERM, "parent", (), 75),
        (15, signal.SIGUSR1, "parent", (), 75),
        (20, signal.SIGTERM, "all", (), 75),
        (26, signal.SIGINT, "all", (), 75),
        (32, signal.SIGTERM, "parent", TORCHRUN, 1),
        (40, signal.SIGUSR1, "one rank", TORCHRUN, 1),
    ):
        code, said = _stop(run, after, number, victim, launcher=launcher)
        assert code == expected, said
        done = run.count_steps()
        assert after <= done < STEPS
        name = signal.Signals(number).name
        assert f"stopped by {name} after step {done} of {STEPS}, saved; the same command continues" in said
        assert run.find_newest_checkpoint().name == f"step-{done:08d}", said
        assert "Traceback" not in said.replace(_agents_traceback(said), "")
    run_to_end("train", str(run.file))
    assert run.read_metrics() == whole.read_metrics()
    assert hash_weights(run.directory / "model") == hash_weights(whole.directory / "model")


@pytest.mark.slow
def test_a_second_signal_to_the_parent_ends_ranks_that_cannot_save(tmp_path: Path) -> None:
    saving = {"every": 5000, "on_signal": {"signals": ["SIGINT"]}}
    run = make_run(tmp_path, "hanging", {**LAYOUT, "steps": 5000, "checkpoint": saving})
    environment = copy_environment()
    command = [sys.executable, "-m", "meshwright", "train", str(run.file)]
    log = tmp_path / "log"
    with log.open("w") as said:
        process = subprocess.Popen(command, env=environment, stdout=said, stderr=said, start_new_session=True)
    try:
        deadline_s = time.monotonic() + PROMPT_S * 2
        while run.count_steps() < 3:
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < deadline_s
            time.sleep(0.01)
        ranks = find_ranks(process)
        assert len(ranks) == 2
        # One rank hangs, so that the other waits for it.
        os.kill(ranks[1], signal.SIGSTOP)
        os.kill(process.pid, signal.SIGINT)
        time.sleep(SIGNAL_DEBOUNCE_S + 1)
        assert process.poll() is None, log.read_text()
        assert "SIGINT: this run stops after the current step" in log.read_text()
        os.kill(process.pid, signal.SIGINT)
        assert process.wait(PROMPT_S / 2) == 130
        while left := find_session_processes(process):
            # The fork server sees that its parent is gone.
            assert not left.keys() & set(ranks)
            assert time.monotonic() < deadline_s, left
            time.sleep(0.1)
    finally:
        end_session(process)


def _agents_traceback(said: str) -> str:
    """What torchrun itself has to say of a signal, or of ranks that left with another code than 0."""
    start = said.find("Traceback")
    return said[start:] if start >= 0 and "torch/distributed/run.py" in said else ""


# -- runs that are killed; the sweep is in kill_sweep.py


@pytest.mark.slow
def test_a_run_killed_while_it_trains_and_while_it_saves_ends_as_one_that_was_not(workplace: Path) -> None:
    layout = SweptLayout(workplace, "killed", LAYOUTS["fsdp2"], random.Random(0))
    for moment, victim in (("training", "rank"), ("writing", "all"), ("training", "all")):
        layout.kill(moment, victim)
    layout.finish_run()


@pytest.mark.zoo
@pytest.mark.parametrize("name", LAYOUTS)
def test_random_kills(name: str, tmp_path: Path) -> None:
    kills = [kill for kill, _ in kill_and_resume(tmp_path, 8, 3, name)]
    assert len({kill.moment for kill in kills}) == 7


# -- the loop


class _SignalAt:
    """Sends a signal to its own process after a step."""

    def __init__(self, step: int | None) -> None:
        self.step = step

    @hookimpl
    def on_step_end(self, result: StepResult) -> None:
        if result.step == self.step:
            os.kill(os.getpid(), signal.SIGUSR1)


def _built() -> tuple[StrategyManager, Any]:
    manager = build_manager("fsdp2", {}, {}, Case())
    optimizer = manager.build_optimizer(optimizer_factory(OptimizerConfig(lr=1e-2)))
    return manager, build_scheduler(ScheduleConfig(name="linear", warmup_steps=2), optimizer, 9)


def _resumed(
    built: Sequence[tuple[StrategyManager, Any]],
    batches: Callable[[], Any],
    directory: str,
    at: tuple[int, int],
    **more: Any,
) -> tuple[tuple[Any, ...], list[StepResult], list[StepResult]]:
    """A run that a signal stops, at a rank and a step, and that continues; and another that is not stopped: how it was
    stopped, and the steps since then of both. Their weights are equal."""
    (whole, rates), (first, early), (second, late) = built
    expected = fit(whole, Loop(batches(), scheduler=rates, **more))
    stopped: Stopped | None = None
    with Checkpointer(first, directory) as checkpointer, StopSignals(["SIGUSR1"], exit_code=7) as signals:
        with get_registry().observing(_SignalAt(at[1] if first.mesh.rank == at[0] else None)):
            try:
                fit(first, Loop(batches(), scheduler=early, checkpointer=checkpointer, signals=signals, **more))
            except Stopped as caught:
                stopped = caught
    assert stopped is not None
    manifest = load_checkpoint(second, step_directory(Path(directory), stopped.step), scheduler=late)
    rest = fit(second, Loop(batches(), scheduler=late, **more).resume_from(manifest))
    weights, others = full_weights(whole), full_weights(second)
    assert all(torch.equal(weights[name], others[name]) for name in weights)
    return (stopped.signal, stopped.step, stopped.saved, stopped.code), rest, expected[stopped.step :]


def _in_passes(directory: str) -> Any:
    """Passes of four steps, stopped by a signal to rank 1 in the middle of the second."""
    built = [_built() for _ in range(3)]
    mesh = built[0][0].mesh
    rows = [batch for step in range(8) for batch in rank_microbatches(Case(), step, mesh.data_rank, mesh.data_size)]
    rows = rows[: len(rows) // 8 * 8]
    options = {"steps": 9, "gradient_accumulation_steps": len(rows) // 4, "seed": 3, "max_grad_norm": 1.0}
    stopped, *both = _resumed(built, lambda: rows, directory, (1, 5), **options)
    rest, expected = ([(each.step, each.loss, each.learning_rate) for each in results] for results in both)
    assert rest == expected
    return stopped, [step for step, *_ in rest]


def test_a_loop_stopped_in_a_pass_by_a_signal_to_one_rank_continues_there(tmp_path: Path) -> None:
    # Step 6 had started when the signal came.
    found = pool(2).run(_in_passes, str(tmp_path / "checkpoints"))
    assert found == [(("SIGUSR1", 6, True, 7), [7, 8, 9])] * 2


def _stopped_and_on(strategy: str, config: dict[str, Any], sizes: dict[str, int], directory: str) -> Any:
    case = Case(microbatches=2, sequences=16)
    built = [(build_manager_and_optimizer(strategy, config, sizes, case)[0], None) for _ in range(3)]
    mesh = built[0][0].mesh

    def batches(step: int) -> Any:
        return rank_microbatches(case, step, mesh.data_rank, mesh.data_size)

    stopped, *both = _resumed(built, lambda: batches, directory, (3, 2), steps=6, seed=1)
    return stopped, *([each.loss for each in results] for results in both)


@pytest.mark.slow
@pytest.mark.parametrize("stack", STACKS)
def test_every_stack_stops_on_all_ranks_and_continues(stack: str, tmp_path: Path) -> None:
    for reported, rest, expected in pool(4).run(_stopped_and_on, *STACKS[stack], str(tmp_path / "checkpoints")):
        assert reported == ("SIGUSR1", 3, True, 7)
        assert len(rest) == 3
        assert rest == expected


def _stopped_in_time(directory: str, grace_s: float) -> tuple[bool, bool, float, list[int]]:
    """Rank 3 alone hears a signal after the third step, when one checkpoint has been written."""
    case = Case(microbatches=2, sequences=16)
    manager, _ = build_manager_and_optimizer("fsdp2", {}, {}, case)
    mesh, root = manager.mesh, Path(directory)
    mine = grace_s if mesh.rank == 3 else None

    def batches(step: int) -> Any:
        return rank_microbatches(case, step, mesh.data_rank, mesh.data_size)

    with Checkpointer(manager, root) as checkpointer, StopSignals(["SIGUSR1"], grace_s=mine) as signals:
        loop = Loop(batches, steps=6, seed=1, checkpointer=checkpointer, save_every=2, signals=signals)
        with get_registry().observing(_SignalAt(2 if mesh.rank == 3 else None)):
            try:
                fit(manager, loop)
            except Stopped as stopped:
                reported = stopped.saved, stopped.has_skipped_save
        return *reported, checkpointer.max_save_s, [step for step, _ in list_steps(root)]


@pytest.mark.slow
def test_a_save_that_would_outlast_the_time_that_is_left_is_not_started_on_any_rank(tmp_path: Path) -> None:
    for saved, too_late, seconds, steps in pool(4).run(_stopped_in_time, str(tmp_path / "short"), 1e-3):
        assert (saved, too_late, steps) == (False, True, [2])
        assert seconds > 1e-3
    for saved, too_late, _, steps in pool(4).run(_stopped_in_time, str(tmp_path / "long"), 1e3):
        assert (saved, too_late, steps) == (True, False, [3, 2])


# -- signals


WAITS = """
import os, sys
from datetime import timedelta
from torch.distributed import TCPStore
from meshwright.base.stopping import StopSignals

store = TCPStore("127.0.0.1", 0, is_master=True)
with StopSignals(["SIGTERM"], report=lambda text: print(text, flush=True)):
    print("ready", flush=True)
    store.wait(["never"], timedelta(seconds=100))
"""


@pytest.mark.slow
def test_a_second_signal_ends_a_rank_that_waits_for_a_peer_and_one_that_comes_twice_does_not() -> None:
    with subprocess.Popen([sys.executable, "-c", WAITS], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            assert process.stdout.readline() == "ready\n"
            process.send_signal(signal.SIGTERM)
            assert "a second signal ends it at once" in process.stdout.readline()
            process.send_signal(signal.SIGTERM)
            time.sleep(SIGNAL_DEBOUNCE_S + 0.5)
            assert process.poll() is None
            process.send_signal(signal.SIGTERM)
            assert process.wait(10) == 143
        finally:
            process.kill()


FORKS = """
import multiprocessing, os, signal, time
from meshwright.base.stopping import StopSignals

def work(ready):
    ready.set()
    time.sleep(100)

fork = multiprocessing.get_context("fork")
ready = [fork.Event() for _ in range(2)]
def silent(text):
    raise BrokenPipeError(text)

with StopSignals(["SIGTERM", "SIGUSR1"], report=silent) as signals:
    ended, kept = (fork.Process(target=work, args=(each,)) for each in ready)
    for process, each in zip((ended, kept), ready):
        process.start()
        each.wait()
    ended.terminate()
    os.kill(kept.pid, signal.SIGUSR1)
    ended.join(10)
    time.sleep(0.5)
    print(ended.exitcode, kept.exitcode, signals.received_signal)
kept.kill()
"""


@pytest.mark.slow
def test_processes_that_are_forked_have_signals_of_their_own_and_hold_up_nobody() -> None:
    done = subprocess.run([sys.executable, "-c", FORKS], capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout == "-15 None 0\n", done.stderr


def test_signals_that_cannot_be_noted_are_refused_and_handlers_are_put_back() -> None:
    for names in ("SIGTERM", ["SIGTERM", "SIGKILL"], ["TERM"]):
        with pytest.raises(ConfigError, match="not a signal that can stop a run"):
            StopSignals(names)
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR2)]
    with StopSignals(["SIGTERM", "SIGUSR2"]) as signals:
        assert signals.received_signal == 0
        assert signal.getsignal(signal.SIGTERM) is not before[0]
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR2)] == before
    assert signal.set_wakeup_fd(-1) == -1


# -- the run file


def test_signals_save_where_checkpoints_are_saved_or_where_they_are_asked_for() -> None:
    assert not CheckpointConfig().is_enabled
    assert CheckpointConfig().stop_config.signals == []
    assert CheckpointConfig(every=5).stop_config.signals == ["SIGTERM", "SIGUSR1", "SIGINT"]
    asked = CheckpointConfig.model_validate({"on_signal": {"signals": ["SIGUSR2"], "exit_code": 3, "grace_s": 60}})
    assert asked.is_enabled
    assert (asked.stop_config.signals, asked.stop_config.exit_code, asked.stop_config.grace_s) == (["SIGUSR2"], 3, 60)
    off = CheckpointConfig.model_validate({"every": 5, "on_signal": {"signals": []}})
    assert off.stop_config.signals == []
    with pytest.raises(ValueError, match="SIGKILL"):
        CheckpointConfig.model_validate({"on_signal": {"signals": ["SIGKILL"]}})


def _messages(signals: StopSignals | None) -> list[int]:
    """How many numbers each message to all ranks has that a loop sends."""
    manager, _ = _built()
    mesh, sent = manager.mesh, list[int]()

    def noted(*numbers: Any) -> Any:
        sent.append(sum(map(len, numbers)))
        return type(mesh.world)._reduce_now(mesh.world, *numbers)

    mesh.world._reduce_now = noted  # type: ignore[method-assign]
    fit(
        manager,
        Loop(lambda step: rank_microbatches(Case(), step, mesh.data_rank, mesh.data_size), steps=5, signals=signals),
    )
    return sent


def _with_and_without() -> tuple[list[int], list[int]]:
    with StopSignals(["SIGUSR1"]) as signals:
        return _messages(None), _messages(signals)


def _tokens(text: str) -> int:
    return len(text)


def _signalled_as_it_leaves() -> int:
    manager, _ = _built()
    mesh = manager.mesh
    with StopSignals(["SIGUSR1"]) as signals, get_registry().observing(_SignalAt(1)):
        try:
            fit(
                manager,
                Loop(lambda step: rank_microbatches(Case(), step, mesh.data_rank, mesh.data_size), 5, signals=signals),
            )
        except Stopped as stopped:
            time.sleep(SIGNAL_DEBOUNCE_S + 0.1)
            os.kill(os.getpid(), signal.SIGUSR1)
            time.sleep(0.5)
            return stopped.step
    return 0


@pytest.mark.slow
def test_a_rank_that_leaves_is_not_ended_by_what_its_launcher_sends_when_another_has_left() -> None:
    assert pool(2).run(_signalled_as_it_leaves) == [2, 2]


@pytest.mark.slow
def test_what_tokenizes_outlives_a_signal_to_all_processes() -> None:
    worker = TokenizerWorker(partial, _tokens)
    try:
        assert worker.call("abc") == 3
        for number in (signal.SIGTERM, signal.SIGUSR1):
            os.kill(worker._process.pid, number)
        assert worker.call("abcd") == 4
    finally:
        worker.close()
    assert worker._process.returncode == 0


@pytest.mark.slow
def test_signals_that_may_come_cost_a_step_no_message_and_no_byte() -> None:
    for without, with_signals in pool(2).run(_with_and_without):
        assert with_signals == without
        assert len(without) >= 5
