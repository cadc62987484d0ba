"""The training loop `fit`, and models that are sharded while they load (`from_pretrained`)."""
