"""docs/reference/proofs/trainer-arguments.md, of `arguments.yaml`: `python plugins/trainer/tests/arguments_page.py` writes it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from meshwright_trainer.arguments import load_argument_rules

PAGE = Path(__file__).parents[3] / "docs" / "reference" / "proofs" / "trainer-arguments.md"
_HEAD = """# Arguments of trainers

What each argument of `TrainingArguments`, `SFTConfig`, `DPOConfig`, `RewardConfig` and `GRPOConfig` means over a mesh,
with transformers 5.17 to 5.23 and trl 1.16. What is refused is refused by name before anything is sent, on every rank.
An argument that no table has, of a class of your own, is left alone.

Made of `plugins/trainer/src/meshwright_trainer/arguments.yaml`: `python plugins/trainer/tests/arguments_page.py`.
"""


def _code(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return f"`{value}`"
    return f'`"{value}"`' if isinstance(value, str) else f"`{value!r}`"


def _which(rule: dict[str, Any]) -> str:
    """The values that a rule refuses."""
    if "except" in rule:
        text = f"all but {', '.join(map(_code, rule['except']))}"
    else:
        text = ", ".join(map(_code, rule["values"]))
    for name, value in rule.get("together_with", {}).items():
        text += f", with `{name}={value!r}`"
    return text + (", on several ranks" if rule.get("several_ranks") else "")


def _table(head: str, rows: list[tuple[str, ...]]) -> str:
    lines = [head, "|".join(["", *["---"] * head.count(" | "), "---", ""])]
    return "\n".join([*lines, *[f"| {' | '.join(row)} |" for row in rows]]) + "\n"


def page() -> str:
    known = load_argument_rules()
    refused = [
        (f"`{name}`", _which(rule), rule["because"], rule["instead"], rule.get("otherwise", "no effect"))
        for name, rule in known["refused"].items()
    ]
    parts = [_HEAD, "## Refused\n"]
    parts.append(_table("| argument | values | since | instead | other values |", refused))
    parts.append("## No effect\n")
    parts.append(_table("| argument | why |", [(f"`{name}`", text) for name, text in known["no effect"].items()]))
    parts.append("## Acts\n")
    parts.append(_table("| argument | how |", [(f"`{name}`", text) for name, text in known["acts"].items()]))
    parts.append("## What a trainer is called with beside them\n")
    parts.append(_table("| what | |", [(f"`{name}`", text) for name, text in known["outside"].items()]))
    return "\n".join(parts)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
