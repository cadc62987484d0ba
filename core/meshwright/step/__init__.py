"""What one optimizer step is made of: batches, the token loss, the router loss, and the options of a forward."""
