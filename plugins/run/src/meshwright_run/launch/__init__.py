"""The ranks of one machine: their start and end, signs of life, and reports of failures."""
