"""Probe a model before any rank starts, to detect errors of its first step early.

[Note: which models are run] Every model is built on the meta device, and its configuration is saved. A small model on
the CPU also runs one forward and backward. Others are not run: a smaller copy of a large model may fail where the model
would not, an accelerator is left to the ranks, and expert parallelism replaces code of the model.

[Note: isolation] A probe tests whether a model isolates the documents of a row, and ignores padding: it changes tokens
that must not be seen. Log-probabilities of the other tokens must not change, compared with their change if tokens that
may be seen change. No class is known by name. Small models are probed before any rank starts, others before the first
step.
"""

from __future__ import annotations

import copy
import os
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from meshwright.plugin import (
    AdapterOptions,
    Batch,
    BatchError,
    BoundObjective,
    Column,
    ConfigError,
    Degrees,
    MeshwrightError,
    ModelError,
    ModelSize,
    Objective,
    OptimizerConfig,
    add_adapters_on_meta,
    apply_peft,
    check_groups,
    check_not_empty,
    check_target_names,
    compute_model_size,
    format_docs_link,
    get_forward_options,
    init_model,
    model_layout,
    split_targets,
)

from .data.config import Packing
from .data.packing import RowDataset
from .data.train_sampler import RunDatasets

REFERENCE_COLUMN = "reference_log_probs"
_MAX_PARAMETERS, _MAX_WORK = 1e7, 1e9
"""Maximum parameters, and parameters x tokens, of a model that is run: it takes less than a second and 100 MB."""
_NOISE = 0.02


def probe_model(
    config: Any,
    dtype: torch.dtype,
    *,
    seq_len: int,
    device: torch.device,
    degrees: Degrees,
    adapters: AdapterOptions | None = None,
    optimizer: OptimizerConfig | None = None,
) -> ModelSize:
    """Build the model of a Hugging Face configuration, run it if it is small, and return its size. Keeps RNG state."""
    config = copy.deepcopy(config)
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings(action="ignore"):
        with torch.device("meta"):
            model = init_model(config, dtype, 0)
        # transformers validates the configuration when it saves it, which would otherwise be at the end of the run.
        with (
            tempfile.TemporaryDirectory(prefix="meshwright-") as directory,
            _convert_model_errors(config, "save the configuration of"),
        ):
            model.config.save_pretrained(directory)
        if adapters is not None:
            check_target_names(adapters.config, model, where="model.peft")
            model = add_adapters_on_meta(model, {"default": copy.deepcopy(adapters.config)})
        check_not_empty(model)
        layout = model_layout(model)
        size = compute_model_size(model)
        if adapters is None and optimizer is not None:
            check_groups(optimizer, model, layout)
        if can_probe(size, seq_len=seq_len, device=device, degrees=degrees):
            small = init_model(config, dtype, 0)
            if adapters is not None:
                small = apply_peft(small, copy.deepcopy(adapters.config))
            with _convert_model_errors(config, "train"):
                ids = torch.ones((1, seq_len), dtype=torch.int64)
                small.train()(input_ids=ids, **get_forward_options(small)).logits.float().sum().backward()
    return size


def can_probe(size: ModelSize, *, seq_len: int, device: torch.device, degrees: Degrees) -> bool:
    """Return whether the model can be run before the ranks start; see [Note: which models are run]."""
    is_small = size.num_parameters <= _MAX_PARAMETERS and size.num_parameters * seq_len <= _MAX_WORK
    return device.type == "cpu" and is_small and degrees.ep == 1


def probe_isolation(config: Any, dtype: torch.dtype, packing: Packing, *, seq_len: int, mask_padding: bool) -> None:
    """Raise ModelError for a small model that does not isolate documents in a row, or padding; see
    `check_document_isolation`."""
    config = copy.deepcopy(config)
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings(action="ignore"), torch.no_grad():
        model = init_model(config, dtype, 0).eval()
        # Initial values may be zero, which would hide a leak.
        torch.manual_seed(0)
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=_NOISE)
        options = get_forward_options(model)

        def statistics(batches: list[Batch]) -> list[Tensor]:
            target_log_probs = []
            for batch in batches:
                inputs, targets_BS = split_targets(batch)
                log_probs_BSV = model(**inputs, **options).logits.double().log_softmax(-1)
                target_log_probs.append(log_probs_BSV.gather(2, targets_BS.clamp(min=0)[..., None])[..., 0])
            return target_log_probs

        vocab_size = config.get_text_config().vocab_size
        check_document_isolation(
            config, packing, statistics, dtype=dtype, seq_len=seq_len, vocab_size=vocab_size, mask_padding=mask_padding
        )


def check_memory(degrees: Degrees, size: ModelSize, memory_bytes: int) -> None:
    """Raise ModelError if an even share of the model is larger than the memory of this node."""
    # Each parameter is on at least one rank, so some rank holds at least an even share.
    held = size.num_parameters * size.bytes_per_element / degrees.world_size
    if held > memory_bytes:
        raise ModelError(
            f"the model does not fit: a rank would hold {held / 1e9:,.1f} GB of its {size.num_parameters:,} "
            f"parameters, and this node has {memory_bytes / 1e9:,.1f} GB of memory. Make it smaller (model.vocab_size, "
            "model.hidden_size, ...), or use more ranks under a strategy that shards it."
        )


def get_node_memory() -> int:
    """Return the memory of this node, including its accelerators [bytes]."""
    own = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if not torch.cuda.is_available():
        return own
    return own + sum(torch.cuda.get_device_properties(index).total_memory for index in range(torch.cuda.device_count()))


def _format_one_line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())


@contextmanager
def _convert_model_errors(config: Any, action: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        # Model classes check their configuration in different ways, or not at all.
        cause = _format_one_line(error)
        raise ModelError(
            f"transformers cannot {action} the model {config.model_type!r} as configured: {cause}"
        ) from error


MAX_PROBE_TOKENS = 16
"""Tokens of a probed row, rounded up to the length multiple; at most `seq_len`."""

LogProbsFn = Callable[[list[Batch]], Sequence[Tensor]]
"""Returns the log-probabilities of the targets of each micro-batch, (B, S)."""


def check_document_isolation(
    config: Any,
    packing: Packing,
    compute_log_probs: LogProbsFn,
    *,
    dtype: torch.dtype,
    seq_len: int,
    vocab_size: int,
    length_multiple: int = 1,
    num_rows: int = 1,
    num_microbatches: int = 1,
    mask_padding: bool = False,
) -> None:
    """Raise ModelError for a model that does not isolate documents or padding; see [Note: isolation]."""
    if packing == "stream":
        return
    length = min(seq_len, -(-MAX_PROBE_TOKENS // length_multiple) * length_multiple)
    half, generator = length // 2, torch.Generator().manual_seed(0)
    ids = torch.randint(0, vocab_size, (2, length), generator=generator)
    # Without token 0, which pads.
    ids, others = ids.clamp(min=min(1, vocab_size - 1))
    other_begin, other_end = torch.cat([others[:half], ids[half:]]), torch.cat([ids[:half], others[half:]])
    behind = slice(half, length - 1)

    def measure_change(changed: Tensor, columns: slice, **more: Tensor) -> float:
        """Return the largest change of log-probabilities in `columns` if other tokens change."""
        log_probs = []
        for row in (ids, changed):
            batch = {name: each.repeat(num_rows, 1) for name, each in {"input_ids": row, "labels": row, **more}.items()}
            log_probs.append(compute_log_probs([batch] * num_microbatches)[0].double().cpu()[:, columns])
        return float((log_probs[0] - log_probs[1]).abs().max())

    name = f"the model {config.model_type!r}"
    try:
        if packing == "documents":
            positions = torch.cat([torch.arange(half), torch.arange(length - half)])
            leak = measure_change(other_begin, behind, position_ids=positions)
        else:
            mask = {"attention_mask": (torch.arange(length) < half).long()} if mask_padding else {}
            leak = measure_change(other_end, slice(0, half - 1), **mask)
        scale = measure_change(other_begin, behind)
    except MeshwrightError:
        raise
    except Exception as error:
        cause = _format_one_line(error)
        raise ModelError(
            f"{name} cannot run on rows of packing={packing}: {cause:.300} {_REMEDY_TEXT[packing]}"
        ) from error
    # Other tokens do not change any bit of a row of a matrix product. But they change how many tokens an expert gets,
    # and so its rounding.
    has_experts = bool(getattr(config.get_text_config(), "num_experts_per_tok", None))
    limit = max(1e-4, torch.finfo(dtype).eps ** 0.5) if has_experts else 1e-4
    if not leak <= limit * scale:
        raise ModelError(
            f"{name} {_DEFECT_TEXT[packing]}: other tokens there change log-probabilities by {leak:.3g}; tokens that "
            f"may be seen change them by {scale:.3g}. {_REMEDY_TEXT[packing]}"
        )


_DEFECT_TEXT = {
    "documents": "lets documents attend to earlier documents in the same row",
    "none": "attends to the padding after a document",
}
_REMEDY_TEXT = {
    "documents": "Set data.packing=none, so that each document has its own row, or stream, which lets them attend.",
    "none": "Set data.packing=stream, which has no padding.",
}


def needs_reference_log_probs(objective: Objective | None, datasets: RunDatasets) -> bool:
    """Return whether reference log-probabilities must be computed; ConfigError if data and objective do not fit."""
    group, first = datasets.train_sets[0].group_size, datasets.main_eval_set
    given = None if objective is None else BoundObjective(objective)
    if group > 1 and (given is None or given.group_size != group):
        objective_name = "cross entropy" if given is None else given.name
        raise ConfigError(
            f"the rows of these data are grouped {group} by {group} (chosen and rejected), but the {objective_name} "
            "uses each row on its own, so rejected answers would be supervised. Set objective to orpo, simpo or dpo, "
            "or use data of another format."
        )
    if given is None:
        return False
    if given.group_size != group:
        raise ConfigError(
            f"the {given.name} takes rows {given.group_size} by {given.group_size}, but the rows of these data are not "
            "grouped. Use sources of format preference, whose examples have the fields prompt, chosen and rejected: "
            "texts, or lists of messages (then prompt may be missing). Name other columns under `fields`, {chosen: its "
            "name}. To train on single answers, leave objective out. In a script, give grouped micro-batches: see "
            f"{format_docs_link('reference/objectives.md')}"
        )
    missing = [name for name in getattr(objective, "columns", ()) if name not in first.column_specs]
    takes_sums = any(each.name == REFERENCE_COLUMN and "B" in each.shapes for each in _requested_columns(objective))
    computes = missing == [REFERENCE_COLUMN] and takes_sums
    if missing and not computes:
        raise ConfigError(
            f"the {given.name} needs {', '.join(missing)} besides the tokens, but the data have "
            f"{', '.join(first.column_specs) or 'no columns'}. List the fields of a source that hold it in `columns`, "
            f"or give micro-batches that have it in a script: see {format_docs_link('reference/objectives.md')}"
        )
    sample = dict(first.read_batch(range(group)))
    if computes:
        if not all(isinstance(each, RowDataset) for each in datasets.train_sets):
            raise ConfigError(
                f"the {given.name} compares with log-probabilities under the initial weights, which are computed for "
                f"all rows before training, but a source is streamed. Set its streaming to false, or list a field "
                f"that holds {REFERENCE_COLUMN} in its `columns`."
            )
        sample[REFERENCE_COLUMN] = torch.zeros(group, dtype=torch.float64)
    try:
        given.check([cast_columns(objective, sample)])
    except BatchError as error:
        raise ConfigError(f"the data do not fit the objective: {error}") from None
    return computes


def _requested_columns(objective: Objective | None) -> Sequence[Column]:
    accepted: Sequence[Column] = getattr(objective, "accepted_columns", ())
    return accepted


def cast_columns(objective: Objective | None, batch: Batch) -> Batch:
    """Convert integer columns of a micro-batch to the floats or booleans that an objective expects."""
    dtypes = {"float": torch.float64, "bool": torch.bool}
    changed = {
        each.name: batch[each.name].to(dtypes[each.number_kind])
        for each in _requested_columns(objective)
        if each.name in batch and each.number_kind in dtypes and batch[each.name].dtype == torch.int64
    }
    return {**batch, **changed} if changed else batch
