"""A token that stands in an address, an option or a command line is in nothing that a command prints or the page shows."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

import penstock
from penstock.address import DEFAULT_PORTS, NETWORK, parse, without_secrets
from penstock.broker import Client
from penstock.errors import InvalidArgument
from penstock.gateway import Gateway
from penstock.gateway.mqtt_args import checked
from penstock.secrecy import hidden, hidden_values
from penstock.system import process, who
from tests.cli.command import run
from tests.monitor.handles import Handles

SECRET = "hush-77c1d2ab"


@pytest.fixture
def handles() -> Iterator[Handles]:
    with Handles() as running:
        yield running


@pytest.mark.parametrize(
    "words",
    [
        ["penstock", "monitor", "--token", SECRET], ["penstock", "monitor", f"--token={SECRET}"],
        ["penstock", "sub", f"tcp://h:1?token={SECRET}"], ["penstock", "sub", f"tcp://h:1?%74oken={SECRET}"],
        ["penstock", "sub", f"tcp://h:1?keepalive=5&%74%4F%6b%65%6E={SECRET}&x=1"],
        ["penstock", "sub", "tcp://h:1", "-O", f"token={SECRET}"], ["penstock", "sub", "tcp://h:1", f"-Otoken={SECRET}"],
        ["penstock", "sub", "tcp://h:1", "-O", f"token=a&b={SECRET}"], ["sh", f"TOKEN=one two {SECRET}"],
        ["env", f"PENSTOCK_MONITOR_TOKEN={SECRET}", "penstock"], ["renamed: monitor --token " + SECRET],
        ["curl", f"http://h:1/api/tail?address=tcp%3A%2F%2Fh%3A1%3Ftoken%3D{SECRET}"],
        ["python", "-c", f"penstock.publisher('tcp://h:1', token='{SECRET}')"], ["x", f'{{"token": "{SECRET}"}}'],
        ["x", "--access-token", SECRET], ["penstock", "sub", f"nats://me:{SECRET}@h:1/x"],
        ["penstock", "broker", "d", f"--store=nats://{SECRET}@h1,h2/s"], ["x", "--password", SECRET],
        ["penstock", "sub", f"nats://me:a/{SECRET}@h:1/x"], ["penstock", "sub", f"nats://h:1/x?password={SECRET}"],
    ],
)  # fmt: skip
def test_a_token_in_a_command_line_is_hidden(words: list[str]) -> None:
    shown = hidden(words)
    assert SECRET not in " ".join(shown) and "***" in " ".join(shown)
    assert shown[0].split(" ")[0] == words[0].split(" ")[0] and len(shown) == len(words)


def test_a_command_line_without_a_token_is_shown_whole() -> None:
    words = ["penstock", "broker", "--tokens", "/etc/tokens.toml", "--token-file", "x", "tcp://h:1?queue=q", "token", "--token"]
    assert hidden(words) == words


def test_what_stands_before_a_host_is_a_secret_at_every_reach() -> None:
    for scheme in NETWORK:
        for login in (SECRET, f"me:{SECRET}", f"me:%2F{SECRET}%40"):
            parts = parse(f"{scheme}://{login}@h:1,g:2/a@b" if scheme != "tcp" else f"tcp://{login}@h:1")
            assert parts.host in ("h", "h:1,g") and SECRET not in str(parts)
            assert SECRET in parts.options["token" if login == SECRET else "password"]
        no_port = [f"{scheme}://me:{SECRET}@h"] if scheme not in DEFAULT_PORTS else []
        for wrong in (*no_port, f"{scheme}://me:a/{SECRET}@h:1", f"{scheme}://{SECRET}@:1", f"{scheme}://{SECRET}@"):
            with pytest.raises(InvalidArgument) as error:
                parse(wrong)
            assert SECRET not in str(error.value)
        with pytest.raises(InvalidArgument) as error:  # who knows neither says so
            penstock.subscriber(f"{scheme}://me:{SECRET}@127.0.0.1:1/x?nothing=1".replace("/x" if scheme == "tcp" else " ", ""))
        assert SECRET not in str(error.value)
    with pytest.raises(InvalidArgument) as error:
        Client(f"me:{SECRET}@127.0.0.1")
    assert SECRET not in str(error.value)
    with pytest.raises(ValueError, match="host must be only a host") as refused:
        checked({"host": f"me:{SECRET}@h"})
    assert SECRET not in str(refused.value)
    for text in ("broker://h:1/a@b", "tcp:///run/a@b", "broker://[::1]:1,h:2/a@b?queue=c@d", "shm:/a@b"):
        assert without_secrets(text) == text and hidden([text]) == [text], "no secret stands there"


@pytest.fixture
def secretive() -> Iterator[subprocess.Popen[bytes]]:
    """Somebody else's program, with a token among the first words of its command line and one far behind."""
    program = "import sys; print('up', flush=True); sys.stdin.read()"
    more = ["x" * 280, f"tcp://127.0.0.1:1?token={SECRET}"]
    running = subprocess.Popen(
        [sys.executable, "-c", program, f"--token={SECRET}", "--token", SECRET, *more],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    )  # fmt: skip
    try:
        assert running.stdout is not None and running.stdout.readline() == b"up\n"
        yield running
    finally:
        running.communicate(timeout=30)


def test_command_lines_of_others_are_shown_without_tokens(secretive: subprocess.Popen[bytes]) -> None:
    found = process(secretive.pid)
    assert found is not None and len(found.command) == 300
    assert "--token=*** --token ***" in found.command and "hush" not in found.command
    assert "hush" not in who(secretive.pid)


def test_the_page_shows_no_token_of_a_command_line() -> None:
    pytest.importorskip("starlette")
    from penstock.monitor.service import Service

    program = "from penstock import _core; c = _core.Counters('test', 'x', 'y'); print('up', flush=True); input()"
    child = subprocess.Popen(
        [sys.executable, "-c", program, f"tcp://h:1?token={SECRET}"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        assert child.stdout is not None and child.stdout.readline() == b"up\n"
        with Service() as service:
            service.start()
            with urllib.request.urlopen(service.url + "api/state", timeout=30) as answer:
                text = answer.read().decode()
        assert any(known["pid"] == child.pid for known in json.loads(text)["processes"])
        assert SECRET not in text and "?token=***" in text
    finally:
        child.communicate(b"\n", timeout=30)


def printed(*arguments: str, cwd: Path | None = None, **variables: str) -> str:
    done = run(*arguments, cwd=cwd, **variables)
    assert "Traceback" not in done.stderr, done.stderr
    assert (done.stdout + done.stderr).strip(), "a command that prints nothing shows nothing"
    return done.stdout + done.stderr


NOBODY, SOMEBODY = f"tcp://127.0.0.1:2?token={SECRET}", f"tcp://127.0.0.1:1?token={SECRET}"


@pytest.mark.parametrize("more", [(), ("--json",)], ids=["plain", "json"])
@pytest.mark.parametrize(
    "command",
    [
        ("why", NOBODY), ("info", NOBODY), ("info", SOMEBODY), ("hz", NOBODY), ("bw", NOBODY), ("ls", NOBODY),
        ("hz", SOMEBODY, "-n", "1", "--every", "0.05"), ("sub", NOBODY, "--since", "5m"), ("sub", NOBODY, "--from", "1"),
        ("sub", "tcp://127.0.0.1:2", "-O", f"token:{SECRET}"), ("why", f"tcp://{SECRET}@127.0.0.1:2"),
        ("pub", f"nats://me:{SECRET}@127.0.0.1:2/x", "y"), ("sub", f"broker://{SECRET}@127.0.0.1:2/x"),
    ],
    ids=lambda words: words[0],
)  # fmt: skip
def test_commands_do_not_repeat_the_token_of_an_address(
    handles: Handles, command: tuple[str, ...], more: tuple[str, ...]
) -> None:
    if command[0] == "ls" and more:
        return  # --json of ls has nothing to show where nobody is
    handles.do("open tcp publisher 127.0.0.1:1")
    assert SECRET not in printed(*command, *more)


@pytest.mark.parametrize("more", [(), ("--json",)], ids=["plain", "json"])
def test_a_gateways_file_is_not_shown_with_its_tokens(tmp_path: Path, more: tuple[str, ...]) -> None:
    file = tmp_path / "gateway.json"
    ends = [f"tcp://127.0.0.1:{port}?token={SECRET}" for port in (1, 2)]
    entrypoint = {"activation": "launch", "path": "/bin/true", "args": ["--token", SECRET], "control_id": "x"}
    modules = [{"name": "m", "loader": {"name": "process", "entrypoint": entrypoint}}]
    links = [{"source": ends[0], "sink": ends[1]}, {"source": ends[1], "sink": ends[0]}, {"source": "m", "sink": ends[0]}]
    file.write_text(json.dumps({"modules": modules, "links": links}))
    twice = tmp_path / "twice.json"
    twice.write_text(json.dumps({"modules": [], "links": [links[0], links[0]]}))
    texts = [printed("run", str(file), "--check", *more), printed("run", str(twice), *more)]
    assert not [text for text in texts if SECRET in text]
    if not more:
        assert any('"args": ["--token", "***"]' in text for text in texts), "the graph was printed"


@pytest.mark.parametrize("words", [("ls", "shm:/a"), ("info", "shm:/a"), (), ("journal",)])
def test_words_that_a_command_does_not_take_are_not_repeated_with_their_token(words: tuple[str, ...]) -> None:
    done = run(*words, f"tcp://h:1?token={SECRET}")
    assert done.returncode == 2 and "?token=***" in done.stderr and SECRET[:4] not in done.stderr, done.stderr


def test_settings_are_shown_without_secrets() -> None:
    value = {"a": {"token": SECRET}, "token": None, "b": ["--token", 5, SECRET, ["x", {"token": 7}]], "c": [True, "x"]}
    shown = hidden_values(value)
    assert shown == {"a": {"token": "***"}, "token": None, "b": ["--token", 5, "***", ["x", {"token": "***"}]], "c": [True, "x"]}


@pytest.mark.parametrize("more", [(), ("--json",)])
def test_a_bridge_does_not_repeat_tokens(tmp_path: Path, more: tuple[str, ...]) -> None:
    with penstock.publisher("tcp://127.0.0.1:0", token=SECRET, overflow="block") as publisher:
        source = f"tcp://127.0.0.1:{publisher.port}?token={SECRET}"  # type: ignore[attr-defined]
        publisher.publish(b"x")
        child = subprocess.Popen(
            [sys.executable, "-m", "penstock", "bridge", source, f"tcp://127.0.0.1:0?token={SECRET}", "-n", "1", *more],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
        try:
            assert publisher.wait_ready(1, 30)
            publisher.publish(b"x")
            text, _ = child.communicate(timeout=60)
        finally:
            child.kill()
            child.wait()
    assert child.returncode == 0 and "tcp://127.0.0.1" in text and SECRET not in text, text


@pytest.mark.parametrize("more", [(), ("--json",), ("--all",)])
def test_the_configuration_is_shown_without_tokens(tmp_path: Path, more: tuple[str, ...]) -> None:
    (tmp_path / "penstock.toml").write_text(
        f'[monitor]\ntoken = "{SECRET}"\n[sub]\noption = ["token={SECRET}", "keepalive=5"]\n'
        f'[journal.inner]\ntoken = "{SECRET}"\n[why]\nfilter = "tcp://h:1?token={SECRET}"\n'
    )
    text = printed("config", "show", *more, cwd=tmp_path)
    assert SECRET not in text and "***" in text and "keepalive=5" in text
    text = printed("config", "show", *more, PENSTOCK_MONITOR_TOKEN=SECRET)
    assert SECRET not in text and "***" in text


def test_a_gateway_does_not_repeat_the_tokens_of_its_addresses(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    from penstock.errors import PenstockError
    from penstock.gateway import Event
    from penstock.gateway.endpoint import Endpoint

    source, sink = "bus:test-gateway-secrets", f"tcp://127.0.0.1:0?token={SECRET}"
    told: list[str] = []
    failed = threading.Event()

    def note(_: object, event: Event, context: object, __: object) -> None:
        told.append(f"{event} {context}")
        failed.set()

    def fail(*_: object) -> None:
        raise OSError("the line is cut")

    monkeypatch.setattr(Endpoint, "receive_many", fail)
    with Gateway(callbacks=[(Event.MODULE_FAILED, note)]) as gateway, penstock.publisher(source) as publisher:
        gateway.add_link(source, sink)
        gateway.start()
        publisher.publish(b"x")
        assert failed.wait(30), "a sink with a token that fails is told like any other"
        shown = [str(gateway.links()), *map(str, gateway.links()), caplog.text, *told]
        for wrong in (lambda: gateway.add_link(source, sink), lambda: gateway.remove_module("tcp:nothing"),
                      lambda: gateway.remove_module(sink + "x"), lambda: gateway.add_link("nothing", sink)):  # fmt: skip
            with pytest.raises(PenstockError) as failure:
                wrong()
            shown.append(str(failure.value))
    assert "tcp://127.0.0.1:0" in told[0]
    assert not [text for text in shown if SECRET in text]
