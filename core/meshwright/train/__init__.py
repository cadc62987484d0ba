"""A whole run: its file, plan, data order, loop, resumption, output and report; and models made in shards."""
