"""One checkpoint format for every strategy: a checkpoint saved under any layout loads under any other.

A checkpoint is a directory of files with tensors, an index, and a manifest. Tensors have the names of the unwrapped
Hugging Face model and are stored as rectangles of the full tensors.
"""

from __future__ import annotations

from .checkpointer import Checkpointer, OnError, save_checkpoint
from .export import export_checkpoint
from .loading import first_whole, load_checkpoint, newest_checkpoint
from .manifest import Manifest, read_manifest, steps_in

__all__ = [
    "Checkpointer",
    "Manifest",
    "OnError",
    "export_checkpoint",
    "first_whole",
    "load_checkpoint",
    "newest_checkpoint",
    "read_manifest",
    "save_checkpoint",
    "steps_in",
]
