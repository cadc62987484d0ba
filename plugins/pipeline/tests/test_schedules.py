"""The orders of all schedules: against torch's, against theory, and run without anything that computes."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from fractions import Fraction

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch_orders import torch_orders

from meshwright import ConfigError
from meshwright_pipeline.schedule.actions import (
    COMPUTE_KINDS,
    Action,
    ActionKind,
    P2PBatch,
    Schedule,
    add_communication,
    bubble_fraction,
    check_actions,
    compute_timeline,
    count_peak_live_microbatches,
)
from meshwright_pipeline.schedule.specs import (
    SCHEDULES,
    build_schedule,
    find_schedule_spec,
    read_schedule_csv,
    read_schedule_size,
)

F, B, I, W = COMPUTE_KINDS  # noqa: E741


def printed(schedule):
    return tuple(tuple(str(action) for action in order) for order in schedule.actions_by_rank)


def validate(schedule):
    check_actions(schedule, lambda rank, index: f"action {index} of rank {rank}")
    compute_timeline(schedule)


def actions(text):
    """ "0F0 1B0" as actions."""
    return tuple(Action(ActionKind(cell[1]), int(cell[0]), int(cell[2])) for cell in text.split())


@st.composite
def schedules(draw):
    rule = draw(st.sampled_from(list(SCHEDULES.values())))
    ranks = draw(st.integers(1, 8))
    chunks = draw(st.integers(rule.min_chunks, rule.max_chunks or 4))
    return build_schedule(
        rule.name, num_ranks=ranks, num_stages=ranks * chunks, num_microbatches=draw(st.integers(1, 24))
    )


# -- orders


@pytest.mark.parametrize("name", SCHEDULES)
def test_orders_are_those_of_torch_wherever_torch_takes_the_numbers(name):
    rule, compared, only_here = SCHEDULES[name], 0, 0
    for ranks in (1, 2, 3, 4, 8):
        for chunks in range(rule.min_chunks, (rule.max_chunks or 3) + 1):
            for microbatches in range(1, 19):
                sizes = {"num_ranks": ranks, "num_stages": ranks * chunks, "num_microbatches": microbatches}
                ours = printed(build_schedule(name, **sizes))
                try:
                    theirs = torch_orders(name, **sizes)
                except ValueError:
                    only_here += 1
                    continue
                if name == "1F1B":
                    # Torch prints the last rank's forwards from 1 on, where it runs them from 0 on.
                    shifted = {f"{ranks - 1}F{number + 1}": f"{ranks - 1}F{number}" for number in range(microbatches)}
                    theirs = (*theirs[:-1], tuple(shifted.get(each, each) for each in theirs[-1]))
                assert ours == theirs, (name, sizes)
                compared += 1
    assert compared > 50
    # Fewer microbatches than stages, or a number that does not divide into rounds.
    assert (only_here > 0) == (name in ("1F1B", "Interleaved1F1B", "InterleavedZeroBubble", "DualPipeV"))


@given(schedules())
@settings(max_examples=100, deadline=None)
def test_each_schedule_computes_everything_once_on_the_rank_of_its_stage_and_finishes(schedule):
    validate(schedule)
    held = [schedule.stages_on_rank(rank) for rank in range(schedule.num_ranks)]
    assert {len(stages) for stages in held} == {schedule.num_stages // schedule.num_ranks}
    if find_schedule_spec(schedule.name).is_v_shaped:
        assert all(sum(stages) == schedule.num_stages - 1 for stages in held)


def test_unknown_schedule_names_the_nearest_and_all():
    with pytest.raises(ConfigError, match=r"'interleavd1f1b' is unknown. Did you mean .*Allowed.*GPipe.*DualPipeV"):
        find_schedule_spec("interleavd1f1b")


@pytest.mark.parametrize(
    ("name", "sizes", "text"),
    [
        ("1f1b", (4, 8, 4), "1F1B needs exactly one stage on each rank, but 8 stages on 4 ranks are 2 each.* 4 stages"),
        ("gpipe", (4, 3, 4), "0.75 each. Split the model into 4 stages"),
        ("interleaved1f1b", (4, 4, 4), "2 or more stages on each rank.* into 8 stages"),
        ("dualpipev", (2, 2, 4), "exactly 2 stages on each rank.* into 4 stages"),
        ("1f1b", (2, 2, 0), "microbatches=0 must be 1 or more"),
        ("1f1b", (0, 2, 1), "ranks=0 must be 1 or more"),
    ],
)
def test_numbers_that_a_schedule_does_not_take(name, sizes, text):
    ranks, stages, microbatches = sizes
    with pytest.raises(ConfigError, match=text):
        build_schedule(name, num_ranks=ranks, num_stages=stages, num_microbatches=microbatches)


# -- time


@pytest.mark.parametrize(
    ("names", "chunks"),
    [(["GPipe", "1F1B"], 1), (["Interleaved1F1B", "LoopedBFS"], 2), (["Interleaved1F1B", "LoopedBFS"], 3)],
)
@pytest.mark.parametrize(("ranks", "microbatches"), [(1, 3), (2, 4), (3, 9), (4, 16), (8, 24)])
def test_the_bubble_is_that_of_theory_divided_by_the_chunks(names, chunks, ranks, microbatches):
    for name in names:
        idle = bubble_fraction(
            build_schedule(name, num_ranks=ranks, num_stages=ranks * chunks, num_microbatches=microbatches)
        )
        # In parts of the time in which a rank works, (p - 1) / m without chunks.
        assert idle / (1 - idle) == pytest.approx((ranks - 1) / microbatches / chunks, abs=1e-12)


@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 8), (4, 16), (8, 32), (3, 7)])
def test_zero_bubble_v_waits_only_for_the_first_and_last_microbatch_to_pass(ranks, microbatches):
    v_shaped = build_schedule("zbv", num_ranks=ranks, num_stages=2 * ranks, num_microbatches=microbatches)
    end = max(times[-1][2] for times in compute_timeline(v_shaped))
    # A rank works for 6 on each microbatch; rank r begins r later and ends as much earlier as others end later.
    assert end == 6 * microbatches + ranks - 1
    assert bubble_fraction(v_shaped) == pytest.approx((ranks - 1) / (6 * microbatches + ranks - 1))
    busy_from_start_to_end = [
        sum(stop - start for _, start, stop in times) == times[-1][2] - times[0][1]
        for times in compute_timeline(v_shaped)
    ]
    assert all(busy_from_start_to_end)


def test_stages_and_kinds_have_costs_of_their_own():
    schedule = build_schedule("gpipe", num_ranks=2, num_stages=2, num_microbatches=4)
    times = compute_timeline(schedule, stage_costs=[1.0, 3.0])
    # Stage 1 starts after one forward, and its backwards set the pace to the end.
    assert times[1][-1][2] == 1 + 4 * 9
    assert times[0][-1][2] == 1 + 4 * 9 + 2
    assert bubble_fraction(schedule, stage_costs=[1.0, 3.0]) == pytest.approx(float(1 - Fraction(12 + 36, 2 * 39)))
    alone = build_schedule("1f1b", num_ranks=1, num_stages=1, num_microbatches=2)
    assert compute_timeline(alone, {F: 2.0, B: 5.0})[0][-1][2] == 14


@pytest.mark.parametrize(
    ("name", "chunks", "peaks"),
    [
        ("GPipe", 1, (16, 16, 16, 16)),
        ("1F1B", 1, (4, 3, 2, 1)),
        ("Interleaved1F1B", 2, (11, 9, 7, 5)),
        ("LoopedBFS", 2, (32, 32, 32, 32)),
        ("InterleavedZeroBubble", 2, (8, 8, 8, 8)),
        ("ZBVZeroBubble", 2, (8, 8, 8, 8)),
        ("DualPipeV", 2, (9, 9, 9, 9)),
    ],
)
def test_peak_of_live_microbatches(name, chunks, peaks):
    assert (
        count_peak_live_microbatches(build_schedule(name, num_ranks=4, num_stages=4 * chunks, num_microbatches=16))
        == peaks
    )


# -- communication


def transfers(schedule):
    """What must cross from one rank to another: the send on one side and the receive on the other."""
    found = set()
    for stage in range(schedule.num_stages - 1):
        if schedule.placement[stage] != schedule.placement[stage + 1]:
            for microbatch in range(schedule.num_microbatches):
                found.add(
                    (Action(ActionKind.SEND_F, stage, microbatch), Action(ActionKind.RECV_F, stage + 1, microbatch))
                )
                found.add(
                    (Action(ActionKind.SEND_B, stage + 1, microbatch), Action(ActionKind.RECV_B, stage, microbatch))
                )
    return found


def flat(order):
    """The actions of an order, those of exchanges one by one."""
    return [action for each in order for action in (each.transfers if isinstance(each, P2PBatch) else (each,))]


def execute(schedule, orders, rng):
    """Run ranks in a random order, each send waiting until its receiver is there too (rendezvous).

    Checks on the way that what an action needs has been computed on its rank or received there.
    """
    last = schedule.num_stages - 1
    at = [0] * schedule.num_ranks
    here = [set() for _ in range(schedule.num_ranks)]
    met = set()

    def current(rank):
        return orders[rank][at[rank]] if at[rank] < len(orders[rank]) else None

    def compute(rank, action):
        stage, number = action.stage, action.microbatch
        needs = set()
        if action.kind is F and stage:
            needs = {("F", stage - 1, number)}
        elif action.kind in (B, I):
            needs = {("F", stage, number)} | ({("B", stage + 1, number)} if stage < last else set())
        elif action.kind is W:
            needs = {("B", stage, number)}
        assert needs <= here[rank], f"{action} runs without {needs - here[rank]}"
        here[rank].add(("F" if action.kind is F else "W" if action.kind is W else "B", stage, number))

    def step(rank):
        mine = current(rank)
        if isinstance(mine, Action):
            compute(rank, mine)
            at[rank] += 1
            return True
        theirs = current(mine.peer)
        if not isinstance(theirs, P2PBatch) or theirs.peer != rank:
            return False
        # What is sent must have been there before: nothing in an exchange waits for the rest of it.
        before = {each: set(here[each]) for each in (rank, mine.peer)}
        for one, other in zip(mine.transfers, theirs.transfers, strict=True):
            sends = one.kind in (ActionKind.SEND_F, ActionKind.SEND_B)
            assert schedule.placement[one.peer_stage] == mine.peer
            giver, sent, taker, received = (rank, one, mine.peer, other) if sends else (mine.peer, other, rank, one)
            kind = ActionKind[sent.kind.replace("SEND", "RECV")]
            assert received == Action(kind, sent.peer_stage, sent.microbatch)
            value = (sent.kind[-1], sent.stage, sent.microbatch)
            assert value in before[giver], f"{sent} before its value is there"
            here[taker].add(value)
            met.add((sent, received))
        at[rank] += 1
        at[mine.peer] += 1
        return True

    while any(current(rank) for rank in range(schedule.num_ranks)):
        ready = [rank for rank in range(schedule.num_ranks) if current(rank)]
        rng.shuffle(ready)
        assert any(step(rank) for rank in ready), f"deadlock at {[str(current(rank)) for rank in ready]}"
    return met


@given(schedules(), st.randoms(use_true_random=False))
@settings(max_examples=120, deadline=None)
def test_transfers_are_complete_and_never_deadlock_even_where_sends_block(schedule, rng):
    orders = add_communication(schedule)
    assert execute(schedule, orders, rng) == transfers(schedule)
    computing = tuple(tuple(each for each in order if isinstance(each, Action)) for order in orders)
    assert computing == schedule.actions_by_rank


def moments(order):
    """What a rank does, each time with what is there then: of each stage, inputs and gradients that have come, and
    microbatches that wait for their backward, and for that of their weights."""
    steps = [each.transfers if isinstance(each, P2PBatch) else (each,) for each in order]
    comes = {ActionKind.RECV_F: "input", ActionKind.RECV_B: "gradient"}
    received = {(comes[each.kind], each.stage) for step in steps for each in step if each.kind in comes}
    changes = {
        ActionKind.RECV_F: {"input": 1},
        ActionKind.RECV_B: {"gradient": 1},
        F: {"input": -1, "backward": 1},
        B: {"gradient": -1, "backward": -1},
        I: {"gradient": -1, "backward": -1, "weights": 1},
        W: {"weights": -1},
    }
    held, found = Counter(), Counter()
    for step in steps:
        found[tuple((each.kind, each.stage) for each in step), frozenset((+held).items())] += 1
        for each in step:
            for name, change in changes.get(each.kind, {}).items():
                if name in ("backward", "weights") or (name, each.stage) in received:
                    held[name, each.stage] += change
    assert not any(held.values())
    return found


@pytest.mark.parametrize("ranks", [2, 3, 5, pytest.param(8, marks=pytest.mark.slow)])
@pytest.mark.parametrize("chunks", [1, 2, 3])
@pytest.mark.parametrize("name", [name for name in SCHEDULES if name not in ("GPipe", "LoopedBFS")])
def test_further_microbatches_repeat_what_a_steady_schedule_does(name, chunks, ranks):
    rule = SCHEDULES[name]
    if not rule.min_chunks <= chunks <= (rule.max_chunks or chunks):
        return
    least, step = rule.steady_state(ranks)
    made = [
        build_schedule(name, num_ranks=ranks, num_stages=ranks * chunks, num_microbatches=least + n * step)
        for n in range(4)
    ]
    for few, more, most, last in zip(*(map(moments, add_communication(each)) for each in made), strict=True):
        # Nothing is done with more or less at hand, only more often; each time by the same.
        assert few.keys() == more.keys() == most.keys() == last.keys()
        assert few <= more
        assert more - few == most - more == last - most


@given(schedules(), st.randoms(use_true_random=False))
@settings(max_examples=60, deadline=None)
def test_any_order_that_finishes_gets_transfers_that_work(schedule, rng):
    assume(schedule.num_ranks > 1 and schedule.num_microbatches > 1)
    # Exchange neighbours at random wherever the schedule still finishes.
    orders = [list(order) for order in schedule.actions_by_rank]
    for _ in range(10):
        rank = rng.randrange(schedule.num_ranks)
        index = rng.randrange(len(orders[rank]) - 1)
        orders[rank][index : index + 2] = reversed(orders[rank][index : index + 2])
        try:
            compute_timeline(replace(schedule, actions_by_rank=tuple(map(tuple, orders))))
        except ConfigError:
            orders[rank][index : index + 2] = reversed(orders[rank][index : index + 2])
    changed = replace(schedule, actions_by_rank=tuple(map(tuple, orders)))
    assert execute(changed, add_communication(changed), rng) == transfers(schedule)


# -- validation and files


@pytest.mark.parametrize(
    ("first", "second", "text"),
    [
        ("0F0 0B0 0B0", "1F0 1B0", r"action 2 of rank 0 \(0B0\): this is already computed by action 1 of rank 0"),
        ("0F0 0I0", "1F0 1B0", "rank 0: 0W0 missing"),
        ("0F0 0B0", "1B0", "rank 1: 1F0 missing"),
        ("0F0 0B0", "", "rank 1: 1F0 and 1I0 and 1W0 missing"),
        ("0F0 0B0 0F1", "1F0 1B0", "microbatch 1 is not one of 1 microbatchs?, 0 to 0"),
        ("0F0 0B0 2F0", "1F0 1B0", "stage 2 is not one of 2 stages, 0 to 1"),
        ("0F0 1F0 0B0", "1B0", r"action 1 of rank 0 \(1F0\): stage 1 is on rank 1"),
        ("0B0 0F0", "1F0 1B0", "mine cannot finish: rank 0 waits at 0B0 for 0F0 and 1I0; rank 1 waits at 1F"),
    ],
)
def test_what_is_wrong_with_a_schedule_is_named(first, second, text):
    with pytest.raises(ConfigError, match=text):
        validate(Schedule("mine", 2, 2, 1, (0, 1), (actions(first), actions(second))))


def write(path, schedule, *, bubbles=True):
    """A file in the format of torch, with empty cells where a rank waits."""
    rows = []
    for times in compute_timeline(schedule):
        row, now = [], 0.0
        for action, start, end in times:
            row += [""] * int(start - now) * bubbles + [str(action)]
            now = end
        rows.append(",".join(row))
    path.write_text("\n".join(rows) + "\n", encoding="utf-8")


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_schedule_in_a_file_is_the_same_schedule(name, tmp_path):
    stages = 3 * SCHEDULES[name].min_chunks
    schedule = build_schedule(name, num_ranks=3, num_stages=stages, num_microbatches=7)
    write(tmp_path / "own.csv", schedule)
    read = read_schedule_csv(tmp_path / "own.csv", num_ranks=3, num_stages=stages, num_microbatches=7)
    assert (read.actions_by_rank, read.placement) == (schedule.actions_by_rank, schedule.placement)
    assert read_schedule_size(tmp_path / "own.csv") == (stages, 7)


def test_cells_that_overlap_forward_and_backward_run_one_after_the_other(tmp_path):
    path = tmp_path / "own.csv"
    path.write_text("0F0, ,(0F1;0B0)OVERLAP_F_B,0B1\n", encoding="utf-8")
    (order,) = read_schedule_csv(path, num_ranks=1, num_stages=1, num_microbatches=2).actions_by_rank
    assert order == actions("0F0 0F1 0B0 0B1")


def test_a_file_may_place_stages_as_it_likes(tmp_path):
    path = tmp_path / "own.csv"
    path.write_text("0F0,1F0,,,1B0,0B0\n,,2F0,2B0\n", encoding="utf-8")
    schedule = read_schedule_csv(path, num_ranks=2, num_stages=3, num_microbatches=1)
    assert schedule.placement == (0, 0, 1)
    orders = add_communication(schedule)
    # Nothing is sent between stages 0 and 1, which are on one rank.
    assert [str(each) for each in flat(orders[0])] == ["0F0", "1F0", "1SEND_F0", "1RECV_B0", "1B0", "0B0"]


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("0F0,0X0,0B0\n1F0,1B0\n", "row 1, cell 2: '0X0' is not an action"),
        ("0F0,0SEND_F0,0B0\n1F0,1B0\n", r"row 1, cell 2 \(0SEND_F0\): a schedule has only compute actions"),
        ("0F0,,0B0\n1F0,1B0,,1B0\n", r"row 2, cell 4 \(1B0\): this is already computed by row 2, cell 2"),
        ("0F0,0B0,,1F0\n1F0,1B0\n", r"row 2, cell 1 \(1F0\): stage 1 is on rank 0; it cannot be on two"),
        ("0F0,0B0,0F1\n1F0,1B0\n", r"row 1, cell 3 \(0F1\): microbatch 1 is not one of"),
        ("0F0,0B0\n", "has 1 rows, but pp_size=2"),
        ("0F0,0B0\n2F0,2B0\n", "has no action of stage 1 of 2"),
        ("0B0,0F0\n1F0,1B0\n", "cannot finish: rank 0 waits at 0B0"),
    ],
)
def test_what_is_wrong_in_a_file_is_named_with_row_and_cell(text, error, tmp_path):
    path = tmp_path / "own.csv"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=error) as raised:
        read_schedule_csv(path, num_ranks=2, num_stages=2, num_microbatches=1)
    assert "own.csv" in str(raised.value)


def test_files_that_cannot_be_read(tmp_path):
    with pytest.raises(ConfigError, match=r"none.csv' cannot be read: .*No such file"):
        read_schedule_size(tmp_path / "none.csv")
    (tmp_path / "empty.csv").write_text(",,\n", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"empty.csv' has no action"):
        read_schedule_size(tmp_path / "empty.csv")
