"""No operation of a training run mixes tensors of the CPU with those of an accelerator."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.fake_accelerator import ACCELERATOR, CPU, FakeAccelerator, MixedDevicesError
from support.tiers import mark_mostly_slow
from torch import Tensor

from meshwright import Mesh, MeshSizes, open_world, optimizer_factory, resolve
from meshwright.base.types import Batch
from meshwright.manager.model_setup import fork_rng
from meshwright.optim.build import build_scheduler
from meshwright.strategy.contract import StrategyManager
from meshwright.testing import Case
from meshwright.training.loop.fit import fit
from meshwright.training.loop.options import Loop
from meshwright_run.run_file import ScheduleConfig
from meshwright_testing import pool
from meshwright_testing.case import rank_microbatches
from meshwright_testing.models import build_tiny_model
from meshwright_testing.parity import build_manager

CASE = Case(steps=2, sequences=4, microbatches=2)
OFFLOADED = {"offload_policy": {"pin_memory": False}}
NORMS = (2.0, 1.0, 3.0, math.inf)


# -- what CUDA does, the pretended device does


def test_the_pretended_device_is_as_strict_as_cuda() -> None:
    with FakeAccelerator():
        there, here = torch.ones(3, device=ACCELERATOR), torch.ones(3)
        assert (there.device, here.device, there.sum().device) == (ACCELERATOR, CPU, ACCELERATOR)
        assert (there * torch.tensor(2.0)).device == ACCELERATOR
        assert there.new_zeros(2).device == torch.zeros_like(there).device == ACCELERATOR
        assert there.to(CPU).device == CPU
        assert here.to(ACCELERATOR).device == ACCELERATOR
        assert there[torch.tensor([0, 2])].device == ACCELERATOR
        here.copy_(there)
        refused: list[Callable[[], object]] = [
            lambda: there + here,
            lambda: torch.stack([there.sum(), torch.tensor(2.0)]),
            lambda: torch.cat([there, here]),
            lambda: here[0].add_(there.sum()),
            lambda: torch.where(there > 0, there, here),
            lambda: torch._foreach_mul_([there], torch.tensor(2.0)),
            lambda: there @ here,
        ]
        for operation in refused:
            with pytest.raises(MixedDevicesError):
                operation()
        weight = torch.ones(2, device=ACCELERATOR, requires_grad=True)
        (weight * 3).sum().backward()
        assert weight.grad is not None
        assert weight.grad.device == ACCELERATOR


# -- the whole path of training


def _walk(manager: StrategyManager, devices: FakeAccelerator) -> list[tuple[str, str]]:
    """Steps, evaluation and metrics; clipping with each norm, with gradients and without; the rank's collectives."""
    mesh = manager.mesh
    optimizer = manager.build_optimizer(optimizer_factory(CASE.optimizer))
    scheduler = build_scheduler(ScheduleConfig(), optimizer, 2 * len(NORMS))
    for number, norm_type in enumerate(NORMS):
        loop = Loop(
            steps=2 * number + 2,
            start_step=2 * number,
            batches=lambda step: rank_microbatches(CASE, step, mesh.data_rank, mesh.data_size),
            eval_sets={"held_out": rank_microbatches(CASE, 7, mesh.data_rank, mesh.data_size)},
            scheduler=scheduler,
            max_grad_norm=0.1 if number % 2 else None,
            grad_norm_type=norm_type,
        )
        for result in fit(manager, loop):
            assert math.isfinite(result.loss + result.grad_norm)
        norm = manager.clip_grad_norm(1.0, norm_type)
        assert (float(norm), devices.device_of_tensor(norm)) == (0.0, ACCELERATOR)
    return devices.collectives


def _on_accelerator(strategy: str, config: dict[str, Any], sizes: dict[str, int]) -> list[tuple[str, str]]:
    with FakeAccelerator() as devices:
        world = open_world("cpu")
        stack, degrees = resolve(strategy, MeshSizes(**sizes), world.size, config=config)
        mesh = Mesh(degrees, world)
        # Torch's own mesh stays where its collectives are; and so does the control plane.
        mesh.device = world.device = ACCELERATOR
        if degrees.pp > 1:
            # A batch of sends asks its group what sends for the device.
            group: Any = mesh.group("pp")
            group._register_backend(ACCELERATOR, dist.ProcessGroup.BackendType.GLOO, group._get_backend(CPU))
        manager = stack.build(mesh)
        manager.parallelize(build_tiny_model())
        assert all(
            devices.device_of_tensor(p) == ACCELERATOR for part in manager.model_parts for p in part.parameters()
        )
        # A backward from an edge of the graph is no call with tensors that the pretended device sees.
        with devices.set_creation_device(None):
            return _walk(manager, devices)


@pytest.mark.parametrize(
    ("strategy", "config", "sizes"),
    mark_mostly_slow(
        [
            ("single", {}, {}),
            ("ddp", {"engine": "bucketed"}, {}),
            ("ddp", {"engine": "bucketed", "use_distributed_optimizer": True, "reduce_dtype": "float64"}, {}),
            ("single", {}, {"pp_size": 2}),
        ],
        ("ddp", {"engine": "bucketed"}, {}),
    ),
    ids=str,
)
def test_no_step_mixes_the_control_plane_with_the_accelerator(strategy, config, sizes) -> None:
    ranks = 1 if strategy == "single" and not sizes else 2
    _check_collectives(pool(ranks).run(_on_accelerator, strategy, config, sizes))


class _Elsewhere:
    """What a strategy does whose parameters are offloaded: forward and backward run on the accelerator, and leave
    gradients with the parameters."""

    def __init__(self, manager: StrategyManager, devices: FakeAccelerator) -> None:
        self._manager, self._devices = manager, devices

    def forward_backward(self, microbatches: Sequence[Batch], **options: Any) -> Tensor:
        return self._on_cpu("forward_backward", microbatches, options)

    def eval_loss(self, microbatches: Sequence[Batch], **options: Any) -> Tensor:
        return self._on_cpu("eval_loss", microbatches, options)

    def _on_cpu(self, method: str, microbatches: Sequence[Batch], options: dict[str, Any]) -> Tensor:
        with self._devices.suspended():
            _put(self._manager, CPU)
            loss: Tensor = getattr(type(self._manager), method)(self._manager, microbatches, **options)
            _put(self._manager, ACCELERATOR)
        return self._devices.mark_on_accelerator(loss)


def _put(manager: StrategyManager, device: torch.device) -> None:
    """Where the model runs."""
    meshes: list[Any] = [manager.mesh] + ([manager.mesh.get_stage_mesh()] if manager.mesh.degrees.pp > 1 else [])
    for mesh in meshes:
        mesh.device = mesh.world.device = device


def _offloaded(strategy: str, config: dict[str, Any], sizes: dict[str, int]) -> list[tuple[str, str]]:
    manager: Any = build_manager(strategy, config, sizes, CASE)
    with FakeAccelerator() as devices:
        _put(manager, ACCELERATOR)
        elsewhere = _Elsewhere(manager, devices)
        manager.forward_backward, manager.eval_loss = elsewhere.forward_backward, elsewhere.eval_loss
        collectives = _walk(manager, devices)
    assert not any(
        devices.device_of_tensor(p) == ACCELERATOR for part in manager.model_parts for p in part.parameters()
    )
    return collectives


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "config", "sizes"),
    [
        ("fsdp2", OFFLOADED, {"tp_size": 2}),
        ("fsdp2", OFFLOADED, {"pp_size": 2}),
        # Not offloaded: what leaves its own shards, in buffers, is on the CPU here.
        ("megatron_fsdp", {}, {}),
    ],
    ids=str,
)
def test_no_step_mixes_offloaded_parameters_with_the_accelerator(strategy, config, sizes) -> None:
    _check_collectives(pool(2).run(_offloaded, strategy, config, sizes))


def _check_collectives(ranks: list[list[tuple[str, str]]]) -> None:
    """Each is of one device, and of the same one on all ranks."""
    alike = [[each for each in found if "send" not in each[0] and "recv" not in each[0]] for found in ranks]
    assert all("and" not in device for found in ranks for _, device in found)
    assert all(found == alike[0] for found in alike)


def test_a_run_on_the_cpu_does_not_touch_an_accelerator_that_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    def asked() -> int:
        raise AssertionError("the accelerator was asked for its device")

    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **_: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "current_device_index", asked)
    before = torch.get_rng_state()
    with fork_rng(CPU):
        torch.rand(3)
    assert torch.equal(torch.get_rng_state(), before)
