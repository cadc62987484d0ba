"""From tokenized documents to the microbatches of each step."""
