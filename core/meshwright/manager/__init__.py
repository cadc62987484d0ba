"""The part that strategies share in which each rank runs the whole model on its own microbatches."""
