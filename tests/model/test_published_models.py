"""Models that others publish, in run files: ids of the hub, code that comes with a model, text parts, adapters."""

from __future__ import annotations

import builtins
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
from peft import PeftModel
from support.commands import invoke_in_process, write_run
from support.error_assertions import raises_containing
from support.runs import run_rank_capturing
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, AutoTokenizer

import meshwright as mw
from meshwright.checkpoint import export_checkpoint
from meshwright.checkpoint.manifest import read_manifest
from meshwright.checkpoint.merged_model import merge_adapter
from meshwright.model.adapter import read_base
from meshwright.model.configuration import compute_code_digest
from meshwright.model.pretrained import find_model_directory
from meshwright.testing import Case
from meshwright_run.preflight import preflight
from meshwright_run.run_file import load_run
from meshwright_testing import pool
from meshwright_testing.parity import train_steps

COMMIT, LATER = "a" * 40, "b" * 40
PEFT: dict[str, Any] = {"type": "lora", "r": 2, "target_modules": "all-linear", "modules_to_save": ["lm_head"]}


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
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with two models that runs have left, `base` and `other`, of float32, with tokenizers."""
    root = tmp_path_factory.mktemp("models")
    values = yaml.safe_load(write_run(root).read_text())
    values |= {"strategy": "single", "strategy_config": {}, "nproc": 1, "sample": {"prompt": None}}
    for name, seed in (("base", 0), ("other", 1)):
        values |= {"output_dir": str(root / name), "seed": seed}
        (root / "run.yaml").write_text(yaml.safe_dump(values))
        _, error, code = run(root / "run.yaml")
        assert code == 0, error
    return root


@pytest.fixture(scope="module")
def tiny(place: Path) -> Path:
    return place / "base" / "model"


def run_file(place: Path, directory: Path, model: dict[str, Any], **changes: Any) -> Path:
    """A run that begins with a model, `base` if no path is given, over the corpus that it was trained on."""
    values = yaml.safe_load((place / "run.yaml").read_text())
    values |= {
        "model": {"path": str(place / "base" / "model"), **model},
        "output_dir": str(directory / "out"),
        "seed": 0,
    }
    values["data"].pop("vocab_size")
    path = directory / "run.yaml"
    path.write_text(yaml.safe_dump(values | changes))
    return path


def _run(path: str, cache: str) -> tuple[str, str, int]:
    with offline(cache):
        return run_rank_capturing(path, None)


def run(path: Path, ranks: int = 1, cache: Path | None = None) -> tuple[str, str, int]:
    result: tuple[str, str, int] = pool(ranks).run(_run, str(path), str(cache))[0]
    return result


def refused(place: Path, directory: Path, model: dict[str, Any], **changes: Any) -> str:
    with pytest.raises(mw.MeshwrightError) as caught:
        preflight(load_run(run_file(place, directory, model, **changes)), 1)
    assert caught.value.exit_code == 2
    assert not (directory / "out").exists()
    return str(caught.value)


@pytest.mark.slow
def test_a_run_begins_with_a_model_of_the_hub_and_its_adapter_names_it(place: Path, tmp_path: Path) -> None:
    put_on_hub(tmp_path, place / "base" / "model")
    model = {"path": "somebody/tiny", "revision": "main", "peft": PEFT}
    path = run_file(place, tmp_path, model, steps=1, sample={"prompt": "def "})
    output, error, code = run(path, cache=tmp_path)
    assert code == 0, error
    assert f"on somebody/tiny at {COMMIT}" in output
    base = read_base(tmp_path / "out" / "model")
    assert base is not None
    assert (base.path, base.revision) == ("somebody/tiny", COMMIT)
    with offline(str(tmp_path)):
        model = AutoModelForCausalLM.from_pretrained(find_model_directory("somebody/tiny"))
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


def test_what_is_neither_here_nor_on_the_hub_is_reported(tmp_path: Path, monkeypatch: Any) -> None:
    texts = ("'nobody/nothing' is no local directory, and it cannot be had", "hub at revision 'v1'")
    with offline(str(tmp_path)):
        with raises_containing(mw.ModelError, *texts):
            find_model_directory("nobody/nothing", revision="v1")
        for path in ("/nowhere/at/all", "./nowhere", "runs/of/mine", tmp_path / "nowhere"):
            with pytest.raises(mw.ModelError, match="is not a directory"):
                find_model_directory(path)
        # Whose own directory it is, the hub is not asked for it.
        monkeypatch.chdir(tmp_path)
        (tmp_path / "runs").mkdir()
        with raises_containing(mw.ModelError, f"{tmp_path / 'runs'} holds no 'model'"):
            find_model_directory("runs/model")
    assert find_model_directory(tmp_path) == tmp_path


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
def test_code_of_a_model_runs_only_where_its_version_is_named(with_code: Path, place: Path, tmp_path: Path) -> None:
    digest = compute_code_digest(with_code)
    text = refused(place, tmp_path, {"path": str(with_code)})
    assert "needs code of its own (configuration_own.py, modeling_own.py)" in text
    assert f"model.trust_remote_code={digest}" in text
    for wrong, reported in (("0" * 64, f"is {digest}"), ("0" * 40, "is a local directory"), ("yes", "is not valid")):
        assert reported in refused(place, tmp_path, {"path": str(with_code), "trust_remote_code": wrong})
    assert not (tmp_path / "ran").exists()
    path = run_file(
        place, tmp_path, {"path": str(with_code), "trust_remote_code": digest}, steps=1, checkpoint={"every": 1}
    )
    done = subprocess.run(
        [sys.executable, "-m", "meshwright", "train", str(path)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "ran").exists()
    out = tmp_path / "out"
    assert compute_code_digest(out / "model") == digest
    # The export of a checkpoint is another process, which trusts nothing that it is not reported.
    checkpoint = out / "checkpoints" / "step-00000001"
    code, reported = invoke_in_process("export", str(checkpoint), str(tmp_path / "again"))
    assert (code, f"--trust-remote-code={digest}" in reported) == (2, True)
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
def test_code_from_another_place_is_refused(with_code: Path, place: Path, tmp_path: Path) -> None:
    config = (with_code / "config.json").read_text().replace("modeling_own.Own", "else/where--modeling_own.Own")
    (with_code / "config.json").write_text(config)
    model = {"path": str(with_code), "trust_remote_code": compute_code_digest(with_code)}
    assert "takes code from another place" in refused(place, tmp_path, model)


# -- text parts of multimodal models

TEXT = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 131}
TEXT |= {"num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1}
VISION = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
VISION |= {"image_size": 28, "patch_size": 14}
MULTIMODAL: dict[str, Any] = {
    "text_config": TEXT,
    "vision_config": {**VISION, "model_type": "siglip_vision_model"},
    "mm_tokens_per_image": 4,
    "image_token_index": 130,
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
def test_text_parts_of_multimodal_models_train_and_are_written(tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = AutoConfig.for_model("gemma3", **MULTIMODAL)
    AutoModelForImageTextToText.from_config(config).save_pretrained(tmp_path / "base")
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


# -- adapters


@pytest.fixture(scope="module")
def adapter(place: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The output of a run with an adapter and a checkpoint after each of its two steps."""
    directory = tmp_path_factory.mktemp("adapter")
    _, error, code = run(run_file(place, directory, {"peft": PEFT}, checkpoint={"every": 1}))
    assert code == 0, error
    return directory / "out"


def export_merged(source: Path, out: Path) -> None:
    code, output = invoke_in_process("export", "--merge", str(source), str(out))
    assert code == 0, output


WRONG: dict[str, tuple[Any, str]] = {
    "a word": ("lora", "peft must be a mapping"),
    "no type": ({"r": 4}, "peft has no type"),
    "a type that is none": ({"type": "lora2"}, "model.peft.type='lora2' is not one of lora. Did you mean 'lora'?"),
    "dora": ({"type": "dora"}, "type: lora with use_dora: true"),
    "an unknown option": ({"lora_alfa": 4}, "is no option of LoraConfig. Did you mean 'lora_alpha'? Options: type, "),
    "a value of peft": ({"bias": "some"}, "Requested bias: some, is not implemented"),
    "a module that is none": ({"target_modules": ["q_proj", "v_porj"]}, "is called 'v_porj'. Did you mean 'v_proj'?"),
    "another task": ({"task_type": "SEQ_CLS"}, "is not CAUSAL_LM"),
    "a changed base": ({"init_lora_weights": "pissa"}, "it would change the base"),
    "4 bit": ({"base_dtype": "nf4"}, "Use base_dtype=bfloat16"),
    "an adapter that is none": ({"adapter": "/nowhere"}, "is no directory, so it is no adapter of peft"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_cannot_be_is_reported_before_anything_starts(case: str, place: Path, tmp_path: Path) -> None:
    peft, reported = WRONG[case]
    if isinstance(peft, dict) and case != "no type":
        peft = {**PEFT, **peft}
    assert reported in refused(place, tmp_path, {"peft": peft})


def test_an_adapter_needs_a_base_that_everybody_can_load(place: Path, adapter: Path, tmp_path: Path) -> None:
    values = yaml.safe_load(run_file(place, tmp_path, {}).read_text())
    values["model"] = {"model_type": "llama", "peft": PEFT}
    (tmp_path / "new.yaml").write_text(yaml.safe_dump(values))
    with pytest.raises(mw.MeshwrightError, match="peft needs path"):
        load_run(tmp_path / "new.yaml")
    values["model"] = {"checkpoint": str(adapter / "checkpoints" / "step-00000002")}
    (tmp_path / "new.yaml").write_text(yaml.safe_dump(values))
    with pytest.raises(mw.MeshwrightError, match=r"holds only adapters\. Export it"):
        preflight(load_run(tmp_path / "new.yaml"), 1)
    text = refused(place, tmp_path, {"path": str(adapter / "model")})
    assert "holds an adapter, not a whole model" in text
    assert "init is for new weights" in refused(place, tmp_path, {"init": "parallel"})


@pytest.mark.slow
def test_a_saved_adapter_is_what_its_own_files_say(place: Path, adapter: Path, tmp_path: Path) -> None:
    saved = str(adapter / "model")
    assert "is in conflict with the adapter" in refused(place, tmp_path, {"peft": {"adapter": saved, "r": 8}})
    model = {"path": str(place / "other" / "model"), "peft": {"adapter": saved}}
    assert "is an adapter of another base" in refused(place, tmp_path, model)
    for name, content in (("adapter_config.json", "{"), ("meshwright_base.json", "[]")):
        damaged = tmp_path / name
        shutil.copytree(saved, damaged)
        (damaged / name).write_text(content)
        assert name in refused(place, tmp_path, {"peft": {"adapter": str(damaged)}})
    # A run does not replace what it begins with.
    again = run_file(place, tmp_path, {"peft": {"adapter": saved}}, resume="never", overwrite=True)
    changed = yaml.safe_load(again.read_text()) | {"output_dir": str(adapter)}
    again.write_text(yaml.safe_dump(changed))
    with pytest.raises(mw.MeshwrightError, match=r"model\.peft\.adapter=.* is inside .*, which this run replaces"):
        preflight(load_run(again), 1)
    # What agrees is no conflict.
    preflight(load_run(run_file(place, tmp_path, {"peft": {"type": "lora", "adapter": saved, "r": 2}})), 1)


def test_without_peft_the_way_to_install_it_is_reported(place: Path, tmp_path: Path, monkeypatch: Any) -> None:
    real = builtins.__import__

    def without(name: str, *args: Any, **kwargs: Any) -> Any:
        if name == "peft":
            raise ImportError("No module named 'peft'")
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    assert "pip install -e '.[peft]'" in refused(place, tmp_path, {"peft": PEFT})


@pytest.mark.slow
def test_a_run_leaves_an_adapter_that_peft_loads_and_continues_on_another_mesh(
    place: Path, adapter: Path, tmp_path: Path
) -> None:
    base = place / "base" / "model"
    noted = read_base(adapter / "model")
    assert noted is not None
    assert noted.path == str(base.resolve())
    names = {path.name for path in (adapter / "model").iterdir()}
    assert {"adapter_config.json", "adapter_model.safetensors", "tokenizer.json"} <= names
    assert "config.json" not in names
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), str(adapter / "model"))
        # transformers finds the base by itself.
        AutoModelForCausalLM.from_pretrained(adapter / "model")
    # From the first step's checkpoint on, on two ranks, to the same end.
    first = adapter / "checkpoints" / "step-00000001"
    changes = {"resume": str(first), "strategy": "fsdp2", "nproc": 2, "checkpoint": {"every": 1}}
    output, error, code = run(run_file(place, tmp_path, {"peft": PEFT}, **changes), 2)
    assert code == 0, error
    assert f"resuming from {first}, after step 1" in output
    ends = [json.loads((each / "summary.json").read_text())["held_out_loss"] for each in (adapter, tmp_path / "out")]
    assert ends[0] == pytest.approx(ends[1], abs=1e-6)
    # With another base it does not.
    shutil.rmtree(tmp_path / "out")
    other = {"path": str(place / "other" / "model"), "peft": PEFT}
    assert "holds adapters for another base" in refused(place, tmp_path, other, resume=str(first))


@pytest.mark.slow
def test_a_run_begins_with_a_saved_adapter(place: Path, adapter: Path, tmp_path: Path) -> None:
    model = {"peft": {"adapter": str(adapter / "model"), "base_dtype": "bfloat16"}}
    path = run_file(place, tmp_path, model, strategy="fsdp2", nproc=2, checkpoint={"every": 2})
    output, error, code = run(path, 2)
    assert code == 0, error
    assert "of them are trained, on" in output
    checkpoint = tmp_path / "out" / "checkpoints" / "step-00000002"
    assert read_manifest(checkpoint).base is not None
    export_merged(checkpoint, tmp_path / "as-trained")
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "as-trained").dtype == torch.bfloat16
    own = {"chat_template.jinja": "plain", "additional_chat_templates/tool_use.jinja": "with tools"}
    for name, text in own.items():
        (tmp_path / "out" / "model" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "out" / "model" / name).write_text(text)
    export_merged(tmp_path / "out" / "model", tmp_path / "merged")
    assert {name: (tmp_path / "merged" / name).read_text() for name in own} == own
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert merged.dtype == torch.float32  # of the base's files, as nothing else is said
    assert (tmp_path / "merged" / "tokenizer.json").is_file()


TEMPLATE = (
    "{% for message in messages %}{% if message.role == 'assistant' %}{% generation %}A: {{ message.content }}"
    "{{ eos_token }}{% endgeneration %}{% else %}Q: {{ message.content }} {% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{% endif %}"
)


@pytest.mark.slow
def test_the_tokenizer_that_is_written_has_the_chat_template_of_the_run(place: Path, tmp_path: Path) -> None:
    talks = [[{"role": "user", "content": f"{n}?"}, {"role": "assistant", "content": f"{n}."}] for n in range(40)]
    (tmp_path / "talks.jsonl").write_text("".join(json.dumps({"messages": talk}) + "\n" for talk in talks))
    data = {"sources": [{"files": str(tmp_path / "talks.jsonl"), "format": "messages"}], "chat_template": TEMPLATE}
    data |= {"cache_dir": str(tmp_path / "cache"), "seq_len": 16, "eval_fraction": 0.2}
    path = run_file(place, tmp_path, {"peft": PEFT}, data=data, batch_size=1, steps=1, checkpoint={"every": 1})
    _, error, code = run(path)
    assert code == 0, error
    written = tmp_path / "out" / "checkpoints" / "step-00000001" / "huggingface"
    for directory in (tmp_path / "out" / "model", written):
        assert AutoTokenizer.from_pretrained(directory).chat_template == TEMPLATE
