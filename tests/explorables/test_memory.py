"""The memory of outer products: what it shows is what LinearAttentionState holds and reads."""

from __future__ import annotations

import numpy as np
import pytest

from lesson_code import plots
from lesson_code.numpy import LinearAttentionState
from tests.explorables.conftest import as_number

K = np.array([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])
V = np.array([[10.0, 20.0], [30.0, 40.0], [50.0, 60.0]])


@pytest.fixture(scope="module")
def memory(explore):
    return explore("fig-signal-crosstalk")


def set_tokens(memory, k, v, t: int) -> None:
    memory.type("K", k)
    memory.type("V", v)
    memory.slide("t", t)


def shown_is_right(memory, k, v, q, t: int, normalize: bool) -> None:
    """Compare states, parts and read with the package's, to the two digits shown."""
    states = [LinearAttentionState.zeros(2, 2)]
    for key, value in zip(k[:t], v[:t], strict=True):
        states.append(states[-1].write(key, value))
    S, z = states[t]

    def agrees(shown, expected) -> None:
        np.testing.assert_allclose(shown, expected, rtol=0, atol=0.005 + 1e-9)

    agrees(memory.matrix("S"), S)
    agrees(memory.matrix("z"), z[:, None])
    if t:
        agrees(memory.matrix("before"), states[t - 1].S)
        agrees(memory.matrix("added"), np.outer(k[t - 1], v[t - 1]))
    else:
        assert memory.matrix("before") == memory.matrix("added") == []
    rows = np.array(memory.matrix("parts"))
    agrees(rows[-1, 1:], states[t].read(q, normalize=normalize))
    divisor = q @ z if normalize else 1.0
    if divisor == 0:
        assert len(rows) == 1  # there are no weights to show
        return
    weights = k[:t] @ q / divisor
    assert len(rows) == t + 1
    agrees(rows[:-1, 0], weights)
    agrees(rows[:-1, 1:], weights[:, None] * v[:t])
    if normalize:
        assert rows[-1, 0] == 1


def test_it_starts_as_the_picture(memory) -> None:
    assert memory.said() == "Nothing else is written: k₁ reads 1 × v₁ = [10, 20]."
    memory.slide("t", 3)
    shown_is_right(memory, K, V, K[0], 3, normalize=False)
    assert memory.said() == "Signal 1 × v₁ = [10, 20], crosstalk [50, 60]: the read is [60, 80]."
    _, *panels = plots.memory.signal_and_crosstalk(K, V, i=0).axes
    picture = [[as_number(text.get_text()) for text in panel.texts] for panel in panels]
    assert [entries for _, *entries in memory.matrix("parts")] == np.transpose(picture).tolist()


def test_any_memory_is_that_of_the_package(memory) -> None:
    rng = np.random.default_rng(7)
    cases = [
        (np.round(rng.uniform(-2, 2, (3, 2)), 2), rng.integers(-99, 100, (3, 2)), t)
        for t in (3, 2, 1)
    ]
    cases += [
        (np.zeros((3, 2)), V, 3),  # 0 over 0
        (np.array([[2, 2], [2, 2], [2, 2.0]]), np.array([[99, -99], [99, -99], [99, -99]]), 3),
        (np.array([[1, 0], [-1, 0], [0, 1.0]]), V, 2),  # weights that cancel
        (K, V, 0),
    ]  # fmt: skip
    for k, v, t in cases:
        set_tokens(memory, k, v, t)
        v = v.astype(float)
        for asked, q in (("k₃", k[2]), ("any q", None)):
            memory.choose("asked", asked)
            if q is None:
                q = np.round(rng.uniform(-2, 2, 2), 2)
                memory.type("q", [q])
            for way in ("plain", "normalized"):
                memory.choose("way", way)
                shown_is_right(memory, k, v, q, t, way == "normalized")
                assert "NaN" not in memory.root.inner_html()
                assert "not a number" not in memory.root.inner_html()


def test_a_typed_query_is_no_longer_a_key(memory) -> None:
    memory.press("reset")
    memory.slide("t", 3)
    memory.type("q", [[0.5, 0.5]])
    assert memory.part("asked").locator("input:checked").get_attribute("value") == "any"
    assert memory.said() == "q = [0.5, 0.5] reads [70, 90], a blend of what is written."
    memory.choose("asked", "k₂")
    shown_is_right(memory, K, V, K[1], 3, normalize=False)


def test_words_for_what_has_no_number(memory) -> None:
    memory.press("reset")
    set_tokens(memory, np.zeros((3, 2)), V, 3)
    memory.choose("way", "normalized")
    assert memory.said().startswith("The weights sum to 0")
    memory.choose("way", "plain")
    assert memory.said() == "k₁ has the product 0 with every key written, and reads 0."
    memory.slide("t", 0)
    assert memory.said().startswith("Nothing is written yet")
    memory.press("t-next")
    memory.choose("asked", "k₂")
    assert (
        memory.said()
        == "k₂, not written yet, has the product 0 with every key written, and reads 0."
    )
    memory.type("K", [[1, 0], [0.5, 1], [1, 1]])
    assert memory.said() == "k₂ is not written yet: what it reads, [5, 10], is crosstalk alone."


def test_a_small_signal_is_not_called_0(memory) -> None:
    memory.press("reset")
    memory.slide("t", 2)
    memory.type("K", [[0.02, 0], [0.02, 1], [1, 1]])
    assert memory.said().startswith("Signal 4.0e−4 × v₁ = [4.0e−3, 0.01], crosstalk [0.01, 0.02]")
    memory.type("K", [[0, 0], [0.02, 1], [1, 1]])
    assert memory.said() == "k₁ has the product 0 with every key written, and reads 0."


def test_words_for_what_is_no_signal(memory) -> None:
    memory.press("reset")
    memory.slide("t", 3)
    memory.type("q", [[0, 0]])
    assert memory.said() == "q = [0, 0] has the product 0 with every key written, and reads 0."
    # 0.1 + 0.2 - 0.3 is no 0 in floating point: the package divides by 5.6e-17, as the page does
    k, q = np.array([[0.1, 0], [0.2, 0], [-0.3, 0]]), np.array([1.0, 0.0])
    memory.type("K", k)
    memory.type("q", [q])
    memory.choose("way", "normalized")
    state = LinearAttentionState.zeros(2, 2)
    for key, value in zip(k, V, strict=True):
        state = state.write(key, value)
    np.testing.assert_allclose(memory.matrix("parts")[-1][1:], state.read(q), rtol=0.01)
    assert "but for rounding errors" in memory.said()
    assert max(map(len, memory.part("parts").locator("td").all_inner_texts())) <= 8


@pytest.mark.parametrize("bad", ["150", "-100", "99.5", "1e3", "ten", "", "--1"])
def test_where_no_number_is_typed_the_one_before_comes_back(memory, bad: str) -> None:
    memory.press("reset")
    memory.slide("t", 3)
    field = memory.part("V").locator("input").first
    assert "−99 to 99" in memory.part("V").inner_text()
    field.click()
    field.press("Control+a")
    field.press_sequentially(bad)  # its first digits are numbers that would be taken
    field.press("Backspace" if not bad else "End")
    memory.settle()
    assert field.get_attribute("aria-invalid") == "true"
    shown_is_right(memory, K, V, K[0], 3, normalize=False)
    field.blur()
    assert field.input_value() == "10" and field.get_attribute("aria-invalid") == "false"
    note = memory.root.locator(".explorable-note:not(:empty)").inner_text()
    assert note == f"“{bad}” is no number from −99 to 99: 10 stays."
    field.fill("7")
    assert memory.root.locator(".explorable-note:not(:empty)").count() == 0


@pytest.mark.parametrize(
    "typed, taken", [("007", "7"), ("1,5", "1.5"), ("−2.5", "-2.5"), ("+3.", "3")]
)
def test_numbers_may_be_written_in_several_ways(memory, typed: str, taken: str) -> None:
    memory.press("reset")
    memory.slide("t", 3)
    field = memory.part("V").locator("input").first
    field.click()
    field.press("Control+a")
    field.press_sequentially(typed)
    field.press("Enter")
    memory.settle()
    assert field.input_value() == taken
    shown_is_right(memory, K, np.array([[float(taken), 20], *V[1:]]), K[0], 3, normalize=False)


def test_arrow_keys_count_in_a_field(memory) -> None:
    memory.press("reset")
    field = memory.part("K").locator("input").first
    assert field.get_attribute("role") == "spinbutton"
    for key, value in (("ArrowUp", "1.25"), ("ArrowDown", "1"), ("ArrowDown", "0.75")):
        field.press(key)
        assert field.input_value() == field.get_attribute("aria-valuenow") == value
    field.fill("2")
    field.press("ArrowUp")  # no further
    assert field.input_value() == "2"


def test_an_arrow_key_moves_a_handle_in_one_direction(memory) -> None:
    memory.press("reset")
    memory.type("K", [[1, 0.1], [0, 1], [1, 1]])
    memory.keys("drag-k1", "ArrowRight")
    assert memory.part("drag-k1").get_attribute("aria-valuetext") == "1.25, 0.10"
    memory.keys("drag-k1", "ArrowDown")  # to the next line of the grid
    assert memory.part("drag-k1").get_attribute("aria-valuetext") == "1.25, 0.00"


def test_who_drags_a_key_writes_it(memory) -> None:
    memory.press("reset")
    assert memory.part("t").input_value() == "1"
    memory.keys("drag-k3", "ArrowLeft")
    assert memory.part("t").input_value() == "3"
    k = np.array([K[0], K[1], [0.75, 1]])
    shown_is_right(memory, k, V, K[0], 3, normalize=False)


def test_keys_are_dragged_by_mouse_and_by_arrows(memory) -> None:
    memory.press("reset")
    memory.slide("t", 3)
    unit = memory.part("plane").bounding_box()["height"] / 4.5  # 2.25 to each side
    memory.drag("drag-k3", -2 * unit, 0.5 * unit)  # to [-1, 0.5]
    k = np.array([K[0], K[1], [-1, 0.5]])
    shown_is_right(memory, k, V, k[0], 3, normalize=False)
    memory.drag("drag-k3", 1.03 * unit, 0.46 * unit)  # to the nearest quarter: [0, 0]
    k[2] = 0
    shown_is_right(memory, k, V, k[0], 3, normalize=False)
    memory.keys("drag-k1", "ArrowUp", "ArrowUp", "ArrowLeft")
    k[0] = [0.75, 0.5]
    shown_is_right(memory, k, V, k[0], 3, normalize=False)  # the query follows its key
    memory.keys("drag-q", "ArrowDown")
    shown_is_right(memory, k, V, np.array([0.75, 0.25]), 3, normalize=False)
    memory.drag("drag-k2", 0, -9 * unit)  # no further than the plane
    k[1] = [0, 2]
    shown_is_right(memory, k, V, np.array([0.75, 0.25]), 3, normalize=False)


def test_right_angles_are_silent_and_near_ones_mix(memory) -> None:
    memory.press("orthogonal")
    assert memory.said().startswith("No crosstalk")
    (_, *signal), (weight, *crosstalk), (_, *read) = memory.matrix("parts")
    assert weight == 0 and crosstalk == [0, 0] and read == signal
    memory.press("parallel")
    (_, *signal), (_, *crosstalk), (_, *read) = memory.matrix("parts")
    assert np.dot(crosstalk, crosstalk) > np.dot(signal, signal)
    assert read == [a + b for a, b in zip(signal, crosstalk, strict=True)]


def test_only_the_first_button_of_a_mouse_drags(memory) -> None:
    memory.press("reset")
    memory.slide("t", 3)
    handle = memory.part("drag-k3")
    handle.scroll_into_view_if_needed()
    box = handle.bounding_box()
    x, y = box["x"] + box["width"] / 2, box["y"] + box["height"] / 2
    memory.page.mouse.move(x, y)
    memory.page.mouse.down(button="right")
    memory.page.mouse.move(x - 40, y + 40, steps=4)
    memory.page.mouse.up(button="right")
    memory.settle()
    shown_is_right(memory, K, V, K[0], 3, normalize=False)
