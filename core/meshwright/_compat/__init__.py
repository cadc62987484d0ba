"""The only place in core that touches private or version-dependent names of torch and transformers.

Each function says why it is needed; tests/contract/test_compat.py holds a canary for each, which fails when the name goes away
or its behaviour changes. docs/versions.md says with which versions they passed. No public name of either is wrapped
here.
"""
