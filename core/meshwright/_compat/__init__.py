"""The only place in core that touches private or version-dependent names of other libraries; no public name is wrapped.

Each function says why it is needed; tests/contract/test_compat.py holds a canary for each, which fails when the name
goes away or its behaviour changes. docs/reference/proofs/versions.md lists the versions with which they passed.
"""
