"""What one optimizer step is made of: batches, objectives, the token loss, the router loss, and axes."""
