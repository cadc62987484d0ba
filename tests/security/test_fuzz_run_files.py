"""Whatever stands in a run file: it is read as it was meant, or one error says what is wrong, in bounded time.

Files, values and sizes follow from a seed; `fuzzed_run_files` says what they are. Run with `-s` for the counts.
"""

from __future__ import annotations

import copy
import inspect
import itertools
import random
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch
import transformers
import yaml
from pydantic import BaseModel
from support.commands import MODEL, leave_launcher, write_run
from support.fuzzed_run_files import UNUSUAL_VALUES, RunFileFuzzer, iter_keys, set_at
from support.resource_limits import check_user_error, limit_resources
from typer.testing import CliRunner

from meshwright.base.errors import MeshwrightError
from meshwright.base.validation import validate_config
from meshwright.cli import main as cli
from meshwright.files.parsing import parse_yaml, to_yaml
from meshwright.mesh.sizes import Degrees
from meshwright.model.configuration import build_model_config
from meshwright.optim.build import probe_optimizer
from meshwright.optim.groups import needs_closure
from meshwright.strategy.registry import get_registry
from meshwright.strategy.stack import resolve
from meshwright_run import start
from meshwright_run.data import sources
from meshwright_run.data.prepare import prepare_data
from meshwright_run.data.tokenizer import load_tokenizer
from meshwright_run.launch import local as launch
from meshwright_run.model_probe import probe_model
from meshwright_run.run_file import OptimizerConfig, RunConfig, ScheduleConfig, load_run, to_redacted_dict
from meshwright_run.run_schema import run_schema

MINIMAL = {"model": {"model_type": "llama"}, "steps": 1, "batch_size": 1}
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _place(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """A directory to work in, with caches of its own."""
    leave_launcher(monkeypatch)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))
    verbosity = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    yield
    transformers.logging.set_verbosity(verbosity)


def check_usage_error(error: MeshwrightError) -> None:
    check_user_error(error)
    assert error.exit_code == 2


# -- single values


def same(kept: Any, given: Any) -> bool:
    """Whether a config holds what was written, and not what something else was taken for."""
    if isinstance(given, dict):
        return isinstance(kept, dict | BaseModel)
    if isinstance(given, list):
        return isinstance(kept, list | tuple) and all(map(same, kept, given)) and len(kept) == len(given)
    if isinstance(given, int | float) and not isinstance(given, bool):
        # A number of the same value; texts may be normalized.
        return type(kept) in (int, float) and (kept in (given, float(given)) or kept != kept)
    return type(kept) is type(given) and (isinstance(given, str) or kept == given)


def _replace_none(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _replace_none(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_replace_none(each) for each in value]
    return None if isinstance(value, str) and value.lower() == "none" else value


@pytest.mark.slow
def test_each_odd_value_of_each_key_is_refused_or_kept_as_it_is() -> None:
    schema = run_schema()
    whole = jsonschema.Draft202012Validator(schema)
    targets: list[tuple[Any, type[BaseModel], dict[str, Any]]] = [(schema, RunConfig, MINIMAL)]
    targets += [(schema["$defs"][spec.name], spec.config_cls, {}) for spec in get_registry().strategies.values()]
    counts: Counter[str] = Counter()
    for below, cls, needed in targets:
        allowed = whole.evolve(schema=below)
        # Options of strategies are judged by those: as values of the run file they are any mapping.
        known = [path for path, _ in iter_keys(schema, below) if path[0] not in ("strategy_config", "wrapper_config")]
        for path, value in itertools.product(known, UNUSUAL_VALUES):
            values = copy.deepcopy(needed)
            set_at(values, path, copy.deepcopy(value))
            try:
                with limit_resources((cls.__name__, path, value)):
                    kept: Any = validate_config(cls, values, where="a run file")
            except MeshwrightError as error:
                check_usage_error(error)
                counts["refused"] += 1
                continue
            counts["kept"] += 1
            assert allowed.is_valid(values), f"{cls.__name__} takes {'.'.join(path)}={value!r}, its schema does not"
            for key in path:
                by_alias = {
                    field.alias or name: name for name, field in getattr(type(kept), "model_fields", {}).items()
                }
                kept = kept.get(key) if isinstance(kept, dict) else getattr(kept, by_alias.get(key, key))
            assert same(kept, value), f"{cls.__name__} takes {'.'.join(path)}={value!r} for {kept!r}"
    assert counts["kept"] > 500
    assert counts["refused"] > 5000


def _options_of_optimizers() -> list[tuple[type[Any], str]]:
    base = torch.optim.Optimizer
    classes = [each for each in vars(torch.optim).values() if inspect.isclass(each) and issubclass(each, base)]
    return [
        (cls, name)
        for cls in classes
        if cls is not base and not needs_closure(cls)
        for name in inspect.signature(cls).parameters
        if name not in ("params", "lr", "weight_decay")
    ]


@pytest.mark.parametrize("count", [300, pytest.param(None, marks=pytest.mark.zoo)])
def test_odd_options_of_optimizers_are_refused_or_work(count: int | None) -> None:
    cases = list(itertools.product(_options_of_optimizers(), UNUSUAL_VALUES))
    counts: Counter[str] = Counter()
    for (cls, name), value in random.Random(15).sample(cases, count or len(cases)):
        config = OptimizerConfig(name=cls.__name__, options={name: copy.deepcopy(value)})
        try:
            with limit_resources(config):
                probe_optimizer(config, ScheduleConfig(), 10, device=CPU)
        except MeshwrightError as error:
            check_usage_error(error)
            counts["refused"] += 1
            continue
        counts["taken"] += 1
        default = inspect.signature(cls).parameters[name].default
        if isinstance(default, bool | int | float):
            assert isinstance(value, bool) == isinstance(default, bool), f"{cls.__name__} takes {name}={value!r}"
    assert min(counts.values()) > sum(counts.values()) // 50


@pytest.mark.parametrize(
    "count", [pytest.param(200, marks=pytest.mark.slow), pytest.param(None, marks=pytest.mark.zoo)]
)
def test_odd_fields_of_models_are_refused_or_train(count: int | None, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(prepare_data(load_run(write_run(tmp_path)).data).tokenizer_dir)
    counts: Counter[str] = Counter()
    fields = transformers.AutoConfig.for_model("llama").to_dict()
    cases = [case for case in itertools.product(fields, UNUSUAL_VALUES) if case[0] not in ("model_type", "dtype")]
    ends = [("num_hidden_layers", 2**31), ("vocab_size", 10**30), ("intermediate_size", 2**63)]
    for name, value in [*ends, *random.Random(14).sample(cases, count or len(cases))]:
        section = {**MODEL, name: copy.deepcopy(value)}
        before = copy.deepcopy(section)
        try:
            with limit_resources(section):
                config = build_model_config(section, tokenizer=tokenizer, seq_len=16)
                probe_model(config, torch.float32, seq_len=16, device=CPU, degrees=Degrees())
        except MeshwrightError as error:
            check_usage_error(error)
            counts["refused"] += 1
        else:
            counts["trained"] += 1
        assert repr(section) == repr(before), "the run file's own values were changed"
    assert min(counts.values()) > sum(counts.values()) // 50


# -- whole files


@pytest.mark.parametrize(
    "count", [400, pytest.param(3000, marks=pytest.mark.slow), pytest.param(20_000, marks=pytest.mark.zoo)]
)
def test_run_files_are_read_or_refused(count: int, tmp_path: Path) -> None:
    path, files = tmp_path / "odd.yaml", RunFileFuzzer(MINIMAL, seed=16 + (count > 3000))
    schema = jsonschema.Draft202012Validator(run_schema())
    counts: Counter[str] = Counter()
    for number in range(count):
        file = files[number]
        path.write_bytes(file.content)
        outcome = "refused as they are read"
        try:
            with limit_resources((number, file)):
                config = load_run(path, file.assignments)
                outcome = "refused by their strategy"
                ranks = config.count_local_ranks(get_registry().get(config.strategy).axes, 0)
                options = {"config": config.strategy_config, "wrapper_config": config.wrapper_config}
                resolve(config.strategy, config, ranks, **options)
        except MeshwrightError as error:
            check_usage_error(error)
            counts[outcome] += 1
            continue
        counts["accepted"] += 1
        if not file.assignments:
            # The word none is read as null, where no text is allowed.
            values = _replace_none(parse_yaml(file.content.decode("utf-8-sig")))
            assert schema.is_valid(values), f"{number}: accepted, but not by the schema: {values}"
        again = to_yaml(to_redacted_dict(config))
        path.write_text(again, encoding="utf-8")
        assert to_yaml(to_redacted_dict(load_run(path))) == again, (number, file)
    assert min(counts.values()) > count // 50


class Started(Exception):
    """Ranks would be started now, with this run."""

    def __init__(self, config: RunConfig) -> None:
        self.config = config


def _start(main: Any, arguments: tuple[Any, ...], **_: Any) -> None:
    raise Started(arguments[0])


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> RunFileFuzzer:
    """Odd run files on small data; `meshwright train` in this process raises Started instead of starting ranks."""
    # Tracing each would take a second; some turn it on.
    good = {**yaml.safe_load(write_run(tmp_path).read_text()), "steps": 1, "plan": {"enabled": False}}
    (tmp_path / "cache").mkdir()
    monkeypatch.setattr(launch, "start_fork_server", lambda *_: None)
    monkeypatch.setattr(launch, "launch_ranks", _start)
    monkeypatch.setattr(start, "run_guarded", _start)
    # All of the standard library would take half a minute.
    monkeypatch.setattr(sources, "_find_stdlib_files", lambda: [tmp_path / "0.txt", tmp_path / "1.txt"])
    kinds = {bool: "boolean", int: "integer", float: "number"}

    def fields(values: Mapping[str, Any], *above: str) -> dict[tuple[str, ...], dict[str, Any]]:
        return {(*above, key): {"type": kinds.get(type(value), "string")} for key, value in values.items()}

    adamw = {name: each.default for name, each in inspect.signature(torch.optim.AdamW).parameters.items()}
    more = {
        **fields(transformers.AutoConfig.for_model("llama").to_dict(), "model"),
        **fields(adamw, "optimizer", "options"),
        ("optimizer", "name"): {"enum": sorted({cls.__name__ for cls, _ in _options_of_optimizers()})},
        ("schedule", "name"): {"enum": ["linear", "cosine", "polynomial", "constant", "warmup_stable_decay"]},
        ("schedule", "options", "num_cycles"): {"type": "number"},
        ("model", "model_type"): {"enum": ["llama", "qwen2", "mistral", "olmo", "gpt2", "bert", "t5"]},
    }
    return RunFileFuzzer(good, seed=17, more=more)


@pytest.mark.parametrize(
    "count", [pytest.param(300, marks=pytest.mark.slow), pytest.param(2500, marks=pytest.mark.zoo)]
)
def test_runs_are_planned_or_refused(count: int, planned: RunFileFuzzer, tmp_path: Path) -> None:
    path, counts = tmp_path / "odd.yaml", Counter[str]()
    for number in range(count):
        file = planned[number]
        path.write_bytes(file.content)
        options = [each for assignment in file.assignments for each in ("--set", assignment)]
        with limit_resources(file):
            result = CliRunner().invoke(cli.app, ["train", str(path), *options])
            if not isinstance(result.exception, Started | SystemExit):
                raise result.exception or AssertionError("it has ended without an error")
        counts[type(result.exception).__name__] += 1
        if isinstance(result.exception, Started):
            # What ranks are given, and write beside their results, is what the file holds.
            assert result.exception.config == load_run(path, file.assignments), (number, file)
        else:
            assert (result.exit_code, result.stdout) == (2, ""), (file, result.stderr)
            assert [line[:7] for line in result.stderr.splitlines()].count("error: ") == 1, (file, result.stderr)
            assert "Traceback" not in result.stderr, (file, result.stderr)
        assert not (tmp_path / "out").exists()
    assert min(counts.values()) > count // 50
