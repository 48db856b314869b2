"""The disk: a journal on a disk that fills up repeatedly (each time counts as a kill).

Promises: an append that finds no room fails with the system's error and stores nothing; nothing confirmed is lost, on
the full disk and after it; once there is room the same journal goes on, and so does one opened anew.

The small disk is a tmpfs in a mount namespace of the worker's own, so that it goes with the worker. Where that is not
allowed a limit on the size of files takes its place.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys

from penstock.torture.report import Report

SIZE = "32m"
MOUNT = f'mount -t tmpfs -o size={SIZE},mode=700 tmpfs "$0" && exec "$@"'


def run(report: Report, chance: random.Random) -> None:
    place = report.directory / "disk"
    place.mkdir()
    seed = chance.randrange(1 << 32)
    namespace = _namespace()
    way = "small" if namespace else "quota"
    worker = [sys.executable, "-m", "penstock.torture.full", str(place), str(report.kills), str(seed), way]
    command = [*namespace, "sh", "-c", MOUNT, str(place), *worker] if namespace else worker
    done = subprocess.run(command, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)
    report.facts["the disk"] = f"a tmpfs of {SIZE}" if namespace else "a limit on the size of files"
    if done.returncode != 0:
        report.check("the worker ends by itself", f"{done.returncode}: {done.stderr[-400:]}", False)
        return
    counts = json.loads(done.stdout.splitlines()[-1])
    report.facts.update({name: counts[name] for name in ("confirmed", "opened while full", "not opened")})
    report.check("appends are refused while it is full", counts["refused"], counts["refused"] >= report.kills)
    report.check("with the system's error", counts["texts"] or "always", counts["unclear"] == 0)
    report.check("nothing confirmed is lost", f"{counts['lost']} of {counts['confirmed']}", counts["lost"] == 0)
    report.check("nothing refused is stored, no wrong byte", counts["wrong"], counts["wrong"] == 0)
    report.check("it goes on when there is room", f"{counts['stuck']} stuck", counts["stuck"] == 0)


def _namespace() -> list[str]:
    """The command that gives the worker a mount namespace of its own; empty if that is not allowed."""
    ways = [["unshare", "--mount"], ["unshare", "--user", "--map-root-user", "--mount"]]
    for way in ways if os.getuid() == 0 else ways[1:]:
        probe = [*way, "sh", "-c", "mount -t tmpfs tmpfs /tmp"]  # visible in the probe's own namespace only
        try:
            if subprocess.run(probe, capture_output=True, check=False).returncode == 0:
                return way
        except OSError:
            return []
    return []
