"""Clients of version 1 of the protocol go on working: a dialogue recorded with them, byte for byte."""

from __future__ import annotations

import json
import re
from collections.abc import Callable

from penstock.broker import Server
from tests.broker.conftest import Wire

#: connection, who speaks, what it says; recorded with the clients of version 1
DIALOGUE = [
    (1, 'client', b'HELLO 1 name=recorder producer=producer-1\n'),
    (1, 'server', b'HELLO 1 journal=166ea41e-3cff-43bc-9779-3de1f2a172eb max_message_bytes=67108864 last=0\n'),
    (1, 'client', b'QUEUE jobs topics=work.>,more ack_timeout_ms=20000 ttl_ms=60000 max_deliveries=2\n'),
    (1, 'server', b'OK\n'),
    (1, 'client', b'QUEUE jobs topics=work.>,more ack_timeout_ms=20000 ttl_ms=60000 max_deliveries=2 create\n'),
    (1, 'server', b'OK\n'),
    (1, 'client', b'PUB work.a 3+7\noneunit\x00C\x00\n'),
    (1, 'server', b'OK 1\n'),
    (1, 'client', b'PUB work.b 3\ntwo\nPUB work.b 5\nthree\n'),
    (1, 'server', b'OK 2-3\n'),
    (1, 'client', b'PUB more 2 id=m-1\nid\n'),
    (1, 'server', b'OK 4\n'),
    (1, 'client', b'PUB more 2 id=m-1\nid\n'),
    (1, 'server', b'OK 4\n'),
    (1, 'client', b'PUB work.a 4 delay_ms=3600000\nlate\n'),
    (1, 'server', b'OK 5\n'),
    (1, 'client', b'PUB work.a 3 ttl_ms=30000\nttl\n'),
    (1, 'server', b'OK 6\n'),
    (1, 'client', b'STAGE t1 work.a 6\nstaged\nSTAGE t1 work.a 5\nagain\n'),
    (1, 'server', b'STAGED 2\n'),
    (1, 'client', b'COMMIT t1\n'),
    (1, 'server', b'COMMITTED 7-8\n'),
    (1, 'client', b'COMMIT t1\n'),
    (1, 'server', b'COMMITTED 7-8 again\n'),
    (1, 'client', b'STAGE t2 work.a 1\nx\n'),
    (1, 'server', b'STAGED 1\n'),
    (1, 'client', b'ABORT t2\n'),
    (1, 'server', b'OK\n'),
    (1, 'client', b'PEERS work.a\n'),
    (1, 'server', b'PEERS 1 0\n'),
    (1, 'client', b'PAUSE jobs\n'),
    (1, 'server', b'OK\n'),
    (1, 'client', b'RESUME jobs\n'),
    (1, 'server', b'OK\n'),
    (1, 'client', b'PING\n'),
    (1, 'server', b'PONG\n'),
    (1, 'client', b'LIST\n'),
    (1, 'server', b'DATA 360\n[{"queue": "jobs", "topics": ["work.>", "more"], "ack_timeout_s": 20.0, "max_deliveries": 2, "ttl_s": 60.0, "exclusive": false, "temporary": false, "dead_letter": "", "paused": false, "consumers": 0, "depth": 7, "ready": 7, "in_flight": 0, "delivered": 0, "redelivered": 0, "expired": 0, "skipped": 0, "dead_lettered": 0, "state": "", "floor": 1, "cursor": 1}]\n'),
    (1, 'client', b'STATS\n'),
    (1, 'server', b'DATA 262\n{"journal": "166ea41e-3cff-43bc-9779-3de1f2a172eb", "uptime_s": 0.036, "connections": 1, "accepted": 1, "queues": 1, "consumers": 0, "published": 8, "expired": 0, "commits": 10, "first": 1, "next": 9, "stored_bytes": 1069056, "quota_bytes": 0, "staged_bytes": 0}\n'),
    (1, 'client', b'QUEUE jobs max_deliveries=9 create\n'),
    (1, 'server', b'ERR exists queue jobs has other options (LIST shows them); QUEUE changes them\n'),
    (1, 'client', b'SEEK nobody from_position=1\n'),
    (1, 'server', b'ERR unknown_queue there is no queue nobody\n'),
    (2, 'client', b'HELLO 1\n'),
    (2, 'server', b'HELLO 1 journal=166ea41e-3cff-43bc-9779-3de1f2a172eb max_message_bytes=67108864\n'),
    (2, 'client', b'SUB jobs credit=4\n'),
    (2, 'server', b'OK\nMSG jobs work.a 1 1 1794832345481591040 1 3+7\noneunit\x00C\x00\nMSG jobs work.b 2 1 1794832345485301288 1 3\ntwo\nMSG jobs work.b 3 2 1794832345485301288 1 5\nthree\nMSG jobs more 4 1 1794832345487199511 1 2\nid\n'),
    (2, 'client', b'NACK jobs 2 delay_ms=0\nACK jobs 1 confirm\n'),
    (2, 'server', b'OK 1\nMSG jobs work.b 2 1 1794832345485301288 2 3\ntwo\nMSG jobs work.a 6 2 1794832345494829564 1 3+32\nttl$expires_ns\x001794832375494809590\x00\n'),
    (2, 'client', b'ACK jobs 3\nACK jobs 2\n'),
    (2, 'server', b'MSG jobs work.a 7 3 1794832345497561859 1 6\nstaged\nMSG jobs work.a 8 4 1794832345497561859 1 5\nagain\n'),
    (2, 'client', b'BYE\n'),
    (3, 'client', b'HELLO 1\n'),
    (3, 'server', b'HELLO 1 journal=166ea41e-3cff-43bc-9779-3de1f2a172eb max_message_bytes=67108864\n'),
    (3, 'client', b'SUB jobs credit=2048\n'),
    (3, 'server', b'OK\nMSG jobs more 4 1 1794832345487199511 2 2\nid\nMSG jobs work.a 6 2 1794832345494829564 2 3+32\nttl$expires_ns\x001794832375494809590\x00\nMSG jobs work.a 7 3 1794832345497561859 2 6\nstaged\nMSG jobs work.a 8 4 1794832345497561859 2 5\nagain\n'),
    (3, 'client', b'ACK jobs 4\nBYE\n'),
    (1, 'client', b'PURGE jobs\n'),
    (1, 'server', b'OK 3\n'),
    (1, 'client', b'REDRIVE jobs\n'),
    (1, 'server', b'OK 0\n'),
    (1, 'client', b'SEEK jobs from_position=1\n'),
    (1, 'server', b'OK\n'),
    (1, 'client', b'DELETE jobs\n'),
    (1, 'server', b'OK\n'),
    (4, 'client', b'HELLO 1\n'),
    (4, 'server', b'HELLO 1 journal=166ea41e-3cff-43bc-9779-3de1f2a172eb max_message_bytes=67108864\n'),
    (4, 'client', b'FETCH 1 3 bytes=4194304 topics=work.>\n'),
    (4, 'server', b'DATA 354\n{"count": 3, "next": 4, "first": 1, "frontier": 9, "journal": "166ea41e-3cff-43bc-9779-3de1f2a172eb", "topics": {"0": "unknown#0", "1": "work.a", "2": "work.b", "3": "more", "4": "$delayed"}}\n\x01\x00\x00\x00\x00\x00\x00\x00\x01\x00\x00\x00\x00\x00\x00\x00\x00\xb9\xcf?\x82\x86\xe8\x18\x00\x00\x00\x00\x00\x00\x00\x00\x03\x00\x00\x00\x01\x00\x00\x00\x07\x00\x00\x00\x00\x00\x00\x00\x02\x00\x00\x00\x00\x00\x00\x00\x01\x00\x00\x00\x00\x00\x00\x00(V\x08@\x82\x86\xe8\x18\n\x00\x00\x00\x00\x00\x00\x00\x03\x00\x00\x00\x02\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x03\x00\x00\x00\x00\x00\x00\x00\x02\x00\x00\x00\x00\x00\x00\x00(V\x08@\x82\x86\xe8\x18\r\x00\x00\x00\x00\x00\x00\x00\x05\x00\x00\x00\x02\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00oneunit\x00C\x00twothree\n'),
    (4, 'client', b'LOAD t3 139\n{"count": 2, "topics": {"0": "bulk"}}\n\xff\xff\xff\xff\xff\xff\xff\xff\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x01\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x02\x00\x00\x00\xff\xff\xff\xff\xff\xff\xff\xff\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x03\x00\x00\x00\x00\x00\x00\x00\x01\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x01\x00ak1bz'),
    (4, 'server', b'STAGED 2\n'),
    (4, 'client', b'COMMIT t3\n'),
    (4, 'server', b'COMMITTED 9-10\n'),
    (4, 'client', b'QUEUE keep topics=> from_position=2\n'),
    (4, 'server', b'OK\n'),
]  # fmt: skip


VARIES = re.compile(rb"([0-9a-f]{8}-(?:[0-9a-f]{4}-){3}[0-9a-f]{12}|\d{19})")  # the journal's identity, times


def pattern(recorded: bytes) -> re.Pattern[bytes]:
    """What is recorded, but for what varies; the text of a refusal may be another."""
    if recorded.startswith(b"ERR "):
        return re.compile(re.escape(b" ".join(recorded.split()[:2])) + rb" [^\n]+\n")
    parts = VARIES.split(recorded)
    return re.compile(b"".join(rb"[0-9a-f-]{%d}" % len(p) if n % 2 else re.escape(p) for n, p in enumerate(parts)))


def test_the_recorded_dialogue_is_answered_as_it_was(serve: Callable[..., Server]) -> None:
    server = serve()
    wires: dict[int, Wire] = {}
    for number, who, data in DIALOGUE:
        wire = wires.setdefault(number, wires.get(number) or Wire(server.port))
        if who == "client":
            wire.send(data)
        elif data.startswith(b"DATA "):
            size = int(wire.line().removeprefix("DATA "))
            while len(wire.buffer) <= size:
                wire.buffer += wire.socket.recv(65536)
            told, wire.buffer = wire.buffer[:size], wire.buffer[size + 1 :]
            compare_data(data.partition(b"\n")[2], told)
        else:
            wanted = pattern(data)
            while (found := wanted.match(wire.buffer)) is None:
                more = wire.socket.recv(65536)
                assert more, (data, wire.buffer)
                wire.buffer += more
            wire.buffer = wire.buffer[found.end() :]
    for wire in wires.values():
        wire.close()


def compare_data(recorded: bytes, told: bytes) -> None:
    """Everything that clients of then look at is there: more may be."""
    before, now = (json.loads(data.split(b"\n")[0]) for data in (recorded, told))
    if isinstance(before, list):
        assert len(now) >= len(before)
        before, now = before[0], now[0]
    assert set(before) <= set(now)
    for key in ("queue", "topics", "ack_timeout_s", "max_deliveries", "depth", "ready", "count", "next", "published"):
        if key in before and not isinstance(before[key], dict):
            assert now[key] == before[key], key
