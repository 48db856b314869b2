"""The NATS protocol without a socket: what servers say, cut anywhere, and nonsense, which never passes for a message."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import ProtocolError
from penstock.replica.protocol import (
    MAX_LINE,
    Event,
    Failure,
    Info,
    Message,
    Parser,
    Ping,
    Pong,
    connect,
    publish,
    subscribe,
)

SAID = (
    b'INFO {"max_payload": 5}\r\n+OK\r\nPING\r\nPONG\r\n'
    b"MSG in.1 1 5\r\nhello\r\nMSG in.2 1 reply.to 0\r\n\r\n"
    b"HMSG in.3 1 30 32\r\nNATS/1.0\r\nNats-Sequence: 7\r\n\r\nhi\r\n"
    b"HMSG in.4 1 30 30\r\nNATS/1.0 503 No Responders\r\n\r\n\r\n"
    b"-ERR 'Authorization Violation'\r\n"
)
HEARD: list[Event] = [
    Info({"max_payload": 5}),
    Ping(),
    Pong(),
    Message("in.1", "1", b"hello", {}),
    Message("in.2", "1", b"", {}),
    Message("in.3", "1", b"hi", {"Nats-Sequence": "7"}),
    Message("in.4", "1", b"", {}, 503, "No Responders"),
    Failure("Authorization Violation"),
]


@given(st.lists(st.integers(0, len(SAID)), max_size=8))
def test_it_is_heard_however_it_is_cut(cuts: list[int]) -> None:
    edges = [0, *sorted(cuts), len(SAID)]
    parser = Parser()
    heard = [event for at, end in itertools.pairwise(edges) for event in parser.feed(SAID[at:end])]
    assert heard == HEARD


@pytest.mark.parametrize(
    "said",
    [
        b"HELLO\r\n",
        b"MSG a 1 -5\r\n",
        b"MSG a 1 99999999999\r\n",
        b"MSG a 1 9999999999999999\r\n",
        b"MSG a 1\r\n",
        b"MSG a 1 1\r\nxyz\r\n",
        b"HMSG a 1 5 3\r\n",
        b"HMSG a 1 4 4\r\nJUNK\r\n",
        b"INFO []\r\n",
        b"INFO " + b"[" * 100_000 + b"\r\n",
        b"x" * MAX_LINE,
        "MSG a 1 \N{SUPERSCRIPT TWO}\r\n".encode(),
    ],
)
def test_what_breaks_the_protocol_is_refused(said: bytes) -> None:
    with pytest.raises(ProtocolError):
        list(Parser().feed(said))


@given(
    st.lists(
        st.sampled_from(
            [b"MSG ", b"HMSG ", b"a ", b"1 ", b"5", b"\r\n", b"NATS/1.0", b"INFO {}", b"\0", b"9" * 20, b":"]
        ),
        max_size=40,
    )
)
def test_nonsense_is_refused_or_waited_on(words: list[bytes]) -> None:
    parser = Parser()
    try:
        for word in words:
            for event in parser.feed(word):
                assert isinstance(event, Event)
    except ProtocolError:
        pass


def test_what_a_client_says() -> None:
    assert connect({"verbose": False}) == b'CONNECT {"verbose": false}\r\n'
    assert subscribe("in.*", "1") == b"SUB in.* 1\r\n"
    assert b"".join(publish("a", "in.1", b"data")) == b"PUB a in.1 4\r\ndata\r\n"
    said = b"".join(publish("a", "in.1", b"data", {"Nats-Msg-Id": "x"}))
    assert said == b"HPUB a in.1 28 32\r\nNATS/1.0\r\nNats-Msg-Id: x\r\n\r\ndata\r\n"
