"""Buffers: what is on its way is stored on disk, counted, and comes after a restart."""

from __future__ import annotations

import errno
import re
import shutil
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

import penstock
from penstock._core import counters_read
from penstock.broker import Server
from penstock.cli.run import _count_kept, _row
from penstock.cli.service import state
from penstock.gateway import (
    AddLinkError,
    ConfigurationError,
    Event,
    Gateway,
    GatewayMessage,
    LinkOptions,
    ModuleError,
    QueueOptions,
    carriage,
)
from penstock.gateway.admin import Admin, ask
from penstock.gateway.broker import Ending
from penstock.gateway.worker import Deadline
from tests.gateway.conftest import Collector, eventually
from tests.gateway.delivery import (
    AGAIN,
    ALO,
    Fails,
    OneByOne,
    marked,
    say,
)


@pytest.fixture
def gateway() -> Iterator[Gateway]:
    with Gateway(cycle_timeout_s=0.2) as made:
        yield made


def test_a_buffer_keeps_what_a_sink_cannot_take_over_the_end_of_the_gateway(tmp_path: Path) -> None:
    def made() -> Gateway:
        gateway = Gateway()
        for name, kind in (("a", Collector), ("uplink", Fails)):
            gateway.add_module(name, kind)
        gateway.add_link("a", "uplink", None, AGAIN, buffer=f"journal:{tmp_path / 'store'}")
        gateway.start()
        return gateway

    gateway = made()
    say(gateway, "a", *[b"bad %d" % n for n in range(300)])
    eventually(lambda: len(gateway.module("uplink").tried) > 10)
    gateway.destroy(1.0)
    gateway = made()
    uplink = gateway.module("uplink")
    uplink.well.set()
    say(gateway, "a", b"new")
    eventually(lambda: len(set(uplink.got)) == 301)
    assert gateway.destroy(60)
    gateway = made()
    say(gateway, "a", b"last")
    eventually(lambda: gateway.module("uplink").got == [b"last"], "what was handled does not come again")
    assert gateway.destroy(60)


def test_a_buffer_is_bounded_and_what_goes_is_counted(tmp_path: Path) -> None:
    with Gateway() as gateway:
        gateway.add_module("a", Collector)
        gateway.add_module("uplink", Fails, queue=QueueOptions(depth=4))
        told: list[Any] = []
        gateway.add_event_callback(Event.MODULE_FAILED, lambda _, __, context, ___: told.append(context))
        store = f"journal:{tmp_path / 'store'}?retain_bytes=524288"
        gateway.add_link("a", "uplink", None, LinkOptions(delivery=ALO, backoff_s=0.01, ordered=True), buffer=store)
        gateway.start()
        uplink = gateway.module("uplink")
        say(gateway, "a", *[b"bad %06d" % n + bytes(4000) for n in range(1000)])
        buffer = next(info for info in gateway.modules() if "buffer" in info.name)
        eventually(lambda: gateway.broker.info(buffer.handle).handled == 1000)
        uplink.well.set()
        say(gateway, "a", b"last")
        eventually(lambda: uplink.got[-1:] == [b"last"])
        lost = gateway.broker.info(buffer.handle).lost
        assert 0 < lost < 1000
        assert len(set(uplink.got)) + lost == 1001


def test_a_buffered_link_is_one_link(gateway: Gateway, tmp_path: Path) -> None:
    for name in ("a", "b", "all"):
        gateway.add_module(name, Collector)
    gateway.add_link("*", "all")
    gateway.add_link("a", "b", buffer=f"journal:{tmp_path / 'store'}")
    gateway.start()
    say(gateway, "a", b"1")
    eventually(lambda: gateway.module("b").got == gateway.module("all").got == [b"1"])
    assert [link.ends for link in gateway.links()] == [("*", "all"), ("a", "b")]
    with pytest.raises(AddLinkError, match="already"):
        gateway.add_link("a", "b", buffer=f"journal:{tmp_path / 'store'}")
    gateway.remove_link("a", "b")
    assert [info.name for info in gateway.modules()] == ["a", "b", "all"]
    say(gateway, "a", b"2")
    eventually(lambda: gateway.module("all").got == [b"1", b"2"])
    assert gateway.module("b").got == [b"1"]


def test_what_is_stored_counts_as_handled_for_who_gave_it(gateway: Gateway, tmp_path: Path) -> None:
    gateway.add_module("a", Collector)
    gateway.add_module("uplink", Fails)
    gateway.add_link("a", "uplink", None, AGAIN, buffer=f"journal:{tmp_path / 'store'}")
    gateway.start()
    say(gateway, "a", b"bad")
    eventually(lambda: len(gateway.module("uplink").tried) > 3)
    eventually(marked(gateway, "a").handled, "the journal has it, whatever the uplink does")
    assert gateway.module("uplink").got == []


def _device(tmp_path: Path, **of_link: Any) -> dict[str, Any]:
    loader = {"name": "python", "entrypoint": "tests.gateway.delivery:Fails"}
    link = {"source": "a", "sink": "uplink", "backoff_s": 0.01, "buffer": f"journal:{tmp_path / 'store'}", **of_link}
    return {"modules": [{"name": name, "loader": loader} for name in ("a", "uplink")], "links": [link]}


@pytest.mark.parametrize("changed", ["a", "uplink"])
def test_a_reload_that_makes_an_end_of_a_buffered_link_anew_loses_nothing(tmp_path: Path, changed: str) -> None:
    with Gateway(_device(tmp_path)) as gateway:
        gateway.start()
        say(gateway, "a", b"bad 1")
        eventually(lambda: gateway.module("uplink").tried)
        assert gateway.apply(_device(tmp_path), again=[changed]) == [f"~ {changed}"]
        assert [link.ends for link in gateway.links()] == [("a", "uplink")]
        say(gateway, "a", b"bad 2")
        uplink = gateway.module("uplink")
        uplink.well.set()
        eventually(lambda: {b"bad 1", b"bad 2"} <= set(uplink.got), "also what was stored before")


def test_a_reload_that_fails_leaves_a_buffered_link_as_it_was(tmp_path: Path) -> None:
    with Gateway(_device(tmp_path)) as gateway:
        gateway.start()
        say(gateway, "a", b"bad 1")
        eventually(lambda: gateway.module("uplink").tried)
        wanted = _device(tmp_path, max_tries=100)
        wanted["modules"].append({"name": "more", "loader": {"name": "python", "entrypoint": "tests.gateway.delivery:NeverStarts"}})
        with pytest.raises(ModuleError, match="never starts"):
            gateway.apply(wanted, again=["uplink"])
        assert [link.ends for link in gateway.links()] == [("a", "uplink")]
        uplink = gateway.module("uplink")
        uplink.well.set()
        say(gateway, "a", b"bad 2")
        eventually(lambda: {b"bad 1", b"bad 2"} <= set(uplink.got))


@pytest.mark.parametrize("removed", ["a", "a.more", "uplink"])
def test_a_buffer_goes_with_an_end_of_its_link_and_keeps_what_it_holds(tmp_path: Path, removed: str) -> None:
    source = "a.more" if removed == "a.more" else "a"
    with Gateway(_device(tmp_path, source=source)) as gateway:
        gateway.start()
        gateway.module("a").publish(b"bad 1", output=source[2:])
        eventually(lambda: gateway.module("uplink").tried)
        gateway.remove_module(removed.partition(".")[0], drain=removed != "uplink")
        assert len(gateway.modules()) == 1
        assert gateway.links() == []
        if removed != "uplink":
            gateway.remove_module("uplink", drain=False)
    with Gateway(_device(tmp_path, source=source)) as gateway:
        gateway.module("uplink").well.set()
        gateway.start()
        eventually(lambda: gateway.module("uplink").got == [b"bad 1"], "nobody took it, so it is still stored")


def test_what_a_buffer_keeps_is_not_lost_at_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    contents = [b"bad %d" % n for n in range(20)]
    seen: list[Any] = []
    for well in (False, True):
        gateway = Gateway()
        for name, kind in (("a", Collector), ("uplink", Fails)):
            gateway.add_module(name, kind)
        gateway.add_link("a", "uplink", None, AGAIN, buffer=f"journal:{tmp_path / 'store'}")
        uplink = gateway.module("uplink")
        gateway.start()
        if well:
            uplink.well.set()
            eventually(lambda: set(uplink.got) == set(contents))  # noqa: B023
            gateway.destroy(60)
        else:
            say(gateway, "a", *contents)
            eventually(lambda: set(uplink.tried) == set(contents))  # noqa: B023
            gateway.add_event_callback(Event.DESTROYED, lambda *_: seen.extend(gateway.modules()))  # noqa: B023
            with monkeypatch.context() as patch:
                patch.setattr(Ending, "within", lambda _: Ending(Deadline(0), Deadline(60), Deadline(60)))
                assert gateway.destroy(1), "nothing is lost"
    (info,) = (one for one in seen if one.name == "uplink")
    assert (info.stored, info.lost, info.handled, info.waiting) == (20, 0, 0, 0)
    row = _row(info)
    assert (row["received"], row["stored"], row["lost"]) == (0, 20, 0)


def test_links_that_share_a_buffer_are_counted_each_alone(gateway: Gateway, tmp_path: Path) -> None:
    store = f"journal:{tmp_path / 'store'}?retain_bytes=524288"
    gateway.add_module("uplink", OneByOne, queue=QueueOptions(depth=4))
    for name in ("a", "b"):
        gateway.add_module(name, Collector)
        gateway.add_link(name, "uplink", buffer=store)
    gateway.start()
    for n in range(800):
        say(gateway, "a", b"a%d" % n + bytes(2000))
        say(gateway, "b", b"b%d" % n + bytes(2000))
    uplink, buffers = gateway.module("uplink"), [info.handle for info in gateway.modules() if "buffer" in info.name]
    eventually(lambda: all(gateway.broker.info(one).handled == 800 for one in buffers))
    assert sum(gateway.broker.info(one).lost for one in buffers) > 0, "while the uplink takes nothing"
    uplink.kill()
    eventually(lambda: all(one._next == 801 and not one._out for one in buffers))
    for one, link in zip(buffers, (b"a", b"b"), strict=True):
        info = gateway.broker.info(one)
        assert info.lost + sum(content.startswith(link) for content in uplink.got) == 800
        assert info.handled == 800, "stored"


class _Hung(Collector):
    """Takes nothing: it hangs until it is given up, and refuses then what it has in hand."""

    def __init__(self) -> None:
        super().__init__()
        self.up = False
        self.given_up = threading.Event()

    def receive(self, message: GatewayMessage) -> None:
        if not self.up:
            self.given_up.wait()
            raise OSError("not handled")
        super().receive(message)

    def kill(self) -> None:
        self.given_up.set()


def test_a_shared_buffers_books_balance_over_restarts(tmp_path: Path) -> None:
    store = f"journal:{tmp_path / 'store'}?retain_bytes=524288"
    workers = []
    for run in range(4):
        with Gateway() as gateway:
            gateway.add_module("uplink", _Hung, queue=QueueOptions(depth=4))
            uplink = gateway.module("uplink")
            uplink.up = run == 3
            for name in ("a", "b"):
                gateway.add_module(name, Collector)
                gateway.add_link(name, "uplink", buffer=store)
            gateway.start()
            buffers = [info.handle for info in gateway.modules() if "buffer" in info.name]
            for n in range(250 if run < 3 else 0):
                for name in ("a", "b"):
                    say(gateway, name, b"%d %d" % (run, n) + bytes(2000))
            if run == 3:
                eventually(lambda: all(one._next == one._following() and not one._out for one in buffers))  # noqa: B023
            mine = [gateway.broker.worker_of(one) for one in buffers]
            eventually(lambda: all(worker.idle for worker in mine))  # noqa: B023
            gateway.destroy(60 if run == 3 else 1)
            workers += mine
            # On a busy machine the buffers end after the time that the hung one has used up.
            eventually(lambda: not any(worker.thread.is_alive() for worker in mine))  # noqa: B023
    lost = sum(worker.gone for worker in workers)
    assert lost > 0 and len(uplink.got) > 100 and lost + len(uplink.got) == 3 * 2 * 250


def add_failing_uplink(gateway: Gateway, store: Path, **options: Any) -> Fails:
    """a -> uplink over a buffer; the uplink fails at what begins with "bad"."""
    gateway.add_module("a", Collector)
    gateway.add_module("uplink", Fails)
    link = LinkOptions(delivery=ALO, backoff_s=0.01, max_backoff_s=0.02, **options)
    gateway.add_link("a", "uplink", None, link, buffer=f"journal:{store}")
    return cast("Fails", gateway.module("uplink"))


def test_what_a_buffer_holds_is_shown_wherever_counts_are(tmp_path: Path) -> None:
    gateway = Gateway()
    uplink = add_failing_uplink(gateway, tmp_path / "store")
    gateway.start()
    name = "a -> uplink (buffer)"

    def backlog() -> int:
        return {info.name: info.backlog for info in gateway.modules()}[name]

    say(gateway, "a", b"good")
    eventually(lambda: backlog() == 0 and uplink.got == [b"good"])
    say(gateway, "a", *[b"bad %d" % n for n in range(20)])
    eventually(lambda: backlog() == 20)
    assert state(gateway)["modules"][name]["backlog"] == 20
    admin = Admin(gateway, tmp_path / "admin")
    (found,) = ask(admin.path, {"do": "list"})
    admin.close()
    assert {one["module"]: one["backlog"] for one in found["modules"]} == {"a": 0, name: 20, "uplink": 0}
    gateway.broker.count_links()
    (block,) = (one for one in counters_read() if one["kind"] == "module" and one["name"] == name)
    assert (block["lag"], block["state"]) == (20, "20 stored on disk")
    assert gateway.destroy(60)
    assert {row["module"]: row["backlog"] for row in map(_row, gateway.modules())} == {"a": 0, name: 20, "uplink": 0}
    assert _count_kept(gateway.modules()) == 20, "what the uplink had in hand is part of the backlog"


class FailsTogether(Fails):
    def receive_many(self, messages: Sequence[GatewayMessage]) -> None:
        for message in messages:
            self.receive(message)


@pytest.mark.parametrize("ordered", [False, True])
@pytest.mark.parametrize("kind", [Fails, FailsTogether])
def test_the_end_does_not_wait_for_what_a_sink_fails_at_and_a_buffer_keeps(
    tmp_path: Path, kind: type[Fails], ordered: bool, caplog: pytest.LogCaptureFixture
) -> None:
    for well in (False, True):
        gateway = Gateway()
        gateway.add_module("a", Collector)
        gateway.add_module("uplink", kind)
        link = LinkOptions(delivery=ALO, backoff_s=0.01, max_backoff_s=0.02, ordered=ordered)
        gateway.add_link("a", "uplink", None, link, buffer=f"journal:{tmp_path / 'store'}")
        uplink = gateway.module("uplink")
        gateway.start()
        if well:
            uplink.well.set()
            eventually(lambda: {*uplink.got} == {b"bad 1", b"bad 2"}, "the rest comes again")  # noqa: B023
        else:
            say(gateway, "a", b"good")
            eventually(lambda: uplink.got == [b"good"])  # noqa: B023
            say(gateway, "a", b"bad 1", b"bad 2")
            eventually(lambda: uplink.tried.count(b"bad 1") > 2)  # noqa: B023
        assert gateway.destroy(None), "it would wait for ever"
    assert "dropped" not in caplog.text


def test_what_a_slow_sink_has_in_hand_at_the_end_is_acknowledged(tmp_path: Path) -> None:
    for run in range(2):
        gateway = Gateway()
        uplink = add_failing_uplink(gateway, tmp_path / "store")
        gateway.start()
        if run == 0:
            uplink.gate.clear()
            say(gateway, "a", *[b"%d" % n for n in range(40)])
            eventually(lambda: gateway.broker.info(uplink).waiting == 40)  # noqa: B023
            (buffer,) = (info.handle for info in gateway.modules() if info.kind == "Buffer")
            ending = threading.Thread(target=gateway.destroy, args=(60,))
            ending.start()
            eventually(lambda: buffer._forwarder._stopping.is_set())  # noqa: B023
            uplink.gate.set()
            ending.join()
            assert len(uplink.got) == 40
        else:
            say(gateway, "a", b"last")
            eventually(lambda: b"last" in uplink.got)  # noqa: B023
            assert uplink.got == [b"last"], "what was handled does not come again"
            gateway.destroy(60)


def test_a_sink_that_fails_at_a_buffered_and_a_plain_link_is_removed_and_made_anew(tmp_path: Path) -> None:
    ends = {"name": "python", "entrypoint": "tests.gateway.delivery:Fails"}
    modules: list[dict[str, Any]] = [{"name": name, "loader": ends} for name in ("a", "b", "uplink")]
    links: list[dict[str, Any]] = [
        {"source": "a", "sink": "uplink", "buffer": f"journal:{tmp_path / 'store'}", "backoff_s": 0.01},
        {"source": "b", "sink": "uplink"},
    ]
    with Gateway({"modules": modules, "links": links}) as gateway:
        gateway.start()
        old = gateway.module("uplink")
        say(gateway, "a", b"bad from a")
        eventually(lambda: old.tried.count(b"bad from a") > 2)
        say(gateway, "b", b"bad from b")
        modules[2] = {**modules[2], "queue": {"depth": 7}}
        assert gateway.apply({"modules": modules, "links": links}) == ["~ uplink"]
        new = gateway.module("uplink")
        assert new is not old
        new.well.set()
        eventually(lambda: new.got == [b"bad from a"])
        gateway.remove_module("uplink", timeout=None)


def test_the_end_does_not_wait_for_a_sink_with_a_buffered_and_a_plain_link(tmp_path: Path) -> None:
    gateway = Gateway()
    uplink = add_failing_uplink(gateway, tmp_path / "store")
    gateway.add_module("b", Collector)
    gateway.add_link("b", "uplink")
    gateway.start()
    say(gateway, "a", b"bad")
    eventually(lambda: uplink.tried.count(b"bad") > 2)
    say(gateway, "b", b"good")
    assert gateway.destroy(None)
    assert uplink.got == [b"good"]
    assert _count_kept(gateway.modules()) == 1


def test_a_full_disk_stops_the_source_and_has_room_again_when_the_sink_is_back(
    gateway: Gateway, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, real = tmp_path / "store", carriage.send

    def send(publisher: Any, messages: Sequence[GatewayMessage]) -> None:
        if sum(file.stat().st_size for file in store.iterdir() if file.suffix == ".log") > 300_000:
            raise OSError(errno.ENOSPC, "nothing of it is stored")
        real(publisher, messages)

    monkeypatch.setattr(carriage, "send", send)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(total=300_000))
    gateway.add_module("a", Collector)
    gateway.add_module("uplink", Fails, queue=QueueOptions(depth=4))
    told: list[tuple[str, Any]] = []
    gateway.add_event_callback(Event.MODULE_FAILED, lambda _, __, context, ___: told.append(context[1:]))
    options = LinkOptions(delivery=ALO, backoff_s=0.01, max_backoff_s=0.02)
    gateway.add_link("a", "uplink", None, options, buffer=f"journal:{store}")
    gateway.start()
    uplink = gateway.module("uplink")
    contents = [b"bad %06d" % n + bytes(1000) for n in range(1000)]
    saying = threading.Thread(target=say, args=(gateway, "a", *contents))
    saying.start()
    eventually(lambda: any(step == "receive" and "nothing of it is stored" in str(why) for step, why in told))
    uplink.well.set()
    saying.join()
    eventually(lambda: {*uplink.got} == {*contents})


def test_links_that_share_a_buffer_have_a_topic_each_whatever_their_names_are(gateway: Gateway, tmp_path: Path) -> None:
    sources, sinks = ("a", "a_left", "a_-_x"), ("x y", "x_y", "y", "x_-_y", "ä", "ö")
    for name in (*sources, *sinks):
        gateway.add_module(name, Collector)
    ends = [(source, sink) for source in (*sources, "a.left") for sink in sinks]
    for source, sink in ends:
        gateway.add_link(source, sink, buffer=f"journal:{tmp_path / 'store'}")
    gateway.start()
    for source in sources:
        gateway.module(source).publish(source.encode())
    gateway.module("a").publish(b"a.left", output="left")
    for sink in sinks:
        eventually(lambda sink=sink: len(gateway.module(sink).got) >= 4)
    for sink in sinks:
        assert sorted(gateway.module(sink).got) == [b"a", b"a.left", b"a_-_x", b"a_left"]


class _Taken(Collector):
    """Fails at every message, in whose place its dead letter goes on."""

    def receive(self, message: GatewayMessage) -> None:
        raise OSError("never")


@pytest.mark.parametrize("loader", ["python", "process"])
def test_dead_letters_that_were_not_handled_by_the_end_are_kept_by_the_buffer(tmp_path: Path, loader: str) -> None:
    def made() -> Gateway:
        gateway = Gateway()
        gateway.add_module("a", Collector)
        gateway.add_module("up", f"{__name__}:_Taken", loader=loader)
        gateway.add_module("dead", _Hung)
        options = LinkOptions(delivery=ALO, max_tries=2, backoff_s=0.001)
        gateway.add_link("a", "up", None, options, buffer=f"journal:{tmp_path / 'store'}", error="dead")
        return gateway

    gateway = made()
    gateway.start()
    say(gateway, "a", *[b"%d" % n for n in range(5)])
    dead = gateway.broker.worker_of(gateway.module("dead"))
    eventually(lambda: dead.waiting == 5)
    gateway.destroy(1.0)
    infos = {info.name: info for info in gateway.modules()}
    assert (infos["dead"].stored, infos["dead"].lost, infos["a -> up (buffer)"].backlog) == (5, 0, 5)
    assert _count_kept(gateway.modules()) == 5, "each is counted once"
    with made() as gateway:
        gateway.module("dead").up = True
        gateway.start()
        eventually(lambda: len(set(gateway.module("dead").got)) == 5)


@pytest.mark.parametrize(
    ("place", "what"),
    [
        ("shm:{0}", "buffer: must be journal:DIRECTORY"),
        ("journal:{0}#topic", "buffer: must be journal:DIRECTORY"),
        ("journal:{0}?retain_byte=1000", "no option 'retain_byte'; did you mean retain_bytes"),
        ("journal:{0}?retain_bytes=0", "buffer: retain_bytes='0' must be"),
        ("journal:{0}?retain_age_s=soon", "buffer: retain_age_s 'soon' is no"),
        ("", "buffer: is empty"),
        (Path("store"), "buffer: must be a text"),
    ],
)
def test_a_buffer_is_checked_in_python_by_the_rules_of_files(
    gateway: Gateway, tmp_path: Path, place: Any, what: str
) -> None:
    gateway.add_module("a", Collector)
    gateway.add_module("b", Collector)
    store = tmp_path / "store"
    with pytest.raises(ConfigurationError, match=re.escape(what)):
        gateway.add_link("a", "b", buffer=place.format(store) if isinstance(place, str) else place)
    assert not store.exists()
    assert gateway.links() == []


@pytest.mark.parametrize("query", ["?queue=q", ""], ids=["queue", "consumer"])
def test_a_buffer_stores_what_an_address_brings(tmp_path: Path, query: str) -> None:
    """Its module is called after the link, and so after the address, but is none itself."""
    with Server(tmp_path / "broker", 0).start() as server, Gateway() as gateway:
        source = f"broker://127.0.0.1:{server.port}/cars.*{query}"
        gateway.add_module("log", Collector)
        gateway.add_link(source, "log", buffer=f"journal:{tmp_path / 'store'}")
        gateway.start()
        with penstock.publisher(f"broker://127.0.0.1:{server.port}/cars.1") as publisher:
            for number in range(10):
                publisher.publish(b"%d" % number)
        sink = gateway.module("log")
        eventually(lambda: len(sink.got) == 10)
        assert sink.got == [b"%d" % number for number in range(10)]
        gateway.remove_link(source, "log")
        assert [info.name for info in gateway.modules()] == ["log"]
