"""Ranks for tests: a program that forks processes, each of them a rank of a process group.

The tests start it once, as importing torch takes seconds and a fork milliseconds, and keep groups
for as long as they serve. They name a function of their own module, which the program imports; the
module's `warm_up` runs once, so that no rank has to import again what is imported late.
Nothing here waits without a limit, and whatever is started ends with the program that started it.
"""

import contextlib
import importlib.util
import itertools
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import time
from datetime import timedelta
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LIMIT = 300.0  # seconds for anything that is asked for


class Ranks:
    """The program, and groups of ranks, as the tests see them."""

    def __init__(self, module):
        self.connection, theirs = Pipe()
        self.process = subprocess.Popen(
            [sys.executable, __file__, str(theirs.fileno()), module],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            cwd=ROOT,
            env=os.environ | ({"GLOO_SOCKET_IFNAME": "lo"} if sys.platform == "linux" else {}),
        )
        theirs.close()

    def __call__(self, ranks, function, *args, each=()):
        """What each rank returns for function(rank, *args, *each[rank]), or an Exception.

        The group is kept for the next call, until a rank fails. A rank that ends without an answer
        gives None.
        """
        return self._ask([(ranks, function, args, each)], None)[0]

    def at_once(self, calls, timeout=20.0):
        """The answers to several calls (ranks, function, *args), each of a new group."""
        return self._ask([(ranks, function, args, ()) for ranks, function, *args in calls], timeout)

    def _ask(self, calls, timeout):
        self.connection.send((calls, timeout))
        if not self.connection.poll(LIMIT + 10):
            self.close()
            raise TimeoutError(f"the ranks gave no answer to {calls}.")
        return self.connection.recv()

    def close(self):
        self.connection.close()  # upon which the program ends its ranks, and itself
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def serve(connection, module):
    """Fork ranks, pass on what they are asked and what they answer, until nobody asks."""
    kept, names = {}, itertools.count()
    with tempfile.TemporaryDirectory() as folder, contextlib.suppress(EOFError, OSError):
        while True:
            calls, timeout = connection.recv()
            groups = []
            for ranks, *_ in calls:
                group = kept.pop(ranks, None) if timeout is None else None
                if group is None:
                    group, file = [], f"{folder}/{next(names)}"
                    known = [other for pairs in (*kept.values(), *groups) for other in pairs]
                    for rank in range(ranks):
                        held = [connection, *(ours for _, ours in known + group)]
                        options = rank, ranks, file, timeout or 20.0, module, held
                        group.append(start(*options))
                groups.append(group)
            answers = ask(groups, calls)
            for group, found in zip(groups, answers, strict=True):
                failed = any(x is None or isinstance(x, RuntimeError) for x in found)
                if failed or timeout is not None:
                    end(group)
                else:
                    kept[len(group)] = group
            connection.send(answers)
    for group in kept.values():
        end(group)


def start(rank, ranks, file, timeout, module, held):
    ours, theirs = Pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid:
        theirs.close()
        return pid, ours
    for connection in (ours, *held):  # a rank sees the end of who asks it when no other holds them
        connection.close()
    with contextlib.suppress(BaseException):
        work(theirs, rank, ranks, file, timeout, module)
    os._exit(0)


def ask(groups, calls):
    """Ask all ranks of all groups, and wait for their answers: a list for each group."""
    answers, waiting = [[None] * len(group) for group in groups], {}
    for i, (group, (_, function, args, each)) in enumerate(zip(groups, calls, strict=True)):
        for rank, (_, connection) in enumerate(group):
            with contextlib.suppress(OSError):  # it has ended
                connection.send((function, (*args, *(each[rank] if each else ()))))
                waiting[connection] = i, rank
    limit = time.monotonic() + LIMIT
    while waiting:
        ready = wait(list(waiting), max(0, limit - time.monotonic()))
        if not ready:
            break
        for connection in ready:
            i, rank = waiting.pop(connection)
            with contextlib.suppress(EOFError, OSError):
                answers[i][rank] = connection.recv()
    return answers


def end(group):
    for pid, connection in group:
        connection.close()
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def work(connection, rank, ranks, file, timeout, module):
    """Be one rank: answer calls until there is nobody to answer."""
    import torch.distributed as dist

    options = {"rank": rank, "world_size": ranks, "timeout": timedelta(seconds=timeout)}
    dist.init_process_group("gloo", init_method=f"file://{file}", **options)
    while True:
        function, args = connection.recv()
        try:
            answer = getattr(module, function)(rank, *args)
            pickle.dumps(answer)
        except Exception as error:
            answer = type(error)(str(error)) if type(error).__module__ == "builtins" else error
        connection.send(answer)


def main(descriptor, path):
    import torch

    sys.path.insert(0, str(ROOT))
    torch.set_num_threads(1)
    specification = importlib.util.spec_from_file_location("across_ranks", path)
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    module.warm_up()
    serve(Connection(int(descriptor)), module)


if __name__ == "__main__":
    main(*sys.argv[1:])
