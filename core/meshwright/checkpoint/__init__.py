"""One checkpoint format for all strategies: a checkpoint saved under one layout loads under any other.

A checkpoint is a directory of tensor files, an index and a manifest. Tensors have the names of the unwrapped Hugging
Face model and are stored as rectangular chunks of the full tensors.
"""

from __future__ import annotations

from .checkpointer import Checkpointer, OnError, save_checkpoint
from .export import export_checkpoint
from .loading import find_first_valid, find_newest_checkpoint, load_checkpoint
from .manifest import Manifest, list_steps, read_manifest

__all__ = [
    "Checkpointer",
    "Manifest",
    "OnError",
    "export_checkpoint",
    "find_first_valid",
    "find_newest_checkpoint",
    "list_steps",
    "load_checkpoint",
    "read_manifest",
    "save_checkpoint",
]
