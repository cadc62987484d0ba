"""A cluster of one machine, of Debian's packages slurmctld, slurmd and munge, in a directory of its own.

It has its own key, sockets and ports, so that it stands beside a cluster that may be there, and is ended by the ids of
the processes that were started.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path

from support.launched_processes import find_free_port

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "squeue", "scancel")
_PROGRAM_DIRS = ("/usr/sbin", "/usr/local/sbin", "/sbin")


def find_missing_requirement() -> str:
    """Why there can be no cluster here; empty where there can be one."""
    absent = [name for name in PROGRAMS if _find_program(name) is None]
    if absent:
        return f"not installed: {', '.join(absent)} (Debian: slurmctld, slurmd, munge)"
    return "" if os.geteuid() == 0 else "slurmd and slurmctld need root here"


def _find_program(name: str) -> str | None:
    return shutil.which(name, path=os.pathsep.join([os.environ.get("PATH", ""), *_PROGRAM_DIRS]))


class SlurmCluster:
    """A machine in a short `directory` of its own, whose partition `high` takes what it needs from `low`."""

    def __init__(self, directory: Path, *, cpus: int = 2, grace_s: int = 60) -> None:
        self.directory, self._cpus, self._grace_s = directory, cpus, grace_s
        self._processes: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> SlurmCluster:
        for name in ("munge", "state", "spool"):
            (self.directory / name).mkdir(parents=True)
        key = self.directory / "munge" / "key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o600)
        (self.directory / "slurm.conf").write_text(self._render_config())
        (self.directory / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\nCgroupAutomount=no\n")
        self.environment = {**os.environ, "SLURM_CONF": str(self.directory / "slurm.conf")}
        try:
            munge = self.directory / "munge"
            self._start(
                *("munged", "--foreground", "--force", f"--key-file={key}", f"--socket={munge / 's'}"),
                *(f"--pid-file={munge / 'pid'}", f"--log-file={munge / 'log'}", f"--seed-file={munge / 'seed'}"),
            )
            self._wait_for(lambda: (munge / "s").exists(), "munged")
            self._start("slurmctld", "-D", "-i")
            self._wait_for(lambda: self.run("scontrol", "ping", check=False).returncode == 0, "slurmctld")
            self._start("slurmd", "-D", "-N", "node1")
            self._wait_for(lambda: "State=IDLE" in self.run("scontrol", "show", "node", "node1").stdout, "slurmd")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        if len(self._processes) > 1:
            self.run("scancel", "--partition=low,high", check=False)  # what still runs would outlive slurmd
            self.run("scancel", "--full", "--signal=KILL", "--partition=low,high", check=False)
        for process in reversed(self._processes):
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def run(self, program: str, *arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        words = [str(_find_program(program)), *arguments]
        done = subprocess.run(words, env=self.environment, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0 or not check, f"{program} {arguments}: {done.stdout}{done.stderr}{self.logs()}"
        return done

    def read_job(self, number: str) -> dict[str, str]:
        reported = self.run("scontrol", "--oneliner", "show", "job", number).stdout
        return dict(each.partition("=")[::2] for each in reported.split() if "=" in each)

    def wait_for_state(self, number: str, *states: str, timeout_s: float = 150) -> dict[str, str]:
        end = time.monotonic() + timeout_s
        while (job := self.read_job(number))["JobState"] not in states:
            assert time.monotonic() < end, f"job {number} is {job['JobState']} and not {states}: {job}{self.logs()}"
            time.sleep(0.2)
        return job

    def logs(self) -> str:
        return "".join(f"\n{path.name}: {path.read_text()[-3000:]}" for path in self.directory.glob("*.log"))

    def _start(self, program: str, *arguments: str) -> None:
        with (self.directory / f"{program}.log").open("wb") as log:
            process = subprocess.Popen(
                [str(_find_program(program)), *arguments],
                env=self.environment,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self._processes.append(process)

    def _wait_for(self, is_there: object, program: str) -> None:
        end = time.monotonic() + 60
        while not is_there():  # type: ignore[operator]
            assert self._processes[-1].poll() is None, f"{program} has ended: {self.logs()}"
            assert time.monotonic() < end, f"{program} is not there: {self.logs()}"
            time.sleep(0.1)

    def _render_config(self) -> str:
        host, place = socket.gethostname(), self.directory
        simple = f"""ClusterName=meshwright SlurmctldHost={host}(127.0.0.1) SlurmUser=root SlurmdUser=root
            AuthType=auth/munge AuthInfo=socket={place}/munge/s CredType=cred/munge SlurmctldPort={find_free_port()}
            SlurmdPort={find_free_port()} SlurmctldPidFile={place}/slurmctld.pid SlurmdPidFile={place}/slurmd.pid
            StateSaveLocation={place}/state SlurmdSpoolDir={place}/spool ProctrackType=proctrack/linuxproc
            TaskPlugin=task/none JobAcctGatherType=jobacct_gather/none MpiDefault=none ReturnToService=2
            AccountingStorageType=accounting_storage/none SelectType=select/cons_tres SelectTypeParameters=CR_CPU
            SchedulerType=sched/backfill SchedulerParameters=batch_sched_delay=0,sched_interval=1,bf_interval=1
            PreemptType=preempt/partition_prio PreemptMode=REQUEUE JobRequeue=1 KillWait=30 MinJobAge=600"""
        machine = f"NodeName=node1 NodeHostname={host} NodeAddr=127.0.0.1 CPUs={self._cpus} State=UNKNOWN"
        low = f"Default=YES PriorityTier=1 PreemptMode=REQUEUE GraceTime={self._grace_s}"
        partition = "PartitionName={} Nodes=node1 State=UP {}\n"
        ends = partition.format("low", low) + partition.format("high", "PriorityTier=10 PreemptMode=OFF")
        return "\n".join([*simple.split(), machine, ends])
