"""The page in a browser: every figure equals the ledger, in light and dark, wide and narrow."""

from __future__ import annotations

import asyncio
import json
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("starlette")

import penstock
from penstock.broker import Client, Server
from penstock.gateway import Gateway, Module
from penstock.gateway.modules import Sensor
from penstock.monitor import server
from penstock.monitor.service import Service
from penstock.observe.latency import spread
from penstock.observe.snapshot import live

from .browser import AVAILABLE, Browser
from .handles import Handles

pytestmark = pytest.mark.skipif(not AVAILABLE, reason="chromium and chromedriver are not installed")

SHOTS = Path(__file__).parents[2] / "build" / "screenshots"
FIELDS = ("matched", "delivered", "dropped_count", "expired", "in_flight", "redelivered")


@pytest.fixture(scope="module")
def service() -> Iterator[Service]:
    with Service(every_s=0.5) as running:
        running.start()
        yield running


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with Browser() as window:
        yield window


@pytest.fixture(autouse=True)
def forgetful(browser: Browser) -> Iterator[None]:
    """What one test chose is not kept for the next."""
    yield
    browser.run("try { localStorage.clear(); sessionStorage.clear(); } catch { }")


@pytest.fixture
def plant(name: str) -> Iterator[Handles]:
    """A small plant: a camera that loses, a queue that lags, a reader that is stuck, a pipeline."""
    with Handles() as running:
        running.do(
            f"open shm publisher {name}", f"add {name}/publisher matched 1000", f"add {name}/publisher delivered 1000",
            f"add {name}/publisher bytes 64000", f"set {name}/publisher last_ns now",
            f"open shm subscriber {name}", f"add {name}/subscriber matched 1000", f"add {name}/subscriber delivered 940",
            f"drop {name}/subscriber overflow 40", f"drop {name}/subscriber gap 10",
            f"drop {name}/subscriber filtered 3", f"add {name}/subscriber expired 4",
            f"add {name}/subscriber redelivered 6", f"set {name}/subscriber depth 3", f"set {name}/subscriber capacity 16",
            *(f"latency {name}/subscriber {us}500" for us in range(1, 101)), f"set {name}/subscriber last_ns now",
            f"open shm subscriber {name}-stuck", f"add {name}-stuck/subscriber matched 8",
            f"set {name}-stuck/subscriber depth 8", f"set {name}-stuck/subscriber capacity 8",
            f"state {name}-stuck/subscriber stuck in receive",
            "open spark pipeline archive", "add archive/pipeline matched 75", "add archive/pipeline delivered 75",
            "set archive/pipeline lag 25",
        )  # fmt: skip
        yield running


def wait_for(browser: Browser, name: str) -> None:
    """Until the page knows the plant; the handles are shown then."""
    show(browser, "handles")
    browser.until(f"return document.querySelectorAll('#ledger-table tr[data-where*=\"{name}\"]').length >= 3")


def show(browser: Browser, view: str) -> None:
    """Another view, once it has been drawn."""
    browser.run("delete document.body.dataset.looked; location.hash = arguments[0]", f"#{view}")
    browser.until("return document.body.dataset.looked")


def test_every_figure_of_the_ledger_equals_the_counters(
    service: Service, browser: Browser, plant: Handles, name: str
) -> None:
    browser.open(service.url)
    wait_for(browser, name)
    blocks = {"-".join(map(str, b.key)): b for b in live() if b.pid == plant.pid}
    shown = browser.run(
        "return [...document.querySelectorAll('#ledger-table tbody tr')].map(row => [row.dataset.key,"
        " Object.fromEntries(arguments[0].map(f => [f, [row.querySelector('.' + f).dataset.value,"
        " row.querySelector('.' + f).textContent]]))])", list(FIELDS),
    )  # fmt: skip
    rows = {key: cells for key, cells in shown if key in blocks}
    assert set(rows) == set(blocks)
    for key, block in blocks.items():
        for field in FIELDS:
            expected = getattr(block, field)
            assert int(rows[key][field][0]) == expected
            assert int(rows[key][field][1].replace(",", "")) == expected


def test_sums_queues_pipelines_and_troubles(service: Service, browser: Browser, plant: Handles, name: str) -> None:
    browser.open(service.url)
    wait_for(browser, name)
    own = sum(block.lost for block in live() if block.pid == plant.pid)
    assert own == 50
    show(browser, "overview")

    def shown() -> int:
        return int(browser.run("return document.getElementById('sum-lost').dataset.value"))

    deadline = time.monotonic() + 30
    while shown() != sum(block.lost for block in live()):  # others on this machine may lose while we look
        assert time.monotonic() < deadline, (shown(), live())
    show(browser, "queues")
    meters = browser.run(
        "return [...document.querySelectorAll('#queue-list .meter')].map(m => [m.dataset.key, +m.dataset.depth, +m.dataset.capacity])"
    )
    by_key = {key: (depth, capacity) for key, depth, capacity in meters}
    for block in live():
        if block.capacity and block.pid == plant.pid:
            assert by_key["-".join(map(str, block.key))] == (block.depth, block.capacity)
    show(browser, "pipelines")
    rows = browser.run("return [...document.querySelectorAll('#pipeline-list .meter')].map(m => +m.dataset.rows)")
    assert 75 in rows
    show(browser, "overview")
    troubles = browser.run("return document.getElementById('stuck').innerText")
    assert "stuck in receive" in troubles and f"{name}-stuck" in troubles
    assert "stuck" in browser.run("return document.getElementById('status').innerText")
    nodes = browser.run("return [...document.querySelectorAll('.node')].map(n => [n.dataset.id, n.dataset.health])")
    assert [f"shm:{name}-stuck", "stuck"] in nodes


KEY = """
  const figure = document.querySelector(`canvas[data-plot="${arguments[0]}"]`).parentElement;
  const key = [...figure.querySelectorAll('.keys > button')].find(one => one.dataset.name === arguments[1]);
  return key ? key.dataset.value : null;"""


def test_plots_and_processes_show_what_was_counted(
    service: Service, browser: Browser, plant: Handles, name: str
) -> None:
    browser.open(service.url)
    wait_for(browser, name)
    (reader,) = [b for b in live() if b.pid == plant.pid and b.kind == "subscriber" and b.name == name]
    (pipeline,) = [b for b in live() if b.pid == plant.pid and b.kind == "pipeline"]
    cells = f"#ledger-table tr[data-key='{'-'.join(map(str, reader.key))}']"
    latency = spread(reader.latency_counts)
    assert latency is not None and latency.measured == 100
    for field, value_ns in (("p50", latency.p50_ns), ("p99", latency.p99_ns)):
        shown = browser.run(f'return document.querySelector("{cells} .{field}").dataset.value')
        assert float(shown) == value_ns / 1e3
    show(browser, "plots")
    browser.until("return document.querySelectorAll('canvas[data-plot=\"latency/\"] ~ .keys > button').length")
    assert float(browser.run(KEY, "latency/", f"shm:{name}")) == round(latency.p99_ns / 1e3, 3)
    assert float(browser.run(KEY, "depth/", f"shm:{name}")) == reader.depth
    assert float(browser.run(KEY, "lag/", "spark:archive")) == pipeline.lag
    for reason in ("overflow", "gap"):
        shown, kept = browser.run(KEY, "lost/", reason), service.watcher.history.series([f"lost/{reason}"])
        assert float(shown or 0) in (0, *kept["series"][f"lost/{reason}"]), kept  # type: ignore[index]
    assert not browser.run(KEY, "lost/", "filtered"), "what a filter keeps back is not lost"
    show(browser, "processes")
    process = browser.run(
        "const row = document.querySelector(`#process-table tr[data-pid='${arguments[0]}']`);"
        "return [...row.cells].map(cell => cell.dataset.value)", str(plant.pid),
    )  # fmt: skip
    assert process[:3] == [str(plant.pid), "handles.py", "4"] and "handles.py" in process[6]
    assert int(process[3]) > 1_000_000 and int(process[5]) >= 1
    show(browser, "overview")
    flows = browser.run("return [...document.querySelectorAll('.node')].map(n => n.dataset.id)")
    assert f"shm:{name}" in flows and "archive" in flows


def test_a_queue_is_paused_on_the_page(browser: Browser, tmp_path: Path) -> None:
    with (
        Server(str(tmp_path / "b"), 0).start() as server,
        Client(port=server.port) as client,
        Service(every_s=0.3, allow_actions=True) as acting,
    ):
        acting.start()
        client.queue("work", topics="t")
        client.publish_many("t", [b"x"] * 3)
        browser.open(acting.url)
        show(browser, "channel=broker:work")
        tiles = "document.getElementById('channel-tiles').innerText.replace(/\\s+/g, ' ')"
        browser.until(f"return {tiles}.includes('0 publish, 0 read') && {tiles}.includes('3 messages in the queue')")
        show(browser, "queues")
        meter = "[...document.querySelectorAll('#queue-list .meter')].find(m => m.innerText.includes('broker:work'))"
        button = f"[...({meter})?.querySelectorAll('button') ?? []].find(b => b.textContent === '%s')"
        browser.until(f"return {button % 'pause'} && Number({meter}.dataset.depth) === 3")
        assert browser.run(f"return !({button % 'resume'})")
        browser.run(f"{button % 'pause'}.click()")
        browser.until(f"return {meter}.innerText.includes('paused') && {button % 'resume'}")
        said = "const s = document.getElementById('said'); return s.hidden ? '' : s.innerText"
        assert "work is paused" in browser.until(said)
        assert browser.run(f"return {meter}.innerText.includes('no consumer')")
        with client.subscribe("work") as consumer:
            assert consumer.read(0.2) is None
            browser.until(f"return {meter}.innerText.includes('1 consumer')")
            browser.run(f"{button % 'resume'}.click()")
            assert bytes(consumer.read(30) or b"") == b"x"


def test_dead_letters_are_sent_back_from_where_they_are_trouble(browser: Browser, tmp_path: Path) -> None:
    with (
        Server(str(tmp_path / "b"), 0).start() as server,
        Client(port=server.port) as client,
        Service(every_s=0.3, allow_actions=True) as acting,
    ):
        acting.start()
        client.queue("poison", topics="t", max_tries=1)
        client.publish("t", b"bad")
        with client.subscribe("poison", ack="manual") as consumer:
            consumer.nack(consumer.receive(60))
        browser.open(acting.url)
        line = "[...document.querySelectorAll('#stuck-list li')].find(l => l.innerText.includes('poison.dead'))"
        browser.until(f"return ({line})?.querySelector('button')?.textContent === 'redrive'")
        show(browser, "queues")
        meter = "[...document.querySelectorAll('#queue-list .meter')].find(m => %sm.innerText.includes('poison.dead'))"
        browser.until(f"return ({meter % '!'})?.innerText.includes('1 dead letters')")
        labels = f"return [...({meter % ''}).querySelectorAll('button')].map(b => b.textContent)"
        assert "redrive" not in browser.run(labels)
        show(browser, "overview")
        browser.run(f"window.confirm = () => true; ({line}).querySelector('button').click()")
        with client.subscribe("poison", ack="manual") as consumer:
            assert bytes(consumer.receive(60)) == b"bad"


def test_rates_move_the_plots_and_the_graph(service: Service, browser: Browser, plant: Handles, name: str) -> None:
    browser.open(service.url)
    wait_for(browser, name)
    edge = "return [...document.querySelectorAll('.edge.pulse')].some(e => !e.classList.contains('idle'))"
    key = f"""
      const key = document.querySelector('canvas[data-plot="rate/in/"]').parentElement.querySelector('[data-name="shm:{name}"]');
      return key && Number(key.dataset.value) > 0;"""
    for view, script in (("overview", edge), ("plots", key)):
        show(browser, view)
        deadline = time.monotonic() + 40
        while not browser.run(script):
            plant.do(f"add {name}/publisher matched 500", f"set {name}/publisher last_ns now")
            assert time.monotonic() < deadline
    drawn = browser.run(
        "const c = document.querySelector('canvas[data-plot=\"rate/in/\"]');"
        "return c.getContext('2d').getImageData(0, 0, c.width, c.height).data.some(v => v > 0)"
    )
    assert drawn


def test_alarm_when_a_ledger_does_not_balance(service: Service, browser: Browser, plant: Handles, name: str) -> None:
    browser.open(service.url)
    wait_for(browser, name)
    assert browser.run("return document.getElementById('alarm').hidden")
    plant.do(f"add {name}/subscriber delivered 5000")
    text = browser.until("const a = document.getElementById('alarm'); return a.hidden ? '' : a.textContent")
    assert name in text and "does not balance" in text


#: No box of the drawing over another, no text of the page outside of its window, nothing to scroll sideways.
LAID_OUT = """
  const boxes = [...document.querySelectorAll('.node rect.box')].map(box => box.getBoundingClientRect());
  const over = boxes.some((a, at) => boxes.slice(at + 1).some(b => a.left < b.right - 1 && b.left < a.right - 1 && a.top < b.bottom - 1 && b.top < a.bottom - 1));
  const cards = [...document.querySelectorAll('.view:not([hidden]) > *, .view:not([hidden]) .split > *')].map(card => card.getBoundingClientRect());
  const stacked = cards.some((a, at) => cards.slice(at + 1).some(b => a.bottom > b.top + 1 && b.bottom > a.top + 1 && a.right > b.left + 1 && b.right > a.left + 1 && !(a.top <= b.top && a.bottom >= b.bottom) && !(b.top <= a.top && b.bottom >= a.bottom)));
  const wide = document.documentElement.scrollWidth > window.innerWidth;
  const inside = (part, holder) => { const a = part.getBoundingClientRect(), b = holder.getBoundingClientRect(); return !a.width || a.left >= b.left - 1 && a.right <= b.right + 1 && a.top >= b.top - 1 && a.bottom <= b.bottom + 1; };
  const cut = [...document.querySelectorAll('.node text')].filter(text => !inside(text, text.parentElement.querySelector('.box')))
    .concat([...document.querySelectorAll('.keys > button')].filter(key => !inside(key, key.closest('figure')) || !inside(key, key.parentElement)))
    .concat([...document.querySelectorAll('.legend > span')].filter(part => !inside(part, part.closest('.card'))))
    .map(part => part.textContent);
  return [over, stacked, wide, cut];"""
#: The least contrast of any text that is shown, placeholders included, with what is behind it.
CONTRAST = """
  const parts = colour => colour.match(/[\\d.]+/g).map(Number);
  const light = ([r, g, b]) => { const [x, y, z] = [r, g, b].map(v => (v /= 255) <= .04045 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4); return .2126 * x + .7152 * y + .0722 * z; };
  let worst = [99, ''];
  const measure = (holder, colour, text) => {
    if (!text || !holder.checkVisibility() || holder.closest('svg')) return;
    let behind = holder, seen = 1;
    for (let above = holder; above; above = above.parentElement) seen *= getComputedStyle(above).opacity;
    while (behind && (parts(getComputedStyle(behind).backgroundColor)[3] ?? 1) === 0) behind = behind.parentElement;
    const back = behind ? parts(getComputedStyle(behind).backgroundColor) : [255, 255, 255];
    const [a, b] = [light(parts(colour).slice(0, 3).map((value, at) => value * seen + back[at] * (1 - seen))), light(back)];
    const ratio = (Math.max(a, b) + .05) / (Math.min(a, b) + .05);
    if (ratio < worst[0]) worst = [ratio, text.slice(0, 40)];
  };
  const walk = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walk.nextNode()) measure(walk.currentNode.parentElement, getComputedStyle(walk.currentNode.parentElement).color, walk.currentNode.textContent.trim());
  for (const field of document.querySelectorAll('input[placeholder]')) measure(field, getComputedStyle(field, '::placeholder').color, field.placeholder);
  return worst;"""


def sound(browser: Browser, what: str) -> None:
    assert browser.run(LAID_OUT) == [False, False, False, []], what
    ratio, text = browser.run(CONTRAST)
    assert ratio >= 4.5, (what, ratio, text)


def test_light_and_dark_wide_and_narrow(service: Service, browser: Browser, plant: Handles, name: str) -> None:
    browser.open(service.url)
    wait_for(browser, name)
    for width, height in ((1400, 1000), (800, 1000), (390, 844)):
        browser.resize(width, height)
        for dark in (False, True):
            browser.dark(dark)
            for view in ("overview", "plots", "handles", "queues", f"channel=shm:{name}"):
                show(browser, view)
                if view == "plots" and not dark:  # the names of what is hidden are text, too
                    browser.until("return document.querySelector('.keys > button[data-name]')")
                    browser.run("document.querySelector('.keys > button[aria-pressed=true]')?.click()")
                    browser.until("return document.querySelector('.keys > button[aria-pressed=false]')")
                word = view.partition("=")[0]
                sound(browser, f"{word} {width} {'dark' if dark else 'light'}")
                browser.screenshot(SHOTS / f"{word}-{width}-{'dark' if dark else 'light'}.png")
    browser.dark(False)
    browser.resize(1400, 1000)


def test_what_is_in_trouble_is_seen_on_a_phone(service: Service, browser: Browser, name: str) -> None:
    """No row of the trouble list is out of sight without a word; a handle's health is beside its address."""
    with Handles() as running:
        for number in range(6):
            running.do(f"open shm subscriber {name}-{number}", f"state {name}-{number}/subscriber stuck in receive")
        running.do(f"open shm subscriber {name[1:]}-0", f"state {name[1:]}-0/subscriber stuck in receive")  # the same address
        browser.open(service.url)
        try:
            for width, rows in ((1400, 6), (800, 3), (390, 3)):
                browser.resize(width, 900)
                show(browser, "overview")
                shown = "[...document.querySelectorAll('#stuck-list li')]"
                more = "document.getElementById('stuck-more')"
                browser.until(f"return {shown}.length === {rows} && ({more}.hidden ? {rows} === 6 : {more}.textContent === 'show 3 more')")
                browser.run(f"if (!{more}.hidden) {more}.click()")
                cut = "const box = document.getElementById('stuck'); return box.scrollHeight > box.clientHeight + 1"
                assert browser.run(f"return {shown}.length") == 6 and not browser.run(cut), width
                browser.run(f"if (!{more}.hidden) {more}.click()")
            assert browser.run(f"return {shown}.find(row => row.innerText.includes('{name}-0')).innerText.includes('2 subscribers')")
            show(browser, "handles")
            pill = f"document.querySelector('#ledger-table tr[data-where*=\"{name}-0\"] .pill')"
            browser.until(f"return {pill}?.textContent === 'stuck'")
            assert browser.run(f"return {pill}.getBoundingClientRect().right < innerWidth")
            show(browser, f"channel=shm:{name}-0")
            browser.until("return document.querySelectorAll('#channel-table .pill.stuck').length === 2")
            assert browser.run("return document.querySelector('#channel-table .pill').getBoundingClientRect().right < innerWidth")
            assert browser.until("return document.getElementById('channel-why-note').hidden && document.querySelectorAll('#channel-why li').length")
        finally:
            browser.resize(1400, 1000)


def test_empty(browser: Browser) -> None:
    nothing = Service(every_s=0.5)
    nothing.watcher._source = list  # before it looks for the first time
    with nothing as empty:
        empty.start()
        browser.open(empty.url)
        browser.until("return document.body.dataset.looked")
        show(browser, "overview")
        assert "penstock demo" in browser.run("return document.getElementById('graph').innerText")
        assert "nothing is losing" in browser.run("return document.getElementById('stuck').innerText")
        sound(browser, "empty")
        browser.screenshot(SHOTS / "empty.png")


def test_a_thousand_handles_on_one_screen(service: Service, browser: Browser, name: str) -> None:
    with Handles() as running:
        for number in range(200):
            where = f"{name}/{'abcde'[number % 5]}/{number}"
            running.do(f"open shm publisher {where}", f"add {where}/publisher matched 10")
            running.do(*(f"open shm {kind} {where}" for kind in ("subscriber", "callback", "fifo", "channel")))
        bad = f"{name}/e/199"
        running.do(f"state {bad}/callback stuck in receive")
        for number in range(60):  # one trouble, seen by many
            running.do(f"state {name}/{'abcde'[number % 5]}/{number}/subscriber stuck in receive")
        browser.open(service.url)
        show(browser, "overview")
        browser.until("return Number(document.getElementById('sum-handles').textContent.replace(',', '')) >= 1000")
        assert browser.run("return document.documentElement.scrollHeight") <= 1100, "one screen"
        rows = "document.querySelectorAll('#stuck-list li').length"
        assert browser.until(f"return document.getElementById('stuck-more').textContent === 'show 44 more' && {rows}") == 6
        browser.run("document.getElementById('stuck-more').click()")
        browser.until(f"return document.getElementById('stuck-list').innerText.includes('{bad}') && {rows} === 50")
        browser.run("document.getElementById('stuck-more').click()")
        boxes, lines = browser.run(
            "return [[...document.querySelectorAll('.node')].map(n => n.dataset.id),"
            " [...document.querySelectorAll('.edge:not(.pulse)')].flatMap(e => [e.dataset.from, e.dataset.to])]"
        )
        assert f"shm:{bad}" in boxes and set(boxes) <= set(lines), "no box without its lines"
        browser.run("const s = document.getElementById('search'); s.value = arguments[0]; s.dispatchEvent(new Event('input'))", bad)
        browser.until("return document.querySelectorAll('#channel-list button.channel').length === 1")
        browser.run("document.querySelector('#channel-list button.channel').click()")
        browser.until(
            "const n = [...document.querySelectorAll('.node')].map(n => n.dataset.id);"
            f"return n.length > 1 && n.length < 10 && n.includes('shm:{bad}')"
        )
        browser.run("document.getElementById('search').value = ''")
        sound(browser, "a thousand")
        browser.screenshot(SHOTS / "thousand.png")


def test_only_what_changed_is_drawn_again(service: Service, browser: Browser, plant: Handles, name: str) -> None:
    browser.open(service.url)
    wait_for(browser, name)
    browser.run("document.querySelector('#ledger-table th[data-sort=where]').click()")  # an order that stays
    browser.run(
        "window.changed = new Set(); new MutationObserver(found => found.forEach(one => {"
        " const row = (one.target.nodeType === 3 ? one.target.parentElement : one.target).closest('tr');"
        " window.changed.add(row ? row.dataset.where + '/' + row.dataset.kind : 'rows'); }))"
        ".observe(document.querySelector('#ledger-table tbody'), {subtree: true, childList: true, characterData: true})"
    )
    plant.do(f"add {name}/publisher matched 7")
    browser.until(f"return window.changed.has('shm:{name}/publisher')")
    still = browser.run("return [...window.changed]")
    assert "rows" not in still and f"shm:{name}-stuck/subscriber" not in still, still


def test_the_page_of_a_channel(service: Service, browser: Browser) -> None:
    address = f"shm:/test-page-{uuid.uuid4().hex[:8]}"
    with penstock.publisher(address, slots=32, slot_size=256) as publisher, penstock.subscriber(address) as reader:
        browser.open(service.url)
        show(browser, f"channel={address}")
        browser.until("return document.querySelectorAll('#channel-table tbody tr').length === 2")
        browser.until("return document.querySelectorAll('#channel-why li').length > 0")
        browser.run("document.getElementById('channel-tail-start').click()")
        browser.until("return document.getElementById('channel-tail-note').textContent.startsWith('subscribed')")
        number = 0
        deadline = time.monotonic() + 40
        while not browser.run("return !document.getElementById('channel-fields').hidden"):
            number += 1
            publisher.publish(json.dumps({"pose": {"x": number / 2, "y": -number}, "name": "arm"}).encode())
            assert reader.read(10) is not None
            assert time.monotonic() < deadline
        names = browser.run("return [...document.querySelectorAll('#channel-fields .keys button')].map(b => b.dataset.name)")
        assert names == ["pose.x", "pose.y"]
        assert "pose" in browser.run("return document.getElementById('channel-tail-list').innerText")
        browser.screenshot(SHOTS / "channel.png")


def test_any_field_of_many_can_be_plotted(service: Service, browser: Browser) -> None:
    address = f"shm:/test-page-{uuid.uuid4().hex[:8]}"
    with penstock.publisher(address, type=dict, slots=32, slot_size=1024) as publisher:
        browser.open(service.url)
        show(browser, f"channel={address}")
        browser.until("return !document.getElementById('channel-tail-start').hidden")
        browser.run("document.getElementById('channel-tail-start').click()")
        keys = "[...document.querySelectorAll('#channel-fields .keys button')].map(b => b.dataset.name)"
        deadline = time.monotonic() + 40
        while not browser.run(f"return {keys}.length"):
            publisher.publish({f"f{n:02}": 100 - n for n in range(40)})
            assert time.monotonic() < deadline
        assert browser.run(f"return {keys}") == [f"f{n:02}" for n in range(12)], "the largest"
        browser.run("const f = document.getElementById('field-filter'); f.value = 'f39'; f.dispatchEvent(new Event('input'))")
        assert browser.run(f"return {keys}") == ["f39"]


def test_no_part_of_the_page_has_the_name_of_a_view(service: Service, browser: Browser) -> None:
    """The browser itself would scroll to it, and its heading would lie under the page's own."""
    browser.open(service.url)
    views = browser.run("return [...document.querySelectorAll('nav a')].map(link => link.dataset.view)")
    assert len(views) >= 6
    assert not browser.run("return arguments[0].filter(name => document.getElementById(name))", views)


def test_the_page_of_a_gateway_s_module(service: Service, browser: Browser) -> None:
    class Sink(Module):
        def receive(self, message: object) -> None:
            pass

    source, sink = (f"{kind}-{uuid.uuid4().hex[:8]}" for kind in ("source", "sink"))
    with Gateway() as gateway:
        gateway.add_module(source, Sensor, {"rate_per_s": 1000.0, "count": 3})
        gateway.add_module(sink, Sink)
        gateway.add_link(source, sink)
        gateway.start()
        browser.open(service.url)
        for name, told in ((source, "published"), (sink, "delivered")):
            show(browser, f"channel=gateway:{name}")
            tiles = "[...document.querySelectorAll('#channel-tiles .tile')].map(tile => tile.innerText.replace(/\\s+/g, ' '))"
            browser.until(f"return {tiles}.includes('3 messages {told}')")
            why = "[...document.querySelectorAll('#channel-why li')].map(line => line.innerText).join()"
            browser.until(f"return {why}.includes('3 messages up to now')")
            assert not browser.run(f"return {why}.includes('reason')")
            assert browser.run("return document.getElementById('channel-tail-start').hidden")
            assert "Only the program" in browser.run("return document.getElementById('channel-tail-none').innerText")
            show(browser, f"overview=gateway:{name}")
            browser.until("return !document.getElementById('channel-link').hidden")


def test_plots_zoom_hide_and_have_a_logarithmic_axis(
    service: Service, browser: Browser, plant: Handles, name: str
) -> None:
    browser.open(service.url)
    wait_for(browser, name)
    show(browser, "plots")
    # A plot has the largest series alone, and the service has seen the plants of other tests.
    browser.run("const f = document.getElementById('plots-filter'); f.value = arguments[0]; f.dispatchEvent(new Event('input'))", name)
    key = f"document.querySelector('canvas[data-plot=\"rate/in/\"] ~ .keys [data-name=\"shm:{name}\"]')"
    browser.until(f"return {key}")
    browser.run(f"{key}.click()")
    browser.run("CanvasRenderingContext2D.prototype.fillText = (show => function (text, ...at) { (window.written ??= new Set()).add(text); return show.call(this, text, ...at); })(CanvasRenderingContext2D.prototype.fillText)")
    browser.until(f"return {key}.getAttribute('aria-pressed') === 'false' && window.written?.has('all names are hidden')")
    browser.run("document.getElementById('log-axis').click()")
    assert browser.run("return document.getElementById('log-axis').getAttribute('aria-pressed')") == "true"
    browser.run(
        "const c = document.querySelector('canvas'); c.setPointerCapture = () => {};"
        "const at = (type, x) => c.dispatchEvent(new PointerEvent(type, {clientX: c.getBoundingClientRect().left + x, clientY: c.getBoundingClientRect().top + 50, pointerId: 1}));"
        "at('pointerdown', 150); at('pointermove', 250); at('pointerup', 250)"
    )
    browser.until("return !document.getElementById('zoom-out').hidden")
    browser.run("document.getElementById('zoom-out').click()")
    browser.until("return document.getElementById('zoom-out').hidden")
    assert [entry for entry in browser.log() if entry.get("level") == "SEVERE"] == []


def test_a_finger_that_drags_over_a_plot_zooms(service: Service, browser: Browser, plant: Handles, name: str) -> None:
    browser.open(service.url)
    wait_for(browser, name)
    show(browser, "plots")
    browser.until("return document.querySelector('canvas[data-plot=\"rate/in/\"]').clientWidth > 0")
    browser.run("document.querySelector('canvas[data-plot=\"rate/in/\"]').scrollIntoView({block: 'center'})")
    left, top = browser.run(
        "const r = document.querySelector('canvas[data-plot=\"rate/in/\"]').getBoundingClientRect(); return [r.left, r.top]"
    )
    browser.touch((left + 120, top + 60), (left + 160, top + 60), (left + 220, top + 62), (left + 260, top + 62))
    browser.until("return !document.getElementById('zoom-out').hidden")


def test_names_that_are_shortened_stay_different(service: Service, browser: Browser) -> None:
    browser.open(service.url)
    browser.until("return document.getElementById('looked').textContent")
    browser.run(
        "import('/format.js').then(format => { const names = [...Array(50).keys()].map(n => `shm:/plant/line${n % 7}/machine${n}/temperature`);"
        "for (const room of ['arm', 'lidar']) names.push(...[...Array(50).keys()].map(n => `shm:/${room}/unit0${n}/some-long-sensor-name/front`));"
        "names.push('tcp://127.0.0.1:1588', 'shm:/x');"
        "format.compareNames(names); window.short = [20, 17].map(most => names.map(name => format.middle(name, most))); })"
    )
    short, shorter = browser.until("return window.short")
    assert len(set(short)) == 152 and max(map(len, short)) == 20, short
    assert short[3] == "…/line3/machine3/…" and short[57] == "shm:/arm/unit07…ront" and short[140] == "shm:/lidar/unit040…t"
    assert short[150:] == ["tcp://127.0.0.1:1588", "shm:/x"]
    assert len(set(shorter)) == 152 and shorter[3] == "…/machine3/…" and shorter[140] == "…/lidar/unit040/…", shorter


def test_an_address_with_a_percent_sign_typed_by_hand(service: Service, browser: Browser) -> None:
    browser.open(service.url)
    show(browser, "channel=shm:/100% done")
    assert browser.run("return document.getElementById('channel-name').textContent") == "shm:/100% done"


def test_what_is_chosen_while_the_page_is_frozen_is_drawn(
    service: Service, browser: Browser, plant: Handles, name: str
) -> None:
    browser.open(service.url)
    wait_for(browser, name)
    show(browser, "overview")
    browser.run("document.getElementById('pause').click()")
    browser.until(f"return document.querySelector('button.channel[data-where=\"shm:{name}\"]')")
    browser.run(f"document.querySelector('button.channel[data-where=\"shm:{name}\"]').click()")
    browser.until("return document.querySelectorAll('.node').length === 3")
    browser.run("document.getElementById('pause').click()")


def test_a_label_of_wide_letters_stays_in_its_box(service: Service, browser: Browser, name: str) -> None:
    with Handles() as running:
        wide = f"{name}-{'W' * 90}"
        running.do(f"open shm publisher {wide}", f"open shm subscriber {wide}", f"add {wide}/subscriber matched 1")
        browser.open(service.url)
        show(browser, f"overview=shm:{wide}")
        browser.until("return document.querySelectorAll('.node').length === 3")
        sound(browser, "wide letters")


def test_the_rates_of_a_process_are_its_own(service: Service, browser: Browser, plant: Handles, name: str) -> None:
    """A slow reader's process does not have the rate of the fast publisher of its channel."""
    with Handles() as reader:
        reader.do(f"open shm subscriber {name}", f"set {name}/subscriber last_ns now")
        browser.open(service.url)
        show(browser, "overview")
        browser.run("const g = document.getElementById('group-by'); g.value = 'process'; g.dispatchEvent(new Event('change'))")
        head = "[...document.querySelectorAll('#channel-list summary')].find(s => s.innerText.includes('(%d)'))"
        browser.until(f"return {head % reader.pid}")
        deadline = time.monotonic() + 40
        while not browser.run(f"return !{head % plant.pid}.innerText.trim().endsWith('\\n0/s')"):
            plant.do(f"add {name}/publisher matched 500", f"set {name}/publisher last_ns now")
            assert time.monotonic() < deadline
        assert browser.run(f"return {head % reader.pid}.lastChild.textContent") == "0/s"


def test_a_group_counts_each_message_once(service: Service, browser: Browser, name: str) -> None:
    """A journal's messages pass its writer too, and a broker's its server, its queues and its own journal; the groups add
    up to what is published on the machine.
    """
    place = f"/tmp{name}"
    with Handles() as plant, Handles() as broker:
        plant.do(
            f"open journal writer {place}/log", f"open journal publisher {place}/log#a", f"open journal publisher {place}/log#b",
            f"open shm publisher {name}", f"open shm subscriber {name}", "open broker publisher 127.0.0.1:9/topic",
        )  # fmt: skip
        broker.do(
            "open broker broker 127.0.0.1:9", f"open broker queue {name[1:]}", f"open journal writer {place}/broker",
            "open tcp subscriber 127.0.0.1:8",
        )  # fmt: skip
        browser.open(service.url)
        show(browser, "overview")
        browser.run("const g = document.getElementById('group-by'); g.value = 'reach'; g.dispatchEvent(new Event('change'))")
        script = """const hz = cell => parseFloat(cell.textContent) * (cell.textContent.includes("k") ? 1000 : 1);
            const all = {}; for (const s of document.querySelectorAll("#channel-list summary")) all[s.children[1].textContent] = hz(s.lastChild);
            for (const r of document.querySelectorAll("#channel-list .channel")) all[r.dataset.where] = hz(r.lastChild);
            return [all, hz(document.getElementById("sum-in"))]"""
        browser.until(f"return document.querySelector('[data-where=\"broker:{name[1:]}\"]')")
        deadline = time.monotonic() + 60
        rows = [f"journal:{place}/log", f"journal:{place}/broker", "broker://127.0.0.1:9", f"broker:{name[1:]}", "tcp://127.0.0.1:8"]
        while True:
            plant.do(
                f"add {place}/log#a/publisher matched 300", f"add {place}/log#b/publisher matched 100",
                f"add {place}/log/writer delivered 400", f"add {name}/publisher matched 60", f"add {name}/subscriber delivered 60",
                "add 127.0.0.1:9/topic/publisher matched 70",
            )  # fmt: skip
            broker.do(
                "add 127.0.0.1:9/broker delivered 70", f"add {name[1:]}/queue delivered 70", f"add {place}/broker/writer delivered 70",
                "add 127.0.0.1:8/subscriber delivered 10",
            )  # fmt: skip
            shown, published = browser.run(script)
            if all(shown[row] > 0 for row in rows):
                assert shown["journal"] == pytest.approx(shown[f"journal:{place}/log#a"] + shown[f"journal:{place}/log#b"], rel=0.02)
                assert shown["broker"] == pytest.approx(shown["broker://127.0.0.1:9/topic"], rel=0.02)
                assert shown["tcp"] == shown["tcp://127.0.0.1:8"], "published elsewhere: what is read here"
                assert published == pytest.approx(shown["journal"] + shown["broker"] + shown["shm"], rel=0.02)
                return
            assert time.monotonic() < deadline, shown


def test_a_name_has_its_colour_of_itself(browser: Browser, name: str) -> None:
    """After a restart of the monitor, and whichever names came first; a few names may share one of the 24, a hundred do not."""
    colours = []
    names = [f"{name}-{letter}" for letter in "abc"]
    for order in (names, names[::-1]):
        with Handles() as running, Service(every_s=0.3) as monitor:
            monitor.start()
            browser.open(monitor.url)
            show(browser, "plots")
            key = "document.querySelector(`canvas[data-plot='rate/in/'] ~ .keys [data-name='shm:%s']`)"
            for one in order:
                running.do(f"open shm publisher {one}", f"add {one}/publisher matched 5")
                browser.until(f"return {key % one}")
            colours.append([browser.run(f"return {key % one}.dataset.colour") for one in names])
            browser.run("import('/plots.js').then(m => { window.seen = [...Array(100).keys()].map(i => m.look(`shm:plant/${i}`).colour) })")
            browser.until("return window.seen")
            hundred = browser.run("return window.seen")
    assert colours[0] == colours[1]
    assert len(set(hundred)) > 12  # of 24: these names are fixed, so is what they give


def test_what_was_chosen_outlives_a_reload(service: Service, browser: Browser, plant: Handles, name: str) -> None:
    browser.open(service.url)
    wait_for(browser, name)
    browser.run("document.querySelector('#ledger-table th[data-sort=matched]').click()")
    show(browser, "plots")
    browser.run("document.getElementById('log-axis').click(); document.querySelector('[data-span=\"300\"]').click()")
    show(browser, "overview")
    browser.run("const g = document.getElementById('group-by'); g.value = 'prefix'; g.dispatchEvent(new Event('change'))")
    browser.run("const s = document.getElementById('search'); s.value = arguments[0]; s.dispatchEvent(new Event('input'))", name)
    browser.until(f"return document.querySelector('button.channel[data-where=\"shm:{name}\"]')")
    browser.run(f"document.querySelector('button.channel[data-where=\"shm:{name}\"]').click()")
    browser.until("return document.querySelectorAll('.node').length === 3")
    browser.run("location.reload()")
    browser.until("return document.querySelectorAll('.node').length === 3")
    kept = "return ['group-by', 'search'].map(id => document.getElementById(id).value)"
    assert browser.run(kept) == ["prefix", name]
    assert browser.run("return document.getElementById('flow-note').textContent") == f"shm:{name}"
    browser.run("document.getElementById('show-all').click()")
    browser.until("return document.getElementById('show-all').hidden && location.hash === '#overview'")
    show(browser, "plots")
    assert browser.run("return document.getElementById('log-axis').getAttribute('aria-pressed')") == "true"
    assert browser.run("return document.querySelector('[data-span].on').dataset.span") == "300"
    assert browser.run("return document.querySelector('th.sorted').dataset.sort") == "matched"
    browser.run("localStorage.clear(); sessionStorage.clear()")


def test_no_connection_is_said_and_ends(browser: Browser) -> None:
    status = "return document.getElementById('status').textContent === 'no connection'"
    with Service(every_s=30) as monitor:  # it hears the server between two looks too
        monitor.start()
        port = int(monitor.url.rstrip("/").rpartition(":")[2])
        browser.open(monitor.url)
        browser.until("return document.body.dataset.looked")
        browser.run("performance.now = (now => () => { window.asked = (window.asked ?? 0) + 1; return now.call(performance); })(performance.now)")
        browser.until("return window.asked > 20")
        assert not browser.run(status)
    browser.until(status)
    with Service(port=port) as again:
        again.start()
        browser.until("return document.getElementById('status').textContent !== 'no connection'")


def test_a_server_that_says_nothing_is_no_connection(browser: Browser, monkeypatch: pytest.MonkeyPatch) -> None:
    """Though its connection stands."""
    goes_on = threading.Event()
    looked = server._Api._looked_after

    async def silent(api: server._Api, seen_ns: int) -> bool:
        await asyncio.to_thread(goes_on.wait)
        return await looked(api, seen_ns)

    with Service(every_s=0.5) as monitor:
        monitor.start()
        browser.open(monitor.url)
        browser.until("return document.body.dataset.looked")
        monkeypatch.setattr(server._Api, "_looked_after", silent)
        try:
            browser.until("return document.getElementById('status').textContent === 'no connection'")
        finally:
            goes_on.set()
        browser.until("return document.getElementById('status').textContent !== 'no connection'")


def test_a_name_too_long_to_follow_has_no_page(service: Service, browser: Browser, name: str) -> None:
    with Handles() as running:
        long = f"{name}-{'x' * 600}"
        running.do(f"open journal subscriber {long}", f"add {long}/subscriber matched 1")
        browser.open(service.url)
        show(browser, "handles")
        row = f"[...document.querySelectorAll('#ledger-table tbody tr')].find(r => r.dataset.where.includes('{name}'))"
        where = browser.until(f"return {row}?.dataset.where")
        assert browser.run(f"return {row}.querySelector('a').hasAttribute('href')") is False
        show(browser, "tail")
        options = browser.run("return [...document.querySelectorAll('#tail-address option')].map(o => o.value)")
        assert not any(name in option for option in options)
        browser.run("location.hash = '#overview=' + encodeURIComponent(arguments[0])", where)
        note = browser.until("const n = document.getElementById('flow-note').textContent; return n.includes('too long') && n")
        assert name in note and browser.run("return document.getElementById('channel-link').hidden")


def test_what_follows_a_channel_stands_to_its_right(service: Service, browser: Browser, name: str) -> None:
    """A channel whose publisher is elsewhere, the queue that it fills, the consumer of that."""
    queue = f"work{name.replace('/', '-')}"
    with Handles() as running:
        running.do(f"open broker queue {queue}", f"open broker subscriber 127.0.0.1:1/t?queue={queue}")
        browser.open(service.url)
        show(browser, f"overview=broker:{queue}")
        browser.until("return document.querySelectorAll('.node').length === 3")
        boxes = browser.run(
            "return Object.fromEntries([...document.querySelectorAll('.node')].map(n => [n.dataset.id, n.getBoundingClientRect().left]))"
        )
        consumer = f"{running.pid}|subscriber|broker://127.0.0.1:1/t?queue={queue}"
        assert boxes["broker://127.0.0.1:1/t"] < boxes[f"queue {queue}"] < boxes[consumer]


def test_names_that_differ_at_their_ends_are_told_apart(service: Service, browser: Browser, name: str) -> None:
    with Handles() as running:
        long = [f"{name}/{'directory/' * 9}{letter}" for letter in "ab"]
        for where in long:
            running.do(f"open shm publisher {where}", f"set {where}/publisher capacity 4")
        browser.open(service.url)
        places = {
            "handles": "#ledger-table tbody td.where", "queues": "#queue-list .head span:first-child",
            "plots": "canvas[data-plot='rate/in/'] ~ .keys span",
        }  # fmt: skip
        for width in (1400, 390):
            browser.resize(width, 900)
            for view, selector in places.items():
                show(browser, view)
                browser.run("const f = document.getElementById('plots-filter'); f.value = arguments[0]; f.dispatchEvent(new Event('input'))", name)
                found = f"[...document.querySelectorAll(`{selector}`)].map(n => n.textContent).filter(n => n.endsWith('/a') || n.endsWith('/b'))"
                browser.until(f"return new Set({found}).size === 2")
        browser.resize(1400, 1000)


def test_the_console_is_silent(service: Service, browser: Browser) -> None:
    browser.open(service.url)
    browser.until("return document.body.dataset.looked")
    severe = [entry for entry in browser.log() if entry.get("level") == "SEVERE"]
    assert severe == []


def test_all_views_are_in_sight_with_a_long_status(service: Service, browser: Browser) -> None:
    hidden = (
        "document.getElementById('status').textContent = 'ledger does not balance: 1000 in trouble';"
        "const nav = document.querySelector('nav');"
        "return [...nav.querySelectorAll('a')].filter(a => a.getBoundingClientRect().right > innerWidth).length"
        " + (nav.scrollWidth > nav.clientWidth + 1 ? 1 : 0)"
    )
    browser.open(service.url)
    browser.until("return document.body.dataset.looked")
    try:
        for width in (1400, 1000, 901, 900, 800, 760, 701, 390):
            browser.resize(width, 900)
            assert browser.run(hidden) == 0, width
    finally:
        browser.resize(1400, 1000)


def test_a_view_that_there_is_not_is_no_error(service: Service, browser: Browser) -> None:
    browser.open(service.url + "#__proto__")
    browser.until("return document.body.dataset.looked")


def test_handles_are_found_by_several_words(service: Service, browser: Browser, name: str) -> None:
    with Handles() as running:
        running.do(f"open shm subscriber {name}", f"open shm publisher {name}")
        browser.open(service.url)
        show(browser, "handles")
        browser.run(
            "const f = document.getElementById('ledger-filter'); f.value = arguments[0]; f.dispatchEvent(new Event('input'))",
            f"{name} SUBSCRIBER",
        )
        kinds = "return [...document.querySelectorAll('#ledger-table tbody tr')].map(row => row.dataset.kind).join()"
        browser.until(f"{kinds} === 'subscriber'")
        browser.run("const f = document.getElementById('ledger-filter'); f.value = ''; f.dispatchEvent(new Event('input'))")


def test_a_name_that_would_read_as_another_is_escaped(service: Service, browser: Browser, name: str) -> None:
    """As ``penstock ls`` does; what the page asks for is the name itself."""
    where = f"{name}\u202egnp.exe"
    with Handles() as running:
        running.do(f"open shm publisher {where}")
        browser.open(service.url)
        show(browser, "handles")
        shown = "[...document.querySelectorAll('#ledger-table tbody td.where')].map(cell => cell.textContent)"
        browser.until(f"return {shown}.some(text => text.includes('{name}'))")
        assert browser.run("return document.body.textContent.includes('\u202e')") is False
        assert any("\\u202egnp.exe" in text for text in browser.run(f"return {shown}"))
        kept = "[...document.querySelectorAll('#ledger-table tbody tr')].map(row => row.dataset.where)"
        assert any("\u202e" in text for text in browser.run(f"return {kept}"))
