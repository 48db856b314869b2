"""Calls as ``penstock ls``, ``why`` and the page see them."""

from __future__ import annotations

import contextlib
import threading

import penstock
from penstock.observe.explain import explain
from penstock.observe.rates import PRODUCERS
from penstock.observe.snapshot import live, matching
from tests.conformance.reaches import unique


def test_both_sides_are_counted_with_their_latency() -> None:
    address = f"shm:/{unique()}"
    with penstock.server(address, bytes.upper) as server, penstock.client(address) as client:
        for _ in range(3):
            client.call(b"x", 30)
        blocks = {b.kind: b for b in matching(live(), address) if b.kind in ("client", "server")}
        assert blocks["client"].matched == blocks["client"].delivered == 3
        assert blocks["server"].matched == 3
        assert blocks["client"].latency_ns > 0
        assert "client" in PRODUCERS  # the page draws its line towards the channel, and on to the server
        assert server.ledger.matched == 3
        texts = [finding.text for finding in explain(address)]
        assert any("the client" in text and "asked 3 times: 3 answered" in text for text in texts)
        assert not [finding for finding in explain(address) if finding.grave]


def test_why_says_that_nobody_answers() -> None:
    address = f"shm:/{unique()}"
    with penstock.client(address):
        assert "nobody on this machine answers" in explain(address)[0].text


def test_why_counts_what_became_of_the_calls() -> None:
    address = f"bus:{unique()}"
    go_on = threading.Event()

    def function(payload: bytes) -> bytes:
        if payload == b"bad":
            raise ValueError("no")
        go_on.wait(60)
        return b""

    with penstock.server(address, function), penstock.client(address) as client:
        for data, timeout in ((b"bad", 30.0), (b"slow", 0.05)):
            with contextlib.suppress(penstock.CallFailed, TimeoutError):
                client.call(data, timeout)
        texts = " ".join(finding.text for finding in explain(address))
        assert "1 call of the client" in texts and "ended in an error" in texts and "ran out of time" in texts
        go_on.set()
