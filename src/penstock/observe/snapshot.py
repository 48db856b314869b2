"""The counters of every live process on this machine, as one list of blocks.

A block holds the counters of one handle (publisher, subscriber, queue, module, link, session) in the counter page that
its process maps; reading it costs that process nothing. Any thread may call this.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote, urlencode

from penstock.address import ROOMS, plain
from penstock.channel import Ledger
from penstock.errors import InvalidArgument

__all__ = ["Block", "Key", "live", "matching", "broker_address"]

Key = tuple[int, int, int]

_GATEWAY_BUS = re.compile(r"gateway-[0-9a-f]{12}(\?|$)")


@dataclass(frozen=True, slots=True)
class Block:
    """The counters of one handle. ``key`` is unique, also among handles that use the same slot one after the other."""

    pid: int
    index: int
    taking: int
    program: str
    room: str
    kind: str
    name: str
    state: str
    opened_ns: int
    read_ns: int
    matched: int = 0
    delivered: int = 0
    bytes: int = 0
    expired: int = 0
    redelivered: int = 0
    errors: int = 0
    dropped: Mapping[str, int] = field(default_factory=dict)
    depth: int = 0
    capacity: int = 0
    peers: int = 0
    memory_bytes: int = 0
    last_ns: int = 0
    latency_ns: int = 0
    lag: int = 0
    latency_sum_ns: int = 0
    latency_counts: tuple[int, ...] = ()
    name_cut: bool = False  #: its name was too long: ``name`` is shortened for display and gives no address
    position: int = 0  #: the position from which a reader of a journal continues
    process: int = 0  #: its process, by a number that no other has: containers have pids of their own
    here: bool = True  #: /proc shows its process under ``pid``; False: it has that pid in another PID namespace

    @property
    def key(self) -> Key:
        return (self.process or self.pid, self.index, self.taking)

    @property
    def losses(self) -> dict[str, int]:
        """Lost messages by reason. What a filter dropped was dropped on request and is no loss; a call that ended in
        an error was answered."""
        no_loss = ("filtered", "error", "refused") if self.kind in ("client", "server") else ("filtered",)
        return {reason: n for reason, n in self.dropped.items() if reason not in no_loss}

    @property
    def lost(self) -> int:
        return sum(self.losses.values())

    @property
    def dropped_count(self) -> int:
        """Dropped messages as in the ledger's equation: for all reasons, including filters."""
        return sum(self.dropped.values())

    @property
    def in_flight(self) -> int:
        """What the ledger's equation leaves; off by a few when the counters were read between two stores."""
        return self.matched - self.delivered - self.dropped_count - self.expired

    @property
    def waiting(self) -> int:
        """Messages that wait to be read. The depth of a shared-memory reader is what it holds, so its lag counts; the
        lag of a journal's reader counts if it reads all topics."""
        lags = self.room == "shm" or (self.room == "journal" and ("#" not in self.name or self.name.endswith("#>")))
        return self.lag if lags and self.kind == "subscriber" else self.depth

    @property
    def without_consumer(self) -> bool:
        """Whether it is a broker's queue that nobody consumes."""
        return (self.room, self.kind) == ("broker", "queue") and self.peers == 0

    @property
    def ledger(self) -> Ledger:
        """The counts as a ledger; a negative in-flight count becomes 0, so that the ledger visibly does not balance."""
        return Ledger(
            self.matched, self.delivered, self.dropped, self.expired, max(0, self.in_flight), self.redelivered
        )

    @property
    def address(self) -> str:
        """The address that ``penstock sub`` takes for this handle; empty if there is none."""
        return "" if self.name_cut else address_of(self.room, self.name)

    @property
    def place(self) -> str:
        """What it is open on: its address, else ``room:name``."""
        return self.address or f"{self.room}:{self.name}"

    @property
    def channel(self) -> str:
        """Its place without options: what all handles of one channel have in common."""
        return self.place if self.name_cut else self.place.partition("?")[0]

    @property
    def inside_gateway(self) -> bool:
        """Whether it is of the bus inside a gateway, which the gateway's modules and links already show."""
        return self.room == "bus" and _GATEWAY_BUS.match(self.name) is not None

    @property
    def idle_s(self) -> float | None:
        """Seconds since its last message; None when there was none."""
        return max(0.0, (self.read_ns - self.last_ns) / 1e9) if self.last_ns else None


def address_of(room: str, name: str) -> str:
    """The address for the name of a handle in a room; empty if there is none."""
    if name.partition(":")[0] in ROOMS:
        return name
    if room == "shm":
        return f"shm:{name}" if name.startswith("/") else f"shm:/{name}"
    if room in ("tcp", "broker", "nats"):
        return f"{room}://{name}" if re.search(r":\d+(/|\?|$)", name) else ""
    if room in ("bus", "journal"):
        return absolute(f"{room}:{name}")
    return ""


def live() -> list[Block]:
    """Every block in use in every live process whose page this user may read."""
    from penstock import _core

    now = time.time_ns()
    return [_block(fields, now) for fields in _core.counters_read()]


def matching(blocks: Iterable[Block], address: str) -> list[Block]:
    """The blocks of an address and of those below it; options of the address are ignored.

    ``*`` stands for any characters; a text without a scheme (``cam``) matches any part of an address.
    """
    scheme, colon, _ = address.partition(":")
    part = not colon or scheme not in ROOMS
    address = address if part else plain(address)
    if part or "*" in address:
        fitting = re.compile(re.escape(address).replace(r"\*", ".*") + ("" if part else r"(\?.*)?"), re.DOTALL)
        fits = fitting.search if part else fitting.fullmatch
        return [b for b in blocks if fits(b.place)]
    # A separator must follow: shm:/cam is not above shm:/camera.
    wanted = absolute(address.rstrip("/#"))
    long = _cut_names(wanted)
    return [
        b
        for b in blocks
        if b.address == wanted or b.address.startswith((wanted + "#", wanted + "/", wanted + "?")) or b.name in long
    ]


def named(blocks: Iterable[Block], place: str) -> list[Block]:
    """The blocks that have no address and that ls prints as ``place``, such as ``gateway:boiler``."""
    return [b for b in blocks if b.place == place and place.partition(":")[0] not in ROOMS]


def of_queue(blocks: Sequence[Block], broker: str, queue: str) -> list[Block]:
    """The blocks of a queue, whose broker has the address ``broker``: its own, and those of its consumers on this
    machine.
    """
    holders = {b.pid for b in blocks if b.room == "broker" and b.kind == "broker" and b.address == broker}
    own = [b for b in blocks if b.room == "broker" and b.kind == "queue" and b.name == queue and b.pid in holders]
    end = f"?queue={queue}"
    return own + [b for b in blocks if b.address.startswith(f"{broker}/") and b.address.endswith(end)]


def _cut_names(address: str) -> set[str]:
    """The names under which the counters have an address that is too long for them; empty for all others."""
    from penstock import _core

    rest = address.partition(":")[2]
    names = {address, rest, rest.removeprefix("/"), rest.removeprefix("//")}
    return {cut for name in names if (cut := _core.counters_name(name)) != name}


def absolute(address: str) -> str:
    """An address in which a journal's directory is an absolute path."""
    scheme, _, rest = address.partition(":")
    if scheme != "journal":
        return address
    directory, hash_, topic = rest.partition("#")
    return f"journal:{os.path.realpath(directory)}{hash_}{topic}"


def _block(fields: Mapping[str, Any], now: int) -> Block:
    known = {name: fields[name] for name in Block.__dataclass_fields__ if name in fields}
    return Block(**{**known, "read_ns": now})


def broker_address(address: str) -> str:
    """``broker:QUEUE``, as ls prints a queue of this machine, as the address of its broker; any other as it is."""
    scheme, _, rest = address.partition(":")
    if scheme != "broker" or rest.startswith("//"):
        return address
    name, _, query = rest.partition("?")
    blocks = [block for block in live() if block.room == "broker"]
    holders = {block.pid for block in blocks if block.kind == "queue" and block.name == name}
    found = sorted({block.name for block in blocks if block.kind == "broker" and block.pid in holders})
    if len(found) != 1:
        told = f"brokers {', '.join(found)} have one" if found else "no broker of this machine has one"
        raise InvalidArgument(f"{address}: {told}; write broker://HOST:PORT/?queue={name}")
    return f"broker://{found[0]}/?{'&'.join(filter(None, (urlencode({'queue': name}, quote_via=quote), query)))}"
