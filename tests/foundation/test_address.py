from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import pytest

import penstock
from penstock.address import Address, check, check_options, convert, is_loopback, parse


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("bus:sensors", {"scheme": "bus", "name": "sensors"}),
        ("bus:sensors?id=7", {"scheme": "bus", "name": "sensors", "options": {"id": "7"}}),
        ("shm:/camera/front", {"scheme": "shm", "name": "/camera/front"}),
        ("tcp://127.0.0.1:1588", {"scheme": "tcp", "host": "127.0.0.1", "port": 1588}),
        ("tcp://[::1]:0", {"scheme": "tcp", "host": "::1", "port": 0}),
        ("tcp:///run/camera.sock", {"scheme": "tcp", "name": "/run/camera.sock"}),
        ("journal:/data/log#sensors.temp", {"scheme": "journal", "name": "/data/log", "topic": "sensors.temp"}),
        ("journal:relative", {"scheme": "journal", "name": "relative"}),
        (
            "broker://localhost:7000/a.b?queue=q%20r",
            {"scheme": "broker", "host": "localhost", "port": 7000, "topic": "a.b", "options": {"queue": "q r"}},
        ),
    ],
)
def test_parts(text: str, parts: dict[str, object]) -> None:
    assert parse(text) == Address(**parts, text=text)  # type: ignore[arg-type]
    assert str(parse(text)) == text


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("smh:/x", r"begins with no known reach \(bus, shm, .*\); did you mean shm\?"),
        ("camera", "no known reach"),
        ("bus", "is a scheme alone; write bus:NAME"),
        ("broker", "is a scheme alone; write broker://HOST:PORT/TOPIC"),
        ("", "no known reach"),
        ("127.0.0.1:9876/orders", r"did you mean broker://127.0.0.1:9876/orders\?"),
        ("127.0.0.1:9876", r"did you mean broker://127.0.0.1:9876 or tcp://127.0.0.1:9876\?"),
        ("shm:camera", "begins with '/'"),
        ("shm:", "names nothing"),
        ("bus:", "names nothing"),
        ("tcp:host:1", "tcp://HOST:PORT"),
        ("tcp://host", "port"),
        ("tcp://host:1/camera", "one port is one stream"),
        ("tcp://host:99999", "port"),
        ("tcp://host:-1", "port"),
        ("broker://:7000/x", "broker://HOST:PORT/TOPIC"),
        ("journal:dir?a=1#topic", "after the topic"),
    ],
)
def test_what_is_wrong_is_said(text: str, says: str) -> None:
    with pytest.raises(penstock.InvalidArgument, match=says):
        parse(text)


def test_only_text() -> None:
    with pytest.raises(TypeError, match="int"):
        parse(5)  # type: ignore[arg-type]


def opener(
    address: Address, *, depth: int = 1, name: str = "", timeout: float | None = None, flag: bool = False
) -> None: ...


def test_options_out_of_an_address_have_types() -> None:
    given = convert({"depth": "5", "name": "12", "timeout": "none", "flag": "true", "odd": "x"}, opener, "x")
    assert given == {"depth": 5, "name": "12", "timeout": None, "flag": True, "odd": "x"}
    for text, value in {"yes": True, "no": False, "True": True}.items():
        assert convert({"flag": text, "name": text}, opener, "x") == {"flag": value, "name": text}


def test_an_unknown_option_names_the_nearest() -> None:
    with pytest.raises(penstock.InvalidArgument, match="no option 'dept'; did you mean depth"):
        check_options({"dept": 1}, opener, "bus")


@pytest.mark.parametrize("host", ["127.0.0.1", "127.9.9.9", "::1", "::ffff:127.0.0.1", "localhost"])
def test_hosts_that_are_this_machine_alone(host: str) -> None:
    assert is_loopback(host)


@pytest.mark.parametrize("host", ["", "0.0.0.0", "::", "10.0.0.1", "example.org", "127.example.org", "::ffff:10.0.0.1"])
def test_hosts_that_others_reach_or_that_have_to_be_looked_up(host: str) -> None:
    assert not is_loopback(host)


@pytest.mark.parametrize("host", ["127.0.0.1:9876", "localhost:0", "[::1]", "[::1]:9876", "http://localhost"])
@pytest.mark.parametrize(
    ("module", "needs", "listen"),
    [
        ("penstock.broker", "", lambda broker, host: broker.Server("never made", 0, host=host)),
        ("penstock.tcp", "", lambda tcp, host: tcp.Publisher(host=host)),
        ("penstock.monitor.service", "uvicorn", lambda monitor, host: monitor.Service(host=host, port=0)),
        ("penstock.foxglove.server", "foxglove", lambda foxglove, host: foxglove.Server(host=host, port=0)),
        ("penstock.gateway.modules.http_in", "", lambda http_in, host: http_in.HttpIn.parse({"host": host})),
    ],
)
def test_a_host_to_listen_on_brings_no_port(
    module: str, needs: str, listen: Callable[[Any, str], object], host: str
) -> None:
    """It would be taken for a name that others can reach."""
    if needs:
        pytest.importorskip(needs)
    with pytest.raises(penstock.InvalidArgument, match="must be a host alone"):
        listen(importlib.import_module(module), host)


def test_an_address_with_a_place_on_disk_is_a_good_one() -> None:
    check("shm:/flight?start=first", "subscriber")
    check("tcp://127.0.0.1:1588?durable=flight&durable_wait=true", "publisher")
    with pytest.raises(penstock.InvalidArgument, match="statr"):
        check("shm:/flight?statr=first", "subscriber")
    with pytest.raises(penstock.InvalidArgument, match="true or false"):
        check("bus:door?latest=perhaps", "publisher")


def test_an_option_with_two_values_is_refused() -> None:
    with pytest.raises(penstock.InvalidArgument, match="has 'slots' twice"):
        parse("shm:/two?slots=8&slots=9")
    assert parse("shm:/two?slots=8&slots=8").options == {"slots": "8"}
    with pytest.raises(penstock.InvalidArgument, match="has 'slots', and slots= was given with another value"):
        penstock.publisher("shm:/two?slots=8", slots=16)
    with pytest.raises(penstock.InvalidArgument, match="has 'durable', and durable= was given") as refused:
        penstock.publisher("bus:two?durable=here", durable="there")
    assert "there" not in str(refused.value)
    with pytest.raises(penstock.InvalidArgument, match="token=") as refused:
        penstock.subscriber("tcp://127.0.0.1:1?token=one", token="another")
    assert "another" not in str(refused.value).replace("another value", "") and "=one" not in str(refused.value)
    with penstock.publisher("bus:two?id=3&history=2", id=3, history=None) as publisher:
        assert publisher.id == 3
