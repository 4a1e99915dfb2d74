"""No line begins with the comma of the formula before it."""

from __future__ import annotations

from pathlib import Path

from tools import notebooks
from tools.punctuation import FORMULA

LOOSE = """async () => {
  await window.MathJax?.startup?.promise;
  const loose = [];
  for (const formula of document.querySelectorAll("span.math:has(mjx-container)")) {
    const text = formula.nextSibling;
    if (text?.nodeType !== Node.TEXT_NODE || !/^[,.;:!?)\\]]/.test(text.data)) continue;
    const range = document.createRange();
    range.setStart(text, 0);
    range.setEnd(text, 1);
    if (range.getBoundingClientRect().left < formula.getBoundingClientRect().right - 1)
      loose.push(formula.parentElement.closest("p, li, td, dd")?.textContent.slice(0, 80));
  }
  return loose;
}"""


def test_what_is_kept_together() -> None:
    formula = '<span class="math notranslate nohighlight">\\(a &lt; b\\)</span>'
    found = FORMULA.sub(r"<i>\1\2</i>", f"<p>{formula}), {formula} and {formula}.</p>")
    assert found == f"<p><i>{formula}),</i> {formula} and <i>{formula}.</i></p>"


def test_no_line_begins_with_punctuation(site: Path, browser) -> None:
    page = browser.new_page(viewport={"width": 390, "height": 800})
    for path in notebooks.NOTEBOOKS[::4]:
        page.goto((site / "book" / f"{path.stem}.html").as_uri())
        page.wait_for_selector("span.together mjx-container", state="attached")
        assert page.evaluate(LOOSE) == [], path.stem
        assert page.evaluate("document.documentElement.scrollWidth") == 390
    page.close()
