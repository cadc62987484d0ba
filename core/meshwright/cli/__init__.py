"""The command line: `main`, and a file for each command. What the commands do is in the other rooms."""
