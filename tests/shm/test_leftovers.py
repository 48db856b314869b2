"""Killed processes leave nothing, and nobody takes the living for dead: not from another PID namespace either."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from penstock import _core, shm
from penstock.observe.memory import seen

LONG = 30


def can_unshare(*options: str) -> bool:
    unshare = shutil.which("unshare")
    return unshare is not None and subprocess.run([unshare, *options, "true"], capture_output=True).returncode == 0


in_namespace = pytest.mark.skipif(not can_unshare("--pid", "--fork"), reason="no PID namespace can be made here")


def files(directory: Path, kind: str) -> set[str]:
    return {path.name for path in directory.iterdir() if path.name.startswith(kind)}


def start(code: str, *before: str) -> subprocess.Popen[bytes]:
    process = subprocess.Popen(
        [*before, sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert process.stdout is not None and process.stdout.readline() == b"ready\n"
    return process


def kill(process: subprocess.Popen[bytes]) -> None:
    os.kill(process.pid, signal.SIGKILL)
    process.communicate(timeout=LONG)


BUS = "import penstock; bus = penstock.publisher('bus:x'); print('ready', flush=True); input()"
CHANNEL = "from penstock import shm; p = shm.Publisher('/left', slots=8); print('ready', flush=True); input()"


@pytest.mark.parametrize("code", [BUS, CHANNEL])
@pytest.mark.parametrize("who", ["a bus", "a channel", "clean", "a look"])
def test_what_a_killed_process_leaves_is_swept_by_the_next(code: str, who: str) -> None:
    directory = Path(os.environ["PENSTOCK_SHM_DIR"])
    dead = start(code)
    assert files(directory, f"counters.{dead.pid}.") and files(directory, f"alive.{dead.pid}.")
    kill(dead)
    if who == "clean":
        shm.clean()
    elif who == "a look":
        _core.counters_read()
    else:
        next_one = start(BUS if who == "a bus" else CHANNEL.replace("/left", "/other"))
        next_one.communicate(b"\n", timeout=LONG)
    assert not files(directory, f"counters.{dead.pid}.") and not files(directory, f"alive.{dead.pid}.")
    shm.clean()
    assert not files(directory, "%2Fleft")


HOLDS = """
from penstock import shm
subscriber = shm.Subscriber({name!r})
held = [subscriber.receive({long}), subscriber.receive({long})]
print('ready', flush=True)
input()
"""


@pytest.mark.parametrize("command", [False, True])
def test_clean_frees_what_a_killed_process_held_where_others_go_on(name: str, command: bool) -> None:
    with shm.Publisher(name, slots=8) as publisher:
        publisher.publish_many([b"one", b"two"])
        dead = start(HOLDS.format(name=name, long=LONG))
        kill(dead)
        (channel,) = (channel for channel in shm.channels() if channel.name == name)
        assert [member.held for member in channel.subscribers] == [2] and channel.held_slots == 2
        if command:
            told = subprocess.run([sys.executable, "-m", "penstock", "shm", "clean"], capture_output=True, text=True, timeout=LONG)
            assert told.returncode == 0 and name in told.stdout and "nothing" not in told.stdout
        else:
            assert shm.sweep() == ([], [name])
        (channel,) = (channel for channel in shm.channels() if channel.name == name)
        assert channel.subscribers == () and channel.held_slots == 0 and len(channel.publishers) == 1
        assert shm.sweep() == ([], [])
        with shm.Subscriber(name, history=False) as subscriber:
            publisher.publish(b"goes on")
            assert subscriber.receive(LONG) == b"goes on"


@in_namespace
def test_another_namespace_takes_nobody_for_dead(name: str) -> None:
    directory = Path(os.environ["PENSTOCK_SHM_DIR"])
    with shm.Publisher(name, slots=8) as publisher, shm.Subscriber(name) as subscriber:
        own = files(directory, f"counters.{os.getpid()}.") | files(directory, f"alive.{os.getpid()}.")
        assert own
        code = f"""
import penstock._core
from penstock import shm
shm.clean()
assert [count for count in penstock._core.counters_read() if count['name'] == {name!r}], "a living process's counters"
with shm.Publisher({name!r}) as publisher:
    publisher.publish(b"from another namespace")
(channel,) = (channel for channel in shm.channels() if channel.name == {name!r})
assert all(member.alive for member in channel.members), channel
print('ready', flush=True)
"""
        start(code, "unshare", "--pid", "--fork").communicate(timeout=LONG)
        assert own <= {path.name for path in directory.iterdir()}
        publisher.publish(b"here")
        got = [bytes(message) for message in subscriber.read_many(8, 0)]
        assert got == [b"from another namespace", b"here"]


@in_namespace
def test_who_dies_in_another_namespace_is_found(name: str) -> None:
    """Its process has the pid of one that lives here: 1."""
    directory = Path(os.environ["PENSTOCK_SHM_DIR"])
    code = f"""
from penstock import shm
subscriber = shm.Subscriber({name!r}, reliable=True)
print('ready', flush=True)
input()
"""
    with shm.Publisher(name, slots=8, reliable=True, timeout=LONG) as publisher, shm.Subscriber(name) as subscriber:
        dead = start(code, "unshare", "--pid", "--fork", "--kill-child")
        pids = {member.pid for member in shm.channels()[0].members}
        assert len(pids) == 2 and os.getpid() in pids and 1 not in pids, "it has the pid that it has here"
        shm.clean()
        assert files(directory, "counters.1."), "it lives"
        kill(dead)
        for _ in range(20):
            assert publisher.publish(b"goes on")
            assert subscriber.read(0) is not None
        shm.clean()
        assert not files(directory, "counters.1.") and not files(directory, "alive.1.")


@pytest.mark.skipif(not can_unshare("--mount"), reason="only root can make a directory of another user, in a mount namespace")
def test_a_directory_that_another_user_made_is_not_used(tmp_path: Path) -> None:
    """In a /dev/shm of its own: the programs of whoever runs the tests use the real one."""
    theirs = Path(f"/dev/shm/penstock-{os.geteuid()}")
    environment = {key: value for key, value in os.environ.items() if key != "PENSTOCK_SHM_DIR"}
    environment["TMPDIR"] = str(tmp_path)
    code = "from penstock import _core; print(_core.counters_directory())"
    script = f'mount -t tmpfs none /dev/shm && mkdir -m 777 {theirs} && chown 12345:12345 {theirs} && exec "$@"'
    command = ["unshare", "--mount", "sh", "-c", script, "sh", sys.executable, "-c", code]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=LONG)
    assert done.stdout.strip() == str(tmp_path / theirs.name), done


def test_a_directory_in_which_others_could_remove_files_is_refused(tmp_path: Path) -> None:
    open_to_all = tmp_path / "open"
    open_to_all.mkdir()
    code = "import penstock; penstock.publisher('shm:/x').close(); print('fine')"
    for mode, fine in ((0o777, False), (0o1777, True), (0o700, True)):
        open_to_all.chmod(mode)
        environment = os.environ | {"PENSTOCK_SHM_DIR": str(open_to_all)}
        done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=LONG)
        assert ("fine" in done.stdout) == fine, (oct(mode), done)
        assert fine or "sticky" in done.stderr


@pytest.mark.skipif(os.getuid() != 0, reason="only root can be two users")
@pytest.mark.parametrize("end", ["leaves", "dies"])
def test_a_shared_channel_goes_on_without_the_user_who_made_it(end: str) -> None:
    """Each may remove its own files alone (the sticky bit); the channel is used again all the same."""
    shared = Path(tempfile.mkdtemp(prefix="penstock-users-", dir="/dev/shm"))
    shared.chmod(0o1777)

    def start_as(user: int, code: str) -> subprocess.Popen[str]:
        begin = f"import os, penstock; from penstock import shm\nos.setgroups([]); os.setgid({user}); os.setuid({user})\n"
        environment = os.environ | {"PENSTOCK_SHM_DIR": str(shared)}
        command = [sys.executable, "-c", begin + code]
        return subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def said(process: subprocess.Popen[str]) -> str:
        assert process.stdout is not None
        return process.stdout.readline()

    first = start_as(12345, """
with penstock.publisher("shm:/arm", mode=0o666, slots=16), penstock.publisher("shm:/part?mux=/mux", mode=0o666, slots=16):
    print("made", flush=True)
    input()
""")  # fmt: skip
    second = start_as(65534, """
input()
with penstock.subscriber("shm:/arm", mode=0o666), penstock.subscriber("shm:/part?mux=/mux", mode=0o666):
    print("joined", flush=True)
    input()
for _ in range(3):
    with penstock.subscriber("shm:/arm", mode=0o666) as early, penstock.publisher("shm:/arm", mode=0o666, slots=8) as own:
        own.publish(b"mine")
        assert bytes(early.read(0)) == b"mine" and own.slots == 8 and early.ledger.matched == 1
    with penstock.publisher("shm:/part?mux=/mux", mode=0o666) as part:
        part.publish(b"x")
    shm.clean()
print("works", flush=True)
""")  # fmt: skip
    try:
        assert said(first) == "made\n"
        assert second.stdin is not None
        if end == "dies":
            first.kill()
            first.wait(LONG)
        print(file=second.stdin, flush=True)
        assert said(second) == "joined\n"
        first.communicate("\n" if end == "leaves" else None, timeout=LONG)
        print(file=second.stdin, flush=True)
        assert said(second) == "works\n"
        second.communicate(timeout=LONG)
        owner = start_as(12345, "print(sorted(shm.clean()))")
        assert owner.communicate(timeout=LONG)[0] == "['/arm', '/mux']\n"
        assert not files(shared, "%2F")
    finally:
        for process in (first, second):
            process.kill()
            process.wait(LONG)
        shutil.rmtree(shared)


@in_namespace
def test_handles_of_two_containers_are_told_apart() -> None:
    """Both programs have pid 1, each in its own namespace. From outside each has a pid of its own; from a third namespace
    both have none, and are still two."""
    inside = ("unshare", "--pid", "--fork", "--kill-child")
    look = (
        "from penstock.observe.memory import seen; "
        "print(sorted((b.kind, b.here, b.lag, b.program != '') for b in seen() if b.name == '/two'))"
    )
    reader = start("from penstock import shm; s = shm.Subscriber('/two'); print('ready', flush=True); input()", *inside)
    writer = start(
        "from penstock import shm; p = shm.Publisher('/two', slots=8); p.publish(b'x'); print('ready', flush=True); input()",
        *inside,
    )
    try:
        blocks = [block for block in seen() if block.name == "/two"]
        assert {(block.kind, block.lag) for block in blocks} == {("publisher", 0), ("subscriber", 1)}
        assert len({block.pid for block in blocks}) == 2 and 1 not in {block.pid for block in blocks}
        channel = next(channel for channel in shm.channels() if channel.name == "/two")
        assert {member.pid for member in channel.members} == {block.pid for block in blocks}
        said = subprocess.run(
            ["unshare", "--pid", "--fork", sys.executable, "-c", look], capture_output=True, text=True, timeout=LONG
        )
        assert said.stdout.strip() == "[('publisher', False, 0, True), ('subscriber', False, 1, True)]", said.stderr
    finally:
        for process in (reader, writer):
            kill(process)
