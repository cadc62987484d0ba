"""What is exported is what `save_pretrained` would have written, and plain transformers loads it with equal logits."""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from support import export_routes
from support.managers import build_model_manager
from support.tiers import mark_mostly_slow
from torch import Tensor, nn
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from meshwright import CheckpointError, ConfigError, save_checkpoint
from meshwright.checkpoint import export as module
from meshwright.checkpoint import export_checkpoint
from meshwright.cli import main as cli
from meshwright.model.model_files import attach_extra_files, drop_replaced_files, get_extra_files
from meshwright.testing import Case
from meshwright_testing import pool
from meshwright_testing.models import build_case_model
from meshwright_testing.parity import build_manager, full_weights, train_steps

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
    module.MIN_FILE_BYTES = 1000
    manager = build_manager(strategy, {}, sizes, case)
    train_steps(manager, case, range(1))
    save_checkpoint(manager, f"{root}/checkpoint", step=1)
    export_checkpoint(f"{root}/checkpoint", f"{root}/by-ranks", world=manager.mesh.world)
    return full_weights(manager)


@pytest.mark.parametrize("case", mark_mostly_slow(CASES))
@pytest.mark.parametrize("layout", mark_mostly_slow(LAYOUTS))
def test_all_ranks_or_one_process_write_what_save_pretrained_would(layout: str, case: str, tmp_path: Path) -> None:
    strategy, ranks, sizes = LAYOUTS[layout]
    weights = pool(ranks).run(_train_and_export, strategy, sizes, CASES[case], str(tmp_path))[0]
    done = CliRunner().invoke(cli.app, ["export", str(tmp_path / "checkpoint"), str(tmp_path / "by-one")])
    assert done.exit_code == 0, done.output
    plain = build_case_model(CASES[case].model_type, tied=CASES[case].tied, seed=0, dtype=torch.float32)
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
    pool(1).run(_save, str(path), _make_generation_config_odd)
    return path


def _make_generation_config_odd(model: Any) -> None:
    # Published so by some models: transformers reads it with a warning, and its save_pretrained may refuse it.
    model.generation_config.temperature, model.generation_config.do_sample = 0.6, False


def _save(path: str, change: Callable[[Any], object]) -> None:
    manager = build_manager("single", {}, {}, Case())
    change(manager.model_parts[0])
    save_checkpoint(manager, path, step=3)


def test_weights_are_converted_files_bounded_and_a_generation_config_kept(checkpoint: Path, tmp_path: Path) -> None:
    export_checkpoint(checkpoint, tmp_path / "half", dtype=torch.bfloat16, max_shard_size="10KB")
    files = list((tmp_path / "half").glob("*.safetensors"))
    contents = _contents(tmp_path / "half")
    assert len(files) > 3
    largest = max(tensor.nbytes for tensor in contents.values())
    assert all(path.stat().st_size <= max(10_000, largest) + 2000 for path in files)
    assert {tensor.dtype for tensor in contents.values()} == {torch.bfloat16}
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "half").dtype == torch.bfloat16
    assert json.loads((tmp_path / "half" / "generation_config.json").read_text())["temperature"] == 0.6


def test_an_export_that_is_cut_off_leaves_nothing_under_its_name(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(module.ModelExporter, "write_metadata", lambda *_: (tmp_path / "file" / "below").touch())
        with pytest.raises(FileNotFoundError):
            export_checkpoint(checkpoint, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["out.writing"]
    (tmp_path / "out.writing" / "left.safetensors").touch()
    export_checkpoint(checkpoint, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert not (tmp_path / "out" / "left.safetensors").exists()


def _add_more(model: Any) -> None:
    model.register_buffer("more", torch.ones(3))


def test_what_a_model_of_transformers_would_not_take_is_not_left_out(tmp_path: Path) -> None:
    pool(1).run(_save, str(tmp_path / "checkpoint"), _add_more)
    with pytest.raises(CheckpointError, match=r"LlamaForCausalLM has no more\."):
        export_checkpoint(tmp_path / "checkpoint", tmp_path / "plain")


def test_what_cannot_be_exported_is_reported(checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes.txt").write_text("keep")
    with pytest.raises(ConfigError, match="not empty"):
        export_checkpoint(checkpoint, tmp_path / "full")
    with pytest.raises(CheckpointError, match="is no checkpoint"):
        export_checkpoint(tmp_path / "none", tmp_path / "out")
    with pytest.raises(ConfigError, match="max_shard_size='much'"):
        export_checkpoint(checkpoint, tmp_path / "out", max_shard_size="much")
    assert not (tmp_path / "out").exists()


# -- what leaves by any door is what was trained; benchmarks/exports.py tries all types


@pytest.mark.parametrize(
    ("model_type", "ties", "door"),
    mark_mostly_slow(
        [
            *itertools.product(["llama"], export_routes.TIE_VARIANTS, export_routes.EXPORT_ROUTES),
            *itertools.product(["gpt2", "mixtral", "roberta"], export_routes.TIE_VARIANTS, ["Python"]),
            # A type that trains without a cache alone.
            ("bamba", "plain", "merge"),
        ]
    ),
)
def test_what_plain_transformers_loads_is_what_was_trained(
    model_type: str, ties: str, door: str, tmp_path: Path
) -> None:
    assert pool(1).run(export_routes.find_difference, model_type, ties, door, tmp_path) == [""]


def _resume_from_a_checkpoint(root: Path) -> str:
    cls = export_routes.write_base("llama", "contradicting", root / "base")
    export_routes.export_by_run_file(root / "base", root / "first")
    checkpoint = root / "first.run" / "checkpoints" / "step-00000001"
    wanted = export_routes.train_by_run_file({"checkpoint": str(checkpoint)}, root / "base", root / "second")
    return export_routes.compare_export(cls, root / "base", root / "second", wanted)


@pytest.mark.slow
def test_a_run_that_begins_with_a_checkpoint_keeps_head_and_files(tmp_path: Path) -> None:
    assert pool(1).run(_resume_from_a_checkpoint, tmp_path) == [""]


def _change_ties(tied: bool, strategy: str, sizes: dict[str, int], root: str) -> Tensor:
    model: Any = build_case_model("llama", tied=tied, seed=0, dtype=torch.float32)
    embedding = model.get_input_embeddings().weight
    model.lm_head.weight = nn.Parameter(embedding.detach() * 2) if tied else embedding
    manager = build_model_manager(model, strategy, {}, sizes)
    save_checkpoint(manager, f"{root}/checkpoint", step=1)
    export_checkpoint(f"{root}/checkpoint", f"{root}/out", world=manager.mesh.world)
    return full_weights(manager)["lm_head.weight" if tied else "model.embed_tokens.weight"]


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["fsdp2", "pipeline"])
@pytest.mark.parametrize("tied", [True, False])
def test_a_head_that_code_unties_or_ties_is_exported_so(tied: bool, layout: str, tmp_path: Path) -> None:
    strategy, ranks, sizes = LAYOUTS[layout]
    head = pool(ranks).run(_change_ties, tied, strategy, sizes, str(tmp_path))[0]
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert loaded.config.tie_word_embeddings is not tied
    assert torch.equal(loaded.lm_head.weight, head)
    assert torch.equal(loaded.get_input_embeddings().weight, head / 2 if tied else head)


# -- files beside the weights


def test_files_of_another_tokenizer_do_not_remain() -> None:
    vocabulary = {"model": {"vocab": {"a": 0, "b": 1}}}
    base = {"tokenizer.json": _json(vocabulary), "spiece.model": b"pieces", "special_tokens_map.json": b"{}"}
    base |= {"LICENSE": b"Terms.", "chat_template.jinja": b"old", "preprocessor_config.json": b"{}"}
    same = {"tokenizer.json": _json({**vocabulary, "version": "2.0"}), "tokenizer_config.json": b"{}"}
    other = {**same, "tokenizer.json": _json({"model": {"vocab": {"b": 0, "a": 1}}})}
    assert drop_replaced_files(base, {}) == base
    assert drop_replaced_files(base, same).keys() == {"spiece.model", "LICENSE", "preprocessor_config.json"}
    assert drop_replaced_files(base, other).keys() == {"LICENSE", "preprocessor_config.json"}


def _json(value: Any) -> bytes:
    return json.dumps(value).encode()


def test_files_that_lie_elsewhere_are_left_out_and_reported_unless_all_are_links(tmp_path: Path) -> None:
    secret, base = tmp_path / "secret", tmp_path / "base"
    secret.write_text("key")
    base.mkdir()
    (base / "LICENSE").symlink_to(secret)
    (base / "NOTICE.txt").write_text("Terms.")
    os.mkfifo(base / "vocab.txt")
    for name in ("README.md", "model.safetensors.index.json", "all_results.json", "optimizer.bin"):
        (base / name).write_text("x")
    (base / "config.json").write_text("{}")
    model = nn.Linear(1, 1)
    assert attach_extra_files(model, base) == (
        f"{base / 'LICENSE'} is a link to another directory, and is left out of checkpoints and exports.",
    )
    assert get_extra_files(model) == {"NOTICE.txt": b"Terms."}
    # As the cache of the hub has them.
    files, links, model = tmp_path / "blobs", tmp_path / "snapshots", nn.Linear(1, 1)
    files.mkdir()
    links.mkdir()
    for name in ("config.json", "LICENSE", "vocab.txt"):
        (files / name).write_text("{}")
        (links / name).symlink_to(files / name)
    assert attach_extra_files(model, links) == ()
    assert get_extra_files(model) == {"LICENSE": b"{}", "vocab.txt": b"{}"}
