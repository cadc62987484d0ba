"""Private and version-dependent names of other libraries. No other module in core uses them; public names are not
wrapped.

Each function documents why it is needed. tests/contract/test_compat.py has a canary for each function, which fails when
the name disappears or its behavior changes. docs/reference/proofs/versions.md lists the versions that passed.
"""
