"""Schedules: actions and when they run (`actions`), built-in schedules and those read from files (`specs`)."""
