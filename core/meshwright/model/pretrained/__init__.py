"""Weights of Hugging Face directories, read in rectangles."""

from .hub import find_directory as find_directory
from .reader import PretrainedWeights as PretrainedWeights
from .reader import open_pretrained as open_pretrained
