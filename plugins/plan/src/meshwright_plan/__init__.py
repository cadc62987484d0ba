"""What a layout takes, known before it runs: the code of a run, traced on one rank of a world that sends nothing."""
