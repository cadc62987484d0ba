"""One script in two forms: trainers of transformers and TRL on one process, and the same over a mesh."""

from __future__ import annotations

import math
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
import trl
import trl.trainer.utils
from transformers import PreTrainedTokenizerFast

import meshwright_trainer
from meshwright.launch.open_world import open_world
from meshwright_testing.models import build_case_model, build_tiny_model

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from datasets import Dataset
    from tokenizers import Tokenizer, models, pre_tokenizers

STEPS, ROWS, ACCUMULATE, EVALUATED = 4, 4, 2, 8
"""Optimizer steps, sequences of a microbatch on all data ranks together, microbatches of a step."""


def digits() -> PreTrainedTokenizerFast:
    words = ["<pad>", "<end>", *map(str, range(10))]
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<end>")


def model(**changes: Any) -> Any:
    return prepared(build_tiny_model(**changes))


def routed() -> Any:
    return prepared(build_case_model("mixtral", tied=False, seed=0, dtype=torch.float64))


def prepared(made: Any) -> Any:
    made.config.pad_token_id, made.config.eos_token_id, made.config.bos_token_id = 0, 1, None
    made.generation_config.pad_token_id, made.generation_config.eos_token_id = 0, 1
    made.warnings_issued = {}
    return made


def numbers(count: int, seed: int, longest: int = 14) -> list[str]:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(3, longest, (count,), generator=generator).tolist()
    return [" ".join(map(str, torch.randint(0, 10, (length,), generator=generator).tolist())) for length in lengths]


def rows_of(count: int) -> list[dict[str, list[int]]]:
    return [{"input_ids": [int(word) + 2 for word in text.split()]} for text in numbers(count, 5)]


def arguments(directory: Path, data_size: int, **further: Any) -> dict[str, Any]:
    found = {"output_dir": str(directory), "report_to": [], "use_cpu": True, "bf16": False, "disable_tqdm": True}
    found |= {"per_device_train_batch_size": ROWS // data_size, "per_device_eval_batch_size": EVALUATED // data_size}
    found |= {"gradient_accumulation_steps": ACCUMULATE, "max_steps": STEPS, "gradient_checkpointing": False}
    found |= {"learning_rate": 1e-2, "warmup_steps": 2, "lr_scheduler_type": "cosine", "weight_decay": 0.1}
    found |= {"max_grad_norm": 0.5, "save_strategy": "no", "eval_strategy": "steps", "eval_steps": 2}
    return found | {"logging_steps": 1, "seed": 3} | further


def text_of(count: int, seed: int) -> Dataset:
    return Dataset.from_list([{"text": text} for text in numbers(count, seed)])


def pairs_of(count: int, seed: int) -> Dataset:
    parts = [numbers(count, seed + shift, longest=7) for shift in range(3)]
    rows = [{"prompt": p + " ", "chosen": c, "rejected": r} for p, c, r in zip(*parts, strict=True)]
    return Dataset.from_list(rows)


class Padded:
    """A collator of token ids with ragged labels."""

    def __call__(self, examples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        ids = torch.zeros(len(examples), 16, dtype=torch.int64)
        labels = torch.full_like(ids, -100)
        mask = torch.zeros_like(ids)
        for row, each in enumerate(examples):
            tokens = torch.tensor(each["input_ids"])
            ids[row, : len(tokens)], mask[row, : len(tokens)] = tokens, 1
            labels[row, len(tokens) // 3 : len(tokens)] = tokens[len(tokens) // 3 :]
        return {"input_ids": ids, "labels": labels, "attention_mask": mask}


def made(kind: str, mesh: Any, directory: Path, data_size: int, **further: Any) -> Any:
    """A trainer of a kind, over a mesh or, without, transformers' or TRL's own."""
    names = {"trainer": "Trainer", "dpo": "DPOTrainer", "dpo_moe": "DPOTrainer", "reward": "RewardTrainer"}
    name = names.get(kind, "SFTTrainer")
    plain = getattr(transformers if name == "Trainer" else trl, name)
    cls, given = (plain, {}) if mesh is None else (getattr(meshwright_trainer, f"Mesh{name}"), {"mesh": mesh})
    basic = arguments(directory, data_size, **further)
    if kind == "trainer":
        rows = rows_of(48)
        data = {"train_dataset": Dataset.from_list(rows[:40]), "eval_dataset": Dataset.from_list(rows[40:])}
        return cls(model(), transformers.TrainingArguments(**basic), data_collator=Padded(), **data, **given)
    if kind in ("dpo", "dpo_moe"):
        make = routed if kind == "dpo_moe" else model
        reference = make()
        with torch.no_grad():
            generator = torch.Generator().manual_seed(11)
            for parameter in reference.parameters():
                parameter.add_(0.05 * torch.randn(parameter.shape, dtype=parameter.dtype, generator=generator))
        args = trl.DPOConfig(**{"beta": 0.4, "max_length": 16, "pad_to_multiple_of": 8, **basic})
        data = {"train_dataset": pairs_of(40, 1), "eval_dataset": pairs_of(8, 2)}
        return cls(make(), reference, args, processing_class=digits(), **data, **given)
    if kind == "reward":
        config = model().config
        config.num_labels = 1
        torch.manual_seed(0)
        scorer = transformers.AutoModelForSequenceClassification.from_config(config).double()
        scorer.warnings_issued = {}
        usual = {"max_length": 32, "pad_to_multiple_of": 8, "center_rewards_coefficient": 0.01}
        args = trl.RewardConfig(**usual | basic)
        data = {"train_dataset": pairs_of(40, 1), "eval_dataset": pairs_of(8, 2)}
        return cls(scorer, args, processing_class=digits(), **data, **given)
    packing = {"packing": True, "max_length": 32, "packing_strategy": "bfd"} if kind == "packed" else {"max_length": 16}
    args = trl.SFTConfig(**{**packing, "pad_to_multiple_of": 8, **basic})
    if kind == "lora":
        torch.manual_seed(7)
        given["peft_config"] = peft.LoraConfig(
            r=4, target_modules=["q_proj", "v_proj", "down_proj"], task_type="CAUSAL_LM"
        )
    size = 160 if kind == "packed" else 40
    data = {"train_dataset": text_of(size, 1), "eval_dataset": text_of(EVALUATED, 2)}
    trained = routed() if kind == "moe" else model()
    return cls(trained, args, processing_class=digits(), **data, **given)


class WideHead:
    """Instead of TRL's kernel, which computes in float32 whatever the model's dtype: the same in float64."""

    @staticmethod
    def apply(hidden, weight, bias, targets, temperature, chunk_size, softcap, scale, outputs):  # type: ignore[no-untyped-def]
        logits = torch.nn.functional.linear(hidden, weight, bias) * scale / temperature
        found = logits.log_softmax(-1)
        log_probs = found.gather(-1, targets[:, None])[:, 0]
        with torch.no_grad():
            entropy = -(found.exp() * found).sum(-1)
            is_top1 = log_probs >= found.amax(-1)
        return log_probs, entropy, (2 * found).logsumexp(-1), logits.mean(-1).detach(), is_top1


@contextmanager
def in_float64() -> Iterator[None]:
    """Trainers of transformers and TRL compute losses in float32; here in float64."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trl.trainer.utils, "_ChunkedLogProbFunction", WideHead)
        patch.setattr(torch.Tensor, "float", torch.Tensor.double)
        patch.setattr(torch, "float", torch.float64)
        yield


def logged(trainer: Any) -> list[dict[str, float]]:
    """What a run has logged, without times."""
    left_out = ("runtime", "per_second", "total_flos", "epoch", "_time")
    return [
        {key: value for key, value in each.items() if not any(part in key for part in left_out)}
        for each in trainer.state.log_history
    ]


def history(trainer: Any) -> list[dict[str, float]]:
    """Train; what is logged, without the mean of all losses."""
    trainer.train()
    return [{key: value for key, value in each.items() if key != "train_loss"} for each in logged(trainer)]


def sharing(mesh: Mapping[str, Any]) -> int:
    """How many ranks have the same rows."""
    return math.prod(mesh.get(axis, 1) for axis in ("tp_size", "cp_size", "pp_size"))


def histories(mesh: Any, directory: Path, kinds: Sequence[str]) -> dict[str, Any]:
    """What trainers log over a mesh; a task of a pool."""
    with open_world("cpu") as world, in_float64():
        return {kind: history(made(kind, mesh, directory / kind, world.size // sharing(mesh))) for kind in kinds}


def differences(
    wanted: Any, found: Any, tolerance: float = 1e-6, small: float = 1e-3, unlike: Collection[str] = (), at: str = ""
) -> list[str]:
    """Where two things that runs tell are not alike; numbers beyond a relative tolerance, below `small` of that."""
    if isinstance(wanted, dict) and isinstance(found, dict):
        keys = [key for key in wanted if key not in unlike]
        if set(keys) != set(found) - set(unlike):
            return [f"{at}: {sorted(set(wanted) ^ set(found))}"]
        pairs = [(f".{key}", wanted[key], found[key]) for key in keys]
    elif isinstance(wanted, list) and isinstance(found, list) and len(wanted) == len(found):
        pairs = [(f"[{i}]", a, b) for i, (a, b) in enumerate(zip(wanted, found, strict=True))]
    elif isinstance(wanted, float) and isinstance(found, (int, float)):
        is_close = abs(found - wanted) <= tolerance * max(abs(wanted), small)
        return [] if is_close else [f"{at}: {found} and not {wanted}"]
    else:
        return [] if wanted == found else [f"{at}: {found!r:.200} and not {wanted!r:.200}"]
    return [text for key, a, b in pairs for text in differences(a, b, tolerance, small, unlike, at + key)]
