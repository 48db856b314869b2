"""A process killed at every named step of publish, read, wake, sleep, join, leave, cancel and resize.

The others go on; what it held is taken back; what it had published counts; no file is left.
"""

from __future__ import annotations

import itertools
import os
import select
import shutil
import signal
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import penstock
from penstock import shm

ROOT = Path(__file__).parents[2]
NATIVE = ROOT / "native"
SOURCES = [
    "tests/programs/shm_victim.cpp", "shm/membership.cpp", "shm/joining.cpp", "shm/payload.cpp", "shm/bells.cpp",
    "shm/publisher.cpp", "shm/subscriber.cpp", "shm/files.cpp",
    "platform/checksum.cpp", "shm/deaths.cpp", "platform/deaths.cpp", "shm/directory.cpp", "platform/liveness.cpp", "platform/shared_directory.cpp",
    "counters/counters.cpp",
]  # fmt: skip
ACTIONS = [
    "publish", "reliable_publish", "cancel", "grow", "leave_publisher", "join_publisher", "join_subscriber",
    "join_reliable", "read", "read_and_hold", "reliable_read", "leave_subscriber", "sleep",
]  # fmt: skip
LONG = 30.0
#: Of each test alone: how long the compiler takes for all of them says nothing about them.
pytestmark = pytest.mark.timeout(120, func_only=True)
_numbers = itertools.count(1)


def compiled(program: Path, sources: list[str], *flags: str) -> Path:
    """``program`` from the native sources, each compiled again only when it or a header is newer."""
    compiler = shutil.which("g++") or shutil.which("c++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    program.parent.mkdir(parents=True, exist_ok=True)
    headers = max(path.stat().st_mtime for path in NATIVE.rglob("*.hpp"))

    def one(source: str) -> str:
        made = program.parent / (source.replace("/", "-") + ".o")
        if not made.exists() or made.stat().st_mtime < max(headers, (NATIVE / source).stat().st_mtime):
            command = [compiler, "-std=c++20", "-O0", *flags, f"-I{NATIVE}", "-c", "-o", str(made), str(NATIVE / source)]
            subprocess.run(command, check=True)
        return str(made)

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        objects = list(pool.map(one, sources))
    subprocess.run([compiler, "-pthread", "-o", str(program), *objects], check=True)
    return program


@pytest.fixture(scope="session")
def victim() -> Path:
    """The test build, with the named steps in it."""
    return compiled(ROOT / "build" / "victim" / "shm_victim", SOURCES, "-DPENSTOCK_STEPS=1")


class Survivors:
    """A reliable publisher and subscriber of this process, and an unreliable subscriber that sleeps."""

    def __init__(self) -> None:
        self.name = f"/victim/{os.getpid()}/{next(_numbers)}"
        self.publisher = shm.Publisher(self.name, slots=12, slot_size=64, reliable=True, timeout=LONG)
        self.subscriber = shm.Subscriber(self.name, reliable=True, max_active_messages=2)
        self.sleeper = shm.Subscriber(self.name, max_active_messages=1)
        self.sleeper.fileno()
        assert self.sleeper.read(0) is None  # armed: whoever publishes has to wake it
        self.seen = 0

    def run(self, victim: Path, *arguments: str) -> tuple[int, list[str]]:
        process = subprocess.Popen(
            [victim, self.name, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert process.stdin is not None and process.stdout is not None
        if "read" in arguments[0] or arguments[0] == "leave_subscriber":
            assert process.stdout.readline() == "ready\n"
            for _ in range(4):
                self.publisher.publish(b"for the victim")
        out, _ = process.communicate("\n", timeout=LONG)
        return process.returncode, [line for line in out.split() if line != "ready"]

    def read_everything(self) -> None:
        while (message := self.subscriber.read(0)) is not None:
            assert message.ordinal == self.seen + 1, "a reliable subscriber missed one"
            assert bytes(message) in (b"victim", b"grown", b"for the victim", b"on we go")
            self.seen = message.ordinal
            message.release()

    def go_on(self) -> None:
        """More than a full round of the slots, one by one and in a burst: none of them may be lost."""
        self.read_everything()
        for _ in range(30):
            self.publisher.publish(b"on we go")
            self.read_everything()
        with shm.Subscriber(self.name, max_active_messages=1):  # who joins finds the dead
            pass
        assert self.sleeper.read_newest(0) is not None
        (channel,) = (found for found in shm.channels() if found.name == self.name)
        assert [member.pid for member in channel.members] == [os.getpid()] * 3
        assert (channel.owned_slots, channel.held_slots) == (0, 0), channel
        self.publisher.publish_many([b"on we go"] * 11)
        self.read_everything()
        assert self.subscriber.ledger.lost == 0 and self.subscriber.ledger.balanced
        with shm.Publisher(self.name, max_reserved=7) as hungry:
            drafts = [hungry.reserve(10) for _ in range(7)]
            for draft in drafts:
                draft.cancel()

    def close(self) -> None:
        for handle in (self.publisher, self.subscriber, self.sleeper):
            handle.close()
        assert not [channel for channel in shm.channels() if channel.name == self.name]


@pytest.mark.parametrize("action", ACTIONS)
def test_killed_at_every_step(victim: Path, action: str) -> None:
    survivors = Survivors()
    code, steps = survivors.run(victim, action, "list")
    assert code == 0 and steps
    survivors.go_on()
    survivors.close()
    visits = {step: steps.count(step) for step in dict.fromkeys(steps)}
    print(action, visits)
    for step, count in visits.items():
        for nth in {1, count}:
            survivors = Survivors()
            code, _ = survivors.run(victim, action, "kill", step, str(nth))
            assert code in (-signal.SIGKILL, 0), (action, step, code)
            # A retry after a lost race may change the number of visits; the first one is always reached.
            assert nth > 1 or code == -signal.SIGKILL, (action, step)
            survivors.go_on()
            survivors.close()


def test_alone_and_killed_at_every_step_of_joining(victim: Path) -> None:
    """A half-created channel is repaired, and the name can be used again."""
    for action in ("join_publisher", "join_subscriber", "join_virtual"):
        name = f"/victim/alone/{os.getpid()}"
        listed = subprocess.run([victim, name, action, "list"], capture_output=True, text=True, check=True)
        for step in dict.fromkeys(listed.stdout.split()):
            for nth in (1, 2, 3):
                done = subprocess.run([victim, name, action, "kill", step, str(nth)], capture_output=True)
                assert done.returncode in (-signal.SIGKILL, 0), (action, step, done)
                mux = f"{name}-mux" if action == "join_virtual" else None
                with shm.Publisher(name, slots=8, mux=mux) as publisher, shm.Subscriber(name, mux=mux) as subscriber:
                    publisher.publish(b"x")
                    message = subscriber.read(0)
                    assert message is not None
                    del message
                shm.clean()
                assert not shm.channels()
                left = [path.name for path in Path(os.environ["PENSTOCK_SHM_DIR"]).iterdir() if "%2F" in path.name]
                assert not left, (action, step, left)


def test_a_waker_that_dies_between_its_steps(victim: Path) -> None:
    """The bell has rung and the mark is still there: the sleeper wakes, sleeps again and is woken again."""
    for step in ("wake.before_bell", "wake.after_bell", "commit.after_install", "commit.after_help"):
        survivors = Survivors()
        code, _ = survivors.run(victim, "publish", "kill", step, "1")
        assert code == -signal.SIGKILL
        message = survivors.sleeper.read(LONG)  # published is published, rung for or not
        assert message is not None and bytes(message) == b"victim"
        del message
        assert survivors.sleeper.read(0.01) is None
        survivors.publisher.publish(b"on we go")
        assert survivors.sleeper.read(LONG) is not None
        survivors.go_on()
        survivors.close()


def test_a_select_user_misses_nothing_of_a_publisher_that_died_before_it_rang(victim: Path) -> None:
    for step in ("commit.after_install", "commit.after_help", "wake.before_bell"):
        survivors = Survivors()
        code, _ = survivors.run(victim, "publish", "kill", step, "1")
        assert code == -signal.SIGKILL
        assert select.select([survivors.sleeper], [], [], LONG)[0]
        message = survivors.sleeper.read(0)
        assert message is not None and bytes(message) == b"victim"
        del message
        assert survivors.sleeper.read(0) is None
        assert not select.select([survivors.sleeper], [], [], 0)[0], "it is quiet again"
        survivors.read_everything()
        survivors.close()


def test_a_sleeper_that_sleeps_again_between_the_wakers_steps(victim: Path) -> None:
    survivors = Survivors()
    process = subprocess.Popen([victim, survivors.name, "publish", "stop", "wake.after_bell", "1"])
    os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
    message = survivors.sleeper.read(LONG)
    assert message is not None
    del message
    assert survivors.sleeper.read(0) is None  # armed anew, of another generation, while the waker stands still
    os.kill(process.pid, signal.SIGCONT)
    assert process.wait(LONG) == 0
    assert survivors.sleeper.wait(LONG), "the waker's late mark must not undo the new sleep"
    survivors.read_everything()
    survivors.close()


def test_a_stopped_publisher_holds_nobody_up(victim: Path) -> None:
    survivors = Survivors()
    for step in ("commit.before_install", "commit.after_install", "commit.after_live", "help.before_tail", "take.after_claiming"):
        process = subprocess.Popen([victim, survivors.name, "publish", "stop", step, "1"])
        os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
        for _ in range(40):
            survivors.publisher.publish(b"on we go")
            survivors.read_everything()
        os.kill(process.pid, signal.SIGCONT)
        assert process.wait(LONG) == 0
        survivors.read_everything()
    survivors.go_on()
    survivors.close()


def test_a_helper_that_dies_too(victim: Path) -> None:
    """One publisher stands still with its message installed; who completes it for the first one dies in the midst."""
    for step in ("help.before_live", "help.after_live", "help.before_tail", "help.after_tail"):
        survivors = Survivors()
        later = [victim, survivors.name, "publish_later", "kill", step, "1"]  # who joins completes it too
        helper = subprocess.Popen(later, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert helper.stdout is not None and helper.stdout.readline() == b"ready\n"
        process = subprocess.Popen([victim, survivors.name, "publish", "stop", "commit.after_install", "1"])
        os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
        helper.communicate(b"\n", timeout=LONG)
        assert helper.returncode == -signal.SIGKILL, step
        survivors.read_everything()
        assert survivors.seen >= 1, "what is installed is published"
        os.kill(process.pid, signal.SIGCONT)
        assert process.wait(LONG) == 0
        survivors.go_on()
        survivors.close()


def test_a_dead_reliable_subscriber_holds_a_publisher_only_until_it_is_found(victim: Path) -> None:
    name = f"/victim/dead/{os.getpid()}"
    with shm.Publisher(name, slots=8, reliable=True, timeout=LONG) as publisher:
        process = subprocess.Popen(
            [victim, name, "reliable_read", "kill", "pin.after_check", "1"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert process.stdout is not None
        process.stdout.readline()
        with shm.Subscriber(name, reliable=True, max_active_messages=1) as subscriber:
            publisher.publish(b"1")
            process.communicate(b"\n", timeout=LONG)
            assert process.returncode == -signal.SIGKILL
            for i in range(20):
                publisher.publish(b"%d" % i)
                message = subscriber.read(LONG)
                assert message is not None
                del message
    assert isinstance(publisher, penstock.Publisher)


def test_a_slot_that_is_being_claimed_is_not_retired(victim: Path) -> None:
    """A publisher that claims the oldest slot lets it go for a subscriber that reads it."""
    name = f"/victim/{os.getpid()}/{next(_numbers)}"
    with (
        shm.Publisher(name, slots=5, retirement=True) as camera,
        shm.Subscriber(name, max_active_messages=1) as viewer,
    ):
        camera.publish_many([b"1", b"2", b"3", b"4", b"5"])
        process = subprocess.run([victim, name, "publish", "kill", "take.after_claiming", "1"], check=False, timeout=LONG)
        assert process.returncode == -signal.SIGKILL
        assert camera.retired() == [], "nobody has read it"
        message = viewer.read(LONG)
        assert message is not None and bytes(message) == b"1"
        assert camera.retired() == [], "it is held"
        message.release()
        assert len(camera.retired(LONG)) == 1
