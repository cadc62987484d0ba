"""Load a trained model with plain transformers and compute its held-out loss again.

    python examples/load_with_transformers.py runs/stdlib

Nothing of meshwright is imported here: what a run leaves behind is an ordinary Hugging Face directory. Exits with 1
if the loss is not the one that the run printed.
"""

import json
import sys
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


def compute_held_out_loss(model: torch.nn.Module, sequences: torch.Tensor) -> float:
    """Mean loss per predicted token [nats] of int64 sequences (N, S)."""
    total, count = 0.0, 0
    with torch.no_grad():
        for batch in sequences.split(8):
            logits = model(input_ids=batch).logits[:, :-1]
            total += torch.nn.functional.cross_entropy(
                logits.flatten(0, 1).float(), batch[:, 1:].flatten(), reduction="sum"
            ).item()
            count += batch[:, 1:].numel()
    return total / count


def main(run: Path) -> int:
    summary = json.loads((run / "summary.json").read_text())
    held_out = summary["held_out"]
    model = AutoModelForCausalLM.from_pretrained(run / "model").eval()
    tokenizer = AutoTokenizer.from_pretrained(run / "model")
    tokens = np.load(held_out["tokens_file"], mmap_mode="r")
    seq_len, count = held_out["seq_len"], held_out["sequences"]
    available = len(tokens) // seq_len
    rows = np.arange(count) * available // count  # spread over the split, as the run did
    sequences = torch.from_numpy(tokens[: available * seq_len].reshape(available, seq_len)[rows].astype(np.int64))

    loss, expected = compute_held_out_loss(model, sequences), summary["held_out_loss"]
    same = abs(loss - expected) <= 1e-5 * expected
    print(f"loaded by plain transformers: {type(model).__name__}, {len(tokenizer)} tokens in the vocabulary")
    print(f"held-out loss {loss:.6f}, the run printed {expected:.6f}: {'the same' if same else 'NOT THE SAME'}")
    return 0 if same else 1


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    sys.exit(main(Path(sys.argv[1])))
