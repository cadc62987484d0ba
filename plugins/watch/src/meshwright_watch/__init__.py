"""A local page on runs, while they train and afterwards, all from their directories; without torch."""
