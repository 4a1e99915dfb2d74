"""Kernels for notebooks that find torch imported: 29 notebooks would spend 5 seconds each on that.

Every kernel is a process of its own, forked from one that has imported what most chapters import
and has done nothing else. tests/test_colab.py starts kernels as readers do.
"""

from __future__ import annotations

import functools
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from multiprocessing.context import ForkServerContext, ForkServerProcess

from jupyter_client.provisioning import local_provisioner

# An optimizer imports torch._dynamo.
IMPORTED = ["ipykernel.kernelapp", "lesson_code.checks", "lesson_code.plots", "lesson_code.torch"]
IMPORTED += ["lesson_code.results", "lesson_code.cupy.emulator", "torch._dynamo"]


def be_a_kernel(file: str, cwd: str, env: dict[str, str]) -> None:
    os.setsid()
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    nowhere = os.open(os.devnull, os.O_RDWR)
    for stream in range(3):
        os.dup2(nowhere, stream)
    from ipykernel.kernelapp import launch_new_instance

    parent = f"--IPKernelApp.parent_handle={os.getppid()}"  # the kernel ends when it does
    launch_new_instance(argv=["-f", file, parent])


class Kernel:
    """What `subprocess.Popen` offers jupyter_client."""

    stdin = stdout = stderr = None

    def __init__(self, process: ForkServerProcess) -> None:
        self._process, self.pid = process, process.pid
        while os.getpgid(self.pid) != self.pid:  # before, a signal to its group would reach pytest
            time.sleep(0.01)

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self) -> int:
        self._process.join()
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)


@functools.cache
def fork_server() -> ForkServerContext:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(IMPORTED)
    return context


def install() -> None:
    """Let nbval and nbclient fork kernels, on Linux: elsewhere a process with torch may not."""
    launch = local_provisioner.launch_kernel

    def fork(cmd: list[str], **options: object) -> subprocess.Popen | Kernel:
        if cmd[0] != sys.executable or "ipykernel_launcher" not in cmd:
            return launch(cmd, **options)
        arguments = cmd[-1], str(options["cwd"]), dict(options["env"])
        process = fork_server().Process(target=be_a_kernel, args=arguments, daemon=True)
        process.start()
        return Kernel(process)

    if sys.platform == "linux":
        local_provisioner.launch_kernel = fork
