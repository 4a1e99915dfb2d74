"""The images that chapters are trained on."""

import sys

import numpy as np
import pytest

from lesson_code.data import digits


@pytest.fixture(scope="module")
def images():
    pytest.importorskip("sklearn")
    return digits.load()


def test_pixels_are_integers_of_17_levels(images):
    for part, count in zip(images, (1500, 297), strict=True):
        assert part.shape == (count, 64) and part.dtype == np.int64
        assert part.min() == 0 and part.max() == 16
        assert part.flags.owndata or part.base.flags.owndata


def test_the_two_parts_are_all_digits_and_have_no_image_in_common(images):
    data = pytest.importorskip("sklearn.datasets").load_digits().data
    both = [tuple(image) for part in images for image in part]
    assert sorted(both) == sorted(tuple(image) for image in data)
    train, held_out = (set(map(bytes, part)) for part in images)
    assert not train & held_out


def test_every_digit_is_as_frequent_in_both_parts(images):
    sets = pytest.importorskip("sklearn.datasets").load_digits()
    which = {tuple(image): digit for image, digit in zip(sets.data, sets.target, strict=True)}
    for part in images:
        count = np.bincount([which[tuple(image)] for image in part], minlength=10)
        assert np.all(np.abs(count / len(part) - 0.1) < 0.05)


def test_the_order_is_always_the_same(images):
    """The weights that come with the package have not seen the images held out."""
    train, held_out = images
    again = digits.load()
    assert np.array_equal(train, again[0]) and np.array_equal(held_out, again[1])
    weights = np.arange(1, 65)
    assert [int(image @ weights) for image in train[:3]] == [9102, 10429, 10969]
    assert [int(image @ weights) for image in held_out[-3:]] == [13982, 9881, 9585]


def test_rows_come_one_after_the_other(images):
    data = pytest.importorskip("sklearn.datasets").load_digits()
    square = {tuple(image.ravel()) for image in data.images}
    assert all(tuple(image) in square for image in images[1])


def test_without_scikit_learn_the_call_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(ImportError, match=r"digits.load\(\) needs scikit-learn: pip install"):
        digits.load()
