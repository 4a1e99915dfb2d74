"""The texts that come with the package."""

import pytest

from lesson_code.data import texts


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder of texts in place of the package's own."""
    (tmp_path / "second.txt").write_bytes(b"One.\r\nTwo.\n")
    (tmp_path / "first.txt").write_bytes(b"A line.\n")
    (tmp_path / "__init__.py").write_text("")
    monkeypatch.setattr(texts, "files", lambda package: tmp_path)
    return tmp_path


def test_a_text_is_loaded(folder):
    assert texts.load("first") == "A line.\n"
    assert texts.load("second") == "One.\nTwo.\n"


@pytest.mark.parametrize("name", ["third", "first.txt", "", "../first", None, 3])
def test_unknown_names_are_refused(folder, name):
    with pytest.raises(ValueError, match=r"^name must be one of first, second, got "):
        texts.load(name)


def names():
    return sorted(file.name[:-4] for file in texts.files("lesson_code.data").glob("*.txt"))


@pytest.mark.parametrize("name", names())
def test_texts_are_plain(name):
    """One byte a character, so that the vocabulary is small and the same everywhere."""
    text = texts.load(name)
    assert len(text) > 1000
    assert set(text) - set(map(chr, range(32, 127))) == {"\n"}
    assert not any(line != line.rstrip() for line in text.split("\n"))
