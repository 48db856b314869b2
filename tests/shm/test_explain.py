"""What ``penstock why`` knows of a channel."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from penstock import shm
from penstock.shm.explain import _member
from tests.cli.command import run


def test_a_dead_one_is_not_to_be_ended(name: str) -> None:
    with shm.Publisher(name, slots=8) as publisher, shm.Subscriber(name) as subscriber:
        publisher.publish_many([b"x"] * 6)
        held = [subscriber.read(0) for _ in range(6)]
        (channel,) = (one for one in shm.channels() if one.name == name)
        assert any("release messages there" in one.remedy for one in _member(channel, channel.subscribers[0]))
        (found,) = _member(channel, replace(channel.subscribers[0], alive=False))
        assert not found.grave and not found.remedy and "died" in found.text and None not in held


def test_who_was_killed_here_is_not_of_another_container(name: str) -> None:
    code = f"from penstock import shm; p = shm.Publisher({name!r}, slots=4); print('ready', flush=True); input()"
    with shm.Subscriber(name):
        killed = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        with killed:
            assert killed.stdout is not None and killed.stdout.readline()
            killed.kill()
        (channel,) = (one for one in shm.channels() if one.name == name)
        (found,) = _member(channel, channel.publishers[0])
        assert found.text.startswith(f"the publisher pid {killed.pid} died; ") and not found.grave


@pytest.mark.parametrize("here", [True, False])
def test_a_pid_of_another_container_is_told_as_that(name: str, here: bool) -> None:
    with shm.Publisher(name, slots=4, reliable=True) as publisher, shm.Subscriber(name, reliable=True) as subscriber:
        with pytest.raises(TimeoutError):
            publisher.publish_many([b"x"] * 10, timeout=0)
        (channel,) = (one for one in shm.channels() if one.name == name)
        (found,) = _member(channel, replace(channel.subscribers[0], pid=1, here=here))
        ended = found.remedy.removeprefix("read there, or end ")
        assert ended == ("1" if here else "pid 1 of another container")
        held = subscriber.read(0)
        (channel,) = (one for one in shm.channels() if one.name == name)
        remedies = [one.remedy for one in _member(channel, replace(channel.subscribers[0], pid=1, here=here))]
        assert held is not None and len(remedies) == 2 and all(one.endswith(f"or end {ended}") for one in remedies)


def test_clean_tells_of_damaged_channels_that_it_leaves(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    (tmp_path / "%2Fcut.channel").write_bytes(b"too short")
    done = run("shm", "clean", PENSTOCK_SHM_DIR=str(tmp_path))
    assert done.returncode == 0 and "nothing was left behind" not in done.stdout
    assert "left as it is: /cut (" in done.stderr and "penstock why shm:/cut" in done.stderr
    (tmp_path / "%2Fcut.channel").unlink()
    assert "nothing was left behind" in run("shm", "clean", PENSTOCK_SHM_DIR=str(tmp_path)).stdout
