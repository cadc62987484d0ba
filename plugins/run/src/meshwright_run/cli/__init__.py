"""The commands of a run: `train`, `data`, `checkpoint`, `export` and `schema`."""
