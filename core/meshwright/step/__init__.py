"""Parts of one optimizer step: batch checks, objectives, the token loss, the router loss, and axes."""
