"""Options of the `pipeline` strategy, and the numbers of stages and microbatches they give. Imports no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, WithJsonSchema, field_validator, model_validator

from meshwright.plugin import FLOAT16_REFUSAL, TRAINING_DTYPES, ConfigError, FrozenModel, check_import

from .schedule.actions import Schedule, bubble_fraction, count_peak_live_microbatches
from .schedule.specs import SCHEDULES, build_schedule, find_schedule_spec, read_schedule_csv, read_schedule_size

if TYPE_CHECKING:
    from meshwright.plugin import Degrees

# torch's names of schedules that are read from a file.
_CSV_SCHEDULE_NAMES = ("pipelineschedulesingle", "pipelineschedulemulti")


class PipelineConfig(FrozenModel):
    """Options of the `pipeline` strategy, without mesh sizes and options of the inner strategy."""

    pp_schedule: str | None = Field(
        default="1f1b",
        description="GPipe, 1F1B, Interleaved1F1B, LoopedBFS, InterleavedZeroBubble, ZBVZeroBubble or DualPipeV, in "
        "any case, with or without separators. With pp_schedule_csv, leave the default or set null.",
        examples=[*SCHEDULES],
    )
    pp_schedule_csv: str | None = Field(
        default=None,
        description="File with a custom schedule: a row for each rank, a cell for each action, such as 0F0 (stage 0, "
        "forward, microbatch 0), 1B0, or 1I0 and 1W0 for a backward in two parts. Empty cells are ignored.",
    )
    pp_microbatch_size: int = Field(default=1, ge=1, description="Sequences in each microbatch of the pipeline.")
    pp_batch_size: int = Field(
        default=1,
        ge=1,
        description="Sequences of one run of the schedule on each data-parallel rank. A step with more sequences runs "
        "the schedule several times. 1: all sequences of a step in one run.",
    )
    layers_per_stage: int | None = Field(
        default=None,
        ge=1,
        description="Maximum number of blocks per stage. The number of stages is the number of blocks divided by it, "
        "rounded up; blocks are distributed evenly by number. null: one stage per rank, or two if the schedule needs "
        "them, balanced by cost.",
    )
    round_virtual_stages_to_pp_multiple: Literal["up", "down"] | None = Field(
        default=None,
        description="Round the number of stages that layers_per_stage gives up or down to a multiple of pp_size. "
        "null: a number that is not a multiple is an error.",
    )
    module_fqns_per_model_part: list[list[str]] | None = Field(
        default=None,
        description="Names of the modules of each stage, in the model's order. Name each module with parameters once.",
    )
    patch_inner_model: bool = Field(
        default=True,
        description="Split the inner model into stages that receive and send hidden states. false: the module passed "
        "to parallelize is already a stage.",
    )
    patch_causal_lm_model: bool = Field(
        default=True,
        description="Do the same with the causal-LM model around it, whose head is on the last stage. false: the "
        "module passed to parallelize is already a stage. Must equal patch_inner_model.",
    )
    patch_stage_backward_maybe_with_nosync: bool = Field(
        default=False,
        description="Whether it is an error if the inner strategy's options reduce gradients for each microbatch. By "
        "default gradients are reduced over data-parallel ranks once per step, with the last backward of a stage.",
    )
    dtype: Annotated[
        Any,
        WithJsonSchema(
            {"anyOf": [{"enum": [*TRAINING_DTYPES, *(f"torch.{each}" for each in TRAINING_DTYPES)]}, {"type": "null"}]}
        ),
    ] = Field(default=None, description="Dtype of hidden states between stages. null: the model's own.")
    scale_grads_in_schedule: bool = Field(
        default=False,
        description="Must be false: the loss is already divided by the step's tokens, so gradients need no scaling.",
    )
    loss_fn: Annotated[Any, WithJsonSchema({"type": ["string", "null"]})] = Field(
        default=None,
        description="Loss of the last stage: a callable of logits and targets that returns a sum over tokens, or its "
        "import path. null: the model's token loss.",
    )
    pp_seq_len: int | None = Field(
        default=None,
        ge=1,
        description="Number of tokens that every sequence must have. null: any number, which may change between steps.",
    )

    @classmethod
    def variants(cls, *, degrees: Degrees, num_layers: int, micro_batch_size: int, **_: Any) -> list[dict[str, Any]]:
        """Return options worth planning on a mesh; see [Note: variants] in `meshwright_plan.search.candidates`."""
        found = []
        for name, rule in SCHEDULES.items():
            for chunks in (rule.min_chunks,) if rule.max_chunks else (rule.min_chunks, 2 * rule.min_chunks):
                options: dict[str, Any] = {"pp_schedule": name, "pp_microbatch_size": micro_batch_size}
                if chunks > rule.min_chunks:
                    each = -(-num_layers // (degrees.pp * chunks))
                    if -(-num_layers // each) != degrees.pp * chunks:
                        continue
                    options["layers_per_stage"] = each
                found.append(options)
        return found

    def estimate_schedule(
        self, *, num_layers: int, pp_size: int, num_sequences: int, head_cost: float = 0.0
    ) -> tuple[float, float]:
        """Return the bubble fraction and the peak number of live microbatches per stage, for stages of equal size.

        `num_sequences` is the number of sequences of a step on each data-parallel rank. `head_cost` is the time of the
        last stage's head, in blocks.
        """
        stages = compute_num_stages(self, num_layers=num_layers, pp_size=pp_size)
        microbatches = compute_num_microbatches(self, num_sequences=num_sequences)
        schedule = resolve_schedule(self, num_ranks=pp_size, num_stages=stages, num_microbatches=microbatches)
        costs = [num_layers / stages] * (stages - 1) + [num_layers / stages + head_cost]
        return bubble_fraction(schedule, stage_costs=costs), max(
            count_peak_live_microbatches(schedule)
        ) * pp_size / stages

    @property
    def sequences_per_run(self) -> int | None:
        """Sequences of one run of the schedule; None: all of a step."""
        # A run of one sequence would not be a pipeline, so the default 1 can only mean that no value is set.
        return None if self.pp_batch_size == 1 else self.pp_batch_size

    @field_validator("dtype", mode="before")
    @classmethod
    def _normalize_dtype(cls, value: Any) -> Any:
        name = str(value).removeprefix("torch.")
        if value is not None and name not in TRAINING_DTYPES:
            raise ValueError(
                f"must be one of {', '.join(TRAINING_DTYPES)}, as a name or a torch.dtype; {FLOAT16_REFUSAL}"
            )
        return None if value is None else name

    @field_validator("loss_fn")
    @classmethod
    def _check_loss(cls, value: Any) -> Any:
        if isinstance(value, str):
            try:
                check_import(value)
            except ConfigError as error:
                raise ValueError(str(error)) from None
        elif value is not None and not callable(value):
            raise ValueError("must be a callable, or the import path of one")
        return value

    @field_validator("module_fqns_per_model_part")
    @classmethod
    def _check_parts(cls, value: list[list[str]] | None) -> list[list[str]] | None:
        if value == []:
            raise ValueError("must hold at least one stage; set null to split the model automatically")
        if not all(value or ()):
            raise ValueError("must hold at least one stage, and each stage at least one module")
        return value

    @model_validator(mode="after")
    def _check_combinations(self) -> PipelineConfig:
        names_file = (self.pp_schedule or "").lower() in _CSV_SCHEDULE_NAMES
        if self.pp_schedule_csv is None:
            if self.pp_schedule is None or names_file:
                raise ValueError(f"pp_schedule={self.pp_schedule!r} needs a file. Set pp_schedule_csv, or a schedule")
            try:
                find_schedule_spec(self.pp_schedule)
            except ConfigError as error:
                raise ValueError(str(error)) from None
        elif self.pp_schedule not in (None, type(self).model_fields["pp_schedule"].default) and not names_file:
            raise ValueError(f"pp_schedule={self.pp_schedule!r} and pp_schedule_csv are two schedules. Set one")
        if self.layers_per_stage is None and self.round_virtual_stages_to_pp_multiple is not None:
            raise ValueError(
                f"round_virtual_stages_to_pp_multiple={self.round_virtual_stages_to_pp_multiple!r} acts only with "
                "layers_per_stage. Set layers_per_stage, or leave both out"
            )
        if self.layers_per_stage is not None and self.module_fqns_per_model_part is not None:
            raise ValueError("layers_per_stage and module_fqns_per_model_part both split the model. Set one")
        if self.sequences_per_run is not None and self.sequences_per_run % self.pp_microbatch_size:
            raise ValueError(
                f"pp_batch_size={self.pp_batch_size} does not divide into microbatches of "
                f"pp_microbatch_size={self.pp_microbatch_size}. Use one of {_format_divisors(self.pp_batch_size)}"
            )
        return self


PipelineConfig.positional_fields = tuple(PipelineConfig.model_fields)


class BlockCountConfig(PipelineConfig):
    """Options with an explicit number of blocks for each stage, which replaces all other options that split."""

    blocks_per_stage: tuple[int, ...]


def check_options(config: PipelineConfig, degrees: Degrees) -> None:
    if config.patch_inner_model != config.patch_causal_lm_model:
        raise ConfigError(
            f"patch_inner_model={config.patch_inner_model} and patch_causal_lm_model={config.patch_causal_lm_model}: "
            f"either the full model is split, or each rank supplies its stage. Make them equal."
        )
    if not config.patch_inner_model:
        for name in ("layers_per_stage", "module_fqns_per_model_part"):
            if getattr(config, name) is not None:
                raise ConfigError(
                    f"{name} splits a model, but with patch_inner_model=false each rank supplies its stage. "
                    f"Leave one of them out."
                )
        for axis, size, unknown in (
            ("cp_size", degrees.cp, "the positions of the hidden states that a stage receives"),
            ("tp_size", degrees.tp, "the layers of a stage to shard"),
        ):
            if size > 1:
                raise ConfigError(f"patch_inner_model=false with {axis}={size}: {unknown} are not known. Set {axis}=1.")
    if config.scale_grads_in_schedule:
        raise ConfigError(
            "scale_grads_in_schedule=true divides gradients by the number of microbatches, but the loss is already "
            "divided by the step's tokens. Set it to false."
        )


def compute_num_stages(config: PipelineConfig, *, num_layers: int, pp_size: int) -> int:
    """Return the number of stages, on all ranks of the pipeline together, of a model with `num_layers` blocks."""
    source, stages = _requested_num_stages(config, num_layers, pp_size)
    # A file may put different numbers of stages on different ranks.
    if config.pp_schedule_csv is None:
        rule = find_schedule_spec(str(config.pp_schedule))
        chunks, rest = divmod(stages, pp_size)
        if rest:
            rounding = (
                " or set round_virtual_stages_to_pp_multiple to 'up' or 'down'" if config.layers_per_stage else ""
            )
            raise ConfigError(
                f"{source} gives {stages} stages, which is not a multiple of pp_size={pp_size}. Change it{rounding}."
            )
        if chunks < rule.min_chunks or (rule.max_chunks and chunks > rule.max_chunks):
            raise ConfigError(
                f"{source} gives {stages} stages, {chunks} on each of {pp_size} ranks, but "
                f"pp_schedule={config.pp_schedule!r} needs {rule.describe_chunks} per rank. "
                f"Change one of them{_layers_per_stage_hint(num_layers, pp_size, rule.min_chunks)}."
            )
    if stages > num_layers:
        raise ConfigError(
            f"{source} gives {stages} stages, but the model has {num_layers} blocks, and each stage needs one. "
            f"Use fewer pipeline ranks, a schedule with one stage per rank (1f1b, gpipe), or a deeper model."
        )
    return stages


def _requested_num_stages(config: PipelineConfig, layers: int, ranks: int) -> tuple[str, int]:
    """Return the option that determines the number of stages, with its value, and that number."""
    if isinstance(config, BlockCountConfig):
        return "blocks_per_stage", len(config.blocks_per_stage)
    if config.module_fqns_per_model_part is not None:
        return "module_fqns_per_model_part", len(config.module_fqns_per_model_part)
    if config.layers_per_stage is not None:
        source = f"layers_per_stage={config.layers_per_stage} with {layers} blocks"
        stages = -(-layers // config.layers_per_stage)
        if config.round_virtual_stages_to_pp_multiple == "up":
            stages = -(-stages // ranks) * ranks
        elif config.round_virtual_stages_to_pp_multiple == "down":
            stages = stages // ranks * ranks
        if not stages:
            raise ConfigError(
                f"{source} gives fewer stages than pp_size={ranks}, and none when rounded down. "
                f"Round up, or set layers_per_stage to at most {max(1, layers // ranks)}."
            )
        return source, stages
    if config.pp_schedule_csv is not None:
        return f"pp_schedule_csv={config.pp_schedule_csv!r}", read_schedule_size(config.pp_schedule_csv)[0]
    return f"pp_schedule={config.pp_schedule!r}", ranks * find_schedule_spec(str(config.pp_schedule)).min_chunks


def _layers_per_stage_hint(layers: int, ranks: int, chunks: int) -> str:
    """Return a hint with a layers_per_stage that gives `chunks` stages per rank; empty if there is none."""
    fitting = -(-layers // (ranks * chunks))
    return f", for example to layers_per_stage={fitting}" if -(-layers // fitting) == ranks * chunks else ""


def compute_num_microbatches(config: PipelineConfig, *, num_sequences: int) -> int:
    """Return the microbatches of one run of the schedule; `num_sequences` of a step on each data-parallel rank."""
    batch, size = config.sequences_per_run or num_sequences, config.pp_microbatch_size
    if num_sequences % batch:
        raise ConfigError(
            f"{num_sequences} sequences per step and data-parallel rank do not divide into runs of "
            f"pp_batch_size={batch}. Use one of {_format_divisors(num_sequences)}, or leave it out for a single run."
        )
    if batch % size:
        raise ConfigError(
            f"a batch of {batch} sequences does not divide into microbatches of pp_microbatch_size={size}. "
            f"Use one of {_format_divisors(batch)}, or another batch size."
        )
    if config.pp_schedule_csv is None:
        return batch // size
    _, microbatches = read_schedule_size(config.pp_schedule_csv)
    if config.sequences_per_run is not None and batch // size != microbatches:
        raise ConfigError(
            f"pp_batch_size={batch} is {batch // size} microbatches of {size}, but "
            f"pp_schedule_csv={config.pp_schedule_csv!r} runs {microbatches}. "
            "Make them equal, or leave pp_batch_size out."
        )
    return microbatches


def resolve_schedule(config: PipelineConfig, *, num_ranks: int, num_stages: int, num_microbatches: int) -> Schedule:
    if config.pp_schedule_csv is not None:
        return read_schedule_csv(
            config.pp_schedule_csv, num_ranks=num_ranks, num_stages=num_stages, num_microbatches=num_microbatches
        )
    return build_schedule(
        str(config.pp_schedule), num_ranks=num_ranks, num_stages=num_stages, num_microbatches=num_microbatches
    )


def _format_divisors(number: int) -> str:
    return ", ".join(str(each) for each in range(1, number + 1) if number % each == 0)
