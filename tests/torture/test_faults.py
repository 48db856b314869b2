"""What the faults of ``penstock torture replica`` are made of: the plan, and clocks that are set."""

from __future__ import annotations

import random
import subprocess
import sys
import time

import pytest

from penstock.torture import scene, wall_clock
from penstock.torture.replica import Plan

TELL = """
import sys, time
for line in sys.stdin:
    print(time.time(), time.monotonic(), flush=True)
"""


def rounds(seed: int, count: int, brokers: int = 1) -> list[list[str]]:
    return [faults for faults, _ in Plan(random.Random(seed), count, brokers, True, True).rounds()]


def test_a_seed_gives_the_same_plan_and_every_kind_of_fault() -> None:
    plan = rounds(7, 500)
    assert plan == rounds(7, 500) != rounds(8, 500)
    assert sum(map(len, plan)) == 500
    kinds = {fault for faults in plan for fault in faults}
    nodes = {*scene.NODE_KILLS, *scene.NODE_CUTS, *scene.NODE_CLOCKS}
    broker = {*scene.BROKER_KILLS, *scene.BROKER_CUTS, *scene.BROKER_CLOCKS}
    assert kinds == nodes | broker | {*scene.FOLLOWER_KILLS, *scene.FOLLOWER_CUTS, *scene.FOLLOWER_CLOCKS}
    for faults in plan:
        assert faults[0] in nodes and len(faults) <= 3
        assert faults[0] not in scene.LOSSES or not broker & {*faults}, "only the broker has what the node has lost"
    assert {len(faults) for faults in rounds(7, 50, brokers=2)} == {1}


def test_the_clock_of_a_running_process_is_set() -> None:
    if reason := wall_clock.unavailable():
        pytest.skip(f"clocks cannot be set here: {reason}")
    child = subprocess.Popen([sys.executable, "-c", TELL], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert child.stdin is not None and child.stdout is not None

    def told() -> tuple[float, float]:
        child.stdin.write("\n")
        child.stdin.flush()
        wall, monotonic = map(float, child.stdout.readline().split())
        return wall, monotonic

    try:
        told()
        for seconds in (-3600, 86400, 0):
            wall_clock.shift(child.pid, seconds)
            before = time.time(), time.monotonic()
            wall, monotonic = told()
            assert before[0] <= wall - seconds <= time.time()
            assert before[1] <= monotonic <= time.monotonic(), "monotonic clocks stay"
    finally:
        child.stdin.close()
        assert child.wait() == 0
        child.stdout.close()
