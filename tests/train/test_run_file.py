"""The run file: what it accepts, what it refuses and how, and its schema."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from pydantic import BaseModel, Field

from meshwright import BadStepConfig
from meshwright.base.errors import ConfigError
from meshwright.files.parsing import parse_yaml, to_yaml
from meshwright.strategy.contract import StrategySpec
from meshwright.strategy.hooks import hookimpl
from meshwright.strategy.registry import Registry
from meshwright_run.run_file import RunConfig, load_run, to_redacted_dict
from meshwright_run.run_schema import run_schema

EXAMPLES = sorted((Path(__file__).parents[2] / "examples").glob("*.yaml"))
MINIMAL = "model: {model_type: llama}\nsteps: 10\nbatch_size: 4\n"


DEEP = ("[" * 20_000, "{a: " * 20_000, "- " * 20_000)
CHAIN = "".join(f"a{n}: &a{n} [[[[[*a{n - 1}]]]]]\n" for n in range(1, 12))
LAUGHS = "".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]\n" for n in range(1, 11))
"""A few aliases that stand for billions of values."""
TAGS = ("!!timestamp x", "!!bool maybe", "!!int ''", "!!set {a}", "! x", "!own {a: 1}")
FORBIDDEN = ("\0", "\x1b", "\ufffe")


@pytest.fixture
def run_file(tmp_path):
    """Write a run file that extends a minimal one."""

    def write(more: str = "", base: str = MINIMAL) -> Path:
        path = tmp_path / "run.yaml"
        path.write_text(base + more, encoding="utf-8")
        return path

    return write


def refusal(path: Path, *assignments: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_run(path, assignments)
    return str(caught.value)


# -- reading


@pytest.mark.parametrize(
    ("text", "value"), [("3e-4", 3e-4), ("1E3", 1e3), ("2.e-3", 2e-3), (".5e-3", 0.5e-3), ("5", 5.0)]
)
def test_numbers_are_read_as_numbers_in_the_file_and_in_assignments(text, value, run_file):
    assert load_run(run_file(f"optimizer: {{lr: {text}, options: {{eps: {text}}}}}")).optimizer.options == {
        "eps": value
    }
    config = load_run(run_file(), [f"optimizer.lr={text}", f"optimizer.options.eps={text}"])
    assert (config.optimizer.lr, config.optimizer.options["eps"]) == (value, value)


@pytest.mark.parametrize(
    "text",
    ["e5", "1e", "1e5x", "v1e5", "2024-01-01e3", "2024-13-01", "yes", "on", "1:30", "010", "1_000", "0b1", "+.nan"],
)
def test_words_that_only_look_like_numbers_stay_words(text, run_file):
    assert load_run(run_file(f"output_dir: {text}\n")).output_dir == text


@pytest.mark.parametrize(
    ("more", "line"),
    [
        ("nproc: yes", "nproc: Input should be a valid integer (got 'yes'); or Input should be 'auto' (got 'yes')"),
        ("overwrite: 1", "overwrite: Input should be a valid boolean (got 1)"),
        ("timeout_s: '5'", "timeout_s: Input should be a valid number (got '5')"),
    ],
)
def test_no_value_is_taken_for_one_of_another_type(more, line, run_file):
    assert f"\n  {line}" in refusal(run_file(more))


def test_assignments_reach_nested_values_and_create_what_is_left_out(run_file):
    reported = ["optimizer.lr=3e-4", "strategy_config.reduce_dtype=float64", "data.corpus=[a.txt, b.txt]", "steps=20"]
    reported += ["max_grad_norm=null", "sample.prompt=a = b", "wrapper_config={pipeline: {schedule: 1f1b}}", "steps=30"]
    config = load_run(run_file("optimizer: {lr: 0.1, weight_decay: 0.2}\non_bad_step: skip\n"), reported)
    assert (config.optimizer.lr, config.optimizer.weight_decay) == (3e-4, 0.2)
    assert config.strategy_config == {"reduce_dtype": "float64"}
    assert config.data.corpus == ["a.txt", "b.txt"]
    assert (config.max_grad_norm, config.steps, config.sample.prompt) == (None, 30, "a = b")
    assert config.wrapper_config == {"pipeline": {"schedule": "1f1b"}}
    assert config.bad_step_config == BadStepConfig(action="skip")
    with pytest.raises(ValueError):
        config.steps = 3


@pytest.mark.parametrize(
    ("assignment", "text"),
    [
        ("tp_size", "--set 'tp_size' is not of the form key=value"),
        ("steps.more=2", "'more' is a key of 10, which has no keys of its own"),
        ("data=[1", "the value is not valid YAML"),
        *(("model=" + text, "is not valid YAML") for text in DEEP),
        ("model.x=" + "[" * 60 + "]" * 60, "nested deeper than 50 levels"),
        *((f"resume=a{each}b", "is not valid YAML: unacceptable character") for each in FORBIDDEN),
    ],
    ids=lambda text: text[:40],
)
def test_an_assignment_that_cannot_be_made_is_an_error(assignment, text, run_file):
    assert text in refusal(run_file(), assignment)


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("", "must hold a mapping of keys to values, not NoneType"),
        ("a: !!python/object:os.system {}", "is not valid YAML"),
        ("steps: 1\nsteps: 2", "the key 'steps' is given twice"),
        (MINIMAL + "optimizer:\n  lr: 1\n  lr: 2", "the key 'lr' is given twice"),
        (MINIMAL + "1: 2", "1: Keys should be strings"),
        *((text, "is not valid YAML") for text in DEEP),
        ("a0: &a0 1\n" + CHAIN, "nested deeper than 50 levels"),
        ("a0: &a0 [x]\n" + LAUGHS, "more than 100,000 values"),
        ("a: &a [*a]\n", "an alias (*) stands inside of what it names"),
        *((f"resume: {value}\n", "is not valid YAML: tags such as") for value in TAGS),
        ('resume: "\\ud800"\n', "half of a surrogate pair"),
        *((f"resume: a{each}b\n", "is not valid YAML: unacceptable character") for each in FORBIDDEN),
    ],
    ids=lambda text: text[:40],
)
def test_a_file_that_holds_no_run_is_an_error_that_names_the_file(content, text, run_file):
    path = run_file(content, base="")
    assert str(path) in refusal(path)
    assert text in refusal(path)


def test_bytes_that_are_not_utf8_and_a_file_without_an_end_are_errors(tmp_path):
    assert "larger than" in refusal(Path("/dev/zero"))
    path = tmp_path / "run.yaml"
    path.write_bytes(b"strategy: caf\xe9")
    assert "is not valid YAML: 'utf-8' codec" in refusal(path)


# -- values


@pytest.mark.parametrize(
    ("more", "line"),
    [
        ("stratgy: ddp", "stratgy: unknown key. Did you mean 'strategy'?"),
        ("data: {corpsu: x}", "data.corpsu: unknown key. Did you mean 'corpus'? Allowed: "),
        ("objective: gpro", "objective: there is no objective 'gpro'. Did you mean 'grpo'?"),
        ("objective: os.system", "objective: 'os.system' is no"),
        ("steps: 0", "steps: Input should be greater than or equal to 1 (got 0)"),
        ("seed: 9223372036854775808", "seed: Input should be less than 9223372036854775808"),
        ("optimizer: {lr: .inf}", "optimizer.lr: Input should be a finite number (got inf)"),
        ("grad_norm_type: .nan", "grad_norm_type: Input should be greater than 0 (got nan)"),
        ('output_dir: "a\\0b"', "output_dir: is no path"),
        (f"resume: {'a' * 300}", "resume: is too long for a path"),
        ("data: {cache_dir: ~nobody_here/x}", "data.cache_dir: names the home directory of a user who is unknown here"),
        ("epochs: 2", "as a whole: give either steps or epochs"),
        ("schedule: {warmup_steps: 2, warmup_ratio: 0.1}", "schedule: warmup_steps=2 and warmup_ratio=0.1 say"),
        ("on_bad_step: rollback", "as a whole: on_bad_step=rollback needs checkpoints; set"),
        ("on_bad_step: {action: skip, window: 5}", "on_bad_step"),
        ("eval: {early_stopping: {patience: 2}}", "as a whole: eval.early_stopping needs evaluations before the end"),
        (
            "checkpoint: {keep_best: {eval_set: wiki}}\ndata: {eval_sets: {news: {files: a.txt}}}",
            "as a whole: checkpoint.keep_best.eval_set='wiki' is not an evaluation set of this run. "
            "Known: held_out, news",
        ),
    ],
)
def test_a_bad_value_is_an_error_that_names_key_rule_and_value(more, line, run_file):
    key = more.split(":")[0]
    base = "".join(f"{kept}\n" for kept in MINIMAL.splitlines() if not kept.startswith(f"{key}:"))
    assert f"\n  {line}" in refusal(run_file(more, base=base))


@pytest.mark.parametrize(
    ("model", "text"),
    [
        ("{}", "model: give one of model_type"),
        ("{model_type: [llama]}", "model: model_type must be a string, not ['llama']"),
        ("llama", "model: must be a mapping. Write model.path=llama (got 'llama')"),
    ],
)
def test_a_model_needs_exactly_one_source(model, text, run_file):
    assert text in refusal(run_file(base=f"model: {model}\nsteps: 1\nbatch_size: 1\n"))


@pytest.mark.parametrize(
    "more",
    [
        "",
        "grad_norm_type: .inf",
        "optimizer: {lr: 1e-5, options: {betas: [0.9, 0.95]}}",
        "max_grad_norm: null",
        *(f"output_dir: '{text}'" for text in ("1e5", "yes", "010", "1:30", "0o17", "2024-01-01", "null", "~", "ü 😀")),
    ],
)
def test_the_run_written_beside_its_results_reads_back_as_the_same_run(more, run_file, tmp_path):
    config = load_run(run_file(more))
    copy = tmp_path / "copy.yaml"
    copy.write_text(to_yaml(to_redacted_dict(config)), encoding="utf-8")
    assert load_run(copy) == config
    assert yaml.safe_load(copy.read_text()) == to_redacted_dict(config)


# -- ranks


def test_ranks_of_a_node_follow_from_sizes_and_devices():
    for sizes, claims, accelerators, expected in (
        ({}, {"dp_shard"}, 0, 4),
        ({}, {"dp_shard"}, 8, 8),
        ({}, set(), 8, 1),
        ({"tp_size": 3}, {"dp_shard", "tp"}, 8, 6),
        ({"dp_size": 2}, {"dp_shard"}, 8, 2),
        ({"dp_size": 2, "pp_size": 2}, {"dp_shard"}, 0, 4),
        ({"nproc": 3, "dp_size": 2}, {"dp_shard"}, 8, 3),
    ):
        config = RunConfig(model={"model_type": "llama"}, steps=1, batch_size=1, **sizes)
        assert config.count_local_ranks(frozenset(claims), accelerators) == expected


# -- schema


def valid(run: Any, schema: dict[str, Any] | None = None) -> bool:
    return jsonschema.Draft202012Validator(schema or run_schema()).is_valid(run)


def run_with(**changes: Any) -> dict[str, Any]:
    return {**yaml.safe_load(MINIMAL), **changes}


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_the_examples_are_valid_and_the_schema_accepts_them(path):
    config = load_run(path)
    assert (config.steps or config.epochs or 0) > 0
    schema = run_schema()
    jsonschema.Draft202012Validator.check_schema(schema)
    # Editors read 3e-4 as a number too.
    run = parse_yaml(path.read_text())
    jsonschema.validate(run, schema, cls=jsonschema.Draft202012Validator)


@pytest.mark.parametrize(
    ("changes", "accepted"),
    [
        ({}, True),
        ({"strategy": "ddp", "strategy_config": {"bucket_cap_mb": 5}}, True),
        ({"strategy": "fsdp", "strategy_config": {"bucket_cap_mb": 5}}, False),
        ({"objective": "gpro"}, False),
        ({"objective": {"name": "cross_entropy", "label_smoothing": 0.1}}, True),
        ({"objective": {"name": "cross_entropy", "clip_low": 0.1}}, False),
        ({"objective": {"name": "mine.Objective", "clip_low": 0.1}}, False),
        # fsdp2 is the default
        ({"strategy_config": {"bucket_cap_mb": 5}}, False),
        ({"strategy_config": {"reduce_dtype": "float64"}}, True),
        ({"optimizer": {"learning_rate": 1}}, False),
    ],
)
def test_the_schema_knows_the_keys_and_the_options_of_each_strategy(changes, accepted):
    assert valid(run_with(**changes)) is accepted


class Inner(BaseModel, extra="forbid"):
    one: int = 1


class OneConfig(BaseModel, extra="forbid"):
    inner: Inner = Inner()


def two_configs() -> tuple[type[BaseModel], type[BaseModel]]:
    """Another pair of classes with the names of the two above."""

    class Inner(BaseModel, extra="forbid"):
        two: int = 1

    class OneConfig(BaseModel, extra="forbid"):
        inner: Inner = Field(default_factory=Inner)

    return Inner, OneConfig


class Opaque(BaseModel, arbitrary_types_allowed=True):
    stream: Registry | None = None


def registry_of(**configs: Any) -> Registry:
    class Plugin:
        @hookimpl
        def register_strategies(self) -> list[StrategySpec]:
            return [
                StrategySpec(name, "S.", frozenset({"pp"}), config, print, is_wrapper=name == "wrapping")  # type: ignore[arg-type]
                for name, config in configs.items()
            ]

    registry = Registry([])
    registry.register(Plugin(), name="test")
    assert registry.failures == []
    return registry


def test_classes_of_one_name_in_two_strategies_are_isolated_in_the_schema():
    schema = run_schema(registry_of(first=OneConfig, second=two_configs()[1]))
    for strategy, key in (("first", "one"), ("first", "two"), ("second", "two"), ("second", "one")):
        accepted = (strategy, key) in (("first", "one"), ("second", "two"))
        assert valid(run_with(strategy=strategy, strategy_config={"inner": {key: 1}}), schema) is accepted


def test_the_schema_has_wrapping_strategies_and_is_whole_though_json_cannot_describe_a_config():
    schema = run_schema(registry_of(opaque=Opaque, first=OneConfig, wrapping=OneConfig))
    assert valid(run_with(wrapper_config={"wrapping": {"inner": {"one": 2}}}), schema)
    assert not valid(run_with(wrapper_config={"wrapping": {"innner": {}}}), schema)
    assert valid(run_with(strategy="opaque", strategy_config={"anything": 1}), schema)
    assert not valid(run_with(strategy="first", strategy_config={"anything": 1}), schema)
