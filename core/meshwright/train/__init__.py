"""The training loop `fit`, and models made in shards (`from_pretrained`)."""
