"""Keys of other libraries' configurations, and what a run file has in their place.

Sources: TrainingArguments of transformers, SFTConfig of TRL, and the configurations of axolotl, LLaMA-Factory,
torchtitan, NeMo Automodel, accelerate, Lightning and Megatron-LM.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import get_args

from .data.config import Format

_NAMES = {
    "optimizer.lr": "learning_rate lr",
    "optimizer.name": "optim optimizer_name optimizer_type",
    "optimizer.weight_decay": "weight_decay wd",
    "optimizer.options": "adam_beta1 adam_beta2 adam_epsilon betas eps beta1 beta2 momentum",
    "schedule.name": "lr_scheduler lr_scheduler_type scheduler lr_decay_style decay_type",
    "schedule.options": "lr_scheduler_kwargs min_lr min_lr_ratio",
    "schedule.warmup_steps": "warmup_steps lr_warmup_steps num_warmup_steps warmup lr_warmup_iters",
    "schedule.warmup_ratio": "warmup_ratio warmup_fraction lr_warmup_fraction",
    "max_grad_norm": "gradient_clipping gradient_clip_val grad_clip clip_grad clip_grad_norm max_norm",
    "steps": "max_steps training_steps train_steps num_steps train_iters max_iters iterations",
    "epochs": "num_train_epochs num_epochs max_epochs train_epochs",
    "batch_size": "global_batch_size train_batch_size",
    "nproc": "num_gpus n_gpus n_gpu gpus num_processes nproc_per_node devices world_size ngpu",
    "device": "accelerator use_cpu no_cuda",
    "tp_size": "tp tensor_parallel_size tensor_parallel_degree tensor_model_parallel_size",
    "pp_size": "pp pipeline_parallel_size pipeline_parallel_degree pipeline_model_parallel_size",
    "cp_size": "cp context_parallel_size context_parallel_degree sequence_parallel_degree",
    "ep_size": "ep expert_parallel_size expert_parallel_degree expert_model_parallel_size",
    "dp_size": "dp data_parallel_size data_parallel_shard_degree dp_shard_size",
    "dp_replicate_size": "data_parallel_replicate_degree hsdp hsdp_size",
    "strategy": "fsdp fsdp_config deepspeed distributed_type distributed parallelism",
    "strategy_config.activation_checkpointing": "gradient_checkpointing activation_checkpointing activation_checkpoint "
    "use_gradient_checkpointing gradient_checkpointing_kwargs recompute_granularity",
    "strategy_config.enable_compile": "torch_compile compile",
    "model.path": "model_name_or_path base_model model_name model_id pretrained_model_name_or_path model_path",
    "model.attn_implementation": "flash_attention use_flash_attention_2 attn_implementation flash_attn",
    "data.tokenizer": "tokenizer tokenizer_name tokenizer_path tokenizer_name_or_path",
    "data.sources": "dataset datasets dataset_name dataset_path dataset_dir train_file train_data train_files "
    "data_path data_files",
    "seq_len": "max_seq_length max_length max_seq_len sequence_len seq_length sequence_length cutoff_len "
    "model_max_length block_size context_length",
    "data.packing": "packing sample_packing neat_packing pack_sequences",
    "data.loss_on": "train_on_inputs assistant_only_loss completion_only_loss mask_prompt train_on_input",
    "data.chat_template": "chat_template template",
    "data.eval_fraction": "val_set_size val_size validation_split validation_split_percentage",
    "data.eval_sets": "eval_dataset eval_file validation_file test_datasets val_file",
    "eval.every": "eval_steps eval_interval evaluation_strategy eval_strategy evals_per_epoch do_eval "
    "val_check_interval",
    "eval.early_stopping": "early_stopping early_stopping_patience",
    "checkpoint.every": "save_steps save_interval save_strategy save_freq saves_per_epoch checkpointing_steps "
    "ckpt_every",
    "checkpoint.keep_last": "save_total_limit keep_latest_k",
    "checkpoint.keep_best": "load_best_model_at_end metric_for_best_model save_top_k",
    "log_every": "logging_steps log_freq log_interval log_every_n_steps",
    "output_dir": "output_path save_dir dump_folder checkpoint_dir logging_dir default_root_dir",
    "overwrite": "overwrite_output_dir",
    "objective": "loss loss_fn loss_type stage rl training_type",
    "seed": "random_seed manual_seed",
    "profile": "profiler enable_profiling",
}
_NOTES = {
    "cpu_offload offload fsdp_offload_params offload_optimizer enable_cpu_offload": "Write "
    "'strategy_config.offload_policy={pin_memory: true}', with strategy=fsdp2",
    "wandb wandb_project use_wandb enable_wandb report_to log_with logger loggers": "Write trackers=[wandb], or "
    "another tracker's name, or a mapping with its options: 'trackers=[{name: wandb, project: NAME}]'",
    "tensorboard enable_tensorboard": "Write trackers=[tensorboard]",
    "bf16 fp16 half precision mixed_precision dtype torch_dtype mixed_precision_param autocast": "For mixed precision, "
    "such as Trainer's bf16, write 'strategy_config.mp_policy={param_dtype: bfloat16, reduce_dtype: float32}'; for "
    "weights in bfloat16, such as those of torch_dtype, model.dtype=bfloat16",
    "gradient_accumulation_steps accumulate_grad_batches grad_accum": "It follows from the others: to accumulate over "
    "N passes, write batch_size = N x data ranks x micro_batch_size",
    "per_device_train_batch_size per_device_batch_size local_batch_size batch_size_per_gpu": "Write "
    "micro_batch_size; batch_size is the number of sequences of a step over all ranks, a multiple of data ranks x "
    "micro_batch_size",
    "lora lora_r lora_rank lora_alpha lora_dropout lora_target lora_target_modules adapter peft peft_config "
    "use_peft": "Write 'model.peft={type: lora, r: 16, lora_alpha: 32, target_modules: all-linear}', with your values",
    "load_in_4bit load_in_8bit quantization quantization_config quantization_bit": "Quantized base models are not "
    "supported yet",
    "resume_from_checkpoint resume_from auto_resume_from_checkpoints restore_from": "A run resumes by itself from the "
    "newest checkpoint in output_dir; resume=DIRECTORY names another",
    "num_workers dataloader_num_workers num_proc dataset_num_proc dataset_processes preprocessing_num_workers": "Leave "
    "it out: tokenization uses all cores, and its results are cached",
}

SHORT_FORMS: Mapping[str, str] = {
    "model": "model.path={}",
    "optimizer": "optimizer.name={}",
    "schedule": "schedule.name={}",
    "data": "'data.sources=[{{files: {0}, format: FORMAT}}]', with one of the formats "
    f"{', '.join(get_args(Format))}; `meshwright init --data {{0}}` detects it",
}
"""By section, what to write for a text in its place."""
NO_EVALUATION = "null does not switch evaluation off; data.eval_fraction=0 holds no data out, so nothing is evaluated"
OTHER_NAMES: Mapping[str, str] = {
    **{name: f"Here it is {key}" for key, names in _NAMES.items() for name in names.split()},
    **{name: note for names, note in _NOTES.items() for name in names.split()},
}
"""By key of another library, the sentence of the error message, without its full stop."""
