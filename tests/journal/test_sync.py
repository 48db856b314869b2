"""The real disk is synced: a library put before the C library's notes every write and sync of a program that appends.

The power cuts of test_power_cut.py are on a simulated disk, which the writer calls in the place of the system; here is
what the writer asks of the system itself.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

#: Notes the calls of this thread in their order, then makes them: 'w' a write, 's' a sync, each with its descriptor.
LIBRARY = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <sys/uio.h>
#include <unistd.h>

enum { most = 4096 };
__thread char kinds[most];
__thread int files[most];
__thread int count;
static void note(char kind, int file) {
    if (count < most) { kinds[count] = kind; files[count++] = file; }
}
int noted(char *kinds_out, int *files_out) {
    int noted_here = count;
    for (int i = 0; i < count; i++) { kinds_out[i] = kinds[i]; files_out[i] = files[i]; }
    count = 0;
    return noted_here;
}
#define BEFORE(result, name, kind, arguments, ...) \
    result name arguments { \
        note(kind, file); \
        return ((result (*) arguments)dlsym(RTLD_NEXT, #name))(__VA_ARGS__); \
    }
BEFORE(int, fsync, 's', (int file), file)
BEFORE(int, fdatasync, 's', (int file), file)
BEFORE(ssize_t, write, 'w', (int file, const void *data, size_t bytes), file, data, bytes)
BEFORE(ssize_t, pwrite, 'w', (int file, const void *data, size_t bytes, off_t at), file, data, bytes, at)
BEFORE(ssize_t, pwrite64, 'w', (int file, const void *data, size_t bytes, off_t at), file, data, bytes, at)
BEFORE(ssize_t, pwritev, 'w', (int file, const struct iovec *parts, int many, off_t at), file, parts, many, at)
BEFORE(ssize_t, pwritev64, 'w', (int file, const struct iovec *parts, int many, off_t at), file, parts, many, at)
"""
PROGRAM = """
import ctypes, os, sys
import penstock
from penstock.journal import Journal

library, directory, sync = ctypes.CDLL(sys.argv[1]), sys.argv[2], sys.argv[3] == "sync"
kinds, files = ctypes.create_string_buffer(4096), (ctypes.c_int * 4096)()

def noted():
    "What was done to the log since the last look."
    count = library.noted(kinds, files)
    return "".join(chr(kinds.raw[i]) for i in range(count) if name(files[i]).endswith(".log"))

def name(file):
    try:
        return os.readlink(f"/proc/self/fd/{file}")
    except FileNotFoundError:
        return "closed"

with Journal(directory, **({} if sync else {"sync": False})) as journal:
    noted()
    journal.append("t", b"one")
    print("append", noted())
    journal.append_many("t", [b"two", b"three"])
    print("append_many", noted())
    with journal.transaction() as transaction:
        transaction.append("t", b"four")
        transaction.append("u", b"five")
    print("transaction", noted())
    journal.append("t", bytes(2_000_000))
    print("large", noted())
if sync:
    with penstock.publisher(f"journal:{directory}#t") as publisher:
        noted()
        publisher.publish(b"six")
        print("publish", noted())
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    compiler = next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), None)
    assert compiler, "the build needs a compiler, and so does this test"
    made = tmp_path_factory.mktemp("library") / "noting.so"
    source = made.with_suffix(".c")
    source.write_text(LIBRARY)
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", made, source, "-ldl"], check=True)
    return made


def appended(library: Path, directory: Path, way: str) -> dict[str, str]:
    """For each way to append: the writes and syncs of the log before it returned."""
    environment = {**os.environ, "LD_PRELOAD": str(library)}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, library, directory, way],
        env=environment,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    return {name: calls for name, _, calls in (line.partition(" ") for line in done.stdout.splitlines())}


def test_an_append_is_written_and_then_synced(library: Path, tmp_path: Path) -> None:
    found = appended(library, tmp_path / "j", "sync")
    assert list(found) == ["append", "append_many", "transaction", "large", "publish"]
    assert not {name: calls for name, calls in found.items() if "w" not in calls or not calls.endswith("s")}


def test_without_sync_nothing_is_synced(library: Path, tmp_path: Path) -> None:
    found = appended(library, tmp_path / "j", "no sync")
    assert list(found) == ["append", "append_many", "transaction", "large"]
    assert not {name: calls for name, calls in found.items() if set(calls) != {"w"}}
