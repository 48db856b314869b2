"""Damage in a buffer's journal costs the messages that it hits: they are counted and told, and the link goes on."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from penstock.cli.service import state
from penstock.gateway import Event, Gateway, ModuleError
from penstock.journal.repairs import repair
from tests.gateway.conftest import Collector, eventually
from tests.gateway.delivery import AGAIN, Fails, say

BUFFER = "a -> uplink (buffer)"


def _made(tmp_path: Path, told: list[Any] | None = None, *, well: bool = True, options: str = "") -> Gateway:
    gateway = Gateway()
    gateway.add_module("a", Collector)
    gateway.add_module("uplink", Fails)
    gateway.add_link("a", "uplink", None, AGAIN, buffer=f"journal:{tmp_path / 'store'}{options}")
    if told is not None:
        gateway.add_event_callback(Event.MODULE_FAILED, lambda _, __, context, ___: told.append(context))
    if well:
        gateway.module("uplink").well.set()
    gateway.start()
    return gateway


def _stored(tmp_path: Path, count: int = 100) -> None:
    """Messages in the buffer of a gateway that has ended."""
    gateway = _made(tmp_path, well=False)
    say(gateway, "a", *[b"bad %03d" % n for n in range(count)])
    eventually(lambda: gateway.module(BUFFER).backlog == count)
    gateway.destroy(1.0)


def _damage(tmp_path: Path, content: bytes) -> None:
    log = next((tmp_path / "store").glob("*.log"))
    found = bytearray(log.read_bytes())
    assert found.count(content) == 1
    found[found.index(content)] ^= 0xFF
    log.write_bytes(found)


def _info(gateway: Gateway) -> Any:
    return next(info for info in gateway.modules() if info.name == BUFFER)


@pytest.mark.parametrize("hit", [0, 60, 98, 99])
def test_damage_costs_the_message_that_it_hits_and_the_link_goes_on(tmp_path: Path, hit: int) -> None:
    _stored(tmp_path)
    _damage(tmp_path, b"bad %03d" % hit)
    told: list[Any] = []
    gateway = _made(tmp_path, told)
    say(gateway, "a", b"last")
    uplink = gateway.module("uplink")
    eventually(lambda: len(set(uplink.got)) == 100 and gateway.module(BUFFER).backlog == 0)
    assert b"last" in uplink.got
    assert b"bad %03d" % hit not in uplink.got
    eventually(lambda: len(told) == 1)
    name, step, error = told[0]
    assert (name, step) == (BUFFER, "buffer")
    assert "1 message was lost: the buffer is damaged" in str(error)
    assert f"penstock journal repair {tmp_path / 'store'}" in str(error)
    assert state(gateway)["healthy"]
    assert gateway.destroy(60)
    assert (_info(gateway).lost, _info(gateway).failed, _info(gateway).backlog) == (1, 1, 0)
    told.clear()
    with _made(tmp_path, told) as gateway:
        say(gateway, "a", b"again")
        eventually(lambda: gateway.module("uplink").got == [b"again"])
        assert _info(gateway).lost == 0
    assert told == []


def test_damage_that_was_passed_is_told_once_though_the_messages_before_it_are_still_stored(tmp_path: Path) -> None:
    _stored(tmp_path, 10)
    _damage(tmp_path, b"bad 005")
    for lost in (1, 0):
        gateway = _made(tmp_path, well=False)
        eventually(lambda: b"bad 009" in gateway.module("uplink").tried)  # noqa: B023
        eventually(lambda: gateway.module(BUFFER).backlog == 9)  # noqa: B023
        gateway.destroy(1.0)
        assert (_info(gateway).lost, _info(gateway).backlog) == (lost, 9)
    with _made(tmp_path) as gateway:
        eventually(lambda: gateway.module(BUFFER).backlog == 0)
        assert len(set(gateway.module("uplink").got)) == 9


@pytest.mark.parametrize("hit", [0, 5])
def test_what_a_repair_could_not_keep_is_told_as_lost_by_damage(tmp_path: Path, hit: int) -> None:
    _stored(tmp_path, 10)
    _damage(tmp_path, b"bad %03d" % hit)
    repair(tmp_path / "store")
    told: list[Any] = []
    for _ in range(2):
        with _made(tmp_path, told) as gateway:
            eventually(lambda: gateway.module(BUFFER).backlog == 0)
    eventually(lambda: len(told) == 1)
    assert "1 message was lost: the buffer was damaged" in str(told[0][2])


def test_damage_that_cannot_be_passed_names_the_repair_when_the_gateway_is_made(tmp_path: Path) -> None:
    _stored(tmp_path, 10)
    for frontier in (tmp_path / "store").glob("frontier*"):
        frontier.write_bytes(bytes(len(frontier.read_bytes())))
    for log in (tmp_path / "store").glob("*.log"):
        log.write_bytes(bytes(len(log.read_bytes())))
    with Gateway() as gateway:
        gateway.add_module("a", Collector)
        gateway.add_module("uplink", Fails)
        with pytest.raises(ModuleError, match="penstock journal repair"):
            gateway.add_link("a", "uplink", None, AGAIN, buffer=f"journal:{tmp_path / 'store'}")


SMALL = "?retain_bytes=512K"  # with the smallest segments
MANY = 200


def _stored_in_segments(tmp_path: Path) -> list[Path]:
    """The logs of a buffer of several segments, of a gateway that has ended."""
    gateway = _made(tmp_path, well=False, options=SMALL)
    say(gateway, "a", *[b"bad %03d" % n + b"." * 900 for n in range(MANY)])
    eventually(lambda: gateway.module(BUFFER).backlog == MANY)
    gateway.destroy(1.0)
    logs = sorted((tmp_path / "store").glob("*.log"))
    assert len(logs) >= 3
    return logs


def _cut(log: Path) -> None:
    written = len(log.read_bytes().rstrip(b"\0"))
    os.truncate(log, written // 2)


def _spoil_head(log: Path) -> None:
    with log.open("r+b") as file:
        file.write(b"\xff" * 64)


def _empty(log: Path) -> None:
    os.truncate(log, 0)


@pytest.mark.parametrize(
    ("where", "how"),
    [(-1, _cut), (-1, Path.unlink), (1, _empty), (1, _spoil_head), (1, Path.unlink), (1, _cut)],
)
def test_what_is_missing_of_segments_is_counted_and_told_once(tmp_path: Path, where: int, how: Any) -> None:
    how(_stored_in_segments(tmp_path)[where])
    told: list[Any] = []
    gateway = _made(tmp_path, told, options=SMALL)
    uplink = gateway.module("uplink")
    eventually(lambda: told and len(set(uplink.got)) + _info(gateway).lost == MANY)
    eventually(lambda: gateway.module(BUFFER).backlog == 0)
    assert 0 < len(set(uplink.got)) < MANY
    assert {(name, step) for name, step, _ in told} == {(BUFFER, "buffer")}
    assert all(f"penstock journal repair {tmp_path / 'store'}" in str(error) for _, _, error in told)
    assert gateway.destroy(60)
    told.clear()
    with _made(tmp_path, told, options=SMALL) as gateway:
        say(gateway, "a", b"again")
        eventually(lambda: gateway.module("uplink").got[-1:] == [b"again"])
        eventually(lambda: gateway.module(BUFFER).backlog == 0)
        assert _info(gateway).lost == 0
    assert told == []


def test_an_end_that_is_gone_is_told_once_of_links_that_share_a_directory(tmp_path: Path) -> None:
    def made(*, well: bool) -> Gateway:
        gateway = Gateway()
        gateway.add_module("a", Collector)
        for name in ("one", "two"):
            gateway.add_module(name, Fails)
            if well:
                gateway.module(name).well.set()
            gateway.add_link("a", name, None, AGAIN, buffer=f"journal:{tmp_path / 'store'}{SMALL}")
        gateway.start()
        return gateway

    def backlogs(gateway: Gateway) -> list[int]:
        return [gateway.module(f"a -> {name} (buffer)").backlog for name in ("one", "two")]

    gateway = made(well=False)
    say(gateway, "a", *[b"bad %03d" % n + b"." * 900 for n in range(MANY // 2)])
    eventually(lambda: backlogs(gateway) == [MANY // 2, MANY // 2])
    gateway.destroy(1.0)
    sorted((tmp_path / "store").glob("*.log"))[-1].unlink()
    with made(well=True) as gateway:
        eventually(lambda: backlogs(gateway) == [0, 0])

        def balance() -> int:
            came = sum(len(set(gateway.module(name).got)) for name in ("one", "two"))
            return came + sum(info.lost for info in gateway.modules())

        eventually(lambda: balance() >= MANY)
        assert balance() == MANY
