"""The replicated broker on a real cluster: the broker's own tests over it, and faults of every kind under load."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.broker.conftest import client, server, wire
from tests.replica.conftest import serve
from tests.replica.test_broker import *  # noqa: F403 - all of them, over the cluster below

from penstock import torture
from penstock.replica import Blocks, JetStream
from penstock.replica.cluster import Cluster
from penstock.replica.stream import Target

__all__ = ["client", "serve", "server", "wire"]

numbers = itertools.count()


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with Cluster(tmp_path_factory.mktemp("nodes")) as started:
        started.connect().close()
        yield started


@pytest.fixture
def connect(cluster: Cluster) -> Iterator[Callable[[], Blocks]]:
    """Connects to a stream of the test's own."""
    address = f"{cluster.address.rpartition('/')[0]}/test{next(numbers)}"
    opened: list[JetStream] = []

    def start() -> Blocks:
        opened.append(JetStream(Target.parse(address)))
        opened[-1].open_patiently()
        return opened[-1]

    yield start
    for blocks in opened:
        blocks.close()


@pytest.mark.torture
@pytest.mark.timeout(0)
@pytest.mark.parametrize("scenario", ["replica", "takeover"])
def test_faults_under_load(scenario: str, kills: int | None, seed: int, tmp_path: Path) -> None:
    report = torture.run(scenario, kills or 30, seed, tmp_path)
    print(report.text())
    assert report.passed, report.text()
