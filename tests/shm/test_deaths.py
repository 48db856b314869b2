"""What is known of a process that was killed: its last message, what it held, what it never read."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
import uuid
from pathlib import Path

import pytest

from penstock import shm
from penstock.shm import DeadMember, Death

BEGIN = "import os, signal, sys\nfrom penstock import shm\nname = sys.argv[1]\n"
DIE = "\nos.kill(os.getpid(), signal.SIGKILL)\n"


@pytest.fixture
def name() -> str:
    return f"/deaths-{uuid.uuid4().hex[:12]}"


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    return tmp_path


def killed(name: str, text: str) -> int:
    """The pid of a program that ran ``text`` and was killed."""
    program = subprocess.Popen([sys.executable, "-c", BEGIN + text + DIE, name])
    assert program.wait(120) == -signal.SIGKILL
    return program.pid


def death_of(pid: int) -> Death:
    return next(death for death in shm.deaths() if death.pid == pid)


def member_of(pid: int) -> DeadMember:
    (member,) = death_of(pid).members
    return member


def test_a_killed_publisher_s_last_message_and_reservations_are_known(name: str) -> None:
    with shm.publisher(f"shm:{name}") as other, shm.subscriber(f"shm:{name}"):
        other.publish(b"mine")
        pid = killed(
            name,
            "p = shm.publisher(f'shm:{name}', max_reserved=2)\np.publish(b'one')\np.publish(b'the last ' + b'x' * 200)\n"
            "r = p.reserve(10)\n",
        )
        other.publish(b"after it")
        with shm.publisher(f"shm:{name}"):  # who joins puts right what the dead left
            pass
        assert all(member.pid != pid for channel in shm.channels() for member in channel.members)
    member = member_of(pid)
    assert (member.kind, member.channel, member.messages, member.held) == ("publisher", name, 2, 1)
    assert (member.last_ordinal, member.last_size) == (3, 209)
    assert member.beginning == b"the last " + b"x" * 55
    assert member.joined_ns < member.last_ns < death_of(pid).found_ns


def test_a_killed_subscriber_s_holds_and_unread_messages_are_known(name: str) -> None:
    with shm.publisher(f"shm:{name}", slots=16) as publisher:
        program = subprocess.Popen(
            [
                sys.executable, "-c",
                BEGIN + "s = shm.subscriber(f'shm:{name}')\nprint(1, flush=True)\nkept = [s.read(60), s.read(60)]\n"
                "print(2, flush=True)\nsys.stdin.readline()" + DIE,
                name,
            ],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert program.stdin is not None and program.stdout is not None
        assert program.stdout.readline() == "1\n"
        for number in range(2):
            publisher.publish(b"%d" % number)
        assert program.stdout.readline() == "2\n"
        for _ in range(3):
            publisher.publish(b"never read")
        program.communicate("\n", 120)
        with shm.subscriber(f"shm:{name}"):
            pass
    member = member_of(program.pid)
    assert (member.kind, member.messages, member.last_ordinal, member.unread) == ("subscriber", 2, 2, 3)
    assert member.held == 2


def test_a_channel_that_nobody_is_left_in_is_noted_before_it_goes(name: str) -> None:
    pid = killed(name, "p = shm.publisher(f'shm:{name}')\np.publish(b'alone')\n")
    assert name in shm.clean()
    member = member_of(pid)
    assert (member.channel, member.beginning, member.last_ordinal) == (name, b"alone", 1)


def test_those_whom_nobody_has_found_yet_are_known_and_left_as_they_are(name: str) -> None:
    with shm.publisher(f"shm:{name}"):
        pid = killed(name, "p = shm.publisher(f'shm:{name}')\np.publish(b'x')\n")
        assert member_of(pid) == member_of(pid)
        assert any(member.pid == pid for channel in shm.channels() for member in channel.members)
    assert len(death_of(pid).members) == 1


def test_all_channels_of_a_process_are_one_death(name: str) -> None:
    pid = killed(name, "handles = [shm.publisher(f'shm:{name}/{n}') for n in range(13)]\n")
    shm.clean()
    death = death_of(pid)
    assert (len(death.members), death.left_out) == (10, 3)
    assert len({member.channel for member in death.members}) == 10


def test_the_last_32_processes_are_kept_in_a_file_of_the_user_s_alone(name: str, state: Path) -> None:
    text = """
pids = []
for _ in range(40):
    pid = os.fork()
    if not pid:
        handle = shm.publisher(f"shm:{name}")
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(pid, 0)
    shm.clean()
    pids.append(pid)
print(*pids)
"""
    done = subprocess.run([sys.executable, "-c", BEGIN + text, name], check=True, text=True, capture_output=True,
                          timeout=120)  # fmt: skip
    pids = [int(word) for word in done.stdout.split()]
    assert [death.pid for death in shm.deaths()] == pids[:-33:-1]
    status = (state / "penstock" / "deaths").stat()
    assert status.st_size == 32 * 4096 and stat.S_IMODE(status.st_mode) == 0o600
    assert stat.S_IMODE((state / "penstock").stat().st_mode) == 0o700


def test_of_many_that_died_together_the_last_32_are_known_in_all_their_channels(name: str) -> None:
    text = """
there, ready = os.pipe()
pids = []
for _ in range(40):
    pid = os.fork()
    if not pid:
        handles = [shm.publisher(f"shm:{name}/{n}", max_publishers=64) for n in range(3)]
        os.write(ready, b".")
        signal.pause()
    pids.append(pid)
for _ in pids:
    os.read(there, 1)
for pid in pids:
    os.kill(pid, signal.SIGKILL)
for pid in pids:
    os.waitpid(pid, 0)
"""
    subprocess.run([sys.executable, "-c", BEGIN + text, name], check=True, timeout=120)
    shm.deaths()  # looking changes nothing
    shm.clean()
    found = shm.deaths()
    assert len(found) == 32
    assert {len(death.members) for death in found} == {3}


def test_the_program_of_the_dead_is_named_without_its_arguments(name: str, tmp_path: Path) -> None:
    script = tmp_path / "victim.py"
    script.write_text(BEGIN + "p = shm.publisher(f'shm:{name}')" + DIE)
    for command, named in (([str(script)], "victim.py"), (["-X", "utf8", "-m", "victim"], "victim")):
        program = subprocess.Popen([sys.executable, *command, name, "--token=secret"], cwd=tmp_path)
        assert program.wait(120) == -signal.SIGKILL
        shm.clean()
        assert death_of(program.pid).program == named
    assert b"secret" not in (tmp_path / "penstock" / "deaths").read_bytes()


def test_who_cannot_write_puts_right_all_the_same(name: str, state: Path) -> None:
    (state / "penstock").write_text("a file where the folder should be")
    killed(name, "p = shm.publisher(f'shm:{name}')\n")
    assert name in shm.clean()
    assert shm.deaths() == []


def test_a_link_is_not_followed(name: str, state: Path) -> None:
    (state / "penstock").mkdir()
    (state / "other").write_bytes(b"precious")
    (state / "penstock" / "deaths").symlink_to(state / "other")
    killed(name, "p = shm.publisher(f'shm:{name}')\n")
    assert name in shm.clean()
    assert shm.deaths() == [] and (state / "other").read_bytes() == b"precious"


def test_nonsense_in_the_file_is_read_within_its_bounds(name: str, state: Path) -> None:
    (state / "penstock").mkdir()
    (state / "penstock" / "deaths").write_bytes(os.urandom(32 * 4096 - 100))
    found = shm.deaths()
    assert len(found) <= 32 and all(len(death.members) <= 10 for death in found)
    assert all(len(member.beginning) <= 64 for death in found for member in death.members)
    pid = killed(name, "p = shm.publisher(f'shm:{name}')\n")
    shm.clean()
    assert pid in {death.pid for death in shm.deaths()}
