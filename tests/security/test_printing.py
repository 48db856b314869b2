"""Nothing that comes from a message, a file, a counter page or a peer steers the terminal it is printed on."""

from __future__ import annotations

import socket
import threading
from pathlib import Path

import pytest

from penstock import Message
from penstock._core import Counters
from penstock.cli import exits, show
from penstock.errors import RefusedError
from penstock.journal import Journal
from penstock.observe import decode
from penstock.printable import printable
from penstock.tcp import protocol
from tests.cli.command import run

STEERING = "\x1b]0;mine\x07\x1b[2J\u202e"
SHOWN = "\\x1b]0;mine\\x07\\x1b[2J\\u202e"


def test_what_is_not_for_printing_is_escaped() -> None:
    assert printable("grün\tone\ntwo") == "grün\tone\ntwo"
    assert printable("one\ntwo\udc80", keep="") == "one\\ntwo\\udc80"
    assert printable(STEERING) == SHOWN


def test_the_line_about_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    exits.told(f"refused: {STEERING}")
    assert capsys.readouterr().err == f"penstock: refused: {SHOWN}\n"


def test_tables_and_lines(capsys: pytest.CaptureFixture[str]) -> None:
    show.console().print(show.table(("name",), [(STEERING,)]))
    show.console().print(STEERING, markup=False)
    printed = capsys.readouterr().out
    assert printed.count(SHOWN) == 2 and "\x1b" not in printed


def test_the_channel_in_a_template() -> None:
    assert decode.formatter("{channel}")(Message(b"", channel=f"{STEERING}\n")) == f"{SHOWN}\\n"


def test_topics_of_a_forged_journal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as forging:
        forging.setattr("penstock.journal.journal.check_topic", lambda name: name)
        with Journal(tmp_path / "j") as journal:
            journal.append(f"a{STEERING}", b"x")
    for words in (("cat",), ("info",), ("cat", "--json")):
        done = run("journal", words[0], str(tmp_path / "j"), *words[1:])
        assert done.returncode == 0, done.stderr
        assert "mine" in done.stdout and "\x1b" not in done.stdout, words


def test_names_on_counter_pages() -> None:
    counters = Counters("shm", "publisher", f"/printing{STEERING}")
    try:
        for words in (("ls",), ("top", "--count", "1")):
            done = run(*words)
            assert done.returncode == 0, done.stderr
            assert "mine" in done.stdout and "\x1b" not in done.stdout, words
    finally:
        counters.close()


def test_a_publishers_refusal() -> None:
    request = protocol.Request()
    data = protocol.frame(protocol.FrameType.REFUSED, f"{STEERING}\nok".encode())
    with pytest.raises(RefusedError) as failure:
        while data:
            step, data = data[: request.needs], data[request.needs :]
            request.feed(step)
    assert str(failure.value).endswith(f"{SHOWN}\\nok")


def test_a_brokers_refusal() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(60)

        def answer() -> None:
            said = False
            while not said:
                connection, _ = listener.accept()
                with connection:
                    said = bool(connection.recv(4096))  # who only looks whether somebody listens says nothing
                    if said:
                        connection.sendall(f"ERR denied {STEERING}\r\n".encode())
                    while connection.recv(4096):  # until it has read this and gone
                        pass

        server = threading.Thread(target=answer)
        server.start()
        done = run("sub", f"broker://127.0.0.1:{listener.getsockname()[1]}/t?queue=q&timeout=1")
        server.join(60)
    assert done.returncode not in (0, -9) and "mine" in done.stderr and "\x1b" not in done.stderr
