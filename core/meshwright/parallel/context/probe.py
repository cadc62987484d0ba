"""Find out whether a model mixes positions in its attention alone, and takes positions from `position_ids`.

The model runs on a few tokens of one sequence, without gradients, and each position attends to itself only. Then what
is done to one position must show at no other:

- NaN behind the embedding of one position, and another token there: exact for everything that carries hidden states;
- equal tokens at equal positions: attention must be given equal values, or something counts positions by itself;
- positions left to the model, and given: equal results, or the model's default positions are something else.

A model with one output per sequence must take it from the last position that is no padding. No class is known by name;
a model that runs into an error here is refused with it.
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
    """Replacement of attention: each position attends to itself, and what attention is given is recorded in `seen`."""

    def __init__(self) -> None:
        self.recorded: list[Tensor] = []

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Map (B, H, P, D) to (B, P, H, D)."""
        self.recorded += [each.transpose(1, 2).detach() for each in (query, key, value)]
        groups = query.shape[1] // value.shape[1]
        return value.repeat_interleave(groups, 1).transpose(1, 2).contiguous()


@dataclass(frozen=True)
class ProbeResult:
    """What the runs have shown: what is wrong with the model, or None.

    `positions_follow_mask`: it computes positions from an attention mask where it is given none; `padding`: the token id after
    which it numbers real tokens by itself (see `numbered`), None for from 0.
    """

    error: str | None
    positions_follow_mask: bool = False
    padding_id: int | None = None


def number_positions(ids_BS: Tensor, padding_id: int | None) -> Tensor:
    """Return a model's default positions: from 0, or real tokens from `padding_id` + 1."""
    if padding_id is None:
        return torch.arange(ids_BS.shape[1], device=ids_BS.device).expand_as(ids_BS)
    real = (ids_BS != padding_id).long()
    return real.cumsum(1) * real + padding_id


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
    """Find what is wrong with a model, and how it numbers positions. Collective as its forward is.

    The model, possibly sharded, is run by `call_model` on a few of the tokens, a multiple of `length_multiple`, with the observer as
    its attention. Attention masks are `num_ranks` (of cp) times as long as this rank's positions.
    """
    length = length_multiple * -(-NUM_PROBE_TOKENS // length_multiple)
    ids = ids_BS[:1].repeat(1, -(-length // ids_BS.shape[1]))[:, :length].contiguous()
    # As far from the start as positions may be.
    far = min(length * num_ranks, max(length, ids_BS.shape[1])) - 1
    try:
        return _run_checks(name, _ProbeRunner(model, layout, attention_probe, call_model), ids, far, num_ranks)
    except (MeshwrightError, torch.OutOfMemoryError, dist.DistError):
        raise
    except Exception as error:
        # Whatever a model's own code does with unusual masks or positions.
        reason = (str(error).strip().splitlines() or [""])[0]
        return ProbeResult(f"{name} cannot run on a part of the positions ({type(error).__name__}: {reason}).")


def _run_checks(name: str, probe: _ProbeRunner, ids: Tensor, last_position: int, ranks: int) -> ProbeResult:
    length = ids.shape[1]
    chosen = length // 2
    others = [each for each in range(length) if each != chosen]
    alone = probe.run({"input_ids": ids})
    if probe.logits is not None and probe.logits.dim() != 3 and not _reads_last_token(probe, ids):
        return ProbeResult(
            f"{name} gives logits {tuple(probe.logits.shape)}, one for each sequence: behind its head {probe.head} it "
            f"takes something else than the last position that is no padding."
        )
    changed = ids.clone()
    changed[0, chosen] += 1 if int(ids[0, chosen]) == 0 else -1
    replaced = probe.run({"input_ids": changed}, nan_positions=[chosen])
    if any(bool(each[:, others].isnan().any()) for each in replaced):
        return ProbeResult(f"{name} mixes positions outside of attention, which context parallelism cannot divide.")
    if not _are_close(_select_comparable(alone), _select_comparable(replaced), others):
        return ProbeResult(f"{name} lets one token act on other positions outside of attention.")
    whole = torch.ones((1, length * ranks), dtype=torch.int64, device=ids.device)
    padded = whole.clone()
    padded[:, -1] = 0
    for padding in (None, _get_padding_id(probe.model)):
        given = probe.run({"input_ids": ids, "position_ids": number_positions(ids, padding), "attention_mask": padded})
        if _are_close(alone, given, range(length)):
            break
    else:
        return ProbeResult(
            f"{name} computes something else with position_ids and attention_mask than without, where both say the "
            f"same, so context parallelism cannot give it a part of the positions."
        )
    equal = {"input_ids": ids[:, :1].expand_as(ids).contiguous(), "position_ids": torch.full_like(ids, last_position)}
    alike = probe.run({**equal, "attention_mask": whole}, has_equal_positions=True)
    if not all(_are_close([each], [each[:, :1].expand_as(each)], range(length)) for each in _select_comparable(alike)):
        return ProbeResult(f"{name} counts positions by itself and not by position_ids.")
    padded = torch.ones_like(ids)
    padded[:, 0] = 0
    masked = probe.run({"input_ids": ids, "attention_mask": padded})
    return ProbeResult(None, positions_follow_mask=not _are_close(alone, masked, range(1, length)), padding_id=padding)


def _reads_last_token(probe: _ProbeRunner, ids: Tensor) -> bool:
    """Return whether the output of a sequence is what the head gives for the last position that is no padding."""
    padding, padded = _get_padding_id(probe.model), ids.clone()
    padded[:, -1] = int(ids[0, -1]) if padding is None else padding
    places = torch.arange(1, ids.shape[1] + 1, device=ids.device)
    for given in (ids, padded):
        position = int((find_real_tokens(probe.model, given)[0] * places).argmax())
        others = [each for each in range(ids.shape[1]) if each != position]
        for changed, is_changed in (([position], True), (others, False)):
            probe.run({"input_ids": given}, nan_positions=changed)
            if probe.logits is None or bool(probe.logits.isnan().any()) != is_changed:
                return False
    return True


def find_real_tokens(model: nn.Module, ids_BS: Tensor) -> Tensor:
    """Return which tokens are no padding to a model that looks for the last of them; bool, (B, S)."""
    padding = _get_padding_id(model)
    return torch.ones_like(ids_BS, dtype=torch.bool) if padding is None else ids_BS != padding


def _get_padding_id(model: nn.Module) -> int | None:
    padding = getattr(getattr(model, "config", None), "pad_token_id", None)
    return padding if isinstance(padding, int) else None


class _ProbeRunner:
    """Runs of a model.

    `logits` are those of the last run, None for a pipeline stage that has none; `head` is the last module with
    parameters outside of blocks.
    """

    logits: Tensor | None = None

    def __init__(
        self, model: nn.Module, layout: ModelLayout, attention_probe: AttentionProbe, call_model: CallModel
    ) -> None:
        self.model, self._attention_probe, self._call_model = model, attention_probe, call_model
        self._embedding = model.get_submodule(layout.embedding) if layout.embedding else None
        self._blocks = [model.get_submodule(stack[0]) for stack in layout.stacks]
        # A later stage of a pipeline is given hidden states, whatever they are.
        within = tuple(f"{block}." for block in layout.blocks)
        outside = [n for n, _ in model.named_parameters() if not n.startswith(within)]
        self.head = outside[-1].rpartition(".")[0] if outside else ""
        self._starts_at_block = self._embedding is None or not any(True for _ in self._embedding.parameters())

    def run(
        self, inputs: dict[str, Tensor], *, nan_positions: list[int] | None = None, has_equal_positions: bool = False
    ) -> list[Tensor]:
        """Return what attention is given and what the model returns, each (1, P, ...)."""
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
        seen = [*self._attention_probe.recorded]
        length = inputs["input_ids"].shape[1]
        self.logits = None if isinstance(outputs, tuple) else outputs.logits.detach()
        outputs = outputs if isinstance(outputs, tuple) else (outputs.logits,)
        floating = [each for each in outputs if isinstance(each, Tensor) and each.is_floating_point()]
        return seen + [each.detach() for each in floating if each.dim() > 1 and each.shape[1] == length]

    @contextmanager
    def _perturb_inputs(self, nan_positions: list[int] | None, *, has_equal_positions: bool) -> Iterator[None]:

        def change(value: Any) -> Any:
            if not isinstance(value, Tensor) or not value.is_floating_point() or value.dim() != 3:
                return value
            if has_equal_positions:
                return value[:, :1].expand_as(value).contiguous()
            if nan_positions is not None:
                value = value.clone()
                value[:, nan_positions] = torch.nan
            return value

        def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            return tuple(map(change, args)), {key: change(value) for key, value in kwargs.items()}

        with ExitStack() as hooks:
            if self._starts_at_block:
                for block in self._blocks:
                    hooks.callback(block.register_forward_pre_hook(before, with_kwargs=True).remove)
            elif self._embedding is not None and nan_positions is not None:
                hooks.callback(self._embedding.register_forward_hook(lambda module, args, out: change(out)).remove)
            yield


def _select_comparable(run: list[Tensor]) -> list[Tensor]:
    """Return what can be compared between positions: in half precision only what the first attention is given.

    Behind that, the rounding of another batch may send a token to another expert.
    """
    return run[:3] if any(each.dtype in (torch.float16, torch.bfloat16) for each in run) else run


def _are_close(first: Sequence[Tensor], second: Sequence[Tensor], rows: Sequence[int]) -> bool:
    if [each.shape for each in first] != [each.shape for each in second]:
        return False
    chosen = list(rows)
    pairs = [(one[:, chosen], other[:, chosen]) for one, other in zip(first, second, strict=True)]
    return all(
        float((one - other).abs().max()) <= torch.finfo(one.dtype).eps ** 0.5 * float(one.abs().max())
        for one, other in pairs
    )
