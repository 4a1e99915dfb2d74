"""What the scripts that train models have in common: step sizes, seeds, saved rows and options.

A script says what is trained, as an `Experiment`: settings on which all results depend, trials by
which step sizes are chosen, runs with the step sizes chosen, and a function that makes one run. The
rest is here:

    script.py                 does what is missing, and may be stopped anywhere
    script.py --seeds 0 1     makes the runs of these seeds only
    script.py --renew         begins again, whatever the file holds
    script.py --output FILE   writes another file
    script.py --quick         takes a few steps for each run: only a try, for another file

Every run is saved when it ends, with all of its numbers and the seconds of the processor that it
took, and a run that the file has is not repeated. So a file may be made on several machines:
"machine" lists them in the order seen, and that of a row is a number in this list. A file with
other settings is refused, but more seeds may be asked for at any time. Before it begins, a script
says how long it will take: from the seconds of similar runs in the file, or from three steps of
each model.
"""

import argparse
import contextlib
import dataclasses
import math
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import nn

from lesson_code import measure, results

# --- Training ------------------------------------------------------------------------------------


class Estimate:
    """While it is in use, training ends after three steps, and the time of the others is added."""

    in_use = None

    def __enter__(self):
        Estimate.in_use, self.start, self.seconds = self, time.process_time(), 0.0
        return self

    def __exit__(self, *_):
        Estimate.in_use = None
        self.seconds += time.process_time() - self.start


def cosine(i, steps):
    """The share of the step size at step i: up for a tenth of the steps, then down to 0."""
    return min(1, 10 * (i + 1) / steps) * (1 + math.cos(math.pi * i / steps)) / 2


def linear(i, steps):
    """Up for 50 steps, and down to 0 all the time."""
    return min(1, (i + 1) / 50) * (1 - i / steps)


def train(
    model,
    batch_loss,
    steps,
    rate,
    *,
    schedule=cosine,
    betas=(0.9, 0.98),
    weight_decay=0.0,
    clip=1.0,
    after=None,
):
    """Take steps of Adam down `batch_loss(i)`, and return the losses.

    Parameters that need no gradient stay as they are. `after(i)` is called when step i is done.
    """
    optimizer = torch.optim.AdamW(model.parameters(), betas=betas, weight_decay=weight_decay)
    losses = []
    for i in range(steps):
        if Estimate.in_use and i == 1:  # the first step is slower than the others
            second = time.process_time()
        if Estimate.in_use and i == 3:
            Estimate.in_use.seconds += (time.process_time() - second) / 2 * (steps - 3)
            break
        optimizer.param_groups[0]["lr"] = rate * schedule(i, steps)
        loss = batch_loss(i)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        losses.append(loss.item())
        if after:
            after(i)
    return losses


def best_rate(rows, loss, **trial):
    """The step size with the smallest sum of losses in the trials: the rows with these entries.

    Only step sizes are compared that were tried as often as any. It is 0 where none was tried.
    """
    tried = {}
    for row in rows:
        if row | trial == row:
            tried.setdefault(row["rate"], []).append(loss(row))
    most = max(map(len, tried.values()), default=0)
    rates = (rate for rate, found in tried.items() if len(found) == most)
    return min(rates, key=lambda rate: sum(tried[rate]), default=0.0)


# --- Experiments ---------------------------------------------------------------------------------


@dataclasses.dataclass
class Experiment:
    """What a script trains.

    A job is a tuple with an entry for each of `fields`, among them "seed" and what was chosen, such
    as the step size, "rate". `trials` and `runs` list jobs; `run` makes one, and returns the
    numbers that go into its row beside them, and "weights" where these are to be kept.
    """

    name: str  # of the script, and of its file
    what: str  # the file holds, in a line
    settings: dict  # all that a result depends on; a change of anything else raises the version
    quick: dict  # settings for a try
    fields: tuple  # names of a job's entries
    trials: Callable  # settings -> jobs, by which step sizes are chosen
    runs: Callable  # rows, settings -> the other jobs, at the best step sizes of the rows' trials
    run: Callable  # *job, settings -> dict
    shown: Callable  # row -> a few words
    kept: tuple = ()  # first entries of the jobs whose weights are kept beside the file
    more: tuple = ()  # entries of the file beside its rows
    finish: Callable | None = None  # rows, settings, output -> these, when all is done

    @property
    def renew(self):
        """The command that makes the script begin again."""
        return f"python benchmarks/{self.name}.py --renew"

    def job_of(self, row):
        entries = (row[field] for field in self.fields)
        return tuple(tuple(x) if isinstance(x, list) else x for x in entries)

    def seed_of(self, job):
        return job[self.fields.index("seed")]

    def all_jobs(self, rows, settings):
        """All jobs, trials first. Until these are done, the step sizes of others may be wrong."""
        trials = self.trials(settings)
        return trials + [job for job in self.runs(rows, settings) if job not in trials]

    def weights_file(self, job, settings, output):
        """Where the weights of a run are kept: those of the first seed."""
        if job[0] in self.kept and self.seed_of(job) == settings["seeds"][0]:
            return output.with_name(f"{output.stem}_{job[0]}.npz")
        return None

    def make_row(self, job, settings):
        """Make a run: its row, and its weights."""
        torch.manual_seed(self.seed_of(job))
        start = time.process_time()
        found = self.run(*job, settings)
        seconds = time.process_time() - start
        weights = found.pop("weights", None)
        return dict(zip(self.fields, job, strict=True)) | found | {"seconds": seconds}, weights

    def main(self):
        """Do what the command line says."""
        parser = argparse.ArgumentParser(description=self.what)
        parser.add_argument("--seeds", type=int, nargs="+")
        parser.add_argument("--quick", action="store_true")
        parser.add_argument("--renew", action="store_true")
        parser.add_argument("--output", type=Path)
        options = parser.parse_args()
        if options.quick and not options.output:
            parser.error("--quick needs an --output, so that no result is lost")
        settings = self.settings | self.quick if options.quick else self.settings
        output = options.output or Path(results.__file__).with_name(f"{self.name}.json")
        torch.set_num_threads(1)
        earlier = {} if options.renew else results.earlier(output, settings, self.renew)
        self.do(settings, earlier, output, options.seeds, estimate=not options.quick)
        print(f"wrote {output}")

    def do(self, settings, earlier, output, seeds=None, *, estimate=True):
        """Make the runs that are missing in an earlier file, and save each."""
        rows = [row for row in earlier.get("rows", []) if self.is_whole(row, settings, output)]
        entries = {name: earlier.get(name, {}) for name in self.more}
        machines, here = list(earlier.get("machine", [])), measure.machine()
        trials = self.trials(settings)

        def missing():
            done = {self.job_of(row) for row in rows}
            return [
                job
                for job in self.all_jobs(rows, settings)
                if job not in done and (not seeds or job in trials or self.seed_of(job) in seeds)
            ]

        def save():
            head = {"machine": machines, "what": self.what, "seed": settings["seeds"]}
            head |= {"settings": settings, "renew": self.renew}
            with contextlib.redirect_stdout(None):
                results.save(self.name, head | entries | {"rows": rows}, output=output)

        clock = Clock(self, rows, settings)
        left = missing()
        takes = f", about {clock.minutes(left):.0f} minutes" if estimate else ""
        print(f"{len(rows)} runs done, {len(left)} left{takes}", flush=True)
        new = bool(left)
        if new and here not in machines:
            machines.append(here)
        while left:
            row, weights = self.make_row(left[0], settings)
            if file := self.weights_file(left[0], settings, output):
                np.savez_compressed(file, **{name: x.numpy() for name, x in weights.items()})
            rows.append(row | {"machine": machines.index(here)})
            place = {job: i for i, job in enumerate(self.all_jobs(rows, settings))}
            rows.sort(key=lambda row: place.get(self.job_of(row), len(place)))
            save()
            left = missing()
            job = ", ".join(str(x) for x in self.job_of(row))
            takes = f", {clock.minutes(left):.0f} min left" if estimate else ""
            took = f"({row['seconds']:.1f} s{takes})"
            print(bar(len(rows), len(rows) + len(left)), job, self.shown(row), took, flush=True)
        if self.finish and not seeds and (new or not all(entries.values())):
            entries |= self.finish(rows, settings, output)
            save()

    def is_whole(self, row, settings, output):
        """Whether the weights of a row are there, if they are to be kept."""
        file = self.weights_file(self.job_of(row), settings, output)
        return file is None or file.exists()


class Clock:
    """How long runs take: as long as those alike, which differ in their rate and seed alone."""

    def __init__(self, experiment, rows, settings):
        self.experiment, self.rows, self.settings, self.tried = experiment, rows, settings, {}

    def alike(self, job):
        fields = zip(self.experiment.fields, job, strict=True)
        return tuple(x for field, x in fields if field not in ("rate", "seed"))

    def minutes(self, jobs):
        """Minutes of the processor for these jobs."""
        took = {}
        for row in self.rows:
            took.setdefault(self.alike(self.experiment.job_of(row)), []).append(row["seconds"])
        return sum(self.seconds(job, took.get(self.alike(job))) for job in jobs) / 60

    def seconds(self, job, took):
        if took:
            return sum(took) / len(took)
        kind = self.alike(job)
        if kind not in self.tried:
            with Estimate() as estimate:
                self.experiment.make_row(job, self.settings)
            self.tried[kind] = estimate.seconds
        return self.tried[kind]


def bar(done, total, width=20):
    filled = width * done // total
    return f"[{'#' * filled}{'.' * (width - filled)}] {done}/{total}"
