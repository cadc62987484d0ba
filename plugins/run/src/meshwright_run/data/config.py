"""What a run file says about its data."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, model_validator

from meshwright.plugin import FrozenModel, PathStr, suggest_match

DEFAULT_VOCAB_SIZE = 1024

STDLIB = "stdlib"

Format = Literal["text", "messages", "prompt_completion", "preference", "tokens"]
Packing = Literal["documents", "stream", "none"]
TooLongAction = Literal["error", "truncate", "drop", "split"]

_CHAT = ("role", "content", "tools", "chat_template_kwargs")
FIELDS: Mapping[Format, tuple[str, ...]] = MappingProxyType(
    {
        "text": ("text",),
        "messages": ("messages", *_CHAT),
        "prompt_completion": ("prompt", "completion", *_CHAT),
        "preference": ("prompt", "chosen", "rejected", *_CHAT),
        "tokens": ("input_ids", "labels", "loss_mask"),
    }
)
"""What the fields of each format are called where a run file does not say otherwise."""
_BATCH_KEYS = frozenset({"input_ids", "labels", "position_ids", "attention_mask"})


def _check_patterns(value: Any) -> Any:
    patterns = [value] if isinstance(value, str) else value
    if patterns is not None and not (patterns and all(pattern.strip() for pattern in patterns)):
        raise ValueError("names no files; write 'stdlib', a glob, or a list of globs")
    return value


_CHECKED_PATTERNS = AfterValidator(_check_patterns)


class SourceConfig(FrozenModel):
    """One place that examples come from, and what each is."""

    files: Annotated[PathStr | list[PathStr] | None, _CHECKED_PATTERNS] = Field(
        default=None,
        description="'stdlib', or one or several globs of .txt, .jsonl, .json, .parquet or .csv files, each also "
        "with .gz or .zst; ~ and ** are allowed.",
    )
    dataset: Annotated[PathStr | None, _CHECKED_PATTERNS] = Field(
        default=None, description="In place of files: a directory that Hugging Face datasets saved, or a hub id."
    )
    name: str | None = Field(default=None, description="Configuration of the dataset.")
    split: str = Field(default="train", min_length=1, description="Split of the dataset.")
    revision: str | None = Field(default=None, description="Branch, tag or commit of a dataset on the hub.")
    streaming: bool = Field(
        default=False, description="Read while training, without a cache: for what is larger than the disk."
    )
    format: Format = Field(default="text", description="What an example is; see docs/reference/data.md.")
    fields: dict[str, str] = Field(
        default={}, description="Where the source calls a field otherwise: our name to its name, {messages: chat}."
    )
    columns: list[str] = Field(
        default=[], description="Further fields, numbers, that the objective is given with each example."
    )
    weight: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = Field(
        default=None, description="Share of the rows, relative to the other sources'; null: by their numbers of rows."
    )

    @property
    def location(self) -> str:
        if self.dataset is not None:
            return self.dataset
        return self.files if isinstance(self.files, str) else ", ".join(self.files or ())

    @property
    def group_size(self) -> int:
        return 2 if self.format == "preference" else 1

    @model_validator(mode="after")
    def _check_source(self) -> SourceConfig:
        if (self.files is None) == (self.dataset is None):
            raise ValueError("give either files or dataset")
        if self.files is not None:
            for name, plain in (("name", None), ("split", "train"), ("revision", None)):
                if getattr(self, name) != plain:
                    raise ValueError(f"{name} is of a dataset, and these are files: {self.location!r}. Leave it out")
            is_library = STDLIB in ([self.files] if isinstance(self.files, str) else self.files)
            if is_library and self.format not in ("text", "messages", "prompt_completion"):
                raise ValueError(
                    f"'stdlib' is read as text, messages or prompt_completion, not format={self.format}. Name files"
                )
        known = (*FIELDS[self.format], *self.columns)
        for name in self.fields:
            if name not in known:
                raise ValueError(
                    f"fields: {name!r} is nothing that format={self.format} reads.{suggest_match(name, known)} Write "
                    f"our name first, then the source's. Ours: {', '.join(known)}"
                )
        for name in self.columns:
            taken = name in _BATCH_KEYS or name in FIELDS[self.format]
            if taken or self.columns.count(name) > 1 or not name:
                raise ValueError(f"columns: {name!r} is empty, given twice, or the name of what a batch has anyway")
        return self


class DataConfig(FrozenModel):
    """Sources, tokenizer and sequence length of a run."""

    sources: list[SourceConfig] | None = Field(
        default=None, min_length=1, description="Where the examples come from; null: the documents of `corpus`."
    )
    eval_sets: dict[str, SourceConfig | list[SourceConfig]] = Field(
        default={}, description="Further sets to evaluate on, by name, beside what is held out of the sources."
    )
    corpus: Annotated[PathStr | list[PathStr], _CHECKED_PATTERNS] = Field(
        default="stdlib",
        description="'stdlib' (the sources of the running Python's standard library), or one or several globs of "
        ".txt files (a document each) and .jsonl files (a document per line); ~ and ** are allowed.",
    )
    text_field: str = Field(default="text", min_length=1, description="Field of a .jsonl line that holds the document.")
    tokenizer: PathStr | None = Field(
        default=None,
        description="Local directory with a tokenizer; null: the model's own, or else one trained on the corpus.",
    )
    vocab_size: int = Field(
        default=DEFAULT_VOCAB_SIZE,
        ge=257,
        le=1_000_000,
        description="Largest vocabulary of a trained tokenizer: 256 bytes, one special token, and the merges.",
    )
    seq_len: int = Field(default=256, ge=2, lt=2**31, description="Tokens in a training sequence.")
    loss_on: Literal["answers", "last_answer", "all"] = Field(
        default="answers", description="Which tokens of conversations, answers and preferences are supervised."
    )
    chat_template: str | None = Field(
        default=None, description="A Jinja template, or the path of one; null: the tokenizer's own."
    )
    packing: Packing | None = Field(
        default=None,
        description="documents: several in a row, isolated; stream: one after another, cut anywhere; none: a row "
        "each, padded, rows of about equal length together. null: stream where all sources are text, none for "
        "preferences, else documents.",
    )
    too_long: TooLongAction | None = Field(
        default=None,
        description="What becomes of an example longer than seq_len: truncate keeps its beginning, split makes "
        "several of it. null: split for text and tokens, else error.",
    )
    eval_fraction: float = Field(
        default=0.05,
        ge=0,
        lt=1,
        description="Share of the examples that is held out from training, for the eval loss; 0 only with eval_sets.",
    )
    cache_dir: PathStr | None = Field(
        default=None,
        description="Where tokenized corpora are kept; null: meshwright under XDG_CACHE_HOME, or under ~/.cache.",
    )

    def get_training_sources(self) -> list[SourceConfig]:
        """Where the examples to train on come from, also where that is written in the short form."""
        if self.sources is not None:
            return self.sources
        fields = {} if self.text_field == "text" else {"text": self.text_field}
        return [SourceConfig(files=self.corpus, fields=fields)]

    def get_evaluation_sources(self) -> dict[str, list[SourceConfig]]:
        return {name: each if isinstance(each, list) else [each] for name, each in self.eval_sets.items()}

    def resolve_packing(self) -> Packing:
        """`packing`, or what null means; the same for all sources and sets."""
        if self.packing is not None:
            return self.packing
        formats = {source.format for _, source in self._iter_sources()}
        return "stream" if formats == {"text"} else "none" if "preference" in formats else "documents"

    def resolve_too_long(self, format: Format) -> TooLongAction | None:
        """`too_long`, or what null means for a format; None where a document of any length is well."""
        if self.resolve_packing() == "stream":
            return None
        return self.too_long or ("split" if format in ("text", "tokens") else "error")

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
                f"vocab_size={self.vocab_size} is the size of a trained tokenizer, but tokenizer={self.tokenizer!r} "
                "is loaded as it is; leave one of the two out"
            )
        return self

    def _check_short_form(self) -> None:
        for name, value, plain in (("corpus", self.corpus, STDLIB), ("text_field", self.text_field, "text")):
            if value != plain:
                raise ValueError(
                    f"{name}={value!r} is the short form of one source of text, and sources are given, too. Leave "
                    f"{name} out"
                )

    def _check_sources(self) -> None:
        first = self.get_training_sources()[0]
        for where, source in self._iter_sources():
            if (source.format == "preference") != (first.format == "preference"):
                raise ValueError(
                    f"{where} ({source.location!r}) is of format {source.format}, and others are of {first.format}: "
                    "pairs and single examples do not go into one run"
                )
            if set(source.columns) != set(first.columns):
                raise ValueError(
                    f"{where} ({source.location!r}) has columns {source.columns}, but sources.0 has {first.columns}: "
                    "an objective is given the same of each example. Give all the same, or none"
                )

    def _check_held_out(self) -> None:
        if self.eval_fraction > 0 and all(source.streaming for source in self.get_training_sources()):
            raise ValueError(
                f"eval_fraction={self.eval_fraction} holds out nothing of a source that is read while training "
                "(streaming: true). Set eval_fraction: 0, and name eval_sets"
            )
        if self.eval_fraction == 0 and not self.eval_sets:
            raise ValueError("eval_fraction=0 leaves nothing to evaluate on. Raise it, or name eval_sets")
        for name, sources in self.get_evaluation_sources().items():
            if not name or name == "held_out" or not sources:
                raise ValueError(
                    f"eval_sets: {name!r} is empty, or the name of what is held out of the sources. Name it otherwise"
                )
            for source in sources:
                if source.streaming or source.weight is not None:
                    option = "streaming" if source.streaming else "weight"
                    raise ValueError(f"eval_sets.{name}: {option} has no use in a set to evaluate on. Leave it out")

    def _check_packing(self) -> None:
        formats = {source.format for _, source in self._iter_sources()}
        packing, answers = self.resolve_packing(), formats - {"text", "tokens"}
        if packing == "stream" and answers:
            raise ValueError(
                f"packing=stream cuts examples anywhere, which would part answers from what they answer "
                f"({', '.join(sorted(answers))}). Use documents or none"
            )
        if packing != "none" and "preference" in formats:
            raise ValueError(f"packing={packing}: the two of a pair (format preference) have a row each. Use none")
        if self.too_long is not None and packing == "stream":
            raise ValueError(
                f"too_long={self.too_long} has no use with packing=stream, where documents of any length follow each "
                "other. Leave one of the two out"
            )
        if self.too_long == "split" and answers:
            raise ValueError(
                f"too_long=split would part answers from what they answer ({', '.join(sorted(answers))}). Use error, "
                "truncate or drop"
            )
        for name, value, plain in (("loss_on", self.loss_on, "answers"), ("chat_template", self.chat_template, None)):
            if value != plain and not answers:
                raise ValueError(f"{name} has no use: all sources are {' or '.join(sorted(formats))}. Leave it out")


def _check_weights(sources: list[SourceConfig]) -> None:
    weighted = [source for source in sources if source.weight is not None]
    if weighted and len(sources) == 1:
        raise ValueError("sources.0.weight has no use: there is one source. Leave it out")
    if weighted and len(weighted) < len(sources):
        raise ValueError("weight is given for some sources and not for others. Give it for all, or for none")
    if not weighted and len(sources) > 1 and any(source.streaming for source in sources):
        raise ValueError(
            "a source with streaming: true has no known number of rows, so several sources need a weight each"
        )
