"""TRL's GRPOTrainer on a mesh, with completions of the full model or of a server.

[Note: shared completions] TRL generates, scores and shuffles on each process. On a mesh, ranks that differ in pp, cp or
tp share a batch and need the same completion of each prompt, although rounding and random generators may differ. All of
them generate, which takes no longer than on one rank. Then all use the completions, the rewards and the generators'
states of the first.

[Note: a microbatch is a group] GRPO's losses are divided by rows, by tokens of the microbatch, by all generated tokens,
or by a constant, and averaged over processes and microbatches. The objective therefore treats a microbatch as one
group, calls TRL's loss once for it, and counts 1. This is correct for every divisor.

Shapes: B rows of a microbatch, S tokens of a prompt with its completion, C tokens of the completion.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from transformers import set_seed
from transformers.trainer_utils import EvalLoopOutput

from meshwright.plugin import IGNORE_INDEX, ConfigError, Objective

from ._compat import WEIGHT_ITERATOR, is_vlm, patch_functions, record_microbatch, use_reference_adapter
from .arguments import find_training_arguments
from .checkpoint import RngState
from .mixin import MeshTrainerMixin
from .objective import ModelProxy, TrainerLoss

BUCKET_BYTES = 256 << 20
"""Maximum size of weights that are sent to a server at once."""


class MicrobatchLoss(TrainerLoss):
    """Loss of complete microbatches; see [Note: a microbatch is a group]."""

    def begin_step(self, microbatches: list[dict[str, Any]]) -> None:
        super().begin_step(microbatches)
        self.is_mean = True
        self.group_size = len(microbatches[0]["input_ids"]) if microbatches else 1

    def row_order(self, count: int, device: torch.device) -> Tensor:
        return torch.arange(count, device=device)

    def split_calls(self, count: int, device: torch.device) -> list[Tensor]:
        return list(torch.arange(count, device=device).split(self.group_size))

    def count(self, batch: Mapping[str, Tensor]) -> int:
        return len(batch["labels"]) // self.group_size


class MeshGRPOMixin(MeshTrainerMixin):
    """First base of a class that derives from trl's `GRPOTrainer`; see `MeshTrainerMixin`.

    Without `use_vllm`, each rank generates with the full model, which must fit in memory along with its shards. With
    `use_vllm=True, vllm_mode="server"`, weights are streamed to the server in bounded memory, with adapters merged.
    """

    bucket_bytes = BUCKET_BYTES

    def __init__(self, model: Any = None, *args: Any, mesh: Any = None, **kwargs: Any) -> None:
        self._scales_logits = True
        self._scored_inputs: dict[str, Any] = {}
        # `rows_per_group` needs them: if the model is a path, the mesh is opened before Trainer sets them.
        self.args = find_training_arguments([*args, *kwargs.values()])
        super().__init__(model, *args, mesh=mesh, **kwargs)
        for each in (self.model, self.ref_model):
            scale_logits(each, lambda: self.args.temperature if self._scales_logits else 1.0)
        if self.args.use_vllm:
            setattr(self.vllm_generation, WEIGHT_ITERATOR, self.iter_full_parameters)
        # Equal to the seeds of one process per data rank.
        set_seed(self.args.seed + self.mesh.data_rank)

    def create_accelerator_and_postprocess(self) -> None:
        check_generation(self)
        super().create_accelerator_and_postprocess()
        set_generation_batch_size(self.args, self.mesh.data_size)

    @property
    def rows_per_group(self) -> int:
        return int(self.args.per_device_train_batch_size)

    @property
    def num_loss_processes(self) -> int:
        return int(self.mesh.data_size)

    # -- completions

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        reported = self.accelerator.gather_objects
        functions = {
            "gather": lambda values: torch.cat(reported(values.cpu())).to(values.device),
            "gather_object": lambda values: [each for part in reported(values) for each in part],
            "use_adapter": lambda *_, **__: use_reference_adapter(self.manager.model_parts),
        }
        with patch_functions(functions):
            return super()._generate_and_score_completions(inputs)

    def _generate_single_turn(self, *args: Any, **kwargs: Any) -> Any:
        """Return completions of the first rank that shares this batch; see [Note: shared completions]. Collective."""
        generate = functools.partial(super()._generate_single_turn, *args, **kwargs)
        found = generate() if self.args.use_vllm else self._generate_unsharded(generate)
        if self.get_tp_size() > 1:
            found, generators = self.accelerator.gather_objects((found, RngState()))[self.mesh.data_rank]
            generators.restore()
        return found

    def _generate_unsharded(self, generate: Callable[[], Any]) -> Any:
        is_training = self.model.training
        self._scales_logits = False
        try:
            with self.manager.unshard():
                self._set_training(False)
                return generate()
        finally:
            self._scales_logits = True
            self._set_training(is_training)

    def iter_full_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the base model's names and full tensors, adapters merged, for a server. Each step is collective."""
        yield from self.manager.iter_parameters(bucket_bytes=self.bucket_bytes, adapters="merged")

    # -- log-probabilities, of old weights and of a reference

    def _get_per_token_logps_and_entropies(
        self,
        model: Any,
        input_ids: Tensor,
        attention_mask: Tensor,
        logits_to_keep: int,
        batch_size: int | None = None,
        **kwargs: Any,
    ) -> Any:
        """Return log-probabilities of completions under the model or the reference model, (B, C). Collective.

        C is `logits_to_keep`. No entropies are returned."""
        if isinstance(model, ModelProxy):
            ask = super()._get_per_token_logps_and_entropies
            return ask(model, input_ids, attention_mask, logits_to_keep, batch_size, **kwargs)
        labels = make_completion_labels(input_ids, attention_mask, logits_to_keep)
        batch = {"input_ids": input_ids, "attention_mask": attention_mask, "labels": labels}
        size, count = batch_size or len(input_ids), len(input_ids)
        parts = [{name: each[at : at + size] for name, each in batch.items()} for at in range(0, count, size)]
        is_reference = self.ref_model is not None and model is self.ref_model
        known: AbstractContextManager[Any] = self._use_reference() if is_reference else nullcontext(self.manager)
        generators = RngState()
        with known as manager:
            stats = manager.token_stats(parts, ["log_probs"])
        # Probing a layout may draw random numbers, on some ranks only.
        generators.restore()
        return torch.cat([each["log_probs"][:, :-1][:, -logits_to_keep:] for each in stats]), None, None

    def _prepare_inputs(self, generation_batch: Any) -> dict[str, Any]:
        """Return scored completions, with the keys of a microbatch added."""
        inputs = super()._prepare_inputs(generation_batch)
        if "prompt_ids" not in inputs:
            return inputs
        ids, mask = (
            torch.cat([inputs[f"prompt_{kind}"], inputs[f"completion_{kind}"]], dim=1) for kind in ("ids", "mask")
        )
        labels = make_completion_labels(ids, mask, inputs["completion_ids"].shape[1])
        self._scored_inputs = {**inputs, "input_ids": ids, "attention_mask": mask, "labels": labels}
        return self._scored_inputs

    # -- steps and evaluation

    def _get_objective(self, *, takes_logits: bool) -> Objective:
        if False not in self._losses:
            self._losses[False] = MicrobatchLoss(self)
        return self._losses[False]

    def _add_reference(self, microbatches: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        return [dict(inputs) for inputs in microbatches]

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        start = time.perf_counter()
        loss = super().training_step(model, inputs, num_items_in_batch)
        record_microbatch(self, time.perf_counter() - start)
        return loss

    def floating_point_ops(self, inputs: Any) -> int:
        """See `MeshTrainerMixin`. Counts the last microbatch with its completions, but not their generation."""
        return super().floating_point_ops(self._scored_inputs)

    def _without_repeats(self, make: Any, *args: Any, **kwargs: Any) -> Any:
        # Groups of completions extend over data ranks, so all of them need a batch.
        return make(*args, **kwargs)

    def _run_evaluation(self, dataloader: Any, *, takes_predictions: bool, metric_key_prefix: str) -> EvalLoopOutput:
        """Generate completions of the evaluation's prompts, and return their mean loss.

        Trainer drops duplicated rows by the number of prompts, so its mean misses some rows.
        """
        total, count, samples = 0.0, 0, 0
        for batch in dataloader:
            self._set_training(False)
            loss, each, _ = self.evaluate_batch(self._prepare_inputs(batch), takes_logits=False)
            total, count, samples = total + loss * each, count + each, samples + len(batch) * self.mesh.data_size
            self.control = self.callback_handler.on_prediction_step(self.args, self.state, self.control)
        self._set_training(False)
        metrics = {f"{metric_key_prefix}_loss": total / count} if count else {}
        return EvalLoopOutput(predictions=None, label_ids=None, metrics=metrics, num_samples=samples)


def make_completion_labels(ids: Tensor, mask: Tensor, keep: int) -> Tensor:
    """Return labels of the last `keep` tokens, with padding and all earlier tokens masked; int64, (B, S)."""
    labels = ids.masked_fill(mask == 0, IGNORE_INDEX)
    labels[:, :-keep] = IGNORE_INDEX
    return labels


def scale_logits(model: nn.Module | None, temperature: Callable[[], float]) -> None:
    """Divide the outputs of a model's head by `temperature()`."""
    if model is None:
        return

    def divided(_: nn.Module, __: Any, logits: Tensor) -> Tensor | None:
        now = temperature()
        return None if now == 1.0 else logits / now

    model.get_output_embeddings().register_forward_hook(divided)


def check_generation(trainer: Any) -> None:
    """Raise ConfigError for settings of a GRPO trainer, other than its arguments, that a mesh does not support."""
    for name in ("tools", "environment_factories", "rollout_func"):
        if getattr(trainer, name, None):
            raise ConfigError(
                f"{name.replace('factories', 'factory')} is not supported on a mesh: ranks would generate different "
                f"numbers of times, and wait for each other. Leave it out."
            )
    if is_vlm(trainer):
        raise ConfigError("image processors are not supported on a mesh yet. Use a tokenizer, and only texts as data.")
    stages = trainer.mesh_options.sizes.pp_size or 1
    if stages > 1 and not trainer.args.use_vllm:
        raise ConfigError(
            f"pp_size={stages}: a rank has some stages of the model, and cannot generate with them. Set use_vllm=True "
            f"and vllm_mode='server', to generate on a server, or pp_size=1 with tp_size or fsdp2."
        )
    train, evaluated = trainer.args.per_device_train_batch_size, trainer.args.per_device_eval_batch_size
    if stages > 1 and trainer.args.eval_strategy != "no" and evaluated != train:
        raise ConfigError(
            f"per_device_eval_batch_size={evaluated} with pp_size={stages}: stages need microbatches of the same size "
            f"as in training, per_device_train_batch_size={train}. Set both to the same value, or eval_strategy='no'."
        )


def set_generation_batch_size(args: Any, data_size: int) -> None:
    """Set batch sizes by the number of data ranks. GRPOConfig computes them by the number of processes."""
    args.generation_batch_size = args.per_device_train_batch_size * data_size * args.steps_per_generation
    sizes = [("generation_batch_size", args.generation_batch_size, args.num_generations)]
    if args.do_eval and args.eval_strategy != "no":
        groups = args.num_generations_eval or args.num_generations
        sizes.append(("per_device_eval_batch_size x data ranks", args.per_device_eval_batch_size * data_size, groups))
    for name, size, group in sizes:
        if size % group:
            raise ConfigError(
                f"{name}={size} over {data_size} data ranks (ranks that differ in pp, cp or tp share a batch) is not a "
                f"multiple of the {group} completions of a prompt. Change the per_device batch sizes or "
                f"steps_per_generation."
            )
