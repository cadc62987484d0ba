"""An axis is one object: a strategy's own divides batches, adds to losses and gradients, and is checked."""

from __future__ import annotations

import pytest
import torch
from support.tiers import mark_mostly_slow

from meshwright import BatchError, ModelError
from meshwright.testing import Case, Outcome
from meshwright_testing import conformance, pool
from meshwright_testing.case import rank_microbatches
from meshwright_testing.cells import register_plugin_module
from meshwright_testing.parity import build_manager, find_max_difference, train_case
from meshwright_testing.tasks import add_objective_columns, preference_objective


def _trained(case: Case, ranks: int) -> Outcome:
    register_plugin_module("support.rows_axis")
    return train_case("rows", {}, {"tp_size": ranks}, case)


@pytest.mark.parametrize("ranks", mark_mostly_slow([2, 4]))
def test_an_axis_of_a_strategys_own_trains_as_one_process(ranks):
    case = Case(microbatches=3, num_masked_sequences=4, eval_after=True, unshard_after=True)
    reference = pool(1).run(train_case, "single", {}, {}, case)[0]
    assert find_max_difference(pool(ranks).run(_trained, case, ranks), reference).worst <= case.tolerance


def _reported_without_gather() -> tuple[str, float]:
    register_plugin_module("support.rows_axis")
    case = Case()
    manager = build_manager("rows_without_gather", {}, {"tp_size": 2}, case)
    batches = [add_objective_columns(batch, 131) for batch in rank_microbatches(case, 0, 0, 1)]
    count = torch.tensor(8)
    with pytest.raises(ModelError) as error:
        manager.forward_backward(batches, num_tokens=count, objective=preference_objective)
    # What it could do before, it can.
    return str(error.value), float(manager.forward_backward(rank_microbatches(case, 0, 0, 1), num_tokens=count))


def test_without_gather_an_axis_that_divides_batches_takes_no_objective():
    first, second = pool(2).run(_reported_without_gather)
    assert first == second
    assert first[0] == "RowsAxisWithoutGather shards batches but has no `gather`: no objective can be used."


@pytest.mark.slow
@pytest.mark.usefixtures("registry_of_its_own")
@pytest.mark.parametrize("name", ["tp=2-objective", "tp=4-objective"])
def test_conformance_tries_an_objective_on_it(name):
    (cell,) = (cell for cell in conformance("rows", plugin="support.rows_axis") if str(cell) == name)
    assert cell.run().status == "passed"
    (cell,) = (cell for cell in conformance("rows_without_gather", plugin="support.rows_axis") if str(cell) == name)
    assert "no objective can be used" in cell.run().detail
    assert cell.run().status == "does not apply"


def _refused() -> str:
    register_plugin_module("support.rows_axis")
    case = Case(sequences=3)
    manager = build_manager("rows", {}, {"tp_size": 2}, case)
    with pytest.raises(BatchError) as error:
        manager.eval_loss(rank_microbatches(case, 0, 0, 1), num_tokens=torch.tensor(8))
    return str(error.value)


def test_what_it_cannot_divide_is_refused_on_all_ranks():
    first, second = pool(2).run(_refused)
    assert first == second == "3 sequences do not divide among 2 ranks."
