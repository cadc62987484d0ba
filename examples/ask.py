"""Ask a model that was tuned: its adapter is loaded by peft over its base, and answers.

    python examples/ask.py runs/sft "What does os.path.join do?"

Nothing of meshwright is imported here: what a run leaves behind is an adapter as peft has it, with the tokenizer and
the chat template that it was trained with.
"""

import sys
from pathlib import Path

import torch
from peft import AutoPeftModelForCausalLM
from transformers import AutoTokenizer, logging


def generate_answer(adapter: Path, question: str) -> str:
    tokenizer = AutoTokenizer.from_pretrained(adapter)
    model = AutoPeftModelForCausalLM.from_pretrained(str(adapter)).eval()
    asked = tokenizer.apply_chat_template(
        [{"role": "user", "content": question}], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    with torch.no_grad():
        given = model.generate(
            input_ids=asked["input_ids"],
            attention_mask=asked["attention_mask"],
            max_new_tokens=60,
            do_sample=False,
            repetition_penalty=1.2,
            pad_token_id=tokenizer.eos_token_id,
        )
    return tokenizer.decode(given[0, asked["input_ids"].shape[1] :], skip_special_tokens=True).strip()


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    logging.disable_progress_bar()
    print(generate_answer(Path(sys.argv[1]) / "model", sys.argv[2]))
