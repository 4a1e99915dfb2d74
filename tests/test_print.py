"""On paper a page is complete: nothing is folded, hidden, or cut off.

test_site.py visits all pages; here is the check, and what printing does.
"""

from __future__ import annotations

from pathlib import Path

from tests.visits import LOST, PAPER, Facts, resize
from tools import notebooks

CHAPTER = f"book/{notebooks.NOTEBOOKS[1].stem}.html"


def complete_on_paper(facts: Facts) -> list[str]:
    return facts.lost


def test_what_is_lost_on_paper_is_seen(tmp_path: Path, browser) -> None:
    lines = {
        "hidden": '<p style="opacity: 0">A solution</p>',
        "beside the paper": '<p style="white-space: nowrap">' + "long " * 300 + "</p>",
        "cut off": '<pre style="overflow: auto">' + "x" * 500 + "</pre>",
        "no picture": '<figure><img style="display: none" alt="A picture"></figure>',
        "no use": '<aside class="bd-sidebar-primary">Contents</aside>',
    }
    page = browser.new_page()
    resize(page, PAPER)
    for what, line in lines.items():
        page.set_content(f"<article><p>Seen.</p>{line}</article>")
        assert any(said.startswith(what) for said in page.evaluate(LOST)), what
    page.set_content("<article><p>Seen.</p></article>")
    assert not page.evaluate(LOST)
    page.close()


def test_printing_opens_what_is_folded_and_folds_it_again(site: Path, browser) -> None:
    """The PDF has the solutions; the page afterwards looks as before."""
    page = browser.new_page()
    page.goto((site / CHAPTER).as_uri())
    folded = page.locator(".toggle-hidden").count()
    assert folded
    assert len(page.pdf(format="A4")) > 50_000
    assert page.locator(".toggle-hidden").count() == folded
    page.close()
