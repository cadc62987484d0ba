"""Files of jobs: what a run file or a directory's name holds is a value there, and nothing that is run or replaced."""

from __future__ import annotations

import ast
import os
import random
import re
import shlex
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from security.small_run import job_values

from meshwright.base.errors import ConfigError
from meshwright_cluster import TARGETS, Target
from meshwright_cluster.job import ClusterJob, build_job
from meshwright_cluster.job_files import render_job_files
from meshwright_run.run_file import RunConfig

PIECES = [
    *("$(touch PWNED)", "`touch PWNED`", "$HOME", "${HOME}", "$(NODE_RANK)", "$(RANK)", "$$", "$$$", "$(", "$@"),
    *("'", '"', "\\", "\\'", '\\"', "\\n", ";touch PWNED;", "&& touch PWNED", "| touch PWNED", "> PWNED", "#", " #"),
    *("%j", "%%", "%", "%x-%u", "---", ": ", "- ", "{{.}}", "{x}", "&a", "*a", "!!python/object:os.system", "? "),
    *("~", "*", "!", "!!", "[a]", "EOF", "-n", "--wrap=id", "\u00e9", "\u4e16", "\U0001f600", " ", "  ", "=", "/.."),
]
RESERVED = re.compile(r"[/\x00]")
WORLD = {"NODE_RANK": "7", "RANK": "7", "HOME": "/home/x", "MASTER_ADDR": "first"}


def _hostile(count: int) -> list[Any]:
    found = random.Random(44)
    texts = ["".join(found.choices(PIECES, k=found.randint(1, 6))) for _ in range(count)]
    return [pytest.param(text, id=str(number)) for number, text in enumerate(texts)]


def _job(to: Target, text: str, **launch: Any) -> ClusterJob:
    values = job_values({"VALUE": text}, **launch)
    return build_job(values, RunConfig.model_validate(values), to, None)


def _expanded(text: str) -> str:
    """As Kubernetes has commands and variables: $(NAME) where there is one, $$ for $. Source: its third_party/forked/
    golang/expansion."""
    return re.sub(r"\$(\$|\(([^)]*)\))", lambda m: "$" if m[1] == "$" else WORLD.get(m[2], m[0]), text)


def _run(script: str, place: Path, **environment: str) -> tuple[list[str], dict[str, str]]:
    """What the shell calls Python with, and in which environment."""
    record = 'printf "%s\\0" "$@" > "$OUT/words"; env -0 > "$OUT/env"'
    srun = 'while [ "$1" != bash ]; do shift; done; exec "$@"'
    for name, text in (("python", record), ("interpreter", record), ("srun", srun)):
        (place / name).write_text(f"#!/bin/bash\n{text}\n")
        (place / name).chmod(0o755)
    path = f"{place}:{os.environ['PATH']}"
    subprocess.run(["bash", "-c", script], env={"PATH": path, "OUT": str(place), **environment}, cwd=place, check=True)
    assert not (place / "PWNED").exists()
    words = (place / "words").read_text().split("\0")[:-1]
    found = dict(each.partition("=")[::2] for each in (place / "env").read_text().split("\0")[:-1])
    return words, found


@pytest.mark.parametrize("text", _hostile(15))
def test_slurm(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = tmp_path / (RESERVED.sub("_", text) + "x")
    here.mkdir()
    monkeypatch.chdir(here)
    script = render_job_files(_job("slurm", text, python="interpreter", slurm={"partition": text}), "slurm")[
        "job.sbatch"
    ]
    lines = [line.removeprefix("#SBATCH ") for line in script.splitlines() if line.startswith("#SBATCH")]
    options = dict(word.partition("=")[::2] for line in lines for word in [" ".join(shlex.split(line))])
    assert all(len(shlex.split(line)) == 1 for line in lines)
    assert options["--chdir"] == str(here)
    assert options["--partition"] == text
    log = re.sub("%(%|x|j)", lambda m: {"%": "%", "x": "NAME", "j": "7"}[m[1]], options["--output"])
    assert log == str(here / "launch" / "run" / "NAME-7.log")
    words, environment = _run(script, tmp_path)
    assert words == ["-m", "meshwright", "train", str(here / "launch" / "run" / "run.yaml")]
    assert environment["VALUE"] == text


@pytest.mark.parametrize("kind", ["JobSet", "TrainJob", "PyTorchJob"])
@pytest.mark.parametrize("text", _hostile(6))
def test_kubernetes(kind: str, text: str) -> None:
    job = _job(
        "kubernetes",
        text,
        python=text,
        setup=["true $(RANK) $RANK"],
        kubernetes={
            "image": "image",
            "volume_claim": "claim",
            "mount_path": "/shared",
            "kind": kind,
            "node_selector": {"a": text},
        },
    )
    settings, manifest = yaml.safe_load_all(render_job_files(job, "kubernetes")["job.yaml"])
    assert yaml.safe_load(settings["data"]["run.yaml"])["output_dir"] == "/shared/runs/run"
    nodes = list(_nodes(manifest))
    containers = [each for each in nodes if isinstance(each, Mapping) and "command" in each]
    assert containers
    for each in containers:
        environment = {variable["name"]: variable.get("value", "") for variable in each["env"]}
        assert _expanded(environment["VALUE"]) == text
        command = [_expanded(word) for word in each["command"]]
        assert command[:2] == ["bash", "-c"]
        assert command[2] == 'true $(RANK) $RANK\nexec "$@"'
        assert command[4] == text
        assert not [word for word in command[5:] if "$" in word]
    assert text in nodes


def _nodes(node: Any) -> Iterator[Any]:
    yield node
    for each in node.values() if isinstance(node, Mapping) else node if isinstance(node, list) else ():
        yield from _nodes(each)


@pytest.mark.parametrize("text", _hostile(15))
def test_skypilot_and_ray(text: str, tmp_path: Path) -> None:
    tree = ast.parse(render_job_files(_job("ray", text), "ray")["job.py"])
    (start,) = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and "init" in ast.unparse(node.func)]
    assert ast.literal_eval(start.keywords[0].value)["env_vars"]["VALUE"] == text
    if "$" in text:
        with pytest.raises(ConfigError, match="SkyPilot takes for a variable"):
            _job("skypilot", "", skypilot={"mounts": {"/shared": "s3://bucket"}, "workdir": text})
    task = yaml.safe_load(render_job_files(_job("skypilot", text, python="interpreter"), "skypilot")["job.yaml"])
    assert task["envs"]["VALUE"] == text
    reported = {"SKYPILOT_NODE_IPS": "first\nsecond", "SKYPILOT_NODE_RANK": "1", "HOME": "/home/x"}
    words, environment = _run(task["run"], tmp_path, **{**reported, "VALUE": text})
    assert words[-1] == "/home/x/.meshwright/run.yaml"
    assert {"--node-rank=1", "--master-addr=first"} <= {*words}
    assert environment["VALUE"] == text


@pytest.mark.parametrize("character", ["\n", "\r", "\x00", "\x1b", "\x7f", "\x85", "\u2028", "\udcff"], ids=ascii)
@pytest.mark.parametrize("to", TARGETS)
def test_control_characters_are_refused(
    to: Target, character: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = f"a{character}touch PWNED"
    with pytest.raises(ConfigError, match=r"launch\.env\.VALUE=.* has control characters"):
        _job(to, text)
    with pytest.raises((ConfigError, ValueError), match=r"control characters|pattern|surrogates"):
        _job(
            to,
            "",
            kubernetes={"image": "i", "volume_claim": "c", "mount_path": "/shared", "node_selector": {text: "a"}},
        )
    job = _job(to, "")
    with pytest.raises(ConfigError, match=r"--out=.* has control characters"):
        build_job(job.values, job.config, to, tmp_path / text)
    if character != "\x00":
        (tmp_path / text).mkdir()
        monkeypatch.chdir(tmp_path / text)
        with pytest.raises(ConfigError, match=r"the current directory=.* has control characters"):
            _job(to, "")
