"""Weights of Hugging Face directories, read in rectangles."""

from .hub import commit_of as commit_of
from .hub import find_directory as find_directory
from .hub import find_on_all as find_on_all
from .reader import PretrainedWeights as PretrainedWeights
from .reader import open_pretrained as open_pretrained
