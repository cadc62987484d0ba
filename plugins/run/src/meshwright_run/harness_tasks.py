"""Tasks of the lm-eval harness, on a model in any layout.

Rank 0 runs the harness. Each of its requests is sent to all ranks, which compute it together.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from meshwright.plugin import IGNORE_INDEX, ConfigError, MeshwrightError, StrategyManager, format_install_hint

Encoded = tuple[list[int], list[int]]
"""Tokens of a context, and of its continuation, which is scored."""
_LENGTH_MULTIPLE = 64
"""Rows are padded to a multiple of this length, which context parallelism can divide."""
_MICROBATCHES_PER_CALL = 16


@dataclass(frozen=True)
class TaskOptions:
    """Tasks to run. `directory`: further task files, whose templates and functions are code. `limit`: examples of each
    task; None: all."""

    names: tuple[str, ...]
    directory: Path | None = None
    num_fewshot: int | None = None
    limit: int | None = None


def check_harness(options: TaskOptions, *, trusts_code: bool) -> None:
    """Raise ConfigError if the harness is not installed, or the directory of tasks may not be used."""
    if options.directory is not None and not options.directory.is_dir():
        raise ConfigError(f"--task-dir={str(options.directory)!r} is not a directory.")
    if options.directory is not None and not trusts_code:
        raise ConfigError(
            f"--task-dir={str(options.directory)!r}: task files run code, their templates and the functions that they "
            "name. Read them, and add --trust-task-code."
        )
    try:
        import lm_eval  # noqa: F401
    except ImportError:
        raise ConfigError(f"--task needs lm-eval. {format_install_hint('eval')}") from None


class RankModel:
    """The part of a model that this rank holds, with the two kinds of requests. All methods are collective.

    Args:
        max_length: tokens of a row; longer ones lose their beginning.
        micro_batch_size: rows of a forward on each rank.
    """

    def __init__(self, manager: StrategyManager, tokenizer: Any, *, max_length: int, micro_batch_size: int) -> None:
        self.manager, self.tokenizer = manager, tokenizer
        self.max_length, self.micro_batch_size = max_length, micro_batch_size

    def score(self, requests: Sequence[Encoded]) -> list[tuple[float, bool]]:
        """Return for each request the log-probability of the continuation [nats], and whether it is the most likely."""
        mesh = self.manager.mesh
        size = self.micro_batch_size * mesh.data_size
        # Rows of similar length share a micro-batch. The last group is filled with copies, which do not count.
        order = sorted(range(len(requests)), key=lambda number: -sum(map(len, requests[number])))
        groups = [order[start : start + size] for start in range(0, len(order), size)]
        own = slice(mesh.data_rank * self.micro_batch_size, (mesh.data_rank + 1) * self.micro_batch_size)
        sums = torch.zeros(len(requests), 2, dtype=torch.float64)
        for start in range(0, len(groups), _MICROBATCHES_PER_CALL):
            block = groups[start : start + _MICROBATCHES_PER_CALL]
            batches = [self._build_rows(requests, [*group, *group[-1:] * (size - len(group))], own) for group in block]
            found = self.manager.token_stats(batches, ["log_probs", "is_top1"])
            for group, batch, each in zip(block, batches, found, strict=True):
                # The statistics of a position are those of the next label.
                is_target = F.pad(batch["labels"][:, 1:] != IGNORE_INDEX, (0, 1))
                log_probs, is_top1 = (each[name].cpu() for name in ("log_probs", "is_top1"))
                values = [log_probs.sum(1, dtype=torch.float64), ((is_top1 > 0) | ~is_target).all(1).double()]
                numbers = group[own]
                sums[numbers] = torch.stack(values, 1)[: len(numbers)]
        if not mesh.is_data_leader:
            sums.zero_()
        mesh.world.reduce_ints([0])
        dist.all_reduce(sums, group=mesh.world.group)
        return [(log_prob, bool(is_top1)) for log_prob, is_top1 in sums.tolist()]

    def _build_rows(self, requests: Sequence[Encoded], numbers: Sequence[int], own: slice) -> dict[str, torch.Tensor]:
        rows = [
            [*context, *continuation][-self.max_length :] for context, continuation in (requests[n] for n in numbers)
        ]
        length = min(-(-max(map(len, rows)) // _LENGTH_MULTIPLE) * _LENGTH_MULTIPLE, self.max_length)
        ids = torch.zeros(self.micro_batch_size, length, dtype=torch.int64)
        labels = torch.full_like(ids, IGNORE_INDEX)
        for index, (row, number) in enumerate(zip(rows[own], numbers[own], strict=True)):
            ids[index, : len(row)] = torch.tensor(row)
            count = min(len(requests[number][1]), len(row) - 1)
            labels[index, len(row) - count : len(row)] = torch.tensor(row[len(row) - count :])
        return {"input_ids": ids, "labels": labels}

    def generate(self, prompt: list[int], stops: Sequence[str], max_new_tokens: int) -> str:
        """Return the greedy continuation of a prompt, up to the first of `stops`."""
        model: Any = self.manager.model_parts[0]
        room = self.max_length - max_new_tokens
        if room < 1:
            raise ConfigError(
                f"a task generates {max_new_tokens} tokens, but the model has {self.max_length} positions. Leave this "
                f"task out."
            )
        ids = torch.tensor([prompt[-room:]], device=next(model.parameters()).device)
        model.eval()
        with torch.no_grad():
            output = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=max_new_tokens,
                do_sample=False,
                pad_token_id=self.tokenizer.eos_token_id,
                stop_strings=list(stops) or None,
                tokenizer=self.tokenizer,
            )
        text = self.tokenizer.decode(output[0, ids.shape[1] :], skip_special_tokens=True)
        for stop in stops:
            text = text.partition(stop)[0]
        return str(text)

    def check_can_generate(self) -> None:
        degrees = self.manager.mesh.degrees
        if degrees.pp > 1 or degrees.cp > 1:
            raise ConfigError(
                f"this task generates text, which needs pp_size=1 and cp_size=1, but the mesh is {degrees}. Set "
                "--set pp_size=1 --set cp_size=1."
            )


def run_tasks(model: RankModel, options: TaskOptions, *, seed: int) -> dict[str, dict[str, float]]:
    """Return the metrics of each task, by the harness's names. Collective; raises ConfigError on all ranks."""
    world = model.manager.mesh.world
    if world.rank:
        return _serve_requests(model)
    error: MeshwrightError | None = None
    results: dict[str, dict[str, float]] = {}
    try:
        results = _run_harness(model, options, seed)
    except MeshwrightError as caught:
        error = caught
    except Exception as caught:
        # Task files run code of their own, and the harness raises what the hub raises.
        error = ConfigError(f"--task {', '.join(options.names)}: {type(caught).__name__}: {caught}")
    world.run_on_first_rank(lambda: None)
    world.raise_on_all_ranks(error)
    return results


def _serve_requests(model: RankModel) -> dict[str, dict[str, float]]:
    world = model.manager.mesh.world
    while (request := world.run_on_first_rank(lambda: None)) is not None:
        name, arguments = request
        # Rank 0 has the same error, and reports it.
        with suppress(MeshwrightError):
            getattr(model, name)(*arguments)
    world.raise_on_all_ranks(None)
    return {}


def _run_harness(model: RankModel, options: TaskOptions, seed: int) -> dict[str, dict[str, float]]:
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path=None if options.directory is None else str(options.directory))
    if unknown := [name for name in options.names if not manager.match_tasks([name])]:
        where = "" if options.directory is None else f" or in {options.directory}"
        raise ConfigError(
            f"--task {', '.join(unknown)}: no task of that name in lm-eval{where}. Its names: lm-eval ls tasks."
        )
    found = simple_evaluate(
        model=_build_harness_model(model),
        tasks=list(options.names),
        num_fewshot=options.num_fewshot,
        limit=options.limit,
        task_manager=manager,
        log_samples=False,
        bootstrap_iters=0,
        random_seed=seed,
        numpy_random_seed=seed,
        torch_random_seed=seed,
        fewshot_random_seed=seed,
    )
    return {
        name: {
            metric.removesuffix(",none"): value
            for metric, value in values.items()
            if isinstance(value, float | int) and not isinstance(value, bool) and "_stderr" not in metric
        }
        for name, values in (found or {})["results"].items()
    }


def _build_harness_model(model: RankModel) -> Any:
    from lm_eval.api.model import TemplateLM
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

    world, tokenizer = model.manager.mesh.world, model.tokenizer

    def call(name: str, *arguments: Any) -> Any:
        world.run_on_first_rank(lambda: (name, arguments))
        return getattr(model, name)(*arguments)

    class HarnessModel(TemplateLM):
        @property
        def eot_token_id(self) -> int:
            return int(tokenizer.eos_token_id)

        @property
        def tokenizer_name(self) -> str:
            return str(tokenizer.name_or_path)

        def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
            return list(tokenizer.encode(string, add_special_tokens=bool(add_special_tokens)))

        def _loglikelihood_tokens(self, requests: Any, disable_tqdm: bool = False, **_: Any) -> Any:
            return call("score", [(list(context), list(continuation)) for _, context, continuation in requests])

        def loglikelihood_rolling(self, requests: Any, disable_tqdm: bool = False) -> list[float]:
            pairs: list[Encoded] = []
            counts = []
            for request in requests:
                windows = get_rolling_token_windows(
                    token_list=self.tok_encode(request.args[0]),
                    prefix_token=self.prefix_token_id,
                    max_seq_len=model.max_length - 1,
                    context_len=1,
                )
                own = [make_disjoint_window(each) for each in windows]
                pairs += [(list(context), list(continuation)) for context, continuation in own]
                counts.append(len(own))
            values = iter(call("score", pairs))
            return [sum(next(values)[0] for _ in range(count)) for count in counts]

        def generate_until(self, requests: Any, disable_tqdm: bool = False) -> list[str]:
            model.check_can_generate()
            answers = []
            for request in requests:
                text, arguments = request.args
                stops = arguments.get("until") or []
                stops = [stops] if isinstance(stops, str) else list(stops)
                count = int(arguments.get("max_gen_toks", 256))
                answers.append(call("generate", self.tok_encode(text), [each for each in stops if each], count))
            return answers

    return HarnessModel()
