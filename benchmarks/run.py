"""Runs every benchmark script here, one after the other: never two at once, so that they do not measure each other."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent


def main() -> int:
    scripts = sorted(path for path in HERE.glob("*_*.py") if not path.name.startswith("peers_"))
    command = [sys.executable, "script", *sys.argv[1:]]
    failed = []
    for path in scripts:
        command[1] = str(path)
        if subprocess.run(command, cwd=HERE, check=False).returncode:
            failed.append(path.name)
    if failed:
        print("did not run to the end:", ", ".join(failed))
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
