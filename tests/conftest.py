"""Options and fixtures that the tests share."""

from __future__ import annotations

import functools
import http.server
import itertools
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import yaml
from bs4 import BeautifulSoup
from filelock import FileLock
from jupyter_client.connect import LocalPortCache

from tools.browser import MISSING as NO_BROWSER
from tools.browser import find as find_browser

ROOT = Path(__file__).resolve().parent.parent


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("book")
    group.addoption("--quick", action="store_true", help="try what `make quick` does")
    group.addoption("--no-skips", action="store_true", help="fail when anything was skipped")
    group.addoption("--site", type=Path, help="try this built site, in place of building one")
    group.addoption(
        "--all-notebooks", action="store_true", help="try every notebook, not one of a kind"
    )


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    if "s" not in config.option.reportchars:  # the reasons of skipped tests are always listed
        config.option.reportchars += "s"
    if this := getattr(config, "workerinput", None):
        keep_ports_apart(int(this["workerid"].removeprefix("gw")), this["workercount"])


# What takes long is begun first, so that the processes of `pytest -n 2` end together: first the
# site, which one process builds while another one runs notebooks, last the many short doctests.
BEGIN = ("tests/test_site.py", "book/", "tests/")
# `--quick` is for a change in `lesson_code`. It leaves out the cells of notebooks, what needs a
# fixture named here, files that start kernels and other programs, and what is compiled. All else,
# such as a new file or folder, is in it.
FIXTURES_OF_THE_BOOK = {"browser", "build_book", "site_build", "tree"}
START_PROGRAMS = {
    *("test_benchmarks.py", "test_canaries.py", "test_colab.py", "test_exercises.py"),
    *("test_notebooks.py", "test_style.py"),
}


def is_quick(item: pytest.Item) -> bool:
    if item.path.suffix == ".ipynb" or item.path.name in START_PROGRAMS or "compile" in item.name:
        return False
    return FIXTURES_OF_THE_BOOK.isdisjoint(getattr(item, "fixturenames", ()))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: [not item.nodeid.startswith(place) for place in BEGIN])
    if config.option.quick:
        config.hook.pytest_deselected(items=[item for item in items if not is_quick(item)])
        items[:] = filter(is_quick, items)


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    passed = session.exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED)
    if passed and session.config.option.no_skips and _skipped(session.config):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


@pytest.hookimpl(trylast=True)
def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    count = _skipped(terminalreporter.config)
    if count and terminalreporter.config.option.no_skips:
        terminalreporter.write_line(f"FAILED: {count} skipped, --no-skips allows none", red=True)


def _skipped(config: pytest.Config) -> int:
    # With `pytest -n 2` the process that reports counts for all; the workers have no reporter.
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    return len(reporter.stats.get("skipped", [])) if reporter else 0


def keep_ports_apart(worker: int, workers: int) -> None:
    """Let the processes of `pytest -n 2` start kernels at the same time.

    A kernel gets its ports from the process that starts it and opens them a moment later, so two
    processes could hand out the same port. Each takes of those that are free only its own share.
    Systems may give odd ports alone or even ones alone.
    """
    find_any = LocalPortCache.find_available_port

    def find_own(cache: LocalPortCache, ip: str) -> int:
        ports = (find_any(cache, ip) for _ in itertools.count())
        return next(port for port in ports if port // 2 % workers == worker)

    LocalPortCache.find_available_port = find_own


@pytest.fixture(autouse=True)
def print_options_as_before() -> Iterator[None]:
    """Some tests run a notebook's cells here, which round what they print; doctests may follow."""
    with np.printoptions():
        yield
    if torch := sys.modules.get("torch"):
        torch.set_printoptions(profile="default")


def build_book(source: Path, output: Path, **execute: object) -> subprocess.CompletedProcess[str]:
    """Build a book as `make book` does, with other `execute` settings, to `output/_build/html`."""
    config = yaml.safe_load((source / "_config.yml").read_text(encoding="utf-8"))
    config["execute"] |= execute
    config["sphinx"]["local_extensions"] = {"tools": str(source)}
    output.mkdir(parents=True, exist_ok=True)
    changed = output / "config.yml"
    changed.write_text(yaml.safe_dump(config, sort_keys=False), encoding="utf-8")
    program = Path(sys.executable).with_name("jupyter-book")
    strict = ["-W", "-n", "--keep-going"]
    return subprocess.run(
        [program, "build", source, *strict, "--path-output", output, "--config", changed],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )


def small_book(folder: Path, *pages: Path) -> Path:
    """Make a book of a few pages in `folder/tree`, with the project's own configuration."""
    book = folder / "tree"
    shutil.copytree(ROOT / "book" / "_static", book / "book" / "_static")
    shutil.copytree(ROOT / "tools", book / "tools")
    for name in ("_config.yml", "Makefile", "pyproject.toml", "requirements.txt"):
        shutil.copy(ROOT / name, book)
    for page in (ROOT / "book" / "references.bib", *pages):
        shutil.copy(page, book / "book")
    bibliography = "# Bibliography\n\n```{bibliography}\n```\n"
    (book / "book" / "bibliography.md").write_text(bibliography)
    root, *chapters = [f"book/{page.stem}" for page in pages] + ["book/bibliography"]
    contents = {"format": "jb-book", "root": root, "chapters": [{"file": x} for x in chapters]}
    (book / "_toc.yml").write_text(yaml.safe_dump(contents))
    return book


def copy_tree(destination: Path) -> None:
    """Copy what a commit of the working tree would hold."""
    if not (shutil.which("git") and (ROOT / ".git").exists()):
        pytest.skip("this is no git clone, or git is missing: install git and clone the repository")
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_file():  # a deleted file stays listed until that is committed
            (destination / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, destination / name)


@pytest.fixture(scope="session", name="build_book")
def build_book_fixture() -> Callable[..., subprocess.CompletedProcess[str]]:
    return build_book


@pytest.fixture(scope="session")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the working tree. Tests read it; those that write copy it once more."""
    destination = tmp_path_factory.mktemp("tree")
    copy_tree(destination)
    return destination


@pytest.fixture(scope="session")
def site_build(
    tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config
) -> tuple[Path, str]:
    """The whole site, built strictly from the outputs in the notebooks, and what went wrong."""
    if pytestconfig.option.site:
        return pytestconfig.option.site.resolve(), ""
    shared = tmp_path_factory.getbasetemp()
    if hasattr(pytestconfig, "workerinput"):  # the workers of `pytest -n 2` share one build
        shared = shared.parent
    output, trouble = shared / "site", shared / "site.txt"
    with FileLock(shared / "site.lock"):
        if not trouble.exists():
            result = build_book(ROOT, output, execute_notebooks="off")
            trouble.write_text(result.stdout if result.returncode else "", encoding="utf-8")
    return output / "_build" / "html", trouble.read_text(encoding="utf-8")


@functools.cache
def soup(path: Path) -> BeautifulSoup:
    """A page to look into. It is read once in a process: look, but do not change it."""
    return BeautifulSoup(path.read_text(encoding="utf-8"), "html.parser")


@pytest.fixture(scope="session")
def site(site_build: tuple[Path, str]) -> Path:
    folder, trouble = site_build
    if trouble:
        pytest.fail("the book does not build: test_the_book_builds says why", pytrace=False)
    return folder


class QuietHandler(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture(scope="session")
def serve() -> Iterator[Callable[..., str]]:
    """A function that serves a folder on this machine and returns its address."""
    servers = []

    def start(folder: Path, handler: type = QuietHandler) -> str:
        in_folder = functools.partial(handler, directory=folder)
        server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), in_folder)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        servers.append(server)
        return f"http://127.0.0.1:{server.server_port}"

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


# Closed with the module that uses it: Playwright's event loop must not run beside those with which
# the same process runs notebooks.
@pytest.fixture(scope="module")
def browser() -> Iterator:
    sync_api = pytest.importorskip(
        "playwright.sync_api", reason="Playwright is missing: install requirements.txt"
    )
    path = find_browser()
    if path is None:
        pytest.skip(NO_BROWSER)
    arguments = [
        "--no-sandbox",
        "--disable-gpu",
        "--disable-quic",
        "--disable-frame-rate-limit",  # tests wait for frames
        "--no-first-run",
        "--disable-background-networking",
        "--disable-component-update",
        "--disable-sync",
        # No other host can be reached, whatever a page asks for.
        "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
    ]
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=arguments)
        yield browser
        browser.close()
