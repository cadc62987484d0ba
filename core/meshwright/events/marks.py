"""Names by which a profiler sees what a run does: how they begin, and the one of a wait."""

MARK = "meshwright::"
"""How the names begin of what the loop marks: its steps, and the parts of a step."""
WAIT = f"{MARK}wait for ranks"
"""A wait for what other ranks have to say of a step; the message is passed by a thread that no profiler sees."""
