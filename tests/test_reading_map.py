"""The heads of the chapters, the map drawn from them, and the routes of the first page agree."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.conftest import soup
from tools import book
from tools.reading_map import arrows, listing

CHAPTERS = {chapter.number: chapter for chapter in book.chapters()}
NUMBERS = {chapter.labels[0]: number for number, chapter in CHAPTERS.items()}
NEEDS = book.needs(list(CHAPTERS.values()))
INDEX = (book.ROOT / "book" / "index.md").read_text(encoding="utf-8")
AFTERNOON = [1, 2, 3, 4]


def in_words(total: int) -> str:
    """`2 hours and 35 minutes`."""
    hours, rest = divmod(total, 60)
    return f"{hours} hours" + (f" and {rest} minutes" if rest else "")


def routes() -> dict[str, list[int]]:
    """The chapters of each route; all begin with those of the first."""
    cards = re.findall(r":::\{grid-item-card\} ([^\n]+)\n(.*?)\n:::", INDEX, re.DOTALL)
    found = {}
    for title, text in cards:
        if listed := re.findall(r"^- \{ref\}`([\w-]+)`$", text, re.MULTILINE):
            before = AFTERNOON if "The afternoon, and then" in text else []
            found[title] = sorted(before + [NUMBERS[label] for label in listed])
    return found


# --- The heads ---------------------------------------------------------------------------------


def test_there_are_all_chapters() -> None:
    """In their order, and no notebook is left out."""
    assert list(CHAPTERS) == list(range(1, 1 + len(list((book.ROOT / "book").glob("*.ipynb")))))


@pytest.mark.parametrize("chapter", CHAPTERS.values(), ids=lambda chapter: chapter.path.stem)
def test_a_chapter_says_what_it_needs_and_how_long_it_takes(
    chapter: book.Chapter, site: Path
) -> None:
    needs = NEEDS[chapter.number]
    assert needs <= set(range(1, chapter.number)), "it may need earlier chapters alone"
    assert needs or chapter.number == 1
    assert 20 <= chapter.minutes <= 90
    assert 1.5 * chapter.minutes < chapter.minutes_with_exercises < 6 * chapter.minutes
    page = soup(site / f"{chapter.docname}.html")
    [paragraph] = page.select("article .chapter-needs")
    assert book.HEAD.fullmatch(" ".join(paragraph.get_text().split()))
    before = paragraph.find_all_previous(["h2", "pre", "figure"])
    assert not [tag for tag in before if page.article in tag.parents], "it stands at the head"


@pytest.mark.parametrize(
    ("text", "expected"),
    [("40 minutes", 40), ("an hour", 60), ("two and a half hours", 150), ("three", 180)],
)
def test_times(text: str, expected: int) -> None:
    assert book.minutes(text) == expected


@pytest.mark.parametrize("text", ["a while", "minutes", "forty minutes", "40", "half an hour"])
def test_other_times_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="a time must read like"):
        book.minutes(text)


@pytest.mark.parametrize(
    "text",
    [
        "# A title\n\nIt needs nothing. Reading takes about an hour.",
        "# A title\n\nIntroduction. You need this. Reading takes about an hour, with the exercises "
        "about two.",
        "You need this. Reading takes about an hour.",
        2 * "You need it. Reading takes about an hour, with the exercises about two.\n\n",
    ],
    ids=["other words", "not a paragraph of its own", "no exercises", "twice"],
)
def test_other_heads_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="a chapter must begin with one paragraph"):
        book.head(text)


# --- The map -----------------------------------------------------------------------------------


def test_arrows_say_what_the_sentences_say() -> None:
    """All that is needed, directly or not, and nothing else."""

    def closure(pairs: set[tuple[int, int]]) -> set[tuple[int, int]]:
        more = pairs | {(a, d) for a, b in pairs for c, d in pairs if b == c}
        return pairs if more == pairs else closure(more)

    drawn = set(arrows(NEEDS))
    said = {(begin, end) for end, needs in NEEDS.items() for begin in needs}
    assert drawn <= said
    assert closure(drawn) == closure(said)
    for arrow in drawn:
        assert closure(drawn - {arrow}) != closure(said), f"{arrow} follows from others"


def test_everything_uses_the_first_chapter() -> None:
    """As the text above the map says, for the arrows that it leaves out."""
    for number in NEEDS:
        before = {number}
        for _ in NEEDS:
            before |= set().union(*(NEEDS[other] for other in before))
        assert 1 in before


def test_the_map_is_on_the_first_page(site: Path) -> None:
    page = soup(site / "book" / "index.html")
    links = page.select("nav.reading-map li a")
    assert [link["href"] for link in links] == [
        f"{chapter.docname.removeprefix('book/')}.html" for chapter in CHAPTERS.values()
    ]
    for link, chapter in zip(links, CHAPTERS.values(), strict=True):
        words = link.get_text().replace("\xa0", " ")
        assert f"{chapter.number} {chapter.title} {chapter.minutes} min" in words
        needs = NEEDS[chapter.number]
        assert words.endswith(f"It needs {listing(needs)}." if needs else "min.")
    arcs = page.select_one("nav.reading-map svg").find_all("path", recursive=False)
    assert len(arcs) == len(arrows(NEEDS))


@pytest.mark.parametrize(
    ("numbers", "words"), [({3}, "3"), ({3, 12}, "3 and 12"), ({12, 3, 7}, "3, 7 and 12")]
)
def test_a_list_in_words(numbers: set[int], words: str) -> None:
    assert listing(numbers) == words


@pytest.mark.parametrize("width", [1280, 800, 390, 320])
def test_the_map_is_legible(site: Path, browser, width: int) -> None:
    """Titles stay in their boxes, boxes apart from each other, and arcs end at their boxes."""
    page = browser.new_page(viewport={"width": width, "height": 900})
    page.goto((site / "book" / "index.html").as_uri())
    boxes = page.evaluate("""() => [...document.querySelectorAll(".reading-map li a")].map(box => {
      const {left, right, top, bottom} = box.getBoundingClientRect();
      const text = document.createRange();
      text.selectNodeContents(box);
      text.setEndBefore(box.querySelector(".unseen"));
      const words = [...text.getClientRects()].filter(part => part.width > 2);
      return {left, right, top, bottom, size: parseFloat(getComputedStyle(box).fontSize),
        lowest: Math.max(...words.map(part => part.bottom)),
        rightmost: Math.max(...words.map(part => part.right))};
    })""")
    ends = page.evaluate("""() => [...document.querySelectorAll(".reading-map svg > path")].map(
      path => [0, path.getTotalLength()].map(length => {
        const {x, y} = path.getPointAtLength(length).matrixTransform(path.getScreenCTM());
        return [x, y];
      }))""")
    page.close()
    for arrow, places in zip(arrows(NEEDS), ends, strict=True):
        for number, (x, y) in zip(arrow, places, strict=True):
            box = boxes[number - 1]
            assert abs(x - box["left"]) < 4 and box["top"] <= y <= box["bottom"], arrow
    for i, box in enumerate(boxes, start=1):
        assert box["size"] >= 12, f"chapter {i}: small print"
        assert box["lowest"] <= box["bottom"] + 1, f"chapter {i}: its title needs more lines"
        assert box["rightmost"] <= box["right"] + 1, f"chapter {i}: a word is too long"
        assert 0 <= box["left"] and box["right"] <= width
    for i, one in enumerate(boxes):
        for other in boxes[:i]:
            beside = one["left"] >= other["right"] or other["left"] >= one["right"]
            assert beside or one["top"] >= other["bottom"] or other["top"] >= one["bottom"]


# --- The routes --------------------------------------------------------------------------------


def test_the_routes() -> None:
    assert list(routes()) == [
        "An afternoon",
        "The mathematics",
        "The kernels",
        "I have to choose a model",
    ]
    assert routes()["An afternoon"] == AFTERNOON


@pytest.mark.parametrize("title", routes())
def test_a_route_needs_nothing_beside_it(title: str) -> None:
    route = routes()[title]
    for number in route:
        assert NEEDS[number] <= set(route), f"chapter {number} needs another one"


@pytest.mark.parametrize("title", routes())
def test_the_time_of_a_route_is_the_sum(title: str) -> None:
    chapters = [CHAPTERS[number] for number in routes()[title]]
    reading = in_words(sum(chapter.minutes for chapter in chapters))
    exercises = in_words(sum(chapter.minutes_with_exercises for chapter in chapters))
    card = INDEX.split(f"{{grid-item-card}} {title}\n")[1].split(":::")[0]
    assert f"{reading} of reading, {exercises} with the exercises." in card


def test_the_time_of_the_book_is_the_sum() -> None:
    reading = in_words(sum(chapter.minutes for chapter in CHAPTERS.values()))
    exercises = in_words(sum(chapter.minutes_with_exercises for chapter in CHAPTERS.values()))
    said = (
        f"All {len(CHAPTERS)} chapters are {reading} of reading, {exercises} with their exercises."
    )
    assert said in INDEX
