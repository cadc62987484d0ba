"""What users write: YAML and JSON within bounds, classes by name from an allow-list, names that go away. No torch."""
