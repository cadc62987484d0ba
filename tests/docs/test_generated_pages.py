"""Pages that follow from results that are kept, or from the sources, are as `python tools/generated_pages.py` writes
them."""

from __future__ import annotations

import generated_pages
import pytest

HELD_ELSEWHERE = {"architecture.md", "mutations.md", "tests.md", "trainer-arguments.md"}
"""By test_architecture, test_sweep, test_bugs and the trainer's test_arguments."""


@pytest.mark.parametrize("page", sorted(generated_pages.PAGE_RENDERERS.keys() - HELD_ELSEWHERE))
def test_a_page_is_as_its_results_and_sources_are(page: str) -> None:
    assert (generated_pages.DOCS / page).read_text(encoding="utf-8") == generated_pages.PAGE_RENDERERS[page](), (
        "run python tools/generated_pages.py"
    )
