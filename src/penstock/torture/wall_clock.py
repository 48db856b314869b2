"""Sets the wall clock of one running process, whatever it was compiled from, and of no other.

Programs read the time without a system call, by a function that the kernel maps into each of them (the vDSO). A few
bytes at the end of that mapping, which are free, become a function that asks the kernel and adds a number of seconds to
``CLOCK_REALTIME``; the first instruction of the kernel's function becomes a jump there. Monotonic clocks stay as they
are: those do not jump on real machines. The process may be of Go, Python or C: it sees a clock that somebody has
set. Linux on x86-64 only, and where a parent may write to the memory of its children.
"""

from __future__ import annotations

import contextlib
import os
import platform
import signal
import struct
import time
from pathlib import Path

ENTRY = b"__vdso_clock_gettime"
# mov eax, 228 (clock_gettime); syscall; test edi, edi (CLOCK_REALTIME is 0); jnz ret; add qword [rsi], SECONDS; ret
BEFORE, AFTER = b"\xb8\xe4\x00\x00\x00\x0f\x05\x85\xff\x75\x07\x48\x81\x06", b"\xc3"
ROOM = 32  # at the end of the mapping
JUMP = 5  # bytes of a jump
SYMBOLS = 11  # the type of a section of an ELF file


def shift(pid: int, seconds: int) -> None:
    """From now on the process reads a time that is off by so many seconds. OSError: not possible here."""
    entry, place = _entry_and_room()
    start, _ = _mapped(str(pid))
    jump = b"\xe9" + struct.pack("<i", place - (entry + JUMP))
    with open(f"/proc/{pid}/mem", "r+b", buffering=0) as memory:
        memory.seek(start + place)
        memory.write(BEFORE + struct.pack("<i", seconds) + AFTER)
        memory.seek(start + entry)
        if memory.read(JUMP) != jump:
            _stop_outside(pid, range(start + entry + 1, start + entry + JUMP))
            try:
                memory.seek(start + entry)
                memory.write(jump)
            finally:
                os.kill(pid, signal.SIGCONT)


def unavailable() -> str:
    """Why it is not possible here; empty: it is."""
    if (platform.system(), platform.machine()) != ("Linux", "x86_64"):
        return f"not for {platform.system()} on {platform.machine()}"
    try:
        _entry_and_room()
    except (OSError, ValueError) as error:
        return str(error)
    return ""


def _entry_and_room() -> tuple[int, int]:
    """Where the function and the free bytes are in the mapping, which is the same for all processes."""
    _, image = _mapped("self")
    if any(image[-ROOM:]):
        raise OSError("the vDSO has no free bytes")
    return _symbol(image), len(image) - ROOM


def _mapped(pid: str) -> tuple[int, bytes]:
    """Where the vDSO of a process is, and its bytes."""
    for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
        if line.endswith("[vdso]"):
            start, end = (int(word, 16) for word in line.split()[0].split("-"))
            with open(f"/proc/{pid}/mem", "rb", buffering=0) as memory:
                memory.seek(start)
                return start, memory.read(end - start)
    raise OSError(f"process {pid} has no vDSO")


def _symbol(image: bytes) -> int:
    """Where the function begins in the mapping, which is an ELF file."""
    (table,) = struct.unpack_from("<Q", image, 0x28)
    size, count = struct.unpack_from("<HH", image, 0x3A)
    sections = [struct.unpack_from("<IIQQQQI", image, table + i * size) for i in range(count)]
    for _, kind, _, _, offset, length, link in sections:
        for at in range(offset, offset + length, 24) if kind == SYMBOLS else ():
            name, _, _, _, value = struct.unpack_from("<IBBHQ", image, at)
            begin = sections[link][4] + name
            if image[begin : image.index(b"\0", begin)] == ENTRY:
                return int(value)
    raise OSError(f"the vDSO has no {ENTRY.decode()}")


def _stop_outside(pid: int, addresses: range) -> None:
    """SIGSTOP it while none of its threads is in the bytes that are about to change."""
    while True:
        os.kill(pid, signal.SIGSTOP)
        while "T (stopped)" not in (status := Path(f"/proc/{pid}/status").read_text()):
            if "Z (zombie)" in status:
                raise ProcessLookupError(f"process {pid} has ended")
            time.sleep(0.001)
        if not any(at in addresses for at in _counters(pid)):
            return
        os.kill(pid, signal.SIGCONT)
        time.sleep(0.001)


def _counters(pid: int) -> list[int]:
    """The program counters of all threads."""
    found = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(OSError, ValueError, IndexError):
            found.append(int((task / "syscall").read_text().split()[-1], 16))
    return found
