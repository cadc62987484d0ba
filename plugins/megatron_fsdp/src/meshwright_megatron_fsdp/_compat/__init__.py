"""The only place in this plugin that touches private or version-dependent names of megatron-fsdp and torch.

One file for each job: `package` says which versions are used, `cpu_torch` what the package's modules see of torch,
`wrapping` how a model is wrapped, `wrapped` what a wrapped model does beyond its public calls. Each function says why
it is needed; all were tried with megatron-fsdp 0.6.1 on torch 2.13, and tests/test_megatron_fsdp_compat.py holds a
canary for each, which fails when upstream changes what it is for. What needs no private name is not here.
"""
