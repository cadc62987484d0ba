"""What is private in transformers' Trainer and in TRL, and needed: each with its reason.

Tried with transformers 5.17 to 5.23 and trl 1.16; `tests/test_trainer_compat.py` fails where one of them is no longer
there, or is called in another way.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn
from transformers import AutoConfig, AutoTokenizer

if TYPE_CHECKING:
    from transformers import Trainer

OVERRIDDEN_METHODS = {
    "_move_model_to_device": "each rank gets what it keeps of the model, and no more",
    "_prepare_for_training": "the manager shards the model and owns the optimizer",
    "_clip_grad_norm": "the norm is that of the whole model, wherever its gradients are",
    "_get_grad_norm": "as well",
    "_save_optimizer_and_scheduler": "a checkpoint is read under any layout",
    "_save_rng_state": "it has the generators",
    "_load_rng_state": "as well",
    "_load_from_checkpoint": "it is read when the model is sharded",
    "_load_best_model": "as well",
}
"""Methods of `transformers.Trainer` that `MeshModelMixin` overrides, and why."""

OVERRIDDEN_GRPO_METHODS = {
    "_prepare_inputs": "what it makes of prompts is a microbatch without the names that the manager knows",
    "_generate_and_score_completions": "it gathers over processes by functions of accelerate's modules",
    "_generate_single_turn": "the model is generated with whole, and ranks that share a batch share completions",
    "_get_per_token_logps_and_entropies": "old and reference log-probabilities are the manager's to compute",
}
"""Methods of trl's `GRPOTrainer` that `MeshGRPOMixin` overrides, and why."""
REPLACED_FUNCTIONS = {
    "trl.trainer.grpo_trainer": ["gather", "gather_object", "use_adapter"],
    "trl.generation.vllm_generation": ["gather_object"],
}
"""Functions that modules of trl have imported, and that stand for a process, where here it is a data rank."""
REFERENCE_ADAPTER = "ref"
"""Name that `DPOTrainer` and `GRPOTrainer` give to the copy of an adapter that is trained on."""
EMBEDDING_MULTIPLE = 64
"""`resize_to_multiple_of` of TRL's `clone_chat_template`."""
WEIGHT_ITERATOR = "_iter_named_params"
"""Method of trl's `VLLMGeneration` that gives the weights for `sync_weights`, on all processes."""


def set_signature_columns(trainer: Trainer) -> None:
    """Have Trainer note which columns its model takes, while that is whole."""
    trainer._set_signature_columns_if_needed()


def remove_fused_head(model: Any) -> None:
    """Undo TRL's `add_fused_lm_head`, a forward on the instance: the manager computes the same statistics."""
    base: Any = model.get_base_model() if hasattr(model, "get_base_model") else model
    base.__dict__.pop("forward", None)


def needs_materialized_weights(path: str, args: Any, passed: Mapping[str, Any]) -> bool:
    """Whether TRL looks at the values of a model while it makes a trainer, so that the model cannot be read later.

    With `chat_template_path`, a tokenizer whose tokens are added (TRL's `clone_chat_template`), TRL draws new rows of
    the embedding by the mean of the others, and lets an adapter start from the rows of added tokens. `path` is the
    model's, and `passed` what the trainer is called with beside `args`, by name.
    """
    template = getattr(args, "chat_template_path", None)
    if template is None or (Path(template).is_file() and str(template).endswith((".jinja", ".j2"))):
        return False
    options = args.model_init_kwargs or {}
    tokenizer = passed.get("processing_class") or AutoTokenizer.from_pretrained(path, revision=options.get("revision"))
    added = {token.content for token in AutoTokenizer.from_pretrained(template).added_tokens_decoder.values()}
    size = len(tokenizer.vocab) + len(added - tokenizer.vocab.keys())
    rows = AutoConfig.from_pretrained(path, revision=options.get("revision")).get_text_config().vocab_size
    if passed.get("peft_config") is not None:
        return bool(size != rows or added - tokenizer.vocab.keys())
    return bool(-(-size // EMBEDDING_MULTIPLE) * EMBEDDING_MULTIPLE != rows)


def use_one_device(args: Any) -> None:
    """Let a process without a launcher use one device, where Trainer would use all of them (torch's DataParallel)."""
    args._setup_devices  # noqa: B018  finds them
    args._n_gpu = min(args._n_gpu, 1)


@contextmanager
def use_reference_adapter(parts: Sequence[nn.Module]) -> Iterator[None]:
    """Run forwards within as the reference of an adapted model, as TRL defines it.

    The reference is the adapter "ref", TRL's copy of an adapter that was trained before; without one, the base. peft's
    own switches freeze and unfreeze parameters, which a sharded model does not allow; so this sets only what peft's
    layers read.
    """
    layers = [each for part in parts for each in part.modules() if hasattr(each, "_disable_adapters")]
    has_copy = any(REFERENCE_ADAPTER in name.split(".") for part in parts for name, _ in part.named_modules())
    switch, value = ("_active_adapter", [REFERENCE_ADAPTER]) if has_copy else ("_disable_adapters", True)
    before = [getattr(layer, switch) for layer in layers]
    for layer in layers:
        setattr(layer, switch, value)
    try:
        yield
    finally:
        for layer, was in zip(layers, before, strict=True):
            setattr(layer, switch, was)


def record_microbatch(trainer: Any, seconds: float) -> None:
    """What `GRPOTrainer.training_step` notes behind each microbatch, by which it knows when to generate."""
    trainer._step += 1
    trainer._current_train_step_time += seconds
    if trainer._step % trainer.current_gradient_accumulation_steps == 0:
        trainer._metrics["train"]["step_time"].append(trainer._current_train_step_time)
        trainer._current_train_step_time = 0.0


def is_vlm(trainer: Any) -> bool:
    return bool(trainer._is_vlm)


@contextmanager
def patch_functions(functions: Mapping[str, Callable[..., Any]]) -> Iterator[None]:
    """Around calls of trl's methods: functions that its modules have imported, `GATHERED`, by name."""
    places = [(importlib.import_module(module), name) for module, names in REPLACED_FUNCTIONS.items() for name in names]
    before = [getattr(module, name) for module, name in places]
    for module, name in places:
        setattr(module, name, functions[name])
    try:
        yield
    finally:
        for (module, name), function in zip(places, before, strict=True):
            setattr(module, name, function)
