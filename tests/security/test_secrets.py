"""Secrets of a run file are in nothing that a run or a job leaves for others to read."""

from __future__ import annotations

import json
import stat
from pathlib import Path
from typing import Any

import pytest
from security.small_run import job_values, write_small_run
from support.commands import run_command

from meshwright.base.errors import ConfigError
from meshwright.base.validation import FrozenModel
from meshwright.checkpoint.remote_storage import open_storage
from meshwright.events.run import TrackerSpec
from meshwright_cluster import TARGETS, Target
from meshwright_cluster.job import build_job
from meshwright_cluster.job_files import render_job_files, write_job_files
from meshwright_run import observers as trackers
from meshwright_run.run_file import RunConfig, to_redacted_dict
from meshwright_run.secrets import REDACTED, is_secret, resolve_environment

SECRET = "correct-horse-battery-staple"
NAMES = [
    *("HF_TOKEN", "WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY", "AWS_ACCESS_KEY_ID", "DB_PASSWORD"),
    *("MLFLOW_TRACKING_PASSWORD", "token", "my-secret", "PGPASSWD", "SSH_KEY", "GITHUB_AUTH", "SENTRY_DSN"),
    *("X_COOKIE", "GOOGLE_CREDENTIALS", "PGPASS", "SSHPASS", "WANDB_KEY", "SIGNING_KEY", "ENCRYPTION_KEY"),
    *("KEY", "keys"),
]
NO_NAMES = [
    *("NCCL_DEBUG", "TOKENIZERS_PARALLELISM", "OMP_NUM_THREADS", "MAX_TOKENS_X", "KEYBOARD", "KEY_COUNT"),
    *("PASSES", "AUTHOR", "SECRETARY"),
]
VALUES = [
    *("hf_abcdefghijklmnopqrstuvwxyz", "sk-proj-abcdefghijklmnopqrstu", "ghp_abcdefghijklmnopqrstuvwxyz012345"),
    *("AKIAIOSFODNN7EXAMPLE", "xoxb-1234567890-abcdef", "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0NTY3.x"),
    *("postgresql://user:password@host/db", "https://host/x?a=b&write_token=abc"),
    "-----BEGIN OPENSSH PRIVATE KEY-----",
]
NO_VALUES = [
    *("https://host:8080/path", "s3://bucket/a@b", "12:30", "a:b@c", "hf_home", "sk-learn", "/data/token.txt"),
    *("tokens",),
]


def test_secrets_are_known_by_their_names_and_looks() -> None:
    assert [name for name in NAMES if not is_secret(name, "x")] == []
    assert [name for name in NO_NAMES if is_secret(name, "x")] == []
    assert [value for value in VALUES if not is_secret("X", value)] == []
    assert [value for value in NO_VALUES if is_secret("X", value)] == []
    assert not is_secret("HF_TOKEN", "")


def _values(**changes: Any) -> dict[str, Any]:
    env = {"HF_TOKEN": SECRET, "PLAIN": "plain", "TAKEN": {"from_env": "OUTSIDE"}}
    return {**job_values(env), **changes}


def test_what_a_run_writes_of_itself_has_no_secret_and_is_read_again() -> None:
    options = {"name": "wandb", "api_key": SECRET, "server_url": f"https://host/?write_token={SECRET}", "tags": ["a"]}
    values = _values(trackers=["tensorboard", options])
    values["launch"]["setup"] = [f"A=1 TOKEN='{SECRET} x' run", f'PGPASS="{SECRET}";x', "KEY=$(cat f)", "A=b"]
    plain = to_redacted_dict(RunConfig.model_validate(values))
    assert SECRET not in json.dumps(plain)
    assert plain["launch"]["setup"] == ["A=1 TOKEN=*** run", "PGPASS=***;x", "KEY=$(cat f)", "A=b"]
    assert plain["launch"]["env"] == {
        "HF_TOKEN": {"from_env": "HF_TOKEN"},
        "PLAIN": "plain",
        "TAKEN": {"from_env": "OUTSIDE"},
    }
    assert plain["trackers"][1] == {**options, "api_key": REDACTED, "server_url": REDACTED}
    assert to_redacted_dict(RunConfig.model_validate(plain)) == plain
    # Nothing else is hidden.
    data = {"seq_len": 16, "tokenizer": "tokens", "corpus": ["a/token/*.txt"]}
    config = RunConfig.model_validate(_values(launch=None, data=data, ema=None))
    assert to_redacted_dict(config) == config.model_dump(by_alias=True)


class _Options(FrozenModel):
    api_key: str


def test_values_and_options_of_trackers_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTSIDE", SECRET)
    assert resolve_environment({"a": [{"from_env": "OUTSIDE"}], "b": 1}, "x") == {"a": [SECRET], "b": 1}
    spec = TrackerSpec("mine", "", _Options, lambda config, run: None)  # type: ignore[arg-type, return-value]
    monkeypatch.setattr(trackers, "list_trackers", lambda registry: {"mine": spec})
    ((_, config),) = trackers.resolve_trackers([{"name": "mine", "api_key": {"from_env": "OUTSIDE"}}])
    assert config == _Options(api_key=SECRET)
    monkeypatch.delenv("OUTSIDE")
    with pytest.raises(ConfigError, match=r"x\.a is read from the environment variable OUTSIDE .* not set"):
        resolve_environment({"a": {"from_env": "OUTSIDE"}}, "x")


# -- jobs


@pytest.mark.parametrize("to", TARGETS)
def test_files_of_a_job_that_hold_secrets_are_their_owners(
    to: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = _values()
    values["launch"]["setup"] = [f"export API_KEY={SECRET}"]
    config = RunConfig.model_validate(values)
    monkeypatch.delenv("OUTSIDE", raising=False)
    with pytest.raises(ConfigError, match=r"launch\.env\.TAKEN is read from the environment variable OUTSIDE"):
        build_job(values, config, to, tmp_path)
    monkeypatch.setenv("OUTSIDE", "another secret")
    job = build_job(values, config, to, tmp_path / "job")
    assert job.has_secrets
    write_job_files(job, render_job_files(job, to))
    texts = [path.read_text() for path in job.directory.iterdir()]
    assert sum(SECRET in text and "another secret" in text for text in texts) == 1
    assert {stat.S_IMODE(path.stat().st_mode) for path in job.directory.iterdir()} == {0o600}
    shown = render_job_files(job.redact(), to)
    assert not [name for name, text in shown.items() if SECRET in text or "another secret" in text]
    assert REDACTED in "".join(shown.values())
    # Ray's nodes are set up by whoever starts them.
    assert ("API_KEY=***" in "".join(shown.values())) is (to != "ray")
    # Without secrets, anybody may read them.
    values["launch"].update(env={"A": "b"}, setup=[])
    plain = build_job(values, RunConfig.model_validate(values), to, tmp_path / "plain")
    write_job_files(plain, render_job_files(plain, to))
    assert {stat.S_IMODE(path.stat().st_mode) & 0o044 for path in plain.directory.iterdir()} == {0o044}


# -- a whole run


@pytest.mark.slow
def test_a_run_leaves_no_secret_anywhere(tmp_path: Path) -> None:
    path = write_small_run(tmp_path, launch=_values()["launch"])
    done = run_command("train", str(path))
    assert done.returncode == 0, done.stderr
    files = [path for path in (tmp_path / "out").rglob("*") if path.is_file()]
    assert len(files) > 10
    assert [path for path in files if SECRET.encode() in path.read_bytes()] == []
    assert SECRET not in done.stdout + done.stderr


def test_a_password_in_a_url_is_refused_and_not_repeated() -> None:
    for url in (f"s3://key:{SECRET}@bucket/prefix", f"hf://user:{SECRET}@org/name", f"memory://a:{SECRET}@c"):
        with pytest.raises(ConfigError, match="holds a password") as caught:
            open_storage(url)
        assert SECRET not in str(caught.value)
