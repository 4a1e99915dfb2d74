"""Four orders of a causal sum: counts as in lesson_code.costs, numbers as in lesson_code.numpy."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from matplotlib.colors import to_hex

from lesson_code import costs, plots
from lesson_code.numpy import identity, linear_attention
from lesson_code.plots import pale
from lesson_code.plots.colors import BLUE, VERMILION
from tests.explorables.conftest import NARROW

N = 8
TOKENS = [[1, 2, 1, 1, 2, 1, 1, 2], [1, 1, 2, 1, 1, 2, 1, 1]]  # q and k at first
FORMS = ["masked", "recurrent", "scan", "chunkwise"]


@pytest.fixture(scope="module")
def scans(explore):
    return explore("fig-four-orders")


def counted(L: int) -> list[costs.CausalCost]:
    plain = [count(N, 1, 1) for count in (costs.masked_cost, costs.recurrent_cost, costs.scan_cost)]
    return [*plain, costs.chunkwise_cost(N, 1, 1, L=L)]


def kept(form: str, k, v, step: int, L: int) -> tuple[list[int], np.ndarray, np.ndarray]:
    """The last token in each state that a form keeps after a step, and what is in it."""
    if form == "masked":
        spans = []
    elif form == "recurrent":
        spans = [(0, step)]
    elif form == "scan":
        spans = [(max(0, t - 2**step), t) for t in range(1, N + 1)]
    else:
        spans = [(0, min(step * L, N))]
    S = [float(k[a:b] @ v[a:b]) for a, b in spans]
    return [b - 1 for _, b in spans], np.array(S), np.array([k[a:b].sum() for a, b in spans])


def finished(form: str, step: int, L: int) -> int:
    """How many outputs are there after a step."""
    rows = {"masked": N, "recurrent": step, "scan": N if step == 3 else 0, "chunkwise": step * L}
    return min(rows[form], N) if step else 0


def row(values, places) -> list[float]:
    """A row of the table: values at places, blank elsewhere."""
    full = np.full(N, np.nan)
    full[list(places)] = values
    return full


@pytest.mark.parametrize("L", [1, 3, 5, 8])
def test_the_counts_are_those_of_the_package(scans, L: int) -> None:
    scans.slide("L", L)
    expected = counted(L)
    before = [0] * 4
    for step in range(N + 1):
        scans.slide("step", step)
        shown = scans.matrix("costs")
        for (so_far, work, memory, depth), cost, last in zip(shown, expected, before, strict=True):
            assert (work, memory, depth) == cost
            assert (so_far == cost.work) == (step >= cost.depth)
            assert (so_far > last) == (0 < step <= cost.depth)
        before = [so_far for so_far, *_ in shown]
        assert before[1] == costs.recurrent_cost(step, 1, 1).work
        assert before[3] == costs.chunkwise_cost(min(step * L, N), 1, 1, L=L).work


def test_it_starts_as_the_picture(scans) -> None:
    scans.press("reset")
    picture = plots.scans.orders(N=N, L=2, steps=2)
    colors = Counter(to_hex(patch.get_facecolor()) for patch in picture.axes[0].patches)
    families = {
        "vermilion": [VERMILION, pale.VERMILION],
        "blue": [BLUE, pale.BLUE],
        "gray": ["#dddddd"],
    }
    cells = scans.part("orders").locator("rect.lit")
    for name, members in families.items():
        drawn = [colors[color.lower()] for color in members]
        of_this_color = cells.and_(cells.page.locator(f".{name}"))
        assert of_this_color.count() == sum(drawn)
        if name != "gray":  # the last step is darker
            assert of_this_color.and_(cells.page.locator(":not(.pale)")).count() == drawn[0]


def test_states_and_outputs_are_those_of_the_package(scans) -> None:
    rng = np.random.default_rng(3)
    cases = [np.round(rng.uniform(-9, 9, (3, N)), 1), rng.integers(-9, 10, (3, N)).astype(float)]
    cases.append(np.full((3, N), 9.0))
    for tokens, L in zip(cases, (3, 1, 8), strict=True):
        scans.slide("L", L)
        scans.type("tokens", tokens)
        q, k, v = tokens
        depths = [cost.depth for cost in counted(L)]
        for form, depth in zip(FORMS, depths, strict=True):
            scans.choose("form", form)
            options = {"chunk_size": L} if form == "chunkwise" else {}
            outputs = linear_attention(
                *(x[:, None] for x in tokens), feature_map=identity, causal=True,
                normalize=False, form=form, **options,
            )[:, 0]  # fmt: skip
            for step in {1, 2, depth, N}:
                scans.slide("step", step)
                done = min(step, depth)
                places, S, z = kept(form, k, v, done, L)
                rows = finished(form, done, L)
                expected = [row(S, places), row(z, places), row(outputs[:rows], range(rows))]
                # a row without numbers is not read
                expected = [x for x in expected if not np.isnan(x).all()]
                np.testing.assert_allclose(scans.matrix("numbers"), expected, atol=0.005 + 1e-9)


def test_a_number_between_the_steps_is_not_called_wrong(scans) -> None:
    field = scans.part("tokens").locator("input").first
    assert field.get_attribute("aria-invalid") == "false"
    field.fill("2.5")  # arrow keys go in steps of 1
    field.blur()
    assert field.input_value() == "2.5"
    assert field.get_attribute("aria-invalid") == "false"


def test_the_steps_stay_in_sight_on_a_phone(explore) -> None:
    scans = explore("fig-four-orders", NARROW)
    scans.part("reset").evaluate("button => button.scrollIntoView({block: 'end'})")
    for name in ("step-next", "step"):
        above = scans.page.locator(".bd-header-article").bounding_box()
        box = scans.part(name).bounding_box()
        assert above["y"] + above["height"] <= box["y"] + 1 < 300
    scans.press("step-next")
    assert scans.part("step").input_value() == "3"


@pytest.mark.parametrize("form", range(4))
@pytest.mark.parametrize("t, i", [(5, 3), (8, 1), (4, 4), (2, 6)])
def test_a_cell_that_is_pointed_at_is_named(scans, form: int, t: int, i: int) -> None:
    scans.press("reset")
    scans.slide("L", 2)
    drawing = scans.part("orders")
    drawing.scroll_into_view_if_needed()
    box, heads = drawing.bounding_box(), drawing.locator("text.bold")
    x, y = (float(heads.nth(form).get_attribute(axis)) for axis in "xy")
    first = drawing.locator("rect.axis.cell").first
    pitch, top = float(first.get_attribute("width")) + 1, float(first.get_attribute("y")) - 13 + y
    scans.page.mouse.move(box["x"] + x + (i - 0.5) * pitch, box["y"] + top + (t - 0.5) * pitch)
    scans.settle()
    q, k = TOKENS[0][t - 1], TOKENS[1][i - 1]
    below = "₀₁₂₃₄₅₆₇₈"
    named = scans.root.get_by_text(f"q{below[t]} · k{below[i]} = {q * k}", exact=False)
    words = named.inner_text()
    assert drawing.locator("rect.frame").count() == 4
    if i > t:
        assert words.endswith(f"is no part of output {t}: token {i} comes later.")
    else:
        apart = t - i  # the round of the scan in which sums reach so far
        rounds, chunk = max(1, int(apart).bit_length()), (t + 1) // 2
        assert (
            f"masked in step 1; recurrent in step {t}, through a state; scan in step {rounds}, "
            in words
        )
        through = ", through a state" if (i + 1) // 2 < chunk else ""
        assert words.endswith(f"chunkwise in step {chunk}{through}.")
    scans.page.mouse.move(0, 0)
    scans.settle()
    assert drawing.locator("rect.frame").count() == 0


def test_every_form_fills_the_triangle_once(scans) -> None:
    triangle = N * (N + 1) // 2
    for L in (1, 3, 8):
        scans.slide("L", L)
        scans.slide("step", N)
        squares = scans.part("orders").locator("rect:is(.vermilion, .blue)")
        assert squares.count() == 4 * triangle
        places = squares.evaluate_all(
            "all => all.map(one => [one.x.baseVal.value, one.y.baseVal.value].join())"
        )
        assert len(set(places)) == 4 * triangle


def test_it_says_what_a_step_does(scans) -> None:
    scans.slide("L", 8)
    scans.choose("form", "chunkwise")
    scans.slide("step", 0)
    assert scans.said() == "Nothing is computed yet."
    scans.press("step-next")
    assert scans.said().endswith("One chunk is the masked form.")
    scans.press("step-next")
    assert scans.said() == "The chunkwise form was done after 1 step."
    scans.choose("form", "scan")
    assert scans.said() == "Step 2. Each state adds the one 2 places before it: 6 at once."
