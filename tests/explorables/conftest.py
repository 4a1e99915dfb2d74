"""An explorable as its reader drives it: sliders, buttons, typed numbers, and what is shown."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest
from bs4 import BeautifulSoup

ROOT = Path(__file__).resolve().parents[2]
WIDE, NARROW = 1280, 390


@cache
def explorables() -> dict[str, str]:
    """The figures that scripts make explorable, with the pages that hold them."""
    script = (ROOT / "book/_static/book.js").read_text(encoding="utf-8")
    [table] = re.findall(r"const EXPLORABLES = \{(.*?)\};", script, re.DOTALL)
    texts = {path.stem: path.read_text("utf-8") for path in (ROOT / "book").glob("*.ipynb")}
    places = {}
    for figure in re.findall(r'"(fig-[\w-]+)":', table):
        [page] = [page for page, text in texts.items() if f'"name": "{figure}"' in text]
        places[figure] = f"book/{page}.html"
    return places


def as_number(text: str) -> float:
    """What a page shows, such as "−1,024.50", as a number; NaN where there is none."""
    found = re.search(r"-?[\d.]+(?:e-?\d+)?", text.replace("−", "-").replace(",", ""))
    return float(found[0]) if found else float("nan")


class Driver:
    """One explorable in a page; controls and readouts go by their data-name."""

    def __init__(self, page, figure: str) -> None:
        self.page, self.figure = page, figure
        self.picture = page.locator(f"#{figure} img")
        self.root = page.locator(f"#{figure} .explorable")
        self.root.wait_for()

    def part(self, name: str):
        return self.root.locator(f'[data-name="{name}"]')

    def settle(self) -> None:
        """Wait until what follows an input is drawn."""
        self.page.evaluate(
            "() => new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))"
        )

    def unfold(self) -> None:
        """Open what is folded at first: tables, and fields to type into."""
        self.root.evaluate("root => root.querySelectorAll('details').forEach(it => it.open = true)")
        self.settle()

    def slide(self, name: str, value: object) -> None:
        """Move a slider to the position at which it shows a value."""
        self.part(name).evaluate(
            """(input, wanted) => {
              const shown = input.parentElement.querySelector("output");
              const [min, max, step] = [input.min, input.max, input.step].map(Number);
              const move = x => {
                input.value = x;
                input.dispatchEvent(new Event("input", {bubbles: true}));
              };
              if (!input.places) {  // found once, by all the keyboard's steps
                input.places = new Map();
                for (let x = min; x <= max + 1e-9; x += step) {
                  move(x);
                  if (!input.places.has(shown.textContent)) input.places.set(shown.textContent, x);
                }
              }
              if (input.places.has(wanted)) move(input.places.get(wanted));
              if (shown.textContent !== wanted) throw Error(`no position shows ${wanted}`);
            }""",
            str(value),
        )
        self.settle()

    def choose(self, name: str, label: str) -> None:
        self.part(name).get_by_text(label, exact=True).click()
        self.settle()

    def press(self, name: str, times: int = 1) -> None:
        for _ in range(times):
            self.part(name).click()
            self.settle()

    def type(self, name: str, values) -> None:
        """Type an array of numbers, row by row, into its fields."""
        fields = self.part(name).locator("input")
        flat = [f"{x:g}" for row in values for x in row]
        assert fields.count() == len(flat)
        fields.first.fill(flat[0])
        fields.evaluate_all(  # one call for all the others
            """(inputs, values) => inputs.forEach((input, i) => {
              input.value = values[i];
              input.dispatchEvent(new Event("input", {bubbles: true}));
            })""",
            flat,
        )
        self.settle()

    def drag(self, name: str, right: float, down: float) -> None:
        """Drag a handle by the mouse, in pixels."""
        handle = self.part(name)
        handle.scroll_into_view_if_needed()
        box = handle.bounding_box()
        x, y = box["x"] + box["width"] / 2, box["y"] + box["height"] / 2
        self.page.mouse.move(x, y)
        self.page.mouse.down()
        self.page.mouse.move(x + right, y + down, steps=4)
        self.page.mouse.up()
        self.settle()

    def keys(self, name: str, *keys: str) -> None:
        """Press keys on a control or handle."""
        for key in keys:
            self.part(name).press(key)
        self.settle()

    def text(self, name: str) -> str:
        return self.part(name).inner_text()

    def number(self, name: str) -> float:
        return as_number(self.text(name))

    def matrix(self, name: str) -> list[list[float]]:
        cells = self.part(name).evaluate(
            "table => [...table.rows].map(row => "
            "[...row.querySelectorAll('td')].map(cell => cell.innerText))"
        )
        return [[as_number(x) for x in row] for row in cells if any(x.strip() for x in row)]

    def said(self) -> str:
        return self.root.locator(".explorable-said").inner_text()


@cache
def alone(path: Path, figure: str) -> str:
    """A page with a figure in its place, and without all else that the chapter says.

    The formulas of a caption are left as they are: MathJax is slow to start.
    """
    page = BeautifulSoup(path.read_text(encoding="utf-8"), "html.parser")
    for script in page.select('script[src*="mathjax"], script[src*="formulas.js"]'):
        script.extract()
    kept = page.find(id=figure)
    while kept.name != "article":
        for other in [*kept.previous_siblings, *kept.next_siblings]:
            other.extract()
        kept = kept.parent
    for entry in page.select(".page-toc li"):  # of sections that are gone
        entry.extract()
    return str(page)


def open_alone(page, site: Path, figure: str, root: str | None = None) -> None:
    """Open the page of a figure, as a file where no root is given.

    The rest of its chapter would take most of the time to load. test_site.py visits it as it is.
    """
    name = explorables()[figure]
    html = alone(site / name, figure)
    page.route(f"**/{name}", lambda it: it.fulfill(content_type="text/html", body=html))
    page.goto(f"{root or site.as_uri()}/{name}")


@pytest.fixture(scope="module")
def explore(site: Path, browser) -> Iterator[Callable[..., Driver]]:
    """Opens the page of a figure, as a file, and gives a driver of its explorable.

    What it has folded is open, unless `folded`. Boxes fly only with `motion`. With `clock` the
    test may let time go faster.
    """
    opened = []

    def explore(
        figure: str,
        width: int = WIDE,
        *,
        folded: bool = False,
        motion: bool = False,
        clock: bool = False,
    ) -> Driver:
        moving = "no-preference" if motion else "reduce"
        page = browser.new_page(viewport={"width": width, "height": 900}, reduced_motion=moving)
        opened.append(page)
        if clock:
            page.clock.install()
        page.on("pageerror", lambda error: errors.append(str(error)))
        open_alone(page, site, figure)
        driver = Driver(page, figure)
        if not folded:
            driver.unfold()
        return driver

    errors: list[str] = []
    yield explore
    for page in opened:
        page.close()
    assert not errors
