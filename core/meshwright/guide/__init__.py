"""What helps a newcomer: a first run file, a look at the machine, and a run told in words before it begins."""
