"""Empty; the commands are in `meshwright_run.commands`."""
