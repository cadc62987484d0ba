"""The command line: `main`, and the commands of core. Other rooms have a module `command` of their own."""
