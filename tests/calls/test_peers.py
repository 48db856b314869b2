"""Servers and clients that die, share the load, or are not what they should be."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import penstock
from penstock.address import option_names
from penstock.calls import Client, Request, Server
from tests.broker.conftest import until
from tests.broker.test_security import certificate
from tests.conformance.reaches import unique

SERVER = """
import os, sys, time, penstock
def function(payload):
    if payload == b"hang":
        print("hanging", flush=True)
        time.sleep(600)
    return b"%d " % os.getpid() + payload
with penstock.server(sys.argv[1], function) as server:
    print("ready", server.port, flush=True)
    time.sleep(600)
"""


def start(address: str) -> subprocess.Popen[str]:
    process = subprocess.Popen([sys.executable, "-c", SERVER, address], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    process.first = process.stdout.readline().split()  # type: ignore[attr-defined]
    assert process.first[0] == "ready"  # type: ignore[attr-defined]
    return process


def end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.wait()
    assert process.stdout is not None
    process.stdout.close()


@pytest.fixture(params=["bus", "shm", "tcp"])
def served_here(request: pytest.FixtureRequest) -> Iterator[tuple[str, Server]]:
    """A server in this process, and its address."""
    address = {"bus": f"bus:{unique('here')}", "shm": f"shm:/{unique('here')}", "tcp": "tcp://127.0.0.1:0"}
    with penstock.server(address[request.param], lambda payload: payload) as server:
        yield server.address, server


@pytest.fixture(params=["shm", "tcp"])
def served(request: pytest.FixtureRequest) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """A server in a process of its own, and its address."""
    shm = request.param == "shm"
    address = f"shm:/{unique('calls')}" if shm else "tcp://127.0.0.1:0"
    process = start(address)
    try:
        yield address if shm else f"tcp://127.0.0.1:{process.first[1]}", process  # type: ignore[attr-defined]
    finally:
        end(process)


def test_a_server_that_is_killed_is_told_at_once(served: tuple[str, subprocess.Popen[str]]) -> None:
    address, process = served
    assert process.stdout is not None
    with penstock.client(address) as client:
        assert client.wait_ready(1, timeout=30)
        errors: list[BaseException] = []

        def ask() -> None:
            try:
                client.call(b"hang")  # no time limit: only the death can end it
            except BaseException as error:
                errors.append(error)

        thread = threading.Thread(target=ask)
        thread.start()
        assert process.stdout.readline() == "hanging\n"
        os.kill(process.pid, signal.SIGKILL)
        thread.join(60)
        assert [type(error) for error in errors] == [penstock.PeerGone]
        with pytest.raises(penstock.PeerGone):
            client.call(b"x")
        assert client.ledger.dropped["closed"] == 2 and client.ledger.balanced


def test_a_server_that_closes_is_told_at_once() -> None:
    for address in (f"bus:{unique()}", f"shm:/{unique()}", "tcp://127.0.0.1:0"):
        begun, go_on = threading.Event(), threading.Event()

        def function(payload: bytes, begun: threading.Event = begun, go_on: threading.Event = go_on) -> bytes:
            begun.set()
            go_on.wait(60)
            return payload

        server = penstock.server(address, lambda payload: function(payload))
        where = address if server.port is None else f"tcp://127.0.0.1:{server.port}"
        with penstock.client(where) as client:

            def close(begun: threading.Event = begun, server: Server = server) -> None:
                begun.wait(60)
                server.close(0.0)

            closer = threading.Thread(target=close)
            closer.start()
            with pytest.raises(penstock.PeerGone):
                client.call(b"x")
            go_on.set()
            closer.join(60)


def test_nobody_there_is_told_at_once() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound and not listening: refused
        for address in (f"bus:{unique()}", f"shm:/{unique()}", f"tcp://127.0.0.1:{taken.getsockname()[1]}"):
            with penstock.client(address) as client:
                assert not client.wait_ready(1, timeout=0)
                with pytest.raises(penstock.PeerGone, match="no server answers"):
                    client.call(b"x")


def test_a_client_goes_on_with_the_next_server() -> None:
    address = f"shm:/{unique()}"
    with penstock.client(address) as client:
        for round in (b"first", b"second"):
            with penstock.server(address, lambda payload: payload):
                assert client.wait_ready(1, timeout=30)
                assert client.call(round, timeout=30) == round


@pytest.mark.parametrize("scheme", ["bus:", "shm:/"])
def test_several_servers_share_the_load(scheme: str) -> None:
    address = scheme + unique()
    inside = threading.Barrier(2, timeout=60)

    def function(payload: bytes) -> bytes:
        inside.wait()  # both servers must be inside at once, or this breaks
        return payload

    with penstock.server(address, function), penstock.server(address, function), penstock.client(address) as client:
        assert client.wait_ready(2, timeout=30)
        found: list[bytes] = []
        threads = [threading.Thread(target=lambda n=n: found.append(client.call(b"%d" % n, 60))) for n in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert sorted(found) == [b"0", b"1"]


def test_workers_run_side_by_side() -> None:
    address = f"shm:/{unique()}"
    inside = threading.Barrier(3, timeout=60)

    def function(payload: bytes) -> bytes:
        inside.wait()
        return payload

    with penstock.server(address, function, workers=3), penstock.client(address) as client:
        found: list[bytes] = []
        threads = [threading.Thread(target=lambda n=n: found.append(client.call(b"%d" % n, 60))) for n in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert sorted(found) == [b"0", b"1", b"2"]


def test_a_client_that_dies_leaves_nothing() -> None:
    from penstock import shm

    address = f"shm:/{unique()}"
    code = f"import os, penstock; c = penstock.client({address!r}); c.call(b'x', 30); os.kill(os.getpid(), 9)"
    with penstock.server(address, lambda payload: payload):
        assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == -9
        deadline = time.monotonic() + 60
        name = address.removeprefix("shm:")
        while any(channel.name.startswith(f"{name}/@client") for channel in shm.channels()):
            shm.clean()
            assert time.monotonic() < deadline
            time.sleep(0.05)


def test_requests_that_are_too_late_are_not_begun() -> None:
    address = f"shm:/{unique()}"
    seen: list[bytes] = []
    go_on, begun = threading.Event(), threading.Event()

    def function(payload: bytes) -> bytes:
        seen.append(payload)
        begun.set()
        if payload == b"first":
            go_on.wait(60)
        return payload

    with penstock.server(address, function) as server, penstock.client(address) as client:
        thread = threading.Thread(target=lambda: client.call(b"first", 60))
        thread.start()
        assert begun.wait(60)
        with pytest.raises(TimeoutError):
            client.call(b"late", timeout=0.05)
        go_on.set()
        thread.join(60)
        assert client.call(b"last", 60) == b"last"
        assert seen == [b"first", b"last"]
        server.close()
        assert server.ledger.balanced and server.ledger.lost + server.ledger.expired == 1


def test_tokens_are_proved() -> None:
    with penstock.server("tcp://127.0.0.1:0", lambda payload: payload, token="secret") as server:
        with penstock.client(f"tcp://127.0.0.1:{server.port}", token="secret") as client:
            assert client.call(b"x", 30) == b"x"
        for wrong in ({"token": "wrong"}, {}):
            with penstock.client(f"tcp://127.0.0.1:{server.port}", **wrong) as client, pytest.raises(penstock.RefusedError, match="token"):
                client.call(b"x", 30)


def test_off_loopback_wants_a_token() -> None:
    with pytest.raises(penstock.RefusedError, match="token"):
        penstock.server("tcp://0.0.0.0:0", lambda payload: payload)


def test_garbage_ends_its_own_connection_alone() -> None:
    with penstock.server("tcp://127.0.0.1:0", lambda payload: payload) as server:
        assert server.port is not None
        with penstock.client(f"tcp://127.0.0.1:{server.port}") as client:
            assert client.call(b"x", 30) == b"x"
            for garbage in (b"GET / HTTP/1.1\r\n\r\n", bytes(100), os.urandom(4096), b"\xff" * 64):
                with socket.create_connection(("127.0.0.1", server.port)) as stranger:
                    stranger.settimeout(30)
                    try:
                        stranger.sendall(garbage)
                        stranger.shutdown(socket.SHUT_WR)
                        while stranger.recv(4096):
                            pass
                    except OSError:
                        pass  # cut already, which is what it deserves
            assert client.call(b"y", 30) == b"y"
            assert client.ledger.delivered == 2


def test_more_than_is_allowed_is_refused_and_costs_its_own_call_alone() -> None:
    with penstock.server("tcp://127.0.0.1:0", lambda payload: payload, max_message_bytes=1000) as server:
        with penstock.client(server.address) as client:
            assert len(client.call(bytes(1000), 30)) == 1000, "as many as allowed"
            for size in (1001, 3_000_000):
                with pytest.raises(penstock.RefusedError, match=f"a request of {size} bytes where 1000 are allowed"):
                    client.call(bytes(size), 30)
            assert client.call(b"small", 30) == b"small"
        small = penstock.client(server.address, max_message_bytes=100)
        with small, pytest.raises(ValueError, match="max_message_bytes"):
            small.call(bytes(2000), 30)


def test_tls(tmp_path: Path) -> None:
    made = certificate(tmp_path)
    server_side = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server_side.load_cert_chain(*made)
    client_side = ssl.create_default_context(cafile=made[0])
    with penstock.server("tcp://127.0.0.1:0", lambda payload: payload * 2, tls=server_side) as server:
        with penstock.client(f"tcp://127.0.0.1:{server.port}", tls=client_side) as client:
            assert client.call(b"ab", 30) == b"abab"
            assert client.call(bytes(1 << 20), 30) == bytes(1 << 21)
        with penstock.client(f"tcp://127.0.0.1:{server.port}", tls=ssl.create_default_context()) as client, pytest.raises(penstock.PeerGone, match=r"(?i)certificate"):
            client.call(b"x", 30)


def test_a_broker_keeps_requests_until_a_server_comes(tmp_path: Path) -> None:
    from penstock.broker import Server as Broker

    with Broker(tmp_path / "broker", 0).start() as broker:
        address = f"broker://127.0.0.1:{broker.port}/plan"
        with penstock.client(address) as client:
            found: list[bytes] = []
            thread = threading.Thread(target=lambda: found.append(client.call(b"early", 60)))
            thread.start()
            with penstock.server(address, lambda payload: payload.upper()):
                thread.join(60)
            assert found == [b"EARLY"]


def test_a_request_goes_to_the_next_server_when_one_dies(tmp_path: Path) -> None:
    from penstock.broker import Server as Broker

    with Broker(tmp_path / "broker", 0).start() as broker:
        address = f"broker://127.0.0.1:{broker.port}/plan"
        process = start(address)
        try:
            with penstock.client(address) as client:
                found: list[bytes] = []
                thread = threading.Thread(target=lambda: found.append(client.call(b"hang", 60)))
                thread.start()
                assert process.stdout is not None
                assert process.stdout.readline() == "hanging\n"
                process.kill()
                with penstock.server(address, lambda payload: b"the next one"):
                    thread.join(60)
                assert found == [b"the next one"]
        finally:
            end(process)


def test_no_calls_at_a_journal(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="journal"):
        penstock.server(f"journal:{tmp_path}/log#x", lambda payload: payload)
    with pytest.raises(ValueError, match="no known reach"):
        penstock.client("http://x")
    with pytest.raises(ValueError, match="spin_us"):
        penstock.client("shm:/x", spin=3)


def test_a_request_knows_its_time() -> None:
    address = f"bus:{unique()}"
    left: list[float | None] = []

    def function(payload: bytes, request: Request) -> bytes:
        left.append(request.time_left)
        return b""

    with penstock.server(address, function), penstock.client(address) as client:
        client.call(b"", timeout=50)
        client.call(b"")
    assert left[0] is not None and 0 < left[0] <= 50
    assert left[1] is None


TOKENS = """
[[token]]
name = "asker"
token = "ask"
publish = ["plan", "plan.@cancels"]
subscribe = ["plan.@answers.>"]

[[token]]
name = "answerer"
token = "answer"
publish = ["plan.@answers.>"]
subscribe = ["plan", "plan.@cancels"]

[[token]]
name = "stranger"
token = "other"
publish = ["other.>"]
subscribe = ["other.>"]
"""


def test_rights_of_calls_are_rights_of_topics(tmp_path: Path) -> None:
    from penstock.broker import Server as Broker

    tokens = tmp_path / "tokens.toml"
    tokens.write_text(TOKENS)
    tokens.chmod(0o600)
    with Broker(tmp_path / "broker", 0, tokens=tokens).start() as broker:
        address = f"broker://127.0.0.1:{broker.port}/plan"
        with penstock.server(address, bytes.upper, token="answer"):
            with penstock.client(address, token="ask") as client:
                assert client.call(b"x", 60) == b"X"
            with pytest.raises(penstock.RefusedError):
                penstock.client(address, token="other").call(b"x", 60)
        for token in ("ask", "other"):
            with pytest.raises(penstock.RefusedError):
                penstock.server(address, bytes.upper, token=token)


@pytest.mark.parametrize("scheme", ["shm", "tcp"])
def test_the_death_of_a_client_is_seen_by_the_function(scheme: str) -> None:
    address = f"shm:/{unique()}" if scheme == "shm" else "tcp://127.0.0.1:0"
    begun, seen = threading.Event(), threading.Event()

    def function(payload: bytes, request: Request) -> bytes:
        begun.set()
        while not request.cancelled:
            time.sleep(0.005)
        seen.set()
        return b""

    with penstock.server(address, function) as server:
        where = address if server.port is None else f"tcp://127.0.0.1:{server.port}"
        code = f"import penstock; penstock.client({where!r}).call(b'x')"
        process = subprocess.Popen([sys.executable, "-c", code])
        try:
            assert begun.wait(60)
        finally:
            process.kill()
            process.wait()
        assert seen.wait(60)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT], ids=["killed", "closed"])
def test_no_call_goes_to_a_server_that_has_gone_while_nobody_called(how: signal.Signals) -> None:
    """A call that dies with its server may have been begun; one that comes later goes to a server that lives."""
    address = f"shm:/{unique('gone')}"
    servers = [start(address) for _ in range(3)]
    try:
        with penstock.client(address) as client:
            assert client.wait_ready(3, 60)
            assert len({client.call(b"", 60) for _ in range(3)}) == 3
            for gone in servers[:2]:
                gone.send_signal(how)
                gone.wait()
                for _ in range(3):  # each of the others has its turn
                    client.call(b"", 60)
            assert client.ledger.delivered == client.ledger.matched
    finally:
        for server in servers:
            end(server)


def test_a_call_after_a_server_was_started_again_is_answered() -> None:
    """The connection broke while nobody called."""
    with penstock.server("tcp://127.0.0.1:0", bytes.upper) as first, penstock.client(first.address) as client:
        assert client.call(b"a", 60) == b"A"
        first.close()
        with penstock.server(first.address, bytes.lower):
            assert client.call(b"B", 60) == b"b"
            assert asyncio.run(client.call_async(b"C", 60)) == b"c"
        with penstock.server(first.address, bytes.upper):
            assert asyncio.run(client.call_async(b"d", 60)) == b"D"
        assert client.ledger.delivered == 4


def test_waiting_for_a_server_that_says_nothing_ends_with_its_time() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent, penstock.client(
        f"tcp://127.0.0.1:{silent.getsockname()[1]}"
    ) as client:
        assert not client.wait_ready(1, 0.1)


def test_a_new_server_is_found_after_one_was_killed() -> None:
    address = f"shm:/{unique()}"
    process = start(address)
    try:
        with penstock.client(address) as client:
            assert client.call(b"x", 60)
            process.kill()
            process.wait()
            with pytest.raises(penstock.PeerGone):
                client.call(b"x", 60)
            with penstock.server(address, lambda payload: b"new"):
                assert client.call(b"x", 60) == b"new"
    finally:
        end(process)


def test_a_port_that_says_nothing_stops_no_event_loop() -> None:
    async def ask(port: int) -> int:
        turns = 0

        async def count() -> None:
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0.01)

        counting = asyncio.create_task(count())
        with penstock.client(f"tcp://127.0.0.1:{port}") as client, pytest.raises(TimeoutError):
            await client.call_async(b"x", timeout=1.0)
        counting.cancel()
        return turns

    with socket.socket() as mute:
        mute.bind(("127.0.0.1", 0))
        mute.listen()
        assert asyncio.run(ask(mute.getsockname()[1])) > 5


def test_a_call_waits_no_longer_than_its_own_time_for_a_connection_that_another_makes() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent, penstock.client(
        f"tcp://127.0.0.1:{silent.getsockname()[1]}"
    ) as client:
        patient = threading.Thread(target=_ignoring(client))
        patient.start()
        until(lambda: client.ledger.in_flight == 1)
        with pytest.raises(TimeoutError):
            client.call(b"short", 0.2)
        assert patient.is_alive(), "the short call has waited for the long one"
        silent.close()
        client.close()
        patient.join(30)


def test_a_fork_leaves_the_client_of_a_broker_as_it_was(tmp_path: Path) -> None:
    from penstock.broker import Server as Broker

    code = """
import os, sys, penstock
client = penstock.client(sys.argv[1])
print(client.call(b"before", 60).decode(), flush=True)
if os.fork() == 0:
    sys.exit(0)
os.wait()
print(client.call(b"after", 60).decode(), flush=True)
"""
    with Broker(tmp_path / "broker", 0).start() as broker:
        address = f"broker://127.0.0.1:{broker.port}/plan"
        with penstock.server(address, bytes.upper):
            found = subprocess.run(
                [sys.executable, "-c", code, address], capture_output=True, text=True, timeout=100, check=False
            )
    assert found.stdout.split() == ["BEFORE", "AFTER"], found.stderr


def refusal(address: str) -> str:
    with penstock.client(address) as client, pytest.raises(penstock.RefusedError) as refused:
        client.call(b"x", 60)
    return str(refused.value)


def test_a_port_of_the_other_kind_says_so_at_once(caplog: pytest.LogCaptureFixture) -> None:
    with penstock.publisher("tcp://127.0.0.1:0") as publisher:
        assert "nobody answers calls there" in refusal(f"tcp://127.0.0.1:{publisher.port}")  # type: ignore[attr-defined]
    server = penstock.server("tcp://127.0.0.1:0", bytes)
    with server, penstock.subscriber(f"tcp://127.0.0.1:{server.port}") as subscriber:
        session = subscriber.sessions[0]  # type: ignore[attr-defined]
        until(lambda: "nobody publishes there; ask it with penstock.client" in (session.last_error or ""))
    assert "nobody publishes there" in caplog.text, "a refused subscriber says so without being asked"


def test_a_brokers_port_says_what_it_is_to_calls_and_subscribers(tmp_path: Path) -> None:
    from penstock.broker import Server as Broker

    with Broker(tmp_path / "broker", 0).start() as broker:
        assert f"broker://127.0.0.1:{broker.port}/TOPIC" in refusal(f"tcp://127.0.0.1:{broker.port}")
        with penstock.subscriber(f"tcp://127.0.0.1:{broker.port}") as subscriber:
            session = subscriber.sessions[0]  # type: ignore[attr-defined]
            until(lambda: f"broker://127.0.0.1:{broker.port}/TOPIC" in (session.last_error or ""))


def test_a_token_is_spoken_of_as_of_a_server() -> None:
    with penstock.server("tcp://127.0.0.1:0?token=secret", bytes) as server:
        address = f"tcp://127.0.0.1:{server.port}"
        assert "this server asks for a token; open the client with token=" in refusal(address)
        assert "wrong token" in refusal(f"{address}?token=other")


def test_a_server_at_a_port_that_the_system_chose_is_named_by_it() -> None:
    with penstock.server("tcp://127.0.0.1:0?token=secret", bytes) as server:
        assert server.address == f"tcp://127.0.0.1:{server.port}" and str(server.port) in repr(server)


def test_a_forked_child_is_told_to_open_its_own_and_leaves_the_parents_alone(served_here: tuple[str, Server]) -> None:
    """Two processes on one connection would take each other's answers."""
    address, server = served_here
    client = penstock.client(address)
    assert client.call(b"before", 30) == b"before"
    child = os.fork()
    if child == 0:
        code = 1
        try:
            with client:
                client.call(b"child", 5)
        except penstock.StateError as error:
            code = 0 if "forked" in str(error) else 2
        finally:
            server.close()
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    for number in range(20):
        assert client.call(b"%d" % number, 30) == b"%d" % number
    client.close()


@pytest.mark.parametrize("options", [{"max_clients": 0}, {"max_message_bytes": "1k"}, {"keepalive": -1}, {"token": 5}])
def test_options_that_cannot_be_are_refused_at_once(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(options))):
        penstock.server("tcp://127.0.0.1:0", bytes, **options)


def test_a_misspelt_option_is_told_the_nearest() -> None:
    with pytest.raises(ValueError, match="max_calls"):
        penstock.client("bus:misspelt", max_callz=3)
    with pytest.raises(ValueError, match="workers"):
        penstock.server("bus:misspelt", bytes.upper, worker=3)
    with pytest.raises(ValueError, match="token"):
        penstock.server("tcp://127.0.0.1:0", bytes.upper, tokens="x")


@pytest.mark.parametrize(("opened", "function"), [(penstock.client, "open_client"), (penstock.server, "open_server")])
def test_the_help_lists_the_options_of_each_reach(opened: Any, function: str) -> None:
    from penstock.calls.lanes import module_of

    for scheme in ("shm", "tcp", "broker"):
        options = option_names(getattr(module_of(f"{scheme}:x"), function)).values()
        listed = ", ".join(f"{option.name}={option.default!r}" for option in options)
        assert f"- ``{scheme}``: {listed}" in " ".join((opened.__doc__ or "").split())


def test_clients_that_call_once_each_do_not_all_take_the_same_server() -> None:
    address = f"shm:/{unique('shared')}"
    with penstock.server(address, lambda _: b"one"), penstock.server(address, lambda _: b"two"):
        answers = set()
        for _ in range(64):  # by chance alike: once in 2**63
            with penstock.client(address) as client:
                answers.add(client.call(b"", 30))
    assert answers == {b"one", b"two"}


def test_a_server_that_left_calls_unanswered_is_asked_last() -> None:
    address, release = f"shm:/{unique('silent')}", threading.Event()
    left: list[bytes] = []

    def silent(payload: bytes) -> bytes:
        left.append(payload)
        release.wait(60)
        return b"late"

    with penstock.server(address, silent), penstock.client(address) as client:
        with pytest.raises(TimeoutError):
            client.call(b"first", 0.2)
        with penstock.server(address, lambda _: b"good"):
            assert client.wait_ready(2, 60)
            assert [client.call(b"later", 60) for _ in range(8)] == [b"good"] * 8
        release.set()
    assert b"later" not in left


def test_all_servers_that_were_waited_for_are_used_at_once() -> None:
    address = f"bus:{unique('both')}"
    with penstock.server(address, lambda _: b"one"), penstock.client(address) as client:
        assert client.call(b"", 30) == b"one"
        with penstock.server(address, lambda _: b"two"):
            assert client.wait_ready(2, 60)
            assert {client.call(b"", 30) for _ in range(2)} == {b"one", b"two"}


def test_closing_waits_for_functions_of_many_workers() -> None:
    begun, ended = threading.Semaphore(0), []

    def slow(_: bytes) -> bytes:
        begun.release()
        time.sleep(0.3)
        ended.append(1)
        return b""

    address = f"bus:{unique('closing')}"
    server = penstock.server(address, slow, workers=3)
    with penstock.client(address) as client:
        threads = [threading.Thread(target=_ignoring(client), daemon=True) for _ in range(3)]
        for thread in threads:
            thread.start()
        for _ in threads:
            assert begun.acquire(timeout=60)
        server.close(timeout=60)
        assert len(ended) == 3
        for thread in threads:
            thread.join(60)


def _ignoring(client: Client) -> Any:
    def call() -> None:
        with contextlib.suppress(penstock.PeerGone):
            client.call(b"", 60)

    return call


def test_how_a_function_gets_the_request() -> None:
    def none(payload: bytes, more: int = 3) -> bytes:
        return b"%d" % more

    def position(payload: bytes, request: Request) -> bytes:
        return b"%d" % request.number

    def optional(payload: bytes, request: Request | None = None) -> bytes:
        return b"%d" % (request.number if request else 0)

    def keyword(payload: bytes, *, request: Request) -> bytes:
        return b"%d" % request.number

    for function, answer in ((none, b"3"), (position, b"1"), (optional, b"1"), (keyword, b"1"), (bytes.upper, b"X")):
        address = f"bus:{unique('function')}"
        with penstock.server(address, function), penstock.client(address) as client:
            assert client.call(b"x", 30) == answer, function
    for wrong in (lambda: b"", lambda a, b, c: b""):
        with pytest.raises(TypeError, match="takes the payload, or the payload and the request"):
            penstock.server(f"bus:{unique('function')}", wrong)


def test_what_is_no_payload_is_refused_with_its_type() -> None:
    address = f"bus:{unique('types')}"
    with penstock.server(address, lambda _: 7) as server, penstock.client(address) as client:
        with pytest.raises(TypeError, match=r"a call takes bytes .*, not int"):
            client.call(7, 30)  # type: ignore[arg-type]
        with pytest.raises(penstock.CallFailed, match=r"an answer is bytes .*, not int"):
            client.call(b"", 30)
        server.close()  # waits for the function, which counts after it has answered
        assert server.ledger.balanced
