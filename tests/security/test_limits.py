"""Bounds on what is parsed, secrets that stay secret, and versions that are pinned."""

from __future__ import annotations

import logging
import re
import subprocess
import sys
import threading
import types
from collections.abc import Callable
from pathlib import Path

import pytest

import penstock
from penstock._core import Message, counters_read
from penstock.address import parse
from penstock.broker import Server
from penstock.errors import PenstockError
from penstock.filter import compile_filter
from penstock.gateway import configuration

SECRET = "hush-5d1c0f7e"


def test_configurations_and_filters_have_bounds(tmp_path: Path) -> None:
    deep = tmp_path / "deep.json"
    deep.write_text("[" * 200_000)
    large = tmp_path / "large.json"
    large.write_bytes(b" " * (configuration.MAX_FILE_BYTES + 1))
    nested = tmp_path / "nested.toml"
    nested.write_text("a = " + "[" * 5000)
    digits, more_digits = tmp_path / "digits.json", tmp_path / "digits.toml"
    digits.write_text('{"modules": 1' + "0" * 6000 + "}")
    more_digits.write_text("modules = 1" + "0" * 6000)
    for file in (deep, large, nested, digits, more_digits):
        with pytest.raises(PenstockError):
            configuration.read(file)
    for expression in ("(" * 2000 + "1" + ")" * 2000, "1 == 1 or " * 1000 + "true", "1" + "+1" * 2000):
        with pytest.raises(PenstockError):
            compile_filter(expression)
    assert compile_filter("1" + "+1" * 499)(Message(b"")), "the longest that is taken can be evaluated"


def test_a_token_is_in_no_text(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    caplog.set_level(logging.DEBUG)
    with penstock.publisher("tcp://127.0.0.1:0", token=SECRET) as publisher:
        address = f"tcp://127.0.0.1:{publisher.port}"  # type: ignore[attr-defined]
        with penstock.subscriber(address, token=SECRET + "-wrong") as subscriber:
            shown = [repr(publisher), repr(subscriber)]
            for _ in range(3):
                try:
                    shown.append(repr(subscriber.read(0.2)))
                except PenstockError as error:
                    shown += [str(error), repr(error)]
    tokens = tmp_path / "tokens.toml"
    tokens.write_text(f'[[token]]\nname = "one"\ntoken = "{SECRET}"\npublish = ["allowed"]\n')
    tokens.chmod(0o600)
    with Server(tmp_path / "broker", 0, tokens=tokens).start() as server:
        for token in (SECRET, SECRET + "-wrong"):
            with pytest.raises((PenstockError, OSError)) as failure:
                penstock.subscriber(f"broker://127.0.0.1:{server.port}/t?queue=q", token=token, timeout=30.0)
            shown += [str(failure.value), repr(failure.value)]
    with pytest.raises((PenstockError, OSError)) as failure:  # nobody is there any more
        penstock.subscriber(f"broker://127.0.0.1:{server.port}/t?queue=q", token=SECRET, timeout=0.1)
    shown += [str(failure.value), caplog.text]
    assert not any(SECRET in text for text in shown)


@pytest.mark.parametrize(
    "address",
    [
        "nothing:?token={0}", "tcp:127.0.0.1?token={0}", "tcp://127.0.0.1?token={0}", "tcp://127.0.0.1:0?token={0}",
        "shm:/x?token={0}", "broker://127.0.0.1:1/t?tokens=1&token={0}", "journal:x?token={0}#t",
        "tcp://127.0.0.1:1?%74oken={0}&nonsense=1",
    ],
)  # fmt: skip
def test_a_token_in_a_wrong_address_is_not_repeated(address: str) -> None:
    with pytest.raises(PenstockError) as failure:
        penstock.subscriber(address.format(SECRET))
    assert SECRET not in str(failure.value) + repr(failure.value)


def test_a_token_in_an_address_is_not_shown_stored_or_counted_under(tmp_path: Path) -> None:
    from penstock.bridge import Bridge
    from penstock.gateway import Gateway
    from penstock.recording.recorder import Plan, Recorder

    with penstock.publisher("tcp://127.0.0.1:0", token=SECRET) as publisher:
        address = f"tcp://127.0.0.1:{publisher.port}?keepalive=5&token={SECRET}"  # type: ignore[attr-defined]
        with (
            penstock.subscriber(address) as subscriber,
            Recorder(Plan(tmp_path / "recording", {address: "t"})) as recorder,
            Bridge(address, "bus:test-secrets") as bridge,
            Gateway() as gateway,
        ):
            gateway.add_link(address, f"journal:{tmp_path}/kept#t")
            gateway.start()
            assert publisher.wait_ready(4, 30)
            publisher.publish(b"x")
            message = subscriber.read(30)
            assert message is not None
            shown = [repr(subscriber), repr(bridge), repr(gateway), message.channel, str(parse(address))]
            shown += [str(block) for block in counters_read()]
            shown += [str(info) for info in gateway.broker.modules()]
        assert recorder.sources[0].address in shown[4]
    shown += [repr(path.read_bytes()) for path in (tmp_path / "recording").iterdir()]
    assert not [text for text in shown if SECRET in text]
    assert str(parse(address)) == f"tcp://127.0.0.1:{publisher.port}?keepalive=5"  # type: ignore[attr-defined]


def test_a_gateway_tells_no_token(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    """Neither in what it refuses, nor in links and events, nor in what it logs; and what fails is told nevertheless."""
    from penstock.gateway import Gateway, Link

    caplog.set_level(logging.DEBUG)
    wrong, failed = f"tpc://127.0.0.1:1?token={SECRET}", threading.Event()
    told: list[str] = []

    def failing(*context: object) -> None:
        told.append(str(context))
        failed.set()

    with penstock.publisher("tcp://127.0.0.1:0", token=SECRET) as publisher, Gateway() as gateway:
        address = f"tcp://127.0.0.1:{publisher.port}?token={SECRET}"  # type: ignore[attr-defined]
        sink = f"journal:{tmp_path}/kept#t"
        done = gateway.apply({"modules": [], "links": [{"source": address, "sink": sink}]})
        link = Link(address, sink)
        told += [*done, str(link), repr(link), repr(gateway.links()), repr(gateway.module(address))]
        assert str(link) in done[0] and link.source == address
        attempts: list[Callable[[], object]] = [
            lambda: gateway.add_link(address, sink),
            lambda: gateway.add_link(address, "nothing"),
            lambda: gateway.add_link(wrong, sink),
            lambda: gateway.add_link("*", "*"),
            lambda: gateway.module(wrong),
            lambda: gateway.module("nothing"),
            lambda: gateway.add_link(f"shm:/x?token={SECRET}", sink),
            lambda: gateway.update({"modules": [], "links": [{"source": address, "sink": sink}] * 2}),
            lambda: gateway.update({"modules": [], "links": [{"source": wrong, "sink": sink}]}),
            lambda: gateway.update({"modules": [{"name": address}], "links": []}),
        ]
        for attempt in attempts:
            with pytest.raises(PenstockError) as failure:
                attempt()
            told += [str(failure.value), repr(failure.value)]
        gateway.add_event_callback("module_failed", failing)
        gateway.start()
        keeper, endpoint = gateway._keeper, gateway.module(address)
        keeper.failed(gateway.broker.worker_of(endpoint), "receive", OSError("no way"))
        assert failed.wait(60), "the failure of an address with a token is told too"
    assert not [text for text in [*told, caplog.text] if SECRET in text]


def test_a_pipeline_is_not_counted_under_a_token() -> None:
    from penstock.cli.pipeline import _Progress

    with _Progress("quality", f"broker://127.0.0.1:1?token={SECRET}", as_json=True):
        names = [str(block) for block in counters_read() if block["room"] == "spark"]
    assert any("quality <- broker://127.0.0.1:1" in name for name in names)
    assert not [name for name in names if SECRET in name]


def test_what_went_before_it_was_archived_names_no_token() -> None:
    module = pytest.importorskip("penstock.spark.lake.planning")
    place = types.SimpleNamespace(uuid="u", first=9)
    with pytest.raises(PenstockError, match=r"of broker://127\.0\.0\.1:1 were deleted by retention") as failure:
        module.start(3, f"broker://127.0.0.1:1?token={SECRET}", place)
    assert SECRET not in str(failure.value)


def test_dependencies_are_pinned() -> None:
    """Every package that the build, the extras and the tests name has one version in constraints.txt, whatever is installed."""
    root = Path(__file__).parents[2]
    lines = (root / "constraints.txt").read_text().splitlines()
    pinned = dict(line.lower().replace("_", "-").split("==") for line in lines if not line.startswith("#"))
    done = subprocess.run(
        [sys.executable, root / "scripts/requirements.py"], capture_output=True, text=True, check=True
    )
    wanted = {re.split(r"[\[><=;\s]", line)[0].lower().replace("_", "-") for line in done.stdout.splitlines()}
    assert wanted <= set(pinned), f"not pinned: {sorted(wanted - set(pinned))}"
    assert all(re.fullmatch(r"[0-9][0-9a-z.+]*", version) for version in pinned.values())
