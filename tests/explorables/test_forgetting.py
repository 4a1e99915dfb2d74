"""One stream, five rules: states, weights and reads are those of lesson_code.numpy."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

import lesson_code.numpy as ln
from tests.explorables.conftest import NARROW, ROOT, as_number, explorables
from tests.explorables.test_all import FAULTS

RULES = ["plain", "decay", "gate", "delta", "gated delta"]
START = {
    "keys": [[1, 0], [0, 1], [0, 1], [1, 0], [0.6, 0.8], [0, 1]],
    "values": [10, 30, 30, 50, 60, 20],
    "gamma": 0.5, "beta": 1.0, "closes": 6, "alpha": 0.1, "channels": "1 and 2",
}  # fmt: skip
OVERLAPS = """texts => texts.map(text => text.getBoundingClientRect()).filter((a, i, all) =>
  all.slice(0, i).some(b => Math.abs(a.y - b.y) < 8 && a.left < b.right - 1 && b.left < a.right - 1)
).length"""


@pytest.fixture(scope="module")
def stream(explore):
    return explore("fig-token-weights")


def expected(k, v, q, *, gamma, beta, closes, alpha, channels):
    """The five rules on values v (N, M): what q reads after each token, and the last state."""
    N = len(k)
    log_decay, step = np.zeros(N), np.full(N, float(beta))
    with np.errstate(divide="ignore"):
        log_decay[closes - 1 : closes] = np.log(alpha)
    gates = np.repeat(log_decay[:, None], 2, axis=1)
    gates[:, {"1 and 2": [], "1": [1], "2": [0]}[channels]] = 0
    q, state = np.tile(q, (N, 1)), {"return_state": True}
    plain = ln.linear_attention(
        q, k, v, feature_map=ln.identity, causal=True, normalize=False, **state
    )
    return [
        (plain[0], plain[1].S),
        ln.retention(q, k, v, gamma, **state),
        ln.gated_linear_attention(q, k, v, gates, **state),
        ln.delta_rule(q, k, v, step, form="recurrent", **state),
        ln.gated_delta_rule(q, k, v, step, log_decay, form="recurrent", **state),
    ]


def put(stream, knobs) -> None:
    if not stream.part("channels").is_visible():
        stream.choose("rules", "gate")
    stream.type("keys", knobs["keys"])
    stream.type("values", [[x] for x in knobs["values"]])
    stream.slide("gamma", f"{knobs['gamma']:.2f}")
    stream.slide("beta", f"{knobs['beta']:.2f}")
    stream.slide("closes", f"token {knobs['closes']}" if knobs["closes"] else "never")
    stream.slide("alpha", f"{knobs['alpha']:.2f}")
    stream.choose("channels", knobs["channels"])


def compare(stream, knobs, t: int, asked: int) -> None:
    """Everything that is shown after token t, for the key of token `asked`."""
    stream.slide("t", t)
    stream.choose("asked", str(asked))
    k, v = np.array(knobs["keys"], float), np.array(knobs["values"], float)
    q, rest = k[asked - 1], {x: knobs[x] for x in knobs if x not in ("keys", "values")}
    rest["closes"] = rest["closes"] if rest["closes"] and rest["closes"] <= t else t + 1
    weights = np.array([out[-1] for out, _ in expected(k[:t], np.eye(t), q, **rest)]).T
    found = expected(k[:t], v[:t, None], q, **rest)
    states = np.array([S[:, 0] for _, S in found]).T
    own = np.arange(t) == asked - 1
    same = (k[:t] == q).all(axis=1) & ~own
    parts = [(weights * v[:t, None])[which].sum(axis=0) for which in (own, same, ~own & ~same)]
    reads = [out[-1, 0] for out, _ in found]
    assert stream.matrix("weights") == rounded(weights, 2)
    assert stream.matrix("sums") == rounded(np.array([*states, *parts, reads]), 1)


def rounded(numbers, digits: int):
    """To half a unit of the last digit shown; from a million on two digits are shown."""
    half = 0.5 * 10.0**-digits
    return [[pytest.approx(x, rel=0.05 if abs(x) > 9e5 else 0, abs=half * 1.0001) for x in row]
            for row in numbers]  # fmt: skip


def test_it_begins_as_the_picture(stream) -> None:
    notebook = ROOT / Path(explorables()["fig-token-weights"]).with_suffix(".ipynb")
    cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    [source] = ["".join(c["source"]) for c in cells if "(N, N)" in "".join(c["source"])
                and "gated_delta_rule(q, k, each" in "".join(c["source"])]  # fmt: skip
    names = {"np": np, "ln": ln}
    exec(source, names)
    assert list(names["weights"]) == RULES
    drawn = np.array([out[-1] for out in names["weights"].values()]).T
    stream.slide("t", 6)
    assert stream.matrix("weights") == rounded(drawn, 2)
    assert stream.matrix("sums")[-1] == rounded([names["v"] @ drawn], 1)[0]
    compare(stream, START, 6, 1)


@pytest.mark.parametrize("t, asked", [(1, 1), (3, 2), (4, 1), (5, 5), (5, 2), (6, 4)])
def test_every_token_of_the_first_stream(stream, t: int, asked: int) -> None:
    compare(stream, START, t, asked)


def test_panels_show_what_the_tables_say(stream) -> None:
    for rule in ("decay", "gate", "gated delta"):
        stream.choose("rules", rule)
    compare(stream, START, 6, 1)
    S, reads = np.array(stream.matrix("sums")[:2]).T, stream.matrix("sums")[-1]
    lengths = []
    for rule, state, read in zip(RULES, S, reads, strict=True):
        name = rule.replace(" ", "-")
        assert stream.number(f"reads-{name}") == read
        drawing = stream.part(f"bars-{name}")
        cells = drawing.locator("text[data-name]").all_text_contents()
        assert [as_number(x) for x in cells] == pytest.approx(state, abs=0.0501)
        bars = drawing.locator('rect[fill-opacity="1"]').all()  # stand on top of each other
        lengths.append(sum(float(bar.get_attribute("height")) for bar in bars))
    assert np.array(lengths) / lengths[0] == pytest.approx(np.array(reads) / reads[0], abs=2e-3)
    for rule in ("decay", "gate", "gated delta"):
        stream.choose("rules", rule)


def test_two_rules_are_shown_and_others_come_with_their_knobs(stream) -> None:
    stream.press("reset")
    panels = {rule: stream.part(f"bars-{rule.replace(' ', '-')}") for rule in RULES}
    knobs = {"gamma": "decay", "closes": "gate", "alpha": "gate", "beta": "delta"}
    for on in ([], ["decay"], ["decay", "gate"], ["decay", "gate", "gated delta"]):
        if on:
            stream.choose("rules", on[-1])
        seen = [rule for rule, panel in panels.items() if panel.is_visible()]
        assert seen == [rule for rule in RULES if rule in ("plain", "delta", *on)]
        for knob, rule in knobs.items():
            assert stream.part(knob).is_visible() == (rule in seen)
    stream.choose("rules", "gate")  # off: gated delta needs its knobs
    assert stream.part("alpha").is_visible() and not panels["gate"].is_visible()
    plain, delta = (panels[rule].bounding_box() for rule in ("plain", "delta"))
    assert plain["y"] == delta["y"]  # side by side
    stream.press("reset")


def test_the_story(stream) -> None:
    """The key of token 1 is written again, and a key that overlaps comes after it."""
    stream.press("reset")
    told = {
        1: ("Token 1 writes 10 to the key of token 1.", "10", "10"),
        3: ("Token 3 writes 30 to a key at a right angle to that of token 1.", "10", "10"),
        4: ("Token 4 writes 50 to the key of token 1 again.", "60", "50"),
        5: ("Token 5 writes 60 to a key that overlaps that of token 1.", "96", "53.6"),
    }
    for t, (words, plain, delta) in told.items():
        stream.slide("t", t)
        reads = f"Now the key of token 1 reads {plain} from the plain sum and {delta} by"
        assert stream.said().startswith(f"{words} {reads}")


def test_random_streams(stream) -> None:
    rng = np.random.default_rng(8)
    for _ in range(4):
        knobs = {
            "keys": rng.integers(-15, 16, (6, 2)) / 10,
            "values": rng.integers(-990, 991, 6) / 10,
            "gamma": rng.integers(1, 21) / 20, "beta": rng.integers(0, 41) / 20,
            "closes": int(rng.integers(0, 7)), "alpha": rng.integers(0, 21) / 20,
            "channels": str(rng.choice(["1 and 2", "1", "2"])),
        }  # fmt: skip
        knobs["keys"][4] = knobs["keys"][1]  # a key is written twice
        put(stream, knobs)
        for t, asked in ((6, 2), (4, 5), (int(rng.integers(1, 7)), int(rng.integers(1, 7)))):
            compare(stream, knobs, t, asked)


def test_awkward_streams(stream) -> None:
    zero = START | {"keys": np.zeros((6, 2)), "alpha": 0.0, "closes": 2}
    put(stream, zero)
    compare(stream, zero, 6, 1)
    assert "is 0, and reads 0" in stream.said()
    large = {**START, "keys": [[9, -9], [9, 9], [-9, 0], [9, 9], [0.1, 9], [9, 9]], "beta": 2.0}
    put(stream, large)
    compare(stream, large, 6, 2)
    assert "At token 1 β |k|² is 324.00, above 2" in stream.said()
    stream.slide("t", 0)
    assert stream.matrix("weights") == []
    assert np.all(np.array(stream.matrix("sums")) == 0)
    assert "every key reads 0" in stream.said()


def test_what_rounding_leaves_of_a_zero_is_not_shown(stream) -> None:
    unit = [[0.8, -0.6], [0.28, 0.96], [0, 1], [0.6, 0.8], [0.8, -0.6], [0.28, 0.96]]
    put(stream, START | {"keys": unit})
    stream.slide("t", 6)
    stream.choose("asked", "1")
    shown = stream.part("weights").locator("td").all_inner_texts()
    assert "0" in shown and not {"0.00", "−0.00"} & set(shown)
    bars = stream.root.locator("[data-name^=bars] rect[fill-opacity]")
    heights = bars.evaluate_all("all => all.map(bar => Number(bar.getAttribute('height')))")
    assert min(heights) > 0.01


def test_long_numbers_stand_apart_on_a_phone(explore) -> None:
    stream = explore("fig-token-weights", 320)
    for rule in ("decay", "gate", "gated delta"):
        stream.choose("rules", rule)
    keys = [[9, -9], [9, 9], [-9, 0], [9, 9], [0.1, 9], [9, 9]]
    for knobs in (START | {"values": [-99] * 6}, START | {"keys": keys, "beta": 2.0}):
        put(stream, knobs)
        for asked in "13":
            stream.choose("asked", asked)
            assert stream.root.evaluate(FAULTS) == []
            for drawing in stream.root.locator("svg").all():
                assert drawing.locator("text").evaluate_all(OVERLAPS) == 0


def test_stream_and_tables_are_folded(explore) -> None:
    stream = explore("fig-token-weights", NARROW, folded=True)
    assert not stream.part("keys").is_visible() and not stream.part("weights").is_visible()
    for summary in stream.root.locator("summary").all():
        summary.press("Enter")
    stream.part("values").locator("input").first.fill("-7")
    stream.settle()
    assert stream.matrix("weights")[0][0] == 1 and stream.matrix("sums")[2][0] == -7
    stream.press("reset")
    assert stream.part("values").locator("input").first.input_value() == "10"


def test_bad_numbers_are_not_taken(stream) -> None:
    stream.press("reset")
    put(stream, START)
    stream.slide("t", 6)
    field = stream.part("keys").locator("input").first
    for bad in ("", "99", "-9.1"):
        field.fill(bad)
        stream.settle()
        assert field.get_attribute("aria-invalid") == "true"
        compare(stream, START, 6, 1)
    field.blur()
    assert field.input_value() == "1"


def test_the_stream_can_be_stepped_and_taken_back(stream) -> None:
    stream.press("reset")
    stream.slide("t", 0)
    stream.press("t-next", 4)
    assert stream.said().endswith("written there last was 50.")
    stream.press("t-back")
    assert stream.said().startswith("Token 3 writes 30")
