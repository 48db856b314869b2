"""Options as a user types them."""

from __future__ import annotations

import json
import re
import shlex
import uuid
from pathlib import Path

import pytest

import penstock
from penstock import InvalidArgument
from penstock.bridge import Bridge
from penstock.cli import target

from .command import run


def test_options_join_the_address() -> None:
    assert target.with_options("shm:/a", None) == "shm:/a"
    assert target.with_options("shm:/a", ["slot-size=64"]) == "shm:/a?slot_size=64"
    assert target.with_options("shm:/a?slots=4", ["a=b c&d"]) == "shm:/a?slots=4&a=b%20c%26d"
    with pytest.raises(InvalidArgument, match="NAME=VALUE"):
        target.with_options("shm:/a", ["slots"])
    with pytest.raises(InvalidArgument, match="did you mean shm"):
        target.with_options("shn:/a", None)


def test_completion_offers_addresses_only() -> None:
    name = f"shm:/{uuid.uuid4().hex[:8]}"
    with penstock.publisher(name), Bridge(name, f"{name}-copy"):
        assert [one for one in target.live_addresses(name) if "->" in one] == []
        assert name in target.live_addresses(name)


@pytest.mark.parametrize("command", ["hz", "bw", "info", "why", "ls"])
def test_every_command_decodes_an_address_as_pub_does(command: str) -> None:
    stem = uuid.uuid4().hex[:8]
    with penstock.publisher(f"shm:/{stem}%41") as publisher:
        publisher.publish(b"x")
        for written in (f"shm:/{stem}%41", f"shm:/{stem}A", f"shm:/{stem}%41?slots=4"):
            more = ("-n", "1", "--every", "0.1") if command in ("hz", "bw") else ()
            done = run(command, written, *more)
            assert "nobody" not in (done.stdout + done.stderr).replace("nobody reads it", ""), done


@pytest.mark.parametrize("name", ["/a;b", "/a b", "/a$(date)", "/it's", "/a*"])
def test_commands_that_are_offered_can_be_pasted(name: str) -> None:
    done = run("why", f"shm:{name}", "--json")
    offered = [json.loads(line)["remedy"] for line in done.stdout.splitlines()]
    assert ["penstock", "pub", f"shm:{name}", "hello"] in [shlex.split(remedy) for remedy in offered if remedy]


def test_no_sentence_puts_an_unquoted_word_into_a_command() -> None:
    """``printable.command`` quotes; an f-string does not."""
    unquoted = re.compile(r"""f"[^"]*[:;'"] ?penstock [a-z]+( [a-z]+)* \{""")
    places = [
        f"{path.name}:{number}"
        for path in Path(penstock.__file__).parent.rglob("*.py")
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if unquoted.search(line) and "Thread(" not in line and "torture" not in line
    ]
    assert places == []
