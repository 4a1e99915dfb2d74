"""The status page says what the result files say."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from bs4 import BeautifulSoup

from tools import notebooks, status_page

ROOT = Path(__file__).resolve().parent.parent
RESULTS = status_page.read_results(ROOT)


@pytest.fixture(scope="module")
def page(site: Path) -> BeautifulSoup:
    text = (site / "book" / "status.html").read_text("utf-8")
    return BeautifulSoup(text, "html.parser").article


def cells(table: BeautifulSoup) -> list[list[str]]:
    return [
        [" ".join(cell.get_text().split()) for cell in row.select("td")]
        for row in table.select("tbody tr")
    ]


def test_it_has_the_time_of_every_chapter(page: BeautifulSoup) -> None:
    [table] = page.select("#run-times table")
    *chapters, (_, total) = cells(table)
    rows = RESULTS["chapters.json"]["rows"]
    assert [row["chapter"] for row in rows] == [path.stem for path in notebooks.NOTEBOOKS]
    assert [int(seconds) for _, seconds in chapters] == [round(row["seconds"]) for row in rows]
    assert all(row["seconds"] > 0 for row in rows)
    assert int(total) == round(sum(row["seconds"] for row in rows))
    links = [link["href"] for link in table.select("a")]
    assert links == [f"{path.stem}.html" for path in notebooks.NOTEBOOKS]


def test_it_says_where_that_was_measured(page: BeautifulSoup) -> None:
    result = RESULTS["chapters.json"]
    said = page.select_one("#run-times").get_text()
    for text in (result["date"], result["machine"]["device"], result["machine"]["python"]):
        assert text in said
    for name, version in result["versions"].items():
        assert f"{name} {version}" in " ".join(said.split())


def test_it_lists_all_results(page: BeautifulSoup) -> None:
    [table] = page.select("#all-results table")
    found = {row[0]: row for row in cells(table)}
    assert found.keys() == RESULTS.keys()
    for name, result in RESULTS.items():
        assert found[name][1].replace("’", "'") == " ".join(result["what"].split())
        assert found[name][2] == result["date"]
        for machine in status_page.machines(result):
            assert machine["device"] in found[name][3] and machine["torch"] in found[name][4]


def test_it_says_whether_a_gpu_has_measured(page: BeautifulSoup) -> None:
    said = page.select_one("#results-from-a-gpu").get_text()
    measured = status_page.on_a_gpu(RESULTS)
    assert ("No results from a GPU are committed yet" in said) == (not measured)
    assert ("Last measured on" in said) == bool(measured)


def test_every_machine_of_a_result_is_named_once() -> None:
    one = {"device": "X", "threads": 1, "python": "3.12", "torch": "2"}
    other = one | {"device": "Y", "torch": "3"}
    result = {"machine": [one, other, one | {"python": "3.13"}]}
    assert status_page.where(result) == "X and Y, 1 thread"
    assert status_page.torch_of(result) == "2, 3"
    assert status_page.where({"machine": one | {"threads": 2}}) == "X, 2 threads"


def test_a_gpu_is_picked_up_with_its_last_date(tmp_path: Path) -> None:
    folder = tmp_path / status_page.RESULTS
    folder.mkdir(parents=True)
    for name, date in {"kernels_cuda": "2027-01-02", "causal_cuda": "2026-12-31"}.items():
        machine = {"device": "NVIDIA X", "threads": 1, "python": "3.12", "torch": "2"}
        result = {"machine": machine, "date": date, "what": "speed", "rows": []}
        (folder / f"{name}.json").write_text(json.dumps(result), encoding="utf-8")
    lines = status_page.gpu(status_page.read_results(tmp_path))
    assert lines[0] == "Last measured on 2027-01-02, NVIDIA X, 1 thread."
    assert any("`causal_cuda.json`" in line and "2026-12-31" in line for line in lines)
