"""Decoders of what a peer says of its messages: schemas, a viewer's pictures, a NATS server's lines, a replica's blocks."""

from __future__ import annotations

import contextlib
import struct

from penstock._core import Message
from penstock.errors import PenstockError
from tests.fuzz.target import Target


class ReplicaBlocks(Target):
    """A block of a replicated stream as it came, and with its checksum mended; the lease's block."""

    words = [b"PBLK\x01\x00", struct.pack("<Q", 1 << 62), struct.pack("<HH", 1, 7)]

    def decode(self, data: bytes) -> None:
        from penstock._core.journal import crc32c
        from penstock.replica import block
        from penstock.replica.lease import Holder

        Holder.decode(data)
        with contextlib.suppress(PenstockError):
            assert block.decode(data, "here").encode() == data
        if len(data) >= block.HEAD.size:
            head, body = bytearray(data[: block.HEAD.size]), data[block.HEAD.size :]
            head[-8:-4] = struct.pack("<I", len(body))
            head[-4:] = struct.pack("<I", crc32c(body, crc32c(bytes(head[:-4]))))
            found = block.decode(bytes(head) + body, "here")
            assert found.data == body and found.begin_sequence(7) in (7, found.link)


class NatsLines(Target):
    """What a NATS server says, cut anywhere; the parser must hold no more than it was given."""

    words = [b"MSG a 1 5\r\nhello\r\n", b"HMSG a 1 _R 12 17\r\nNATS/1.0\r\n\r\nhello\r\n", b"PING\r\n", b"PONG\r\n", b"+OK\r\n", b"-ERR 'no'\r\n", b"INFO {}\r\n",
             b"NATS/1.0 404 none", b"\r\n", b" ", b"999999999999", b"-1", b"k: v\r\n", b"[" * 3000]  # fmt: skip

    def decode(self, data: bytes) -> None:
        from penstock.replica.protocol import Parser

        parser = Parser()
        for at in range(0, len(data), 7):
            list(parser.feed(data[at : at + 7]))
            assert len(parser._buffer) <= len(data)


class Schemas(Target):
    """A schema's text, a line, and a message of it: its shape, its reader, what it goes with, how a viewer shows it."""

    allowed = (PenstockError, ValueError)
    words = [b'{"name":"A","encoding":"json","definition":{"jsonschema":{"type":"object","properties":{"a":{"type":"integer"}}}}}', b'"jsonschema":', b'"anyOf":[',
             b'"$ref":"#/$defs/A"', b'"$defs":{"A":', b'"type":["integer","null"]', b'"items":', b'"dtype":', b'"<f8"', b'[["a","<i4"]]', b'"arrow":', b'"protobuf":',
             b'"encoding":"numpy"', b'"encoding":"msgpack"', b'"encoding":"image"', b"true", b"null", b"1e999", b"[" * 2000, b"\n", b"{", b"}", b",", b"NaN"]  # fmt: skip

    def decode(self, data: bytes) -> None:
        from penstock.foxglove.presentation import presentation_of
        from penstock.types import Schema
        from penstock.types.compatibility import first_difference
        from penstock.types.fields import json_text, reader_of
        from penstock.types.shape import json_schema, numeric_paths, shape_of

        text, _, body = data.partition(b"\n")
        schema, message = Schema.parse(text.decode("utf-8", "replace")).checked(), Message(body, timestamp_ns=1)
        assert Schema.parse(schema.text) == schema and first_difference(schema, schema) is None
        first_difference(schema, OTHER), first_difference(OTHER, schema)
        shown = presentation_of([((0, 0), schema)], message)
        for step in (
            lambda: numeric_paths(shape_of(schema)),
            lambda: json_schema(shape_of(schema)),
            lambda: json_text(reader_of(schema)(message)),
            lambda: shown.convert(message, None),
        ):
            with contextlib.suppress(PenstockError, ValueError):
                step()


def _other() -> object:
    from penstock.types import Schema

    fields = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "array", "items": {"type": "string"}}}, "required": ["a"]}
    return Schema("Other", "json", {"jsonschema": fields})


class Pictures(Target):
    """An image, a viewer's form of it, and what is made of that again."""

    allowed = (PenstockError, ValueError)
    words = [b"<f4", b"|u1", b"<u2", b"rgb8", b"xyz32", b"O8", b"|V9", b"\x02\x00\x00\x00", b"\x8a\xb6\x03", struct.pack("<Q", 1 << 40)]

    def decode(self, data: bytes) -> None:
        from penstock.foxglove.original import original
        from penstock.foxglove.pictures import kind_of, picture_of
        from penstock.types.image import decode

        with contextlib.suppress(ValueError):
            original(data)
        message = Message(data, timestamp_ns=1)
        kind_of(message)
        _, made = picture_of(message)
        again, first = decode(Message(original(made))), decode(message)  # the numbers; the order of their bytes may differ
        assert again.encoding == first.encoding and again.shape == first.shape and again.astype(first.dtype).tobytes() == first.tobytes()


OTHER = _other()
TARGETS: dict[str, type[Target]] = {
    "replica-blocks": ReplicaBlocks,
    "nats-lines": NatsLines,
    "schemas": Schemas,
    "pictures": Pictures,
}
