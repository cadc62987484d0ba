"""Adapters in files: checkpoints without the base, directories that peft loads to the bit, and merged models."""

from __future__ import annotations

import itertools
import json
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from support import export_routes
from support.managers import build_empty_manager
from support.tiers import mark_mostly_slow
from torch import Tensor
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

import meshwright as mw
from meshwright._compat.peft import is_transposed, to_base_name
from meshwright.checkpoint import export_checkpoint
from meshwright.checkpoint.index import read_index
from meshwright.checkpoint.manifest import MANIFEST_FILE, read_manifest
from meshwright.checkpoint.merged_model import merge_adapter
from meshwright.cli import main as cli
from meshwright.model.adapter import BASE_FILE, compute_fingerprint
from meshwright.model.merge import AdapterMerger
from meshwright.testing import Case
from meshwright.training.from_pretrained import PretrainedRequest, open_pretrained_model
from meshwright_testing import pool
from meshwright_testing.models import build_case_model
from meshwright_testing.parity import full_weights, train_steps

LORA = {"type": "lora", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj", "o_proj", "down_proj"]}
LAYOUTS: dict[str, tuple[str, int, dict[str, int]]] = {
    "fsdp2": ("fsdp2", 2, {}),
    "tp2": ("fsdp2", 2, {"tp_size": 2}),
    "pipeline": ("fsdp2", 2, {"pp_size": 2}),
    "ddp": ("ddp", 2, {}),
}
KINDS: dict[str, dict[str, Any]] = {
    "lora": {},
    "all-linear": {"target_modules": "all-linear"},
    "rslora": {"use_rslora": True, "modules_to_save": ["lm_head", "norm"]},
    "dora": {"use_dora": True, "target_modules": ["q_proj", "embed_tokens"]},
    "embeddings": {"target_modules": ["embed_tokens", "lm_head"]},
    "trained embeddings": {"modules_to_save": ["embed_tokens"]},
    "biases": {"bias": "all"},
    "tied copies": {"modules_to_save": ["embed_tokens"], "ensure_weight_tying": True},
    "tied copies by head": {"modules_to_save": ["lm_head"], "ensure_weight_tying": True},
    "tied factors": {"target_modules": ["q_proj", "embed_tokens"], "ensure_weight_tying": True},
    "tied factors by head": {"target_modules": ["lm_head"], "use_rslora": True, "ensure_weight_tying": True},
    "tied dora": {"target_modules": ["embed_tokens"], "use_dora": True, "ensure_weight_tying": True},
}
EXPERTS = {"experts": {"target_modules": ["q_proj"], "target_parameters": ["experts.gate_up_proj"]}}
UNTIED = ("rslora", "dora", "embeddings", "trained embeddings", "tied dora")
"""Kinds that change one of two tied weights, or both in different ways."""
ADDED_TWICE = ("dora", "embeddings", "tied dora", "tied factors", "tied factors by head")
"""Kinds whose changes `merge_and_unload` adds to both of two tied weights."""
PREFIX = "base_model.model."
pytestmark = pytest.mark.filterwarnings("ignore:.*:UserWarning")


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("bases")
    for name, model_type, tied, seed in (
        ("untied", "llama", False, 0),
        ("tied", "llama", True, 0),
        ("other", "llama", False, 1),
        ("experts", "mixtral", None, 0),
    ):
        build_case_model(model_type, tied=tied, seed=seed, dtype=torch.float32).save_pretrained(root / name)
    return root


def _train(
    base: str, strategy: str, sizes: dict[str, int], peft: Any, steps: range, root: str | None, source: str
) -> Any:
    """Weights before the steps and after, and losses; saves below `root`, resumes from `source`."""
    case = Case(dtype="float32")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        manager = mw.from_pretrained(base, strategy, peft=peft, device="cpu", seed=3, **sizes)  # type: ignore[arg-type]
    manager.build_optimizer(lambda named: torch.optim.AdamW([p for _, p in named], lr=1e-2))
    if source:
        mw.load_checkpoint(manager, source)
    loaded = full_weights(manager)
    losses, _, _ = train_steps(manager, case, steps)
    if root is not None:
        mw.save_checkpoint(manager, f"{root}/checkpoint", step=len(steps))
        export_checkpoint(f"{root}/checkpoint", f"{root}/adapter", world=manager.mesh.world)
    return loaded, full_weights(manager), losses


def train(layout: str, base: Path, peft: Any, steps: int, root: Path | None = None, source: str = "") -> Any:
    strategy, ranks, sizes = LAYOUTS.get(layout, ("single", 1, {}))
    return pool(ranks).run(_train, str(base), strategy, sizes, peft, range(steps), root and str(root), source)[0]


def trained_in_peft(base: Path, adapter: Path) -> Any:
    return PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), str(adapter)).eval()


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        found: Tensor = model(torch.arange(24).view(2, 12) % 100).logits
    return found


def merged_model(source: Path, out: Path, **options: Any) -> Any:
    merge_adapter(source, out, **options)
    return AutoModelForCausalLM.from_pretrained(out).eval()


def check_equal(state: Any, expected: Any) -> None:
    """Every tensor of a state is in another one, bit for bit."""
    assert [name for name, value in state.items() if not torch.equal(expected[name], value)] == []


def check_loaded_in_peft(weights: dict[str, Tensor], base: Path, adapter: Path) -> Any:
    """Every weight of the run is in peft's model over the base, bit for bit."""
    model = trained_in_peft(base, adapter)
    found = dict(model.named_parameters(remove_duplicate=False))
    # A tied head holds the embedding's factors, which peft has the other way around.
    turned = {name.replace(".factor", ".weight"): value.t() for name, value in weights.items() if is_transposed(name)}
    weights = {name: value for name, value in weights.items() if not is_transposed(name)} | turned
    assert found.keys() == weights.keys()
    check_equal(weights, found)
    return model


def size_of(checkpoint: Path) -> int:
    return sum(path.stat().st_size for path in checkpoint.glob("tensors-*.bin"))


@pytest.mark.parametrize(
    ("layout", "tied"), mark_mostly_slow([("fsdp2", False), ("tp2", False), ("ddp", False), ("pipeline", True)])
)
def test_a_checkpoint_holds_the_adapter_alone_and_any_layout_resumes_from_it(
    layout: str, tied: bool, bases: Path, tmp_path: Path
) -> None:
    base = bases / ("tied" if tied else "untied")
    peft = {**LORA, **(KINDS["tied factors"] if tied else {"modules_to_save": ["lm_head"]})}
    _, weights, _ = train(layout, base, peft, 2, tmp_path)
    model = check_loaded_in_peft(weights, base, tmp_path / "adapter")
    merged = merged_model(tmp_path / "adapter", tmp_path / "merged")
    assert torch.allclose(logits(merged), logits(model), atol=1e-5)
    trained = sum(v.nbytes for n, v in weights.items() if "lora_" in n or "modules_to_save" in n)
    trained -= sum(v.nbytes for n, v in weights.items() if n.endswith(".factor"))
    manifest = read_manifest(tmp_path / "checkpoint")
    stored = read_index(tmp_path / "checkpoint", manifest).tensors
    random = sum(each.nbytes for name, each in stored.items() if name.startswith("random."))
    # The adapter, and two moments of AdamW.
    assert size_of(tmp_path / "checkpoint") - random == 3 * trained
    assert manifest.format == 3
    assert manifest.base == {"path": str(base), "revision": None, "fingerprint": compute_fingerprint(base)}
    other = "fsdp2" if layout == "pipeline" else "pipeline"
    loaded, _, losses = train(other, base, peft, 1, source=str(tmp_path / "checkpoint"))
    assert loaded.keys() == weights.keys()
    check_equal(weights, loaded)
    _, _, same = train(layout, base, peft, 1, source=str(tmp_path / "checkpoint"))
    assert losses == pytest.approx(same, abs=1e-6)


@pytest.mark.parametrize(
    ("kind", "tied"), mark_mostly_slow([*itertools.product(KINDS, ("untied", "tied")), ("experts", "experts")])
)
def test_peft_loads_what_was_trained_and_merged_models_compute_it(
    kind: str, tied: str, bases: Path, tmp_path: Path
) -> None:
    base = bases / tied
    _, weights, _ = train("", base, {**LORA, **(KINDS | EXPERTS)[kind]}, 2, tmp_path)
    model = check_loaded_in_peft(weights, base, tmp_path / "adapter")
    expected = logits(model)
    # Of the checkpoint, and of the adapter's directory.
    for name in ("checkpoint", "adapter"):
        done = CliRunner().invoke(cli.app, ["export", "--merge", str(tmp_path / name), str(tmp_path / f"of-{name}")])
        assert done.exit_code == 0, done.output
    files = [load_file(tmp_path / f"of-{name}" / "model.safetensors") for name in ("checkpoint", "adapter")]
    assert files[0].keys() == files[1].keys()
    check_equal(*files)
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "of-checkpoint").eval()
    assert torch.allclose(logits(merged), expected, atol=1e-5)
    plain = model.merge_and_unload()
    assert merged.config.tie_word_embeddings is (tied == "tied" and kind not in UNTIED)
    differs = tied == "tied" and kind in ADDED_TWICE
    assert torch.allclose(logits(plain), expected, atol=1e-5) is not differs
    if not differs:
        check_equal(merged.state_dict(), plain.state_dict())


@pytest.mark.slow
@pytest.mark.parametrize("tied", ["untied", "tied"])
def test_single_tokens_that_are_trained_are_merged(tied: str, bases: Path, tmp_path: Path) -> None:
    base = AutoModelForCausalLM.from_pretrained(bases / tied)
    model = get_peft_model(base, LoraConfig(r=2, target_modules=["q_proj"], trainable_token_indices=[1, 5]))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.25 if parameter.requires_grad else 0.0)
    weights = {name: value.clone() for name, value in model.named_parameters()}
    model.save_pretrained(tmp_path / "adapter")
    merging = AdapterMerger(model)
    given = dict(merging.merge((name, weights[name]) for name in merging.needed_names))
    merged = merged_model(tmp_path / "adapter", tmp_path / "merged", base=bases / tied).state_dict()
    plain = model.merge_and_unload()
    before = AutoModelForCausalLM.from_pretrained(bases / tied).model.embed_tokens.weight
    assert (plain.model.embed_tokens.weight != before).any(1).nonzero().flatten().tolist() == [1, 5]
    assert given.keys() <= merged.keys() == plain.state_dict().keys()
    check_equal(plain.state_dict(), merged)
    check_equal(given, merged)


@pytest.fixture(scope="module")
def trained(bases: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("trained")
    train("", bases / "untied", LORA, 1, root)
    return root


def refused(base: Path, peft: Any, source: str = "") -> str:
    with pytest.raises(mw.RankError, match=r"meshwright\.base\.errors\.(ModelError|CheckpointError)") as caught:
        train("", base, peft, 1, source=source)
    return str(caught.value)


def test_another_base_is_refused(bases: Path, trained: Path, tmp_path: Path) -> None:
    text = refused(bases / "other", LORA, str(trained / "checkpoint"))
    assert f"holds adapters alone. Their base is {bases / 'untied'}" in text
    assert "the model has none that is known" in refused(bases / "untied", None, str(trained / "checkpoint"))
    text = refused(bases / "other", {"adapter": str(trained / "adapter")})
    assert "is an adapter of another base" in text
    with pytest.raises(mw.ModelError, match="is not the base of the adapter"):
        merge_adapter(trained / "checkpoint", tmp_path / "merged", base=bases / "other")
    # One of peft's own names its base alone.
    foreign = tmp_path / "foreign"
    shutil.copytree(trained / "adapter", foreign)
    (foreign / BASE_FILE).unlink()
    config = json.loads((foreign / "adapter_config.json").read_text())
    (foreign / "adapter_config.json").write_text(json.dumps({**config, "base_model_name_or_path": "nobody/nothing"}))
    assert "is an adapter of the base 'nobody/nothing'" in refused(bases / "untied", {"adapter": str(foreign)})
    train("", bases / "untied", {"adapter": str(foreign), "base_model_name_or_path": "nobody/nothing"}, 1)
    text = refused(bases / "experts", {"adapter": str(foreign), "base_model_name_or_path": "nobody/nothing"})
    assert "nothing in MixtralForCausalLM is called 'down_proj'" in text


@pytest.mark.slow
def test_a_base_that_has_moved_is_the_same(bases: Path, trained: Path, tmp_path: Path) -> None:
    shutil.copytree(bases / "untied", tmp_path / "moved")
    train("", tmp_path / "moved", LORA, 1, source=str(trained / "checkpoint"))
    merge_adapter(trained / "checkpoint", tmp_path / "merged", base=tmp_path / "moved")
    # In other files it is, too; with another value in each tensor it is not.
    model = AutoModelForCausalLM.from_pretrained(bases / "untied")
    model.save_pretrained(tmp_path / "shards", max_shard_size="30KB")
    assert compute_fingerprint(tmp_path / "shards") == compute_fingerprint(bases / "untied")
    with torch.no_grad():
        model.model.norm.weight.mul_(1.001)
    model.save_pretrained(tmp_path / "changed")
    assert compute_fingerprint(tmp_path / "changed") != compute_fingerprint(bases / "untied")


@pytest.mark.slow
def test_what_is_trained_beside_adapters_is_not_lost(bases: Path, tmp_path: Path) -> None:
    pool(1).run(_train_norm_too, str(bases / "untied"), str(tmp_path))
    with pytest.raises(mw.CheckpointError, match=r"cannot hold: base_model\.model\.model\.norm\.weight"):
        export_checkpoint(tmp_path / "checkpoint", tmp_path / "adapter")
    merge_adapter(tmp_path / "checkpoint", tmp_path / "merged")
    norm = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").model.norm.weight
    assert not torch.equal(norm, AutoModelForCausalLM.from_pretrained(bases / "untied").model.norm.weight)


def _train_norm_too(base: str, root: str) -> None:
    manager = build_empty_manager("single")
    model, weights = open_pretrained_model(manager.mesh.world, PretrainedRequest(base, peft=LORA))
    model.get_parameter(f"{PREFIX}model.norm.weight").requires_grad_(True)
    manager.parallelize(model, weights)
    manager.build_optimizer(lambda named: torch.optim.AdamW([p for _, p in named], lr=1e-2))
    train_steps(manager, Case(dtype="float32"), range(1))
    mw.save_checkpoint(manager, f"{root}/checkpoint", step=1)


def _from_config(root: str) -> tuple[int, dict[str, Tensor]]:
    config = build_case_model("llama", tied=False, seed=0, dtype=torch.float32).config
    manager = mw.from_config(config, "single", peft=LoraConfig(r=2, target_modules=["q_proj"]), device="cpu")
    base = {to_base_name(name): value.clone() for name, value in full_weights(manager).items() if "lora_" not in name}
    export_routes.train_step(manager)
    mw.save_checkpoint(manager, f"{root}/checkpoint", step=1)
    return sum(p.nbytes for part in manager.model_parts for p in part.parameters()), base


@pytest.mark.slow
def test_a_model_whose_base_nobody_knows_is_saved_whole_and_leaves_as_adapter_or_merged(tmp_path: Path) -> None:
    held, untrained = pool(1).run(_from_config, str(tmp_path))[0]
    assert size_of(tmp_path / "checkpoint") >= held
    export_checkpoint(tmp_path / "checkpoint", tmp_path / "adapter")
    assert not (tmp_path / "adapter" / "meshwright_base.json").exists()
    base = build_case_model("llama", tied=False, seed=0, dtype=torch.float32)
    base.load_state_dict(untrained)
    ids = torch.arange(8)[None]
    plain = base.eval()(ids).logits
    adapted = PeftModel.from_pretrained(base, tmp_path / "adapter").eval()(ids).logits
    merged = merged_model(tmp_path / "checkpoint", tmp_path / "merged")(ids).logits
    torch.testing.assert_close(merged, adapted, rtol=0, atol=1e-5)
    assert not torch.allclose(adapted, plain, atol=1e-3)
    assert read_manifest(tmp_path / "checkpoint").format == 2
    assert "base" not in json.loads((tmp_path / "checkpoint" / MANIFEST_FILE).read_text())


def test_what_cannot_be_merged_is_reported(bases: Path, trained: Path, tmp_path: Path) -> None:
    def said(*arguments: str) -> str:
        done = CliRunner().invoke(cli.app, ["export", *arguments])
        assert done.exit_code == 2, done.output
        assert not (tmp_path / "out").exists()
        return done.stderr

    out = str(tmp_path / "out")
    assert "--base needs --merge" in said("--base", str(bases / "untied"), str(trained / "checkpoint"), out)
    assert "is no checkpoint" in said("--merge", str(tmp_path / "none"), out)
    assert "Say where it is: --base DIR" in said("--merge", str(trained / "checkpoint"), out, "--base", "/nowhere")
    assert "not empty" in said("--merge", str(trained / "checkpoint"), str(bases))
    damaged = tmp_path / "damaged"
    shutil.copytree(trained / "adapter", damaged)
    (damaged / "adapter_model.safetensors").unlink()
    assert "no adapter_model.safetensors" in said("--merge", str(damaged), out)
    tensors = load_file(trained / "adapter" / "adapter_model.safetensors")
    tensors.pop(next(iter(tensors)))
    save_file(tensors, damaged / "adapter_model.safetensors")
    assert "lacks" in said("--merge", str(damaged), out)
