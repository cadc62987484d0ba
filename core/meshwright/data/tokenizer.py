"""Train a byte-level BPE tokenizer, or load one from a local directory.

[Note: no tokenizer threads] The `tokenizers` library runs on its own pool of threads, which stays, and a fork (of a
data loader, say) loses it: older releases warn then, and the child may hang. So all work here runs with that
pool off. Documents are encoded on Python threads instead, which end with the call; the library releases the
interpreter lock meanwhile.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..base.errors import DataError
from ..files.parsing import json_object_or_empty, read_json_object, reason

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

EOS = "<|endoftext|>"
_VARIABLE = "TOKENIZERS_PARALLELISM"
_VOCABULARIES = (
    "tokenizer.json",
    "vocab.json",
    "vocab.txt",
    "*.model",
    "*.tiktoken",
    "tekken.json",
)


def train_tokenizer(documents: Iterable[str], vocab_size: int) -> PreTrainedTokenizerBase:
    """Train a byte-level BPE tokenizer in which no text is unknown and `EOS` ends a document.

    Args:
        documents: what to train on.
        vocab_size: at least 257; the vocabulary is smaller where the documents hold fewer distinct merges.

    Returns:
        A fast tokenizer, to be saved with `save_pretrained`.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    with no_tokenizer_threads():
        tokenizer.train_from_iterator(documents, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=EOS, clean_up_tokenization_spaces=False)


def holds_tokenizer(directory: str | Path) -> bool:
    """Whether `directory` holds the vocabulary of a tokenizer; a model's directory may come without one."""
    return any(any(Path(directory).glob(pattern)) for pattern in _VOCABULARIES)


def load_tokenizer(directory: str | Path) -> PreTrainedTokenizerBase:
    """Load the tokenizer in a local directory.

    Raises:
        DataError: the directory is missing or holds no usable tokenizer, or the tokenizer has no eos token, which
            separates documents.
    """
    path = Path(directory).expanduser()
    if not path.is_dir():
        raise DataError(
            f"tokenizer directory {str(directory)!r} does not exist ({path.absolute()}). It must be a local directory; "
            "nothing is downloaded. Leave tokenizer out to train one on the corpus."
        )
    # AutoTokenizer makes an empty tokenizer, without complaint, from a directory with only a model's config.json.
    if not holds_tokenizer(path):
        raise DataError(
            f"{path} holds no tokenizer: none of {', '.join(_VOCABULARIES)}. Save one there with "
            "`tokenizer.save_pretrained`, or leave tokenizer out to train one on the corpus."
        )
    try:
        with no_tokenizer_threads():
            tokenizer = _class_for(path).from_pretrained(str(path), local_files_only=True, trust_remote_code=False)
    except BaseException as error:  # transformers raises whatever its parsers meet
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":  # of Rust's code
            raise
        raise DataError(f"the tokenizer in {path} cannot be loaded: {reason(error)}") from error
    _check_loaded(tokenizer, path)
    if tokenizer.eos_token_id is None:
        raise DataError(
            f"the tokenizer in {path} has no eos token, which separates documents. Set eos_token in its "
            "tokenizer_config.json to a token that ends a text."
        )
    return tokenizer


def _class_for(path: Path) -> Any:
    """What loads a tokenizer. The one that finds the class of a model imports torch, which one of no model spares."""
    settings = path / "tokenizer_config.json"
    if settings.is_file() and not (path / "config.json").exists():
        named = read_json_object(settings).get("tokenizer_class")
        if named in ("TokenizersBackend", "PreTrainedTokenizerFast") and (path / "tokenizer.json").is_file():
            from transformers import PreTrainedTokenizerFast

            return PreTrainedTokenizerFast
    from transformers import AutoTokenizer

    from .._compat.transformers import never_ask

    _check_classes(path)
    never_ask()
    return AutoTokenizer


def _check_classes(path: Path) -> None:
    """Refuse a tokenizer whose files name a class that is of none: transformers would load that, and a model of it.

    Raises:
        DataError: names the class.
    """
    import transformers
    from transformers.models.auto.tokenization_auto import TOKENIZER_MAPPING_NAMES

    settings, config = (json_object_or_empty(path / name) for name in ("tokenizer_config.json", "config.json"))
    types = [each.get("model_type") for each in (config, config.get("encoder")) if isinstance(each, Mapping)]
    of_types = [TOKENIZER_MAPPING_NAMES.get(each) for each in types if isinstance(each, str)]
    for name in (settings.get("tokenizer_class"), config.get("tokenizer_class"), *of_types):
        # It tries a name with and without "Fast" at its end.
        for candidate in (f"{name}Fast", *accumulate(str(name).split("Fast"), "{}Fast{}".format)):
            found = getattr(transformers, candidate, None) if isinstance(name, str) else None
            is_missing = type(found).__name__ == "DummyObject"  # It needs another package, and says so.
            if not (found is None or is_missing or _is_tokenizer_class(found)):
                raise DataError(
                    f"the tokenizer in {path} cannot be loaded: tokenizer_class={name!r} is no class of a tokenizer. "
                    f"Name the one that it was saved with in its tokenizer_config.json."
                )


def _is_tokenizer_class(found: object) -> bool:
    from transformers import PreTrainedTokenizerBase

    return isinstance(found, type) and issubclass(found, PreTrainedTokenizerBase)


def _check_loaded(tokenizer: Any, path: Path) -> None:
    """Refuse what has loaded, and is of other types than a tokenizer has.

    Raises:
        DataError: says what.
    """
    if not _is_tokenizer_class(type(tokenizer)):
        raise DataError(f"{path} holds no tokenizer, but one of {type(tokenizer).__name__}.")
    if not isinstance(tokenizer.model_max_length, int | float):
        raise DataError(
            f"the tokenizer in {path} has model_max_length={tokenizer.model_max_length!r}, which is no number. Correct "
            f"it in its tokenizer_config.json."
        )
    entries = len(tokenizer.get_vocab())
    if vocab_size_of(tokenizer) > 2**20 + 2 * entries:
        raise DataError(
            f"the tokenizer in {path} has {entries:,} tokens, and numbers up to {vocab_size_of(tokenizer) - 1:,}. Each "
            f"number is a row of the model's embedding. Number the tokens without large gaps."
        )


def vocab_size_of(tokenizer: PreTrainedTokenizerBase) -> int:
    """The rows that an embedding needs: the largest token id and one. Added tokens count; ids may have gaps."""
    return int(max(tokenizer.get_vocab().values())) + 1


def token_dtype(tokenizer: PreTrainedTokenizerBase) -> np.dtype:
    """In which its tokens are kept: uint16 where the vocabulary fits, else uint32."""
    return np.dtype(np.uint16 if vocab_size_of(tokenizer) <= 1 << 16 else np.uint32)


@contextmanager
def no_tokenizer_threads() -> Iterator[None]:
    """See [Note: no tokenizer threads]. The variable is the library's only switch, and it is read at each call."""
    before = os.environ.get(_VARIABLE)
    os.environ[_VARIABLE] = "false"
    try:
        yield
    finally:
        if before is None:
            del os.environ[_VARIABLE]
        else:
            os.environ[_VARIABLE] = before
