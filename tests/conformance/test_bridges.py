"""What a bridge cannot carry to a reach is told before it is lost, whatever the reach."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

import penstock
from penstock.bridge import Bridge

from .reaches import Reach, unique

LONG = 60.0
RELIABLE = {"reliable": True}


def eventually(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LONG
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def told(caplog: pytest.LogCaptureFixture) -> int:
    return caplog.text.count("retirement is not carried")


def test_retirement_is_told_at_start(reach: Reach, caplog: pytest.LogCaptureFixture) -> None:
    source = f"shm:/{unique('camera')}"
    with (
        penstock.publisher(source, retirement=True, **RELIABLE) as camera,
        Bridge(source, reach.address, source_options=RELIABLE) as bridge,
    ):
        assert bridge.not_held == ["retirement"]
        (said,) = bridge.losses
        assert said.startswith(f"retirement is not carried: publishers of {source} are told when this bridge")
        bridge.start()
        camera.publish(b"x")
        assert len(camera.retired(LONG)) == 1, "the bridge has released it"  # type: ignore[attr-defined]
        eventually(lambda: bridge.ledger.delivered == 1)
    assert told(caplog) == 0, "who starts it looks at `losses`: the command prints them"


def test_retirement_of_a_publisher_that_joins_later_is_told_once(
    reach: Reach, caplog: pytest.LogCaptureFixture
) -> None:
    source = f"shm:/{unique('camera')}"
    with (
        penstock.publisher(source, **RELIABLE) as first,
        Bridge(source, reach.address, source_options=RELIABLE).start() as bridge,
    ):
        first.publish(b"1")
        eventually(lambda: bridge.ledger.delivered == 1)
        assert bridge.not_held == bridge.losses == [] and told(caplog) == 0
        for number in (2, 3):
            with penstock.publisher(source, retirement=True, **RELIABLE) as later:
                later.publish(b"%d" % number)
                eventually(lambda delivered=number: bridge.ledger.delivered == delivered)  # type: ignore[misc]
            assert bridge.not_held == ["retirement"] and told(caplog) == 1


def test_retirement_is_told_where_the_bridge_was_first(reach: Reach, caplog: pytest.LogCaptureFixture) -> None:
    source = f"shm:/{unique('camera')}"
    with (
        Bridge(source, reach.address, source_options=RELIABLE).start() as bridge,
        penstock.publisher(source, retirement=True, **RELIABLE) as camera,
    ):
        camera.publish(b"1")
        eventually(lambda: bridge.ledger.delivered == 1)
        assert bridge.not_held == ["retirement"] and told(caplog) == 1
