"""docs/reference/proofs/trainer-arguments.md, of `arguments.yaml`: `python plugins/trainer/tests/arguments_page.py`
writes it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from meshwright_trainer.arguments import load_argument_rules

PAGE = Path(__file__).parents[3] / "docs" / "reference" / "proofs" / "trainer-arguments.md"
_HEAD = """# Arguments of trainers

This page lists what each argument of `TrainingArguments`, `SFTConfig`, `DPOConfig`, `RewardConfig` and `GRPOConfig`
does on a mesh, with transformers 5.17 to 5.23 and trl 1.16. Arguments are rejected (with an error on every rank,
before the first collective), ignored, or supported. Other arguments, of your own subclass, are left alone.

Generated from `plugins/trainer/src/meshwright_trainer/arguments.yaml` by
`python plugins/trainer/tests/arguments_page.py`; the plugin's tests check every argument against the libraries.
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
    for name, value in rule.get("only_with", {}).items():
        text += f", with `{name}={value!r}`"
    return text + (", on several ranks" if rule.get("multi_rank_only") else "")


def _table(head: str, rows: list[tuple[str, ...]]) -> str:
    lines = [head, "|".join(["", *["---"] * head.count(" | "), "---", ""])]
    return "\n".join([*lines, *[f"| {' | '.join(row)} |" for row in rows]]) + "\n"


def page() -> str:
    known = load_argument_rules()
    refused = [
        (f"`{name}`", _which(rule), rule["reason"], rule["remedy"], rule.get("otherwise", "no effect"))
        for name, rule in known["rejected"].items()
    ]
    parts = [_HEAD, "## Rejected\n"]
    parts.append(_table("| argument | rejected values | reason | instead | other values |", refused))
    parts.append("## Ignored\n")
    parts.append(_table("| argument | why |", [(f"`{name}`", text) for name, text in known["ignored"].items()]))
    parts.append("## Supported\n")
    parts.append(_table("| argument | how |", [(f"`{name}`", text) for name, text in known["supported"].items()]))
    parts.append("## Other parameters of a trainer\n")
    parts.append(_table("| parameter | effect |", [(f"`{name}`", text) for name, text in known["constructor"].items()]))
    return "\n".join(parts)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
