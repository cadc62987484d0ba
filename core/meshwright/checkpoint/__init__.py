"""One checkpoint for every strategy: saved under any, loaded under any other.

A checkpoint is a directory that torch.distributed.checkpoint has written, with a manifest beside its files. Tensors go
by the names of the unwrapped Hugging Face model, as rectangles of the whole, so a layout reads what another has saved.
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
