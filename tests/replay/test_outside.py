"""What modules use that a replay does not control: told with the line, or refused."""

from __future__ import annotations

import _thread
import datetime
import gc
import json
import os
import pickle
import random
import secrets
import signal
import socket
import subprocess
import sys
import time
import types
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock.errors import RefusedError
from penstock.journal import Entry, Journal
from penstock.replay import GatewayTarget, ProgramTarget, Report, Script, Target, replay

ROOT = Path(__file__).parents[2]
BEGIN_NS = 1_700_000_000_000_000_000
PROGRAM = """{before}
from penstock import clock
from penstock.bus import CallbackSubscriber, named_bus
out = named_bus("out").publisher()
def took(message):
    {use}
    out.publish(b"x")
bus = named_bus("speed")
bus.add(CallbackSubscriber(took, ids=(0,)))
"""
LINE = 6  # of ``use``
MODULE = """
import time
from time import monotonic
from penstock.gateway import Module
at = time.time()
class It(Module):
    born = time.time_ns()
    timer = monotonic
    def start(self):
        self.born = time.time()
    def receive(self, message):
        self.publish(b"x" if self.timer() >= 0 else b"y")
"""


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    gc.collect()  # the log of a test before, which is gone only now, may have kept a refused program
    with Journal(tmp_path / "rec") as journal:
        journal.commit(Entry("speed", b"{}", timestamp_ns=BEGIN_NS + n * 1_000_000) for n in range(3))
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(tmp_path)):
            del sys.modules[name]
    gc.collect()  # a program's subscribers are collected with its names


def replayed(folder: Path, target: Target) -> Report:
    with Script(folder / "rec") as script:
        sources = target.sources(script.topics, {}, ["speed=shm:/speed"] if isinstance(target, GatewayTarget) else None)
        return replay(target, script.inputs(sources), script.times_ns(sources))


def program(folder: Path, use: str, before: str = "") -> Report:
    (folder / "program.py").write_text(PROGRAM.format(use=use, before=before))
    return replayed(folder, ProgramTarget(folder / "program.py", ("bus:out",)))


def gateway(folder: Path, entrypoint: str, **args: object) -> GatewayTarget:
    modules = [{"name": "it", "loader": {"name": "python", "entrypoint": entrypoint}, "args": args}]
    file = folder / "gateway.json"
    file.write_text(json.dumps({"modules": modules, "links": [{"source": "shm:/speed", "sink": "it"}]}))
    return GatewayTarget(file)


CLOCK = (
    "time.time", "time.time_ns", "time.monotonic", "time.monotonic_ns", "time.perf_counter", "time.perf_counter_ns",
    "time.process_time", "time.thread_time", "time.localtime", "time.gmtime", "time.ctime", "time.asctime", "os.times",
)  # fmt: skip
USES = {
    **{f"{name}()": name for name in CLOCK},
    "time.clock_gettime(time.CLOCK_REALTIME)": "time.clock_gettime",
    "time.strftime('%Y')": "time.strftime",
    "datetime.datetime.now()": "datetime.now",
    "datetime.datetime.now(datetime.UTC)": "datetime.now",
    "datetime.datetime.utcnow()": "datetime.utcnow",
    "datetime.datetime.today()": "datetime.today",
    "datetime.date.today()": "date.today",
    "type('Own', (datetime.datetime,), {}).now()": "datetime.now",
    "gzip.compress(b'')": "time.time",  # the library on the module's behalf
    "os.urandom(4)": "os.urandom",
    "os.getrandom(4)": "os.getrandom",
    "secrets.token_hex()": "secrets or random.SystemRandom",
    "secrets.choice('ab')": "secrets or random.SystemRandom",
    "secrets.randbits(3)": "secrets.randbits or a generator of numpy.random without a seed",
    "random.SystemRandom().random()": "secrets or random.SystemRandom",
    "random.Random()": "random.Random without a seed",
    "random.seed()": "random.seed without a seed",
    "random.seed(None)": "random.seed without a seed",
    "uuid.uuid1(3, 4)": "uuid.uuid1",
    "uuid.uuid4()": "uuid.uuid4",
    "numpy.random.default_rng()": "a generator of numpy.random without a seed",
    "numpy.random.RandomState()": "a generator of numpy.random without a seed",
    "socket.getaddrinfo('127.0.0.1', 80)": "socket.getaddrinfo",
    "socket.gethostbyname('127.0.0.1')": "socket.gethostbyname",
    "socket.gethostbyname_ex('127.0.0.1')": "socket.gethostbyname",
    "socket.gethostbyaddr('127.0.0.1')": "socket.gethostbyaddr",
    "socket.getnameinfo(('127.0.0.1', 80), socket.NI_NUMERICHOST)": "socket.getnameinfo",
}
BEFORE = "import copy, datetime, gzip, logging, os, pickle, random, secrets, signal, socket, tempfile, time, uuid"


@pytest.mark.parametrize("use", USES)
def test_each_use_is_told_once_with_its_line(folder: Path, use: str) -> None:
    numpy = "numpy" in use
    if numpy:
        pytest.importorskip("numpy.random")
    report = program(folder, use, f"{BEFORE}, numpy" if numpy else BEFORE)
    told = f"{USES[use]} was used ({folder / 'program.py'}:{LINE}, in took): "
    assert [note.startswith(told) for note in report.notes] == [True], report.notes
    assert report.notes[0].endswith("; the output may differ the next time") and report.inputs == 3


@pytest.mark.parametrize(
    "use",
    [
        "clock.time(), clock.time_ns(), clock.monotonic()",
        "random.random(), random.Random(3).random(), random.seed(3), random.seed(a=3)",
        "time.localtime(3), time.gmtime(3), time.ctime(3), time.strftime('%Y', (2000, 1, 1, 0, 0, 0, 0, 1, 0))",
        "datetime.datetime(2000, 1, 1), datetime.datetime.fromtimestamp(3)",
        "copy.copy(random.Random(3)), copy.deepcopy([random.Random(3)])",
        "uuid.UUID(int=3), uuid.uuid5(uuid.NAMESPACE_DNS, 'x')",
        "logging.getLogger('x').warning('x')",
        "clock.call_later(0.1, print)",
    ],
)
def test_what_is_the_same_each_time_is_not_told(folder: Path, use: str) -> None:
    assert program(folder, use, BEFORE).notes == ()


def test_a_seed_for_numpy_is_not_told(folder: Path) -> None:
    pytest.importorskip("numpy.random")
    assert program(folder, "numpy.random.default_rng(3)", "import numpy").notes == ()


@pytest.mark.parametrize("used", ["time", "default_rng"])
def test_a_package_that_is_first_imported_in_a_replay(folder: Path, used: str) -> None:
    """Its own import is not told, its use by name is."""
    pytest.importorskip("numpy.random")
    (folder / "program.py").write_text(PROGRAM.format(
        before="from numpy.random import default_rng; from time import time", use=f"{used}()"))  # fmt: skip
    text = (
        "import json, sys\nfrom pathlib import Path\nfrom tests.replay.test_outside import *\n"
        "assert 'numpy.random' not in sys.modules\nfolder = Path(sys.argv[1])\n"
        "print(json.dumps(replayed(folder, ProgramTarget(folder / 'program.py', ('bus:out',))).notes))"
    )
    done = subprocess.run([sys.executable, "-c", text, folder], capture_output=True, text=True, check=False, cwd=ROOT)
    (note,) = json.loads(done.stdout or "[]") or [done.stderr]
    assert ("time.time was used (" if used == "time" else "numpy.random without a seed was used (") in note
    assert f"({folder / 'program.py'}:{LINE}, in took): " in note


@pytest.mark.parametrize("end", ["sys.exit(3)", "1 / 0", "pass"])
def test_a_process_that_a_module_forks_does_not_go_on_with_the_replay(folder: Path, end: str) -> None:
    """However it leaves the module: by sys.exit, by an error, by returning."""
    (folder / "forking.py").write_text(
        "import os, sys\nfrom pathlib import Path\nfrom penstock.gateway import Module\nclass It(Module):\n"
        "    def receive(self, message):\n        child = os.fork()\n"
        f"        if child == 0:\n            {end}\n"
        "        else:\n            os.waitpid(child, 0)\n"
        "        with (Path(__file__).parent / 'received').open('a') as file: file.write('it\\n')\n"
    )
    report = replayed(folder, gateway(folder, "forking:It"))
    assert report.inputs == 3 and report.succeeded and "os.fork was used" in report.notes[0]
    assert (folder / "received").read_text() == "it\n" * (6 if end == "pass" else 3)


def test_several_lines_are_told_together(folder: Path) -> None:
    (note,) = program(folder, "\n    ".join(["time.time()"] * 7), BEFORE).notes
    assert note.startswith("time.time was used (") and note.count(f"program.py:{LINE}") == 1
    assert "; and in 2 more lines): " in note and note.count("program.py:") == 5


def test_what_a_module_uses_when_it_is_imported_is_told_by_each_replay(folder: Path) -> None:
    (folder / "timed.py").write_text(MODULE)
    target = gateway(folder, "timed:It")
    for _ in range(2):
        notes = replayed(folder, target).notes
        file = folder / "timed.py"
        assert [note.partition(": ")[0] for note in notes] == [
            f"time.time was used ({file}:5, in <module>; {file}:10, in start)",
            f"time.time_ns was used ({file}:7, in It)",
            f"time.monotonic was used ({file}:12, in receive)",
        ]


def test_processes_and_look_ups_at_import_are_told(folder: Path) -> None:
    (folder / "reaching.py").write_text(
        "import socket, subprocess\nfrom penstock.gateway import Module\nsubprocess.run(['true'])\n"
        "socket.gethostbyname('127.0.0.1')\nclass It(Module):\n    def receive(self, message): pass\n"
    )
    told = replayed(folder, gateway(folder, "reaching:It")).notes
    for name, line in (("subprocess.Popen", 3), ("socket.gethostbyname", 4)):
        assert any(
            note.startswith(f"{name} was used ({folder / 'reaching.py'}:{line}, in <module>): ") for note in told
        )


@pytest.mark.parametrize(("name", "args"), [("Transform", {"assign": [".x = 3"]}), ("Printer", {})])
def test_ready_modules_use_nothing_that_is_told(folder: Path, name: str, args: dict[str, object]) -> None:
    assert replayed(folder, gateway(folder, f"penstock.gateway.modules:{name}", **args)).notes == ()


WAITS = """
import asyncio
from penstock.gateway import Module, Source
class It(Module):
    async def receive(self, message):
        async with asyncio.timeout(3):
            await asyncio.sleep(0.1)
        await asyncio.wait_for(asyncio.sleep(0.1), 3)
        self.publish(b"x")
class Ticks(Source):
    reaches_outside = False
    def run(self):
        import time
        while not self.stopping.wait(0.001):
            self.publish(b"x")
        time.time()
    def receive(self, message):
        pass
"""


def test_waits_in_recorded_time_are_not_told_and_sources_are_looked_at(folder: Path) -> None:
    (folder / "waiting.py").write_text(WAITS)
    assert replayed(folder, gateway(folder, "waiting:It")).notes == ()
    (note,) = replayed(folder, gateway(folder, "waiting:Ticks")).notes
    assert note.startswith(f"time.time was used ({folder / 'waiting.py'}:16, in run): ")


REPLACED: tuple[Callable[[], Any], ...] = (
    lambda: time.time, lambda: datetime.datetime.__dict__["now"], lambda: os.urandom, lambda: random.seed,
    lambda: random.Random.seed, lambda: random.SystemRandom.random, lambda: secrets.randbits, lambda: uuid.uuid4,
    lambda: signal.alarm, lambda: socket.getaddrinfo,
)  # fmt: skip


@pytest.mark.parametrize("use", ["pass", "raise KeyboardInterrupt", "signal.alarm(3)"])
def test_the_library_is_as_before_after_a_replay(folder: Path, use: str) -> None:
    before = [look() for look in REPLACED]
    try:
        program(folder, use, BEFORE)
    except (KeyboardInterrupt, RefusedError):
        assert use != "pass"
    else:
        assert use == "pass"
    assert [look() for look in REPLACED] == before and isinstance(time.time, types.BuiltinFunctionType)
    assert isinstance(datetime.datetime.now(), datetime.datetime)


STAND_INS = """
import copy, datetime, inspect, os, pickle, random, secrets, signal, time, uuid, _thread
FUNCTIONS = [time.time, time.monotonic, time.localtime, os.urandom, random.seed, secrets.randbits, uuid.uuid4,
             datetime.datetime.now, datetime.date.today, os.kill, os._exit, signal.alarm, _thread.start_new_thread]
class Holds:
    seed, bits, alarm = random.seed, secrets.randbits, signal.alarm
    def use(self):
        self.seed(4), self.alarm(0)
        return 0 <= self.bits(3) < 8
"""
USED = """
    given = pickle.dumps(FUNCTIONS)
    assert pickle.loads(given) == FUNCTIONS and copy.deepcopy(FUNCTIONS) == copy.copy(FUNCTIONS) == FUNCTIONS
    assert Holds().use()
    assert str(inspect.signature(datetime.datetime.now)) == "(tz=None)"
    assert str(inspect.signature(os.kill)) == "(pid, signal, /)"
    os.environ["GIVEN"] = given.hex()
    KEPT.append(FUNCTIONS)
"""


def test_what_stands_for_a_function_is_pickled_and_kept_in_classes_as_that_is(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GIVEN", "")
    kept = types.ModuleType("kept_of_replays")
    kept.KEPT = []  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, kept.__name__, kept)
    program(folder, USED.strip(), f"{STAND_INS}\nfrom {kept.__name__} import KEPT")
    before = [time.time, time.monotonic, time.localtime, os.urandom, random.seed, secrets.randbits, uuid.uuid4,
              datetime.datetime.now, datetime.date.today, os.kill, os._exit, signal.alarm,
              _thread.start_new_thread]  # fmt: skip
    assert pickle.loads(bytes.fromhex(os.environ["GIVEN"])) == before
    built_in = [one for one in kept.KEPT[0] if type(one).__name__ == "_StandIn"]  # type: ignore[attr-defined]
    assert len(built_in) == 10
    assert pickle.loads(pickle.dumps(built_in)) == [one for one in before if one.__name__ not in ("uuid4", "now", "today")]


@pytest.mark.parametrize("call", ["signal.alarm(1000)", "signal.setitimer(signal.ITIMER_VIRTUAL, 1000)"])
def test_interrupts_in_the_machines_time_are_refused(folder: Path, call: str) -> None:
    name = call.partition("(")[0]
    told = rf"{name}, called at .*program.py:{LINE}, in took, which .* cannot be replayed .*ordinal 1\)"
    with pytest.raises(RefusedError, match=told):
        program(folder, f"try: {call}\n    except Exception: pass", BEFORE)
    assert signal.getitimer(signal.ITIMER_VIRTUAL) == (0.0, 0.0)


def test_an_interrupt_may_be_taken_back(folder: Path) -> None:
    assert program(folder, "signal.setitimer(signal.ITIMER_VIRTUAL, 0)", BEFORE).notes == ()


SENDS = {
    "signal.pthread_kill": "signal.pthread_kill(threading.get_ident(), {})",
    "signal.pidfd_send_signal": """
    descriptor = os.pidfd_open(os.getpid())
    try:
        signal.pidfd_send_signal(descriptor, {})
    finally:
        os.close(descriptor)""",
}


@pytest.mark.parametrize("name", SENDS)
def test_a_signal_to_itself_is_refused_however_it_is_sent(folder: Path, name: str) -> None:
    with pytest.raises(RefusedError, match=rf"{name}, called at .*program.py:\d+, in took, which ends"):
        program(folder, SENDS[name].format("signal.SIGTERM"), f"{BEFORE}, threading")


@pytest.mark.parametrize("name", SENDS)
def test_the_signal_0_is_none(folder: Path, name: str) -> None:
    assert program(folder, SENDS[name].format(0), f"{BEFORE}, threading").notes == ()


def test_a_process_on_a_terminal_of_its_own_is_told(folder: Path) -> None:
    notes = program(folder, "pty.spawn(['true'], lambda _: b'')", f"{BEFORE}, pty").notes
    assert any(note.startswith("os.forkpty was used (") and f"program.py:{LINE}, in took" in note for note in notes)
