"""What failures cost a run: how often ranks fail, what a save takes, and how often it is best to save."""
