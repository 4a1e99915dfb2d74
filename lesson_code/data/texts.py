"""Texts in the public domain, on which the small language models of the chapters are trained."""

from importlib.resources import files

__all__ = ["load"]


def load(name: str) -> str:
    """Read a text.

    Parameters
    ----------
    name : str
        Name of the file without its ending: "alice", the first chapter of Lewis Carroll's *Alice's
        Adventures in Wonderland* (1865).

    Returns
    -------
    str
        The text, in plain ASCII, with line breaks of a single character.

    Raises
    ------
    ValueError
        If there is no such text; the message lists those there are.

    Examples
    --------
    >>> len(set(load("alice"))) < 70  # few different characters
    True
    """
    folder = files(__package__)
    names = sorted(
        file.name.removesuffix(".txt") for file in folder.iterdir() if file.name.endswith(".txt")
    )
    if name not in names:
        raise ValueError(f"name must be one of {', '.join(names)}, got {name!r}.")
    return folder.joinpath(f"{name}.txt").read_text(encoding="utf-8")
