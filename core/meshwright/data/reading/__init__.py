"""Examples, one after another, from wherever they are kept."""
