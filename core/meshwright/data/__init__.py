"""From documents to microbatches: find a corpus, tokenize and pack it once, and read it in a resumable order.

Importing this package, and preparing data, import no torch; it is imported by what returns tensors.
"""

from .config import DataConfig
from .corpus import Corpus, find_corpus
from .order import ORDER_VERSION, DataOrder, check_batch_size, eval_microbatches, step_microbatches
from .packing import PackedSequences
from .prepare import PreparedData, prepare
from .tokenizer import EOS, holds_tokenizer, load_tokenizer, train_tokenizer

__all__ = [
    "EOS",
    "ORDER_VERSION",
    "Corpus",
    "DataConfig",
    "DataOrder",
    "PackedSequences",
    "PreparedData",
    "check_batch_size",
    "eval_microbatches",
    "find_corpus",
    "holds_tokenizer",
    "load_tokenizer",
    "prepare",
    "step_microbatches",
    "train_tokenizer",
]
