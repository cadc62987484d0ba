"""Megatron-FSDP equals `single`, on real ranks without a GPU: every ZeRO stage, HSDP, and what users do with it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from meshwright import Mesh, MeshSizes, open_world
from meshwright.optim.build import optimizer_factory
from meshwright.step.tokens import sum_token_loss
from meshwright.testing import Case, assert_parity
from meshwright_megatron_fsdp import MegatronFSDPConfig, MegatronFSDPManager
from meshwright_run.run_file import OptimizerConfig
from meshwright_testing import pool
from meshwright_testing.case import rank_microbatches
from meshwright_testing.cells import Cell
from meshwright_testing.models import build_tiny_model
from meshwright_testing.parity import build_manager, train_case, train_steps

slow = pytest.mark.slow
HSDP = {"dp_replicate_size": 2}
LAYOUTS = {
    "ZeRO 0": ({"zero_dp_strategy": 0}, {}),
    "ZeRO 1": ({"zero_dp_strategy": 1}, {}),
    "ZeRO 2": ({"zero_dp_strategy": 2}, {}),
    "ZeRO 3": ({}, {}),
    "HSDP, ZeRO 1": ({"zero_dp_strategy": 1}, HSDP),
    "HSDP, ZeRO 2": ({"zero_dp_strategy": 2}, HSDP),
    "HSDP, ZeRO 3": ({}, HSDP),
    "HSDP, sharded outside": ({"outer_dp_sharding_strategy": 1}, HSDP),
}
CASES = {
    "accumulation, tied": Case(microbatches=2, sequences=24, tied=True, eval_after=True, unshard_after=True),
    "ranks use different parameters": Case(model_type="routed", route="ranks", microbatches=3, sequences=24),
    "frozen, a rank without tokens": Case(
        frozen=("*embed_tokens*", "*layers.1.*"), num_masked_sequences=3, norm_type=1.0
    ),
}


OTHER_CASES = {"ZeRO 0": "frozen, a rank without tokens", "HSDP, ZeRO 2": "ranks use different parameters"}
PAIRS = [(layout, OTHER_CASES.get(layout, "accumulation, tied")) for layout in LAYOUTS]


@slow
@pytest.mark.parametrize(("layout", "case"), PAIRS, ids=["-".join(pair) for pair in PAIRS])
def test_every_layout_equals_a_single_process(layout: str, case: str) -> None:
    config, sizes = LAYOUTS[layout]
    assert_parity("megatron_fsdp", CASES[case], world_size=4, config=config, sizes=sizes)


@pytest.mark.parametrize(
    ("ranks", "config", "sizes", "case"),
    [
        (2, {}, {}, CASES["ranks use different parameters"]),
        # HSDP with one shard.
        pytest.param(2, {"outer_dp_sharding_strategy": 1}, HSDP, Case(microbatches=2), marks=slow),
        *(pytest.param(3, {"zero_dp_strategy": stage}, {}, Case(microbatches=2), marks=slow) for stage in (1, 3)),
        pytest.param(1, {}, {}, Case(microbatches=2), marks=slow),
        pytest.param(8, {}, HSDP, Case(microbatches=2, sequences=16, tied=True), marks=slow),
    ],
    ids=str,
)
def test_other_worlds_equal_a_single_process(
    ranks: int, config: dict[str, Any], sizes: dict[str, int], case: Case
) -> None:
    assert_parity("megatron_fsdp", case, world_size=ranks, config=config, sizes=sizes)


@slow
@pytest.mark.parametrize("config", [{"zero_dp_strategy": 1}, {"outer_dp_sharding_strategy": 1}], ids=str)
def test_state_moves_to_single_and_back(config: dict[str, Any]) -> None:
    sizes = HSDP if "outer_dp_sharding_strategy" in config else {}
    case = Case(steps=4)
    Cell("megatron_fsdp", "", 4, sizes, "state", case, config, kind="state").check()


@slow
def test_optimizer_options() -> None:
    optimizer = OptimizerConfig(lr=1e-2, weight_decay=0.1, options={"foreach": False, "amsgrad": True})
    assert_parity("megatron_fsdp", Case(optimizer=optimizer), world_size=4)


@slow
# The last has a parameter that three modules share.
@pytest.mark.parametrize("model_type", ["mixtral", "gpt2", "prophetnet"])
def test_models_with_experts_and_other_layers(model_type: str) -> None:
    case = Case(model_type=model_type, tied=None, microbatches=2, sequences=8, unshard_after=True)
    assert_parity("megatron_fsdp", case, world_size=2)


# -- beyond the loop of core


def _by_hand() -> list[float]:
    """A loop of one's own with two microbatches, two parameter groups by name, and a forward under unshard."""
    world = open_world("cpu")
    manager = MegatronFSDPManager(MegatronFSDPConfig(), Mesh(MeshSizes().resolve(world.size), world))
    module = manager.parallelize(build_tiny_model(seed=0))
    optimizer = manager.build_optimizer(lambda named: _two_groups(list(named)))
    alone = build_tiny_model(seed=0)
    reference = _two_groups(list(alone.named_parameters()))
    for step in range(3):
        ids = torch.randint(131, (8, 6), generator=torch.Generator().manual_seed(step))
        for half in range(2):
            mine = ids[world.rank * 4 + half * 2 :][:2]
            with manager.microbatch_context(is_last=half == 1):
                (sum_token_loss(module(input_ids=mine).logits, mine) / 40).backward()
        optimizer.step()
        optimizer.zero_grad()
        (sum_token_loss(alone(input_ids=ids).logits, ids) / 40).backward()
        reference.step()
        reference.zero_grad()
    with manager.unshard() as (whole,), torch.no_grad():
        # On one rank only, twice: nothing is gathered any more, nor freed.
        if world.rank == 0:
            logits = [whole(input_ids=ids).logits for _ in range(2)]
            differences = [float((each - alone(input_ids=ids).logits).abs().max()) for each in logits]
        else:
            differences = []
        differences += [float((p - q).abs().max()) for p, q in zip(whole.parameters(), alone.parameters(), strict=True)]
    return [len(optimizer.param_groups), *(group["weight_decay"] for group in optimizer.param_groups), *differences]


def _two_groups(named: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    norms = [p for name, p in named if "norm" in name]
    others = [p for name, p in named if "norm" not in name]
    groups = [{"params": norms, "weight_decay": 0.0}, {"params": others, "weight_decay": 0.1, "lr": 3e-3}]
    return torch.optim.AdamW(groups, lr=1e-2)


def test_a_loop_by_hand_keeps_parameter_groups_and_unshard_needs_no_peers() -> None:
    for groups, first, second, *differences in pool(2).run(_by_hand):
        assert (groups, first, second) == (2, 0.0, 0.1)
        assert differences
        assert max(differences) < 1e-12


def _partial_state() -> bool:
    """Whether steps after loading one's own partial state are those that would have been."""
    case = Case()
    manager = build_manager("megatron_fsdp", {}, {}, case)
    train_steps(manager, case, range(2))
    # DTensors have no deepcopy.
    state = torch.utils._pytree.tree_map(lambda x: x.clone() if isinstance(x, Tensor) else x, manager.state_dict())
    after = train_steps(manager, case, range(2, 4))
    manager.load_state_dict(state)
    return train_steps(manager, case, range(2, 4)) == after


@slow
def test_a_rank_can_load_its_own_partial_state() -> None:
    assert all(pool(4).run(_partial_state))


# -- mixed precision


def _bf16(config: dict[str, Any], case: Case) -> dict[str, Tensor]:
    manager = build_manager("megatron_fsdp", config, {}, case)
    train_steps(manager, case, range(case.steps))
    return manager.state_dict(full=True)["model"]


def _emulated(case: Case, ranks: int) -> dict[str, Tensor]:
    """bf16 forward and backward of each rank's share, sums and AdamW in float32, in this process."""
    model = build_tiny_model(seed=0, dtype=torch.bfloat16)
    named = dict(model.named_parameters())
    main = {name: nn.Parameter(p.detach().float()) for name, p in named.items()}
    optimizer = optimizer_factory(case.optimizer)(main.items())
    for step in range(case.steps):
        shares = [rank_microbatches(case, step, rank, ranks) for rank in range(ranks)]
        labels = torch.cat([batch["labels"][:, 1:] for part in shares for batch in part])
        tokens = int((labels != -100).sum())
        for index in range(case.microbatches):
            sums = {name: torch.zeros_like(p) for name, p in main.items()}
            for part in shares:
                logits = model(input_ids=part[index]["input_ids"], use_cache=False).logits
                (sum_token_loss(logits, part[index]["labels"]) / tokens).backward()
                for name, p in named.items():
                    sums[name] += p.grad.float()
                    p.grad = None
            for name, p in main.items():
                p.grad = sums[name] if p.grad is None else p.grad + sums[name]
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for name, p in named.items():
                p.copy_(main[name])
    return {name: p.detach() for name, p in main.items()}


@pytest.mark.parametrize("stage", [*(pytest.param(stage, marks=slow) for stage in (0, 1, 2)), 3])
def test_bf16_with_float32_weights_and_sums_is_exactly_what_one_process_computes(stage: int) -> None:
    case = Case(dtype="bfloat16", microbatches=2, sequences=8, max_norm=None)
    # Sums over microbatches and ranks associate in another way where gradients stay whole.
    case = case if stage > 1 else replace(case, microbatches=1)
    config = {"zero_dp_strategy": stage, "preserve_fp32_weights": True, "grad_reduce_in_fp32": True}
    weights = pool(2).run(_bf16, config, case)[0]
    expected = _emulated(case, 2)
    assert weights["lm_head.weight"].dtype == torch.float32
    assert all(torch.equal(weights[name], value) for name, value in expected.items())


@slow
def test_the_main_job_prints_the_losses_of_single_with_wide_sums() -> None:
    case = Case(dtype="float32", microbatches=2, sequences=24)
    config = {"reduce_dtype": "float64"}
    single = pool(1).run(train_case, "single", config, {}, replace(case, microbatches=8))[0]
    for stage in (1, 3):
        for found in pool(4).run(train_case, "megatron_fsdp", {**config, "zero_dp_strategy": stage}, {}, case):
            assert [f"{loss:.6f}" for loss in found.losses] == [f"{loss:.6f}" for loss in single.losses]
