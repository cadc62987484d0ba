"""Gradients of parameters that several stages hold, and norms in which each parameter counts once.

[Note: copies] A parameter that several stages need, such as the weight of a tied embedding and head, exists on each of
them, with the summed gradient of all. Equal gradients and optimizer states keep the copies equal. Norms and saved state
include only the first copy. The inner strategy reduces gradients over the ranks of a stage.
Source: Huang et al. 2019, arXiv:1811.06965.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshwright.plugin import DataParallelManager, GradientReport, Mesh, combine_norms, sort_parts

from .parameter_names import StagedParameterNames


class SharedParameters:
    """Shared parameters on this rank's stages; see [Note: copies]."""

    def __init__(
        self,
        names: StagedParameterNames,
        managers: Mapping[int, DataParallelManager],
        placement: Sequence[int],
        mesh: Mesh,
    ) -> None:
        self._names, self._managers, self._placement, self._mesh = names, managers, placement, mesh

    def sum_gradients(self, reports: Mapping[int, GradientReport]) -> GradientReport:
        """Set the gradient of each copy to the sum over all copies, bitwise equal on all ranks. Collective.

        `reports` are the gradient reports of this rank's stages. Returns a report of the shared parameters that this
        rank has used, with an entry for each shared parameter of the model.
        """
        unused = {parameter for findings in reports.values() for parameter in findings.iter_unused()}
        trainable = {index: set(manager.iter_trainable()) for index, manager in self._managers.items()}
        trained, used = [], []
        for name, holders in self._names.stages_by_shared_name.items():
            mine = {index: self._find_copy(index, name) for index in holders if index in self._managers}
            copies = [copy for index, copy in mine.items() if copy in trainable[index]]
            used.append(any(copy.grad is not None and copy not in unused for copy in copies))
            trained.append(copies)
            if copies:
                self._sum_copies(mine, sorted({self._placement[index] for index in holders}))
        return GradientReport(trained, used)

    def iter_frozen(self) -> Iterator[tuple[str, int, int]]:
        """Yield name in the full model, index of the copy and number of copies for each parameter frozen here."""
        for index, manager in self._managers.items():
            for name in manager.trainable_parameters.find_frozen():
                canonical = self._names.first_name[name]
                holders = self._names.stages_by_shared_name.get(canonical, (index,))
                yield canonical, holders.index(index), len(holders)

    def total_norm(self, norm_type: float) -> Tensor:
        """Return the norm of the gradients of all stages, a float64 scalar, equal on all ranks. Collective."""
        norms = [
            manager.gradients.compute_total_norm(norm_type, excluded=self._find_repeated(index))
            for index, manager in self._managers.items()
        ]
        return combine_norms(norms, norm_type, self._mesh.group("pp"), self._mesh.device)

    def norms_by_part(self) -> dict[str, float]:
        parts = sort_parts(self._names.part_by_name.values())
        squares = torch.zeros(len(parts), dtype=torch.float64)
        for index, manager in self._managers.items():
            repeated = set(self._find_repeated(index))
            counted = {
                parameter: self._names.part_by_name[self._names.first_name[name]]
                for name, parameter in manager.named_trainable_parameters()
                if parameter not in repeated
            }
            squares += manager.gradients.sum_squares(counted, parts)
        squares = squares.to(self._mesh.device)
        dist.all_reduce(squares, group=self._mesh.group("pp"))
        return dict(zip(parts, squares.sqrt().tolist(), strict=True))

    def _find_repeated(self, stage: int) -> list[nn.Parameter]:
        """Return the optimizer parameters of a stage that an earlier stage already counts."""
        shared = self._names.stages_by_shared_name
        return [self._find_copy(stage, name) for name, holders in shared.items() if stage in holders[1:]]

    def _find_copy(self, stage: int, canonical: str) -> nn.Parameter:
        manager = self._managers[stage]
        names = manager.model.named_parameters()
        return manager.gradients.get_optimizer_parameter(
            next(copy for name, copy in names if self._names.first_name[name] == canonical)
        )

    def _sum_copies(self, copies: Mapping[int, nn.Parameter], ranks: Sequence[int]) -> None:
        """Sum the gradients of one parameter over the ranks along `pp` that hold copies of it."""
        # Each rank sums its own copies, then all ranks sum these in the same order: the results are bitwise equal.
        own = torch.stack(
            [self._managers[index].gradients.get_local_gradient(copy) for index, copy in copies.items()]
        ).sum(0)
        total = torch.stack(self._exchange_gradients(own, ranks)).sum(0)
        for index, copy in copies.items():
            self._managers[index].gradients.set_summed_gradient(copy, total.clone() if len(copies) > 1 else total)

    def _exchange_gradients(self, own: Tensor, ranks: Sequence[int]) -> list[Tensor]:
        """Return the gradients of the given ranks along `pp`, which include this rank, in their order."""
        group, rank = self._mesh.group("pp"), self._mesh.axis_rank("pp")
        received = {other: torch.empty_like(own) for other in ranks if other != rank}
        operations = [dist.P2POp(dist.isend, own, group=group, group_peer=other) for other in received]
        operations += [
            dist.P2POp(dist.irecv, tensor, group=group, group_peer=other) for other, tensor in received.items()
        ]
        for work in dist.batch_isend_irecv(operations) if operations else ():
            work.wait()
        return [own if other == rank else received[other] for other in ranks]
