"""The decoders and what each may raise."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import struct
import subprocess
import sys
import tempfile
import zlib
from pathlib import Path

import penstock
from penstock._core import Message
from penstock.errors import PenstockError
from penstock.torture.crew import wait_until
from penstock.torture.soak import free_port
from tests.fuzz import file_targets, message_targets
from tests.fuzz.target import Patched, Target, memory_folder


class TcpFrames(Target):
    """What a peer sends before the data, to either side, and the frames after it."""

    words = [struct.pack("<HBBQ", size, kind, 0, length) for size in (0, 2, 12, 13, 76) for kind in range(5)
             for length in (0, 1, 1024, 1 << 62)]  # fmt: skip

    def decode(self, data: bytes) -> None:
        from penstock._core import tcp as native
        from penstock.tcp.protocol import Answer, Negotiation, Request

        for extended in (False, True):
            found, _ = native.scan_frames(data, 1024, extended)
            assert sum(header_size + data_size for _, header_size, data_size, _ in found) <= len(data)
        sides: list[Negotiation] = [Request(b"t"), Request(), Answer(b"t"), Answer()]
        for side in sides:
            at = 0
            try:
                while at < len(data):
                    step = data[at : at + side.needs]
                    at += len(step)
                    if side.feed(step) is not None:
                        break
            except PenstockError:
                pass
            assert len(side.outgoing) < 4096


class BrokerText(Target):
    """The text protocol: raw peers, peers that said HELLO, and what a client gets."""

    words = [b"PUB ", b"SUB ", b"STAGE ", b"HELLO 1", b"ACK ", b"NACK ", b"BYE", b"MSG ", b"DATA ", b" ", b"\n", b"\r\n", b"a.b", b"0",
             b"-1", b"99999999999999999999", b"id=x", b"\0", b"\xff", b"5\nhello", b"q 1 1 1 1 1 3\nabc",
             b"+", b"2+4\nhik\0v\0", b"1+0\n", b"3+99999\n", b"$k\0v\0", b"q t 1 1 1 1 1+4\nxk\0v\0", b"LOAD x 3\nabc", b"LOAD x 99999999\n"]  # fmt: skip

    def decode(self, data: bytes) -> None:
        from penstock._core.broker import Scanner
        from penstock.broker import words

        for grammar in ("raw", "hello", "deliveries"):
            scanner = Scanner(grammar, 1000)  # type: ignore[arg-type]
            for at in range(0, len(data), 4096):
                scanner.feed(data[at : at + 4096])
                for _ in range(len(data) + 1):
                    event = scanner.next(64)
                    if event is None or event[0] == words.BROKEN:
                        break
                    if event[2] is not None:
                        for message in event[2]:
                            with contextlib.suppress(PenstockError):
                                dict(message.properties)
                    if event[0] == words.NEW_TOPIC:
                        try:
                            scanner.allow(words.check_topic(event[1]))
                        except PenstockError:
                            break  # the connection ends here
            assert scanner.held_bytes <= len(data) + (1 << 20)


class BrokerRanges(Target):
    """A range: what a broker answers to FETCH, what a client brings by LOAD."""

    allowed = (PenstockError,)
    words = [b'{"count": 1, "topics": {"0": "t"}}\n', b'"next": 1, "first": 1, "frontier": 1, "journal": "j", ', b"k\0v\0", b"$k\0v\0",
             struct.pack("<qQqQIIIHH", 1, 1, 1, 0, 1, 0, 0, 0, 0), struct.pack("<qQqQIIIHH", 1, 1, 1, 1, 1, 0, 4, 1, 1)]  # fmt: skip

    def decode(self, data: bytes) -> None:
        from penstock._core.broker import batch_details, range_batch
        from penstock.broker.ranges import ENTRY, decode_range

        cut = min(len(data), 48 * (data[0] % 4 if data else 0))
        with contextlib.suppress(PenstockError):
            batch = range_batch(data[:cut], data[cut:], {0: "t", 1: "u"})
            assert sum(len(message) for message in batch) <= len(data)
            assert all(dict(message.properties) is not None for message in batch) and batch_details(batch) is not None
        part = decode_range(data)
        with contextlib.suppress(PenstockError):
            list(part)
        assert part.record_batch(["position", "topic", "payload", "message_id", "key"]).num_rows * ENTRY.size <= len(data)


class BrokerSession(Target):
    """A real broker in a process of its own: whatever a connection says, the server goes on and logs no traceback."""

    allowed = (OSError,)
    words = [b"HELLO 1\n", b"PUB t 1\nx\n", b"SUB q credit=5\n", b"ACK q 1\n", b"NACK q 1 delay=0\n", b"SEEK q first\n", b"PURGE q\n",
             b"QUEUE q topics=t\n", b"DELETE q\n", b"LIST\n", b"STATS\n", b"PEERS\n", b"FETCH 1 9\n", b"REDRIVE q\n", b"PAUSE q\n", b"RESUME q\n", b"STAGE x t 1\ny\n",
             b"LOAD x 83\n" + b'{"count": 1, "topics": {"0": "t"}}\n' + struct.pack("<qQqQIIIHH", 1, 1, 1, 0, 0, 0, 0, 0, 0), b"LOAD x 5\n{}\n12",
             b"COMMIT x\n", b"CREDIT q 99999999999999999999\n", b"-1", b"=", b" ", b"\n", b"\xff", b"\0"]  # fmt: skip

    def __init__(self) -> None:
        self.place = Path(tempfile.mkdtemp(prefix="penstock-fuzz-"))
        self.count = 0
        self.process: subprocess.Popen[bytes] | None = None
        self.port = free_port()
        self._start()

    def _start(self) -> None:
        command = [sys.executable, "-m", "penstock", "broker", str(self.place / "broker"), str(self.port)]
        with (self.place / "log").open("ab") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL)
        wait_until(self._answers, 60, "the broker answers")

    @property
    def process_id(self) -> int:
        """The broker's: the one that decodes."""
        assert self.process is not None
        return self.process.pid

    def _answers(self) -> bool:
        try:
            with socket.create_connection(("127.0.0.1", self.port), 20) as connection:
                connection.sendall(b"HELLO 1\nPING\n")
                found = b""
                while b"PONG" not in found and (more := connection.recv(4096)):
                    found += more
                return b"PONG" in found
        except OSError:
            return False

    def decode(self, data: bytes) -> None:
        assert self.process is not None
        if b"SHUTDOWN" in data:
            return  # from loopback it may
        with socket.create_connection(("127.0.0.1", self.port), 20) as connection:
            connection.sendall(data)
            connection.shutdown(socket.SHUT_WR)
            for _ in range(100):
                if not connection.recv(65536):
                    break
        self.count += 1
        if self.count % 50 == 0:
            text = (self.place / "log").read_text(errors="replace")
            assert self.process.poll() is None and self._answers() and "Traceback" not in text, text[-3000:]

    def close(self) -> None:
        assert self.process is not None
        self.process.terminate()
        assert self.process.wait(60) == 0
        shutil.rmtree(self.place)


class QueueNotes(Target):
    """The notes that queues keep in the log, the broker's and the journal's."""

    allowed = (PenstockError, ValueError)

    def decode(self, data: bytes) -> None:
        from penstock._core.broker import QueueState
        from penstock.journal import queue_notes

        state = QueueState(1)
        state.apply(data)
        state.recovered()
        queue_notes.restore([data])


class JournalFiles(Patched):
    """A journal's directory: read by the pure-Python reader, verified, or read by the native one, as the input decides."""

    allowed = (PenstockError, OSError, LookupError)

    def __init__(self) -> None:
        from penstock.journal import Journal

        self.place = memory_folder()
        with Journal(self.place / "made", segment_bytes=65536) as journal:
            for number in range(12):
                journal.append(f"t.{number % 3}", b"%d" % number * number, properties={"n": str(number)}, key="k")
            journal.append_many("t.0", [b"a", b"", b"b" * 300])
        self.template = {
            path.name: path.read_bytes() for path in sorted((self.place / "made").iterdir()) if path.is_file()
        }
        self.names = [name for name in self.template if self.template[name]]
        self.directory = self.place / "changed"
        shutil.copytree(self.place / "made", self.directory)
        self.dirty: set[str] = set()

    def decode(self, data: bytes) -> None:
        from penstock.journal.verify import verify

        for name, content in self.patched(data).items():
            if content != self.template[name] or name in self.dirty:
                (self.directory / name).write_bytes(content)
                self.dirty.add(name) if content != self.template[name] else self.dirty.discard(name)
        ways = (self._python, lambda: verify(self.directory), self._native)
        ways[zlib.crc32(data) % len(ways)]()

    def _native(self) -> None:
        from penstock.journal import Journal

        with Journal(self.directory, mode="read") as journal:
            position = journal.first
            for _ in range(40):
                try:
                    batch = journal.read_many(position, 4)
                except PenstockError:
                    position += 1
                    continue
                if not len(batch):
                    break
                for message in batch:
                    assert len(bytes(message)) <= 65536
                    dict(message.properties)
                position = (batch[-1].position or position) + 1

    def _python(self) -> None:
        from penstock.journal.format import open_directory

        directory = open_directory(self.directory)
        for batch in directory.batches():
            batch.to_pylist()

    def close(self) -> None:
        shutil.rmtree(self.place)


class JournalRecords(Target):
    """A segment's records, its header, the marker and the frontier as bytes."""

    def decode(self, data: bytes) -> None:
        from uuid import UUID

        from penstock._core import journal as native
        from penstock.journal import layout

        for gaps in (False, True):
            native.scan(data, 7, 1, 1 << 40, 0, gaps)
        layout.decode_properties(data)
        layout.decode_frontier(data.ljust(layout.FRONTIER_BYTES, b"\0"), UUID(int=1))
        for function in (layout.decode_marker, layout.decode_segment_header):
            with contextlib.suppress(PenstockError):
                function(data, "here")


class SharedMemory(Patched):
    """A channel's files as somebody hostile leaves them; a subscriber and a publisher join."""

    allowed = (PenstockError, OSError)

    def __init__(self) -> None:
        self.place = memory_folder()
        os.environ["PENSTOCK_SHM_DIR"] = str(self.place)
        self.publisher = penstock.publisher("shm:/fuzz", slots=8, slot_size=256)
        self.reader = penstock.subscriber("shm:/fuzz")
        for number in range(5):
            self.publisher.publish(b"%d" % number)
        self.reader.read(0)
        kept = [path for path in sorted(self.place.iterdir()) if path.is_file() and path.name.startswith("%2Ffuzz")]
        self.template = {path.name: path.read_bytes() for path in kept}
        self.names = [name for name in self.template if self.template[name]]

    def decode(self, data: bytes) -> None:
        for name, content in self.patched(data).items():
            if len(content) == len(self.template[name]):  # members never shorten a file; it belongs to them
                self._write(name, content)
        try:
            self._join()
        finally:
            for name, content in self.template.items():
                self._write(name, content)

    def _write(self, name: str, content: bytes) -> None:
        with (self.place / name).open("r+b") as file:
            file.write(content)

    def _join(self) -> None:
        with penstock.subscriber("shm:/fuzz") as subscriber:
            for message in subscriber.read_many(16, 0):
                assert len(bytes(message)) <= 1 << 20
                message.release()
        with penstock.publisher("shm:/fuzz", slots=8, slot_size=256) as publisher:
            publisher.publish(b"x", timeout=0)  # type: ignore[call-arg]

    def close(self) -> None:
        self.reader.close()
        self.publisher.close()
        shutil.rmtree(self.place)


class GatewayMessages(Target):
    """A message's byte form and frames; what is decoded encodes to what it was."""

    def decode(self, data: bytes) -> None:
        from penstock._core.gateway import GatewayMessage

        for make in (GatewayMessage.from_bytes, GatewayMessage.from_frame):
            try:
                message = make(data)
            except PenstockError:
                continue
            again = GatewayMessage.from_bytes(message.to_bytes())
            assert bytes(again) == bytes(message) and dict(again.properties) == dict(message.properties)


class ControlMessages(Target):
    """What a module's process and its gateway say."""

    words = [b"\xa1\x6c\x01", b"\0\0\0\x08", b"\0\0\0\x0c"]

    def decode(self, data: bytes) -> None:
        from penstock.gateway import control

        with contextlib.suppress(PenstockError):
            assert control.encode(control.decode(data)) == data
        decoder = control.Decoder()
        for at in range(0, len(data), 5):
            decoder.feed(data[at : at + 5])


class GatewayConfiguration(Target):
    """A gateway's file, as JSON and as TOML."""

    words = [b'"modules"', b'"links"', b'"loaders"', b'"name"', b'"loader"', b'"restart"', b'"filter"', b'"queue"', b"[", b"]", b"{", b"}",
             b":", b",", b"null", b"1e999", b"-1", b'"*"', b"[[modules]]\n", b"[" * 3000, b"a.b.c = 1\n"]  # fmt: skip

    def decode(self, data: bytes) -> None:
        from penstock.gateway import configuration

        text = data.decode("utf-8", "replace")
        for read in (configuration.from_json, lambda text: configuration._toml(text, Path("g.toml"))):
            with contextlib.suppress(PenstockError):
                configuration.parse(read(text))


class GatewayYaml(Target):
    """A gateway's file as YAML."""

    words = [b"modules:\n", b"- name: a\n", b"  loader: ", b"links:\n", b"[", b"]", b"{", b"}", b": ", b", ", b"- ", b"&a [*a, *a]", b"<<: *a\n", b"? ",
             b"!!python/object:os.system ", b"2026-01-01", b"0x7f", b".inf", b"~", b"[" * 200, b"9" * 5000]  # fmt: skip

    def decode(self, data: bytes) -> None:
        from penstock.gateway import configuration

        configuration.parse(configuration._yaml(data.decode("utf-8", "replace"), Path("g.yaml")))


class FilterExpression(Target):
    """An expression of ``--filter``, on a JSON body."""

    words = [b"and ", b"or ", b"not ", b"(", b")", b"==", b"like ", b"contains ", b"in [", b"]", b".a.b[0]", b"properties.x", b'"*a*b*"',
             b"1e308", b"*", b"%", b"/", b"-", b"size", b"payload", b"9" * 5000, b"\\"]  # fmt: skip

    def __init__(self) -> None:
        self.message = Message(b'{"a": {"b": [1, "x", null]}, "n": 1e300}', ordinal=1, channel="c", properties={"x": "1"})

    def decode(self, data: bytes) -> None:
        from penstock.filter import compile_filter

        compile_filter(data.decode("utf-8", "replace"))(self.message)


class Bodies(Target):
    """What the tools print of a body."""

    def decode(self, data: bytes) -> None:
        from penstock.observe import decode

        decode.body_text(data)
        decode.hexadecimal(data)


TARGETS: dict[str, type[Target]] = {
    "tcp-frames": TcpFrames,
    "broker-text": BrokerText,
    "broker-ranges": BrokerRanges,
    "broker-session": BrokerSession,
    "queue-notes": QueueNotes,
    "journal-files": JournalFiles,
    "journal-records": JournalRecords,
    "shared-memory": SharedMemory,
    "gateway-messages": GatewayMessages,
    "control-messages": ControlMessages,
    "gateway-configuration": GatewayConfiguration,
    "gateway-yaml": GatewayYaml,
    "filter-expression": FilterExpression,
    "bodies": Bodies,
    **message_targets.TARGETS,
    **file_targets.TARGETS,
}
