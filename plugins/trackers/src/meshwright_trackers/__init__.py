"""Trackers for meshwright runs: TensorBoardTracker, Weights & Biases, MLflow and trackio, chosen in the run file."""

from __future__ import annotations

from .config import MLflowConfig, TensorBoardConfig, TrackioConfig, WandbConfig

__all__ = ["MLflowConfig", "TensorBoardConfig", "TrackioConfig", "WandbConfig"]
