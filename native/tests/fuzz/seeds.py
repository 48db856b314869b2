"""Writes the first inputs of a fuzz target into a folder: ``seeds.py TARGET FOLDER``. Standard library only."""

from __future__ import annotations

import struct
import sys
from pathlib import Path


def frame(data: bytes, kind: int = 0, header_size: int = 12, beyond: bytes = b"") -> bytes:
    return struct.pack("<HBBQ", header_size, kind, 0, len(data)) + beyond + data


def extended(ordinal: int, data: bytes, vchan: int = 0, properties: bytes = b"") -> bytes:
    beyond = struct.pack("<QqQII", ordinal, 5, 0, vchan, len(properties)) + properties
    return frame(data, 0, 12 + len(beyond), beyond)


def message(properties: list[tuple[bytes, bytes]], content: bytes) -> bytes:
    pairs = b"".join(key + b"\0" + value + b"\0" for key, value in properties)
    body = struct.pack(">I", len(properties)) + pairs + struct.pack(">I", len(content)) + content
    return b"\xa1\x60" + struct.pack(">I", 6 + len(body)) + body


SEEDS = {
    "tcp_frames": [
        b"\x00\xff" + frame(b"one") + frame(b"two", kind=9) + frame(b"three"),
        b"\x02\x0a" + extended(1, b"one") + extended(2, b"two", 3, b"k\0v\0") + extended(4, b""),
        b"\x00\xff" + frame(b"good") + frame(b"skipped", kind=7) + b"\0\0",
        b"\x26\x40" + extended(1, b"one") + extended(1, b"again") + extended(2, b"x"),
    ],
    "broker_scanner": [
        b"\x00\xffPUB 5\nhelloSUB q\nBYE\n",
        b"\x00\xffHELLO 1\nPUB a.b 5\nhello\nPUB a.b 3+4 time_ns=7 key=x\nabck\0v\0\nACK 1\n",
        b"\x01\xffPUB a 1\nxSTAGE t a 2\nxyLOAD t 3\nabcPING\n",
        b"\x02\x10MSG q a.b 1 1 5 1 5\nhelloMSG q a.b 2 2 5 1 1+4\nxk\0v\0DATA 2\nabOK\n",
    ],
    "queue_state": [
        b"\x01\x00",
        bytes(range(64)),
        b"\xff\x00" + struct.pack("<qq", 1, 5) + b"\xff\x03" + struct.pack("<qq", 3, 9),
    ],
    "gateway_codec": [message([], b""), message([(b"k", b"v"), (b"\xc3\xa9", b"")], b"content")],
    "journal_segment": [
        b"\x01\x03\x22\x02\x01a\x00\x03abc\x10\x00\x05hello\x10\x00\x01x",
        b"\x05\x09\x10\x00\x01a\xff\x20\x00\x02bc\x01\x00",
        b"\x00\x00PBAT" + bytes(60),
    ],
    "journal_reader": [
        b"\x01\x40\x00\x03\x03\x02\x00\x00\x00\x83\x05\x22\x02\x01a\x00\x03abc\x10\x00\x05hello",
        b"\x1d" + bytes(80) + b"\x02\x22\x02\x01a\x00\x01b",
    ],
    "counter_pages": [b"\x00\x00\x07PENSCNT4", b"\x80\x04\x07" + b"\xff" * 8],
    "shm_files": [b"\x00\x04\x01\x02\x03\x04\x05\x10\x00", b"\x02\x07\xff\xff\xff\xff\xff\xff\xff\xff\x00\x00"],
}


def main(target: str, folder: Path) -> None:
    for number, content in enumerate(SEEDS.get(target, [])):
        (folder / f"seed-{number}").write_bytes(content)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
