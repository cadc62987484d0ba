"""Files of every kind, spoilt at random: each is read, or refused by one error, in bounded time and memory.

What is spoilt, and how, follows from a seed. Nothing is written beside what a command is to write.
"""

from __future__ import annotations

import json
import math
import random
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from security.small_run import write_small_run
from starlette.datastructures import QueryParams
from support.checkpoints import rewrite_manifest
from support.commands import run_command
from support.resource_limits import check_user_error, limit_resources
from support.watched_runs import write_rank_files, write_run_directory, write_timelines
from typer.testing import CliRunner

from meshwright.base.errors import MeshwrightError
from meshwright.checkpoint.manifest import MANIFEST_FILE
from meshwright.cli.main import app
from meshwright.model.adapter import read_adapter_config
from meshwright.model.configuration import config_from_directory
from meshwright.model.pretrained import open_pretrained
from meshwright_plan.config import load_device_spec
from meshwright_run.data.tokenizer import load_tokenizer
from meshwright_run.metrics_report import read_metrics
from meshwright_run.run_action import choose_run_action
from meshwright_run.run_file import load_run
from meshwright_watch.api import WatchApi, to_json
from meshwright_watch.run import WatchedRun

HUGE = 10**400
ODD: list[Any] = [
    *(None, True, False, 0, -1, 1, 1 << 31, 1 << 63, -(1 << 63), HUGE, 1e308, -0.0, math.nan, math.inf, 0.5),
    *("", " ", "x" * 10_000, "\x1b[2J", "[/x]", "../../outside", "/etc/passwd", "\u0000", "\ud800", "1", "null"),
    *("{{ x }}", "file:///etc/passwd", "reference://x", "torch.nn.Linear", "os.system", "cuda", "float8"),
    *([], {}, [[]], [None], {"": None}, [1] * 1000, {"a": {"b": {"c": {}}}}, [["x"]]),
]
TEXTS = [b"", b"\x00", b"{", b"[]", b"null", b"5", b'"x"', b"{}", b"\xff\xfe", b"[" * 100_000, b'{"a":' * 100_000]
TEXTS += [b"9" * 10_000, b'{"a": ' + b"9" * 10_000 + b"}", b"\n" * 1000, b"{{", b"a: [b", b"&a [*a, *a]"]
TEXTS.append(b"!!python/x y")


def _spoilt(content: bytes, draw: random.Random) -> bytes:
    """A file of another content."""
    way = draw.randrange(6)
    if way == 0:
        return draw.choice(TEXTS)
    if way == 1 and content:
        return content[: draw.randrange(len(content))]
    if way == 2 and content:
        spoilt = bytearray(content)
        for _ in range(draw.randint(1, 8)):
            spoilt[draw.randrange(len(spoilt))] = draw.randrange(256)
        return bytes(spoilt)
    lines = content.splitlines() if content.count(b"\n{") else [content]
    number = draw.randrange(len(lines)) if lines else 0
    try:
        value = json.loads(lines[number])
    except (ValueError, IndexError, RecursionError):
        try:
            value = yaml.safe_load(content)
        except (yaml.YAMLError, UnicodeDecodeError, ValueError):
            return content[::-1]
    for _ in range(draw.randint(1, 3)):
        value = _changed(value, draw)
    lines[number] = json.dumps(value).encode("utf-8", "surrogatepass")
    return b"\n".join(lines) + b"\n"


def _changed(value: Any, draw: random.Random) -> Any:
    """A value of JSON with something else somewhere."""
    if not value or not isinstance(value, dict | list) or draw.random() < 0.15:
        return draw.choice(ODD)
    if isinstance(value, list):
        place = draw.randrange(len(value))
        return [*value[:place], _changed(value[place], draw), *value[place + 1 :]]
    key = draw.choice(list(value))
    way = draw.random()
    if way < 0.1:
        return {name: each for name, each in value.items() if name != key}
    if way < 0.2:
        return {**value, str(draw.choice(ODD)): draw.choice(ODD)}
    return {**value, key: _changed(value[key], draw)}


# -- what is spoilt


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with its checkpoints, model and profile, and directories of runs for the page."""
    root = tmp_path_factory.mktemp("whole")
    checkpoint = {"every": 1, "keep_last": 1}
    run = write_small_run(root, steps=3, output_dir=str(root / "run"), checkpoint=checkpoint, profile={"steps": [2, 2]})
    run_command("train", str(run)).check_returncode()
    watched = write_run_directory(root / "watched", 20)
    write_rank_files(watched, 2)
    write_timelines(watched)
    adapter = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 2, "lora_alpha": 4, "target_modules": ["q_proj"]}
    (root / "adapter").mkdir()
    text = json.dumps({**adapter, "base_model_name_or_path": str(root / "run/model")})
    (root / "adapter" / "adapter_config.json").write_text(text)
    (root / "device.yaml").write_text(yaml.safe_dump(load_device_spec("h100-80gb").model_dump(mode="json")))
    return root


def _command(*arguments: str) -> None:
    result = CliRunner().invoke(app, arguments)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code in (0, 1, 2)
    assert "Traceback" not in result.output
    assert all(each.isprintable() or each in "\n\t" for each in result.output)


def _checkpoint(place: Path) -> None:
    checkpoint = next((place / "run" / "checkpoints").iterdir())
    _command("checkpoint", "show", str(checkpoint))
    _command("checkpoint", "verify", str(checkpoint))
    _command("export", str(checkpoint), str(place / "exported"))


def _part_of_checkpoint(place: Path) -> None:
    # As one who crafts a checkpoint would.
    rewrite_manifest(next((place / "run" / "checkpoints").iterdir()))
    _checkpoint(place)


def _directory(place: Path) -> None:
    run = place / "run"
    read_metrics(run / "metrics.jsonl", last_step=3, num_steps=3)
    _command("diff", str(run), str(run))
    config = load_run(place / "run.yaml", [f"output_dir={run}", "steps=5"])
    choose_run_action(config, 5)
    _page(run)


def _page(run: Path) -> None:
    answers = WatchApi([WatchedRun(run, "run")])
    for name in ("state", "events", "ranks", "timeline"):
        to_json(getattr(answers, name)(QueryParams("run=0")))


def _profile(place: Path) -> None:
    _command("profile", "show", str(place / "run" / "profile"))
    _command("profile", "compare", str(place / "run"), str(place / "run"))


def _model(place: Path) -> None:
    directory = place / "run" / "model"
    config = config_from_directory(directory, {})
    open_pretrained(directory, config, dtype=torch.float32)


def _tokenizer(place: Path) -> object:
    return load_tokenizer(place / "run" / "model")


KINDS: Mapping[str, tuple[str, Callable[[Path], object]]] = {
    "manifest": (f"run/checkpoints/*/{MANIFEST_FILE}", _checkpoint),
    "index": ("run/checkpoints/*/index.json", _part_of_checkpoint),
    "optimizer": ("run/checkpoints/*/optimizer-00000.json", _part_of_checkpoint),
    "tensors": ("run/checkpoints/*/tensors-00000.bin", _part_of_checkpoint),
    "configuration in a checkpoint": ("run/checkpoints/*/huggingface/config.json", _part_of_checkpoint),
    "metrics": ("run/metrics.jsonl", _directory),
    "events": ("run/events.jsonl", _directory),
    "summary": ("run/summary.json", _directory),
    "run file of a run": ("run/run.yaml", _directory),
    "list of a run": ("run/.written.json", _directory),
    "metrics of the page": ("watched/metrics.jsonl", lambda place: _page(place / "watched")),
    "events of the page": ("watched/events.jsonl", lambda place: _page(place / "watched")),
    "ranks": ("watched/ranks/*.jsonl", lambda place: _page(place / "watched")),
    "timeline": ("watched/timeline/*", lambda place: _page(place / "watched")),
    "profile": ("run/profile/rank-*", _profile),
    "run file": ("run.yaml", lambda place: load_run(place / "run.yaml")),
    "device file": ("device.yaml", lambda place: load_device_spec(str(place / "device.yaml"))),
    "configuration": ("run/model/config.json", _model),
    "generation configuration": ("run/model/generation_config.json", _model),
    "weights": ("run/model/model.safetensors", _model),
    "tokenizer": ("run/model/tokenizer.json", _tokenizer),
    "tokenizer configuration": ("run/model/tokenizer_config.json", _tokenizer),
    "adapter": ("adapter/adapter_config.json", lambda place: read_adapter_config(place / "adapter")),
}
MAY_APPEAR = {"exported"}


def _cases(kind: str, count: int, whole: Path, place: Path) -> Iterator[tuple[str, Path]]:
    """Copies of the whole, with one file of a kind spoilt."""
    pattern, _ = KINDS[kind]
    draw = random.Random(kind)
    copy = place / "copy"
    top = {Path(pattern).parts[0], "run.yaml", "run"} if "watched" not in pattern else {"watched"}
    for number in range(count):
        shutil.rmtree(copy, ignore_errors=True)
        copy.mkdir()
        for name in sorted(top):
            source = whole / name
            (shutil.copytree if source.is_dir() else shutil.copy)(source, copy / name)
        found = sorted(copy.glob(pattern))
        assert found, pattern
        path = draw.choice(found)
        path.write_bytes(_spoilt(path.read_bytes(), draw))
        yield f"{kind} {number}", copy


@pytest.mark.parametrize("count", [pytest.param(12, marks=pytest.mark.slow), pytest.param(400, marks=pytest.mark.zoo)])
@pytest.mark.parametrize("kind", KINDS)
def test_a_spoilt_file_is_read_or_refused(
    kind: str, count: int, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    monkeypatch.chdir(outside)
    monkeypatch.setenv("HOME", str(outside))
    for case, copy in _cases(kind, count, whole, tmp_path):
        before = {path.name for path in copy.iterdir()}
        try:
            with limit_resources(case):
                KINDS[kind][1](copy)
        except MeshwrightError as refusal:
            check_user_error(refusal)
        assert {path.name for path in copy.iterdir()} - before <= MAY_APPEAR, case
        assert not [path for path in outside.rglob("*") if path.is_file()], case
        assert {path.name for path in tmp_path.iterdir()} <= {"outside", "copy"}, case
