"""Seed: copies a journal that a broker has kept on its own disk to an empty stream. The directory stays as it is.

The blocks of a seed have epoch 0, and the last one is an epoch block with epoch 1: a stream that ends with epoch 0 was
not filled to the end and is refused. One thread; no broker may be running on the directory.
"""

from __future__ import annotations

import logging
import os
import secrets
import time
from collections.abc import Callable
from pathlib import Path

from penstock._core import journal as native
from penstock.errors import InvalidArgument
from penstock.journal import Journal, layout
from penstock.journal.disk import read_all
from penstock.replica.appender import PAUSE_S, Appender
from penstock.replica.block import BEGIN, EPOCH, HEAD, MORE, Block
from penstock.replica.stream import Blocks

log = logging.getLogger("penstock.replica")


def seed(directory: Path, blocks: Blocks, *, pause: Callable[[], None] = lambda: time.sleep(PAUSE_S)) -> int:
    """Append everything that the directory has; gives how many segments. Refused where the stream has something."""
    if not (directory / layout.MARKER_NAME).exists():
        raise InvalidArgument(f"{directory} is not a journal: there is nothing to fill {blocks.name} with")
    if blocks.bounds().last:
        raise InvalidArgument(f"{blocks.name} has blocks already: name another stream for what {directory} has")
    with Journal(directory, refuse_damage=True) as journal:  # nobody else writes it, and its torn tail is closed off
        writer = secrets.randbits(64)
        appender = Appender(blocks, 0, writer, pause=pause)
        segments = layout.latest_segments(os.listdir(directory))
        begin, block = 0, Block(journal.uuid, 0, writer, 1, 1, 0, 0, 0, 0)
        for at, name in enumerate(segments):
            following = segments[at + 1][0] if at + 1 < len(segments) else journal.frontier
            data = _whole(directory / layout.segment_name(*name), following)
            block = Block(journal.uuid, 0, writer, name[0], following, *name, 0, begin)
            begin = _append(appender, block, data)
            block = Block(journal.uuid, 1, writer, following, following, *name, len(data), begin, EPOCH)
        appender.append(block.encode())
    log.info("%s: %d segments copied to %s", directory, len(segments), blocks.name)
    return len(segments)


def _whole(path: Path, following: int) -> bytes:
    """A segment's log up to its end, without a seal, as it was when it was written."""
    data = read_all(path)
    header = layout.decode_segment_header(data[: layout.SEGMENT_HEADER_BYTES], str(path))
    scan = native.scan(data, header.nonce, header.first, following, following, header.gaps)
    if scan["damage"]:
        raise InvalidArgument(f"{path} is damaged: 'penstock journal repair {path.parent}' keeps all that is whole")
    seal_end = layout.SEAL_OFFSET + layout.SEAL_BYTES
    return data[: layout.SEAL_OFFSET] + bytes(layout.SEAL_BYTES) + data[seal_end : scan["end"]]


def _append(appender: Appender, block: Block, data: bytes) -> int:
    """A chain; the sequence of its first block."""
    most = appender.blocks.max_bytes - HEAD.size
    begun = appender.last + 1
    for at in range(0, len(data), most):
        more = MORE if at + most < len(data) else 0
        link, marks = (block.link, BEGIN | more) if at == 0 else (begun, more)
        fields = block.uuid, block.epoch, block.writer, block.first, block.next, block.segment, block.revision
        appender.append(Block(*fields, at, link, marks, data[at : at + most]).encode())
    return begun
