"""Log lines and the progress bar show epochs, times, and the tokens per second of all and of supervised tokens."""

from __future__ import annotations

import io
from dataclasses import replace

import numpy as np
import pytest
from rich.console import Console

from meshwright.events.step import StepResult
from meshwright_run.data.documents import TokenizedDocuments
from meshwright_run.data.packing import ConcatDataset, build_row_dataset
from meshwright_run.data.train_sampler import DataShard, TrainSampler
from meshwright_run.loop_setup import InputTokenCounter
from meshwright_run.metrics_report import MetricsReporter, read_metrics
from meshwright_run.step_text import StepFormatter

RESULT = StepResult(1, 300, 4.0, 0.5, 1e-3, 100, 0.5, 0, num_input_tokens=400)


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def report(tmp_path, console: Console, formatter: StepFormatter, clock: Clock) -> None:
    with MetricsReporter(tmp_path / "m.jsonl", log_every=1, console=console, formatter=formatter) as reporter:
        for step in range(1, 4):
            clock.now += 10.0 if step == 1 else 2.0
            reporter.on_step_end(replace(RESULT, step=step))


def test_each_log_line_shows_epochs_times_and_both_rates(tmp_path):
    clock, text = Clock(), io.StringIO()
    report(tmp_path, Console(file=text, width=80), StepFormatter(16, 1600, clock=clock), clock)
    rest = "loss 4.000000  norm 0.500  lr 1.00e-03  800 tokens/s (200 supervised)"
    assert text.getvalue().splitlines() == [
        f"step 1/300  0:00:10<?  epoch 0.01/3.00  {rest}",
        # The first step, which is slower, does not count for the remaining time.
        f"step 2/300  0:00:12<0:09:56  epoch 0.02/3.00  {rest}",
        f"step 3/300  0:00:14<0:09:54  epoch 0.03/3.00  {rest}",
    ]
    assert [each.num_input_tokens for each in read_metrics(tmp_path / "m.jsonl", last_step=9, num_steps=300)] == [
        400
    ] * 3


@pytest.mark.parametrize("width", [80, 200])
def test_the_progress_bar_shows_the_same_numbers_after_the_times(width, tmp_path):
    clock, text = Clock(), io.StringIO()
    console = Console(file=text, width=width, force_terminal=True, color_system=None, legacy_windows=False)
    report(tmp_path, console, StepFormatter(16, 1600, clock=clock), clock)
    shown = text.getvalue()
    assert "3/300" in shown
    assert "0:00:00 <" in shown
    assert "epoch 0.03/3.00" in shown
    assert ("800 tokens/s (200 supervised)" in shown) == (width == 200)


@pytest.mark.parametrize(
    ("changes", "options", "rate"),
    [
        ({"num_tokens": 398}, {}, "800 tokens/s"),
        ({"num_tokens": 3}, {"has_token_loss": False}, "800 tokens/s"),
        ({"num_input_tokens": None}, {}, "200 tokens/s"),
    ],
)
def test_the_supervised_rate_is_shown_where_it_differs(changes, options, rate):
    line = StepFormatter(**options).format_numbers(replace(RESULT, **changes))
    assert line == f"loss 4.000000  norm 0.500  lr 1.00e-03  {rate}"


def build_documents(group_size: int = 1) -> TokenizedDocuments:
    lengths = np.array([3, 8, 5, 1, 7, 4, 2, 6])
    tokens = np.arange(1, lengths.sum() + 1).astype(np.uint16)
    return TokenizedDocuments(tokens, np.cumsum(lengths), group_size=group_size)


@pytest.mark.parametrize(("packing", "group_size"), [("stream", 1), ("documents", 1), ("none", 1), ("none", 2)])
def test_input_tokens_are_those_of_the_global_batch_without_padding(packing, group_size):
    rows = ConcatDataset([build_row_dataset(build_documents(group_size), packing, 8)] * 2)
    ranks = [TrainSampler([rows], DataShard(rank, 2, 2), batch_size=4, seed=0) for rank in range(2)]
    counter = InputTokenCounter(ranks[0], 0)
    for step in range(6):
        # Token 0 is only used for padding.
        expected = sum(int((batch["input_ids"] != 0).sum()) for each in ranks for batch in each.read_microbatches(step))
        ranks[0].read_microbatches(step + 1)  # the next step is read ahead
        with counter.step_context(step):
            pass
        assert counter.process_result(RESULT).num_input_tokens == expected
