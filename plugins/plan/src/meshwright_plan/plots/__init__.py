"""Pictures of a plan, on a page and as PNG files."""
