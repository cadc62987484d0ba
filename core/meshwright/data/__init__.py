"""From documents to microbatches: find a corpus, tokenize and pack it once, and read it in a resumable order.

Importing this package, and preparing data, import no torch; it is imported by what returns tensors.
"""

from .config import DataConfig, SourceConfig
from .documents import Documents
from .order import ORDER_VERSION, DataOrder, check_batch_size, eval_microbatches, step_microbatches
from .packing import PackedSequences
from .prepare import PreparedData, PreparedSource, prepare
from .records import Record, read_records
from .tokenizer import EOS, holds_tokenizer, load_tokenizer, train_tokenizer

__all__ = [
    "EOS",
    "ORDER_VERSION",
    "DataConfig",
    "DataOrder",
    "Documents",
    "PackedSequences",
    "PreparedData",
    "PreparedSource",
    "Record",
    "SourceConfig",
    "check_batch_size",
    "eval_microbatches",
    "holds_tokenizer",
    "load_tokenizer",
    "prepare",
    "read_records",
    "step_microbatches",
    "train_tokenizer",
]
