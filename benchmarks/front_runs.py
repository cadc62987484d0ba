"""Nine runs of one model: on one process, and in eight layouts on four ranks of the CPU over gloo."""

from __future__ import annotations

import argparse
import inspect
import json
import pydoc
import sys
import tarfile
import typing
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.nn import functional
from torch.optim.lr_scheduler import LambdaLR
from transformers.models.llama.modeling_llama import LlamaRMSNorm

import meshwright as mw
from meshwright.strategy.contract import StrategyManager
from meshwright.tracing.collectives import Collective, record_collectives

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from support.measurements import measure_memory

ONE = "one process"
RANKS = 4
LAYOUTS: dict[str, dict[str, Any]] = {
    ONE: {"strategy": "single"},
    "ddp": {"strategy": "ddp"},
    "ddp, sharded optimizer": {
        "strategy": "ddp",
        "config": {"engine": "bucketed", "use_distributed_optimizer": True},
    },
    "megatron_fsdp": {"strategy": "megatron_fsdp"},
    "fsdp2": {"strategy": "fsdp2"},
    "fsdp2, HSDP 2 x 2": {"strategy": "fsdp2", "dp_replicate_size": 2},
    "fsdp2, tensor 2 x 2": {"strategy": "fsdp2", "tp_size": 2, "config": {"sequence_parallel": True}},
    "fsdp2, context 2 x 2": {"strategy": "fsdp2", "cp_size": 2},
    "fsdp2, pipeline 2 x 2": {"strategy": "fsdp2", "pp_size": 2},
}
"""Arguments of `meshwright.from_config`."""
MODEL = {
    "model_type": "llama",
    "vocab_size": 256,
    "hidden_size": 96,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.08,
}
STEPS, WARM_UP, BATCH, MICROBATCH, LENGTH = 50, 6, 8, 2, 128
SOURCES = (argparse, inspect, json, pydoc, tarfile, typing)
"""Modules of the standard library, whose bytes are supervised."""
MEASURED = {"memory": 2, "traffic": 3}
"""Steps, from 0: those before make what is kept."""


def trained(layout: dict[str, Any], wide_norms: bool) -> dict[str, Any]:
    """Train on this rank.

    Args:
        layout: arguments of `meshwright.from_config`.
        wide_norms: let the model's norms stay in float64, where transformers computes Llama's in float32.

    Returns:
        `losses` [nats per byte], `sent` in a step [bytes], and `held` at the peak of a step by kind [bytes].
    """
    with mock.patch.object(LlamaRMSNorm, "forward", _wide_norm) if wide_norms else nullcontext():
        return _trained(layout)


def _trained(layout: dict[str, Any]) -> dict[str, Any]:
    options = {"reduce_dtype": "float64", **layout.get("config", {})}
    manager = mw.from_config(
        MODEL, **{**layout, "config": options}, dtype="float64", seed=0, init="transformers", device="cpu"
    )
    manager.build_optimizer(mw.optimizer_factory(mw.OptimizerConfig(lr=3e-3, options={"betas": [0.9, 0.95]})))
    schedule = LambdaLR(manager.optimizer, lambda step: min((step + 1) / WARM_UP, 1 - step / STEPS))
    found: dict[str, Any] = {"losses": []}
    for step, whole in enumerate(batches()):

        def work(whole: Tensor = whole) -> None:
            found["losses"].append(_step(manager, whole))

        if step == MEASURED["memory"]:
            peak = measure_memory(work, manager.model_parts, manager.optimizer).peak
            found["held"] = {**asdict(peak), "total": peak.total}
        elif step == MEASURED["traffic"]:
            found["sent"] = sum(map(sent, record_collectives(work)))
        else:
            work()
        schedule.step()
    return found


def _wide_norm(norm: LlamaRMSNorm, hidden: Tensor) -> Tensor:
    return functional.rms_norm(hidden, hidden.shape[-1:], norm.weight, norm.variance_epsilon)


def batches() -> list[Tensor]:
    """Of all steps, equal on every rank, int64 (BATCH, LENGTH): stretches of the sources, in an order of chance."""
    text = "".join(inspect.getsource(module) for module in SOURCES).encode()
    order = torch.Generator().manual_seed(0)
    starts = torch.randint(0, len(text) - LENGTH, (STEPS, BATCH), generator=order).tolist()
    return [torch.tensor([list(text[start : start + LENGTH]) for start in each]) for each in starts]


def _step(manager: StrategyManager, whole: Tensor) -> float:
    mesh = manager.mesh
    mine = whole.chunk(mesh.data_size)[mesh.data_rank].split(MICROBATCH)
    batch = [{"input_ids": each, "labels": each} for each in mine]
    loss = manager.forward_backward(batch, num_tokens=manager.begin_step_sync(batch))
    manager.clip_grad_norm(1.0)
    manager.optimizer_step()
    return loss.item()


def sent(call: Collective) -> float:
    """Bytes that a rank sends for a call: of collectives, as a ring passes the whole tensor around.

    Raises:
        KeyError: how this kind is sent is not known here.
    """
    share = (call.num_ranks - 1) / call.num_ranks
    times = {"all_reduce": 2 * share, "all_gather": share, "reduce_scatter": share, "all_to_all": share}
    return call.nbytes * {**times, "broadcast": share, "send": 1, "recv": 0}[call.kind]
