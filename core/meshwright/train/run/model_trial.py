"""Try a model before any rank starts, so that its errors in the first step are found early.

[Note: no good model is refused] Every model is made on the meta device, and its configuration written as at the end of
a run. A small one on a CPU is also trained on one sequence. A larger one is not tried as a smaller copy, which may fail
where the model would not; nor are models for an accelerator, whose kernels may not run here, or with expert
parallelism, which replaces code of the model.
"""

from __future__ import annotations

import copy
import os
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ..._compat.peft import adapted_on_meta, inject
from ...base.errors import ModelError
from ...base.types import Batch
from ...data.config import Packing
from ...mesh.sizes import Degrees
from ...model.adapter_options import AdapterOptions, check_names
from ...model.layout import ModelSize, check_elements, model_size
from ...model.pretrained import new_model
from ...optim.config import OptimizerConfig
from ...optim.groups import check_model
from ...step.forward_options import forward_options
from ...step.tokens import split_targets
from ...strategy.registry import model_layout
from .apart import check_kept_apart

_PARAMETERS, _WORK = 1e7, 1e9
"""Parameters, and parameters times tokens, of the largest model that is trained: below a second, and 100 MB."""
_NOISE = 0.02


def try_model(
    config: Any,
    dtype: torch.dtype,
    *,
    seq_len: int,
    device: torch.device,
    degrees: Degrees,
    adapters: AdapterOptions | None = None,
    optimizer: OptimizerConfig | None = None,
) -> ModelSize:
    """Make the model of a Hugging Face configuration and train it; the random state stays as it was.

    Args:
        seq_len: tokens of the sequence.
        device: that ranks will use; nothing is put there.
        adapters: to be trained instead of the model.
        optimizer: its groups and patterns are checked, unless there are adapters, whose names only the ranks know.

    Returns:
        What the model holds.

    Raises:
        ModelError: transformers cannot write, make or train it.
        ConfigError: a group, or a pattern, has no parameter of it.
    """
    config = copy.deepcopy(config)
    with torch.random.fork_rng(devices=[]), _quiet():
        with torch.device("meta"):
            model = new_model(config, dtype, 0)
        _try_saving(model)
        if adapters is not None:
            check_names(adapters.config, model, where="model.peft")
            model = adapted_on_meta(model, {"default": copy.deepcopy(adapters.config)})
        check_elements(model)
        layout = model_layout(model)
        size = model_size(model)
        if adapters is None and optimizer is not None:
            check_model(optimizer, model, layout)
        if can_be_tried(size, seq_len=seq_len, device=device, degrees=degrees):
            small = new_model(config, dtype, 0)
            _train(small if adapters is None else inject(small, copy.deepcopy(adapters.config)), seq_len)
    return size


def can_be_tried(size: ModelSize, *, seq_len: int, device: torch.device, degrees: Degrees) -> bool:
    """Whether the model can be run before the ranks start; see [Note: no good model is refused]."""
    is_small = size.parameters <= _PARAMETERS and size.parameters * seq_len <= _WORK
    return device.type == "cpu" and is_small and degrees.ep == 1


def try_rows(config: Any, dtype: torch.dtype, kind: Packing, *, seq_len: int, masks: bool) -> None:
    """Refuse a small model that does not isolate documents that share a row, or padding; see `check_kept_apart`."""
    config = copy.deepcopy(config)
    with torch.random.fork_rng(devices=[]), _quiet(), torch.no_grad():
        model = new_model(config, dtype, 0).eval()
        # Initial values may be zero, and hide the defect.
        torch.manual_seed(0)
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=_NOISE)
        options = forward_options(model)

        def statistics(batches: list[Batch]) -> list[Tensor]:
            found = []
            for batch in batches:
                inputs, targets_BS = split_targets(batch)
                log_probs_BSV = model(**inputs, **options).logits.double().log_softmax(-1)
                found.append(log_probs_BSV.gather(2, targets_BS.clamp(min=0)[..., None])[..., 0])
            return found

        vocab_size = config.get_text_config().vocab_size
        check_kept_apart(config, kind, statistics, dtype=dtype, seq_len=seq_len, vocab_size=vocab_size, masks=masks)


def check_memory(degrees: Degrees, size: ModelSize, memory_bytes: int) -> None:
    """Refuse a model of which an even share is larger than the memory of a whole node.

    Args:
        memory_bytes: of the node and its accelerators.

    Raises:
        ModelError: with both numbers.
    """
    # Each parameter lies on one rank at least, so one of them holds no less than an even share.
    held = size.parameters * size.bytes_per_element / degrees.world_size
    if held > memory_bytes:
        raise ModelError(
            f"the model does not fit: a rank would hold {held / 1e9:,.1f} GB of its {size.parameters:,} parameters, "
            f"and this node has {memory_bytes / 1e9:,.1f} GB of memory. Make it smaller (model.vocab_size, "
            f"model.hidden_size, ...), or use more ranks under a strategy that shards it."
        )


def memory_of_node() -> int:
    """Return the bytes of this node's memory and that of its accelerators."""
    own = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if not torch.cuda.is_available():
        return own
    return own + sum(torch.cuda.get_device_properties(index).total_memory for index in range(torch.cuda.device_count()))


def _try_saving(model: Any) -> None:
    # It is validated again when it is written, at the end of the run.
    with (
        tempfile.TemporaryDirectory(prefix="meshwright-") as directory,
        _told(model.config, "write the configuration of"),
    ):
        model.config.save_pretrained(directory)


def _train(model: nn.Module, seq_len: int) -> None:
    with _told(model.config, "train"):
        ids = torch.ones((1, seq_len), dtype=torch.int64)
        model.train()(input_ids=ids, **forward_options(model)).logits.float().sum().backward()


@contextmanager
def _told(config: Any, what: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        # Each model class checks its configuration in its own way, or not at all.
        cause = " ".join(f"{type(error).__name__}: {error}".split())
        raise ModelError(
            f"transformers cannot {what} the model {config.model_type!r} as configured: {cause}"
        ) from error


@contextmanager
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
