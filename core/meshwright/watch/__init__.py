"""A local page on runs, while they train and afterwards: files that grow, what they say, and a server on loopback.

All comes from the runs' directories. No torch.
"""
