"""Probe whether a model mixes positions only in attention, and takes its positions from `position_ids`.

The model runs on a few tokens of one sequence, without gradients, and each position attends only to itself. A change at
one position must then not affect any other position:

- NaN after the embedding of one position, and another token there: exact for everything that uses hidden states.
- Equal tokens at equal positions: attention must receive equal inputs; otherwise the model counts positions itself.
- Default and explicit positions: results must be equal; otherwise the model's default positions are different ones.

A model with one output per sequence must take it from the last non-padding position. No model class is special-cased.
If a model raises an error here, it is rejected with that error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ...base.errors import MeshwrightError
from ...model.layout import ModelLayout

NUM_PROBE_TOKENS = 4
CallModel = Callable[[dict[str, Tensor]], Any]


class AttentionProbe:
    """Replacement of attention: each position attends to itself; the inputs of attention are appended to `recorded`."""

    def __init__(self) -> None:
        self.recorded: list[Tensor] = []

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Map (B, H, P, D) to (B, P, H, D)."""
        self.recorded += [each.transpose(1, 2).detach() for each in (query, key, value)]
        groups = query.shape[1] // value.shape[1]
        return value.repeat_interleave(groups, 1).transpose(1, 2).contiguous()


@dataclass(frozen=True)
class ProbeResult:
    """Result of the probe.

    Attributes:
        error: why the model is rejected; None if it is accepted.
        positions_follow_mask: whether the model derives default positions from the attention mask.
        padding_id: if not None, the model numbers non-padding tokens from this id + 1, see `number_positions`.
    """

    error: str | None
    positions_follow_mask: bool = False
    padding_id: int | None = None


def number_positions(ids_BS: Tensor, padding_id: int | None) -> Tensor:
    """Return a model's default positions: from 0, or for non-padding tokens from `padding_id` + 1. (B, S), int64."""
    if padding_id is None:
        return torch.arange(ids_BS.shape[1], device=ids_BS.device).expand_as(ids_BS)
    is_real = (ids_BS != padding_id).long()
    return is_real.cumsum(1) * is_real + padding_id


def probe_model(
    name: str,
    model: nn.Module,
    layout: ModelLayout,
    attention_probe: AttentionProbe,
    ids_BS: Tensor,
    call_model: CallModel,
    length_multiple: int,
    num_ranks: int,
) -> ProbeResult:
    """Run all checks on a model. Collective if its forward is.

    Args:
        attention_probe: replaces the model's attention.
        ids_BS: tokens; a few of them are used.
        call_model: runs the model, which may be sharded.
        length_multiple: the length of the probe's sequence is a multiple of this.
        num_ranks: ranks of cp. Attention masks are `num_ranks` times as long as this rank's positions.
    """
    length = length_multiple * -(-NUM_PROBE_TOKENS // length_multiple)
    ids = ids_BS[:1].repeat(1, -(-length // ids_BS.shape[1]))[:, :length].contiguous()
    # The largest position that occurs.
    last_position = min(length * num_ranks, max(length, ids_BS.shape[1])) - 1
    try:
        return _run_checks(
            name, _ProbeRunner(model, layout, attention_probe, call_model), ids, last_position, num_ranks
        )
    except (MeshwrightError, torch.OutOfMemoryError, dist.DistError):
        raise
    except Exception as error:
        # Model code may raise any error on unusual masks or positions.
        reason = (str(error).strip().splitlines() or [""])[0]
        return ProbeResult(f"{name} cannot run on a part of the positions ({type(error).__name__}: {reason}).")


def _run_checks(name: str, probe: _ProbeRunner, ids: Tensor, last_position: int, ranks: int) -> ProbeResult:
    length = ids.shape[1]
    probed = length // 2
    other_positions = [each for each in range(length) if each != probed]
    baseline = probe.run({"input_ids": ids})
    if probe.logits is not None and probe.logits.dim() != 3 and not _reads_last_token(probe, ids):
        return ProbeResult(
            f"{name} gives logits {tuple(probe.logits.shape)}, one for each sequence: behind its head {probe.head} it "
            f"takes something else than the last position that is no padding."
        )
    changed = ids.clone()
    changed[0, probed] += 1 if int(ids[0, probed]) == 0 else -1
    replaced = probe.run({"input_ids": changed}, nan_positions=[probed])
    if any(bool(each[:, other_positions].isnan().any()) for each in replaced):
        return ProbeResult(f"{name} mixes positions outside of attention, which context parallelism cannot divide.")
    if not _are_close(_select_comparable(baseline), _select_comparable(replaced), other_positions):
        return ProbeResult(f"{name} lets one token act on other positions outside of attention.")
    full_mask = torch.ones((1, length * ranks), dtype=torch.int64, device=ids.device)
    padded = full_mask.clone()
    padded[:, -1] = 0
    for padding_id in (None, _get_padding_id(probe.model)):
        explicit = probe.run(
            {"input_ids": ids, "position_ids": number_positions(ids, padding_id), "attention_mask": padded}
        )
        if _are_close(baseline, explicit, range(length)):
            break
    else:
        return ProbeResult(
            f"{name} computes something else with position_ids and attention_mask than without, where both say the "
            f"same, so context parallelism cannot give it a part of the positions."
        )
    equal_inputs = {
        "input_ids": ids[:, :1].expand_as(ids).contiguous(),
        "position_ids": torch.full_like(ids, last_position),
    }
    equal_outputs = probe.run({**equal_inputs, "attention_mask": full_mask}, has_equal_positions=True)
    if not all(
        _are_close([each], [each[:, :1].expand_as(each)], range(length)) for each in _select_comparable(equal_outputs)
    ):
        return ProbeResult(f"{name} counts positions by itself and not by position_ids.")
    padded = torch.ones_like(ids)
    padded[:, 0] = 0
    masked = probe.run({"input_ids": ids, "attention_mask": padded})
    return ProbeResult(
        None, positions_follow_mask=not _are_close(baseline, masked, range(1, length)), padding_id=padding_id
    )


def _reads_last_token(probe: _ProbeRunner, ids: Tensor) -> bool:
    """Return whether a sequence's output is the head's output at the last non-padding position."""
    padding_id, padded = _get_padding_id(probe.model), ids.clone()
    padded[:, -1] = int(ids[0, -1]) if padding_id is None else padding_id
    ordinals = torch.arange(1, ids.shape[1] + 1, device=ids.device)
    for ids_variant in (ids, padded):
        position = int((find_real_tokens(probe.model, ids_variant)[0] * ordinals).argmax())
        other_positions = [each for each in range(ids.shape[1]) if each != position]
        for changed, is_changed in (([position], True), (other_positions, False)):
            probe.run({"input_ids": ids_variant}, nan_positions=changed)
            if probe.logits is None or bool(probe.logits.isnan().any()) != is_changed:
                return False
    return True


def find_real_tokens(model: nn.Module, ids_BS: Tensor) -> Tensor:
    """Return which tokens are not padding, for a model that uses the last of them; bool, (B, S)."""
    padding_id = _get_padding_id(model)
    return torch.ones_like(ids_BS, dtype=torch.bool) if padding_id is None else ids_BS != padding_id


def _get_padding_id(model: nn.Module) -> int | None:
    padding_id = getattr(getattr(model, "config", None), "pad_token_id", None)
    return padding_id if isinstance(padding_id, int) else None


class _ProbeRunner:
    """Run a model with the probe.

    Attributes:
        logits: logits of the last run; None for a pipeline stage without logits.
        head: name of the last module with parameters outside of blocks.
    """

    logits: Tensor | None = None

    def __init__(
        self, model: nn.Module, layout: ModelLayout, attention_probe: AttentionProbe, call_model: CallModel
    ) -> None:
        self.model, self._attention_probe, self._call_model = model, attention_probe, call_model
        self._embedding = model.get_submodule(layout.embedding) if layout.embedding else None
        self._blocks = [model.get_submodule(stack[0]) for stack in layout.stacks]
        # A later pipeline stage takes arbitrary hidden states.
        prefixes = tuple(f"{block}." for block in layout.blocks)
        outside = [n for n, _ in model.named_parameters() if not n.startswith(prefixes)]
        self.head = outside[-1].rpartition(".")[0] if outside else ""
        self._starts_at_block = self._embedding is None or not any(True for _ in self._embedding.parameters())

    def run(
        self, inputs: dict[str, Tensor], *, nan_positions: list[int] | None = None, has_equal_positions: bool = False
    ) -> list[Tensor]:
        """Return the inputs of attention and the model's outputs, each (1, P, ...)."""
        self._attention_probe.recorded.clear()
        device = inputs["input_ids"].device
        devices = [] if device.type == "cpu" else [torch.accelerator.current_device_index()]
        with (
            torch.random.fork_rng(devices=devices, device_type=device.type if devices else "cuda"),
            torch.compiler.set_stance("force_eager"),
            torch.no_grad(),
            self._perturb_inputs(nan_positions, has_equal_positions=has_equal_positions and self._starts_at_block),
        ):
            torch.manual_seed(0)
            outputs = self._call_model(inputs)
        recorded = [*self._attention_probe.recorded]
        length = inputs["input_ids"].shape[1]
        self.logits = None if isinstance(outputs, tuple) else outputs.logits.detach()
        outputs = outputs if isinstance(outputs, tuple) else (outputs.logits,)
        floating = [each for each in outputs if isinstance(each, Tensor) and each.is_floating_point()]
        return recorded + [each.detach() for each in floating if each.dim() > 1 and each.shape[1] == length]

    @contextmanager
    def _perturb_inputs(self, nan_positions: list[int] | None, *, has_equal_positions: bool) -> Iterator[None]:

        def perturb(value: Any) -> Any:
            if not isinstance(value, Tensor) or not value.is_floating_point() or value.dim() != 3:
                return value
            if has_equal_positions:
                return value[:, :1].expand_as(value).contiguous()
            if nan_positions is not None:
                value = value.clone()
                value[:, nan_positions] = torch.nan
            return value

        def perturb_args(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            return tuple(map(perturb, args)), {key: perturb(value) for key, value in kwargs.items()}

        with ExitStack() as hooks:
            if self._starts_at_block:
                for block in self._blocks:
                    hooks.callback(block.register_forward_pre_hook(perturb_args, with_kwargs=True).remove)
            elif self._embedding is not None and nan_positions is not None:
                hooks.callback(self._embedding.register_forward_hook(lambda module, args, out: perturb(out)).remove)
            yield


def _select_comparable(run: list[Tensor]) -> list[Tensor]:
    """Return the tensors to compare between positions. In half precision these are only the first attention's inputs.

    After the first attention, rounding may route a token of another batch to another expert.
    """
    return run[:3] if any(each.dtype in (torch.float16, torch.bfloat16) for each in run) else run


def _are_close(first: Sequence[Tensor], second: Sequence[Tensor], rows: Sequence[int]) -> bool:
    if [each.shape for each in first] != [each.shape for each in second]:
        return False
    row_list = list(rows)
    pairs = [(one[:, row_list], other[:, row_list]) for one, other in zip(first, second, strict=True)]
    return all(
        float((one - other).abs().max()) <= torch.finfo(one.dtype).eps ** 0.5 * float(one.abs().max())
        for one, other in pairs
    )
