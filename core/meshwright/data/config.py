"""What a run file says about its data."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, field_validator, model_validator

from ..base.validation import FrozenModel
from ..files.paths import PathText

DEFAULT_VOCAB_SIZE = 1024

Format = Literal["text", "messages", "prompt_completion", "preference", "tokens"]


class SourceConfig(FrozenModel):
    """One place that examples come from, and what each is."""

    files: PathText | list[PathText] | None = Field(
        default=None,
        description="'stdlib', or one or several globs of .txt, .jsonl, .json, .parquet or .csv files, each also "
        "with .gz or .zst; ~ and ** are allowed.",
    )
    dataset: PathText | None = Field(
        default=None, description="In place of files: a directory that Hugging Face datasets saved, or a hub id."
    )
    name: str | None = Field(default=None, description="Configuration of the dataset.")
    split: str = Field(default="train", min_length=1, description="Split of the dataset.")
    revision: str | None = Field(default=None, description="Branch, tag or commit of a dataset on the hub.")
    streaming: bool = Field(
        default=False, description="Read while training, without a cache: for what is larger than the disk."
    )
    format: Format = Field(default="text", description="What an example is; see docs/data.md.")
    fields: dict[str, str] = Field(
        default={}, description="Where the source calls a field otherwise: our name to its name, {messages: chat}."
    )
    columns: list[str] = Field(
        default=[], description="Further fields, numbers, that the objective is given with each example."
    )
    weight: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = Field(
        default=None, description="Share of the rows, relative to the other sources'; null: by their numbers of rows."
    )

    @model_validator(mode="after")
    def _has_one_place(self) -> SourceConfig:
        if (self.files is None) == (self.dataset is None):
            raise ValueError("give either files or dataset")
        return self


class DataConfig(FrozenModel):
    """Sources, tokenizer and sequence length of a run."""

    sources: list[SourceConfig] | None = Field(
        default=None, min_length=1, description="Where the examples come from; null: the documents of `corpus`."
    )
    eval_sets: dict[str, SourceConfig | list[SourceConfig]] = Field(
        default={}, description="Further sets to evaluate on, by name, beside what is held out of the sources."
    )
    corpus: PathText | list[PathText] = Field(
        default="stdlib",
        description="'stdlib' (the sources of the running Python's standard library), or one or several globs of "
        ".txt files (a document each) and .jsonl files (a document per line); ~ and ** are allowed.",
    )
    text_field: str = Field(default="text", min_length=1, description="Field of a .jsonl line that holds the document.")
    tokenizer: PathText | None = Field(
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
        default="answers", description="Which tokens of conversations, answers and preferences are learnt."
    )
    chat_template: str | None = Field(
        default=None, description="A Jinja template, or the path of one; null: the tokenizer's own."
    )
    packing: Literal["documents", "stream", "none"] | None = Field(
        default=None,
        description="documents: several in a row, kept apart; stream: one after another, cut anywhere; none: a row "
        "each, padded, rows of about equal length together. null: stream where all sources are text, none for "
        "preferences, else documents.",
    )
    too_long: Literal["error", "cut", "drop", "split"] | None = Field(
        default=None,
        description="What becomes of an example longer than seq_len: cut keeps its beginning, split makes several of "
        "it. null: split for text and tokens, else error.",
    )
    eval_fraction: float = Field(
        default=0.05,
        ge=0,
        lt=1,
        description="Share of the examples that is held out from training, for the eval loss; 0 only with eval_sets.",
    )
    cache_dir: PathText | None = Field(
        default=None,
        description="Where tokenized corpora are kept; null: meshwright under XDG_CACHE_HOME, or under ~/.cache.",
    )

    @field_validator("corpus")
    @classmethod
    def _corpus_is_named(cls, corpus: str | list[str]) -> str | list[str]:
        patterns = [corpus] if isinstance(corpus, str) else corpus
        if not patterns or not all(pattern.strip() for pattern in patterns):
            raise ValueError("names no files; write 'stdlib', a glob, or a list of globs")
        return corpus

    @model_validator(mode="after")
    def _vocab_size_has_a_use(self) -> DataConfig:
        if self.tokenizer is not None and self.vocab_size != DEFAULT_VOCAB_SIZE:
            raise ValueError(
                f"vocab_size={self.vocab_size} is the size of a trained tokenizer, but tokenizer={self.tokenizer!r} "
                "is loaded as it is; leave one of the two out"
            )
        return self
