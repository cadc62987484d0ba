"""What a user sees of public objects in a shell: names, short reprs, and errors with the message first."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from pydantic import field_validator

import meshwright as mw
import meshwright.plugin
import meshwright.testing
from meshwright.base import errors
from meshwright.base.errors import format_error, parse_error


def test_dir_lists_public_names_only() -> None:
    for module in (mw, meshwright.plugin, meshwright.testing):
        names = dir(module)
        assert [name for name in names if name.startswith("_")] in ([], ["__version__"])
        assert not {"annotations", "import_lazily", "read_stub_names"} & set(names)
    assert {"train", "Run", "fit", "OptimizerConfig"} <= set(dir(mw))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"lr": "x"}, "lr: Input should be a valid number (got 'x')"),
        ({"lrr": 1e-3}, "lrr: unknown key. Did you mean 'lr'? Allowed: "),
    ],
)
def test_a_config_built_in_python_raises_a_config_error(values: dict[str, object], message: str) -> None:
    with pytest.raises(mw.ConfigError) as caught:
        mw.OptimizerConfig(**values)
    assert str(caught.value).startswith(f"OptimizerConfig is not valid:\n  {message}")
    # pydantic's own error, which this replaces, is a ValueError, too.
    assert isinstance(caught.value, ValueError)
    with pytest.raises(mw.ConfigError, match="MeshSizes is not valid"):
        mw.MeshSizes(tp_size=-1)


def test_a_config_that_a_validator_builds_is_an_error_of_its_key() -> None:
    class Outer(mw.FrozenModel):
        rate: float

        @field_validator("rate")
        @classmethod
        def _check(cls, value: float) -> float:
            return mw.OptimizerConfig(lr=value).lr

    with pytest.raises(mw.ConfigError, match=r"rate: OptimizerConfig is not valid:\n  lr: Input should be greater"):
        Outer(rate=-1.0)
    assert Outer(rate=0.5).rate == 0.5


def test_reprs_are_short_and_name_what_differs_from_the_default() -> None:
    assert repr(mw.OptimizerConfig(lr=3e-3)) == "OptimizerConfig(lr=0.003)"
    assert repr(mw.OptimizerConfig()) == "OptimizerConfig()"
    with mw.open_world("cpu") as world:
        stack, degrees = mw.resolve("single", mw.MeshSizes(), world.size)
        manager = stack.build(mw.Mesh(degrees, world))
    shown = {
        manager.mesh.world: "World(rank 0 of 1, cpu)",
        manager.mesh: "Mesh(one rank, World(rank 0 of 1, cpu))",
        manager: "SingleManager(Mesh(one rank, World(rank 0 of 1, cpu)), SingleConfig())",
        mw.StopSignals(("SIGTERM",)): "StopSignals(('SIGTERM',))",
    }
    assert {each: repr(each) for each in shown} == shown
    assert repr(stack) == "Stack('single', SingleConfig())"
    batch = {"input_ids": torch.zeros(2, 4096, dtype=torch.int64)}
    loop = mw.Loop([batch], steps=3, eval_sets={"others": [batch]}, early_stopping=mw.EarlyStopping("others"))
    assert repr(loop) == (
        "Loop(batches=<list>, steps=3, eval_sets=['others'], "
        "early_stopping=EarlyStopping(eval_set='others', patience=3, min_delta=0.0))"
    )
    result = mw.StepResult(3, 9, 1.5, 0.5, 1e-3, 64, 2.0, 0, times={"data": 1.0}, memory={"host": 5})
    assert len(repr(result)) < 200
    assert "times" not in repr(result)


def test_an_error_survives_its_formatting() -> None:
    for cls in (mw.ConfigError, mw.DataError, errors.CheckpointWriteError):
        parsed = parse_error(format_error(cls("line\n  key: value")) + "\n")
        assert (type(parsed), str(parsed)) == (cls, "line\n  key: value")
    assert parse_error("Traceback: no error of meshwright") is None
    assert parse_error("error: text\nsee docs/troubleshooting.md#unheard") is None


def test_a_script_may_ask_for_the_message_first(tmp_path: Path) -> None:
    # A clone may be in a folder named meshwright: a script there is the user's own.
    script = tmp_path / "meshwright" / "script.py"
    script.parent.mkdir()
    script.write_text(
        "import sys\nimport meshwright as mw\nassert sys.excepthook is sys.__excepthook__\nmw.shorten_tracebacks()\n"
        "def build():\n    return mw.OptimizerConfig(lrr=1)\nbuild() if len(sys.argv) == 1 else 1 / 0\n"
    )
    lines = subprocess.run([sys.executable, script], capture_output=True, text=True, check=False).stderr.splitlines()
    assert lines[0] == "ConfigError: OptimizerConfig is not valid:"
    assert [line.split(", line ")[1] for line in lines if "File" in line] == ["7, in <module>", "6, in build"]
    other = subprocess.run([sys.executable, script, "x"], capture_output=True, text=True, check=False).stderr
    assert other.startswith("Traceback (most recent call last)")
