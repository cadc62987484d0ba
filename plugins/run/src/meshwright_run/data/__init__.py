"""From documents to microbatches. Importing this package and preparing data import no torch."""

from .config import DataConfig, SourceConfig
from .documents import Documents
from .feed import Feed, Place, check_groups, eval_microbatches
from .order import ORDER_VERSION, DataOrder, check_batch_size
from .prepare import HELD_OUT, PreparedData, PreparedSource, prepare
from .rows import JoinedRows, PackedRows, PaddedRows, Rows, StreamRows, make_rows
from .run_rows import RunRows, lay_out
from .sources import Record, read_records
from .stream import Stream
from .tokenizer import EOS, holds_tokenizer, load_tokenizer, train_tokenizer

__all__ = [
    "EOS",
    "HELD_OUT",
    "ORDER_VERSION",
    "DataConfig",
    "DataOrder",
    "Documents",
    "Feed",
    "JoinedRows",
    "PackedRows",
    "PaddedRows",
    "Place",
    "PreparedData",
    "PreparedSource",
    "Record",
    "Rows",
    "RunRows",
    "SourceConfig",
    "Stream",
    "StreamRows",
    "check_batch_size",
    "check_groups",
    "eval_microbatches",
    "holds_tokenizer",
    "lay_out",
    "load_tokenizer",
    "make_rows",
    "prepare",
    "read_records",
    "train_tokenizer",
]
