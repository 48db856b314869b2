"""One part of the demo, as its own process: ``python -m penstock.cli.demo ROLE``.

The first line of standard input is its configuration; when standard input ends, the part ends. So nothing is left
when the parent is killed. Reports go to standard output, one JSON object a line.
"""

from __future__ import annotations

import importlib
import json
import signal
import sys

from penstock.cli.demo.part import Stage

ROLES = ("store", "readers", "recorder", "edge", "lake")


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which ends us in order
    role = sys.argv[1]
    assert role in ROLES
    configuration = json.loads(sys.stdin.readline())
    stage = Stage(configuration)
    importlib.import_module(f"penstock.cli.demo.{role}").run(stage)


if __name__ == "__main__":
    main()
