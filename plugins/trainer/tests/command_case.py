"""A script as users have it, with flags of TRL's and of the mesh; writes what it logs where `--output_dir` says."""

from __future__ import annotations

import json
from pathlib import Path

import trainer_cases
from transformers import HfArgumentParser
from trl import SFTConfig

from meshwright_trainer import MeshArguments, MeshSFTTrainer

if __name__ == "__main__":
    args, mesh = HfArgumentParser((SFTConfig, MeshArguments)).parse_args_into_dataclasses()
    run = Path(args.output_dir) / "run.yaml"
    trainer = MeshSFTTrainer(
        trainer_cases.model(),
        args,
        train_dataset=trainer_cases.text_of(40, 1),
        eval_dataset=trainer_cases.text_of(trainer_cases.EVALUATED, 2),
        processing_class=trainer_cases.digits(),
        mesh=str(run) if run.exists() else mesh,
    )
    found = trainer_cases.history(trainer)
    if trainer.is_world_process_zero():
        (Path(args.output_dir) / "found.json").write_text(json.dumps([trainer.mesh.degrees.tp, found]))
