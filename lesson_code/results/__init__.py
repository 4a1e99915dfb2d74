"""Measurements that took longer than a chapter may: made by the scripts in `benchmarks/`.

Each file is what one script wrote on one machine; the machine, the versions, the seed and the date
stand in it.
"""

import datetime
import json
from importlib.resources import files
from pathlib import Path

__all__ = ["load", "save"]


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


def save(name: str, result: dict, *, device: str = "cpu", output: Path | None = None) -> None:
    """Write a measurement, with the machine and the date.

    Parameters
    ----------
    name : str
        Name of the script that measured.
    result : dict
        What was measured, the seed, and the rows.
    device : str
        Where it was measured; one other than "cpu" becomes part of the file's name.
    output : path, optional
        Another file than the one beside this module.
    """
    from lesson_code import measure

    suffix = "" if device == "cpu" else f"_{device}"
    output = output or Path(__file__).with_name(f"{name}{suffix}.json")
    origin = {"machine": measure.machine(device), "date": datetime.date.today().isoformat()}
    output.write_text(json.dumps(origin | result, indent=1) + "\n", encoding="utf-8")
    print(f"wrote {output}")
