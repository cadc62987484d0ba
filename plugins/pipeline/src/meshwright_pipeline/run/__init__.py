"""One step of a pipeline: actions in the order of the schedule, what is sent, batches and the user's loss."""
