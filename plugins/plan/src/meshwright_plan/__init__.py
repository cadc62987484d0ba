"""Plan memory, time and communication of a run: trace its code on one rank of a fake process group."""
