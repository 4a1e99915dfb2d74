"""On paper a chapter is complete: nothing is folded, hidden, or cut off."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools import notebooks

CHAPTERS = [f"book/{path.stem}.html" for path in notebooks.NOTEBOOKS]
PAPER = 718  # the width of an A4 page between its margins, in CSS pixels

# What is on the page and cannot be read on paper. Titles of folded notes stay; controls go.
LOST = r"""async () => {
  await window.MathJax?.startup?.promise;
  const lost = [], article = document.querySelector("article");
  const say = (what, node) => lost.push(`${what}: ${(node.outerHTML ?? node.data).slice(0, 120)}`);
  const width = innerWidth;
  // The title is printed above the list of contents, outside of the article.
  const controls = `h1, button, summary, script, style, svg, mjx-assistive-mml, .headerlink,
    .copybtn, .explorable, .prev-next-area, .unseen, .bd-header-article, .eq-links`;
  const walker = document.createTreeWalker(article, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const text = walker.currentNode, parent = text.parentElement;
    if (!text.data.trim() || parent.closest(controls)) continue;
    const range = document.createRange();
    range.selectNodeContents(text);
    const boxes = [...range.getClientRects()].filter(box => box.width && box.height);
    const style = getComputedStyle(parent);
    const seen = style.visibility === "visible" && parent.checkVisibility({opacityProperty: true});
    if (!boxes.length || !seen) say("hidden", parent);
    else if (Math.max(...boxes.map(box => box.right)) > width + 1) say("beside the paper", parent);
  }
  for (const node of article.querySelectorAll("pre, .cell_output, div.math, table, figure")) {
    if (node.closest(controls)) continue;
    const {overflowX} = getComputedStyle(node);
    if (overflowX !== "visible" && node.scrollWidth > node.clientWidth + 1) say("cut off", node);
    if (node.getBoundingClientRect().right > width + 1) say("too wide", node);
  }
  for (const formula of article.querySelectorAll("mjx-container > svg"))
    if (formula.getBoundingClientRect().right > width + 1) say("a formula too wide", formula);
  for (const picture of article.querySelectorAll(".cell_output img, figure img"))
    if (!picture.getBoundingClientRect().width) say("no picture", picture);
  const noUse = document.querySelectorAll(`.bd-sidebar-primary, .bd-sidebar-secondary, .explorable,
    .bd-header-article, .toggle-button, .btn-legend-button, footer`);
  for (const node of noUse)
    if (node.checkVisibility() && node.getBoundingClientRect().height > 1) say("no use", node);
  return lost;
}"""


@pytest.mark.parametrize("name", CHAPTERS)
def test_a_chapter_is_complete_on_paper(site: Path, browser, name: str) -> None:
    page = browser.new_page(viewport={"width": PAPER, "height": 1000})
    page.goto((site / name).as_uri())
    page.emulate_media(media="print")
    lost = page.evaluate(LOST)
    page.close()
    assert not lost


def test_what_is_lost_on_paper_is_seen(tmp_path: Path, browser) -> None:
    lines = {
        "hidden": '<p style="opacity: 0">A solution</p>',
        "beside the paper": '<p style="white-space: nowrap">' + "long " * 300 + "</p>",
        "cut off": '<pre style="overflow: auto">' + "x" * 500 + "</pre>",
        "no picture": '<figure><img style="display: none" alt="A picture"></figure>',
        "no use": '<aside class="bd-sidebar-primary">Contents</aside>',
    }
    page = browser.new_page(viewport={"width": PAPER, "height": 1000})
    for what, line in lines.items():
        page.set_content(f"<article><p>Seen.</p>{line}</article>")
        assert any(said.startswith(what) for said in page.evaluate(LOST)), what
    page.set_content("<article><p>Seen.</p></article>")
    assert not page.evaluate(LOST)
    page.close()


def test_printing_opens_what_is_folded_and_folds_it_again(site: Path, browser) -> None:
    """The PDF has the solutions; the page afterwards looks as before."""
    page = browser.new_page()
    page.goto((site / CHAPTERS[1]).as_uri())
    folded = page.locator(".toggle-hidden").count()
    assert folded
    assert len(page.pdf(format="A4")) > 50_000
    assert page.locator(".toggle-hidden").count() == folded
    page.close()
