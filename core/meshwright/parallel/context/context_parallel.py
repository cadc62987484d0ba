"""Context parallelism for any model whose attention uses transformers' attention interface.

During a step the model's attention setting selects functions of this package (`attention.attend`, `make_mask`), and the
model is called with this rank's positions of each sequence. Nothing else in the model changes. A model that mixes
positions outside of attention would therefore return wrong results: `probe` detects that before the first step.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from ..._compat.transformers import (
    LENGTH_DEPENDENT,
    collect_nested_configs,
    get_attention_setting,
    get_mask_function,
    isolate_documents,
    register_attention,
    set_attention_setting,
)
from ...base.errors import BatchError, ModelError
from ...base.types import Batch
from ...model.layout import ModelLayout
from ...step.axis import Axis, ProbeInputs
from ...step.tokens import TARGETS, shift_labels
from ...tensors.ops import temporary_attribute
from .attention import (
    CPAttentionMethod,
    MaskFunction,
    PositionMask,
    SequenceShard,
    attend,
    gather_last_tokens,
    gather_positions,
)
from .probe import AttentionProbe, ProbeResult, find_real_tokens, number_positions, probe_model

_PREFIX = "meshwright_"
_FULL_POSITION_IDS = "whole_position_ids"
_HAS_MASKED_TOKENS = "masks_tokens"
"""Key in a sharded batch: a tensor with one element if the attention mask has zeros, else with none. The key is missing
if the check would require a device synchronization."""
_SHARDED_KEYS = frozenset({"input_ids", "labels", "position_ids", "attention_mask"})
_SUPPORTED_ATTENTION = ("eager", "sdpa")


class ContextParallel(Axis):
    """Context parallelism of one model.

    Args:
        model: the model to train. It is not changed.
        layout: the model's layout.
        mesh: the axis `cp`.
        attention: see [Note: attention methods] in `attention`.

    Raises:
        ModelError: the model's attention or positions cannot be sharded.
    """

    shards_batches = shards_sequences = True

    def __init__(
        self, model: nn.Module, layout: ModelLayout, mesh: DeviceMesh, *, attention: CPAttentionMethod = "allgather"
    ) -> None:
        self.sequence_shard = SequenceShard(mesh.get_group(), mesh.size(), mesh.get_local_rank(), attention)
        self.attention_probe: AttentionProbe | None = None
        # Sharding changes the model's class.
        self._name = type(model).__name__
        self._model, self._layout = model, layout
        self._probe_result: ProbeResult | None = None
        self._configs = collect_nested_configs(model)
        _check_configs(model, self._configs)

    # -- batches

    @property
    def sequence_multiple(self) -> int:
        return 2 * self.sequence_shard.num_ranks

    def shard_batch(self, batch: Batch) -> Batch:
        """Return this rank's positions of a microbatch, with explicit `position_ids`, and `TARGETS` instead of labels.

        `attention_mask` stays unsharded, (B, S), and is added if the batch has none.
        """
        ids, labels = batch["input_ids"], batch["labels"]
        position_ids, mask = batch.get("position_ids"), batch.get("attention_mask")
        full_position_ids = (
            number_positions(ids, self._probe_result.padding_id if self._probe_result is not None else None)
            if position_ids is None
            else position_ids
        )
        sharded = {
            "input_ids": self.local(ids),
            TARGETS: self.local(shift_labels(labels)),
            "position_ids": self.local(full_position_ids.expand(ids.shape)),
            "attention_mask": torch.ones_like(ids) if mask is None else mask,
        }
        if mask is None or mask.device.type == "cpu":
            sharded[_HAS_MASKED_TOKENS] = ids.new_empty(int(mask is not None and not bool(mask.all())))
        # transformers detects packed documents only without a mask. On an accelerator the check would synchronize.
        on_cpu = ids.device.type == "cpu"
        if position_ids is not None and mask is None and not (on_cpu and bool((position_ids.diff(dim=-1) == 1).all())):
            sharded[_FULL_POSITION_IDS] = full_position_ids.expand(ids.shape)
        return sharded

    def check_batch(self, batch: Batch) -> None:
        count, length = batch["input_ids"].shape
        for name, tensor in batch.items():
            if name not in _SHARDED_KEYS:
                raise BatchError(
                    f"the batch holds {name}, of which it is not known how cp_size={self.sequence_shard.num_ranks} "
                    "divides it. Leave it out, or set cp_size=1."
                )
            shapes = [(count, length)] + [(1, length)] * (name == "position_ids")
            if tuple(tensor.shape) not in shapes:
                raise BatchError(
                    f"{name} has the shape {tuple(tensor.shape)}, but with cp_size={self.sequence_shard.num_ranks} it "
                    f"must be that of input_ids, {(count, length)}."
                )
        follows_mask = self._probe_result is not None and self._probe_result.positions_follow_mask
        if follows_mask and "attention_mask" in batch and "position_ids" not in batch:
            raise BatchError(
                f"{self._name} computes positions from attention_mask, which cp_size={self.sequence_shard.num_ranks} "
                f"cannot divide. Give position_ids too."
            )

    def local(self, full: Tensor) -> Tensor:
        return self.sequence_shard.shard(full)

    def gather(self, local: Tensor) -> Tensor:
        return gather_positions(local, self.sequence_shard.group)

    def gather_sequences(self, local: Tensor) -> Tensor:
        """Return the value of each sequence from the rank that has its last token, ignoring padding."""
        return gather_last_tokens(local, find_real_tokens(self._model, self._ids_BS), self.sequence_shard)

    @property
    def replicas(self) -> int:  # type: ignore[override]
        return self.sequence_shard.num_ranks

    # -- forwards and backwards

    @contextmanager
    def step_context(self) -> Iterator[None]:
        """Switch the model's attention to `attention.attend` without a KV cache; restore its settings on exit."""
        saved = [
            (config, get_attention_setting(config), getattr(config, "use_cache", None)) for config in self._configs
        ]
        try:
            for config, name, use_cache in saved:
                if name is not None and not name.startswith(_PREFIX):
                    set_attention_setting(config, _register_attention(name))
                if use_cache:
                    # Not every forward has this argument.
                    config.use_cache = False
            yield
        finally:
            for config, name, use_cache in saved:
                set_attention_setting(config, name)
                if use_cache:
                    config.use_cache = use_cache

    @contextmanager
    def forward_context(self, inputs: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        global _current_forward
        model_inputs = {
            name: value for name, value in inputs.items() if name not in (_FULL_POSITION_IDS, _HAS_MASKED_TOKENS)
        }
        self._ids_BS = inputs["input_ids"]
        local_length = inputs["input_ids"].shape[1]
        length = inputs["attention_mask"].shape[1] if "attention_mask" in inputs else local_length
        has_masked_tokens = bool(inputs[_HAS_MASKED_TOKENS].numel()) if _HAS_MASKED_TOKENS in inputs else None
        outer = _current_forward
        _current_forward = _ForwardState(self, length, local_length, inputs.get(_FULL_POSITION_IDS), has_masked_tokens)
        try:
            yield model_inputs
        finally:
            _current_forward = outer

    # -- before the first step

    @contextmanager
    def isolated(self) -> Iterator[AttentionProbe]:
        """Restrict each position to attend to itself, without communication, and record the inputs of attention."""
        probe = AttentionProbe()
        with temporary_attribute(self, "attention_probe", probe):
            yield probe

    def needs_probe(self) -> bool:
        return self._probe_result is None or self._probe_result.error is not None

    def probe(self, inputs: ProbeInputs) -> ModelError | None:
        """Check on a few tokens that the model mixes positions only in attention. The model's state is unchanged."""
        ids_BS = inputs.microbatch["input_ids"]
        with self.isolated() as attention_probe:
            self._probe_result = probe_model(
                self._name,
                self._model,
                self._layout,
                attention_probe,
                ids_BS,
                inputs.call_model,
                inputs.length_multiple,
                self.sequence_shard.num_ranks,
            )
        return None if self._probe_result.error is None else ModelError(f"{self._probe_result.error} Set cp_size=1.")


@dataclass(frozen=True)
class _ForwardState:
    """The current forward, for the masks that the model makes.

    Attributes:
        length, local_length: positions of a full sequence, and of its shard on this rank.
        positions_BS: position ids of full sequences that may contain several documents; otherwise None.
        has_masked_tokens: whether the attention mask has zeros; None if unknown.
    """

    context_parallel: ContextParallel
    length: int
    local_length: int
    positions_BS: Tensor | None
    has_masked_tokens: bool | None


_current_forward: _ForwardState | None = None


@functools.cache
def _register_attention(implementation: str) -> str:
    """Register replacements of a transformers attention implementation, and return their name."""
    name = _PREFIX + implementation
    attention = torch.compiler.disable(functools.partial(attend, implementation))
    register_attention(name, attention, functools.partial(make_mask, implementation))
    return name


def make_mask(
    implementation: str,
    *,
    batch_size: int,
    q_length: int,
    kv_length: int,
    mask_function: MaskFunction,
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    use_vmap: bool = False,
    q_offset: int = 0,
    kv_offset: int = 0,
    allow_is_bidirectional_skip: bool = False,
    **rest: Any,
) -> PositionMask:
    """Make an attention mask under context parallelism; transformers calls this.

    `q_length` counts positions on this rank, and `kv_length` those of the full sequence, since `attention_mask`, bool
    (B, S), is unsharded. It is None if the batch has none and the model is being probed.
    """
    if _current_forward is None:
        raise ModelError(
            "the model makes an attention mask outside of its forward (in recomputation, say), where context "
            "parallelism does not know its positions. Set cp_size=1."
        )
    if (kv_length, q_length) != (_current_forward.length, _current_forward.local_length):
        raise ModelError(
            f"the model makes an attention mask of {q_length} queries and {kv_length} keys, where this rank has "
            f"{_current_forward.local_length} of {_current_forward.length} positions. Set cp_size=1."
        )
    if use_vmap:
        raise ModelError(
            "the model adds a rule of its own to its attention masks, which may be about the positions of one rank. "
            "Set cp_size=1."
        )
    has_masked_tokens = False if attention_mask is None else _current_forward.has_masked_tokens
    is_unmasked = (
        bool(attention_mask.all())
        if has_masked_tokens is None and attention_mask is not None
        else not has_masked_tokens
    )
    is_causal = allow_is_causal_skip and is_unmasked and (local_size is None or kv_length < local_size)
    if _current_forward.positions_BS is not None:
        mask_function, is_documents = isolate_documents(mask_function, _current_forward.positions_BS)
        is_causal = is_causal and not is_documents
    mask_arguments = {"batch_size": batch_size, "attention_mask": None if is_unmasked else attention_mask, **rest}
    context_parallel, make_mask_tensor = _current_forward.context_parallel, get_mask_function(implementation)
    return PositionMask(
        context_parallel.sequence_shard,
        context_parallel.attention_probe,
        make_mask_tensor,
        mask_function,
        kv_length,
        q_length,
        is_causal,
        mask_arguments,
    )


def _check_configs(model: nn.Module, configs: list[Any]) -> None:
    name = type(model).__name__
    settings = {setting for setting in map(get_attention_setting, configs) if setting is not None}
    if not settings:
        raise ModelError(
            f"{name} has no attention of transformers (config._attn_implementation), which context parallelism "
            f"divides. Set cp_size=1."
        )
    for setting in sorted(settings):
        if setting not in _SUPPORTED_ATTENTION:
            raise ModelError(
                f"{name} uses attn_implementation={setting!r}, which context parallelism cannot divide. Build the "
                f"model with one of {', '.join(_SUPPORTED_ATTENTION)}, or set cp_size=1."
            )
    for kind in (each for config in configs for each in _iter_rope_types(config.to_dict())):
        if kind in LENGTH_DEPENDENT:
            raise ModelError(
                f"{name} has rope_type={kind!r}, which scales all positions by the last one of a forward, and each "
                f"rank of cp has another. Set cp_size=1, or use another rope_type."
            )


def _iter_rope_types(value: Any) -> Iterator[str]:
    if isinstance(value, Mapping):
        if isinstance(value.get("rope_type"), str):
            yield value["rope_type"]
        for each in value.values():
            yield from _iter_rope_types(each)
