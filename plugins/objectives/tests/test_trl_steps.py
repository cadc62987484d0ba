"""One step of trl's DPOTrainer and GRPOTrainer on a tiny model, and the same step of ours, give equal weights.

trl runs on one process with its own data, reference, generation and rewards, and SGD. Its model's inputs are given to
ours, on one rank and on two. trl takes log-probabilities in float32, so weights are compared to 1e-5 of their change.
"""

from __future__ import annotations

import copy
import functools
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor, nn
from transformers import PreTrainedTokenizerFast

import meshwright as mw
from meshwright.objectives import get_objective
from meshwright_testing import pool
from meshwright_testing.models import tiny_model

pytestmark = pytest.mark.slow
RATE = 0.5
LAYOUTS: dict[str, tuple[str, dict[str, int]]] = {
    "single": ("single", {}),
    "fsdp2": ("fsdp2", {}),
    "ddp": ("ddp", {}),
    "tp2": ("fsdp2", {"tp_size": 2}),
    "cp2": ("fsdp2", {"cp_size": 2}),
    "pp2": ("fsdp2", {"pp_size": 2}),
    "megatron_fsdp": ("megatron_fsdp", {}),
}
Step = tuple[dict[str, Any], dict[str, Tensor], dict[str, Tensor], float]
"""An objective, a batch of all rows, the weights behind the step, and trl's loss."""


def trl_and_datasets() -> tuple[Any, Any]:
    """trl and datasets.Dataset, whose imports take seconds."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import datasets
        import trl
    return trl, datasets.Dataset


def sgd(named: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD([parameter for _, parameter in named], lr=RATE)


def digits() -> PreTrainedTokenizerFast:
    words = ["<pad>", "<end>", *map(str, range(10))]
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<end>")


def model_for_trl() -> nn.Module:
    model = tiny_model()
    model.config.pad_token_id, model.config.eos_token_id, model.config.bos_token_id = 0, 1, None
    model.generation_config.pad_token_id, model.generation_config.eos_token_id = 0, 1
    model.warnings_issued = {}
    return model


def arguments(directory: Path, rows: int) -> dict[str, Any]:
    return {
        "output_dir": str(directory),
        "per_device_train_batch_size": rows,
        "max_steps": 1,
        "max_grad_norm": 0.0,
        "lr_scheduler_type": "constant",
        "report_to": [],
        "use_cpu": True,
        "bf16": False,
        "save_strategy": "no",
        "disable_tqdm": True,
        "logging_steps": 1,
    }


def noting(cls: Any) -> Any:
    """A trainer of trl that keeps what its loss is called with."""

    class Noting(cls):
        def _compute_loss(self, model: nn.Module, inputs: dict[str, Tensor], *further: Any) -> Tensor:
            self.noted = dict(inputs)
            return super()._compute_loss(model, inputs, *further)

    return Noting


def step_of_trl(
    cls: Any, model: nn.Module, second: Any, options: Any, data: Any
) -> tuple[dict[str, Tensor], float, dict[str, Tensor]]:
    """The weights behind a step of a trainer, its loss, and what its loss was called with.

    Args:
        second: the reference model of DPO, the reward of GRPO.
    """
    optimizers = (sgd(model.named_parameters()), None)
    trainer = noting(cls)(model, second, options, train_dataset=data, processing_class=digits(), optimizers=optimizers)
    trainer.train()
    loss = next(each["loss"] for each in trainer.state.log_history if "loss" in each)
    return {name: each.detach().clone() for name, each in model.named_parameters()}, float(loss), trainer.noted


@functools.cache
def dpo_step(directory: Path) -> Step:
    trl, Dataset = trl_and_datasets()
    rows = [("1 2 3 ", "4 5 6 7", "4 4"), ("3 2 ", "1", "9 8 7"), ("5 5 5 ", "5 6", "7 8 9 1"), ("8 ", "2 4 6", "1 3")]
    data = Dataset.from_list([dict(zip(("prompt", "chosen", "rejected"), row, strict=True)) for row in rows])
    model, reference = model_for_trl(), model_for_trl()
    with torch.no_grad():  # or all log-ratios are 0
        for parameter in reference.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, dtype=parameter.dtype))
    options = trl.DPOConfig(**arguments(directory, 4), beta=0.4, loss_type=["sigmoid"])
    before = copy.deepcopy(reference)
    weights, loss, noted = step_of_trl(trl.DPOTrainer, model, reference, options, data)
    order = torch.arange(8).view(2, 4).T.flatten()  # chosen rows, then rejected ones, into pairs
    ids, answers, mask = (noted[name][order] for name in ("input_ids", "completion_mask", "attention_mask"))
    batch = {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(answers == 0, -100)}
    found = before(input_ids=ids, attention_mask=mask).logits.detach().log_softmax(-1)[:, :-1]
    found = found.gather(-1, ids[:, 1:, None])[..., 0]
    batch["reference_log_probs"] = nn.functional.pad(found, (0, 1))
    return {"name": "dpo", "beta": 0.4}, batch, weights, loss


def reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
    return [sum(token % 3 for token in ids) / len(ids) for ids in completion_ids]


@functools.cache
def grpo_step(directory: Path) -> Step:
    trl, Dataset = trl_and_datasets()
    data = Dataset.from_list([{"prompt": "1 2 3"}, {"prompt": "4 5 6"}])
    model = model_for_trl()
    options = trl.GRPOConfig(
        **arguments(directory, 8),
        num_generations=4,
        max_completion_length=5,
        loss_type="dapo",
        entropy_coef=0.02,
        beta=0.0,
    )
    weights, loss, noted = step_of_trl(trl.GRPOTrainer, model, reward, options, data)
    ids = torch.cat([noted["prompt_ids"], noted["completion_ids"]], 1)
    mask = torch.cat([noted["prompt_mask"], noted["completion_mask"]], 1)
    answers = torch.cat([torch.zeros_like(noted["prompt_mask"]), noted["completion_mask"]], 1)
    batch = {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(answers == 0, -100)}
    batch["advantages"] = noted["advantages"].double()
    return {"name": "grpo", "normalize": "tokens", "entropy": 0.02}, batch, weights, loss


def step_of(layout: str, cell: dict[str, Any], batch: dict[str, Tensor]) -> tuple[float, dict[str, Tensor]]:
    """Loss and weights of one step of this rank's rows."""
    strategy, sizes = LAYOUTS[layout]
    with mw.open_world("cpu") as world:
        whole_pairs = {"pipeline": {"pp_microbatch_size": 2}} if "pp_size" in sizes else {}
        stack, degrees = mw.resolve(strategy, mw.MeshSizes(**sizes), world.size, wrapper_config=whole_pairs)
        mesh = mw.Mesh(degrees, world)
        manager = stack.build(mesh)
        manager.parallelize(tiny_model())
        manager.build_optimizer(sgd)
        rows = len(batch["labels"]) // mesh.data_size
        own = {name: each[mesh.data_rank * rows : (mesh.data_rank + 1) * rows] for name, each in batch.items()}
        halves = (slice(0, rows // 2), slice(rows // 2, rows))
        microbatches = [{name: each[half] for name, each in own.items()} for half in halves]
        objective = get_objective(cell)
        num_tokens = manager.announce(microbatches, objective=objective)
        loss = manager.forward_backward(microbatches, num_tokens=num_tokens, objective=objective)
        manager.clip_grad_norm(None)
        manager.optimizer_step()
        return float(loss), {name: each.cpu() for name, each in manager.iter_parameters(bucket_bytes=1 << 20)}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("made", [dpo_step, grpo_step], ids=["dpo", "grpo"])
def test_a_step_of_trl_is_one_of_ours(made: Any, layout: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    cell, batch, wanted, of_trl = made(tmp_path_factory.getbasetemp() / made.__wrapped__.__name__)
    before = {name: each.detach() for name, each in tiny_model().named_parameters()}
    moved = {name: float((wanted[name] - each).abs().max()) for name, each in before.items()}
    assert min(moved.values()) > 1e-5
    for loss, weights in pool(1 if layout == "single" else 2).run(step_of, layout, cell, batch):
        assert loss == pytest.approx(of_trl, abs=1e-4 if made is dpo_step else 1e-6)
        assert weights.keys() == wanted.keys()
        for name, each in weights.items():
            assert float((each - wanted[name]).abs().max()) < 1e-5 * moved[name], name
