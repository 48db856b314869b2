"""The command over the rooms that keep messages or lose them: broker, journal, unreliable shared memory; ``shm``."""

from __future__ import annotations

import json
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

import penstock
from penstock.broker import Server

from .command import environment, run, start


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[str]:
    with Server(str(tmp_path / "broker"), 0).start() as server:
        yield f"broker://127.0.0.1:{server.port}"


def test_a_broker_keeps_what_nobody_read_yet(broker: str) -> None:
    penstock.subscriber(f"{broker}/t?queue=q").close()  # makes the queue
    assert run("pub", f"{broker}/t", "kept {count}", "--count", "5").returncode == 0
    done = run("sub", f"{broker}/t?queue=q", "--count", "5", "--timeout", "30", "--json")
    records = [json.loads(line) for line in done.stdout.splitlines()]
    assert [record["payload"] for record in records] == [f"kept {n}" for n in range(1, 6)]


def test_a_broker_replays_from_an_ordinal_and_a_time(broker: str) -> None:
    run("pub", f"{broker}/r", "{count}", "--count", "10")
    done = run("sub", f"{broker}/r?queue=a", "--from", "8", "--count", "3", "--timeout", "30")
    assert done.stdout.split() == ["8", "9", "10"], done.stderr
    done = run("sub", f"{broker}/r?queue=b", "--since", "1h", "--count", "10", "--timeout", "30")
    assert done.stdout.split() == [str(n) for n in range(1, 11)], done.stderr


def test_a_journal_is_published_and_followed(tmp_path: Path) -> None:
    address = f"journal:{tmp_path}/j#t"
    assert run("pub", address, "{count}", "--count", "3").returncode == 0
    done = run("sub", f"{address}?start=first", "--count", "3", "--timeout", "30")
    assert done.stdout.split() == ["1", "2", "3"]


def test_live_reaches_refuse_a_start() -> None:
    done = run("sub", "shm:/x", "--from", "1")
    assert done.returncode == 2 and "keeps no old messages" in done.stderr


def test_losses_are_printed_as_they_happen() -> None:
    """An unreliable channel of four slots and a reader that is stopped while a hundred messages are published."""
    import signal

    address = f"shm:/test-loss-{uuid.uuid4().hex[:8]}"
    with penstock.publisher(address, slots=8, slot_size=64) as publisher:
        listening = start("sub", address, "--timeout", "40", "--ledger", "--filter", 'payload == "last"', "--count", "1")
        try:
            assert publisher.wait_ready(1, 40)
            publisher.publish(b"first")
            listening.send_signal(signal.SIGSTOP)
            for _ in range(100):
                publisher.publish(b"x")
            listening.send_signal(signal.SIGCONT)
            deadline = time.monotonic() + 40
            while listening.poll() is None and time.monotonic() < deadline:
                publisher.publish(b"last")
                time.sleep(0.05)
            out, err = listening.communicate(timeout=40)
        finally:
            listening.kill()
            listening.wait()
    assert out == "last\n", err
    lost = [line for line in err.splitlines() if line.startswith("penstock: lost")]
    ledger = json.loads(err.splitlines()[-1])
    assert lost and ledger["balanced"] and sum(ledger["dropped"].values()) > 0
    assert sum(int(line.split()[2]) for line in lost) == sum(ledger["dropped"].values())


def test_shm_ls_and_clean() -> None:
    name = f"/test-shm-{uuid.uuid4().hex[:8]}"
    with penstock.publisher(f"shm:{name}", slots=8, slot_size=64) as publisher:
        publisher.publish(b"x")
        (line,) = [one for one in run("shm", "ls", "--json").stdout.splitlines() if name in one]
        channel = json.loads(line)
        assert channel["slots"] == 8 and channel["published"] == 1 and len(channel["members"]) == 1
        assert name in run("shm", "ls").stdout
    code = f"import os, penstock; p = penstock.publisher('shm:{name}'); p.publish(b'x'); os.kill(os.getpid(), 9)"
    subprocess.run([sys.executable, "-c", code], check=False, env=environment(), timeout=60)
    cleaned = json.loads(run("shm", "clean", "--json").stdout)["removed"]
    assert any(name in removed for removed in cleaned)
    assert name not in run("shm", "ls").stdout


def test_delay_measures_ages() -> None:
    address = f"shm:/test-delay-{uuid.uuid4().hex[:8]}"
    measuring = start("delay", address, "--count", "2", "--every", "0.3", "--json", "--timeout", "40")
    with penstock.publisher(address, slots=64, slot_size=64) as publisher:
        try:
            assert publisher.wait_ready(1, 40)
            while measuring.poll() is None:
                publisher.publish(b"x")
                time.sleep(0.005)
            out, err = measuring.communicate(timeout=40)
        finally:
            measuring.kill()
            measuring.wait()
    lines = [json.loads(line) for line in out.splitlines()]
    assert len(lines) == 2 and measuring.returncode == 0, err
    assert all(0 < line["least_s"] <= line["p50_s"] <= line["p99_s"] <= line["most_s"] for line in lines)
