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

from penstock import _core, shm
from penstock.shm import DeadMember, Death
from penstock.shm.deaths import death_file

BEGIN = "import os, signal, sys\nfrom penstock import shm\nname = sys.argv[1]\n"
DIE = "\nos.kill(os.getpid(), signal.SIGKILL)\n"


@pytest.fixture
def name() -> str:
    return f"/deaths-{uuid.uuid4().hex[:12]}"


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """With a shared directory of its own: processes that others kill meanwhile are deaths too."""
    (tmp_path / "shared").mkdir(0o700)
    monkeypatch.setenv("PENSTOCK_SHM_DIR", str(tmp_path / "shared"))
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
    pid = killed(name, "handles = [shm.publisher(f'shm:{name}/{n}') for n in range(28)]\n")
    shm.clean()
    death = death_of(pid)
    assert (len(death.members), death.left_out) == (25, 3)
    assert len({member.channel for member in death.members}) == 25


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
    file = state / "penstock" / "deaths"
    file.chmod(0o666)
    shm.deaths()
    status = file.stat()
    assert status.st_size == 32 * 16384 and stat.S_IMODE(status.st_mode) == 0o600
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
        assert death_of(program.pid).found_by_program and "/" not in death_of(program.pid).found_by_program
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


def test_a_record_that_is_not_whole_is_left_out_and_the_first_to_be_written_over(name: str, state: Path) -> None:
    pids = []
    for _ in range(2):
        pids.append(killed(name, "p = shm.publisher(f'shm:{name}')\n"))
        shm.clean()
    file = state / "penstock" / "deaths"
    whole = file.read_bytes()
    damaged = bytearray(whole)
    assert whole[0] == 1  # the number of the first record, which one bit makes that of an empty one
    bits = [(at, 0x10) for at in (0, 20, 36, 60, 104, 300, 5000, 16383)]  # each of its bytes is under the sum
    for at, bit in [(0, 1), *bits]:
        damaged[:16384] = whole[:16384]
        damaged[at] ^= bit
        file.write_bytes(damaged)
        found = death_file()
        assert ([death.pid for death in found.deaths], found.damaged) == ([pids[1]], 1), at
    pids.append(killed(name, "p = shm.publisher(f'shm:{name}')\n"))
    shm.clean()
    found = death_file()
    assert ([death.pid for death in found.deaths], found.damaged) == ([pids[2], pids[1]], 0)
    for nonsense in (os.urandom(32 * 16384 - 100), b"\xff" * 32 * 4096):
        file.write_bytes(nonsense)
        assert shm.deaths() == [] and death_file().damaged


@pytest.mark.parametrize("damaged", [0, 1], ids=["token", "pid"])
@pytest.mark.parametrize("nonsense", [b"\0\0\0\0", b"\xff\xff\xff\xff"], ids=["zeros", "ones"])
def test_a_member_of_a_damaged_channel_is_no_death(name: str, state: Path, damaged: int, nonsense: bytes) -> None:
    pid = killed(name, "p = shm.publisher(f'shm:{name}')\n")
    (control,) = (state / "shared").glob("*.channel")
    content, number = bytearray(control.read_bytes()), pid.to_bytes(4, "little")
    at = [place for place in range(0, len(content), 4) if content[place : place + 4] == number]
    assert len(at) == 2  # the upper half of its process's token, and its pid
    content[at[damaged] : at[damaged] + 4] = nonsense
    control.write_bytes(content)
    assert name in shm.clean()
    assert [member for death in shm.deaths() for member in death.members if member.room == "shm"] == []


def test_what_a_process_had_elsewhere_is_known_by_its_counters(name: str, tmp_path: Path) -> None:
    pid = killed(
        name,
        f"""
import penstock
penstock_bus = penstock.publisher("bus:deaths")
kept = penstock.subscriber("bus:deaths", depth=10)
for _ in range(3):
    penstock_bus.publish(b"x")
kept.read()
journal = penstock.publisher("journal:{tmp_path}/store#orders")
journal.publish(b"12345")
tcp = penstock.publisher("tcp://127.0.0.1:0")
p = shm.publisher(f'shm:{{name}}')
""",
    )
    for look in (shm.deaths, lambda: (_core.counters_read(), shm.clean(), shm.deaths())[-1]):  # before the sweep, after
        (death,) = [death for death in look() if death.pid == pid]
        members = {(member.room, member.kind, member.channel.rpartition("/")[2]): member for member in death.members}
        assert len(members) == len(death.members)
        assert members["bus", "publisher", "deaths"].messages == 3
        assert (members["bus", "queue", "deaths"].messages, members["bus", "queue", "deaths"].unread) == (
            1,
            2,
        )
        journal = members["journal", "publisher", "store#orders"]
        assert (journal.messages, journal.total_bytes) == (1, 5) and journal.joined_ns < death.found_ns
        assert any(room == "tcp" for room, *_ in members) and ("shm", "publisher", name[1:]) in members


def test_handles_elsewhere_leave_room_for_those_of_shared_memory(name: str) -> None:
    pid = killed(
        name,
        """
import penstock
many = [penstock.publisher(f"bus:{n}") for n in range(40)]
handles = [shm.publisher(f'shm:{name}/{n}') for n in range(10)]
""",
    )
    _core.counters_read()
    shm.clean()
    death = death_of(pid)
    assert sum(member.room == "shm" for member in death.members) == 10 and len(death.members) == 25
    assert death.left_out >= 25


@pytest.mark.parametrize("kind", ["folder", "link", "fifo", "no folder", "no home"])
def test_why_nothing_can_be_written_is_known(kind: str, state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = state / "penstock" / "deaths"
    file.parent.mkdir()
    if kind == "folder":
        file.mkdir()
    elif kind == "link":
        file.symlink_to(state / "other")
    elif kind == "fifo":
        os.mkfifo(file)
    elif kind == "no folder":
        monkeypatch.setenv("XDG_STATE_HOME", "/proc/nothing")
    else:
        monkeypatch.delenv("XDG_STATE_HOME")
        monkeypatch.delenv("HOME")
    assert death_file().problem


@pytest.mark.parametrize("handles", ["penstock.publisher(f'bus:{n}')", "shm.publisher(f'shm:{name}/{n}')"])
def test_handles_that_were_not_kept_are_counted_once_however_often_one_looks(name: str, handles: str) -> None:
    pid = killed(name, f"import penstock\nmany = [{handles} for n in range(30)]\n")
    first = death_of(pid).left_out
    assert 0 < first <= 50
    assert [death_of(pid).left_out for _ in range(5)] == [first] * 5
    _core.counters_read()
    shm.clean()
    assert death_of(pid).left_out == first


def test_of_very_many_handles_that_were_not_kept_the_first_fifty_are_counted(name: str) -> None:
    pid = killed(name, "import penstock\nmany = [penstock.publisher(f'bus:{n}') for n in range(100)]\n")
    assert [death_of(pid).left_out for _ in range(2)] == [50, 50]
