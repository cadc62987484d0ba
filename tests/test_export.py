"""What is exported is what `save_pretrained` would have written, and plain transformers loads it with equal logits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import Tensor
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from meshwright import CheckpointError, ConfigError, save_checkpoint
from meshwright.checkpoint import export as module
from meshwright.checkpoint import export_checkpoint
from meshwright.cli import main as cli
from meshwright.testing import Case, pool
from meshwright.testing.models import case_model, case_reason, known_models
from meshwright.testing.parity import build_manager, full_weights, train_steps

LAYOUTS: dict[str, tuple[str, int, dict[str, int]]] = {
    "fsdp2": ("fsdp2", 3, {}),
    "fsdp2-tp2": ("fsdp2", 4, {"tp_size": 2}),
    "ddp": ("ddp", 2, {}),
    "pipeline": ("fsdp2", 4, {"pp_size": 2}),
}
CASES = {
    "untied": Case(tied=False, dtype="float32"),
    "tied": Case(tied=True, dtype="float32"),
    # One parameter there, one for each expert in the files.
    "experts": Case(model_type="mixtral", dtype="float32", tied=None),
    "gpt2": Case(model_type="gpt2", dtype="float32", tied=None),
}


def _contents(directory: Path) -> dict[str, Tensor]:
    found = {}
    for path in sorted(directory.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            assert file.metadata() == {"format": "pt"}
            names = list(file.keys())
            assert not found.keys() & set(names)
            found.update({name: file.get_tensor(name) for name in names})
    return found


def _train_and_export(strategy: str, sizes: dict[str, int], case: Case, root: str) -> dict[str, Tensor]:
    # Files of a few kilobytes, so that every rank has some.
    module.LEAST_FILE_BYTES = 1000
    manager = build_manager(strategy, {}, sizes, case)
    train_steps(manager, case, range(1))
    save_checkpoint(manager, f"{root}/checkpoint", step=1)
    export_checkpoint(f"{root}/checkpoint", f"{root}/by-ranks", world=manager.mesh.world)
    return full_weights(manager)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_all_ranks_or_one_process_write_what_save_pretrained_would(layout: str, case: str, tmp_path: Path) -> None:
    strategy, ranks, sizes = LAYOUTS[layout]
    weights = pool(ranks).run(_train_and_export, strategy, sizes, CASES[case], str(tmp_path))[0]
    done = CliRunner().invoke(cli.app, ["export", str(tmp_path / "checkpoint"), str(tmp_path / "by-one")])
    assert done.exit_code == 0, done.output
    plain = case_model(CASES[case].model_type, tied=CASES[case].tied, seed=0, dtype=torch.float32)
    plain.load_state_dict({name: weights.get(name, value) for name, value in plain.state_dict().items()})
    plain.save_pretrained(tmp_path / "plain")
    expected = _contents(tmp_path / "plain")
    for name in ("by-ranks", "by-one"):
        found = _contents(tmp_path / name)
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[key], expected[key]) for key in expected)
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path / name)
        ids = torch.arange(12).view(2, 6)
        with torch.no_grad():
            assert torch.equal(loaded.eval()(ids).logits, plain.eval()(ids).logits)
    files = sorted(path.name for path in (tmp_path / "by-ranks").glob("*.safetensors"))
    assert len(files) >= ranks
    index = json.loads((tmp_path / "by-ranks" / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"].values()) == set(files)
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in expected.values())
    assert [path.name for path in (tmp_path / "by-one").glob("*.safetensors")] == ["model.safetensors"]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("export") / "checkpoint"
    pool(1).run(_save, str(path))
    return path


def _save(path: str) -> None:
    save_checkpoint(build_manager("single", {}, {}, Case()), path, step=3)


def test_weights_are_converted_and_files_bounded(checkpoint: Path, tmp_path: Path) -> None:
    export_checkpoint(checkpoint, tmp_path / "half", dtype=torch.bfloat16, max_shard_size="10KB")
    files = list((tmp_path / "half").glob("*.safetensors"))
    contents = _contents(tmp_path / "half")
    assert len(files) > 3
    largest = max(tensor.nbytes for tensor in contents.values())
    assert all(path.stat().st_size <= max(10_000, largest) + 2000 for path in files)
    assert {tensor.dtype for tensor in contents.values()} == {torch.bfloat16}
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "half").dtype == torch.bfloat16


def test_an_export_that_is_cut_off_leaves_nothing_under_its_name(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(module.Export, "describe", lambda *_: (tmp_path / "file" / "below").touch())
        with pytest.raises(FileNotFoundError):
            export_checkpoint(checkpoint, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["out.writing"]
    (tmp_path / "out.writing" / "left.safetensors").touch()
    export_checkpoint(checkpoint, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert not (tmp_path / "out" / "left.safetensors").exists()


def _save_with_more(path: str) -> None:
    manager = build_manager("single", {}, {}, Case())
    manager.model_parts[0].register_buffer("more", torch.ones(3))
    save_checkpoint(manager, path, step=3)


def test_what_a_model_of_transformers_would_not_take_is_not_left_out(tmp_path: Path) -> None:
    pool(1).run(_save_with_more, str(tmp_path / "checkpoint"))
    with pytest.raises(CheckpointError, match=r"LlamaForCausalLM has no more\."):
        export_checkpoint(tmp_path / "checkpoint", tmp_path / "plain")


def test_what_cannot_be_exported_is_told(checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes.txt").write_text("keep")
    with pytest.raises(ConfigError, match="not empty"):
        export_checkpoint(checkpoint, tmp_path / "full")
    with pytest.raises(CheckpointError, match="is no checkpoint"):
        export_checkpoint(tmp_path / "none", tmp_path / "out")
    with pytest.raises(ConfigError, match="max_shard_size='much'"):
        export_checkpoint(checkpoint, tmp_path / "out", max_shard_size="much")
    for arguments in (["none", "out"], [str(checkpoint), str(tmp_path / "full")]):
        done = CliRunner().invoke(cli.app, ["export", *arguments])
        assert done.exit_code in (1, 2)
        assert done.stderr.startswith("error: ")
    assert not (tmp_path / "out").exists()


def _round_trip(model_type: str, root: str) -> Any:
    case = Case(model_type=model_type, tied=None, dtype="float32")
    manager = build_manager("single", {}, {}, case)
    save_checkpoint(manager, f"{root}/checkpoint", step=0)
    export_checkpoint(f"{root}/checkpoint", f"{root}/exported")
    manager.model_parts[0].save_pretrained(f"{root}/plain")  # type: ignore[operator]
    expected, found = _contents(Path(root, "plain")), _contents(Path(root, "exported"))
    if expected.keys() != found.keys():
        return sorted(expected.keys() ^ found.keys())[:5]
    return [name for name in expected if not torch.equal(expected[name], found[name])]


@pytest.mark.zoo
@pytest.mark.parametrize("model_type", known_models("all"))
def test_every_architecture_is_exported_as_save_pretrained_would(model_type: str, tmp_path: Path) -> None:
    if reason := case_reason(model_type):
        pytest.skip(reason)
    assert pool(1).run(_round_trip, model_type, str(tmp_path)) == [[]]
