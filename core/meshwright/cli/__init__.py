"""The command line: `main`, and the commands of core. Plugins have their commands in a module `command`."""
