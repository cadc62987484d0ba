"""Private and version-dependent names of transformers around chat templates. No torch here: processes that tokenize
need none."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def render_marked(
    template: str, messages: Sequence[Any], tools: Sequence[Any] | None, variables: Mapping[str, Any]
) -> tuple[str, list[tuple[int, int]]]:
    """What a template writes, and the spans of characters that it writes inside of `{% generation %}`.

    `apply_chat_template` tells of them only which tokens they touch, and so not where one lies across an edge. The
    function that it calls has a public name, but no documentation.
    """
    from transformers.utils.chat_template_utils import render_jinja_template

    texts, spans = render_jinja_template(
        conversations=[list(messages)],
        tools=None if tools is None else list(tools),
        chat_template=template,
        return_assistant_tokens_mask=True,
        **variables,
    )
    return texts[0], list(spans[0])
