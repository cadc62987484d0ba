"""Trackers for meshwright runs: TensorBoard, Weights & Biases, MLflow and trackio, selected in the run file."""

from __future__ import annotations

from .config import MLflowConfig, TensorBoardConfig, TrackioConfig, WandbConfig

__all__ = ["MLflowConfig", "TensorBoardConfig", "TrackioConfig", "WandbConfig"]
