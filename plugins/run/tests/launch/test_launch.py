"""Launching local ranks, and how their failures reach the user: real processes, gloo."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support import launch_targets
from support.case_server import start_case_server
from support.commands import leave_launcher

from meshwright.base.docs import format_docs_link
from meshwright.base.errors import ConfigError, MeshwrightError, ModelError, RankError
from meshwright.launch.environment import is_launched
from meshwright.launch.store import connect_store
from meshwright_run.launch.local import launch_ranks
from meshwright_run.launch.rank_process import run_guarded

TARGETS = launch_targets.__file__
PROMPT_S = 30
"""A launch takes seconds, even on a busy machine; the process group's own timeout, which no test may need, is 300 s."""
SEE = f"see {format_docs_link('troubleshooting.md')}#"
PIPES = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
ECHOES = re.compile("closed by peer|reset by peer|broken pipe|connectFullMesh", re.IGNORECASE)
LAUNCHER_NOISE = re.compile("ChildFailedError|torchelastic|Root Cause|SIGTERM|leaked|W[0-9]{4} ")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A function that runs a case of launch_targets and returns (exit code, stdout, stderr)."""
    with start_case_server(
        TARGETS, "serve", log=tmp_path_factory.mktemp("launch") / "stderr", timeout_s=60
    ) as run_case:
        yield run_case


def is_alive(pid):
    """Zombies do not count: not every container has an init that reaps them."""
    try:
        os.kill(pid, 0)
        stat = Path(f"/proc/{pid}/stat")
        return not (stat.exists() and stat.read_text().rpartition(")")[2].split()[0] == "Z")
    except (ProcessLookupError, FileNotFoundError):
        return False


@pytest.fixture
def running_job():
    """A job of 2 ranks in the middle of its collectives: its Popen, leader of a process group, and the ranks' pids."""
    job = subprocess.Popen([sys.executable, TARGETS, "run_until_stopped", "2"], process_group=0, **PIPES)
    assert job.stdout.readline() == "warming up\n"
    pids = [int(job.stdout.readline().split()[1]) for _ in range(2)]
    yield job, pids
    for pid in [pid for pid in pids if is_alive(pid)]:
        os.kill(pid, signal.SIGKILL)
    job.kill()
    job.communicate()


def assert_ranks_end(pids, within_s=PROMPT_S / 2):
    deadline_s = time.monotonic() + within_s
    while any(map(is_alive, pids)):
        assert time.monotonic() < deadline_s, f"of the ranks {pids}, some are left"
        time.sleep(0.05)


def test_error_on_one_rank_ends_all_and_is_shown_once(run):
    exit_code, _, err = run("value_error_on_rank_2", 3)
    assert exit_code == 1
    assert err.count("a bad value in step 10\n") == 1
    assert err.endswith("rank 2 failed: ValueError: a bad value in step 10\n")
    assert err.count("Traceback") == 1
    assert not ECHOES.search(err)
    assert not LAUNCHER_NOISE.search(err)


@pytest.mark.parametrize(
    ("case", "ranks", "expected"),
    [
        ("kill_rank_1", 2, (1, "rank 1 was killed by SIGKILL (for instance: out of memory)\n")),
        ("model_error_on_all_ranks", 2, (2, f"error: no such model\n{SEE}modelerror\n")),
        ("start_and_finish", 1, (0, "")),
        pytest.param("start_and_finish", 4, (0, ""), marks=pytest.mark.slow),
        pytest.param(
            "model_error_on_rank_1", 2, (2, f"error: no such model\n{SEE}modelerror\n"), marks=pytest.mark.slow
        ),
    ],
)
def test_a_user_error_or_a_signal_is_shown_once_and_success_is_silent(case, ranks, expected, run):
    exit_code, out, err = run(case, ranks)
    assert (exit_code, err) == expected
    if exit_code == 0:
        assert sorted(re.findall(r"rank (\d) ready", out)) == [str(rank) for rank in range(ranks)]


@pytest.mark.slow
def test_rank_that_ignores_sigterm_is_killed_soon(run):
    start_s = time.monotonic()
    exit_code, _, err = run("rank_0_ignores_sigterm", 2)
    assert time.monotonic() - start_s < PROMPT_S
    assert exit_code == 1
    assert err.endswith("rank 1 failed: ValueError: a bad value in step 10\n")


@pytest.mark.slow
def test_lost_peer_without_a_cause_is_reported_after_all(run):
    exit_code, _, err = run("peer_failure_without_cause", 2)
    assert exit_code == 1
    assert err.count("rank 0 failed: ") == 1
    assert ECHOES.search(err)
    assert err.endswith("no rank has reported why: one may have been killed.\n")


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGKILL, -9)])
def test_a_signal_to_the_parent_ends_every_process_silently(number, code, running_job):
    job, pids = running_job
    if number == signal.SIGINT:
        os.killpg(job.pid, number)
    else:
        job.send_signal(number)
    _, err = job.communicate(timeout=PROMPT_S)  # until the last process that could write to stderr is gone
    assert job.returncode == code
    assert err == "" or number == signal.SIGKILL
    assert_ranks_end(pids)


def test_launch_refuses_to_start_no_rank():
    with pytest.raises(ConfigError, match="nproc=0"):
        launch_ranks(print, (), nproc=0)


# -- `run_guarded` in the caller's own process: no store, so it always speaks


@pytest.fixture
def fail(monkeypatch, capsys):
    leave_launcher(monkeypatch)

    def fail(error, **options):
        def main(store):
            assert store is None
            raise error

        return run_guarded(main, **options), capsys.readouterr().err

    return fail


def test_main_that_returns_gives_0_and_a_user_error_shows_its_traceback_on_request(fail):
    assert not is_launched()
    assert run_guarded(lambda store, word: word, ("value",)) == 0
    exit_code, err = fail(ModelError("no such model"), show_traceback=True)
    assert exit_code == 2
    assert err.startswith("Traceback")
    assert err.endswith(f"\nerror: no such model\n{SEE}modelerror\n")


@pytest.mark.parametrize(
    ("stop", "expected"),
    [
        (ModelError("no such model"), (2, f"error: no such model\n{SEE}modelerror\n")),
        (RankError("lost"), (1, f"error: lost\n{SEE}rankerror\n")),
        (SystemExit(), (0, "")),
        (SystemExit(3), (3, "")),
        (SystemExit("a message"), (1, "a message\n")),
        (KeyboardInterrupt(), (130, "")),
    ],
)
def test_user_errors_exits_and_interrupts_have_no_traceback(stop, expected, fail):
    assert fail(stop) == expected


def test_store_that_does_not_answer_is_an_error_with_the_environment(fail, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(MeshwrightError, match=r"RANK=1, WORLD_SIZE=\(not set\)"):
        connect_store(1.0)


# -- gloo's threads


LATE = """
import ctypes, hashlib, os, threading
from meshwright import open_world
from meshwright._compat.torch import GLOO_THREAD_NAME

def let_go():
    ctypes.CDLL(None).prctl(15, GLOO_THREAD_NAME.encode(), 0, 0, 0)
    is_on.set()
    # Busy, without Python's lock.
    hashlib.sha256(bytes(200_000_000)).digest()
    os.write(1, b"has let go")

is_on = threading.Event()
open_world("cpu")
threading.Thread(target=let_go, daemon=True).start()
is_on.wait()
"""


@pytest.mark.slow
def test_a_process_ends_once_threads_of_gloo_have_let_go():
    done = subprocess.run([sys.executable, "-c", LATE], capture_output=True, text=True, check=False, timeout=120)
    assert (done.returncode, done.stdout) == (0, "has let go"), done.stderr
