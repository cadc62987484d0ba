"""The only place in this plugin that touches private or version-dependent names of megatron-fsdp and torch.

All were tried with megatron-fsdp 0.6.1 on torch 2.13; tests/test_megatron_fsdp_compat.py has a canary for each, which
fails when upstream changes what it is for.
"""
