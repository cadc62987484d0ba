"""What is often wrong with a run file is said before what trains is imported, and in the same words by all commands."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.tiers import mark_mostly_slow

from meshwright._compat import transformers as model_types
from meshwright._compat.transformers import list_model_types as known_types

RUN: dict[str, Any] = {
    "strategy": "fsdp2",
    "model": {"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 8},
    "data": {"corpus": "text.txt", "seq_len": 16},
    "steps": 1,
    "batch_size": 8,
    # More would be forked from a process that imports all, and says so, too.
    "dp_size": 1,
    "device": "cpu",
}
HEAVY = ("torch", "transformers")
TRAINS = ("transformers.modeling_utils", "peft", "meshwright.mesh.world", "meshwright.model.pretrained")
"""Of what a plan or a run imports."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "text", "without"),
    [
        ("model.model_type=lama", "Did you mean 'llama'?", HEAVY),
        ("model.hidden_size=33", "'hidden_size': 33", TRAINS),
        ("model.hiden_size=64", "Did you mean 'hidden_size'?", TRAINS),
    ],
)
def test_all_commands_say_the_same_before_they_import_what_trains(change, text, without, tmp_path):
    change = ["run.yaml", "--set", change]
    reported = [_said(tmp_path, "plan", *change, "--world", "1"), _said(tmp_path, "train", *change)]
    assert text in reported[0][0]
    assert reported[0][0] == reported[1][0]
    for _, imported in reported:
        assert not imported.intersection(without)


def _said(directory: Path, *line: str) -> tuple[str, set[str]]:
    """What a command writes to stderr, and the modules that it has imported."""
    (directory / "run.yaml").write_text(yaml.safe_dump(RUN), encoding="utf-8")
    command = [sys.executable, "-X", "importtime", "-m", "meshwright", *line]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120, cwd=directory)
    assert done.returncode == 2, done.stderr
    written = done.stderr.splitlines()
    imported = {each.split("|")[-1].strip() for each in written if each.startswith("import time:")}
    return "\n".join(each for each in written if not each.startswith("import time:")), imported


def test_model_types_are_read_as_transformers_has_them(monkeypatch):
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    assert set(model_types._read_types()) == set(CONFIG_MAPPING.keys())
    # Types of the user's own are known once they are registered.
    monkeypatch.setitem(CONFIG_MAPPING._extra_content, "of_the_user", object)
    assert "of_the_user" in known_types()


@pytest.mark.parametrize(
    ("line", "text"),
    mark_mostly_slow(
        [
            (["train", "nowhere.yaml"], "cannot read the run file"),
            (["train", "run.yaml", "--set", "stepz=3"], "Did you mean 'steps'?"),
            (
                ["explain", "run.yaml", "--world", "8", "--set", "tp_size=3", "--set", "dp_size=null"],
                "do not fill the world",
            ),
            (["trian"], "No such command"),
            (["init", "new.yaml", "--yes", "--adapter"], "--model DIRECTORY"),
        ]
    ),
)
def test_what_needs_no_torch_to_be_found_is_said_without_it(line, text, tmp_path):
    said, imported = _said(tmp_path, *line)
    assert text in said
    assert not imported.intersection(HEAVY)
