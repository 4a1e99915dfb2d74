"""Measurements that took longer than a chapter may: made by the scripts in `benchmarks/`.

Each file is what one script wrote; the machine, the versions, the seed and the date stand in it.
Where runs can be added on another machine, "machine" is a list, and each row says which it was.
Beside them are the weights of models that such a script has trained.
"""

import datetime
import json
from importlib.resources import files
from pathlib import Path

import numpy as np

__all__ = ["earlier", "load", "load_weights", "save"]


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
    return json.loads(_find(name, ".json").read_text(encoding="utf-8"))


def load_weights(name: str) -> dict[str, np.ndarray]:
    """Read the weights of a model that a script has trained.

    They are plain arrays, in a file that holds nothing else: no code runs when it is read.

    Parameters
    ----------
    name : str
        Name of the file without its ending: the script's, and the model's.

    Returns
    -------
    dict
        An array for each parameter. A torch model of the same settings takes them by
        ``model.load_state_dict({key: torch.from_numpy(array) for key, array in ...items()})``.

    Raises
    ------
    ValueError
        If there are no such weights; the message lists those there are.

    Examples
    --------
    >>> load_weights("digits_linear")["value.weight"].dtype
    dtype('float32')
    """
    with _find(name, ".npz").open("rb") as file, np.load(file, allow_pickle=False) as arrays:
        return dict(arrays)


def _find(name, ending):
    folder = files(__name__)
    names = sorted(
        file.name.removesuffix(ending) for file in folder.iterdir() if file.name.endswith(ending)
    )
    if name not in names:
        raise ValueError(f"name must be one of {', '.join(names)}, got {name!r}.")
    return folder.joinpath(f"{name}{ending}")


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
    # Whoever stops the script meets a whole file: the old one or the new one.
    part = output.with_suffix(".part")
    part.write_text(json.dumps(origin | result, indent=1) + "\n", encoding="utf-8")
    part.replace(output)
    print(f"wrote {output}")


def earlier(output: Path, settings: dict, renew: str) -> dict:
    """What a script that goes on where it was stopped has written before.

    Parameters
    ----------
    output : path
        The script's file.
    settings : dict
        All that a row depends on. The file has to be of the same, but for the list of its seeds:
        each row says its own.
    renew : str
        The command that begins again.

    Returns
    -------
    dict
        All that the file holds; nothing if there is no file.

    Raises
    ------
    SystemExit
        If the file is from another version of the script.
    """
    if not output.exists():
        return {}
    found = json.loads(output.read_text(encoding="utf-8"))
    no_seeds = {"seeds": None}
    if found.get("settings", {}) | no_seeds != settings | no_seeds:
        raise SystemExit(f"{output} is from another version of this script. To renew it: {renew}")
    return found
