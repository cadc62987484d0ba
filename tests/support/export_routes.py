"""Train a pretrained model for a step, export it in one of four ways, and compare what plain transformers loads.

The base has files beside its weights. Its head is that of its type, tied to the embedding, or contradicts its
configuration, which ties it, while the file has separate values for it.
"""

from __future__ import annotations

import functools
import json
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import yaml
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor, nn
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, GenerationConfig, PreTrainedTokenizerFast

import meshwright as mw
from meshwright.base.errors import ModelError
from meshwright.checkpoint import export_checkpoint
from meshwright.checkpoint.merged_model import merge_adapter
from meshwright.optim.build import OptimizerConfig, optimizer_factory
from meshwright_run.run_rank import run_rank
from meshwright_testing.zoo import build_zoo_model

TIE_VARIANTS = ("plain", "tied", "contradicting")
EXTRA_FILES = {"LICENSE": "Terms.", "spiece.model": "pieces", "modeling_own.py": "raise SystemExit('never run')\n"}
EXTRA_FILES |= {f"{name}.json": '{"x": "y"}' for name in ("preprocessor_config", "processor_config", "chat_template")}
REWRITTEN_FILES = {"config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"}
"""Files that an export has, but not byte for byte."""
TOLERANCE, MERGED = 1e-5, 1e-4  # Of logits in float32, against their largest, and of merged ones: merging rounds


class NotApplicable(Exception):
    """A type has no such case; says why."""


def write_base(model_type: str, ties: str, directory: Path) -> type[nn.Module]:
    """Write a model with files beside its weights; return its class."""
    tied = None if ties == "plain" else True
    try:
        model: Any = build_zoo_model(model_type, dtype=torch.float32, tied=tied)
    except Exception as error:
        if tied is None:
            raise
        raise NotApplicable(f"{type(error).__name__}: {error}") from error
    if type(model.config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise NotApplicable("the part for text of a multimodal type, which transformers' auto class does not load")
    names = dict(model.all_tied_weights_keys or {})
    if tied and not names:
        raise NotApplicable("its class ties nothing")
    tokenizer = build_digit_tokenizer(pad=getattr(model.config.get_text_config(), "pad_token_id", None))
    ends, pad = [tokenizer.eos_token_id, 5], tokenizer.pad_token_id
    model.generation_config = GenerationConfig(do_sample=True, temperature=0.6, eos_token_id=ends, pad_token_id=pad)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    if ties == "contradicting":
        path = directory / "model.safetensors"
        tensors, state = load_file(path), model.state_dict()
        generator = torch.Generator().manual_seed(1)
        own = {name: torch.randn(state[name].shape, generator=generator) * 0.1 for name in names}
        save_file({**tensors, **own}, path, metadata={"format": "pt"})
    for name, text in EXTRA_FILES.items():
        (directory / name).write_text(text)
    return type(model)


def build_digit_tokenizer(pad: int | None) -> PreTrainedTokenizerFast:
    """A tokenizer of twelve words with the model's padding; transformers' Trainer would change the model's to it."""
    words = ["<end>", *map(str, range(10))]
    words.insert(pad if pad in range(12) else 0, "<pad>")
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<end>")
    made.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    return made


def build_ids() -> Tensor:
    return torch.randint(2, 12, (2, 16), generator=torch.Generator().manual_seed(0))


def compute_logits(model: Any) -> Tensor:
    with torch.no_grad():
        found: Tensor = model.eval()(build_ids(), use_cache=False).logits.float()
        return found


def train_step(manager: Any) -> None:
    batch = [{"input_ids": build_ids(), "labels": build_ids()}]
    manager.build_optimizer(optimizer_factory(OptimizerConfig(lr=0.05)))
    manager.forward_backward(batch, num_tokens=manager.begin_step_sync(batch))
    manager.optimizer_step()


# -- doors: train what is in base, write it to out, give the logits of what was trained


def export_by_python(base: Path, out: Path) -> Tensor:
    manager = mw.from_pretrained(base, "single", dtype="float32", world=mw.open_world("cpu"))
    train_step(manager)
    mw.save_checkpoint(manager, out.with_name("checkpoint"), step=1)
    export_checkpoint(out.with_name("checkpoint"), out)
    return compute_logits(manager.model_parts[0])


def export_by_merge(base: Path, out: Path) -> Tensor:
    peft = {"type": "lora", "r": 2, "target_modules": "all-linear"}
    open_base = functools.partial(mw.from_pretrained, base, "single", dtype="float32", world=mw.open_world("cpu"))
    try:
        manager = open_base(peft=peft)
    except ModelError:
        # peft refuses some linear layers of Mamba's blocks.
        manager = open_base(peft={**peft, "exclude_modules": ["out_proj", "conv1d"]})
    try:
        train_step(manager)
    except (RuntimeError, AttributeError) as error:
        raise NotApplicable(f"peft's layers cannot take the place of its linear layers: {error}") from error
    mw.save_checkpoint(manager, out.with_name("checkpoint"), step=1)
    merge_adapter(out.with_name("checkpoint"), out)
    return compute_logits(manager.model_parts[0])


def export_by_run_file(base: Path, out: Path) -> Tensor:
    return train_by_run_file({"path": str(base)}, base, out)


def train_by_run_file(model: dict[str, str], base: Path, out: Path) -> Tensor:
    """Train by a run file with this section `model`, whose base is there."""
    root = out.parent
    for number in range(20):
        (root / f"{number}.txt").write_text(" ".join(str((number + at) % 10) for at in range(40)))
    values = {"strategy": "single", "nproc": 1, "device": "cpu", "threads_per_rank": 1, "output_dir": f"{out}.run"}
    values |= {"steps": 1, "batch_size": 2, "micro_batch_size": 2, "model": model, "optimizer": {"lr": 0.05}}
    values |= {"sample": None, "checkpoint": {"every": 1}, "eval": {"max_sequences": 1}}
    values["data"] = {"corpus": f"{root}/*.txt", "seq_len": 16, "eval_fraction": 0.3, "cache_dir": f"{root}/cache"}
    file = root / "run.yaml"
    file.write_text(yaml.safe_dump(values))
    run_rank(None, mw.load_run(file))
    (Path(f"{out}.run") / "model").rename(out)
    manager = mw.from_pretrained(base, "single", dtype="float32", world=mw.open_world("cpu"))
    mw.load_checkpoint(manager, f"{out}.run/checkpoints/step-00000001")
    return compute_logits(manager.model_parts[0])


def export_by_trainer(base: Path, out: Path) -> Tensor:
    from datasets import Dataset
    from transformers import AutoTokenizer, TrainingArguments, default_data_collator

    from meshwright_trainer import MeshTrainer

    options: Any = {"max_steps": 1, "learning_rate": 0.05, "per_device_train_batch_size": 2, "save_strategy": "no"}
    options |= {"use_cpu": True, "bf16": False, "report_to": [], "disable_tqdm": True}
    arguments = TrainingArguments(str(out.with_name("trainer")), **options)
    rows = Dataset.from_list([{"input_ids": row, "labels": row} for row in build_ids().tolist()])
    given: Any = {"train_dataset": rows, "data_collator": default_data_collator, "mesh": {"strategy": "single"}}
    tokenizer = AutoTokenizer.from_pretrained(base)
    made: Any = MeshTrainer(str(base), args=arguments, processing_class=tokenizer, **given)
    made.train()
    made.save_model(str(out))
    return compute_logits(made.model)


EXPORT_ROUTES: Mapping[str, Callable[[Path, Path], Tensor]]
EXPORT_ROUTES = {
    "run file": export_by_run_file,
    "Python": export_by_python,
    "trainer": export_by_trainer,
    "merge": export_by_merge,
}


def find_difference(model_type: str, ties: str, door: str, root: Path) -> str:
    """Return what is wrong with an export; "" if nothing is."""
    root.mkdir(parents=True, exist_ok=True)
    base, out = root / "base", root / "out"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        cls = write_base(model_type, ties, base)
        wanted = EXPORT_ROUTES[door](base, out)
        return compare_export(cls, base, out, wanted, MERGED if door == "merge" else TOLERANCE)


def compare_export(cls: Any, base: Path, out: Path, wanted: Tensor, tolerance: float = TOLERANCE) -> str:
    """What is wrong with an export that should give these logits, and have the files of its base."""
    loaded, report = cls.from_pretrained(out, output_loading_info=True)
    if report["missing_keys"] or report["unexpected_keys"]:
        return f"missing {sorted(report['missing_keys'])}, unexpected {sorted(report['unexpected_keys'])}"
    apart = float((compute_logits(loaded) - wanted).abs().max() / wanted.abs().max())
    if not apart <= tolerance:
        return f"logits differ by {apart:.1e} of the largest"
    return _compare_files(base, out)


def _compare_files(base: Path, out: Path) -> str:
    names = {path.name for path in base.iterdir()} - {"model.safetensors"}
    if lost := sorted(name for name in names if not (out / name).is_file()):
        return f"lost {lost}"
    changed = [name for name in names - REWRITTEN_FILES if (base / name).read_bytes() != (out / name).read_bytes()]
    if changed:
        return f"changed {sorted(changed)}"
    was, is_ = (json.loads((each / "generation_config.json").read_text()) for each in (base, out))
    return "" if was == is_ else f"generation_config.json has {is_}, and had {was}"
