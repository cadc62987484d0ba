"""Private and version-dependent names of megatron-fsdp and torch. No other module in this plugin uses them.

They were tested with megatron-fsdp 0.6.1 on torch 2.13. tests/test_megatron_fsdp_compat.py has a canary for each, which
fails when upstream changes the behavior that it works around.
"""
