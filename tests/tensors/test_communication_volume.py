"""What a step of each strategy and layout sends, to the byte, against the formulas of
docs/reference/proofs/performance.md."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshwright import Mesh, MeshSizes, count_tokens, open_world
from meshwright.optim.build import optimizer_factory
from meshwright.parallel.expert import find_experts
from meshwright.strategy.contract import StrategyManager
from meshwright.strategy.stack import resolve
from meshwright.tracing.collectives import record_collectives
from meshwright_run.run_file import OptimizerConfig
from meshwright_testing import pool

SLOW = pytest.mark.slow
WIDTH = 4
"""Bytes of an element: float32."""
L, FEATURES, INNER, VOCAB, EXPERTS, CHOSEN = 4, 128, 256, 256, 4, 2
"""Blocks, and sizes that the ranks divide."""
M, SEQUENCES, LENGTH = 2, 2, 16
"""Microbatches of a data rank, and the size of each."""
TOKENS = SEQUENCES * LENGTH
MICRO = M * SEQUENCES
"""Microbatches of a pipeline, which cuts those that it is given."""
FEW = 400
"""Bytes of a message that grows neither with features nor with tokens: what ranks agree on, the loss, what became of
each parameter's gradient, how many rows go to an expert, frequencies of positions."""


def _model(kind: str) -> nn.Module:
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(
        kind,
        hidden_size=FEATURES,
        intermediate_size=INNER,
        num_hidden_layers=L,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=VOCAB,
        tie_word_embeddings=False,
        **({"num_local_experts": EXPERTS, "num_experts_per_tok": CHOSEN} if kind == "mixtral" else {}),
    )
    torch.manual_seed(0)
    model: nn.Module = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    return model


# -- the formulas, in the symbols of docs/reference/proofs/performance.md


def _bytes(kind: str, *patterns: str, tp: int = 1) -> int:
    """Of the parameters of some names, of which a rank of tp has a part, but norms whole."""
    with torch.device("meta"):
        shapes = {name: each.shape for name, each in _model(kind).named_parameters()}
    chosen = [shape for name, shape in shapes.items() if any(fnmatchcase(name, each) for each in patterns)]
    return sum(shape.numel() // (tp if len(shape) > 1 else 1) for shape in chosen) * WIDTH


P, BLOCK = _bytes("llama", "*"), _bytes("llama", "*.layers.0.*")
P_TP, BLOCK_TP = _bytes("llama", "*", tp=2), _bytes("llama", "*.layers.0.*", tp=2)
STAGES = [_bytes("llama", "*embed*", "*.layers.[01].*"), _bytes("llama", "lm_head*", "model.norm*", "*.layers.[23].*")]
ALL_EXPERTS = _bytes("mixtral", "*.experts.*")
DENSE, DENSE_BLOCK = _bytes("mixtral", "*") - ALL_EXPERTS, _bytes("mixtral", "*.layers.0.*") - ALL_EXPERTS // L
NORMS = 2 * L * FEATURES * WIDTH
H = TOKENS * FEATURES * WIDTH
K = TOKENS * 2 * FEATURES // 2 * WIDTH
Q = TOKENS * FEATURES * WIDTH // 2
"""Of a rank of two of cp: half of the positions."""
STATISTICS = 2 * 3 * TOKENS * WIDTH

Sent = dict[str, int]
"""Bytes of a rank in a step, by kind of collective and axis."""


def _gathered(size: int, scattered: int) -> Sent:
    return {"all_gather shard": size, "reduce_scatter shard": scattered}


def _fsdp2(whole: int = P, block: int = BLOCK, blocks: int = L, microbatches: int = M) -> Sent:
    """All blocks but the last are freed after forward."""
    return _gathered(microbatches * (whole + (blocks - 1) * block), whole)


def _megatron(stage: int, whole: int = P, block: int = BLOCK) -> Sent:
    """With stage 3, blocks are gathered for forward and backward; from 2 on, gradients are never held whole."""
    root = whole - L * block
    return _gathered(root + (2 * M if stage == 3 else 1) * L * block, whole * (M if stage > 1 else 1))


def _units(whole: int = P, block: int = BLOCK, row: int = INNER) -> tuple[int, int]:
    """The same two sizes, with units padded to a number of rows, of their widest parameter, that the ranks divide."""

    def padded(size: int, row: int) -> int:
        return math.ceil(size / (2 * row * WIDTH)) * 2 * row * WIDTH

    root = padded(whole - L * block, FEATURES)
    return root + L * padded(block, row), padded(block, row)


TP: Sent = {"all_reduce tp": M * (4 * L + 2) * H, "all_gather tp": M * STATISTICS}
SEQUENCE: Sent = {
    "all_gather tp": M * ((4 * L + 2) * H + STATISTICS),
    "reduce_scatter tp": M * 4 * L * H,
    "all_reduce tp": M * 2 * H + NORMS,
}


def _sends(stages: int) -> Sent:
    """Of a rank of two, which have every second stage each. A microbatch is one sequence here."""
    boundaries = MICRO * (stages - 1) * (H // SEQUENCES)
    return {"send pp": boundaries, "recv pp": boundaries}


def _ending(tensors: int) -> int:
    """Two numbers of the loss, and what became of the gradient of each tensor; in float64."""
    return 8 * (2 + tensors)


ENDING = _ending(9 * L + 3)
OF_STAGE = tuple(_ending(9 * L // 2 + each) + 2 * 8 for each in (1, 2))
"""Its parts are summed first over the ranks of a stage, then the two numbers over stages."""
FREQUENCIES = 64


@dataclass(frozen=True)
class Layout:
    """A strategy on some ranks, and what it sends: `least` of parameters and gradients, or `padded` where that is more.

    `least` and `few`, bytes of messages of a few numbers, are for each stage of a pipeline.
    """

    ranks: int
    strategy: str
    config: dict[str, Any]
    sizes: dict[str, int]
    least: tuple[Sent, ...]
    activations: Sent = field(default_factory=dict)
    padded: Sent | None = None
    schedule: str | None = None
    few: tuple[int, ...] = (ENDING,)


BUCKETED = {"engine": "bucketed"}
ZERO1 = BUCKETED | {"use_distributed_optimizer": True}
REDUCED: Sent = {"all_reduce copies": P}
OF_STAGES = tuple(_fsdp2(size, BLOCK, L // 2, MICRO) for size in STAGES)
LAYOUTS = {
    # torch's engine knows itself what became of gradients, and sends the buffers of the first rank in each forward.
    "ddp, torch": Layout(2, "ddp", {}, {}, (REDUCED,), few=(_ending(0) + M * FREQUENCIES,)),
    "ddp, distributed optimizer": Layout(
        *(2, "ddp", ZERO1, {}), ({"reduce_scatter copies": P, "all_gather copies": P},)
    ),
    "fsdp2": Layout(2, "fsdp2", {}, {}, (_fsdp2(),)),
    "HSDP": Layout(4, "fsdp2", {}, {"dp_replicate_size": 2}, (_fsdp2() | {"all_reduce copies": P // 2},)),
    "fsdp2, tp": Layout(4, "fsdp2", {}, {"tp_size": 2}, (_fsdp2(P_TP, BLOCK_TP),), TP),
    "fsdp2, tp, sequence_parallel": Layout(
        *(4, "fsdp2", {"sequence_parallel": True}, {"tp_size": 2}), (_fsdp2(P_TP, BLOCK_TP),), SEQUENCE
    ),
    "fsdp2, cp": Layout(
        *(4, "fsdp2", {}, {"cp_size": 2}), (_fsdp2(),), {"all_gather cp": M * L * K, "reduce_scatter cp": M * L * K}
    ),
    "fsdp2, cp, ulysses": Layout(
        *(4, "fsdp2", {"cp_attention": "ulysses"}, {"cp_size": 2}),
        *((_fsdp2(),), {"all_to_all cp": 2 * M * L * (2 * Q + K // 2)}),
    ),
    "fsdp2, ep": Layout(
        *(4, "fsdp2", {}, {"ep_size": 2}),
        (
            _fsdp2(DENSE, DENSE_BLOCK)
            | {
                "all_gather ep_shard": M * (2 * L - 1) * ALL_EXPERTS // L // 2,
                "reduce_scatter ep_shard": ALL_EXPERTS // 2,
            },
        ),
        # How many rows go to each expert, once in forward for each block.
        few=(ENDING + M * L * EXPERTS * 8,),
    ),
    **{
        f"megatron_fsdp, ZeRO {stage}": Layout(
            *(2, "megatron_fsdp", {"zero_dp_strategy": stage}, {}),
            (_megatron(stage),),
            padded=_megatron(stage, *_units()),
        )
        for stage in (1, 2, 3)
    },
    "megatron_fsdp, tp": Layout(
        *(4, "megatron_fsdp", {}, {"tp_size": 2}),
        (_megatron(3, P_TP, BLOCK_TP),),
        TP,
        _megatron(3, *_units(P_TP, BLOCK_TP, INNER // 2)),
        few=(ENDING + 8,),
    ),
    "pipeline, fsdp2": Layout(4, "fsdp2", {}, {"pp_size": 2}, OF_STAGES, _sends(2), few=OF_STAGE),
    "pipeline, fsdp2, interleaved": Layout(
        *(4, "fsdp2", {}, {"pp_size": 2}),
        tuple(_gathered(MICRO * size, size) for size in STAGES),
        _sends(4),
        schedule="interleaved1f1b",
        few=OF_STAGE,
    ),
    "pipeline, ddp, distributed optimizer": Layout(
        *(4, "ddp", ZERO1, {"pp_size": 2}),
        tuple({"reduce_scatter copies": size, "all_gather copies": size} for size in STAGES),
        _sends(2),
        few=OF_STAGE,
    ),
}


# -- what is measured

NAMES = {"dp_shard_cp": "shard", "dp_shard": "shard", "dp_replicate": "copies"}


@dataclass
class Measured:
    """Of one rank: what it sends; bytes of messages of a few numbers, except for what ranks agree on before a step (see
    tests/step/test_step_overhead.py); and of each call of experts, how many rows go to those of each rank."""

    sent: Sent
    few: int
    stage: int
    routed: list[list[int]]


def _built(name: str) -> tuple[StrategyManager, nn.Module]:
    layout, world = LAYOUTS[name], open_world("cpu")
    wrapper = {"pipeline": {"pp_schedule": layout.schedule}} if layout.schedule else None
    stack, degrees = resolve(
        layout.strategy, MeshSizes(**layout.sizes), world.size, config=layout.config, wrapper_config=wrapper
    )
    manager = stack.build(Mesh(degrees, world))
    model = _model("mixtral" if degrees.ep > 1 else "llama")
    manager.parallelize(model)
    manager.build_optimizer(optimizer_factory(OptimizerConfig(lr=1e-3)))
    return manager, model


def _measured(name: str) -> Measured:
    manager, model = _built(name)

    def step(index: int) -> None:
        generator = torch.Generator().manual_seed(100 * index + manager.mesh.data_rank)
        ids = [torch.randint(0, VOCAB, (SEQUENCES, LENGTH), generator=generator) for _ in range(M)]
        batches = [{"input_ids": each, "labels": each.clone()} for each in ids]
        manager.read_scalars(manager.forward_backward(batches, num_tokens=count_tokens(batches, manager.mesh)))
        manager.optimizer_step()

    # In the first steps strategies try out what they do not know yet.
    step(0)
    step(1)
    routed = _watch_experts(model) if manager.mesh.degrees.ep > 1 else []
    sent: Counter[str] = Counter()
    few = 0
    for each in record_collectives(lambda: step(2), _groups(manager)):
        if each.nbytes > FEW:
            sent[f"{each.kind} {NAMES.get(each.group, each.group)}"] += each.nbytes
        elif each.kind not in ("send", "recv"):
            few += each.nbytes
    return Measured(dict(sent), few, manager.mesh.axis_rank("pp"), routed)


def _groups(manager: StrategyManager) -> dict[str, dist.ProcessGroup]:
    """By name; where several are one group, the first name holds."""
    mesh = manager.mesh
    groups = {axis: mesh.group(axis) for axis in ("pp", "tp", "cp", "dp_shard_cp", "dp_shard", "dp_replicate")}
    if mesh.degrees.ep > 1:
        groups |= {axis: mesh.expert_mesh[axis].get_group() for axis in ("ep", "ep_shard")}
    return {axis: group for axis, group in groups.items() if group.size() > 1}


def _watch_experts(model: nn.Module) -> list[list[int]]:
    """See `Measured.routed`; a list that grows."""
    routed: list[list[int]] = []

    def note(module: nn.Module, args: tuple[Tensor, ...]) -> None:
        routed.append(torch.bincount(args[1].flatten() // (EXPERTS // 2), minlength=2).tolist())

    for each in find_experts(model):
        model.get_submodule(each.name).register_forward_pre_hook(note)
    return routed


def _rows(found: list[Measured], rank: int) -> Sent:
    """Of experts: rows go there and back, and so do their gradients; a call counts what leaves or what arrives."""
    pair = found[rank - rank % 2 : rank - rank % 2 + 2]
    arrived = [sum(rows[rank % 2] for rows in call) for call in zip(*(each.routed for each in pair), strict=True)]
    assert len(arrived) == M * L * bool(arrived)
    rows = sum(4 * max(CHOSEN * TOKENS, each) for each in arrived)
    return {"all_to_all ep": rows * FEATURES * WIDTH} if arrived else {}


FIRST = ("fsdp2", "ddp, distributed optimizer")
"""Layouts of two ranks that are measured in every run of the tests."""


@pytest.mark.parametrize("name", [pytest.param(name, marks=() if name in FIRST else SLOW) for name in LAYOUTS])
def test_a_step_sends_the_least_and_what_is_reported_beside_it(name: str) -> None:
    layout = LAYOUTS[name]
    found = pool(layout.ranks).run(_measured, name)
    for rank, each in enumerate(found):
        least = layout.least[each.stage]
        weights = least if layout.padded is None else layout.padded
        assert each.sent == weights | layout.activations | _rows(found, rank)
        assert each.few == layout.few[each.stage]
        assert sum(weights.values()) / sum(least.values()) == pytest.approx(1, abs=0.005 if layout.padded else 0)


# -- whole parameters, for an inference engine

FED: dict[str, tuple[int, str, int, float]] = {
    "ddp, distributed optimizer": (1, "", 0, 1),
    "fsdp2": (2, "all_gather", P, 1),
    "HSDP": (2, "all_gather", P, 1),
    # Norms are on every rank of tp, and one of them gives them.
    "fsdp2, tp": (4, "all_gather", P, 1.005),
    # A rank has a stretch of a unit, of one tensor more than of another.
    "megatron_fsdp, tp": (4, "all_gather", P, 1.16),
    "pipeline, fsdp2": (4, "broadcast", P, 1),
}
"""By layout: how many ranks have everything between them, how they send it to each other, its bytes, and by how much
more they send at the most."""


def _fed(name: str, dtype: torch.dtype | None) -> list[tuple[str, int, int]]:
    manager, _ = _built(name)
    given = manager.iter_parameters(bucket_bytes=P // 4, dtype=dtype)
    traffic = record_collectives(lambda: [None for _ in given])
    return [(each.kind, each.num_ranks, each.nbytes) for each in traffic]


@pytest.mark.parametrize("name", [pytest.param(name, marks=() if name == "fsdp2" else SLOW) for name in FED])
def test_whole_parameters_travel_once_among_the_fewest_ranks_that_have_them(name: str) -> None:
    ranks, kind, least, most = FED[name]
    for found in pool(LAYOUTS[name].ranks).run(_fed, name, torch.bfloat16):
        assert {each[:2] for each in found} == ({(kind, ranks)} if kind else set())
        assert least // 2 <= sum(size for *_, size in found) <= most * least // 2
