"""Adapters of peft, layouts that train them, and what ranks do to try them."""

from __future__ import annotations

import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from support.managers import build_empty_manager
from support.steps import prepare_gradient_step
from torch import Tensor

from meshwright.model.adapter import add_adapter
from meshwright.model.pretrained import open_pretrained
from meshwright.optim.build import optimizer_factory
from meshwright.testing import Case
from meshwright.tracing.collectives import record_collectives
from meshwright_run.run_file import OptimizerConfig
from meshwright_testing.models import attach_adapter, build_case_model
from meshwright_testing.parity import build_manager, full_weights, train_steps

LORA_OPTIONS = {"r": 4, "lora_alpha": 8}
LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
RANK_PATTERN = {"rank_pattern": {"q_proj": 2, "down_proj": 3}}
GPT2 = ["c_attn", "c_proj", "c_fc"]
TIED = {"ensure_weight_tying": True}
EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]

ADAPTERS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "q and v": ("llama", LORA_OPTIONS | {"target_modules": ["q_proj", "v_proj"]}),
    "attention": ("llama", LORA_OPTIONS | {"target_modules": LINEAR[:4]}),
    "all-linear": ("llama", LORA_OPTIONS | {"target_modules": "all-linear"}),
    "all and head": ("llama", LORA_OPTIONS | {"target_modules": [*LINEAR, "lm_head"]}),
    "embedding": ("llama", LORA_OPTIONS | {"target_modules": ["q_proj", "embed_tokens"]}),
    "saved modules": (
        "llama",
        LORA_OPTIONS | {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens", "lm_head"]},
    ),
    "tied modules": (
        "llama",
        LORA_OPTIONS | {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"]} | TIED,
    ),
    "tied factors": ("llama", LORA_OPTIONS | {"target_modules": ["q_proj", "embed_tokens"]} | TIED),
    "dora": ("llama", LORA_OPTIONS | {"target_modules": "all-linear", "use_dora": True}),
    "dora of ends": (
        "llama",
        LORA_OPTIONS | {"target_modules": ["o_proj", "embed_tokens", "lm_head"], "use_dora": True},
    ),
    "widths": ("llama", LORA_OPTIONS | {"target_modules": ["q_proj", "v_proj", "down_proj"]}),
    "rank one": ("llama", {"r": 1, "lora_alpha": 8, "target_modules": "all-linear"}),
    "patterns": (
        "llama",
        LORA_OPTIONS | {"target_modules": LINEAR, "use_rslora": True, "layers_to_transform": [1, 2]} | RANK_PATTERN,
    ),
    "two": ("llama", LORA_OPTIONS | {"target_modules": ["q_proj", "down_proj"], "adapters": ("one", "two")}),
    "gpt2": ("gpt2", LORA_OPTIONS | {"target_modules": GPT2, "fan_in_fan_out": True, "lora_bias": True, "bias": "all"}),
    "gpt2 dora": ("gpt2", LORA_OPTIONS | {"target_modules": [*GPT2, "wte"], "fan_in_fan_out": True, "use_dora": True}),
    "biases": ("starcoder2", LORA_OPTIONS | {"target_modules": "all-linear", "lora_bias": True, "bias": "lora_only"}),
    "scaled embedding": ("gemma3_text", LORA_OPTIONS | {"target_modules": ["embed_tokens", "down_proj"]}),
    "packed": ("phi3", LORA_OPTIONS | {"target_modules": "all-linear"}),
    "latent": ("deepseek_v3", LORA_OPTIONS | {"target_modules": "all-linear"}),
    "experts": ("mixtral", LORA_OPTIONS | {"target_modules": ["q_proj"], "target_parameters": EXPERTS}),
}
INTERLEAVED = {"pp_schedule": "Interleaved1F1B", "layers_per_stage": 1}
LAYOUTS: Mapping[str, tuple[int, str, Mapping[str, Any], Mapping[str, int], Mapping[str, Any] | None]] = {
    "ddp": (2, "ddp", {}, {}, None),
    "bucketed": (2, "ddp", {"engine": "bucketed", "use_distributed_optimizer": True}, {}, None),
    "fsdp2": (2, "fsdp2", {}, {}, None),
    "tp": (2, "fsdp2", {}, {"tp_size": 2}, None),
    "sequence": (2, "fsdp2", {"sequence_parallel": True}, {"tp_size": 2}, None),
    "pp": (2, "fsdp2", {}, {"pp_size": 2}, None),
    "interleaved": (2, "fsdp2", {}, {"pp_size": 2}, {"pipeline": INTERLEAVED}),
    "megatron": (2, "megatron_fsdp", {}, {}, None),
    "ep": (2, "fsdp2", {}, {"dp_size": 2, "ep_size": 2}, None),
}


def build_adapter_case(name: str, *, tied: bool = False, **fields: Any) -> Case:
    """Four steps with an adapter, accumulating over ragged masks."""
    model, options = ADAPTERS[name]
    small = model in ("llama", "gpt2")
    return Case(
        model_type=model,
        adapter=options,
        tied=tied if small else None,
        layers=4 if small else None,
        **{"steps": 4, "sequences": 8, "microbatches": 2, "unshard_after": True} | fields,
    )


# -- merged


def compare_merged_parameters(
    strategy: str, config: Any, sizes: Any, case: Case, wrapper: Any
) -> tuple[list[str], bool, bool]:
    """The task of one rank: after a step, compare merged parameters with what peft makes of the whole model.

    Returns names that differ in any bit; whether names have the base model's order; whether training continued as
    before.
    """
    manager = build_manager(strategy, config, sizes, case, wrapper_config=wrapper)
    train_steps(manager, case, range(1))
    before = full_weights(manager)
    given = dict(manager.iter_parameters(bucket_bytes=1 << 12, adapters="merged"))
    after = full_weights(manager)
    # Of two tied weights one may be adapted: then they are two, and come together.
    how: Any = {"seed": 0, "dtype": torch.float64, "layers": case.layers}
    plain = build_case_model(case.model_type, tied=False, **how)
    is_tied = build_case_model(case.model_type, tied=case.tied, **how).config.tie_word_embeddings
    order = [name for name, _ in plain.named_parameters()]
    whole = attach_adapter(plain, case.adapter or {}, seed=0)
    whole.load_state_dict(before, strict=False)
    expected = dict(whole.merge_and_unload().named_parameters())
    if is_tied:
        if (case.adapter or {}).get("ensure_weight_tying"):
            expected["lm_head.weight"] = expected["model.embed_tokens.weight"]
        given.setdefault("lm_head.weight", given["model.embed_tokens.weight"])
        order.remove("lm_head.weight")
    differing = [name for name, value in expected.items() if name not in given or not torch.equal(given[name], value)]
    is_same = all(torch.equal(before[name], after[name]) for name in before)
    extra = sorted(given.keys() - expected.keys())
    return differing + extra, [name for name in given if name in order] == [n for n in order if n in given], is_same


# -- from files


def write_base(directory: str, *, tied: bool, dtype: str) -> None:
    build_case_model("llama", tied=tied, seed=3, dtype=getattr(torch, dtype), layers=3).save_pretrained(directory)


def build_lora_config(options: Mapping[str, Any]) -> Any:
    from peft import LoraConfig

    return LoraConfig(task_type="CAUSAL_LM", **options)


def train_from_files(
    strategy: str, config: Any, sizes: Any, options: Mapping[str, Any], directory: str, adapter: str | None, dtype: str
) -> tuple[list[float], dict[str, Tensor], dict[str, str]]:
    """The task of one rank: two steps of an adapted model whose base is read from files into shards.

    Returns losses; all weights before the steps; and the dtype of each after.
    """
    manager = build_empty_manager(strategy, config, sizes)
    torch.manual_seed(manager.mesh.rank)  # what is drawn does not depend on it
    random.seed(manager.mesh.rank)
    model, weights = open_adapted_model(options, directory, adapter, dtype)
    manager.parallelize(model, weights)
    manager.build_optimizer(optimizer_factory(OptimizerConfig(lr=1e-2)))
    started = full_weights(manager)
    case = Case(sequences=8, dtype=dtype)
    losses = train_steps(manager, case, range(2))[0]
    return losses, started, {name: str(each.dtype) for name, each in full_weights(manager).items()}


def open_adapted_model(options: Mapping[str, Any], directory: str, adapter: str | None, dtype: str) -> Any:
    """An adapted model on the meta device, and its weights."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(directory)
    model, weights = open_pretrained(Path(directory), config, dtype=getattr(torch, dtype))
    chosen = None if adapter else build_lora_config(options)
    return add_adapter(model, weights, chosen, seed=11, adapter_dir=adapter)


def load_with_peft(options: Mapping[str, Any], directory: str, adapter: str | None, dtype: str) -> Any:
    """The same in one process, by peft alone."""
    from peft import PeftModel, get_peft_model
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(directory, dtype=getattr(torch, dtype))
    torch.manual_seed(11)
    if adapter:
        return PeftModel.from_pretrained(base, adapter, is_trainable=True)
    return get_peft_model(base, build_lora_config(options))


# -- what travels, and dropout


def measure_step_bytes(strategy: str, config: Any, sizes: Any, case: Case) -> tuple[int, int, int, int]:
    """The task of one rank: bytes of summed gradients, all messages, held gradients, and of what trains, whole."""
    manager = build_manager(strategy, config, sizes, case)
    train_steps(manager, case, range(1))
    traffic = record_collectives(prepare_gradient_step(manager, case, 1))
    summed = traffic.filter("all_reduce").nbytes + traffic.filter("reduce_scatter").nbytes
    parameters = [p for part in manager.model_parts for p in part.parameters()]
    held = sum(p.grad.numel() * p.grad.element_size() for p in parameters if p.grad is not None)
    whole = sum(w.nbytes for name, w in full_weights(manager).items() if "lora_" in name)
    return summed, traffic.nbytes, held, whole


def train_with_dropout(strategy: str, config: Any, sizes: Any, case: Case) -> list[float]:
    """The task of one rank: losses of two steps from one random state."""
    manager = build_manager(strategy, config, sizes, case)
    torch.manual_seed(5)
    return train_steps(manager, case, range(2))[0]
