"""Build sentences about a run, in sections."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from meshwright.plugin import CheckpointError, Storage, list_checkpoints
from meshwright_run.run_action import RunAction
from meshwright_run.run_directory import RunDirectory
from meshwright_run.run_sections import HELD_OUT

from ..tables import format_size
from .facts import MemoryShare, RunFacts

AXIS_DESCRIPTIONS = {
    "pp": "hold different stages of the layers",
    "dp_replicate": "train on different sequences",
    "dp_shard": "train on different sequences",
    "cp": "hold different positions of the same sequences",
    "tp": "hold parts of the same layers, and train on the same sequences",
    "ep": "hold different experts of each layer",
}
"""Role of the ranks along each axis."""
PHASE_DESCRIPTIONS = {
    "forward": "in and around the forward passes",
    "backward": "in the backward passes",
    "optimizer": "in gradient clipping and the optimizer step",
}
COLLECTIVE_NAMES = {
    "all_gather": "all-gathers",
    "reduce_scatter": "reduce-scatters",
    "all_reduce": "all-reduces",
    "broadcast": "broadcasts",
    "all_to_all": "all-to-alls",
    "send": "sent messages",
    "recv": "received messages",
}


def build_sections(facts: RunFacts) -> dict[str, list[str]]:
    ranks = [] if facts.plan is None else facts.plan["ranks"]
    sections = {
        "Layout": _describe_layout(facts),
        "Memory of each rank": _describe_memory(facts),
        "Communication of each rank in a step": _merge_equal_ranks(
            {each["rank"]: list(_describe_collectives(each)) for each in ranks}
        ),
        "A step": _describe_step(facts),
        "Data": _describe_data(facts),
        "Learning rate": _describe_learning_rate(facts),
        "Evaluation": _describe_evaluation(facts),
        "Checkpoints, signals and resuming": _describe_checkpoints(facts),
        "Output files": _describe_outputs(facts),
    }
    return {title: lines for title, text in sections.items() if (lines := list(text))}


def _describe_layout(facts: RunFacts) -> Iterator[str]:
    degrees = facts.degrees
    ranks = f"{degrees.world_size} rank{'s' if degrees.world_size > 1 else ''}"
    yield f"{facts.job.stack} on {ranks}: a model with {facts.num_parameters:,} parameters" + (
        f", of which {facts.num_trainable:,} are trained."
        if facts.num_trainable != facts.num_parameters
        else ", all of them trained."
    )
    for axis in degrees.active_axes():
        yield f"{axis}={getattr(degrees, axis)}: the ranks along this axis {AXIS_DESCRIPTIONS[axis]}."


def _merge_equal_ranks(lines: Mapping[int, Sequence[str]]) -> Iterator[str]:
    """Return the lines of planned ranks, with the ranks that share them."""
    alike: dict[tuple[str, ...], list[int]] = {}
    for rank, rank_lines in lines.items():
        alike.setdefault(tuple(rank_lines), []).append(rank)
    for rank_lines, ranks in alike.items():
        named = f"rank{'s' if len(ranks) > 1 else ''} {_join_names([str(rank) for rank in ranks])}: "
        yield from (f"{named if len(alike) > 1 else ''}{line}" for line in rank_lines)


def _describe_memory(facts: RunFacts) -> Iterator[str]:
    if facts.plan is None:
        yield f"Unknown: {facts.unavailable_reason}"
        return
    yield from _merge_equal_ranks(
        {each["rank"]: list(_describe_rank_memory(each, facts)) for each in facts.plan["ranks"]}
    )
    fits = "which fits" if facts.plan["fits"] else "which DOES NOT FIT"
    has = format_size(facts.plan["memory_bytes"])
    most = format_size(facts.plan["peak_reserved_bytes"])
    yield f"The allocator reserves at most {most}, {fits} into the {has} of {facts.plan['device']}."


def _describe_rank_memory(report: Mapping[str, Any], facts: RunFacts) -> Iterator[str]:
    held = facts.memory_breakdown[report["rank"]]
    yield f"parameters: {_format_share(held['parameters'], facts)}."
    # Gradients that are views of communication buffers take no memory of their own.
    if held["gradients"].bytes:
        yield f"gradients: at most {_format_share(held['gradients'], facts)}."
    if held["optimizer"].bytes:
        yield f"optimizer state: {_format_share(held['optimizer'], facts)}."
    activations = format_size(report["peak_by_owner"].get("activations", 0))
    yield (
        f"at the peak of a step: {format_size(report['peak_allocated_bytes'])}, of which {activations} are activations."
    )
    yield f"between steps: {format_size(report['persistent_bytes'])}."


def _format_share(share: MemoryShare, facts: RunFacts) -> str:
    part = share.fraction(facts.degrees)
    text = format_size(share.bytes)
    if part == 1:
        text += ", unsharded"
    elif part is not None:
        text += (
            f", 1/{part.denominator} of the full {format_size(share.full_bytes)}, sharded along "
            f"{_join_names(share.sharded_axes)}"
        )
    elif share.sharded_axes:
        text += f", sharded along {_join_names(share.sharded_axes)}"
    if share.replicated_axes and part != 1:
        text += f"; replicated along {_join_names(share.replicated_axes)}"
    return text


def _describe_collectives(report: Mapping[str, Any]) -> Iterator[str]:
    rows = [row for row in report["collectives_by_phase"] if row["ranks"] > 1]
    if not rows:
        yield "none."
    for phase in dict.fromkeys(row["phase"] for row in rows):
        yield f"{PHASE_DESCRIPTIONS[phase]}: {'; '.join(_format_calls(row) for row in rows if row['phase'] == phase)}."


def _format_calls(row: Mapping[str, Any]) -> str:
    name = COLLECTIVE_NAMES.get(row["kind"], row["kind"])
    if row["calls"] == 1:
        name = name.replace("messages", "message").removesuffix("s")
    return (
        f"{row['calls']} {name} among the {row['ranks']} ranks of {row['group']}, {format_size(row['bytes'])} "
        f"of {row['dtype']}"
    )


def _describe_step(facts: RunFacts) -> Iterator[str]:
    config, job, dp = facts.config, facts.job, facts.degrees.dp
    tokens = config.batch_size * job.seq_len
    yield f"{config.batch_size} sequences of {job.seq_len} tokens: {tokens:,} tokens."
    share = f"each of the {dp} data-parallel ranks" if dp > 1 else "each rank"
    passes = (
        f"{job.num_microbatches} microbatches of {job.micro_batch_size}"
        if job.num_microbatches > 1
        else f"one microbatch of {job.micro_batch_size}"
    )
    added = ", whose gradients are accumulated" if job.num_microbatches > 1 else ""
    own = config.batch_size // dp
    yield f"Of these, {share} takes {own}, in {passes}{added}."
    if config.objective is not None:
        name = config.objective if isinstance(config.objective, str) else config.objective.get("name")
        yield f"The objective is {name}; memory and communication are planned for the token loss."
    else:
        yield "The loss is the mean over the supervised tokens of all ranks."
    clip = config.max_grad_norm
    yield (
        f"The gradient norm is clipped to {clip:g}, and the optimizer is {config.optimizer.name}."
        if clip is not None
        else f"The gradient norm is measured, but not clipped; the optimizer is {config.optimizer.name}."
    )
    if config.ema is not None:
        yield f"An exponential moving average of the weights is kept, with a decay of {config.ema.decay:g}."


def _describe_data(facts: RunFacts) -> Iterator[str]:
    data = facts.config.data
    for source in data.get_training_sources():
        weight = f", with a weight of {source.weight:g}" if source.weight is not None else ""
        how = "read while training" if source.streaming else "tokenized once and cached"
        yield f"{source.location} ({source.format}){weight}: {how}."
    rows = {
        "stream": "documents are concatenated and cut at row ends",
        "documents": "several documents share a row, but tokens attend only to their own document",
        "none": "each document has its own row, with padding",
    }[data.resolve_packing()]
    yield f"Rows of {data.seq_len} tokens: {rows}."
    yield f"The seed {facts.config.seed} determines their order, which is the same for any number of ranks."


def _describe_learning_rate(facts: RunFacts) -> Iterator[str]:
    config = facts.config
    if facts.learning_rates is None:
        yield (
            f"{config.epochs:g} epochs; the number of steps is known once the data are read. The schedule is "
            f"{config.schedule.name}, with a peak of {config.optimizer.lr:g}."
        )
        return
    at = ", ".join(f"{rate:.3g} in step {step:,}" for step, rate in facts.learning_rates.items())
    groups = ", for parameters without a group of their own" if config.optimizer.groups else ""
    yield f"{config.steps:,} steps with the schedule {config.schedule.name}: {at}{groups}."


def _describe_evaluation(facts: RunFacts) -> Iterator[str]:
    config = facts.config
    sets = [*([HELD_OUT] if config.data.eval_fraction else []), *config.data.eval_sets]
    every = "at the end" if config.eval.every is None else f"every {config.eval.every} steps and at the end"
    most = (
        f", on at most {config.eval.max_sequences} sequences of each" if config.eval.max_sequences is not None else ""
    )
    yield f"The losses of {_join_names(sets)} are computed {every}{most}."
    if config.data.eval_fraction:
        yield f"A fraction of {config.data.eval_fraction:.3g} of the examples is held out and never trained on."
    stopping = config.eval.early_stopping
    if stopping is not None:
        yield f"The run ends after {stopping.patience} evaluations in a row in which {stopping.eval_set} does not fall."


def _describe_outputs(facts: RunFacts) -> Iterator[str]:
    config, directory = facts.config, RunDirectory.from_config(facts.config)
    ranks = f", times and memory of each rank in {directory.rank_logs}" if config.metrics.per_rank else ""
    yield f"Metrics of each step in {directory.metrics}{ranks}; the trained model in {directory.model}."
    if config.metrics.norms_every is not None:
        yield f"Gradient norms by block every {config.metrics.norms_every} steps."
    if config.metrics.communication_every is not None:
        yield f"Exposed communication every {config.metrics.communication_every} steps."
    if config.profile is not None:
        which = config.profile.ranks
        ranks = (
            "all ranks" if which == "all" else f"rank{'s' if len(which) > 1 else ''} {_join_names([*map(str, which)])}"
        )
        yield f"Profiles of steps {config.profile.steps}, of {ranks}."
    if config.trackers:
        names = [each if isinstance(each, str) else str(each.get("name")) for each in config.trackers]
        yield f"The first rank also reports the run to {_join_names(names)}."


def _describe_checkpoints(facts: RunFacts) -> Iterator[str]:
    config = facts.config
    section, directory = config.checkpoint, RunDirectory.from_config(config).checkpoint_storage
    if not section.is_enabled:
        yield "No checkpoints are saved: an interrupted run starts over."
    else:
        given = section.every if isinstance(section.every, list) else [section.every]
        when = [f"every {e} steps" if isinstance(e, int) else f"{e} after the previous one" for e in given if e]
        when += [f"after the best {section.keep_best.count} evaluations"] if section.keep_best is not None else []
        keeps = "all are kept" if section.keep_last is None else f"the newest {section.keep_last} are kept"
        also = f", and those of every {section.keep_every} steps" if section.keep_every else ""
        at = _join_names(when) or "on a signal"
        yield f"Checkpoints are saved {at}, and after the last step, to {directory}; {keeps}{also}."
        yield f"Training {'continues' if section.asynchronous else 'waits'} while a checkpoint is written."
    stops = section.stop_config
    if stops.signals:
        yield (
            f"On {_join_names(stops.signals)}, the run stops after its step, saves a checkpoint, and exits with code "
            f"{stops.exit_code}" + (" (130 after SIGINT)." if "SIGINT" in stops.signals else ".")
        )
    else:
        yield "A signal ends the run at once, without a checkpoint."
    yield from _describe_resume(facts, directory)


def _describe_resume(facts: RunFacts, directory: Storage) -> Iterator[str]:
    config = facts.config
    if facts.run_action is None:
        yield f"The run would be refused now: {facts.refusal}"
    elif facts.run_action is RunAction.FINISHED:
        yield f"The run in {config.output_dir} has finished: the command would report this and train nothing."
    elif facts.run_action is RunAction.OVERWRITE:
        yield f"{config.output_dir} holds another run, which is removed; this run starts at its first step."
    elif facts.run_action is RunAction.RESUME:
        try:
            saved = list_checkpoints(directory)
        except CheckpointError as error:
            yield f"The run would be refused now: {error}"
            return
        since = (
            f" after step {int(saved[0].name.removeprefix('step-'))}, if that checkpoint is valid"
            if saved
            else " if there is a checkpoint"
        )
        source = config.resume_config.source
        yield (
            f"{config.output_dir} holds this run, which resumes{since}."
            if source == "auto"
            else f"The run resumes from {source}, or from a checkpoint that it has saved since."
        )
    else:
        yield f"{config.output_dir} holds no run yet: this run starts at its first step."
    if config.checkpoint.is_enabled and config.resume_config.source == "auto":
        yield (
            "The same command resumes from the newest valid checkpoint, also with another strategy or number of ranks."
        )


def _join_names(names: Sequence[str]) -> str:
    return ", ".join(names[:-1]) + f" and {names[-1]}" if len(names) > 1 else "".join(names)
