"""Weights of Hugging Face directories, read in rectangles."""

from .reader import PretrainedWeights as PretrainedWeights
from .reader import open_pretrained as open_pretrained
