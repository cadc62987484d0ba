"""What `_compat` needs of transformers, TRL and peft is there, called as it was when it was written."""

from __future__ import annotations

import importlib
import inspect
from types import SimpleNamespace
from typing import Any

import pytest
import trainer_cases
import trl
from peft import LoraConfig, get_peft_model
from transformers import Trainer, TrainingArguments
from trl.trainer.utils import add_fused_lm_head

from meshwright_trainer import MeshGRPOMixin, _compat
from meshwright_trainer.model_mixin import MeshModelMixin


def called(method: Any) -> dict[str, Any]:
    """How a method can be called: kinds and defaults of its parameters by name."""
    parameters = inspect.signature(method).parameters.values()
    return {each.name: (each.kind, each.default) for each in parameters if each.name != "model_wrapped"}


@pytest.mark.parametrize(
    ("theirs", "ours", "names"),
    [
        (Trainer, MeshModelMixin, _compat.OVERRIDDEN_METHODS),
        (trl.GRPOTrainer, MeshGRPOMixin, _compat.OVERRIDDEN_GRPO_METHODS),
    ],
    ids=["HF", "GRPO"],
)
def test_private_methods_are_called_by_their_trainer_and_take_what_ours_take(theirs, ours, names):
    source = "".join(inspect.getsource(cls) for cls in theirs.__mro__ if issubclass(cls, Trainer))
    assert [name for name in names if f"self.{name}(" not in source] == []
    for name in names:
        wanted, found = called(getattr(theirs, name)), called(getattr(ours, name))
        takes_any = any(kind is inspect.Parameter.VAR_KEYWORD for kind, _ in found.values())
        assert takes_any or wanted.keys() <= found.keys(), name
        assert [each for each in found if each in wanted] == [each for each in wanted if each in found], name


def test_functions_that_stand_for_a_process_are_imported_where_they_are_replaced():
    for module, names in _compat.REPLACED_FUNCTIONS.items():
        found = importlib.import_module(module)
        assert all(callable(getattr(found, name)) for name in names)
        # What gathers over processes by another function would gather over ranks.
        assert not [
            name for name in {"gather", "gather_object", "all_gather_object"} - {*names} if hasattr(found, name)
        ]


def test_what_is_noted_behind_completions_and_how_weights_are_sent_is_trls():
    generation = importlib.import_module("trl.generation.vllm_generation").VLLMGeneration
    assert f"self.{_compat.WEIGHT_ITERATOR}()" in inspect.getsource(generation.sync_weights)
    source = inspect.getsource(trl.GRPOTrainer)
    for text in ("self._step += 1", "self._current_train_step_time", "self._is_vlm"):
        assert text in source


def test_a_fused_head_is_a_forward_on_the_instance():
    model = trainer_cases.model()
    before = model.forward.__func__
    add_fused_lm_head(model)
    assert "forward" in vars(model)
    _compat.remove_fused_head(model)
    assert model.forward.__func__ is before
    adapted = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM"))
    add_fused_lm_head(adapted.get_base_model())
    _compat.remove_fused_head(adapted)
    assert "forward" not in vars(model)


def test_one_device_is_used_without_a_launcher(tmp_path):
    args = TrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to=[])
    assert hasattr(args, "_n_gpu")
    _compat.use_one_device(args)
    assert args.n_gpu <= 1
    several: Any = SimpleNamespace(_setup_devices=None, _n_gpu=4)
    _compat.use_one_device(several)
    assert several._n_gpu == 1
