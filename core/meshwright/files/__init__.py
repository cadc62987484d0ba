"""What a file of a user may hold: YAML and JSON within bounds, and classes by name from an allow-list. No torch."""
