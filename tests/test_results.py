"""The weights that come with the package."""

import numpy as np
import pytest

from lesson_code import results


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder of weights in place of the package's own."""
    np.savez(tmp_path / "second.npz", **{"a.weight": np.arange(3.0), "b": np.float32(2)})
    np.savez(tmp_path / "first.npz", a=np.zeros(1))
    (tmp_path / "third.json").write_text("{}")
    monkeypatch.setattr(results, "files", lambda package: tmp_path)
    return tmp_path


def test_weights_are_arrays_by_name(folder):
    weights = results.load_weights("second")
    assert list(weights) == ["a.weight", "b"]
    assert np.array_equal(weights["a.weight"], np.arange(3.0))
    assert weights["b"] == 2 and weights["b"].dtype == np.float32


@pytest.mark.parametrize("name", ["third", "first.npz", "", "../first", None, 3])
def test_unknown_weights_are_refused(folder, name):
    with pytest.raises(ValueError, match=r"^name must be one of first, second, got "):
        results.load_weights(name)


def test_no_code_of_a_file_runs(folder):
    """A pickled object could run anything."""

    class Loud:
        def __reduce__(self):
            return print, ("run",)

    np.savez(folder / "first.npz", a=np.array([Loud()], dtype=object))
    with pytest.raises(ValueError, match="allow_pickle"):
        results.load_weights("first")


def test_the_packages_own_are_small():
    files = list(results.files("lesson_code.results").glob("*.npz"))
    assert sum(file.stat().st_size for file in files) < 2.5e6
