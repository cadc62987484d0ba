"""One step of a pipeline: actions in the order of the schedule, what is sent, batches and the user's loss.

How a model becomes stages is in `cut`, in which order they run in `schedule`.
"""
