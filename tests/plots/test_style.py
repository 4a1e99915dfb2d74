"""The figures' common style. What the figures show is seen in the notebooks that draw them."""

from __future__ import annotations

import subprocess
import sys

import matplotlib
import numpy as np
import pytest
from matplotlib.colors import to_rgb

from lesson_code import plots
from lesson_code.plots.colors import luminance
from lesson_code.plots.matrices import draw_matrix
from lesson_code.plots.style import drawing, new_figure

N = np.arange(1, 30)


def example_curves():
    lines = {"squares": N**2, "nearly squares": N**2 + 1, "constant": np.full(N.shape, 5)}
    return plots.curves(N, lines, xlabel="N", ylabel="numbers", marks=[(10, "ten")])


def contrast(a, b) -> float:
    high, low = sorted((luminance(to_rgb(a)), luminance(to_rgb(b))), reverse=True)
    return (high + 0.05) / (low + 0.05)


def test_settings_stay_as_they_were() -> None:
    before = dict(matplotlib.rcParams)
    example_curves()._repr_svg_()
    after = dict(matplotlib.rcParams)
    assert {key for key in before if before[key] != after[key]} == set()


def test_pyplot_is_not_loaded() -> None:
    script = "import sys, lesson_code.plots; sys.exit('matplotlib.pyplot' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0


def test_the_error_without_matplotlib_names_the_remedy() -> None:
    script = "import sys; sys.modules['matplotlib'] = None; import lesson_code.plots"
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert "lesson_code.plots needs matplotlib: pip install matplotlib" in result.stderr


def test_names_of_lines_do_not_cover_each_other() -> None:
    figure = example_curves()
    figure.canvas.draw()
    (axes,) = figure.axes
    labels = {line.get_label() for line in axes.get_lines()}
    boxes = [text.get_window_extent() for text in axes.texts if text.get_text() in labels]
    assert len(boxes) == 3
    heights = sorted((box.y0, box.y1) for box in boxes)
    for (_, top), (bottom, _) in zip(heights, heights[1:], strict=False):
        assert top <= bottom + 2  # points; letters fill less than their box


def test_a_line_that_ends_early_has_its_name_at_the_height_of_its_end() -> None:
    early = np.where(N < 10, N, np.nan)
    figure = plots.curves(N, {"early": early, "all": N}, xlabel="N", ylabel="numbers")
    (axes,) = figure.axes
    heights = {text.get_text(): text.get_position()[1] for text in axes.texts}
    ends = axes.transData.transform([(9, 9), (29, 29)])
    expected = axes.transAxes.inverted().transform(ends)[:, 1]
    np.testing.assert_allclose([heights["early"], heights["all"]], expected)


@pytest.mark.parametrize("sign", [1, -1])
def test_numbers_can_be_read_on_their_cells(sign: int) -> None:
    @drawing
    def matrix():
        figure, ((axes,),) = new_figure()
        draw_matrix(axes, sign * np.linspace(0, 1, 21).reshape(3, 7) - (sign < 0) * 1e-9)
        return axes

    axes = matrix()
    image = axes.images[0]
    assert len(axes.texts) == 21
    for text in axes.texts:
        j, i = text.get_position()
        cell = image.to_rgba(image.get_array()[int(i), int(j)])
        assert contrast(text.get_color(), cell[:3]) >= 3.9


def test_a_matrix_equation_draws_every_matrix_to_scale() -> None:
    figure = plots.matrix_equation(("A", np.ones((2, 3))), "+", ("B", np.ones((2, 6))))
    boxes = [axes.get_position() for axes in figure.axes if axes.images]
    assert boxes[1].width == pytest.approx(2 * boxes[0].width)
    assert boxes[1].height == pytest.approx(boxes[0].height)


def test_rows_and_columns_of_the_last_matrix_have_names() -> None:
    named = {"rows": ("red", "round"), "columns": ("a", "b", "c")}
    axes = plots.matrix_equation(("A", np.eye(2)), "=", ("B", np.ones((2, 3))), **named).axes[-1]
    at = {text.get_text(): text.get_position() for text in axes.texts}
    assert [at[name][1] for name in named["rows"]] == [0, 1]
    assert [at[name][0] for name in named["columns"]] == [0, 1, 2]
