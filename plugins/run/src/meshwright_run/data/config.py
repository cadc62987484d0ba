"""Section `data` of the run file."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, model_validator

from meshwright.plugin import FrozenModel, PathStr, suggest_match

from .prompt_template import ALPACA, NONE, find_template_error

DEFAULT_VOCAB_SIZE = 1024

STDLIB = "stdlib"

BaseFormat = Literal["text", "messages", "prompt_completion", "preference", "tokens"]
Format = Literal["text", "messages", "sharegpt", "prompt_completion", "alpaca", "preference", "tokens"]
Packing = Literal["documents", "stream", "none"]
TooLongAction = Literal["error", "truncate", "drop", "split"]

_CHAT = ("role", "content", "tools", "chat_template_kwargs")
FIELDS: Mapping[BaseFormat, tuple[str, ...]] = MappingProxyType(
    {
        "text": ("text",),
        "messages": ("messages", *_CHAT),
        "prompt_completion": ("prompt", "completion", *_CHAT),
        "preference": ("prompt", "chosen", "rejected", *_CHAT),
        "tokens": ("input_ids", "labels", "loss_mask"),
    }
)
"""Default field names of each format."""
PRESETS: Mapping[Format, tuple[BaseFormat, Mapping[str, str]]] = MappingProxyType(
    {
        "sharegpt": (
            "messages",
            {"messages": "conversations", "role": "from", "content": "value", "system": "system"},
        ),
        "alpaca": ("prompt_completion", {"prompt": "instruction", "completion": "output", "input": "input"}),
    }
)
"""Formats that are others with different default field names."""
_BATCH_KEYS = frozenset({"input_ids", "labels", "position_ids", "attention_mask"})


def _check_patterns(value: Any) -> Any:
    patterns = [value] if isinstance(value, str) else value
    if patterns is not None and not (patterns and all(pattern.strip() for pattern in patterns)):
        raise ValueError("names no files; write 'stdlib', a glob, or a list of globs")
    return value


_CHECKED_PATTERNS = AfterValidator(_check_patterns)


class SourceConfig(FrozenModel):
    """One source of examples, and their format."""

    files: Annotated[PathStr | list[PathStr] | None, _CHECKED_PATTERNS] = Field(
        default=None,
        description="'stdlib', or one or more globs of .txt, .jsonl, .json, .parquet or .csv files, optionally "
        "compressed (.gz, .zst); ~ and ** are allowed.",
    )
    dataset: Annotated[PathStr | None, _CHECKED_PATTERNS] = Field(
        default=None, description="Instead of files: the directory or hub id of a Hugging Face dataset."
    )
    name: str | None = Field(default=None, description="Configuration of the dataset.")
    split: str = Field(default="train", min_length=1, description="Split of the dataset.")
    revision: str | None = Field(default=None, description="Branch, tag or commit of a dataset on the hub.")
    streaming: bool = Field(
        default=False, description="Read during training, without a cache; for sources larger than the disk."
    )
    format: Format = Field(default="text", description="Format of the examples; see docs/reference/data.md.")
    fields: dict[str, str] = Field(
        default={}, description="Field names that differ in the source: standard name to its name, {messages: chat}."
    )
    columns: list[str] = Field(
        default=[], description="Further numeric fields of each example, which are passed to the objective."
    )
    weight: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = Field(
        default=None, description="Relative share of the rows; null: proportional to the source's number of rows."
    )

    @property
    def location(self) -> str:
        if self.dataset is not None:
            return self.dataset
        return self.files if isinstance(self.files, str) else ", ".join(self.files or ())

    @property
    def group_size(self) -> int:
        return 2 if self.format == "preference" else 1

    @property
    def base_format(self) -> BaseFormat:
        """`format`, or the one of which it is a preset."""
        if self.format == "sharegpt" or self.format == "alpaca":
            return PRESETS[self.format][0]
        return self.format

    @property
    def field_names(self) -> dict[str, str]:
        """Names of the source's fields that differ from those of `base_format`: standard name to the source's."""
        if self.format not in PRESETS:
            return self.fields
        renamed = PRESETS[self.format][1]
        own = {name: self.fields.get(name, self.fields.get(plain, plain)) for name, plain in renamed.items()}
        return {**self.fields, **own}

    def get_known_fields(self) -> tuple[str, ...]:
        """Return the standard names of the fields of the format; of a preset, also those of its `base_format`."""
        renamed = PRESETS[self.format][1] if self.format in PRESETS else {}
        return tuple(dict.fromkeys((*renamed.values(), *renamed, *FIELDS[self.base_format])))

    @model_validator(mode="after")
    def _check_source(self) -> SourceConfig:
        if (self.files is None) == (self.dataset is None):
            raise ValueError("give either files or dataset")
        if self.files is not None:
            for name, plain in (("name", None), ("split", "train"), ("revision", None)):
                if getattr(self, name) != plain:
                    raise ValueError(f"{name} applies only to a dataset, not to files: {self.location!r}. Leave it out")
            is_library = STDLIB in ([self.files] if isinstance(self.files, str) else self.files)
            if is_library and self.format not in ("text", "messages", "prompt_completion"):
                raise ValueError(
                    f"'stdlib' can be text, messages or prompt_completion, not format={self.format}. Name files instead"
                )
        known = (*self.get_known_fields(), *self.columns)
        for name in self.fields:
            if name not in known:
                raise ValueError(
                    f"fields: {name!r} is not a field of format={self.format}.{suggest_match(name, known)} Write the "
                    f"standard name first, then the source's. Standard names: {', '.join(known)}"
                )
        for name in self.columns:
            taken = name in _BATCH_KEYS or name in self.get_known_fields()
            if taken or self.columns.count(name) > 1 or not name:
                raise ValueError(f"columns: {name!r} is empty, given twice, or already the name of a field")
        return self


class DataConfig(FrozenModel):
    """Sources, tokenizer and sequence length of a run."""

    sources: list[SourceConfig] | None = Field(
        default=None, min_length=1, description="Sources of the examples; null: the documents of `corpus`."
    )
    eval_sets: dict[str, SourceConfig | list[SourceConfig]] = Field(
        default={}, description="Further evaluation sets by name, besides the examples held out of the sources."
    )
    corpus: Annotated[PathStr | list[PathStr], _CHECKED_PATTERNS] = Field(
        default="stdlib",
        description="'stdlib' (the source code of the running Python's standard library), or one or more globs of "
        ".txt files (one document each) and .jsonl files (one document per line); ~ and ** are allowed.",
    )
    text_field: str = Field(default="text", min_length=1, description="Field of a .jsonl line that holds the document.")
    tokenizer: PathStr | None = Field(
        default=None,
        description="Local directory of a tokenizer; null: the model's own, else one trained on the corpus.",
    )
    vocab_size: int = Field(
        default=DEFAULT_VOCAB_SIZE,
        ge=257,
        le=1_000_000,
        description="Maximum vocabulary size of a trained tokenizer: 256 bytes, one special token, and the merges.",
    )
    seq_len: int = Field(default=256, ge=2, lt=2**31, description="Number of tokens in a training sequence.")
    loss_on: Literal["answers", "last_answer", "all"] = Field(
        default="answers", description="Which tokens of conversations, answers and preferences are supervised."
    )
    chat_template: str | None = Field(
        default=None, description="Jinja template, or the path of one; null: the tokenizer's own."
    )
    template: str | None = Field(
        default=None,
        min_length=1,
        description="How a prompt of plain text is written before its answer: none (as it is), alpaca, chat (as a user "
        "turn of the chat template), or a text with {placeholders} for fields; null: alpaca for format alpaca, else "
        "none.",
    )
    packing: Packing | None = Field(
        default=None,
        description="documents: several isolated documents per row; stream: documents concatenated and cut at any "
        "token; none: one padded document per row, with rows of similar length in a batch. null: stream if all "
        "sources are text, none for preferences, else documents.",
    )
    too_long: TooLongAction | None = Field(
        default=None,
        description="Handling of examples longer than seq_len: truncate keeps the beginning, split makes several "
        "examples, drop leaves it out. null: split for text and tokens, else error.",
    )
    eval_fraction: float = Field(
        default=0.05,
        ge=0,
        lt=1,
        description="Fraction of the examples held out from training for the eval loss; 0 requires eval_sets.",
    )
    cache_dir: PathStr | None = Field(
        default=None,
        description="Directory for tokenized data; null: meshwright in XDG_CACHE_HOME, or in ~/.cache.",
    )

    def get_training_sources(self) -> list[SourceConfig]:
        """Return the training sources, including one given in the short form (`corpus`)."""
        if self.sources is not None:
            return self.sources
        fields = {} if self.text_field == "text" else {"text": self.text_field}
        return [SourceConfig(files=self.corpus, fields=fields)]

    def get_evaluation_sources(self) -> dict[str, list[SourceConfig]]:
        return {name: each if isinstance(each, list) else [each] for name, each in self.eval_sets.items()}

    def resolve_packing(self) -> Packing:
        """Return `packing`, or the value that null stands for; it applies to all sources and sets."""
        if self.packing is not None:
            return self.packing
        formats = {source.format for _, source in self._iter_sources()}
        return "stream" if formats == {"text"} else "none" if "preference" in formats else "documents"

    def resolve_too_long(self, format: Format) -> TooLongAction | None:
        """Return `too_long`, or the value that null stands for; None if documents may have any length."""
        if self.resolve_packing() == "stream":
            return None
        return self.too_long or ("split" if format in ("text", "tokens") else "error")

    def resolve_template(self, source: SourceConfig) -> str:
        """Return `template`, or the value that null stands for."""
        if source.base_format not in ("prompt_completion", "preference"):
            return NONE
        return self.template or (ALPACA if source.format == "alpaca" else NONE)

    def _iter_sources(self) -> Iterator[tuple[str, SourceConfig]]:
        for number, source in enumerate(self.get_training_sources()):
            yield f"sources.{number}", source
        for name, sources in self.get_evaluation_sources().items():
            yield from ((f"eval_sets.{name}", source) for source in sources)

    @model_validator(mode="after")
    def _check_combinations(self) -> DataConfig:
        if self.sources is not None:
            self._check_short_form()
            _check_weights(self.sources)
        self._check_sources()
        self._check_held_out()
        self._check_packing()
        if self.tokenizer is not None and self.vocab_size != DEFAULT_VOCAB_SIZE:
            raise ValueError(
                f"vocab_size={self.vocab_size} applies only to a trained tokenizer, but tokenizer={self.tokenizer!r} "
                "is loaded as it is; leave one of the two out"
            )
        return self

    def _check_short_form(self) -> None:
        for name, value, plain in (("corpus", self.corpus, STDLIB), ("text_field", self.text_field, "text")):
            if value != plain:
                raise ValueError(
                    f"{name}={value!r} is the short form of a single text source, but sources are given as well. Leave "
                    f"{name} out"
                )

    def _check_sources(self) -> None:
        first = self.get_training_sources()[0]
        for where, source in self._iter_sources():
            if (source.format == "preference") != (first.format == "preference"):
                raise ValueError(
                    f"{where} ({source.location!r}) has format {source.format}, but sources.0 has {first.format}: a "
                    "run cannot mix preference pairs and single examples"
                )
            if set(source.columns) != set(first.columns):
                raise ValueError(
                    f"{where} ({source.location!r}) has columns {source.columns}, but sources.0 has {first.columns}: "
                    "an objective needs the same columns of every example. Give all sources the same columns, or none"
                )

    def _check_held_out(self) -> None:
        if self.eval_fraction > 0 and all(source.streaming for source in self.get_training_sources()):
            raise ValueError(
                f"eval_fraction={self.eval_fraction} cannot hold out examples of sources that are read during "
                "training (streaming: true). Set eval_fraction: 0, and name eval_sets"
            )
        if self.eval_fraction == 0 and not self.eval_sets:
            raise ValueError("eval_fraction=0 leaves nothing to evaluate on. Raise it, or name eval_sets")
        for name, sources in self.get_evaluation_sources().items():
            if not name or name == "held_out" or not sources:
                raise ValueError(
                    f"eval_sets: {name!r} is empty, or the reserved name of the held-out set. Choose another name"
                )
            for source in sources:
                if source.streaming or source.weight is not None:
                    option = "streaming" if source.streaming else "weight"
                    raise ValueError(f"eval_sets.{name}: {option} has no effect in an evaluation set. Leave it out")

    def _check_packing(self) -> None:
        formats = {source.format for _, source in self._iter_sources()}
        packing, answers = self.resolve_packing(), formats - {"text", "tokens"}
        if packing == "stream" and answers:
            raise ValueError(
                f"packing=stream cuts examples at any token, which would separate answers from their prompts "
                f"({', '.join(sorted(answers))}). Use documents or none"
            )
        if packing != "none" and "preference" in formats:
            raise ValueError(f"packing={packing}: each answer of a preference pair needs its own row. Use none")
        if self.too_long is not None and packing == "stream":
            raise ValueError(
                f"too_long={self.too_long} has no effect with packing=stream, in which documents may have any length. "
                "Leave one of the two out"
            )
        if self.too_long == "split" and answers:
            raise ValueError(
                f"too_long=split would separate answers from their prompts ({', '.join(sorted(answers))}). Use error, "
                "truncate or drop"
            )
        for name, value, plain in (("loss_on", self.loss_on, "answers"), ("chat_template", self.chat_template, None)):
            if value != plain and not answers:
                raise ValueError(f"{name} has no effect: all sources are {' or '.join(sorted(formats))}. Leave it out")
        self._check_template(answers)

    def _check_template(self, formats: set[Format]) -> None:
        if self.template is None:
            return
        if not formats & {"prompt_completion", "alpaca", "preference"}:
            raise ValueError(
                f"template={self.template!r} has no effect: no source has prompts of plain text (format alpaca, "
                "prompt_completion or preference). Leave it out"
            )
        if problem := find_template_error(self.template):
            raise ValueError(f"template: {problem}")


def _check_weights(sources: list[SourceConfig]) -> None:
    weighted = [source for source in sources if source.weight is not None]
    if weighted and len(sources) == 1:
        raise ValueError("sources.0.weight has no effect: there is only one source. Leave it out")
    if weighted and len(weighted) < len(sources):
        raise ValueError("weight is given for some sources only. Give it for all, or for none")
    if not weighted and len(sources) > 1 and any(source.streaming for source in sources):
        raise ValueError(
            "a source with streaming: true has no known number of rows, so each of several sources needs a weight"
        )
