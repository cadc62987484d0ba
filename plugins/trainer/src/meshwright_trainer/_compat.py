"""Private parts of transformers' Trainer and of TRL that this plugin uses, with the reasons.

Tested with transformers 5.17 to 5.23 and trl 1.16; `tests/test_trainer_compat.py` fails if one of them is removed or
called differently.
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
    "_move_model_to_device": "each rank gets only its shard of the model",
    "_prepare_for_training": "the manager shards the model and owns the optimizer",
    "_clip_grad_norm": "the norm is that of the full model, over all ranks",
    "_get_grad_norm": "the norm is that of the full model, over all ranks",
    "_save_optimizer_and_scheduler": "the manager's checkpoint, readable under any layout, includes both",
    "_save_rng_state": "the manager's checkpoint includes the generators",
    "_load_rng_state": "the manager's checkpoint includes the generators",
    "_load_from_checkpoint": "the manager's checkpoint is loaded after the model is sharded",
    "_load_best_model": "the manager's checkpoint is loaded after the model is sharded",
}
"""Methods of `transformers.Trainer` that `MeshModelMixin` overrides, and why."""

OVERRIDDEN_GRPO_METHODS = {
    "_prepare_inputs": "its microbatch of completions lacks the names that the manager expects",
    "_generate_and_score_completions": "it gathers over processes with functions of accelerate's modules",
    "_generate_single_turn": "generation needs the full model, and ranks that share a batch share completions",
    "_get_per_token_logps_and_entropies": "the manager computes old and reference log-probabilities",
}
"""Methods of trl's `GRPOTrainer` that `MeshGRPOMixin` overrides, and why."""
REPLACED_FUNCTIONS = {
    "trl.trainer.grpo_trainer": ["gather", "gather_object", "use_adapter"],
    "trl.generation.vllm_generation": ["gather_object"],
}
"""Functions, by the trl module that imported them, that act on processes in trl and on data ranks here."""
REFERENCE_ADAPTER = "ref"
"""Name of the copy of a pretrained adapter that `DPOTrainer` and `GRPOTrainer` use as the reference."""
EMBEDDING_MULTIPLE = 64
"""`resize_to_multiple_of` of TRL's `clone_chat_template`."""
WEIGHT_ITERATOR = "_iter_named_params"
"""Method of trl's `VLLMGeneration` that yields the weights for `sync_weights`, on all processes."""


def set_signature_columns(trainer: Trainer) -> None:
    """Let Trainer store the columns that its model takes, before the model is sharded."""
    trainer._set_signature_columns_if_needed()


def remove_fused_head(model: Any) -> None:
    """Undo TRL's `add_fused_lm_head`, which sets a forward on the instance. The manager computes its statistics."""
    base: Any = model.get_base_model() if hasattr(model, "get_base_model") else model
    base.__dict__.pop("forward", None)


def needs_materialized_weights(path: str, args: Any, passed: Mapping[str, Any]) -> bool:
    """Return whether TRL reads the model's weights in the trainer's constructor, so that they cannot be loaded later.

    With `chat_template_path`, a tokenizer whose tokens are added (TRL's `clone_chat_template`), TRL initializes new
    embedding rows from the mean of the others, and an adapter trains the rows of added tokens. `path` is the model's;
    `passed` are the trainer's other arguments, by name.
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
    """Restrict a process without a launcher to one device. Trainer would use all of them, with torch's DataParallel."""
    args._setup_devices  # noqa: B018  This property sets `_n_gpu`.
    args._n_gpu = min(args._n_gpu, 1)


@contextmanager
def use_reference_adapter(parts: Sequence[nn.Module]) -> Iterator[None]:
    """Context in which forwards of a model with adapters compute the reference model, as TRL defines it.

    The reference is the adapter "ref", TRL's copy of a pretrained adapter, or without one the base model. peft's own
    methods also freeze and unfreeze parameters, which a sharded model does not allow, so this sets only the attributes
    that peft's layers read.
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
    """Update the counters that `GRPOTrainer.training_step` updates after each microbatch to know when to generate."""
    trainer._step += 1
    trainer._current_train_step_time += seconds
    if trainer._step % trainer.current_gradient_accumulation_steps == 0:
        trainer._metrics["train"]["step_time"].append(trainer._current_train_step_time)
        trainer._current_train_step_time = 0.0


def is_vlm(trainer: Any) -> bool:
    return bool(trainer._is_vlm)


@contextmanager
def patch_functions(functions: Mapping[str, Callable[..., Any]]) -> Iterator[None]:
    """Context in which trl's modules use these functions, by name, instead of `REPLACED_FUNCTIONS`."""
    targets = [
        (importlib.import_module(module), name) for module, names in REPLACED_FUNCTIONS.items() for name in names
    ]
    before = [getattr(module, name) for module, name in targets]
    for module, name in targets:
        setattr(module, name, functions[name])
    try:
        yield
    finally:
        for (module, name), function in zip(targets, before, strict=True):
            setattr(module, name, function)
