"""Fuzzes one decoder: ``python -m tests.fuzz.run NAME --inputs 1000000 --seed S`` (``all`` for every one).

Each input is a kept one (tests/fuzz/corpus/NAME) that was changed, cut, joined or made of the decoder's own words. A child
process decodes; it notes each input before it begins, so that a crash (the child dies), a hang (no step for
``HANG_S`` seconds), an error that the decoder does not document and memory (of the process that decodes) that has grown
by ``MAX_GROWTH_KIB`` since the kept inputs are told with the input that did it, which is left in tests/fuzz/found/NAME to
be fixed and then kept.
"""

from __future__ import annotations

import argparse
import contextlib
import mmap
import os
import random
import struct
import sys
import tempfile
import time
import traceback
from pathlib import Path

HERE = Path(__file__).parent
HANG_S = 30.0  # generous: the machine may be busy
MAX_INPUT_BYTES = 1 << 16
MAX_GROWTH_KIB = 256 << 10
EDGES = (0, 1, 2, 127, 128, 255, 256, 65535, 65536, 1 << 31, (1 << 32) - 1, 1 << 62, (1 << 63) - 1, (1 << 64) - 1)
_HEAD = struct.Struct("<QQ")  # inputs begun, size of the present one


def mutate(source: random.Random, corpus: list[bytes], words: list[bytes]) -> bytes:
    """One input."""
    data = bytearray(source.choice(corpus))
    for _ in range(source.randrange(1, 6)):
        way = source.randrange(8)
        place = source.randrange(len(data) + 1)
        if way == 0 and data:
            data[place % len(data)] ^= 1 << source.randrange(8)
        elif way == 1 and data:
            data[place % len(data)] = source.randrange(256)
        elif way == 2:
            size = source.choice((1, 2, 4, 8))
            order = source.choice(("little", "big"))
            data[place : place + size] = (source.choice(EDGES) & ((1 << 8 * size) - 1)).to_bytes(size, order)
        elif way == 3:
            data[place:place] = source.choice(words)
        elif way == 4:
            del data[place : place + source.randrange(1, 16)]
        elif way == 5:
            other = source.choice(corpus)
            cut = source.randrange(len(other) + 1)
            data[place:] = other[cut:]
        elif way == 6:
            piece = bytes(data[place : place + source.randrange(1, 32)])
            data[place:place] = piece * source.randrange(1, 4)
        else:
            data[place:place] = source.randbytes(source.randrange(1, 9))
    return bytes(data[:MAX_INPUT_BYTES])


def _child(name: str, inputs: int, seed: int, shared: mmap.mmap) -> None:
    from tests.fuzz import targets

    target = targets.TARGETS[name]()
    source = random.Random(seed)
    corpus = [path.read_bytes() for path in sorted((HERE / "corpus" / name).iterdir())]
    assert corpus, f"no corpus for {name}"
    begin_kib, begin_at = 0, min(len(corpus), inputs // 2)  # the kept ones are the baseline
    for number in range(inputs):
        data = corpus[number] if number < len(corpus) else mutate(source, corpus, target.words)
        shared[: _HEAD.size + len(data)] = _HEAD.pack(number + 1, len(data)) + data
        with contextlib.suppress(target.allowed):
            target.decode(data)
        if number == begin_at:
            begin_kib = _most_memory_kib(target.process_id)
    grown = _most_memory_kib(target.process_id) - begin_kib
    assert grown < MAX_GROWTH_KIB, f"memory grew by {grown} KiB"
    target.close()


def _most_memory_kib(process_id: int) -> int:
    """The most memory that the process has had so far."""
    (line,) = [line for line in Path(f"/proc/{process_id}/status").read_text().splitlines() if line.startswith("VmHWM:")]
    return int(line.split()[1])


def fuzz(name: str, inputs: int, seed: int) -> str | None:
    """What was found, as text, or None."""
    with tempfile.TemporaryFile() as errors, mmap.mmap(-1, _HEAD.size + MAX_INPUT_BYTES) as shared:
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                os.dup2(errors.fileno(), 2)
                _child(name, inputs, seed, shared)
                status = 0
            except BaseException:
                os.write(2, traceback.format_exc().encode())
            finally:
                os._exit(status)
        verdict = _watch(pid, shared)
        if verdict is None:
            return None
        number, size = _HEAD.unpack_from(shared)
        data = shared[_HEAD.size : _HEAD.size + size]
        keep(name, f"{seed}-{number}", data)
        errors.seek(0)
        text = errors.read().decode(errors="replace")[-3000:]
        return f"{name}: {verdict} at input {number} of seed {seed}: {data[:200]!r}\n{text}"


def keep(name: str, what: str, data: bytes) -> None:
    """Leave the input that did it."""
    place = HERE / "found" / name
    place.mkdir(parents=True, exist_ok=True)
    (place / what).write_bytes(data)


def _watch(pid: int, shared: mmap.mmap) -> str | None:
    seen, since = -1, time.monotonic()
    while True:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return None if status == 0 else f"ended with {os.waitstatus_to_exitcode(status)}"
        number = _HEAD.unpack_from(shared)[0]
        if number != seen:
            seen, since = number, time.monotonic()
        elif time.monotonic() - since > HANG_S:
            os.kill(pid, 9)
            os.waitpid(pid, 0)
            return f"no step in {HANG_S} s"
        time.sleep(0.02)


def main() -> int:
    from tests.fuzz import targets

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", choices=[*targets.TARGETS, "all"])
    parser.add_argument("--inputs", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=int.from_bytes(os.urandom(4), "little"))
    given = parser.parse_args()
    found = 0
    for name in targets.TARGETS if given.name == "all" else (given.name,):
        began = time.monotonic()
        text = fuzz(name, given.inputs, given.seed)
        print(text or f"{name}: {given.inputs} inputs, seed {given.seed}, {time.monotonic() - began:.0f} s: nothing found")
        found += text is not None
    return min(found, 1)


if __name__ == "__main__":
    sys.exit(main())
