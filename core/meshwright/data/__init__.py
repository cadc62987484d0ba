"""From documents to microbatches: find a corpus, tokenize and pack it once, and read it in a resumable order.

Importing this package, and preparing data, import no torch; it is imported by what returns tensors.
"""

from .config import DataConfig
from .corpus import Corpus, find_corpus
from .documents import Documents
from .feed import Feed, Place, check_groups, eval_microbatches
from .order import ORDER_VERSION, DataOrder, check_batch_size
from .prepare import PreparedData, prepare
from .rows import JoinedRows, PackedRows, PaddedRows, Rows, StreamRows, make_rows
from .run_rows import RunRows, lay_out
from .tokenizer import EOS, holds_tokenizer, load_tokenizer, train_tokenizer

__all__ = [
    "EOS",
    "ORDER_VERSION",
    "Corpus",
    "DataConfig",
    "DataOrder",
    "Documents",
    "Feed",
    "JoinedRows",
    "PackedRows",
    "PaddedRows",
    "Place",
    "PreparedData",
    "Rows",
    "RunRows",
    "StreamRows",
    "check_batch_size",
    "check_groups",
    "eval_microbatches",
    "find_corpus",
    "holds_tokenizer",
    "lay_out",
    "load_tokenizer",
    "make_rows",
    "prepare",
    "train_tokenizer",
]
