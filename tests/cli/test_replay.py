"""``penstock replay`` as a user runs it."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.journal import Entry, Journal
from tests.cli.command import environment, run, start

BEGIN_NS = 1_700_000_000_000_000_000
PROGRAM = """
import json
from penstock import clock
from penstock.bus import CallbackSubscriber, named_bus
bus = named_bus("speed")
out = named_bus("out").publisher()

def took(message):
    speed, ordinal = json.loads(bytes(message))["speed"], message.ordinal
    clock.call_later(0.25, lambda: tell(speed * 2, ordinal))

def tell(twice, ordinal):
    out.publish(json.dumps({"twice": twice, "at": clock.time_ns(), "ordinal": ordinal}).encode())

subscriber = CallbackSubscriber(took, ids=(0,))
bus.add(subscriber)
"""
GATEWAY = {
    "modules": [
        {"name": "tick", "loader": {"name": "python", "entrypoint": "penstock.gateway.modules:Timer"},
         "args": {"period_s": 0.3}},
        {"name": "twice", "loader": {"name": "python", "entrypoint": "penstock.gateway.modules:Transform"},
         "args": {"assign": [".twice = .speed * 2"]}},
    ],
    "links": [{"source": "shm:/speed", "sink": "twice"}, {"source": "twice", "sink": "shm:/out"}],
}  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    with Journal(tmp_path / "rec") as journal:
        journal.commit(
            Entry("speed", json.dumps({"speed": n}).encode(), timestamp_ns=BEGIN_NS + n * 100_000_000)
            for n in range(50)
        )
    (tmp_path / "gateway.json").write_text(json.dumps(GATEWAY))
    (tmp_path / "program.py").write_text(PROGRAM)
    return tmp_path


def test_two_replays_are_equal_whatever_the_seed_of_hashes(folder: Path) -> None:
    for out, seed in (("out1", "1"), ("out2", "77")):
        done = run("replay", "rec", "--into", "gateway.json", "-o", out, cwd=folder, PYTHONHASHSEED=seed)
        assert done.returncode == 0, done.stderr
        assert "replayed 50 messages of 4.9 s" in done.stdout
    done = run("replay", "--verify", "out1", "out2", "--json", cwd=folder)
    assert done.returncode == 0 and json.loads(done.stdout) == {"equal": True, "messages": 117}


def test_a_difference_is_shown_with_code_4(folder: Path) -> None:
    run("replay", "rec", "--into", "gateway.json", "-o", "out1", cwd=folder)
    run("replay", "rec", "--into", "gateway.json", "-o", "out2", "--for", "2s", cwd=folder)
    done = run("replay", "--verify", "out1", "out2", cwd=folder)
    assert done.returncode == 4 and "differs in" in done.stdout
    assert json.loads(run("replay", "--verify", "out1", "out2", "--json", cwd=folder).stdout)["equal"] is False


@pytest.mark.parametrize(
    ("first", "said"),
    [
        (0, "message 1 differs in payload; it is the first one"),
        (1, "message 2 differs in payload; the 1 message before it is equal"),
        (1100, "message 1,101 differs in payload; the 1,100 messages before it are equal"),
        (1200, "equal: 1,200 messages"),
    ],
)
def test_the_number_of_a_difference_and_the_count_before_it_agree(tmp_path: Path, first: int, said: str) -> None:
    for name in ("one", "other"):
        with Journal(tmp_path / name) as journal:
            journal.commit(
                Entry("speed", name.encode() if n == first else b"same", timestamp_ns=BEGIN_NS + n) for n in range(1200)
            )
    done = run("replay", "--verify", "one", "other", cwd=tmp_path)
    assert done.stdout.splitlines()[0] == said and done.returncode == (0 if first == 1200 else 4)
    found = json.loads(run("replay", "--verify", "one", "other", "--json", cwd=tmp_path).stdout)
    assert found["messages"] == first


def test_a_rule_is_broken_and_its_inputs_can_be_replayed(folder: Path) -> None:
    done = run("replay", "rec", "--into", "gateway.json", "--bisect", "value.twice < 80", "-o", "least", cwd=folder)
    assert done.returncode == 4, done.stderr
    assert '"speed": 40' in done.stdout and "1 of 41 inputs is needed" in done.stdout
    done = run("replay", "least", "--into", "gateway.json", "--rule", "value.twice < 80", "--json", cwd=folder)
    found = json.loads(done.stdout)
    assert done.returncode == 4 and found["inputs"] == 1 and found["message"]["topic"] == "twice"
    assert found["message"]["time_ns"] == BEGIN_NS + 40 * 100_000_000
    assert len([one for one in found["before"] if one["topic"] == "tick"]) == 3  # from the begin of the whole drive on
    done = run("replay", "rec", "--into", "gateway.json", "--rule", "value.twice < 800", cwd=folder)
    assert done.returncode == 0 and "holds" in done.stdout


def test_a_program_on_buses_is_replayed_the_same_way_twice(folder: Path) -> None:
    for out in ("out1", "out2"):
        done = run("replay", "rec", "--into", "program.py", "--capture", "bus:out", "-o", out, cwd=folder)
        assert done.returncode == 0, done.stderr
    assert run("replay", "--verify", "out1", "out2", cwd=folder).returncode == 0
    with Journal(folder / "out1", mode="read") as journal:
        first = [message for message in journal.read_many(1, 10) if message.channel == "out"][1]
        assert json.loads(bytes(first)) == {"twice": 2, "at": BEGIN_NS + 350_000_000, "ordinal": 2}
        assert first.timestamp_ns == BEGIN_NS + 350_000_000


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("rec",), "penstock play"),
        ((), "RECORDING"),
        (("rec", "--into", "gateway.json", "--map", "sped=shm:/speed"), "speed"),
        (("rec", "--into", "program.py", "--capture", "bus:out", "--map", "sped=bus:speed"), "speed"),
        (("rec", "--into", "gateway.json", "--about", "out"), "--about means nothing with a replay without a rule"),
        (("rec", "--into", "gateway.json", "--max-runs", "3"), "--max-runs"),
        (("rec", "--into", "gateway.json", "--rule", "size < 1", "-o", "out"), "--output"),
        (("rec", "--into", "gateway.json", "--rule", "size < 1", "--clock", "real"), "--clock"),
        (("--verify", "a", "b", "--seed", "3", "--rule", "size < 1"), "--rule, --seed"),
        (("rec", "--into", "gateway.json", "--bisect", "size < 1", "--bisect", "size < 2"), "one --bisect"),
        (("rec", "--into", "gateway.json", "-o", "rec"), "not empty"),
        (("rec", "--into", "gateway.json", "-o", "program.py/out"), "program.py"),
        (("rec", "--into", "gateway.json", "-o", "program.py"), "program.py is no folder"),
        (("rec", "--into", "gateway.json", "--clock", "atomic"), "virtual"),
        (("rec", "--into", "gateway.json", "--rule", "value.speed <"), "a value is missing at the end"),
        (("rec", "--into", "gateway.json", "--rule", "size < 1", "--bisect", "size < 1"), "not both"),
        (("rec", "--into", "program.py"), "--capture"),
        (("rec", "--into", "gateway.json", "--capture", "bus:out"), "--capture"),
        (("rec", "--into", "gateway.json", "--map", "speed=engine"), "engine"),
        (
            ("rec", "--into", "gateway.json", "-m", "speed=shm:/speed", "-m", "speed=tick"),
            "--map speed=shm:/speed and --map speed=tick contradict each other",
        ),
        (("rec", "--verify", "a", "b"), "--verify"),
        (("nowhere", "--into", "gateway.json"), "no recording"),
    ],
)
def test_what_cannot_be_is_told(folder: Path, arguments: tuple[str, ...], told: str) -> None:
    done = run("replay", *arguments, cwd=folder)
    assert done.returncode == 2 and told in done.stderr and "Traceback" not in done.stderr


def test_what_has_no_source_is_left_out_and_said(folder: Path) -> None:
    with Journal(folder / "rec") as journal:
        journal.append("other", b"x")
    for rule in ((), ("--rule", "size >= 0")):
        done = run("replay", "rec", "--into", "gateway.json", "--json", *rule, cwd=folder)
        assert done.returncode == 0 and "left out, no source has them: other" in done.stderr
        assert json.loads(done.stdout)["notes"] == ["left out, no source has them: other (--map TOPIC=SOURCE)"]


def test_what_the_output_cannot_encode_is_escaped(folder: Path) -> None:
    (folder / "program.py").write_text(PROGRAM.replace("out.publish(", "out.publish('é'.encode() + "))
    done = run("replay", "rec", "--into", "program.py", "--capture", "bus:out", "--rule", "size < 9", cwd=folder,
               PYTHONIOENCODING="ascii")  # fmt: skip
    assert done.returncode == 4 and r'  \xe9{"twice"' in done.stdout, done.stderr


def test_threads_of_a_program_are_refused(folder: Path) -> None:
    (folder / "program.py").write_text("import penstock\nsub = penstock.subscriber('bus:speed', on_message=print)\n")
    done = run("replay", "rec", "--into", "program.py", "--capture", "bus:out", cwd=folder)
    assert (
        done.returncode == 1
        and "on_message= (in a thread of its own; at a bus a CallbackSubscriber has none)" in done.stderr
    )


def test_modules_in_processes_are_refused_by_name(folder: Path) -> None:
    module = {"name": "far", "loader": {"name": "process", "entrypoint": {"class": "x:Y"}}}
    (folder / "far.json").write_text(json.dumps({"modules": [module], "links": []}))
    done = run("replay", "rec", "--into", "far.json", cwd=folder)
    assert done.returncode == 1 and "far (process)" in done.stderr and "--map" in done.stderr


# ---- what a module or program of a user's does wrong

MODULES = """
import _thread, concurrent.futures, ctypes, os, signal, subprocess, sys, threading, time
import penstock
from penstock.gateway import Module, Source

class Sleeps(Source):
    reaches_outside = False
    def run(self):
        print("it sleeps", flush=True)
        while True:
            time.sleep(0.01)
            self.publish(b"{}")

class Fails(Module):
    def receive(self, message):
        raise ValueError("no \x1b[31m good")

class Exits(Module):
    def receive(self, message):
        raise SystemExit(0)

class Interrupts(Module):
    def receive(self, message):
        if message.ordinal == 20:
            raise KeyboardInterrupt

class Catches(Module):
    def receive(self, message):
        try:
            print("it waits", flush=True)
            while True:
                time.sleep(0.01)
        except:
            pass

class CatchesInTimers(Module):
    def start(self):
        self.clock.call_at(self.clock.now(), self.tick)
    def tick(self):
        self.clock.call_at(self.clock.now() + 0.5, self.tick)
        Catches.receive(self, None)

class CatchesAtTheEnd(Module):
    def stop(self):
        Catches.receive(self, None)

class Refused(Module):
    def receive(self, message):
        try:
            penstock.publisher("shm:/elsewhere")
        except Exception:
            pass

class Counts(Module):
    seen = 0
    def receive(self, message):
        Counts.seen += 1
        self.publish(b'{"seen": %d}' % Counts.seen)

class Moves(Module):
    def receive(self, message):
        os.chdir("elsewhere" if os.path.isdir("elsewhere") else ".")
        self.publish(b"x")

class Runs(Module):
    def receive(self, message):
        subprocess.run(["true"], check=True)

class Process(Module):
    def receive(self, message):
        self.publish(b'{"first": %s}' % (b"true" if "--bisect" in sys.argv else b"false"))

class Times(Module):
    def receive(self, message):
        self.publish(b'{"at": %d}' % time.time_ns())

class Prints(Module):
    def receive(self, message):
        print("hello")
        subprocess.run(["echo", "from a process"], check=True)

class Large(Module):
    def receive(self, message):
        if message.ordinal == 1:
            self.publish(bytes(70 << 20))

class Ends(Module):
    seen = 0
    def receive(self, message):
        self.seen += 1
        if message.ordinal == 20 and self.seen != 20:
            os._exit(9)
        self.publish(b"x", {"number": str(self.seen)})

class EndsAll(Module):
    def receive(self, message):
        if message.ordinal == 20:
            os._exit(0)

from os import _exit

class EndsByName(Module):
    def receive(self, message):
        if message.ordinal == 20:
            _exit(status=0)

class Aborts(Module):
    def receive(self, message):
        if message.ordinal == 20:
            os.abort()

class Execs(Module):
    def receive(self, message):
        if message.ordinal == 20:
            os.execlp("true", "true")

class Kills(Module):
    def receive(self, message):
        if message.ordinal == 20:
            os.kill(os.getpid(), signal.SIGKILL)

class Signals(Module):
    def receive(self, message):
        if message.ordinal == 20:
            signal.raise_signal(signal.SIGTERM)

class Forks(Module):
    def receive(self, message):
        child = os.fork()
        if child == 0:
            threading.Thread(target=os._exit, args=(3,)).start()
            signal.pause()
        self.publish(b'{"code": %d}' % os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))

class Crashes(Module):
    def receive(self, message):
        if message.ordinal == 20:
            ctypes.string_at(0)

class EndsNatively(Module):
    def receive(self, message):
        if message.ordinal == 20:
            ctypes.CDLL(None)._exit(0)

class Waits(Module):  # with fewer inputs it never comes back
    seen = 0
    def receive(self, message):
        self.seen += 1
        if message.ordinal == 50 and self.seen < 20:
            print("it waits", flush=True)
            while True:
                time.sleep(1)
        self.publish(b'{"ordinal": %d}' % message.ordinal)

class Quiet(Module):
    since = 0
    def receive(self, message):
        if message.channel == "tick":
            self.since += 1
            self.publish(b'{"quiet": %d}' % self.since)
        elif message.ordinal < 20:
            self.since = 0

class InThread(Module):
    def receive(self, message):
        thread = threading.Thread(target=self.publish, args=(b"x",), name="own one")
        thread.start()
        thread.join()

class InSource(Source):
    reaches_outside = False
    def run(self):
        self.stopping.wait(0.25)
        threading.Thread(target=print, name="of a source").start()
    def receive(self, message):
        pass

class InTimer(Module):  # of the machine's time: it is due when the replay has ended
    def receive(self, message):
        if message.ordinal == 50:
            threading.Timer(1000, self.publish, (b"x",)).start()

class InPool(Module):
    def receive(self, message):
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            self.publish(pool.submit(bytes, message).result())

class InProcesses(Module):
    def receive(self, message):
        with concurrent.futures.ProcessPoolExecutor(1) as pool:
            self.publish(pool.submit(bytes, message).result())

class Low(Module):
    def receive(self, message):
        _thread.start_new_thread(print, ("it runs",))

class AtTheEnd(Module):
    def receive(self, message):
        pass
    def destroy(self):
        try:
            threading.Thread(target=print, args=("it runs",), name="last").start()
        except Exception:
            pass

class ByClock(Module):
    def start(self):
        self.clock.call_at(self.clock.now() + 1, threading.Thread(target=print, args=("it runs",), name="late").start)
    def receive(self, message):
        pass

class Ordinal(Module):
    def receive(self, message):
        self.publish(b'{"ordinal": %d}' % message.ordinal)
"""


def gateway_of(folder: Path, kind: str, **link: object) -> str:
    (folder / "modules.py").write_text(MODULES)
    modules = [{"name": "it", "loader": {"name": "python", "entrypoint": f"modules:{kind}"}}]
    links = [{"source": "shm:/speed", "sink": "it", **link}]
    (folder / "one.json").write_text(json.dumps({"modules": modules, "links": links}))
    return "one.json"


def test_ctrl_c_ends_a_replay_whose_source_never_waits(folder: Path) -> None:
    program = start("replay", "rec", "--into", gateway_of(folder, "Sleeps"), cwd=folder)
    assert program.stdout is not None and program.stdout.readline() == "it sleeps\n"
    program.send_signal(signal.SIGINT)
    program.communicate(timeout=60)
    assert program.returncode == 130


@pytest.mark.parametrize(("kind", "told"), [("Fails", "ValueError: no \\x1b[31m good"), ("Exits", "SystemExit: 0")])
def test_a_module_that_fails_is_told_at_the_end_with_code_4(folder: Path, kind: str, told: str) -> None:
    file = gateway_of(folder, kind)
    done = run("replay", "rec", "--into", file, "-o", "out", cwd=folder)
    assert done.returncode == 4 and f"it failed in receive, 50 times; the first: {told}" in done.stderr
    assert "Traceback" not in done.stderr and "\x1b" not in done.stderr
    done = run("replay", "rec", "--into", file, "--json", cwd=folder)
    (failure,) = json.loads(done.stdout)["failures"]
    assert done.returncode == 4 and (failure["name"], failure["count"], failure["handled"]) == ("it", 50, False)
    done = run("replay", "rec", "--into", file, "--rule", "size < 1000", cwd=folder)
    assert done.returncode == 4 and "it failed in receive" in done.stderr


def test_where_a_module_failed_is_shown_on_demand(folder: Path) -> None:
    done = run("replay", "rec", "--into", gateway_of(folder, "Fails"), cwd=folder, PENSTOCK_DEBUG="1")
    assert done.returncode == 4 and "modules.py" in done.stderr and "\x1b" not in done.stderr


def test_what_is_handled_is_told_with_code_0_and_so_is_what_still_waits(folder: Path) -> None:
    file = gateway_of(folder, "Fails", delivery="at_least_once", backoff_s=1000, max_backoff_s=1000)
    done = run("replay", "rec", "--into", file, "--json", cwd=folder)
    found = json.loads(done.stdout)
    assert done.returncode == 0 and found["waiting"] == {"it": 50} and found["failures"][0]["handled"] is True
    assert "at the end 50 messages still waited for it" in done.stderr


def test_what_is_refused_ends_the_replay_whoever_caught_it(folder: Path) -> None:
    done = run("replay", "rec", "--into", gateway_of(folder, "Refused"), "-o", "out", cwd=folder)
    assert done.returncode == 1 and "shm:/elsewhere" in done.stderr and "replayed 50" not in done.stdout
    assert not (folder / "out").exists()  # nothing was stored, so the next try finds it free


@pytest.mark.parametrize(
    "opened",
    [
        "penstock.publisher('shm:/early')",
        "penstock.journal.Journal('shm:/early')",
        "__import__('threading').Thread(target=print, name='shm:/early').start()",
    ],
)
def test_what_a_module_opens_at_its_import_is_refused(folder: Path, opened: str) -> None:
    (folder / "early.py").write_text(
        "import penstock\nfrom penstock.gateway import Module\n"
        f"try:\n    early = {opened}\nexcept Exception:\n    pass\n"
        "class It(Module):\n    def receive(self, message): pass\n"
    )
    file = gateway_of(folder, "Counts")
    (folder / file).write_text((folder / file).read_text().replace("modules:Counts", "early:It"))
    done = run("replay", "rec", "--into", file, cwd=folder)
    assert done.returncode == 1 and "shm:/early" in done.stderr and "cannot be replayed" in done.stderr, done.stderr


@pytest.mark.parametrize(
    ("kind", "told"),
    [
        ("InThread", "'own one', started at {folder}/modules.py:"),
        ("InSource", "'of a source', started at {folder}/modules.py:"),
        ("InTimer", "'Thread-1', started at {folder}/modules.py:"),
        ("InPool", "'ThreadPoolExecutor-0_0', started at {folder}/modules.py:"),
        ("InProcesses", ", started at {folder}/modules.py:"),
        ("Low", "(started at {folder}/modules.py:"),
        ("AtTheEnd", "'last', started at {folder}/modules.py:"),
        ("ByClock", "'late', started at"),
    ],
)
def test_threads_of_a_module_are_refused_when_they_are_started(folder: Path, kind: str, told: str) -> None:
    file = gateway_of(folder, kind)
    for options in ((), ("--rule", "size < 9"), ("--bisect", "size < 9")) if kind == "InTimer" else ((),):
        done = run("replay", "rec", "--into", file, *options, cwd=folder)
        (line,) = done.stderr.splitlines()
        assert done.returncode == 1 and done.stdout == ""
        assert "a thread of one's own (" in line and told.format(folder=folder) in line
        assert "clock.call_later takes recorded time) cannot be replayed the same way twice (" in line
        assert kind != "InSource" or "(it source, after input 3)" in line


PROGRAM_ERRORS = {
    "import nowhere_to_be_found": "program.py:1: ModuleNotFoundError",
    "x = 1\ny = (": "program.py:2: SyntaxError",
    "async def step(): pass": "program.py: step is called after each message: it must be a function, and not async",
    "from penstock import clock\ndef step():\n    clock.current().advance(5)": "program.py:3: StateError: a replay moves",
    "import sys\nsys.exit(0)": "program.py:2: SystemExit: 0",
    "import sys\nfrom penstock.bus import CallbackSubscriber, named_bus\ndef took(message):\n    sys.exit(3)\n"
    "named_bus('speed').add(CallbackSubscriber(took, ids=(0,)))": "program.py:4: SystemExit: 3",
    "from penstock import clock\ndef f():\n    raise KeyError('k')\nclock.call_later(0.1, f)": "program.py:3: KeyError: 'k'",
}


@pytest.mark.parametrize("text", PROGRAM_ERRORS)
def test_an_error_of_a_program_is_one_line_with_its_place(folder: Path, text: str) -> None:
    (folder / "program.py").write_text(text)
    done = run("replay", "rec", "--into", "program.py", "--capture", "bus:out", cwd=folder)
    assert done.returncode == (69 if "nowhere" in text else 1), done.stderr  # 69: something is not installed
    assert PROGRAM_ERRORS[text] in done.stderr and "Traceback" not in done.stderr
    done = run("replay", "rec", "--into", "program.py", "--capture", "bus:out", cwd=folder, PENSTOCK_DEBUG="1")
    assert "Traceback" in done.stderr


def test_a_bisect_tells_an_error_of_a_program_as_a_replay_does(folder: Path) -> None:
    (folder / "program.py").write_text("def step():\n    raise KeyError('k')\n")
    told = [
        run("replay", "rec", "--into", "program.py", "--capture", "bus:out", *options, cwd=folder).stderr
        for options in ((), ("--bisect", "size < 9"))
    ]
    assert told[0] == told[1] and "program.py:2: KeyError" in told[0]


def test_a_handler_of_a_program_that_fails_is_told_with_code_4(folder: Path) -> None:
    (folder / "program.py").write_text(
        "from penstock.bus import CallbackSubscriber, named_bus\nbus = named_bus('speed')\n"
        "def took(message):\n    raise ValueError('no good')\nsubscriber = CallbackSubscriber(took, ids=(0,))\n"
        "bus.add(subscriber)\n"
    )
    done = run("replay", "rec", "--into", "program.py", "--capture", "bus:out", cwd=folder)
    assert done.returncode == 4 and "Traceback" not in done.stderr
    assert "'took' failed in run, 50 times; the first: program.py:4: ValueError: no good" in done.stderr
    assert "nothing was published at bus:out (--capture)" in done.stderr


def test_a_queue_that_a_program_does_not_read_is_told_with_what_to_do(folder: Path) -> None:
    (folder / "program.py").write_text("import penstock\nkept = penstock.subscriber('bus:speed', depth=3)\n")
    done = run("replay", "rec", "--into", "program.py", "--capture", "bus:out", cwd=folder)
    assert done.returncode == 1 and "step()" in done.stderr and "drop_oldest" in done.stderr, done.stderr


def test_an_async_read_of_a_program_without_a_time_out_is_refused(folder: Path) -> None:
    (folder / "program.py").write_text(
        "import asyncio, penstock\nspeeds = penstock.subscriber('bus:speed')\nasync def main():\n"
        "    async for message in speeds:\n        pass\nasyncio.run(main())\n"
    )
    done = run("replay", "rec", "--into", "program.py", "--capture", "bus:out", cwd=folder)
    assert done.returncode == 1 and "an async read without a time-out" in done.stderr, done.stderr


def test_a_module_that_changes_the_working_directory_does_not_move_the_output(folder: Path) -> None:
    (folder / "elsewhere").mkdir()
    done = run("replay", "rec", "--into", gateway_of(folder, "Moves"), "-o", "out/here", cwd=folder)
    assert done.returncode == 0, done.stderr
    assert (folder / "out" / "here").is_dir() and not list((folder / "elsewhere").iterdir())


def test_a_recording_without_messages_is_told_as_that(folder: Path) -> None:
    with Journal(folder / "nothing"):
        pass
    for into in (("gateway.json",), ("program.py", "--capture", "bus:out")):
        done = run("replay", "nothing", "--into", *into, cwd=folder)
        assert done.returncode == 2 and "there is no message in nothing" in done.stderr, done.stderr


def test_a_bus_of_which_a_program_keeps_no_handle_gets_its_messages(folder: Path) -> None:
    (folder / "program.py").write_text(
        "import gc, penstock\nfrom penstock.bus import CallbackSubscriber, named_bus\n"
        "out = penstock.publisher('bus:out')\n"
        "named_bus('speed').add(CallbackSubscriber(lambda message: out.publish(b'x'), ids=(0,)))\ngc.collect()\n"
    )
    done = run("replay", "rec", "--into", "program.py", "--capture", "bus:out", cwd=folder)
    assert done.returncode == 0 and "50 in the output" in done.stdout and not done.stderr, done.stderr


def test_an_address_that_a_program_does_not_use_is_told(folder: Path) -> None:
    options = ("--into", "program.py", "--capture", "bus:uot", "--map", "speed=bus:sped")
    done = run("replay", "rec", *options, cwd=folder)
    assert "nothing was published at bus:uot" in done.stderr and "nobody listens at bus:sped" in done.stderr
    assert "a topic's place (--map)" in done.stderr


def test_a_topic_that_nobody_hears_names_no_option_that_was_not_given(folder: Path) -> None:
    (folder / "deaf.py").write_text("")
    done = run("replay", "rec", "--into", "deaf.py", "--capture", "bus:out", cwd=folder)
    assert "nobody listens at bus:speed, a topic's place\n" in done.stderr, done.stderr


def test_maps_of_play_that_contradict_each_other_are_refused(folder: Path) -> None:
    done = run("play", "rec", "--map", "*=shm:/a", "--map", "*=shm:/b", cwd=folder)
    assert done.returncode == 2 and "--map *=shm:/a and --map *=shm:/b contradict each other" in done.stderr


def test_a_misspelt_placeholder_of_play_is_refused(folder: Path) -> None:
    done = run("play", "rec", "--map", "*=shm:/again/{topik}", cwd=folder)
    assert done.returncode == 2 and "there is no placeholder {topik}, only {topic}" in done.stderr, done.stderr


# ---- rules


def test_a_rule_that_judges_nothing_is_told_with_code_4(folder: Path) -> None:
    for options in (("value.sped < 80",), ("value.twice < 800", "--about", "nowhere"), ("position > 5",)):
        done = run("replay", "rec", "--into", "gateway.json", "--rule", *options, cwd=folder)
        assert done.returncode == 4 and "nothing was judged" in done.stdout
    done = run("replay", "rec", "--into", "gateway.json", "--rule", "value.sped < 80", "--json", cwd=folder)
    found = json.loads(done.stdout)
    assert found["holds"] is None and found["judged"] == 0


def test_every_rule_is_judged(folder: Path) -> None:
    rules = ("--rule", "value.twice < 80", "--rule", "value.twice < 800")
    done = run("replay", "rec", "--into", "gateway.json", *rules, cwd=folder)
    assert done.returncode == 4 and "value.twice < 80: broken" in done.stdout
    assert "value.twice < 800: holds for 100 messages" in done.stdout
    found = json.loads(run("replay", "rec", "--into", "gateway.json", *rules, "--json", cwd=folder).stdout)
    assert [one["holds"] for one in found["rules"]] == [False, True]


def test_age_is_counted_in_recorded_time(folder: Path) -> None:
    done = run("replay", "rec", "--into", "gateway.json", "--rule", "age < 1", cwd=folder)
    assert done.returncode == 0, done.stdout


def test_the_inputs_that_are_needed_keep_their_ordinals_and_topics(folder: Path) -> None:
    file, rule = gateway_of(folder, "Ordinal"), "value.ordinal < 40"
    options = ("--into", file, "--map", "speed=shm:/speed")
    with Journal(folder / "rec") as journal:
        journal.append("other", b"x", timestamp_ns=BEGIN_NS)
    done = run("replay", "rec", *options, "--bisect", rule, "-o", "least", "--json", cwd=folder)
    found = json.loads(done.stdout)
    assert done.returncode == 4 and found["confirmed"] is True and found["needed"][0]["ordinal"] == 40
    done = run("replay", "least", *options, "--rule", rule, "--json", cwd=folder)
    assert done.returncode == 4 and json.loads(done.stdout)["message"]["payload"] == '{"ordinal": 40}'
    assert "left out, no source has them: other" in done.stderr


def test_state_of_a_class_does_not_pass_from_one_replay_to_the_next(folder: Path) -> None:
    file = gateway_of(folder, "Counts")
    found = json.loads(run("replay", "rec", "--into", file, "--bisect", "value.seen < 30", "--json", cwd=folder).stdout)
    assert found["confirmed"] is True and len(found["needed"]) == 30
    rules = ("--rule", "value.seen < 30", "--rule", "value.seen < 40")
    found = json.loads(run("replay", "rec", "--into", file, *rules, "--json", cwd=folder).stdout)
    assert [one["inputs"] for one in found["rules"]] == [30, 40]


def test_json_is_alone_on_standard_output(folder: Path) -> None:
    file = gateway_of(folder, "Prints")
    for options in ((), ("--rule", "size < 1"), ("--bisect", "size < 1")):
        done = run("replay", "rec", "--into", file, "--for", "0.3s", "--json", *options, cwd=folder)
        assert json.loads(done.stdout) and "hello" in done.stderr and "from a process" in done.stderr
    done = run("replay", "rec", "--into", file, "--for", "0.1s", cwd=folder)
    assert done.stdout.splitlines()[:2] == ["from a process", "hello"] or "hello" in done.stdout


def test_a_message_is_stored_however_large_it_is(folder: Path) -> None:
    done = run("replay", "rec", "--into", gateway_of(folder, "Large"), "-o", "out", cwd=folder)
    assert done.returncode == 0 and "1 in the output" in done.stdout, done.stderr
    with Journal(folder / "out", mode="read") as journal:
        (stored,) = [message for message in journal.read_from(1, 10)[0] if message.channel == "it"]
        assert stored.size == 70 << 20


def test_the_part_that_is_replayed_begins_and_ends_within_the_recording(folder: Path) -> None:
    replay = ("replay", "rec", "--into", "gateway.json")
    done = run(*replay, "--from", "2001-01-01T00:00:00", cwd=folder)
    assert done.returncode == 0 and "replayed 50 messages of 4.9 s" in done.stdout  # nothing ticks before the recording
    for options, said in (
        (("--from", "-1s"), "10s for ten seconds after the start"),
        (("--from", "1h"), "after the end"),
        (("--for", "0s"), "--for 0s is no time at all"),
        (("--topic", "nosuch"), "no topic matches nosuch; valid: speed"),
    ):
        done = run(*replay, *options, cwd=folder)
        assert done.returncode == 2 and said in done.stderr, done.stderr
    done = run(*replay, "--from", "0.01s", "--for", "0.05s", cwd=folder)
    assert done.returncode == 0 and "no message of the recording lies in the part" in done.stderr


def test_what_the_recording_lost_is_told(folder: Path) -> None:
    with Journal(folder / "rec") as journal:
        for event in ({"event": "started"}, {"event": "lost", "count": 1234}, {"event": "ended"}):
            journal.append("_recording", json.dumps(event).encode())
    done = run("replay", "rec", "--into", "gateway.json", cwd=folder)
    assert done.returncode == 0 and "rec: 1,234 messages were lost while it was recorded" in done.stderr


def test_a_story_that_cannot_be_read_is_told(folder: Path) -> None:
    for nonsense in (b"no json", b'{"event": "started", "addresses": 5}'):
        with Journal(folder / "rec") as journal:
            journal.append("_recording", nonsense)
        done = run("replay", "rec", "--into", "gateway.json", cwd=folder)
        assert done.returncode == 0 and "rec: the topic _recording cannot be read" in done.stderr, done.stderr


def test_a_rule_that_cannot_be_read_is_told_by_its_option(folder: Path) -> None:
    for option in ("--rule", "--bisect"):
        for text, said in (("", f"{option} is empty"), ("value.speed <<", f"{option}: '<' ")):
            done = run("replay", "rec", "--into", "gateway.json", option, text, cwd=folder)
            assert done.returncode == 2 and said in done.stderr and "filter" not in done.stderr, done.stderr


def test_a_break_by_a_timer_counts_the_inputs_before_it(folder: Path) -> None:
    done = run("replay", "rec", "--into", "gateway.json", "--rule", "ordinal < 2", "--about", "tick", cwd=folder)
    assert "after 3 inputs" in done.stdout  # at 0, 0.1 and 0.2 s; the second tick is at 0.3 s, before the fourth
    options = ("--bisect", "value.twice < 20", "--max-runs", "1")
    done = run("replay", "rec", "--into", "gateway.json", *options, cwd=folder)
    assert "11 of 11 inputs are left (1 replay; not the least: --max-runs ended it)" in done.stdout, done.stdout


def test_processes_of_a_module_are_told(folder: Path) -> None:
    done = run("replay", "rec", "--into", gateway_of(folder, "Runs"), "--for", "1s", cwd=folder)
    assert done.returncode == 0 and done.stderr.count("subprocess.Popen was used") == 1, done.stderr


@pytest.mark.parametrize("options", [(), ("--rule", "size > 0"), ("--bisect", "size > 0")])
def test_the_machines_clock_is_told_with_the_line_and_in_json(folder: Path, options: tuple[str, ...]) -> None:
    done = run("replay", "rec", "--into", gateway_of(folder, "Times"), "--json", *options, cwd=folder)
    (note,) = json.loads(done.stdout)["notes"]
    assert done.returncode == 0 and note in done.stderr and done.stderr.count("was used") == 1, done.stderr
    assert note.startswith(f"time.time_ns was used ({folder}/modules.py:") and ", in receive): this is the machine's time" in note


@pytest.mark.parametrize("kind", ["Ends", None])  # each replay ends its process; none does
def test_the_replays_of_a_bisect_are_no_deaths(folder: Path, kind: str | None) -> None:
    (folder / "shared").mkdir(0o700)
    own = {"XDG_STATE_HOME": str(folder), "PENSTOCK_SHM_DIR": str(folder / "shared")}
    file, rule = (
        (gateway_of(folder, kind), "properties.number != '20'") if kind else ("gateway.json", "value.twice < 80")
    )
    done = run("replay", "rec", "--into", file, "--bisect", rule, cwd=folder, **own)
    assert done.returncode == 4 and "needed" in done.stdout, done.stderr
    assert json.loads(run("autopsy", "--json", **own).stdout)["deaths"] == []


def test_a_replay_with_fewer_inputs_that_is_refused_or_fails_counts_as_not_breaking_the_rule(folder: Path) -> None:
    options = ("replay", "rec", "--into", gateway_of(folder, "Ends"), "--bisect", "properties.number != '20'")
    done = run(*options, cwd=folder)
    assert done.returncode == 4 and "20 of 20 inputs are needed" in done.stdout, done.stderr
    assert "with fewer inputs came to no end" in done.stderr and '{"number": "20"}' in done.stdout
    assert "the first: os._exit, called at" in done.stderr and "topic speed, ordinal 20" in done.stderr


@pytest.mark.parametrize("options", [(), ("--bisect", "size < 9")])
@pytest.mark.parametrize(
    ("kind", "call"),
    [
        ("EndsAll", "os._exit"),
        ("EndsByName", "os._exit"),
        ("Aborts", "os.abort"),
        ("Execs", "os.execv"),
        ("Kills", "os.kill"),
        ("Signals", "signal.raise_signal"),
    ],
)
def test_a_module_that_ends_the_process_is_refused_by_name_with_the_message(
    folder: Path, kind: str, call: str, options: tuple[str, ...]
) -> None:
    done = run("replay", "rec", "--into", gateway_of(folder, kind), *options, cwd=folder)
    assert done.returncode == 1 and done.stdout == "" and len(done.stderr.splitlines()) == 1
    assert f"{call}, called at {folder}/modules.py:" in done.stderr
    assert "(it, at input 20: topic speed, ordinal 20)" in done.stderr


def test_a_process_that_a_module_forks_may_end(folder: Path) -> None:
    done = run("replay", "rec", "--into", gateway_of(folder, "Forks"), "--rule", "value.code == 3", cwd=folder)
    assert done.returncode == 0 and "holds for 50 messages" in done.stdout, done.stderr


@pytest.mark.parametrize("options", [(), ("--bisect", "size < 9")])
def test_the_line_of_a_module_whose_native_code_crashes_is_shown(folder: Path, options: tuple[str, ...]) -> None:
    done = run("replay", "rec", "--into", gateway_of(folder, "Crashes"), *options, cwd=folder)
    assert "Segmentation fault" in done.stderr and "modules.py" in done.stderr and "in receive" in done.stderr
    assert done.returncode == (1 if options else -signal.SIGSEGV)
    told = "the process of a replay ended by signal 11 (Segmentation fault), at input 20: topic speed, ordinal 20;"
    assert (told in done.stderr) == bool(options)


def test_a_bisect_tells_at_which_input_native_code_ended_the_process(folder: Path) -> None:
    options = ("--bisect", "size < 9")
    done = run("replay", "rec", "--into", gateway_of(folder, "EndsNatively"), *options, cwd=folder)
    assert done.returncode == 1 and "ended with code 0, at input 20: topic speed, ordinal 20;" in done.stderr


@pytest.mark.parametrize("as_json", [False, True])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_what_a_bisect_has_left_when_it_is_interrupted_is_shown_and_stored(
    folder: Path, number: signal.Signals, as_json: bool
) -> None:
    options = ("--bisect", "value.ordinal < 50", "-o", "least", *(("--json",) if as_json else ()))
    program = start(
        "replay", "rec", "--into", gateway_of(folder, "Waits"), *options, cwd=folder, start_new_session=True
    )
    stream = program.stderr if as_json else program.stdout
    assert stream is not None
    while stream.readline() != "it waits\n":
        assert program.poll() is None
    os.killpg(program.pid, number)  # as a terminal does: it reaches the replays too
    out, err = program.communicate(timeout=60)
    assert program.returncode == 128 + number and "Traceback" not in err, err
    if as_json:
        found = json.loads(out)
        assert (found["least"], found["confirmed"]) == (False, None)
        left = len(found["needed"])
    else:
        left = int(out.partition(" of 50 inputs are left")[0].split()[-1])
        assert "not the least: it was interrupted" in out and "stored in least" in out
    again = run("replay", "least", "--into", "one.json", "--rule", "value.ordinal < 50", "--json", cwd=folder)
    assert again.returncode == 4 and json.loads(again.stdout)["inputs"] == left == 25


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_bisect_that_is_interrupted_before_its_first_try_shows_and_stores_all(
    folder: Path, number: signal.Signals
) -> None:
    code = f"""
import itertools, signal
from penstock.cli import replay
from penstock.__main__ import main
def interrupted(*arguments):
    signal.raise_signal({int(number)})
    return itertools.islice(*arguments)
replay.islice = interrupted  # what reads the inputs
main()
"""
    command = [sys.executable, "-c", code, "replay", "rec", "--into", "gateway.json", "--bisect", "value.twice < 80"]
    done = subprocess.run(
        [*command, "-o", "least"], cwd=folder, env=environment(), capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 128 + number and "Traceback" not in done.stderr, done.stderr
    assert "41 of 41 inputs are left (0 replays; not the least: it was interrupted)" in done.stdout, done.stdout
    again = run("replay", "least", "--into", "gateway.json", "--rule", "value.twice < 80", "--json", cwd=folder)
    assert again.returncode == 4 and json.loads(again.stdout)["inputs"] == 41


def test_a_module_that_raises_keyboard_interrupt_is_named(folder: Path) -> None:
    told = "by Ctrl-C or by a KeyboardInterrupt of a module (it, at input 20: topic speed, ordinal 20)"
    for options, code in (((), 130), (("--rule", "size < 9"), 130), (("--bisect", "size < 9"), 1)):
        done = run("replay", "rec", "--into", gateway_of(folder, "Interrupts"), *options, cwd=folder)
        assert done.returncode == code and told in done.stderr and len(done.stderr.splitlines()) == 1, done.stderr


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("name", ["Catches", "CatchesInTimers", "CatchesAtTheEnd"])
def test_an_interrupt_that_a_module_catches_ends_the_replay(folder: Path, name: str, number: signal.Signals) -> None:
    program = start("replay", "rec", "--into", gateway_of(folder, name), cwd=folder)
    assert program.stdout is not None
    while program.stdout.readline() != "it waits\n":
        assert program.poll() is None
    program.send_signal(number)
    try:
        out, err = program.communicate(timeout=60)
    finally:
        program.kill()
    assert program.returncode == 128 + number and "Traceback" not in err, err
    assert "it waits" not in out and "replayed" not in out


def test_a_recording_whose_index_was_cut_is_read_from_its_log(folder: Path) -> None:
    (index,) = (folder / "rec").glob("*.index")
    os.truncate(index, 1000)
    done = run("replay", "rec", "--into", "gateway.json", "-o", "out", cwd=folder)
    assert done.returncode == 0 and "replayed 50 messages" in done.stdout, done.stderr


@pytest.mark.parametrize("part", ["rec", "rec/00001"])
def test_a_recording_without_its_frontier_is_told_with_the_command_that_helps(folder: Path, part: str) -> None:
    if part != "rec":
        (folder / "rec").rename(folder / "part")
        (folder / "rec").mkdir()
        (folder / "part").rename(folder / part)
    (folder / part / "frontier").unlink()
    done = run("replay", "rec", "--into", "gateway.json", cwd=folder)
    assert done.returncode == 1 and f"{part}/frontier is missing" in done.stderr, done.stderr
    assert f"penstock journal repair {part}" in done.stderr
    assert run("journal", "repair", part, cwd=folder).returncode == 0
    done = run("replay", "rec", "--into", "gateway.json", cwd=folder)
    assert done.returncode == 0 and "replayed 50 messages" in done.stdout, done.stderr


def test_a_break_that_does_not_come_again_is_told(folder: Path) -> None:
    options = ("replay", "rec", "--into", gateway_of(folder, "Process"), "--bisect", "value.first == false")
    done = run(*options, cwd=folder)
    assert done.returncode == 4 and "in a new process these inputs do not break the rule" in done.stderr
    assert json.loads(run(*options, "--json", cwd=folder).stdout)["confirmed"] is False


def test_inputs_that_break_the_rule_earlier_are_confirmed(folder: Path) -> None:
    file = folder / gateway_of(folder, "Quiet")
    found = json.loads(file.read_text())
    tick = {"name": "tick", "loader": {"name": "python", "entrypoint": "penstock.gateway.modules:Timer"},
            "args": {"period_s": 0.3}}  # fmt: skip
    file.write_text(json.dumps({"modules": [tick, *found["modules"]],
                                "links": [{"source": "tick", "sink": "it"}, *found["links"]]}))  # fmt: skip
    done = run("replay", "rec", "--into", file.name, "--bisect", "value.quiet < 5", "--json", cwd=folder)
    found = json.loads(done.stdout)
    assert done.returncode == 4 and found["needed"] == [] and found["confirmed"] is True


def test_where_the_inputs_go_is_checked_before_the_work(folder: Path) -> None:
    done = run("replay", "rec", "--into", "gateway.json", "--bisect", "value.twice < 80", "-o", "rec", cwd=folder)
    assert done.returncode == 2 and "rec is not empty" in done.stderr and done.stdout == ""


@pytest.mark.parametrize("options", [(), ("--bisect", "value.twice < 80")])
def test_nothing_is_stored_inside_of_a_recording(folder: Path, options: tuple[str, ...]) -> None:
    (folder / "parts").mkdir()
    shutil.copytree(folder / "rec", folder / "parts" / "00001")
    (folder / "link").symlink_to("parts")
    cases = [("rec", "rec/new/out", "rec"), ("parts", "link/2", "parts"), ("rec", "parts/00001/x", "parts/00001")]
    for recording, out, where in cases:
        done = run("replay", recording, "--into", "gateway.json", *options, "-o", out, cwd=folder)
        assert done.returncode == 2 and f"{out} lies in the recording {folder / where}" in done.stderr, done.stderr
        assert done.stdout == "" and not (folder / out).exists()
    assert not (folder / "rec" / "new").exists()
