"""For the whole run: options, and the check that nothing is left behind."""

from __future__ import annotations

import os
import random
import shutil
import signal
import tempfile
from collections.abc import Generator, Iterator
from pathlib import Path

import hypothesis
import pytest
from _pytest.mark.expression import Expression

from tests import leftovers, promises
from tests.jitter import penstock_jitter

#: The folders of each group of tests, which run beside each other: most of them wait, for programs or for a server.
GROUPS = {
    "contract": {"conformance"},
    "kills": {"crash", "torture"},
    "programs": {"cli"},
    "servers": {"broker", "calls", "security"},
    "clusters": {"bridge", "nats", "replica"},
    "gateways": {"docs", "gateway", "monitor", "recording"},
    "records": {"history", "journal", "observe", "replay"},
}

#: The folders that have tests with Spark.
SPARK = {"cli", "crash", "docs", "spark", "stress"}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--kills", type=int, default=None, help="how many kills each crash test does (default: its own)")
    parser.addoption("--flips", type=int, default=None, help="how many bits the test of flipped bits turns over")
    parser.addoption("--seed", type=int, default=None, help="seed of every random test, to replay a failure")
    parser.addoption("--shuffle", action="store_true", help="run the tests in random order, by --seed when given")


def pytest_configure(config: pytest.Config) -> None:
    os.environ["PENSTOCK_LEAK_WARNINGS"] = "1"
    # How long one example takes says nothing on a busy machine.
    slow = [hypothesis.HealthCheck.too_slow]
    hypothesis.settings.register_profile("any machine", deadline=None, suppress_health_check=slow)
    hypothesis.settings.load_profile("any machine")
    # A run in the background of a shell has Ctrl-C ignored, and programs started from here would inherit that.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:  # by nohup
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
    # Spark's JVMs live for seconds here: the first compiler is enough for them, and one thread collects their garbage.
    os.environ.setdefault("SPARK_SUBMIT_OPTS", "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC")
    # A directory of our own, so that what is left over is ours and other programs on the machine are not disturbed.
    parent = "/dev/shm" if os.access("/dev/shm", os.W_OK) else tempfile.gettempdir()
    os.environ["PENSTOCK_SHM_DIR"] = tempfile.mkdtemp(prefix=f"penstock-test-{os.getpid()}-", dir=parent)
    os.environ[leftovers.MARK] = Path(os.environ["PENSTOCK_SHM_DIR"]).name
    # Processes that tests kill are no deaths of the user's.
    os.environ["XDG_STATE_HOME"] = tempfile.mkdtemp(prefix=f"penstock-test-state-{os.getpid()}-")
    if os.environ.get(penstock_jitter.VARIABLE):
        penstock_jitter.disturb_tests()


def pytest_runtest_setup(item: pytest.Item) -> None:
    if os.environ.get(penstock_jitter.VARIABLE):
        penstock_jitter.begin_test(item.nodeid)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """A folder of which ``-m`` chooses nothing is not imported: the suite is several processes."""
    chosen: str = config.getoption("-m")
    folder = collection_path.name
    if not chosen or collection_path.parent != Path(__file__).parent or not collection_path.is_dir():
        return None
    marks = {group for group, folders in GROUPS.items() if folder in folders}
    possible = [marks, marks | {"torture"}]
    if folder in SPARK:
        possible += [marks | {"spark"}, marks | {"spark", "jvm"}]
    expression = Expression.compile(chosen)
    if any(expression.evaluate(lambda name, /, marks=marks, **_: name in marks) for marks in possible):
        return None
    return True


@pytest.hookimpl(tryfirst=True)  # before markers are chosen from
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        folder = item.nodeid.split("/")[1]
        for group, folders in GROUPS.items():
            if folder in folders:
                item.add_marker(group)
        if item.get_closest_marker("spark") and folder not in SPARK:
            raise pytest.UsageError(f"{item.nodeid} is a test with Spark: name its folder in {__file__}")
    if config.getoption("--shuffle"):
        given: int | None = config.getoption("--seed")
        chosen = int.from_bytes(os.urandom(4), "little") if given is None else given
        print(f"in random order: --shuffle --seed {chosen}")
        random.Random(chosen).shuffle(items)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    return promises.checked((yield))


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    return promises.checked((yield))


def pytest_unconfigure(config: pytest.Config) -> None:
    leftovers.end_processes()  # of an interrupted test: otherwise they would write into the folders again
    for folder in (os.environ["PENSTOCK_SHM_DIR"], os.environ["XDG_STATE_HOME"]):
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def kills(request: pytest.FixtureRequest) -> int | None:
    """The --kills option: None leaves the number to the test."""
    given: int | None = request.config.getoption("--kills")
    return given


@pytest.fixture
def seed(request: pytest.FixtureRequest) -> int:
    """A fresh seed, printed with a failure, or the one given by --seed."""
    given: int | None = request.config.getoption("--seed")
    chosen = int.from_bytes(os.urandom(4), "little") if given is None else given
    print(f"seed: {chosen} (replay with --seed {chosen})")
    return chosen


@pytest.fixture(scope="session", autouse=True)
def nothing_left_behind(request: pytest.FixtureRequest) -> Iterator[None]:
    before = leftovers.look()
    yield
    if request.session.exitstatus == pytest.ExitCode.INTERRUPTED:
        return  # what the interrupted test holds is in its traceback, and is removed when the run ends
    left = leftovers.look(before, settle_s=10)
    assert not left, "left behind by the tests:\n" + "\n".join(sorted(left))
