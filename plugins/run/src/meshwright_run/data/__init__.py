"""Turn documents into microbatches. Neither importing this package nor preparing data imports torch."""

from .config import DataConfig, SourceConfig
from .prepare import prepare_data
from .sources import read_records

__all__ = ["DataConfig", "SourceConfig", "prepare_data", "read_records"]
