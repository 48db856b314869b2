"""More than one process: exchange, fork, signals, permissions, damage, a full file system."""

from __future__ import annotations

import copy
import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

import penstock
from penstock import shm

LONG = 30.0

READER = """
import sys
from penstock import shm
subscriber = shm.Subscriber(sys.argv[1], reliable=True, max_active_messages=4)
print("ready", flush=True)
total = count = 0
while count < int(sys.argv[2]):
    message = subscriber.read(30)
    assert message is not None and message.ordinal == count + 1, message
    assert bytes(message) == b"%d" % count
    count += 1
print(count, subscriber.ledger.lost)
"""


def child(code: str, *arguments: str, **options: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options)  # type: ignore[call-overload,no-any-return]


def test_two_processes_lose_nothing(name: str) -> None:
    count = 20_000
    with shm.Publisher(name, slots=32, slot_size=64, reliable=True, timeout=LONG) as publisher:
        readers = [child(READER, name, str(count)) for _ in range(2)]
        for reader in readers:
            assert reader.stdout is not None and reader.stdout.readline() == "ready\n"
        assert publisher.wait_ready(2, LONG)
        publisher.publish_many([b"%d" % i for i in range(count)])
        for reader in readers:
            out, errors = reader.communicate(timeout=LONG)
            assert out == f"{count} 0\n", errors


def test_what_a_killed_process_left_goes_with_the_next_one(name: str) -> None:
    code = """
import os, sys, signal
from penstock import shm
publisher, subscriber = shm.Publisher(sys.argv[1]), shm.Subscriber(sys.argv[1])
publisher.publish(b"x")
message, draft = subscriber.read(0), publisher.reserve(5)
subscriber.fileno()
os.kill(os.getpid(), signal.SIGKILL)
"""
    dead = child(code, name)
    dead.communicate(timeout=LONG)
    assert dead.returncode == -signal.SIGKILL
    left = [channel for channel in shm.channels() if channel.name == name]
    assert len(left) == 1 and not any(member.alive for member in left[0].members)
    with shm.Publisher(name, slots=9) as publisher, shm.Subscriber(name) as subscriber:
        assert publisher.publish(b"new life") == 1
        message = subscriber.read(0)
        assert message is not None and bytes(message) == b"new life"
        del message
    assert not [path for path in Path(os.environ["PENSTOCK_SHM_DIR"]).iterdir() if "%2F" in path.name]
    dead = child(code, name)
    dead.communicate(timeout=LONG)
    assert shm.clean() == [name]


def test_fork(name: str) -> None:
    publisher, subscriber = shm.Publisher(name), shm.Subscriber(name)
    publisher.publish(b"held")
    message = subscriber.read(0)
    assert message is not None
    publisher.publish(b"of many")
    batch = subscriber.read_many(1, 0)
    draft = publisher.reserve(3)
    child_pid = os.fork()
    if child_pid == 0:
        code = 1
        try:
            for call in (lambda: publisher.publish(b"x"), lambda: subscriber.read(0), lambda: publisher.reserve(1)):
                try:
                    call()
                except penstock.StateError as error:
                    assert "forked" in str(error)
                else:
                    raise AssertionError("an inherited handle worked")
            for use in (
                lambda: bytes(message), lambda: memoryview(message), lambda: message.value, lambda: hash(message),
                lambda: message == b"held", lambda: copy.copy(message), lambda: copy.deepcopy(message),
                lambda: batch[0], lambda: list(batch), lambda: batch.copies(),
                lambda: draft.write(b"own"), lambda: draft[0], lambda: draft.__setitem__(0, 1), lambda: draft.view(),
                lambda: memoryview(draft), lambda: draft.publish(),
            ):  # fmt: skip
                try:
                    use()
                except penstock.StateError as error:
                    assert "forked" in str(error)
                else:
                    raise AssertionError("the parent's memory was used")
            message.release()  # nothing of this may reach shared memory
            batch.release()
            draft.cancel()
            publisher.close()
            subscriber.close()
            with shm.Publisher(name) as own:
                own.publish(b"from the child")
            code = 0
        finally:
            os._exit(code)
    assert os.waitpid(child_pid, 0)[1] == 0
    assert bytes(message) == b"held" and subscriber.held == 2 and batch.copies() == [b"of many"]
    draft.write(b"abc")
    draft.publish()
    message.release()
    found = [bytes(other) for other in subscriber.read_many(10, LONG)]
    assert found == [b"from the child", b"abc"]
    publisher.close()
    subscriber.close()


def test_ctrl_c_ends_a_wait(name: str) -> None:
    code = """
import sys
from penstock import shm
subscriber = shm.Subscriber(sys.argv[1])
print("ready", flush=True)
try:
    subscriber.read()
except KeyboardInterrupt:
    print("interrupted")
"""
    waiting = child(code, name)
    assert waiting.stdout is not None and waiting.stdout.readline() == "ready\n"
    while not any(member.asleep for channel in shm.channels() for member in channel.members if channel.name == name):
        os.sched_yield()
    waiting.send_signal(signal.SIGINT)
    out, errors = waiting.communicate(timeout=LONG)
    assert (out, waiting.returncode) == ("interrupted\n", 0), errors
    assert not [channel for channel in shm.channels() if channel.name == name], "an orderly exit leaves nothing"


def test_exit_with_everything_open_leaves_nothing(name: str) -> None:
    code = """
import sys
from penstock import shm
publisher, subscriber = shm.Publisher(sys.argv[1]), shm.Subscriber(sys.argv[1])
publisher.publish(b"x")
message = subscriber.read(0)
view = memoryview(message)
draft = publisher.reserve(5)
"""
    ended = child(code, name)
    _, errors = ended.communicate(timeout=LONG)
    assert ended.returncode == 0 and not errors
    assert not [path for path in Path(os.environ["PENSTOCK_SHM_DIR"]).iterdir() if "%2F" in path.name]


def test_wait_with_another_descriptor(name: str) -> None:
    read_end, write_end = os.pipe()
    with shm.Publisher(name) as publisher, shm.Subscriber(name) as subscriber:
        timer = threading.Timer(0.02, os.write, args=(write_end, b"x"))
        timer.start()
        assert subscriber.wait(LONG, read_end) is False
        timer.join()
        publisher.publish(b"x")
        assert subscriber.wait(LONG, read_end) is True
    os.close(read_end)
    os.close(write_end)


def test_a_reliable_publisher_waits_and_is_woken(name: str) -> None:
    with shm.Publisher(name, slots=4, reliable=True) as publisher, shm.Subscriber(name, reliable=True) as subscriber:
        publisher.publish_many([b"x"] * 4)
        assert publisher.wait(0.01) is False
        with pytest.raises(TimeoutError):
            publisher.publish(b"x", timeout=0.01)
        timer = threading.Timer(0.02, lambda: subscriber.read(0))
        timer.start()
        assert publisher.wait(LONG) is True
        timer.join()


@pytest.mark.parametrize("spin_us", [0, 200])
def test_spinning(name: str, spin_us: int) -> None:
    with shm.Publisher(name) as publisher, shm.Subscriber(name, spin_us=spin_us) as subscriber:
        thread = threading.Thread(target=lambda: [publisher.publish(b"%d" % i) for i in range(50)])
        thread.start()
        for i in range(50):
            message = subscriber.read(LONG)
            assert message is not None and bytes(message) == b"%d" % i
            del message
        thread.join()


# --- permissions ------------------------------------------------------------------------------------------------------


def files_of(name: str) -> list[Path]:
    encoded = name.replace("/", "%2F")
    return [path for path in Path(os.environ["PENSTOCK_SHM_DIR"]).iterdir() if path.name.startswith(encoded + ".")]


def test_a_mode_that_the_channel_does_not_have_is_refused(name: str) -> None:
    with shm.Subscriber(name) as subscriber:
        with pytest.raises(penstock.RefusedError, match=r"mode=0o666 but the channel has 0o600"):
            shm.Publisher(name, mode=0o666)
        assert {path.stat().st_mode & 0o777 for path in files_of(name)} == {0o600}
        with shm.Publisher(name, mode=0o600) as publisher:
            publisher.publish(b"x")
            assert subscriber.read(0) == b"x"


def test_files_are_private_unless_shared(name: str) -> None:
    with shm.Publisher(name), shm.Subscriber(name) as subscriber:
        subscriber.fileno()
        assert {path.stat().st_mode & 0o777 for path in files_of(name)} == {0o600}
    with shm.Publisher(name, mode=0o660, group=os.getgid()), shm.Subscriber(name, mode=0o660) as subscriber:
        subscriber.fileno()
        assert {path.stat().st_mode & 0o777 for path in files_of(name)} == {0o660}
    with pytest.raises(penstock.InvalidArgument, match="no group"):
        shm.Publisher(name, group="no-such-group")


def test_payload_is_read_only_for_readers(name: str) -> None:
    with shm.Publisher(name) as publisher:
        publisher.publish(b"x")
        code = """
import sys
from penstock import shm
subscriber = shm.Subscriber(sys.argv[1])
message = subscriber.read(0)
print([line.split()[1] for line in open("/proc/self/maps") if ".payload." in line])
"""
        out, _ = child(code, name).communicate(timeout=LONG)
        assert out == "['r--s']\n"


@pytest.mark.skipif(os.getuid() != 0, reason="only root can make files of another user")
def test_channels_of_other_users_are_refused(name: str) -> None:
    with shm.Publisher(name):
        for path in files_of(name):
            os.chown(path, 12345, 12345)
        with pytest.raises(penstock.RefusedError, match="user 12345"):
            shm.Subscriber(name)
        for path in files_of(name):
            os.chown(path, 0, 0)


def test_a_link_is_refused(name: str, tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.write_bytes(b"precious")
    link = Path(os.environ["PENSTOCK_SHM_DIR"]) / (name.replace("/", "%2F") + ".channel")
    link.symlink_to(target)
    with pytest.raises(penstock.RefusedError, match="symbolic link"):
        shm.Publisher(name)
    link.unlink()
    assert target.read_bytes() == b"precious"


# --- damage -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("content", [b"", b"short", bytes(100_000), b"\xff" * 100_000])
def test_a_foreign_file_is_refused(name: str, content: bytes) -> None:
    path = Path(os.environ["PENSTOCK_SHM_DIR"]) / (name.replace("/", "%2F") + ".channel")
    path.write_bytes(content)
    for opener in (shm.Publisher, shm.Subscriber):
        with pytest.raises(penstock.CorruptionError, match="remove it"):
            opener(name)
    (channel,) = (channel for channel in shm.channels() if channel.name == name)
    assert channel.problem
    path.unlink()


FUZZ = """
import os, random, sys
from pathlib import Path
import penstock
from penstock import shm

chance = random.Random(int(sys.argv[2]))
name = sys.argv[1]
publisher = shm.Publisher(name, slots=8, slot_size=256, timeout=0.02, metadata_size=8)
subscriber = shm.Subscriber(name, max_active_messages=2)
subscriber.fileno()
directory = Path(os.environ["PENSTOCK_SHM_DIR"])
files = [path for path in directory.iterdir() if ".channel" in path.name or ".tables." in path.name]
publisher.publish(b"x" * 100)
for path in files:
    with path.open("r+b") as file:
        size = path.stat().st_size
        for _ in range(chance.choice((1, 20, 400))):
            file.seek(chance.randrange(size - 8))
            file.write(chance.choice((b"\\0" * 8, b"\\xff" * 8, chance.randbytes(8), chance.randbytes(1))))
errors = (penstock.PenstockError, OSError)
for _ in range(30):
    for call in (
        lambda: publisher.publish(b"y" * chance.randrange(300)),
        lambda: bytes(subscriber.read(0) or b""),
        lambda: subscriber.read_newest(0),
        lambda: subscriber.find(1),
        lambda: list(subscriber.read_many(4, 0)),
        lambda: subscriber.wait(0.0001),
        lambda: subscriber.ledger,
        lambda: publisher.wait_ready(1, 0),
        lambda: shm.channels(),
    ):
        try:
            call()
        except errors:
            pass
for opener in (shm.Publisher, shm.Subscriber):
    try:
        opener(name).close()
    except errors:
        pass
publisher.close()
subscriber.close()
"""


def test_random_bytes_in_control_blocks_crash_nothing(name: str, seed: int, kills: int | None) -> None:
    chance = random.Random(seed)
    for _ in range(kills or 25):
        number = chance.randrange(1 << 30)
        fuzzed = child(FUZZ, name, str(number))
        _, errors = fuzzed.communicate(timeout=LONG)
        assert fuzzed.returncode == 0, (number, fuzzed.returncode, errors)
        for path in files_of(name):
            path.unlink()


# --- a full file system -----------------------------------------------------------------------------------------------


@pytest.mark.skipif(os.getuid() != 0, reason="only root can mount a small file system")
def test_a_full_file_system_is_told_at_once(name: str, tmp_path: Path) -> None:
    place = tmp_path / "small"
    place.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(place)], capture_output=True)
    if mounted.returncode:
        pytest.skip(f"cannot mount here: {mounted.stderr.decode()}")
    code = """
import sys
from penstock import shm
try:
    shm.Publisher(sys.argv[1], slots=64, slot_size=1 << 20)
except OSError as error:
    assert error.errno == 28 and "fewer or smaller slots" in str(error), error
assert not shm.channels()
publisher = shm.Publisher(sys.argv[1], slots=8, slot_size=1024)
subscriber = shm.Subscriber(sys.argv[1])
try:
    publisher.reserve(1 << 20)
except OSError as error:
    assert error.errno == 28, error
else:
    raise SystemExit("it grew")
publisher.publish(b"still works")
assert bytes(subscriber.read(0)) == b"still works"
publisher.publish(bytes(2000))  # it grows
for _ in range(2):
    try:
        publisher.publish(bytes(2 << 20))
    except OSError as error:
        assert error.errno == 28, error
    else:
        raise SystemExit("it grew")
for _ in range(16):
    publisher.publish(bytes(2000))  # in every slot
    shm.Publisher(sys.argv[1]).publish(bytes(2500))
"""
    try:
        environment = {**os.environ, "PENSTOCK_SHM_DIR": str(place)}
        tried = child(code, name, env=environment)
        _, errors = tried.communicate(timeout=LONG)
        assert tried.returncode == 0, errors
    finally:
        subprocess.run(["umount", str(place)], check=True)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can mount a small file system")
def test_small_messages_go_on_where_one_slot_alone_has_room_to_grow(name: str, tmp_path: Path) -> None:
    place = tmp_path / "small"
    place.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=300k", "tmpfs", str(place)], capture_output=True)
    if mounted.returncode:
        pytest.skip(f"cannot mount here: {mounted.stderr.decode()}")
    code = """
import sys
from penstock import shm
publisher, subscriber = shm.Publisher(sys.argv[1], slots=4), shm.Subscriber(sys.argv[1])
publisher.publish(bytes(100_000))
assert len(subscriber.read(0)) == 100_000
for number in range(20):
    publisher.publish(b"%d" % number)
    assert bytes(subscriber.read(0)) == b"%d" % number
"""
    try:
        tried = child(code, name, env={**os.environ, "PENSTOCK_SHM_DIR": str(place)})
        _, errors = tried.communicate(timeout=LONG)
        assert tried.returncode == 0, errors
    finally:
        subprocess.run(["umount", str(place)], check=True)


def test_ctrl_c_beside_waiting_threads_leaves_nothing(name: str) -> None:
    code = """
import sys, threading, time
from penstock import shm
publisher = shm.Publisher(sys.argv[1] + "-full", reliable=True)
threading.Thread(target=publisher.publish, args=(b"nobody listens",), daemon=True).start()
subscriber = shm.Subscriber(sys.argv[1], on_message=print)
other = shm.Subscriber(sys.argv[1])
threading.Thread(target=other.read, daemon=True).start()
print("ready", flush=True)
time.sleep(3600)
"""
    waiting = child(code, name)
    assert waiting.stdout is not None and waiting.stdout.readline() == "ready\n"
    deadline = time.monotonic() + LONG
    while sum(member.asleep for channel in shm.channels() if channel.name.startswith(name) for member in channel.members) < 3:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    waiting.send_signal(signal.SIGINT)
    _, errors = waiting.communicate(timeout=LONG)
    assert waiting.returncode == -signal.SIGINT, errors
    assert errors.strip().endswith("KeyboardInterrupt") and "ClosedError" not in errors
    left = [path.name for path in Path(os.environ["PENSTOCK_SHM_DIR"]).iterdir()]
    assert not [name for name in left if "%2F" in name or f".{waiting.pid}." in name]


def test_the_ledger_in_a_forked_child_moves_nothing(name: str) -> None:
    mux = name + "-mux"
    with (
        shm.Publisher(name, mux=mux) as publisher,
        shm.Publisher(name + "-other", mux=mux) as other,
        shm.Subscriber(name, mux=mux) as subscriber,
    ):
        publisher.publish(b"1")
        assert subscriber.read(0) is not None
        [before] = [member.next_ordinal for member in shm.channels()[0].subscribers]
        other.publish_many([b"x"] * 5)
        child_pid = os.fork()
        if child_pid == 0:
            code = 1
            try:
                code = 0 if subscriber.ledger.delivered == 1 else 2
            finally:
                os._exit(code)
        assert os.waitpid(child_pid, 0)[1] == 0
        assert [member.next_ordinal for member in shm.channels()[0].subscribers] == [before]


NEVER_ASKED = """
import pathlib, sys
from penstock import shm

def resident():
    return int(pathlib.Path("/proc/self/statm").read_text().split()[1]) * 4096

with shm.Publisher(sys.argv[1], retirement=True, slots=8) as publisher:
    batch = [b"x"] * 1000
    publisher.publish_many(batch)
    before = resident()
    for _ in range(2_000):
        publisher.publish_many(batch)
    print(resident() - before)
    told = [len(publisher.retired()) for _ in range(4)]
    print(told)
"""


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs /proc")
def test_retirements_that_nobody_asks_for_take_no_memory(name: str) -> None:
    command = [sys.executable, "-c", NEVER_ASKED, name]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LONG)
    grown, told = done.stdout.splitlines()
    assert int(grown) < 8 << 20, "16 bytes a message would be 32 MB"
    assert told == "[1000000, 1000000, 1000, 0]", "a call tells a million, the next one the others"
