"""Model types that stand for all others, for tests that cannot go through the whole zoo."""

REPRESENTATIVE_MODEL_TYPES = [
    *("llama", "qwen3", "qwen3_moe", "mixtral", "gpt2", "gemma3_text", "phi3", "gpt_neox", "opt", "bloom", "mamba2"),
    *("falcon_h1", "cohere2", "deepseek_v3"),
]
