"""An axis is one object: a strategy's own divides batches, adds to losses and gradients, and is checked."""

from __future__ import annotations

import pytest
import torch

from meshwright import BatchError
from meshwright.testing import Case, Outcome, pool
from meshwright.testing.case import share
from meshwright.testing.cells import register
from meshwright.testing.parity import build_manager, difference, train_case


def _trained(case: Case, ranks: int) -> Outcome:
    register("rows_axis")
    return train_case("rows", {}, {"tp_size": ranks}, case)


@pytest.mark.parametrize("ranks", [2, 4])
def test_an_axis_of_a_strategys_own_trains_as_one_process(ranks):
    case = Case(microbatches=3, empty=4, eval_after=True, unshard_after=True)
    reference = pool(1).run(train_case, "single", {}, {}, case)[0]
    assert difference(pool(ranks).run(_trained, case, ranks), reference).worst <= case.tolerance


def _refused() -> str:
    register("rows_axis")
    case = Case(sequences=3)
    manager = build_manager("rows", {}, {"tp_size": 2}, case)
    with pytest.raises(BatchError) as error:
        manager.eval_loss(share(case, 0, 0, 1), num_tokens=torch.tensor(8))
    return str(error.value)


def test_what_it_cannot_divide_is_refused_on_all_ranks():
    first, second = pool(2).run(_refused)
    assert first == second == "3 sequences do not divide among 2 ranks."
