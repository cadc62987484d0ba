"""From documents to microbatches. Importing this package and preparing data import no torch."""

from .config import DataConfig, SourceConfig
from .prepare import prepare_data
from .sources import read_records

__all__ = ["DataConfig", "SourceConfig", "prepare_data", "read_records"]
