"""Models that others publish: ids of the hub, code that comes with a model, text parts of multimodal ones."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from support.commands import write_run
from support.refusals import raises_with
from support.runs import output_of_rank
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText
from typer.testing import CliRunner

import meshwright as mw
from meshwright.checkpoint import export_checkpoint
from meshwright.checkpoint.merged_model import merge_adapter
from meshwright.cli import main as cli
from meshwright.model.adapter import read_base
from meshwright.model.configuration import config_from_directory, digest_of_code
from meshwright.model.pretrained import find_directory
from meshwright.testing import Case
from meshwright_run.preflight import plan_run
from meshwright_run.run_file import load_run
from meshwright_testing import pool
from meshwright_testing.models import tiny_model
from meshwright_testing.parity import train_steps

COMMIT, LATER = "a" * 40, "b" * 40


@contextmanager
def offline(cache: str) -> Iterator[None]:
    """Nothing but a cache is there of the hub."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
        patch.setattr("huggingface_hub.constants.HF_HUB_CACHE", cache)
        yield


def put_on_hub(cache: Path, source: Path, commit: str = COMMIT, branch: str = "main") -> None:
    root = cache / "models--somebody--tiny"
    shutil.copytree(source, root / "snapshots" / commit)
    (root / "refs").mkdir(exist_ok=True)
    (root / "refs" / branch).write_text(commit)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model with a tokenizer."""
    workplace = tmp_path_factory.mktemp("tiny")
    path = write_run(workplace)
    values = yaml.safe_load(path.read_text()) | {"strategy": "single", "strategy_config": {}, "nproc": 1, "steps": 1}
    path.write_text(yaml.safe_dump(values))
    _, error, code = pool(1).run(output_of_rank, str(path), None)[0]
    assert code == 0, error
    return workplace / "out" / "model"


def run_file(directory: Path, tiny: Path, model: dict[str, Any], **changes: Any) -> Path:
    """A run that begins with a model, over the corpus that `tiny` was trained on."""
    values = yaml.safe_load((tiny.parent.parent / "run.yaml").read_text())
    values |= {"model": model, "output_dir": str(directory / "out"), "steps": 1, "sample": {"prompt": "def "}} | changes
    values["data"] = {key: value for key, value in values["data"].items() if key != "vocab_size"}
    path = directory / "run.yaml"
    path.write_text(yaml.safe_dump(values))
    return path


def _run(path: str, cache: str) -> tuple[str, str, int]:
    with offline(cache):
        return output_of_rank(path, None)


@pytest.mark.slow
def test_a_run_begins_with_a_model_of_the_hub_and_its_adapter_names_it(tiny: Path, tmp_path: Path) -> None:
    put_on_hub(tmp_path, tiny)
    peft = {"type": "lora", "r": 2, "target_modules": "all-linear"}
    path = run_file(tmp_path, tiny, {"path": "somebody/tiny", "revision": "main", "peft": peft})
    output, error, code = pool(1).run(_run, str(path), str(tmp_path))[0]
    assert code == 0, error
    assert f"over somebody/tiny at {COMMIT}" in output
    base = read_base(tmp_path / "out" / "model")
    assert base is not None
    assert (base.path, base.revision) == ("somebody/tiny", COMMIT)
    with offline(str(tmp_path)):
        model = AutoModelForCausalLM.from_pretrained(find_directory("somebody/tiny"))
    assert model.config.model_type == "llama"


def _paths(cache: str, revision: str | None) -> str:
    with offline(cache):
        manager = mw.from_pretrained("somebody/tiny", "ddp", revision=revision, device="cpu")
    return str(manager.model_parts[0].config.name_or_path)


@pytest.mark.slow
def test_all_ranks_take_the_commit_that_the_first_one_finds(tiny: Path, tmp_path: Path) -> None:
    put_on_hub(tmp_path, tiny)
    put_on_hub(tmp_path, tiny, LATER, "next")
    for revision, commit in ((None, COMMIT), ("next", LATER), (COMMIT, COMMIT)):
        found = pool(2).run(_paths, str(tmp_path), revision)
        assert [Path(each).name for each in found] == [commit, commit]


def refused(path: Path) -> str:
    with pytest.raises(mw.MeshwrightError) as caught:
        plan_run(load_run(path), 1)
    assert caught.value.exit_code == 2
    return str(caught.value)


def test_what_is_neither_here_nor_on_the_hub_is_told(tmp_path: Path, monkeypatch: Any) -> None:
    texts = ("'nobody/nothing' is no local directory, and it cannot be had", "hub at revision 'v1'")
    with offline(str(tmp_path)):
        with raises_with(mw.ModelError, *texts):
            find_directory("nobody/nothing", revision="v1")
        for path in ("/nowhere/at/all", "./nowhere", "runs/of/mine", tmp_path / "nowhere"):
            with pytest.raises(mw.ModelError, match="is not a directory"):
                find_directory(path)
        # Whose own directory it is, the hub is not asked for it.
        monkeypatch.chdir(tmp_path)
        (tmp_path / "runs").mkdir()
        with raises_with(mw.ModelError, f"{tmp_path / 'runs'} holds no 'model'"):
            find_directory("runs/model")
    assert find_directory(tmp_path) == tmp_path


# -- code that comes with a model


@pytest.fixture
def with_code(tiny: Path, tmp_path: Path) -> Path:
    """A model of a class of its own, whose code leaves a file when it runs."""
    directory = tmp_path / "with_code"
    shutil.copytree(tiny, directory)
    (directory / "configuration_own.py").write_text(
        "from transformers import LlamaConfig\n\n\nclass OwnConfig(LlamaConfig):\n    model_type = 'own_llama'\n"
    )
    (directory / "modeling_own.py").write_text(
        "from transformers import LlamaForCausalLM\n\nfrom .configuration_own import OwnConfig\n\n"
        f"open({str(tmp_path / 'ran')!r}, 'w').close()\n\n\n"
        "class OwnForCausalLM(LlamaForCausalLM):\n    config_class = OwnConfig\n\n"
        "    def forward(self, *args, **kwargs):\n        out = super().forward(*args, **kwargs)\n"
        "        out.logits = 2 * out.logits\n        return out\n"
    )
    config = json.loads((directory / "config.json").read_text())
    named = {"AutoConfig": "configuration_own.OwnConfig", "AutoModelForCausalLM": "modeling_own.OwnForCausalLM"}
    config |= {"model_type": "own_llama", "architectures": ["OwnForCausalLM"], "auto_map": named}
    (directory / "config.json").write_text(json.dumps(config))
    return directory


@pytest.mark.slow
def test_code_of_a_model_runs_only_where_its_version_is_named(with_code: Path, tiny: Path, tmp_path: Path) -> None:
    digest = digest_of_code(with_code)
    text = refused(run_file(tmp_path, tiny, {"path": str(with_code)}))
    assert "needs code of its own (configuration_own.py, modeling_own.py)" in text
    assert f"model.trust_remote_code={digest}" in text
    for wrong, told in (("0" * 64, f"is {digest}"), ("0" * 40, "is a local directory"), ("yes", "names no code")):
        assert told in refused(run_file(tmp_path, tiny, {"path": str(with_code), "trust_remote_code": wrong}))
    assert not (tmp_path / "ran").exists()
    path = run_file(tmp_path, tiny, {"path": str(with_code), "trust_remote_code": digest}, checkpoint={"every": 1})
    done = subprocess.run(
        [sys.executable, "-m", "meshwright", "train", str(path)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "ran").exists()
    out = tmp_path / "out"
    assert digest_of_code(out / "model") == digest
    # The export of a checkpoint is another process, which trusts nothing that it is not told of.
    checkpoint = out / "checkpoints" / "step-00000001"
    told = CliRunner().invoke(cli.app, ["export", str(checkpoint), str(tmp_path / "again")])
    assert told.exit_code == 2
    assert f"--trust-remote-code={digest}" in told.stderr
    command = ["export", str(checkpoint), str(tmp_path / "again"), "--trust-remote-code", digest]
    done = subprocess.run([sys.executable, "-m", "meshwright", *command], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    ids = torch.arange(12).view(2, 6)
    with torch.no_grad():
        found = [
            AutoModelForCausalLM.from_pretrained(each, trust_remote_code=True).eval()(ids).logits
            for each in (out / "model", tmp_path / "again")
        ]
    assert torch.equal(*found)


@pytest.mark.slow
def test_code_from_another_place_is_refused(with_code: Path, tiny: Path, tmp_path: Path) -> None:
    config = (with_code / "config.json").read_text().replace("modeling_own.Own", "else/where--modeling_own.Own")
    (with_code / "config.json").write_text(config)
    model = {"path": str(with_code), "trust_remote_code": digest_of_code(with_code)}
    assert "takes code from another place" in refused(run_file(tmp_path, tiny, model))


# -- text parts of multimodal models

TEXT = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 131}
TEXT |= {"num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1}
VISION = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
VISION |= {"image_size": 28, "patch_size": 14}
MULTIMODAL: dict[str, dict[str, Any]] = {
    "gemma3": {
        "text_config": TEXT,
        "vision_config": {**VISION, "model_type": "siglip_vision_model"},
        "mm_tokens_per_image": 4,
        "image_token_index": 130,
    },
    "llama4": {
        "text_config": {**TEXT, "num_local_experts": 2, "intermediate_size_mlp": 64, "no_rope_layers": [1, 0]},
        "vision_config": {**VISION, "vision_output_dim": 32, "projector_input_dim": 32, "projector_output_dim": 32},
        "image_token_index": 130,
    },
}


def _train(path: str, strategy: str, peft: Any, root: str) -> tuple[list[float], Any]:
    case = Case(dtype="float32")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        manager = mw.from_pretrained(path, strategy, device="cpu", peft=peft)
    manager.build_optimizer(lambda named: torch.optim.AdamW([p for _, p in named], lr=1e-2))
    losses, _, _ = train_steps(manager, case, range(2))
    mw.save_checkpoint(manager, f"{root}/checkpoint", step=2)
    export_checkpoint(f"{root}/checkpoint", f"{root}/model", world=manager.mesh.world)
    with manager.unshard() as parts, torch.no_grad():
        return losses, parts[0].eval()(torch.arange(12).view(2, 6) + 10).logits


@pytest.mark.slow
@pytest.mark.parametrize("kind", MULTIMODAL)
def test_text_parts_of_multimodal_models_train_and_are_written(kind: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    AutoModelForImageTextToText.from_config(AutoConfig.for_model(kind, **MULTIMODAL[kind])).save_pretrained(
        tmp_path / "base"
    )
    ids = torch.arange(12).view(2, 6) + 10
    reference, _ = pool(1).run(_train, str(tmp_path / "base"), "single", None, str(tmp_path / "single"))[0]
    losses, logits = pool(2).run(_train, str(tmp_path / "base"), "fsdp2", None, str(tmp_path / "fsdp2"))[0]
    assert losses == pytest.approx(reference, abs=1e-5)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "fsdp2" / "model").eval()
    with torch.no_grad():
        assert torch.allclose(plain(ids).logits, logits, atol=1e-6)
    peft = {"type": "lora", "r": 2, "target_modules": ["q_proj", "v_proj"]}
    _, logits = pool(1).run(_train, str(tmp_path / "base"), "single", peft, str(tmp_path / "adapter"))[0]
    merge_adapter(tmp_path / "adapter" / "checkpoint", tmp_path / "merged")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval()
    with torch.no_grad():
        assert torch.allclose(merged(ids).logits, logits, atol=1e-5)


def test_a_multimodal_model_without_a_causal_lm_is_told(tmp_path: Path) -> None:
    config = AutoConfig.for_model("llava", text_config={**TEXT, "model_type": "llama"})
    config.save_pretrained(tmp_path)
    tiny_model(tied=False).save_pretrained(tmp_path / "weights")
    shutil.copyfile(tmp_path / "weights" / "model.safetensors", tmp_path / "model.safetensors")
    with pytest.raises(mw.ModelError, match="its text part alone is no model there"):
        config_from_directory(tmp_path, {})
