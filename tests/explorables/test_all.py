"""What holds for every explorable, whatever it shows."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.explorables.conftest import NARROW, Driver, explorables, open_alone

FIGURES = list(explorables())

# Where something is wider than its box, or cannot be reached, or has no name.
FAULTS = r"""root => {
  const faults = [], box = root.getBoundingClientRect(), page = document.documentElement;
  const name = node => node.outerHTML.slice(0, 140);
  if (page.scrollWidth > page.clientWidth + 1) faults.push(`page of ${page.scrollWidth} px`);
  for (const node of root.querySelectorAll("*")) {
    if (node.closest(".explorable-scroll table") || !node.checkVisibility()) continue;
    const {left, right} = node.getBoundingClientRect();
    if (left < box.left - 1 || right > box.right + 1) faults.push(`sticks out: ${name(node)}`);
  }
  for (const text of root.querySelectorAll("svg text")) {
    if (!text.closest("svg").checkVisibility()) continue;
    const inside = text.getBoundingClientRect();
    const drawing = text.closest("svg").getBoundingClientRect();
    if (inside.left < drawing.left - 1 || inside.right > drawing.right + 1 ||
        inside.top < drawing.top - 3 || inside.bottom > drawing.bottom + 3)
      faults.push(`text is cut off: ${text.textContent}`);
  }
  for (const control of root.querySelectorAll("button, input, select, textarea")) {
    const target = ["radio", "checkbox"].includes(control.type) ? control.labels[0] : control;
    if (!target.checkVisibility()) continue;
    const {width, height} = target.getBoundingClientRect();
    if (height < 24 || width < 24) faults.push(`too small for a finger: ${name(control)}`);
    if (!control.labels?.length && !control.ariaLabel && !control.textContent.trim())
      faults.push(`has no name: ${name(control)}`);
  }
  for (const drawing of root.querySelectorAll("svg"))
    if (drawing.getAttribute("role") !== "img" || (drawing.ariaLabel || "").length < 20)
      faults.push(`a drawing without words: ${name(drawing)}`);
  for (const output of root.querySelectorAll("output"))
    if (output.ariaLive !== "off") faults.push(`read aloud at every change: ${name(output)}`);
  if (root.querySelectorAll("[role=status]").length !== 1) faults.push("not one place for news");
  const names = [...root.querySelectorAll("[data-name]")].map(node => node.dataset.name);
  if (new Set(names).size !== names.length) faults.push(`a name stands twice: ${names}`);
  return faults;
}"""


# Tables that are cut at the right. They scroll, and a shadow shows it, but first all is in sight.
CUT = """boxes => boxes.filter(box => box.scrollWidth > box.clientWidth + 1)
  .map(box => box.querySelector("table").dataset.name)"""

# What stands in fields, drawings and tables.
STATE = """root => [
  ...[...root.querySelectorAll("input")].map(({type, checked, value}) =>
    ["radio", "checkbox"].includes(type) ? checked : value),
  ...[...root.querySelectorAll("svg")].map(drawing => drawing.innerHTML),
  ...[...root.querySelectorAll("td, output, .explorable-said")].map(node => node.textContent),
]"""


# Whether a choice has the color of what is chosen.
LIT = """labels => labels.map(label => {
  const probe = document.createElement("p"), color = getComputedStyle(label).backgroundColor;
  probe.style.background = "Highlight";
  label.append(probe);
  const chosen = getComputedStyle(probe).backgroundColor;
  probe.remove();
  return color === chosen;
})"""


@pytest.fixture(scope="module", params=FIGURES)
def wide(request: pytest.FixtureRequest, explore) -> Driver:
    """An explorable as it first stands; who changes it puts it back."""
    return explore(request.param, folded=True)


def assert_it_fits(driver: Driver) -> None:
    driver.settle()
    assert driver.root.evaluate(FAULTS) == []
    assert len(driver.root.screenshot()) > 5_000  # more than an empty box


def test_it_fits_a_wide_screen(wide: Driver, explore) -> None:
    assert_it_fits(wide)
    assert_it_fits(explore(wide.figure))  # unfolded


def test_a_choice_is_seen_in_forced_colors(wide: Driver) -> None:
    wide.page.emulate_media(forced_colors="active")
    lit = wide.root.locator("input:is([type=radio], [type=checkbox]) + label").evaluate_all(LIT)
    wide.page.emulate_media(forced_colors="none")
    radios = wide.root.locator("input:is([type=radio], [type=checkbox])")
    assert lit == radios.evaluate_all("all => all.map(one => one.checked)")


def test_paper_shows_the_picture(wide: Driver) -> None:
    assert wide.root.is_visible() and not wide.picture.is_visible()
    wide.page.emulate_media(media="print")
    assert wide.picture.is_visible() and not wide.root.is_visible()
    wide.page.emulate_media(media="screen")


def test_the_keyboard_alone_drives_it(wide: Driver) -> None:
    driver = wide
    first = driver.root.evaluate(STATE)
    controls = driver.root.locator("button:enabled, input[type=range], input[type=text]")
    assert controls.count()
    before = driver.root.inner_html()
    driver.root.locator("button:enabled, input").first.focus()
    for _ in range(40):
        focused = driver.page.evaluate("document.activeElement.closest('.explorable') !== null")
        if not focused or driver.root.inner_html() != before:
            break
        kind = driver.page.evaluate("document.activeElement.type")
        driver.page.keyboard.press("Enter" if kind == "button" else "ArrowUp")
        driver.settle()
        if driver.root.inner_html() == before:
            driver.page.keyboard.press("ArrowDown")
            driver.settle()
        driver.page.keyboard.press("Tab")
    assert driver.root.inner_html() != before
    reset = driver.part("reset")
    assert driver.root.evaluate(STATE) != first
    assert reset.inner_text() == "start again"
    driver.keys("reset", "Enter")
    assert driver.root.evaluate(STATE) == first


# Where a finger is, and what it moves: both stand on one screen of a phone, below the page's head.
ON_ONE_SCREEN = {
    "fig-two-brackets": ("N", "linear"),
    "fig-signal-crosstalk": ("plane", "bars"),
    "fig-two-ways": ("t", "terms"),
    "fig-sums-stick": ("N", "growth"),
    "fig-plane-weights": ("plane", "weights"),
    "fig-recall-overflow": ("n", "pairs-cache"),
}


@pytest.mark.parametrize("figure", FIGURES)
def test_it_fits_a_phone(explore, figure: str) -> None:
    driver = explore(figure, NARROW, folded=True)
    assert_it_fits(driver)
    if figure in ON_ONE_SCREEN:
        first, last = (driver.part(name).bounding_box() for name in ON_ONE_SCREEN[figure])
        assert 0 < last["y"] + last["height"] - first["y"] < 660
    driver.unfold()
    for other in (320, NARROW, 560):  # the narrowest phone, or a page at 400 %; a small tablet
        driver.page.set_viewport_size({"width": other, "height": 900})
        assert_it_fits(driver)
        assert driver.root.locator(".explorable-scroll").evaluate_all(CUT) == []
    driver.page.close()


def test_a_screen_reader_is_told_when_a_drag_rests(explore) -> None:
    driver = explore("fig-two-brackets")
    told = driver.root.locator("[role=status]")
    first = told.inner_text()
    assert first == driver.said()  # to be found at once
    driver.slide("N", "1,048,576")  # through all positions
    assert driver.said() != first and told.inner_text() == first
    driver.page.wait_for_function("words => words[0] === words[1].innerText", arg=[
        driver.said(), told.element_handle()])  # fmt: skip


# The figures that are played, and the names of their steps.
PLAYED = {
    "fig-four-orders": "step",
    "fig-signal-crosstalk": "t",
    "fig-two-ways": "t",
    "fig-three-ways": "t",
    "fig-token-weights": "t",
    "fig-sums-stick": "N",
    "fig-recall-overflow": "n",
}
UNSEEN = ("fig-four-orders", "fig-sums-stick", "fig-recall-overflow")  # nothing flies there


def at(driver: Driver, name: str) -> int:
    return int(driver.part(name).input_value())


@pytest.mark.parametrize("figure", PLAYED)
def test_it_opens_early_and_plays_to_the_end(explore, figure: str) -> None:
    driver, name = explore(figure, clock=True), PLAYED[figure]
    play, last = driver.part(f"{name}-play"), int(driver.part(name).get_attribute("max"))
    first = at(driver, name)
    assert first <= last / 2 and play.inner_text() == "▶ play"
    driver.press(f"{name}-play")  # the first step at once
    assert first < at(driver, name) < last and play.inner_text() == "❚❚ pause"
    driver.press(f"{name}-play")
    paused = at(driver, name)
    driver.page.clock.run_for(4_000)
    assert at(driver, name) == paused and play.inner_text() == "▶ play"
    driver.press(f"{name}-play")
    driver.page.clock.run_for(60_000)
    driver.settle()
    assert at(driver, name) == last and play.inner_text() == "▶ play"
    assert driver.part(f"{name}-next").get_attribute("aria-disabled") == "true"
    driver.press(f"{name}-play")  # from the beginning
    assert at(driver, name) < last / 2
    driver.page.close()


@pytest.mark.parametrize("figure", PLAYED)
def test_who_touches_anything_pauses_it(explore, figure: str) -> None:
    driver, name = explore(figure, clock=True), PLAYED[figure]
    play = driver.part(f"{name}-play")
    touches = [
        lambda: driver.root.locator(".explorable-title").click(),
        lambda: driver.keys(name, "ArrowLeft"),
        lambda: driver.part(name).dispatch_event("input"),
    ]
    for touch in touches:
        driver.part(name).fill("1")
        driver.press(f"{name}-play")
        driver.page.keyboard.press("Tab")  # only looks on
        assert play.inner_text() == "❚❚ pause"
        touch()
        assert play.inner_text() == "▶ play"
    driver.page.close()


@pytest.mark.parametrize("figure", [figure for figure in PLAYED if figure not in UNSEEN])
def test_a_write_is_seen_flowing_where_motion_is_welcome(explore, figure: str) -> None:
    for motion in (True, False):
        driver, name = explore(figure, motion=motion), PLAYED[figure]
        driver.root.evaluate("""root => {
          window.flown = 0;
          const isGhost = node => node.classList?.contains("explorable-ghost");
          const count = ({addedNodes}) => { window.flown += [...addedNodes].some(isGhost); };
          new MutationObserver(all => all.forEach(count)).observe(root, {childList: true});
        }""")
        driver.press(f"{name}-next")
        assert bool(driver.page.evaluate("window.flown")) == motion
        driver.page.wait_for_function("!document.querySelector('.explorable-ghost')")
        driver.page.close()


@pytest.mark.parametrize("figure", FIGURES)
def test_without_scripts_the_picture_stands(site: Path, browser, figure: str) -> None:
    page = browser.new_page(java_script_enabled=False)
    open_alone(page, site, figure)
    assert page.locator(f"#{figure} img").is_visible()
    assert page.locator(".explorable").count() == 0
    page.close()


@pytest.mark.parametrize("figure", FIGURES)
def test_who_comes_back_finds_controls_and_drawings_agreed(
    site: Path, browser, serve, figure: str
) -> None:
    page = browser.new_page()
    address = serve(site)  # of a file, a browser does not keep what was typed
    open_alone(page, site, figure, address)
    driver = Driver(page, figure)
    first = driver.root.evaluate(STATE)
    driver.unfold()
    for control in driver.root.locator("input[type=range], input[type=text]").all()[:8]:
        control.press("ArrowDown")
    for label in driver.root.locator("fieldset label:last-child").all():
        if label.is_visible():
            label.click()
    driver.settle()
    assert driver.root.evaluate(STATE) != first
    page.goto(f"{address}/search.html")
    page.go_back()
    driver = Driver(page, figure)
    driver.settle()
    assert driver.root.evaluate(STATE) == first
    page.close()
