"""Jobs of published runs: each row is planned or says why not, and holds what the code that ran holds."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from support.measurements import OperationCounter

from meshwright.manager import chunked_cross_entropy
from meshwright.model.layout import infer_layout
from meshwright.model.recompute import checkpoint_blocks
from meshwright_plan.fake_world import fake_world
from meshwright_plan.meter import StepMeter
from meshwright_testing.models import build_tiny_model

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import published_code as code  # noqa: E402
import published_jobs as jobs  # noqa: E402

ROWS = json.loads((BENCHMARKS / "published.json").read_text())


@pytest.mark.parametrize("row", ROWS)
def test_each_row_has_a_job_or_a_reason(row):
    if (why := jobs.left_out(row)) is not None:
        assert len(why) > 20
        return
    depths = jobs.traced_depths(row)
    assert depths[-1] <= jobs.blocks(row)
    job = jobs.job_of(row, depths[0])
    assert job.degrees.world_size <= (jobs.gpus(row) or 0)
    if jobs.is_megatron(row):
        batch = row["args"].get("global-batch-size", jobs.BATCH_AT_FIRST)
        assert job.num_microbatches * job.micro_batch_size * job.seq_len * job.degrees.dp == batch * row["seq"]
    else:
        assert (job.degrees.world_size, job.micro_batch_size) == (row["gpus"], row["local_batch"])


ROW = {"model": "", "layout": {"tp": 1, "pp": 1}, "activation_checkpointing": "selective_op", "source": "202412"}


def test_the_last_product_of_a_block_is_held_by_theirs_and_never_computed_again_by_ours():
    counts = []
    for checkpoints in (False, True):
        model = build_tiny_model()
        with code.running(ROW), OperationCounter() as counting:
            if checkpoints:
                checkpoint_blocks(model, infer_layout(model), "selective")
            model(input_ids=torch.zeros(1, 8, dtype=torch.int64), use_cache=False).logits.sum().backward()
        counts.append(counting.counts["aten.mm.default"])
    # Of seven products, theirs hold the first, third, fifth and seventh; ours the second, fourth and sixth.
    assert counts[1] - counts[0] == 3 * 3


@pytest.mark.parametrize(
    ("source", "compiles", "expected"),
    [
        # Logits and their gradient in bfloat16, and what lies between in float32, of so many bytes for each entry.
        ("@0413364", False, 3 * 2),
        ("202412", True, 3 * 4),
        ("2025-06", True, 2 * 2),
        ("2025-06", False, 3 * 4),
    ],
)
def test_losses_hold_what_theirs_hold(source, compiles, expected):
    with fake_world(0, 1), code.running({**ROW, "source": source, "compile": compiles}):
        hidden = torch.empty(4096, 8, dtype=torch.bfloat16, requires_grad=True)
        weight = torch.empty(8, 4096, dtype=torch.bfloat16)
        targets = torch.zeros(1, 4096, dtype=torch.int64)
        meter = StepMeter()
        meter.track([hidden, weight, targets])
        with meter:
            meter.begin_step()
            logits = (hidden @ weight)[None]
            loss = chunked_cross_entropy.sum_target_loss(logits, targets)
            del logits
            loss.backward()
    assert meter.peak / 4096**2 == pytest.approx(expected, rel=0.02)
