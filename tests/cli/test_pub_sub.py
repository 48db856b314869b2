"""``penstock pub`` and ``penstock sub`` as two processes, over every reach that two processes can share."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import uuid
from pathlib import Path

import pytest

from .command import HERE, environment, run, start


def _installed(room: str) -> bool:
    from penstock import address

    try:
        return hasattr(address.room(room), "open_subscriber")
    except ImportError:
        return False


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


@pytest.fixture(params=["shm", "tcp"])
def live(request: pytest.FixtureRequest) -> str:
    if not _installed(request.param):
        pytest.skip(f"{request.param} is not in this build")
    return (
        f"shm:/test-cli-{uuid.uuid4().hex[:8]}?reliable=true"
        if request.param == "shm"
        else f"tcp://127.0.0.1:{free_port()}"
    )


def exchange(
    address: str, publish: list[str], subscribe: list[str], **keywords: str
) -> tuple[subprocess.CompletedProcess[str], str, str]:
    """Publisher and subscriber at once; the subscriber is the one that ends by its count."""
    listening = start("sub", address, "--wait", "--timeout", "40", *subscribe)
    try:
        published = run("pub", address, *publish, timeout=90, **keywords)
        out, err = listening.communicate(timeout=60)
    finally:
        listening.kill()
        listening.wait()
    return published, out, err


def test_text_in_order(live: str) -> None:
    published, out, err = exchange(live, ["line {count}", "--count", "50"], ["--count", "50"])
    assert published.returncode == 0, published.stderr
    assert out.splitlines() == [f"line {n}" for n in range(1, 51)], err


def test_json_of_both_sides(live: str) -> None:
    published, out, _ = exchange(live, ['{"n": {count}}', "--count", "3", "--json"], ["--count", "3", "--json"])
    assert json.loads(published.stdout)["published"] == 3
    records = [json.loads(line) for line in out.splitlines()]
    assert [record["payload"] for record in records] == [{"n": 1}, {"n": 2}, {"n": 3}]
    assert [record["ordinal"] for record in records] == [1, 2, 3]
    assert all(record["timestamp_ns"] > 0 for record in records)


def test_filter_template_and_lines_of_input(live: str) -> None:
    lines = "".join(json.dumps({"n": n}) + "\n" for n in range(1, 21))
    published, out, _ = exchange(
        live, ["-"], ["--count", "5", "--filter", ".n % 4 == 0", "--template", "{ordinal}={payload}"], stdin=lines
    )
    assert published.returncode == 0, published.stderr
    assert out.splitlines() == [f'{n}={{"n": {n}}}' for n in (4, 8, 12, 16, 20)]


def test_raw_size_and_file(live: str, tmp_path: Path) -> None:
    (tmp_path / "body.bin").write_bytes(bytes(range(256)))
    listening = subprocess.Popen(
        [*HERE, "sub", live, "--wait", "--timeout", "40", "--count", "2", "--format", "raw"],
        stdout=subprocess.PIPE,
        env=environment(),
    )
    try:
        run("pub", live, "--file", str(tmp_path / "body.bin"), "--size", "300", "--count", "2")
        out, _ = listening.communicate(timeout=60)
    finally:
        listening.kill()
        listening.wait()
    assert out == (bytes(range(256)) + b"." * 44) * 2


def test_nobody_listens_is_code_3(live: str) -> None:
    done = run("pub", live, "x", "--timeout", "0.3")
    assert done.returncode == 3 and "subscriber" in done.stderr
    if live.startswith("shm"):  # it waits at its first message then, and is not the reason itself
        done = run("pub", live, "x", "--wait", "0", "--timeout", "0.3")
        assert done.returncode == 3 and "has no subscriber yet" in done.stderr and "process" not in done.stderr
        assert "penstock why" not in done.stderr, "nothing is left that it could look at"


def test_nothing_comes_is_code_3(live: str) -> None:
    done = run("sub", live, "--wait", "--timeout", "0.3")
    assert done.returncode == 3 and "nothing came" in done.stderr


def test_ctrl_c_is_clean(live: str) -> None:
    listening = start("sub", live, "--wait")
    try:
        publisher = start("pub", live, "x", "--count", "0", "--rate", "100")
        try:
            assert listening.stdout is not None and listening.stdout.readline() == "x\n"
            listening.send_signal(signal.SIGINT)
            _, err = listening.communicate(timeout=60)
            assert listening.returncode == 130 and "Traceback" not in err, err
            publisher.send_signal(signal.SIGTERM)
            _, err = publisher.communicate(timeout=60)
            assert publisher.returncode == 0 and "Traceback" not in err, err
        finally:
            publisher.kill()
            publisher.wait()
    finally:
        listening.kill()
        listening.wait()


def test_broken_pipe_is_clean(live: str) -> None:
    publisher = start("pub", live, "{count}", "--count", "0", "--rate", "2000", "--timeout", "40")
    try:
        shell = f"{' '.join(HERE)} sub '{live}' --wait --timeout 40 | head -3; exit ${{PIPESTATUS[0]}}"
        done = subprocess.run(["bash", "-c", shell], text=True, capture_output=True, env=environment(), timeout=60)
        assert done.stdout.split()[0].isdigit() and len(done.stdout.split()) == 3
        assert done.returncode == 141 and "Traceback" not in done.stderr and "Broken" not in done.stderr, done.stderr
    finally:
        publisher.kill()
        publisher.communicate()
