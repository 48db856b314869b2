"""The tests under seven conditions, one after the other: what a release must pass. ``make steady [PART=loaded]``.

``quiet``: as they are. ``loaded``: beside four busy processes. ``one-core``: pinned to one. ``slow-disk``: every sync
20 ms slower. ``shuffled``: in random order (the seed is in the log). ``jitter``: threads pause at lines that a seed
chooses (``PENSTOCK_JITTER``, else one of today's; ``tests/jitter``). ``other-user``: as nobody, when started by root
(a Python in a folder that is root's alone is shown to nobody in a mount namespace).
The tests run as in ``make test``, several processes beside each other. Arguments after the part's name go to pytest.
Each part's output is kept in ``build/steady``.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import pwd
import re
import signal
import stat
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
LOGS = ROOT / "build" / "steady"
BUSY = "import os\nparent = os.getppid()\nwhile os.getppid() == parent:\n    sum(range(1_000_000))"
PATIENCE_S = "600"  # of one test; only one that hangs needs as long under any of the conditions

#: What a condition adds: a command before the tests', arguments of pytest and of ``subprocess.run``.
Added = tuple[list[str], list[str], dict[str, Any]]
#: In a mount namespace: an empty folder that all may enter hides $1, but for what is in $2; then as nobody.
SHOW = """
hidden=$1 shown=$2 place=$(mktemp -d /tmp/steady.XXXXXX)
shift 2
mount --bind "$shown" "$place"
mount -t tmpfs -o mode=755 none "$hidden"
mkdir -p "$shown"
mount --bind "$place" "$shown"
umount "$place"
rmdir "$place"
exec setpriv --reuid nobody --regid "$(id -g nobody)" --clear-groups -- "$@"
"""


class LeftOut(Exception):
    """This condition cannot be had here; the text says why."""


@contextlib.contextmanager
def quiet() -> Iterator[Added]:
    yield [], [], {}


@contextlib.contextmanager
def loaded() -> Iterator[Added]:
    busy = [subprocess.Popen([sys.executable, "-c", BUSY]) for _ in range(4)]
    try:
        yield [], [], {}
    finally:
        for process in busy:
            process.kill()
            process.wait()


@contextlib.contextmanager
def one_core() -> Iterator[Added]:
    if not hasattr(os, "sched_setaffinity"):
        raise LeftOut("this system cannot pin a process to a core")
    core = min(os.sched_getaffinity(0))
    yield [], [], {"preexec_fn": lambda: os.sched_setaffinity(0, {core})}


@contextlib.contextmanager
def slow_disk() -> Iterator[Added]:
    if sys.platform != "linux":
        raise LeftOut("the preloaded library is for Linux")
    with tempfile.TemporaryDirectory() as folder:
        library = f"{folder}/slow_sync.so"
        source = ROOT / "scripts" / "slow_sync.c"
        subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-o", library, source, "-ldl"], check=True)
        before = os.environ.get("LD_PRELOAD", "")
        yield [], [], {"env": {**os.environ, "LD_PRELOAD": f"{library}:{before}".rstrip(":")}}


@contextlib.contextmanager
def shuffled() -> Iterator[Added]:
    yield [], ["--shuffle"], {}


@contextlib.contextmanager
def jitter() -> Iterator[Added]:
    seed = os.environ.get("PENSTOCK_JITTER") or str(int(time.time() // 86400))
    print(f"jitter      PENSTOCK_JITTER={seed}", flush=True)
    yield [], [], {"env": {**os.environ, "PENSTOCK_JITTER": seed}}


@contextlib.contextmanager
def other_user() -> Iterator[Added]:
    if os.geteuid() != 0:
        raise LeftOut("only root can become another user; the other parts were run as one")
    user = pwd.getpwnam("nobody")
    with tempfile.TemporaryDirectory() as home:
        os.chown(home, user.pw_uid, user.pw_gid)
        environment = {**os.environ, "HOME": home, "TMPDIR": home, "PYTHONDONTWRITEBYTECODE": "1"}
        options: dict[str, Any] = {"env": environment, "cwd": ROOT}
        prefix = []
        if (hidden := root_alone(Path(sys.base_prefix))) is None:
            options |= {"user": user.pw_uid, "group": user.pw_gid, "extra_groups": []}
        else:
            prefix = ["unshare", "--mount", "sh", "-e", "-c", SHOW, "sh", str(hidden), sys.base_prefix]
        try:
            probe = [*prefix, sys.executable, "-c", "import penstock, pytest"]
            subprocess.run(probe, check=True, capture_output=True, **options)
        except (OSError, subprocess.CalledProcessError):
            raise LeftOut(f"nobody cannot run {sys.executable} or read {ROOT}") from None
        yield prefix, ["-p", "no:cacheprovider"], options


def root_alone(path: Path) -> Path | None:
    """The first folder on the way to it that others may not enter."""
    return next((part for part in [*reversed(path.parents), path] if not part.stat().st_mode & stat.S_IXOTH), None)


PARTS: dict[str, Callable[[], contextlib.AbstractContextManager[Added]]] = {
    "quiet": quiet, "loaded": loaded, "one-core": one_core, "slow-disk": slow_disk, "shuffled": shuffled,
    "jitter": jitter, "other-user": other_user,
}  # fmt: skip


def wait(process: subprocess.Popen[bytes]) -> int:
    """Its code. An interrupt is passed on, and raised once the tests have cleaned up."""
    interrupted = False
    while True:
        try:
            code = process.wait()
        except KeyboardInterrupt:
            interrupted = True
            process.send_signal(signal.SIGINT)
        else:
            if interrupted:
                raise KeyboardInterrupt
            return code


def counts(text: str) -> str:
    """What the processes of tests counted, together: ``8,100 passed, 380 skipped``."""
    summed: Counter[str] = Counter()
    for line in text.splitlines():
        if re.search(r" in [\d.]+s", line):
            for number, word in re.findall(r"(\d+) (passed|failed|errors?|skipped)", line):
                summed[word.removesuffix("s")] += int(number)
    return ", ".join(f"{number:,} {word}" for word, number in summed.items()) or "no summary"


def run(part: str, arguments: list[str]) -> bool:
    """One part; whether it passed (or had to be left out). A line says how it went, and each failed test is named."""
    LOGS.mkdir(parents=True, exist_ok=True)
    log = LOGS / f"{part}.log"
    command = [sys.executable, str(ROOT / "scripts" / "suite.py"), "--", "--timeout", PATIENCE_S, "-rf"]
    began = time.monotonic()
    try:
        with PARTS[part]() as (prefix, added, options), log.open("w") as file:
            # In a group of its own: a terminal's Ctrl-C reaches it once, through `wait`.
            process = subprocess.Popen(
                [*prefix, *command, *added, *arguments], stdout=file, stderr=subprocess.STDOUT,
                **{"cwd": ROOT, "process_group": 0, **options},
            )  # fmt: skip
            code = wait(process)
    except LeftOut as reason:
        print(f"{part:<10}  left out: {reason}", flush=True)
        return True
    text = log.read_text(errors="replace")
    verdict = "passed" if code == 0 else f"FAILED ({code})"
    print(f"{part:<10}  {verdict} after {time.monotonic() - began:.0f} s: {counts(text)}  [{log}]", flush=True)
    for line in re.findall(r"^(?:FAILED|ERROR) .*$", text, re.MULTILINE):
        print(f"            {line}", flush=True)
    return code == 0


def main() -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a run in the background of a shell has Ctrl-C ignored
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("part", choices=["all", *PARTS])
    chosen, arguments = parser.parse_known_args()
    parts = list(PARTS) if chosen.part == "all" else [chosen.part]
    passed = [run(part, arguments) for part in parts]
    sys.exit(0 if all(passed) else 1)


if __name__ == "__main__":
    main()
