"""Files that users write, YAML and JSON, read within bounds, and classes by name from an allow-list. No torch."""
