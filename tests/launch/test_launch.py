"""Launching local ranks, and how their failures reach the user: real processes, gloo."""

import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from meshwright.base.errors import ConfigError, MeshwrightError, ModelError, RankError
from meshwright.launch.environment import started_by_launcher
from meshwright.launch.local import launch
from meshwright.launch.rank import connect_store, guarded

TARGETS = str(Path(__file__).parents[1] / "support" / "launch_targets.py")
PROMPT_S = 30
SEE = "see docs/troubleshooting.md#"
"""A launch takes seconds, even on a busy machine; the process group's own timeout, which no test may need, is 300 s."""
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")

ECHOES = re.compile("closed by peer|reset by peer|broken pipe|connectFullMesh", re.IGNORECASE)
LAUNCHER_NOISE = re.compile("ChildFailedError|torchelastic|Root Cause|SIGTERM|leaked|W[0-9]{4} ")


@pytest.fixture
def outside_a_world(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)


def run_alone(case, nproc, *, launcher=()):
    """Run a case of launch_targets in a process of its own; return (exit code, stdout, stderr)."""
    done = subprocess.run(
        [sys.executable, *launcher, TARGETS, case, str(nproc)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    return done.returncode, done.stdout, done.stderr


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """A process that launches one case after another, which saves each of them the imports."""
    log = tmp_path_factory.mktemp("launch") / "stderr"
    with (
        log.open("w") as stderr,
        subprocess.Popen(
            [sys.executable, TARGETS, "serve"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stderr, text=True
        ) as process,
    ):
        yield process, log
        process.stdin.close()
        process.wait(timeout=PROMPT_S)


@pytest.fixture
def run(server):
    """A function that runs a case of launch_targets and returns (exit code, stdout, stderr)."""
    process, log = server

    def run_case(case, nproc):
        start = log.stat().st_size
        process.stdin.write(f"{case} {nproc}\n")
        process.stdin.flush()
        giving_up = threading.Timer(60, process.kill)
        giving_up.start()
        out = ""
        for line in process.stdout:
            if line.startswith("exit code "):
                giving_up.cancel()
                return int(line.split()[2]), out, log.read_bytes()[start:].decode()
            out += line
        pytest.fail(f"{case} did not end; stderr: {log.read_bytes()[start:].decode()}")

    return run_case


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
    job = subprocess.Popen(
        [sys.executable, TARGETS, "run_until_stopped", "2"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        process_group=0,
    )
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


def test_four_ranks_start_and_reduce():
    exit_code, out, err = run_alone("start_and_finish", 4)
    sys.stdout.write(out)
    assert exit_code == 0, err
    assert sorted(re.findall(r"rank (\d) ready", out)) == ["0", "1", "2", "3"]
    assert err == ""


def test_one_rank_runs_through_the_launcher(run):
    exit_code, out, err = run("start_and_finish", 1)
    assert (exit_code, err) == (0, "")
    assert "rank 0 ready" in out


def test_error_on_one_rank_ends_all_and_is_shown_once(run):
    start_s = time.monotonic()
    exit_code, _, err = run("value_error_on_rank_2", 4)
    assert time.monotonic() - start_s < PROMPT_S
    assert exit_code == 1
    assert err.count("a bad value in step 10\n") == 1
    assert err.endswith("rank 2 failed: ValueError: a bad value in step 10\n")
    assert err.count("Traceback") == 1
    assert not ECHOES.search(err)
    assert not LAUNCHER_NOISE.search(err)


def test_rank_that_ignores_sigterm_is_killed_soon(run):
    start_s = time.monotonic()
    exit_code, _, err = run("rank_0_heeds_no_sigterm", 2)
    assert time.monotonic() - start_s < PROMPT_S
    assert exit_code == 1
    assert err.endswith("rank 1 failed: ValueError: a bad value\n")


def test_user_error_on_all_ranks_is_shown_once_without_traceback(run):
    exit_code, _, err = run("model_error_on_all_ranks", 4)
    assert (exit_code, err) == (2, f"error: no such model\n{SEE}modelerror\n")


def test_user_error_on_one_rank_silences_its_peers(run):
    exit_code, _, err = run("model_error_on_rank_1", 2)
    assert (exit_code, err) == (2, f"error: no such model\n{SEE}modelerror\n")


def test_killed_rank_is_named_with_its_signal(run):
    exit_code, _, err = run("kill_rank_1", 2)
    assert (exit_code, err) == (1, "rank 1 was killed by SIGKILL (for instance: out of memory)\n")


def test_lost_peer_without_a_cause_is_reported_after_all(run):
    exit_code, _, err = run("echo_without_cause", 2)
    assert exit_code == 1
    assert err.count("rank 0 failed: ") == 1
    assert ECHOES.search(err)
    assert err.endswith("no rank has said why: one may have been killed.\n")


def test_ctrl_c_ends_every_process_silently(running_job):
    job, pids = running_job
    os.killpg(job.pid, signal.SIGINT)
    _, err = job.communicate(timeout=PROMPT_S)  # until the last process that could write to stderr is gone
    assert (job.returncode, err) == (130, "")
    assert_ranks_end(pids)


def test_ctrl_c_during_the_imports_is_silent():
    job = subprocess.Popen(
        [sys.executable, TARGETS, "run_until_stopped", "2"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        process_group=0,
    )
    assert job.stdout.readline() == "warming up\n"
    time.sleep(0.5)  # both the parent and the fork server are importing torch now
    os.killpg(job.pid, signal.SIGINT)
    try:
        _, err = job.communicate(timeout=PROMPT_S)  # until the last process that could write to stderr is gone
    finally:
        job.kill()
    assert (job.returncode, err) == (130, "")


def test_sigterm_to_the_parent_ends_every_rank_silently(running_job):
    job, pids = running_job
    job.terminate()
    _, err = job.communicate(timeout=PROMPT_S)
    assert (job.returncode, err) == (128 + signal.SIGTERM, "")
    assert_ranks_end(pids)


def test_ranks_do_not_outlive_a_killed_parent(running_job):
    job, pids = running_job
    job.kill()
    assert_ranks_end(pids)


def test_torchrun_shows_the_error_once():
    exit_code, _, err = run_alone("model_error_on_rank_1", 2, launcher=TORCHRUN)
    assert exit_code == 1  # torchrun's own
    assert err.count("error: no such model\n") == 1
    assert re.search(r"exitcode\s*: 2 ", err)  # the rank's
    assert not ECHOES.search(err)


def test_launch_refuses_to_start_no_rank():
    with pytest.raises(ConfigError, match="nproc=0"):
        launch(print, (), nproc=0)


@pytest.mark.usefixtures("outside_a_world")
class TestOutsideAWorld:
    """`guarded` in the caller's own process: no store, so it always speaks."""

    def fail(self, error, capsys, **options):
        def main(store):
            assert store is None
            raise error

        return guarded(main, **options), capsys.readouterr().err

    def test_main_that_returns_gives_0(self):
        assert not started_by_launcher()
        assert guarded(lambda store, word: word, ("value",)) == 0

    def test_user_error_is_its_message_and_where_to_read_on(self, capsys):
        assert self.fail(ModelError("no such model"), capsys) == (2, f"error: no such model\n{SEE}modelerror\n")

    def test_user_error_shows_its_traceback_on_request(self, capsys):
        exit_code, err = self.fail(ModelError("no such model"), capsys, show_traceback=True)
        assert exit_code == 2
        assert err.startswith("Traceback")
        assert err.endswith(f"\nerror: no such model\n{SEE}modelerror\n")

    def test_failure_while_running_gives_1(self, capsys):
        assert self.fail(RankError("lost"), capsys) == (1, f"error: lost\n{SEE}rankerror\n")

    def test_bug_shows_its_traceback_and_notes(self, capsys):
        error = KeyError("weight")
        error.add_note("while loading")
        exit_code, err = self.fail(error, capsys)
        assert exit_code == 1
        assert err.startswith("Traceback")
        assert err.endswith("\nKeyError: 'weight'\nwhile loading\n")

    @pytest.mark.parametrize(
        ("stop", "expected"),
        [
            (SystemExit(), (0, "")),
            (SystemExit(3), (3, "")),
            (SystemExit("a message"), (1, "a message\n")),
            (KeyboardInterrupt(), (130, "")),
        ],
    )
    def test_exits_and_interrupts_have_no_traceback(self, stop, expected, capsys):
        assert self.fail(stop, capsys) == expected

    def test_store_that_does_not_answer_is_an_error_with_the_environment(self, monkeypatch):
        monkeypatch.setenv("RANK", "1")
        with pytest.raises(MeshwrightError, match=r"RANK=1, WORLD_SIZE=\(not set\)"):
            connect_store(1.0)
