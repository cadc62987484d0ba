"""TRL's GRPOTrainer over a mesh: completions of the whole model or of a server, and its own loss.

[Note: one completion for all that share a batch] TRL generates, scores and shuffles on each process. Over a mesh, ranks
that differ in pp, cp or tp have one batch and must have one completion of each prompt, whatever their kernels round
and their generators draw. So all of them generate, which takes as long as one, and the first one's completions, its
generators behind them, and its rewards are those of the others too.

[Note: a microbatch is a group] Losses of GRPO are divided by rows, by tokens of a microbatch, by those of all that was
generated, or by a constant, and averaged over processes and microbatches. So the objective takes a microbatch as one
group, whole, calls TRL's loss of it once, and counts 1: whatever it divides by is right.

Shapes: B rows of a microbatch, S tokens of a prompt and its completion, C of these the completion's.
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
"""Of weights that travel at once on their way to a server."""


class MicrobatchLoss(TrainerLoss):
    """The loss of whole microbatches; see [Note: a microbatch is a group]."""

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
    """Goes before a class that derives from trl's `GRPOTrainer`; see `MeshTrainerMixin`.

    Without `use_vllm`, each rank generates with the whole model, which has to fit beside its shards. With
    `use_vllm=True, vllm_mode="server"`, weights are streamed to the server, adapters merged, in bounded memory.
    """

    bucket_bytes = BUCKET_BYTES

    def __init__(self, model: Any = None, *args: Any, mesh: Any = None, **kwargs: Any) -> None:
        self._scales_logits = True
        self._scored_inputs: dict[str, Any] = {}
        # For `rows_per_group`: where the model is a path, the mesh is opened before Trainer has them.
        self.args = find_training_arguments([*args, *kwargs.values()])
        super().__init__(model, *args, mesh=mesh, **kwargs)
        for each in (self.model, self.ref_model):
            scale_logits(each, lambda: self.args.temperature if self._scales_logits else 1.0)
        if self.args.use_vllm:
            setattr(self.vllm_generation, WEIGHT_ITERATOR, self.iter_full_parameters)
        # As many processes as there are data ranks would have these.
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
        """What the first rank of those that share this batch generates; see the module's first note. Collective."""
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
        """What a server is fed with: the base's names and whole tensors, adapters merged. Collective, each step too."""
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
        """Log-probabilities of completions under the model or the reference model, (B, C), of C = `logits_to_keep`; no
        entropies. Collective."""
        if isinstance(model, ModelProxy):
            ask = super()._get_per_token_logps_and_entropies
            return ask(model, input_ids, attention_mask, logits_to_keep, batch_size, **kwargs)
        labels = make_completion_labels(input_ids, attention_mask, logits_to_keep)
        whole = {"input_ids": input_ids, "attention_mask": attention_mask, "labels": labels}
        size, count = batch_size or len(input_ids), len(input_ids)
        parts = [{name: each[at : at + size] for name, each in whole.items()} for at in range(0, count, size)]
        is_reference = self.ref_model is not None and model is self.ref_model
        known: AbstractContextManager[Any] = self._use_reference() if is_reference else nullcontext(self.manager)
        generators = RngState()
        with known as manager:
            stats = manager.token_stats(parts, ["log_probs"])
        # A layout may try a model with numbers that it draws, on some ranks.
        generators.restore()
        return torch.cat([each["log_probs"][:, :-1][:, -logits_to_keep:] for each in stats]), None, None

    def _prepare_inputs(self, generation_batch: Any) -> dict[str, Any]:
        """Completions that are scored, under the names of a microbatch."""
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
        """See `MeshTrainerMixin`; of the last microbatch with its completions, without generating them."""
        return super().floating_point_ops(self._scored_inputs)

    def _without_repeats(self, make: Any, *args: Any, **kwargs: Any) -> Any:
        # Groups of completions go over data ranks, which all need a batch.
        return make(*args, **kwargs)

    def _run_evaluation(self, dataloader: Any, *, takes_predictions: bool, metric_key_prefix: str) -> EvalLoopOutput:
        """Completions of the evaluation's prompts, their rewards, and the mean loss.

        Trainer takes prompts for rows where it leaves out what is there twice, so that its mean lacks some.
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
    """Labels of the last `keep` tokens that are no padding; int64, (B, S)."""
    labels = ids.masked_fill(mask == 0, IGNORE_INDEX)
    labels[:, :-keep] = IGNORE_INDEX
    return labels


def scale_logits(model: nn.Module | None, temperature: Callable[[], float]) -> None:
    """Divide what a model's head gives by a temperature, which is asked for at each call."""
    if model is None:
        return

    def divided(_: nn.Module, __: Any, logits: Tensor) -> Tensor | None:
        now = temperature()
        return None if now == 1.0 else logits / now

    model.get_output_embeddings().register_forward_hook(divided)


def check_generation(trainer: Any) -> None:
    """Refuse by name what a trainer of completions cannot do over a mesh, beside its arguments."""
    for name in ("tools", "environment_factories", "rollout_func"):
        if getattr(trainer, name, None):
            raise ConfigError(
                f"{name.replace('factories', 'factory')} does not go over a mesh: ranks would generate unequally "
                f"often, and wait for each other. Leave it out."
            )
    if is_vlm(trainer):
        raise ConfigError("a processor of images does not go over a mesh yet. Give a tokenizer, and texts alone.")
    stages = trainer.mesh_options.sizes.pp_size or 1
    if stages > 1 and not trainer.args.use_vllm:
        raise ConfigError(
            f"pp_size={stages}: a rank has some stages of the model, and cannot generate with them. Set use_vllm=True "
            f"and vllm_mode='server', whose engine is fed with the weights, or pp_size=1 with tp_size or fsdp2."
        )
    train, evaluated = trainer.args.per_device_train_batch_size, trainer.args.per_device_eval_batch_size
    if stages > 1 and trainer.args.eval_strategy != "no" and evaluated != train:
        raise ConfigError(
            f"per_device_eval_batch_size={evaluated} with pp_size={stages}: stages take as many completions at a time "
            f"as a loss of training has, per_device_train_batch_size={train}. Set both alike, or eval_strategy='no'."
        )


def set_generation_batch_size(args: Any, data_size: int) -> None:
    """Count completions over data ranks, where GRPOConfig has counted them over processes."""
    args.generation_batch_size = args.per_device_train_batch_size * data_size * args.steps_per_generation
    sizes = [("generation_batch_size", args.generation_batch_size, args.num_generations)]
    if args.do_eval and args.eval_strategy != "no":
        groups = args.num_generations_eval or args.num_generations
        sizes.append(("per_device_eval_batch_size x data ranks", args.per_device_eval_batch_size * data_size, groups))
    for name, size, group in sizes:
        if size % group:
            raise ConfigError(
                f"{name}={size} over {data_size} data ranks (those that differ in pp, cp or tp share a batch) is no "
                f"multiple of the {group} completions of a prompt. Set per_device batch sizes or steps_per_generation "
                f"so that it is."
            )
