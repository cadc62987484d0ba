"""Trainers that read a model from a path train an adapter, and a tokenizer's further tokens, as TRL's own do."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import trainer_cases
import trl
from datasets import Dataset
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import meshwright_trainer
from meshwright.launch.open_world import open_world

TEMPLATE = "{% for m in messages %}{{ m.role }} {{ m.content }} <end> {% endfor %}"
GRPO = {"num_generations": 4, "max_completion_length": 4, "beta": 0.5, "temperature": 1.0, "max_steps": 2}

SLOW_KINDS = [pytest.param(kind, marks=pytest.mark.slow) for kind in ("DPO", "GRPO")]


@pytest.fixture(scope="module")
def path(tmp_path_factory: Any) -> Path:
    directory = tmp_path_factory.mktemp("base")
    trainer_cases.model(dtype=torch.float32).save_pretrained(directory / "model")
    trainer_cases.digits().save_pretrained(directory / "model")
    source = trainer_cases.digits()
    source.add_tokens(["user", "assistant"], special_tokens=True)
    source.chat_template = TEMPLATE
    source.save_pretrained(directory / "template")
    return directory


@pytest.fixture(autouse=True)
def world() -> Iterator[None]:
    with open_world("cpu"):
        yield


def lora(**options: Any) -> LoraConfig:
    return LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM", **options)


def trained(kind: str, model: Any, directory: Path, mesh: Any, passed: dict[str, Any], **changes: Any) -> list[float]:
    """The losses of a trainer of TRL's, or of ours over it, and its model in a directory `model`."""
    given = {"max_length": 16} if kind != "GRPO" else GRPO
    plain = {"save_strategy": "no", "eval_strategy": "no", **given, **changes}
    args = getattr(trl, f"{kind}Config")(**trainer_cases.arguments(directory, 1) | plain)
    rows: dict[str, Any] = {"DPO": trainer_cases.pairs_of(40, 1), "SFT": trainer_cases.text_of(40, 1)}
    rows["GRPO"] = Dataset.from_list([{"prompt": text} for text in trainer_cases.numbers(40, 1, longest=6)])
    if "chat_template_path" in changes:
        turns = [{"role": "user", "content": "1 2"}, {"role": "assistant", "content": "3 4"}]
        rows["SFT"] = Dataset.from_list([{"messages": turns}] * 40)
    if kind == "GRPO":
        passed = passed | {"reward_funcs": lambda completions, **_: [float(len(set(each))) for each in completions]}
    cls = getattr(trl, f"{kind}Trainer") if mesh is None else getattr(meshwright_trainer, f"Mesh{kind}Trainer")
    over = {} if mesh is None else {"mesh": mesh}
    trainer = cls(model, args=args, train_dataset=rows[kind], **passed, **over)
    trainer.train()
    losses = [each["loss"] for each in trainer.state.log_history if "loss" in each]
    kept = {name: value.detach().clone() for name, value in trainer.model.named_parameters() if value.requires_grad}
    torch.save(kept, directory / "trained.pt")
    return losses


def check_same(tmp_path: Path, kind: str, given: Callable[[], tuple[Any, dict[str, Any]]], **changes: Any) -> None:
    """The same losses and trained weights in TRL and over a mesh, given a model and what is passed beside it."""
    (model, passed), (other, same) = given(), given()
    wanted = trained(kind, model, tmp_path / "plain", None, passed, **changes)
    found = trained(kind, other, tmp_path / "mine", {"strategy": "single"}, same, **changes)
    assert wanted == pytest.approx(found, abs=2e-6)
    plain, mine = (torch.load(tmp_path / name / "trained.pt") for name in ("plain", "mine"))
    assert plain.keys() == mine.keys()
    assert all(torch.allclose(mine[name], value, atol=2e-5) for name, value in plain.items())


@pytest.mark.parametrize("kind", ["SFT", *SLOW_KINDS])
def test_a_path_and_an_adapter_train_as_in_trl(kind: str, path: Path, tmp_path: Path) -> None:
    check_same(tmp_path, kind, lambda: (str(path / "model"), {"peft_config": lora()}), gradient_checkpointing=True)


@pytest.mark.parametrize("kind", SLOW_KINDS)
def test_the_reference_of_an_adapter_that_was_trained_is_the_adapter_as_it_was(
    kind: str, path: Path, tmp_path: Path
) -> None:
    def given() -> tuple[Any, dict[str, Any]]:
        torch.manual_seed(3)
        base = AutoModelForCausalLM.from_pretrained(path / "model", dtype=torch.float32)
        return get_peft_model(base, lora(init_lora_weights=False)), {"processing_class": trainer_cases.digits()}

    check_same(tmp_path, kind, given)


@pytest.mark.parametrize("is_adapted", [pytest.param(False, marks=pytest.mark.slow), True])
def test_tokens_of_another_tokenizer_are_added_and_trained_as_in_trl(
    is_adapted: bool, path: Path, tmp_path: Path
) -> None:
    def given() -> tuple[Any, dict[str, Any]]:
        return str(path / "model"), {"peft_config": lora()} if is_adapted else {}

    check_same(tmp_path, "SFT", given, chat_template_path=str(path / "template"))


@pytest.mark.slow
@pytest.mark.parametrize("given", ["path", "model", "adapted"])
@pytest.mark.parametrize("kind", ["SFT", "DPO"])
def test_an_adapter_is_saved_as_peft_loads_it(kind: str, given: str, path: Path, tmp_path: Path) -> None:
    args = getattr(trl, f"{kind}Config")(
        **trainer_cases.arguments(tmp_path, 1) | {"max_steps": 1, "eval_strategy": "no", "save_strategy": "steps"}
    )
    rows = trainer_cases.pairs_of(40, 1) if kind == "DPO" else trainer_cases.text_of(40, 1)
    model: Any = str(path / "model")
    passed: dict[str, Any] = {"peft_config": lora()}
    if given != "path":
        model = AutoModelForCausalLM.from_pretrained(path / "model", dtype=torch.float32)
        passed["processing_class"] = trainer_cases.digits()
    if given == "adapted":
        model = get_peft_model(model, passed.pop("peft_config"))
    cls = getattr(meshwright_trainer, f"Mesh{kind}Trainer")
    trainer = cls(model, args=args, train_dataset=rows, mesh={"strategy": "single"}, **passed)
    trainer.train()
    trainer.save_model(str(tmp_path / "saved"))
    names = load_file(tmp_path / "saved" / "adapter_model.safetensors").keys()
    assert names
    assert all("lora_" in name for name in names)
    base = AutoModelForCausalLM.from_pretrained(path / "model", dtype=torch.float32)
    loaded = PeftModel.from_pretrained(base, tmp_path / "saved").eval()
    ids = torch.arange(2, 12)[None]
    assert torch.equal(loaded(ids).logits, trainer.model.eval()(ids).logits)
