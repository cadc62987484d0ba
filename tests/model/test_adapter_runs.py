"""Adapters in run files: what is refused before anything starts, and a run that goes on from another's adapter."""

from __future__ import annotations

import builtins
import json
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from peft import PeftModel
from support.commands import write_run
from support.runs import output_of_rank
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

from meshwright.base.errors import MeshwrightError
from meshwright.checkpoint.manifest import read_manifest
from meshwright.cli import main as cli
from meshwright.model.adapter import read_base
from meshwright_run.preflight import plan_run
from meshwright_run.run_file import load_run
from meshwright_testing import pool

PEFT: dict[str, Any] = {"type": "lora", "r": 2, "target_modules": "all-linear", "modules_to_save": ["lm_head"]}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with two models that runs have left, `base` and `other`, of float32."""
    root = tmp_path_factory.mktemp("adapters")
    values = yaml.safe_load(write_run(root).read_text())
    values |= {"strategy": "single", "strategy_config": {}, "nproc": 1, "sample": {"prompt": None}}
    for name, seed in (("base", 0), ("other", 1)):
        values |= {"output_dir": str(root / name), "seed": seed}
        (root / "run.yaml").write_text(yaml.safe_dump(values))
        _, error, code = pool(1).run(output_of_rank, str(root / "run.yaml"), None)[0]
        assert code == 0, error
    return root


def run_file(place: Path, directory: Path, model: dict[str, Any], **changes: Any) -> Path:
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


@pytest.fixture(scope="module")
def adapter(place: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The output of a run with an adapter and a checkpoint after each of its two steps."""
    directory = tmp_path_factory.mktemp("adapter")
    _, error, code = run(run_file(place, directory, {"peft": PEFT}, checkpoint={"every": 1}))
    assert code == 0, error
    return directory / "out"


def run(path: Path, ranks: int = 1) -> tuple[str, str, int]:
    result: tuple[str, str, int] = pool(ranks).run(output_of_rank, str(path), None)[0]
    return result


def export_merged(source: Path, out: Path) -> None:
    done = CliRunner().invoke(cli.app, ["export", "--merge", str(source), str(out)])
    assert done.exit_code == 0, done.output


def refused(place: Path, directory: Path, model: dict[str, Any], **changes: Any) -> str:
    with pytest.raises(MeshwrightError) as caught:
        plan_run(load_run(run_file(place, directory, model, **changes)), 1)
    assert caught.value.exit_code == 2
    assert not (directory / "out").exists()
    return str(caught.value)


WRONG: dict[str, tuple[Any, str]] = {
    "a word": ("lora", "peft must be a mapping"),
    "no type": ({"r": 4}, "peft has no type"),
    "a type that is none": ({"type": "lora2"}, "model.peft.type='lora2' is not one of lora. Did you mean 'lora'?"),
    "dora": ({"type": "dora"}, "type: lora with use_dora: true"),
    "an unknown option": ({"lora_alfa": 4}, "is no option of LoraConfig. Did you mean 'lora_alpha'? Options: type, "),
    "a value of peft": ({"bias": "some"}, "Requested bias: some, is not implemented"),
    "a rank of none": ({"r": 0}, "should be a positive integer"),
    "a module that is none": ({"target_modules": ["q_proj", "v_porj"]}, "is called 'v_porj'. Did you mean 'v_proj'?"),
    "a head that is none": ({"modules_to_save": ["head"]}, "model.peft.modules_to_save: nothing in"),
    "another task": ({"task_type": "SEQ_CLS"}, "is not CAUSAL_LM"),
    "a changed base": ({"init_lora_weights": "pissa"}, "it would change the base"),
    "4 bit": ({"base_dtype": "nf4"}, "Use base_dtype=bfloat16"),
    "a dtype that is none": ({"base_dtype": "bfloat61"}, "Did you mean 'bfloat16'?"),
    "an adapter that is none": ({"adapter": "/nowhere"}, "is no directory, so it is no adapter of peft"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_cannot_be_is_told_before_anything_starts(case: str, place: Path, tmp_path: Path) -> None:
    peft, told = WRONG[case]
    if isinstance(peft, dict) and case != "no type":
        peft = {**PEFT, **peft}
    assert told in refused(place, tmp_path, {"peft": peft})


def test_an_adapter_needs_a_base_that_everybody_can_load(place: Path, adapter: Path, tmp_path: Path) -> None:
    values = yaml.safe_load(run_file(place, tmp_path, {}).read_text())
    values["model"] = {"model_type": "llama", "peft": PEFT}
    (tmp_path / "new.yaml").write_text(yaml.safe_dump(values))
    with pytest.raises(MeshwrightError, match="peft needs path"):
        load_run(tmp_path / "new.yaml")
    values["model"] = {"checkpoint": str(adapter / "checkpoints" / "step-00000002")}
    (tmp_path / "new.yaml").write_text(yaml.safe_dump(values))
    with pytest.raises(MeshwrightError, match=r"holds adapters alone\. Export it"):
        plan_run(load_run(tmp_path / "new.yaml"), 1)
    text = refused(place, tmp_path, {"path": str(adapter / "model")})
    assert "holds an adapter, not a whole model" in text


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
    with pytest.raises(MeshwrightError, match=r"model\.peft\.adapter=.* lies in what this run replaces"):
        plan_run(load_run(again), 1)
    # What agrees is no conflict.
    plan_run(load_run(run_file(place, tmp_path, {"peft": {"type": "lora", "adapter": saved, "r": 2}})), 1)


def test_without_peft_the_way_to_install_it_is_told(place: Path, tmp_path: Path, monkeypatch: Any) -> None:
    real = builtins.__import__

    def without(name: str, *args: Any, **kwargs: Any) -> Any:
        if name == "peft":
            raise ImportError("No module named 'peft'")
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    assert "pip install -e '.[peft]'" in refused(place, tmp_path, {"peft": PEFT})


@pytest.mark.slow
def test_a_run_leaves_an_adapter_that_peft_loads_and_goes_on_on_another_mesh(
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
    assert f"going on from {first}, after step 1" in output
    ends = [json.loads((each / "summary.json").read_text())["held_out_loss"] for each in (adapter, tmp_path / "out")]
    assert ends[0] == pytest.approx(ends[1], abs=1e-6)
    # With another base it does not.
    shutil.rmtree(tmp_path / "out")
    other = {"path": str(place / "other" / "model"), "peft": PEFT}
    assert "holds adapters of another base" in refused(place, tmp_path, other, resume=str(first))


@pytest.mark.slow
def test_a_run_begins_with_a_saved_adapter(place: Path, adapter: Path, tmp_path: Path) -> None:
    model = {"peft": {"adapter": str(adapter / "model"), "base_dtype": "bfloat16"}}
    path = run_file(place, tmp_path, model, strategy="fsdp2", nproc=2, checkpoint={"every": 2})
    output, error, code = run(path, 2)
    assert code == 0, error
    assert "of them train, over" in output
    checkpoint = tmp_path / "out" / "checkpoints" / "step-00000002"
    assert read_manifest(checkpoint).base is not None
    export_merged(checkpoint, tmp_path / "as-trained")
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "as-trained").dtype == torch.bfloat16
    export_merged(tmp_path / "out" / "model", tmp_path / "merged")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert merged.dtype == torch.float32  # of the base's files, as nothing else is said
    assert (tmp_path / "merged" / "tokenizer.json").is_file()


@pytest.mark.slow
def test_a_merged_adapter_keeps_all_files_of_its_tokenizer(adapter: Path, tmp_path: Path) -> None:
    shutil.copytree(adapter / "model", tmp_path / "adapter")
    own = {"chat_template.jinja": "plain", "additional_chat_templates/tool_use.jinja": "with tools"}
    for name, text in own.items():
        (tmp_path / "adapter" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "adapter" / name).write_text(text)
    export_merged(tmp_path / "adapter", tmp_path / "merged")
    assert {name: (tmp_path / "merged" / name).read_text() for name in own} == own


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
