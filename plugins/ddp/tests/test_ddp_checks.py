"""Gradients are looked at before they are reduced, and what one rank finds stops all of them."""

from __future__ import annotations

import math
import warnings
from typing import Any

import pytest
import torch

from meshwright import TrainingError, count_tokens
from meshwright.testing import Case, pool
from meshwright.testing.case import share
from meshwright.testing.parity import build_manager
from meshwright_ddp.gradient_checks import LEARNED, GradientChecks

NAN = {"engine": "bucketed", "check_for_nan_in_grad": True}
PLANTED = "model.layers.1.mlp.up_proj.weight"


def _with_planted(config: dict[str, Any], value: float, planted_step: int) -> list[Any]:
    """A gradient of the second rank is not finite in one step; losses of the others, and the error."""
    case = Case(microbatches=2)
    manager = build_manager("ddp", config, {}, case)
    spoil = [False]
    weight = dict(manager.model_parts[0].named_parameters())[PLANTED]
    weight.register_hook(lambda grad: torch.full_like(grad, value) if spoil[0] else grad)
    told: list[Any] = []
    for step in range(3):
        spoil[0] = step == planted_step and manager.mesh.rank == 1
        batches = share(case, step, manager.mesh.data_rank, manager.mesh.data_size)
        tokens = count_tokens(batches, manager.mesh)
        try:
            loss = float(manager.forward_backward(batches, num_tokens=tokens))
            manager.optimizer_step()
            told.append(loss)
        except TrainingError as error:
            told.append(str(error))
    return told


@pytest.mark.parametrize(
    "config",
    [
        NAN,
        {**NAN, "overlap_grad_reduce": True, "bucket_size": 3000},
        {**NAN, "overlap_grad_reduce": True, "bucket_size": 3000, "use_distributed_optimizer": True},
    ],
    ids=str,
)
@pytest.mark.parametrize(("value", "kind"), [(math.nan, "NaN"), (math.inf, "Inf")])
def test_a_gradient_that_is_not_finite_on_one_rank_stops_all_with_its_name_and_bucket(
    config: dict[str, Any], value: float, kind: str
) -> None:
    for planted_step in (0, 1):
        first, second = pool(2).run(_with_planted, config, value, planted_step)
        assert first == second
        text = first[planted_step]
        assert f"is {kind} before the data-parallel collective" in text
        assert PLANTED in text
        assert "bucket " in text
        assert "(found on rank 1" in text
        # Nothing was stepped, and training can go on.
        others = [loss for step, loss in enumerate(first) if step != planted_step]
        assert all(isinstance(loss, float) and math.isfinite(loss) for loss in others)


def test_without_the_check_a_gradient_that_is_not_finite_is_trained_on() -> None:
    losses = pool(2).run(_with_planted, {"engine": "bucketed"}, math.nan, 0)[0]
    assert all(isinstance(loss, float) for loss in losses)
    assert math.isnan(losses[1])


def _look(checks: GradientChecks, norm: float) -> None:
    checks.look(0, ["a", "b"], [torch.tensor([0.6 * norm]), torch.tensor([[0.8 * norm]])])
    norms = checks.norms()
    assert checks.verdict(norms.tolist() if norms is not None else []) is None


def test_large_gradients_are_told_only_after_a_hundred_norms_have_been_seen() -> None:
    checks = GradientChecks(nonfinite=False, large=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for step in range(LEARNED - 1):
            _look(checks, 1.0 + step % 2)
        _look(checks, math.nan)  # counts for nothing
        _look(checks, 50.0)
        _look(checks, 499.0)
    with pytest.warns(UserWarning, match=r"bucket 0 \(b to a\) have norm 501 .* largest of the first 100 norms \(50\)"):
        _look(checks, 501.0)
    # What was told has not become what is expected.
    with pytest.warns(UserWarning, match="norm 501"):
        _look(checks, 501.0)


def test_checks_that_are_off_look_at_nothing() -> None:
    checks = GradientChecks(nonfinite=False, large=False)
    _look(checks, math.nan)


def _large() -> list[str]:
    case = Case(steps=LEARNED + 1, max_norm=None)
    manager = build_manager("ddp", {"engine": "bucketed", "check_for_large_grads": True}, {}, case)
    scale = [1.0]
    for parameter in manager.model_parts[0].parameters():
        parameter.register_hook(lambda grad: grad * scale[0])
    batches = share(case, 0, manager.mesh.data_rank, manager.mesh.data_size)
    tokens = count_tokens(batches, manager.mesh)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(LEARNED + 1):
            scale[0] = 20.0 if step == LEARNED else 1.0
            manager.read(manager.forward_backward(batches, num_tokens=tokens))
            for parameter in manager.model_parts[0].parameters():
                parameter.grad = None
    return [str(each.message) for each in caught if "check_for_large_grads" in str(each.message)]


def test_large_gradients_of_a_step_are_told_and_training_goes_on() -> None:
    for told in pool(2).run(_large):
        assert len(told) == 1
        assert "bucket 0" in told[0]
