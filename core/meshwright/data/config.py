"""What a run file says about its data."""

from __future__ import annotations

from pydantic import Field, field_validator, model_validator

from ..base.validation import FrozenModel
from ..files.paths import PathText

DEFAULT_VOCAB_SIZE = 1024


class DataConfig(FrozenModel):
    """Corpus, tokenizer and sequence length of a run."""

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
    eval_fraction: float = Field(
        default=0.05,
        gt=0,
        lt=1,
        description="Share of the documents that is held out from training, for the eval loss.",
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
