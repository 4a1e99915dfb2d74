"""Measurements that took longer than a chapter may: made by the scripts in `benchmarks/`.

Each file is what one script wrote on one machine; the machine, the versions, the seed and the date
stand in it.
"""

import json
from importlib.resources import files

__all__ = ["load"]


def load(name: str) -> dict:
    """Read a committed measurement.

    Parameters
    ----------
    name : str
        Name of the file without its ending, which is also that of the script.

    Raises
    ------
    ValueError
        If there is no such measurement; the message lists those there are.

    Examples
    --------
    >>> load("causal")["seed"]
    0
    """
    folder = files(__name__)
    names = sorted(
        file.name.removesuffix(".json") for file in folder.iterdir() if file.name.endswith(".json")
    )
    if name not in names:
        raise ValueError(f"name must be one of {', '.join(names)}, got {name!r}.")
    return json.loads(folder.joinpath(f"{name}.json").read_text(encoding="utf-8"))
