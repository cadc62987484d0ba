"""Registered objectives: formulas against torch's and the papers', counts, masks, options and errors, the registry.

Sums and gradients with respect to logits are compared in float64 to 1e-10. test_objectives_of_trl.py compares with trl.
"""

from __future__ import annotations

import math
import re
import subprocess
import sys
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from support.objective_cells import CELLS, S, V, build_microbatch, evaluate_objective, format_cell_id, select_rows
from torch import Tensor
from torch.nn import functional as F

import meshwright as mw
from meshwright.base.errors import BatchError, ConfigError, ModelError
from meshwright.objectives import ObjectiveConfig, get_objective, list_objectives
from meshwright.objectives.base import BatchColumns
from meshwright.step.tokens import Tokens, shift_labels
from meshwright.strategy.hooks import hookimpl
from meshwright.strategy.registry import Registry
from meshwright_objectives import CrossEntropy, previous_tokens
from meshwright_objectives import plugin as objectives_plugin
from meshwright_objectives.functional import log1mexp
from meshwright_testing import pool
from meshwright_testing.models import build_tiny_model

CELL = pytest.mark.parametrize("cell", CELLS, ids=format_cell_id)


def equal(cell: Any, batch: dict[str, Tensor], expected: Any, *, tolerance: float = 1e-10) -> dict[str, Tensor]:
    """Compare sum and gradient with those of `expected(logits, batch)`; returns the further sums."""
    loss, sums, gradient = evaluate_objective(cell, batch)
    logits = batch["logits"].clone().requires_grad_()
    wanted = expected(logits, batch)
    (wanted_gradient,) = torch.autograd.grad(wanted, logits)
    torch.testing.assert_close(loss, wanted.detach(), rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(gradient, wanted_gradient, rtol=tolerance, atol=tolerance)
    return sums


# -- what every objective must do


@CELL
def test_rows_together_are_the_sum_of_rows_apart(cell):
    objective = get_objective(cell)
    whole = build_microbatch(objective, rows=8)
    parts = [select_rows(whole, slice(start, start + 4)) for start in (0, 4)]
    loss, sums, gradient = evaluate_objective(objective, whole)
    apart = [evaluate_objective(objective, part) for part in parts]
    torch.testing.assert_close(loss, apart[0][0] + apart[1][0], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(gradient, torch.cat([each[2] for each in apart]), rtol=1e-12, atol=1e-12)
    for name, value in sums.items():
        torch.testing.assert_close(value, apart[0][1][name] + apart[1][1][name], rtol=1e-12, atol=1e-12)
        assert not value.requires_grad
        assert value.dim() == 0
    assert objective.count(whole) == sum(map(objective.count, parts)) > 0


@CELL
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_rows_of_padding_and_masked_positions_count_for_nothing_whatever_they_hold(cell, dtype):
    objective = get_objective(cell)
    batch = build_microbatch(objective, rows=6, dtype=dtype)
    first = select_rows(batch, slice(0, 4))
    padded = {name: each.clone() for name, each in batch.items()}
    padded["labels"][4:] = -100
    for name, column in padded.items():
        if name not in ("logits", "labels", "position_ids") and column.dtype.is_floating_point:
            column[4:] = float("nan")
            if column.dim() > 1:
                column[shift_labels(padded["labels"]) == -100] = float("nan")
    loss, sums, gradient = evaluate_objective(objective, padded)
    wanted = evaluate_objective(objective, first)
    torch.testing.assert_close(loss, wanted[0])
    torch.testing.assert_close(gradient[:4], wanted[2])
    assert not gradient[4:].any()
    torch.testing.assert_close(sums, wanted[1])
    assert objective.count(padded | {"weights": batch["weights"]}) == objective.count(first)
    only = select_rows(padded, slice(4, 6))
    loss, sums, gradient = evaluate_objective(objective, only)
    assert not any(map(float, (loss, *sums.values())))
    assert not gradient.any()


@CELL
def test_only_what_an_objective_says_that_it_takes_is_read(cell):
    objective = get_objective(cell)
    batch = build_microbatch(objective)
    taken = {column.name for column in objective.accepted_columns} | {"logits", "labels", "position_ids"}
    torch.testing.assert_close(
        evaluate_objective(objective, batch),
        evaluate_objective(objective, {name: batch[name] for name in taken}),
        rtol=0,
        atol=0,
    )
    assert set(objective.columns) <= taken
    for name in objective.columns:
        with pytest.raises(BatchError, match=f"objective '{objective.name}' needs the column '{name}'"):
            objective.check({key: each for key, each in batch.items() if key != name})
    for column in objective.accepted_columns:
        wrong = batch | {column.name: batch[column.name][..., None, None]}
        with pytest.raises(BatchError, match=f"column '{column.name}' of objective '{objective.name}' has the shape"):
            objective.check(wrong)
        with pytest.raises(BatchError, match=r"is complex64, not (floating point|int64|bool)"):
            objective.check(batch | {column.name: batch[column.name].to(torch.complex64)})


def test_a_short_column_and_half_a_pair_are_refused():
    batch = build_microbatch(get_objective("ppo"))
    batch["old_log_probs"] = batch["old_log_probs"][:, :-1]
    with pytest.raises(BatchError, match=r"has the shape \(4, 8\), not \(B, S\) with B=4, S=9"):
        get_objective("ppo").check(batch)
    with pytest.raises(BatchError, match="takes 2 consecutive rows together, and a microbatch has 3 rows"):
        get_objective("orpo").check(build_microbatch(None, rows=3))


# -- formulas


@pytest.mark.parametrize(("smoothing", "z_loss"), [(0.0, 0.0), (0.1, 0.0), (1.0, 0.0), (0.3, 1e-2)])
def test_cross_entropy_is_that_of_torch(smoothing, z_loss):
    cell = {
        "name": "cross_entropy",
        "label_smoothing": smoothing,
        "z_loss": z_loss,
        "extra_sums": ["correct", "entropy"],
    }
    batch = build_microbatch(None)
    del batch["weights"]

    def expected(logits: Tensor, batch: dict[str, Tensor]) -> Tensor:
        wanted = shift_labels(batch["labels"])
        found = F.cross_entropy(logits.flatten(0, 1), wanted.flatten(), reduction="sum", label_smoothing=smoothing)
        return found + z_loss * (logits.logsumexp(-1)[wanted != -100] ** 2).sum()

    sums = equal(cell, batch, expected)
    wanted = shift_labels(batch["labels"])
    distribution = torch.distributions.Categorical(logits=batch["logits"][wanted != -100])
    torch.testing.assert_close(sums["entropy"], distribution.entropy().sum())
    assert int(sums["correct"]) == int((batch["logits"].argmax(-1) == wanted).sum())
    assert CrossEntropy().count(batch) == int((wanted != -100).sum())


def test_weights_multiply_targets_and_those_of_weight_0_are_not_counted():
    batch = build_microbatch(None)
    kept = shift_labels(batch["labels"]) != -100
    batch["weights"][0, :6] = 0.0

    def expected(logits: Tensor, batch: dict[str, Tensor]) -> Tensor:
        each = F.cross_entropy(logits.flatten(0, 1), shift_labels(batch["labels"]).flatten(), reduction="none")
        return (each * batch["weights"].flatten()).sum()

    sums = equal("cross_entropy", batch, expected)
    torch.testing.assert_close(sums["weights"], batch["weights"][kept].sum())
    assert CrossEntropy().count(batch) == int((kept & (batch["weights"] != 0)).sum()) < int(kept.sum())


def mean_of_pairs(logits: Tensor, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    wanted = shift_labels(batch["labels"])
    kept = wanted != -100
    found = logits.log_softmax(-1).gather(-1, wanted.clamp(min=0)[..., None])[..., 0]
    mean = torch.where(kept, found, 0.0).sum(1) / kept.sum(1)
    return mean[::2], mean[1::2]


def test_orpo_is_the_odds_ratio_of_the_paper():
    def expected(logits: Tensor, batch: dict[str, Tensor]) -> Tensor:
        chosen, rejected = mean_of_pairs(logits, batch)
        odds = [each.exp() / (1 - each.exp()) for each in (chosen, rejected)]
        return (-chosen - 0.2 * (odds[0] / odds[1]).log().sigmoid().log()).sum()

    equal({"name": "orpo", "beta": 0.2}, build_microbatch(None), expected)


@pytest.mark.parametrize("alpha", [0.0, 0.7])
def test_unlikelihood_is_that_of_the_paper(alpha):
    def expected(logits: Tensor, batch: dict[str, Tensor]) -> Tensor:
        wanted, log_probs = shift_labels(batch["labels"]), logits.log_softmax(-1)
        total = F.nll_loss(log_probs.flatten(0, 1), wanted.flatten(), reduction="sum")
        for row, position in (wanted != -100).nonzero().tolist():
            for token in batch["negatives"][row, position].tolist():
                if token != -100:
                    total = total - alpha * (1 - log_probs[row, position, token].exp()).log()
        return total

    equal({"name": "unlikelihood", "alpha": alpha}, build_microbatch(None), expected)


def test_previous_tokens_are_the_latest_different_ones_of_the_document_without_the_target():
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(6, (3, 12), generator=generator)
    positions = torch.cat([torch.arange(7), torch.arange(5)])[None]
    for count, given in ((4, None), (2, positions), (20, positions)):
        found = previous_tokens(ids, count, position_ids=given)
        assert found.shape == (3, 12, count)
        for row in range(3):
            for place in range(12):
                start = 7 if given is not None and place >= 7 else 0
                latest = list(dict.fromkeys(ids[row, start : place + 1].flip(0).tolist()))
                kept = [token for token in latest if place < 11 and token != int(ids[row, place + 1])][:count]
                assert found[row, place].tolist() == kept + [-100] * (count - len(kept))


def jensen_shannon(student: Tensor, teacher: Tensor, beta: float) -> Tensor:
    """By torch's kl_div, which takes what is diverged from first."""
    if beta in (0.0, 1.0):
        first, second = (student, teacher) if beta == 0 else (teacher, student)
        return F.kl_div(first, second, reduction="none", log_target=True).sum(-1)
    mixture = ((1 - beta) * student.exp() + beta * teacher.exp()).log()
    of_teacher, of_student = (
        F.kl_div(mixture, each, reduction="none", log_target=True).sum(-1) for each in (teacher, student)
    )
    return beta * of_teacher + (1 - beta) * of_student


@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("rest", ["entry", "renormalize"])
def test_distillation_with_some_entries_knows_the_rest(beta, rest):
    def expected(logits: Tensor, batch: dict[str, Tensor]) -> Tensor:
        total = logits.new_zeros(())
        for row, place in (shift_labels(batch["labels"]) != -100).nonzero().tolist():
            kept = batch["teacher_ids"][row, place] != -100
            teacher = batch["teacher_log_probs"][row, place][kept].exp()
            student = logits[row, place].softmax(-1)[batch["teacher_ids"][row, place][kept]]
            if rest == "entry":
                student, teacher = (torch.cat([each, 1 - each.sum(-1, keepdim=True)]) for each in (student, teacher))
            else:
                student, teacher = student / student.sum(), teacher / teacher.sum()
            total = total + jensen_shannon(student.log(), teacher.log(), beta)
        return total

    equal({"name": "distill", "beta": beta, "tail": rest}, build_microbatch(None), expected)


@pytest.mark.parametrize("clip", [0.2, None])
def test_value_is_the_larger_of_the_clipped_and_the_plain_error(clip):
    objective = get_objective({"name": "value", "clip": clip})

    def expected(logits: Tensor, batch: dict[str, Tensor]) -> Tensor:
        value, old, wanted = logits[..., 0], batch["old_values"], batch["returns"]
        errors = [(value - wanted) ** 2]
        if clip is not None:
            errors.append((torch.clamp(value, old - clip, old + clip) - wanted) ** 2)
        kept = shift_labels(batch["labels"]) != -100
        return 0.5 * torch.stack(errors).amax(0)[kept].sum()

    sums = equal(objective, build_microbatch(objective), expected)
    assert set(sums) == ({"value"} if clip is None else {"value", "clipfrac"})


@pytest.mark.parametrize("correction", [None, "token_truncate", "token_mask", "sequence_truncate", "sequence_mask"])
@pytest.mark.parametrize("importance", ["token", "sequence"])
@pytest.mark.parametrize("normalize", ["sequence", "tokens", "constant"])
def test_packed_documents_are_sequences_like_any(correction, importance, normalize):
    options = {
        "importance_level": importance,
        "beta": 0.1,
        "entropy_coef": 0.01,
        "clip_low": 0.1,
        "clip_high": 0.15,
        "delta": 1.4,
    }
    options |= {"correction": correction, "correction_min": 0.8, "correction_max": 1.2, "normalize": normalize}
    options |= {"max_tokens": 6} if normalize == "constant" else {}
    objective = get_objective({"name": "grpo", "packed": True, **options})

    def expected(logits: Tensor, batch: dict[str, Tensor]) -> Tensor:
        wanted, total = shift_labels(batch["labels"]), logits.new_zeros(())
        log_probs = logits.log_softmax(-1)
        entropy = -(log_probs.exp() * log_probs).sum(-1)
        for row in range(len(logits)):
            for document in (slice(0, 5), slice(5, None)):
                kept = wanted[row, document] != -100
                if not kept.any():
                    continue
                own = log_probs[row, document][kept].gather(-1, wanted[row, document][kept][:, None])[:, 0]
                old, sampling, reference, advantages = (
                    batch[name][row, document][kept]
                    for name in ("old_log_probs", "sampling_log_probs", "reference_log_probs", "advantages")
                )
                ratio = (own - old).exp() if importance == "token" else (own - old).mean().exp().expand(own.shape)
                clipped = ratio.clamp(0.9, 1.15)
                each = -torch.min(ratio.clamp(max=1.4) * advantages, clipped * advantages)
                each = each * corrected(old - sampling)
                each = each + 0.1 * ((reference - own).exp() - (reference - own) - 1)
                each = each - 0.01 * entropy[row, document][kept]
                total = total + each.sum() / {"tokens": 1, "sequence": len(own), "constant": 6}[normalize]
        return total

    def corrected(difference: Tensor) -> Tensor | float:
        if correction is None:
            return 1.0
        factor = (difference.sum() if correction.startswith("sequence") else difference).exp()
        inside = (factor >= 0.8) & (factor <= 1.2)
        return factor.clamp(0.8, 1.2) if correction.endswith("truncate") else torch.where(inside, factor, 0.0)

    batch = build_microbatch(objective)
    equal(objective, batch, expected)
    kept = shift_labels(batch["labels"]) != -100
    documents = int(kept[:, :5].any(1).sum() + kept[:, 5:].any(1).sum())
    assert objective.count(batch) == (int(kept.sum()) if normalize == "tokens" else documents)


def test_an_unknown_probability_of_another_engine_corrects_nothing():
    cell = {"name": "grpo", "correction": "token_truncate"}
    batch = build_microbatch(get_objective(cell))
    known = batch | {"sampling_log_probs": batch["old_log_probs"].clone()}
    batch["sampling_log_probs"][:] = float("nan")
    torch.testing.assert_close(evaluate_objective(cell, batch), evaluate_objective(cell, known), rtol=0, atol=0)


def test_log1mexp_keeps_its_digits():
    values = torch.tensor([-1e-12, -1e-3, -0.5, -0.7, -5.0, -60.0], dtype=torch.float64, requires_grad=True)
    found = log1mexp(values)
    known = torch.tensor(
        [math.log(-math.expm1(each)) for each in values.tolist()[:5]] + [-math.exp(-60)], dtype=torch.float64
    )
    torch.testing.assert_close(found.detach(), known, rtol=1e-14, atol=0)
    (gradient,) = torch.autograd.grad(found.sum(), values)
    torch.testing.assert_close(gradient, -1 / torch.expm1(-values.detach()), rtol=1e-12, atol=0)


# -- heads of another kind


@pytest.mark.parametrize(("name", "shape"), [("value", (4, 9, 2)), ("value", (4, 1)), ("reward", (4, 9, 1))])
def test_a_head_of_another_kind_is_reported(name, shape):
    batch = build_microbatch(get_objective(name)) | {"logits": torch.zeros(shape)}
    with pytest.raises(ModelError, match=f"objective '{name}' needs a head over"):
        evaluate_objective(name, batch)


# -- by name


def refusal(value: Any, registry: Registry | None = None) -> str:
    with pytest.raises(ConfigError) as caught:
        get_objective(value, registry)
    return str(caught.value)


def test_objectives_are_listed_and_found_by_name_with_options():
    names = list_objectives()
    assert {"cross_entropy", "dpo", "kto", "orpo", "simpo", "grpo", "ppo", "distill", "unlikelihood"} < set(names)
    for name, cls in names.items():
        assert get_objective(name) == cls() == get_objective({"name": name})
        assert all(field.description for field in cls.model_fields.values()), name
        assert cls.__doc__
    assert get_objective({"name": "dpo", "beta": 0.3}).beta == 0.3
    assert get_objective(refusal) is refusal
    for cell in CELLS:
        objective = get_objective(cell)
        assert get_objective({"name": objective.name, **objective.to_dict()}) == objective


@pytest.mark.parametrize(
    ("value", "parts"),
    [
        ("dop", ["no objective 'dop'", "Did you mean 'dpo'?", "cross_entropy, distill, dpo, grpo"]),
        (3, ["3 is no objective", "`name`", "cross_entropy"]),
        ({"beta": 1.0}, ["{'beta': 1.0} is no objective"]),
        ({"name": "dpo", "bta": 1.0}, ["objective 'dpo'", "bta: unknown key", "Did you mean 'beta'?", "Allowed: beta"]),
        ({"name": "dpo", "beta": -1.0}, ["objective 'dpo'", "beta: ", "greater than 0", "got -1.0"]),
        ({"name": "dpo", "beta": "1"}, ["beta: ", "got '1'"]),
        ({"name": "dpo", "loss": "sigmod"}, ["loss: ", "'sigmoid', 'robust'", "got 'sigmod'"]),
        ({"name": "dpo", "loss": "ipo", "label_smoothing": 0.1}, ["label_smoothing=0.1 has no effect on loss='ipo'"]),
        ({"name": "dpo", "loss": "exo_pair"}, ["set it above 0"]),
        ({"name": "grpo", "normalize": "constant"}, ["max_tokens=None", "Set both, or neither"]),
        ({"name": "grpo", "max_tokens": 5}, ["normalize='sequence' with max_tokens=5"]),
        ({"name": "grpo", "delta": 1.1}, ["delta=1.1 is not above 1 + clip_high = 1.2"]),
        ({"name": "grpo", "correction_min": 4.0}, ["correction_min=4 is above correction_max=3"]),
        ({"name": "distill", "temperature": 2.0}, ["temperature=2", "tail='renormalize'"]),
        (
            {"name": "cross_entropy", "extra_sums": ["accuracy"]},
            ["extra_sums.0: ", "'correct' or 'entropy'", "got 'accuracy'"],
        ),
        ("os.system", ["'os.system' is no objective", "import paths are not taken", "register_objectives"]),
        ({"name": "meshwright.objectives.DPO", "beta": 0.2}, ["is no objective", "import paths are not taken"]),
    ],
)
def test_what_is_no_objective_is_refused(value, parts):
    text = refusal(value)
    assert all(part in text for part in parts), text


class Scaled(ObjectiveConfig):
    name: ClassVar[str] = "scaled"
    factor: float = 1.0

    def __call__(self, tokens: Tokens, batch: BatchColumns) -> Tensor:
        return -self.factor * tokens.log_probs.sum()


class _Plugin:
    def __init__(self, *objectives: Any) -> None:
        self.objectives = list(objectives)

    @hookimpl
    def register_objectives(self) -> list[Any]:
        return self.objectives


def registry_with(*plugins: _Plugin) -> Registry:
    registry = Registry([])
    registry.register(objectives_plugin, name="objectives")
    for index, plugin in enumerate(plugins):
        registry.register(plugin, name=f"plugin{index}")
    assert not registry.failures
    return registry


def test_a_plugins_objectives_are_found_by_name_with_options():
    registry = registry_with(_Plugin(Scaled))
    assert list(list_objectives(registry)) == [*list_objectives(), "scaled"]
    assert get_objective({"name": "scaled", "factor": 3.0}, registry) == Scaled(factor=3.0)
    assert "fctor: unknown key. Did you mean 'factor'?" in refusal({"name": "scaled", "fctor": 1.0}, registry)
    assert "Did you mean 'scaled'?" in refusal("scale", registry)
    assert "there is no objective 'scaled'" in refusal("scaled")


@pytest.mark.parametrize(
    ("plugins", "text"),
    [
        ([_Plugin(CrossEntropy)], "two plugins bring an objective 'cross_entropy'; one is plugin0. Uninstall one"),
        ([_Plugin(Scaled), _Plugin(Scaled)], "two plugins bring an objective 'scaled'; one is plugin"),
        (
            [_Plugin(len)],
            "plugin plugin0 brings <built-in function len>, which is no meshwright.plugin.ObjectiveConfig",
        ),
        ([_Plugin(ObjectiveConfig)], "which is no meshwright.plugin.ObjectiveConfig"),
    ],
)
def test_what_a_plugin_must_not_register_is_refused(plugins, text):
    assert text in refusal("dpo", registry_with(*plugins))


# -- in a step of one process


@pytest.fixture(scope="module")
def world():
    with mw.open_world("cpu") as opened:
        yield opened


def parallelized(world, model):
    stack, degrees = mw.resolve("single", mw.MeshSizes(), 1)
    manager = stack.build(mw.Mesh(degrees, world))
    manager.parallelize(model)
    return manager


def stepped(cell: dict[str, Any]) -> Any:
    is_first = cell in ({"name": "cross_entropy"}, {"name": "kto"}) or cell.get("correction") == "sequence_mask"
    return pytest.param(cell, marks=() if is_first else pytest.mark.slow, id=format_cell_id(cell))


@pytest.mark.parametrize("cell", [stepped(cell) for cell in CELLS if cell["name"] not in ("value", "reward")])
def test_a_step_has_the_objectives_value_and_its_gradient(cell, world):
    objective = get_objective(cell)
    model, plain = build_tiny_model(), build_tiny_model()
    manager = parallelized(world, model)
    manager.build_optimizer(mw.optimizer_factory(mw.OptimizerConfig()))
    microbatches, total, count = [], torch.zeros((), dtype=torch.float64), 0
    for seed in range(2):
        batch = build_microbatch(objective, seed=seed)
        del batch["logits"]
        batch["input_ids"] = torch.randint(V, (4, S), generator=torch.Generator().manual_seed(seed))
        microbatches.append(batch)
        columns = {name: each for name, each in batch.items() if name not in ("input_ids", "labels", "position_ids")}
        logits = plain(input_ids=batch["input_ids"], position_ids=batch["position_ids"], use_cache=False).logits
        tokens = Tokens.from_logits(logits, batch["labels"], position_ids=batch["position_ids"])
        total, count = total + objective(tokens, columns)[0], count + objective.count(batch)
    (total / count).backward()
    num_tokens = manager.begin_step_sync(microbatches, objective=objective)
    loss = manager.forward_backward(microbatches, num_tokens=num_tokens, objective=objective)
    assert int(num_tokens) == count
    torch.testing.assert_close(loss, (total / count).detach(), rtol=1e-10, atol=1e-12)
    for (name, parameter), wanted in zip(model.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, wanted.grad, rtol=1e-9, atol=1e-11, msg=name)


# -- docs/reference/objectives.md

PAGE = (Path(__file__).parents[3] / "docs" / "reference" / "objectives.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)


def run_block(source: str) -> dict[str, list[float]]:
    torch.manual_seed(0)
    names: dict[str, Any] = {}
    exec(source.replace("open_world()", "open_world('cpu')"), names)
    return {name: names[name] for name in ("accuracies", "losses") if name in names}


@pytest.mark.slow
def test_the_blocks_of_the_page_train():
    preferences, own = (pool(2).run(run_block, block)[0] for block in BLOCKS)
    assert preferences["accuracies"][0] < preferences["accuracies"][-1] == 1.0
    assert own["losses"][-1] < own["losses"][0] / 2


@pytest.mark.parametrize("name", list_objectives())
def test_the_table_of_the_page_has_every_column_and_option(name):
    (row,) = re.findall(rf"^\| `{name}` \|.*$", PAGE, flags=re.MULTILINE)
    _, _, _, columns, options, divided, _ = row.split("|")
    cells = [get_objective(cell) for cell in CELLS if cell["name"] == name]
    taken = {column.name for objective in cells for column in objective.accepted_columns}
    assert set(re.findall(r"`(\w+)`", columns)) == taken
    assert {each for each in re.findall(r"`(\w+)`", columns) if f"[`{each}`]" not in columns} == set.intersection(
        *(set(objective.columns) for objective in cells)
    )
    if "those of" not in options:
        assert set(re.findall(r"`(\w+)`", options)) == set(list_objectives()[name].model_fields)
    assert divided.strip()


@pytest.mark.slow
def test_a_short_version_of_the_example_learns_to_copy():
    example = Path(__file__).parents[3] / "examples" / "grpo.py"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", example]
    run = subprocess.run([*command, "--digits", "1"], capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr
    assert "or more in the last five rollouts" in run.stdout
