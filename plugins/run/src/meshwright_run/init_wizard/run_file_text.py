"""Generate, check and write a run file with a comment on each part."""

from __future__ import annotations

import json
import re
import textwrap
from pathlib import Path

from meshwright.plugin import ConfigError, parse_yaml, validate_config

from ..data.config import STDLIB
from ..data.prompt_template import ALPACA, CHAT
from ..run_file import RunConfig, check_new_model, resolve_layout
from .answers import NEW_MAX_POSITIONS, InitAnswers, Machine, ModelFacts, choose_seq_len, is_hub_id

MICRO_BATCH_SIZE = 4
MIN_BATCH_SIZE = 16
"""Minimum `batch_size` of a generated run file."""
_WIDTH = 100
_PLAIN_SCALAR = re.compile(r"\w[\w./*-]*", re.ASCII)
CHAT_TEMPLATE = """\
{%- for message in messages %}
{%- if message.role == 'assistant' %}
{{- 'Answer:' }}
{%- generation %}{{ ' ' + message.content + eos_token }}{% endgeneration %}
{{- '\\n' }}
{%- elif message.role == 'user' %}
{{- 'Question: ' + message.content + '\\n' }}
{%- else %}
{{- message.content + '\\n\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
{{- 'Answer:' }}
{%- endif %}
"""
"""Chat template for a tokenizer without one and without tokens for turns."""


def render_run_file(answers: InitAnswers, facts: ModelFacts, machine: Machine, *, name: str) -> str:
    """Return the text of a run file that will be written as `name`."""
    parts = (
        [
            f"# A run of meshwright. Train: meshwright train {name}. See what it will do: meshwright explain {name}. "
            f"Predict memory, communication and time per rank: meshwright train {name} --plan-only. Change any value "
            f"on the command line: --set steps=10. Schema of all keys, for an editor: meshwright schema."
        ],
        _render_ranks(answers, machine),
        _render_model(answers),
        _render_data(answers, facts, machine),
        _render_length(answers),
        _render_optimizer(answers),
        _render_output(answers, name),
    )
    return "\n".join("".join(f"{line}\n" for each in part for line in _wrap_comment(each)) for part in parts)


def _wrap_comment(text: str) -> list[str]:
    """Wrap a comment into lines; return other lines unchanged."""
    indent, sign, comment = text.partition("# ")
    if not sign or indent.strip():
        return [text]
    return textwrap.wrap(comment, _WIDTH, initial_indent=f"{indent}# ", subsequent_indent=f"{indent}# ")


def _format_value(value: str | list[str]) -> str:
    if isinstance(value, str) and _PLAIN_SCALAR.fullmatch(value) and parse_yaml(value) == value:
        return value
    return json.dumps(value, ensure_ascii=False)


def _render_ranks(answers: InitAnswers, machine: Machine) -> list[str]:
    hardware = "a CPU" if machine.device == "cpu" else f"{machine.num_ranks} x {machine.device}"
    return [
        f"# How the work is divided; every strategy of `meshwright strategies` computes the same gradient. nproc: "
        f"number of ranks to start on this machine ({hardware}); ignored under torchrun, Slurm and similar launchers, "
        f"which set the number of ranks themselves.",
        f"strategy: {answers.strategy}",
        f"nproc: {answers.num_ranks}",
        *(["threads_per_rank: 1"] if machine.device == "cpu" and answers.num_ranks > 1 else []),
    ]


def _render_model(answers: InitAnswers) -> list[str]:
    if answers.model is None:
        return [
            "# A small model with new weights. The fields are those of the transformers configuration of this type.",
            "model:",
            "  model_type: llama",
            "  hidden_size: 128",
            "  intermediate_size: 344",
            "  num_hidden_layers: 4",
            "  num_attention_heads: 4",
            "  num_key_value_heads: 2",
            f"  max_position_embeddings: {NEW_MAX_POSITIONS}",
            "  initializer_range: 0.08",
        ]
    of_hub = ": a hub id, which is downloaded once; without network access, give a directory."
    lines = [
        f"# The model to start from{of_hub if is_hub_id(answers.model) else '.'}",
        "model:",
        f"  path: {_format_value(answers.model)}",
    ]
    if answers.is_adapter:
        lines += [
            "  # Train an adapter; the weights of the model stay frozen: docs/guides/fine-tune.md.",
            *("  peft:", "    type: lora", "    r: 16", "    lora_alpha: 32", "    target_modules: all-linear"),
        ]
    return lines


def _render_data(answers: InitAnswers, facts: ModelFacts, machine: Machine) -> list[str]:
    if answers.data != (STDLIB,):
        source = "Your files: globs of .txt, .jsonl, .json, .csv or .parquet, optionally with .gz or .zst."
    elif answers.format == "text":
        source = "The source code of Python's standard library: nothing is downloaded."
    else:
        source = "Questions about Python's standard library, answered by its docstrings: nothing is downloaded."
    lines = [
        f"# {source} `meshwright data show` prints rows as the model sees them.",
        *("data:", "  sources:", f"    - files: {_format_value(answers.files)}", f"      format: {answers.format}"),
    ]
    if answers.layout.fields:
        lines += [
            "      # Names in these files: the standard name first, then the name of the column.",
            f"      fields: {json.dumps(dict(answers.layout.fields), ensure_ascii=False)}",
        ]
    if answers.model is None:
        lines += ["  # Vocabulary size of the tokenizer, which is trained on this data.", "  vocab_size: 1024"]
    if answers.format != "text":
        if answers.layout.needs_template:
            lines += [
                "  # How a prompt is written before its answer: chat (a user turn of the chat template), alpaca, none, "
                "or a text with {placeholders} for columns.",
                f"  template: {CHAT if facts.has_chat_template else ALPACA}",
            ]
        elif facts.has_chat_template is False and answers.format != "tokens":
            lines += [
                "  # How a conversation is rendered; text inside `generation` is supervised.",
                "  chat_template: |",
            ]
            lines += textwrap.indent(CHAT_TEMPLATE, "    ").splitlines()
        lines += ["  # Examples longer than seq_len keep their beginning.", "  too_long: truncate"]
    return [
        *lines,
        "  # Tokens per sequence; memory and time of a step grow with it.",
        f"  seq_len: {choose_seq_len(answers, facts, machine.device)}",
    ]


def _render_length(answers: InitAnswers) -> list[str]:
    together = answers.num_ranks * MICRO_BATCH_SIZE
    return [
        "# Length of the run: optimizer steps (`steps`), or passes over the data (`epochs`).",
        f"steps: {answers.steps}" if answers.steps is not None else f"epochs: {answers.epochs:g}",
        "# Sequences per step over all ranks, and per forward pass on one rank. If a step needs several passes, their "
        "gradients are accumulated. The result depends only on batch_size.",
        f"batch_size: {together * -(-MIN_BATCH_SIZE // together)}",
        f"micro_batch_size: {MICRO_BATCH_SIZE}",
    ]


def _render_optimizer(answers: InitAnswers) -> list[str]:
    rate, decay = ("4e-3", 0.1) if answers.model is None else ("2e-4", 0.01) if answers.is_adapter else ("1e-5", 0.01)
    objective = []
    if answers.format == "preference":
        rate = "5e-6" if answers.is_adapter else "5e-7"
        objective = [
            "# Direct preference optimization; others for pairs: docs/reference/objectives.md.",
            "objective: {name: dpo, beta: 0.1}",
        ]
    return [
        *objective,
        "# AdamW, or any other optimizer of docs/reference/optimizers.md. The learning rate rises during the first 5% "
        "of the steps and then falls.",
        f"optimizer: {{name: AdamW, lr: {rate}, weight_decay: {decay}}}",
        "schedule: {name: cosine, warmup_ratio: 0.05}",
        "# Gradients are clipped to this norm; null: the norm is only measured.",
        "max_grad_norm: 1.0",
    ]


def _render_output(answers: InitAnswers, name: str) -> list[str]:
    every = 100 if answers.steps is None else max(1, min(100, answers.steps // 3))
    sequences = ", max_sequences: 32" if answers.data == (STDLIB,) else ""
    directory = name.rpartition("/")[2].rpartition(".")[0] or "run"
    return [
        "# Evaluation on held-out rows: number of steps between evaluations; one more follows at the end.",
        f"eval: {{every: {every}{sequences}}}",
        "# Checkpoints, of which the last two are kept. The same command resumes an interrupted run, also under "
        "another strategy or number of ranks.",
        f"checkpoint: {{every: {every}, keep_last: 2}}",
        "# Directory for metrics, the loss plot, checkpoints and the trained model.",
        f"output_dir: {_format_value(f'runs/{directory}')}",
    ]


def check_output_file(file: Path, *, overwrite: bool) -> None:
    """Raise ConfigError if the file is a directory, or exists and may not be overwritten."""
    if file.is_dir():
        raise ConfigError(f"{file} is a directory. Name a file, such as {file / 'run.yaml'}.")
    if file.exists() and not overwrite:
        raise ConfigError(f"{file} already exists. Give another name, or --overwrite to replace it.")


def write_run_file(
    file: Path, answers: InitAnswers, facts: ModelFacts, machine: Machine, *, overwrite: bool
) -> RunConfig:
    """Write the run file, if it is valid and its layout is accepted."""
    text = render_run_file(answers, facts, machine, name=str(file))
    config = validate_config(RunConfig, parse_yaml(text), where=str(file))
    resolve_layout(config, answers.num_ranks)
    check_new_model(config.model, config.data.seq_len)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        # "x": a file that was created meanwhile is kept.
        with file.open("w" if overwrite else "x", encoding="utf-8") as opened:
            opened.write(text)
    except OSError as error:
        raise ConfigError(f"{file} cannot be written: {error.strerror}. Name another file.") from None
    return config
