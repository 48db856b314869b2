"""The page in a browser: every figure equals the ledger, in light and dark, wide and narrow."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("starlette")

import penstock
from penstock.broker import Client, Server
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
    browser.until(f"return document.querySelectorAll('#ledger-table tr[data-where*=\"{name}\"]').length >= 3")


def test_every_figure_of_the_ledger_equals_the_counters(
    service: Service, browser: Browser, plant: Handles, name: str
) -> None:
    browser.open(service.url)
    wait_for(browser, name)
    blocks = {f"{b.pid}-{b.index}-{b.taking}": b for b in live() if b.pid == plant.pid}
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

    def shown() -> int:
        return int(browser.run("return document.getElementById('sum-lost').dataset.value"))

    deadline = time.monotonic() + 30
    while shown() != sum(block.lost for block in live()):  # others on this machine may lose while we look
        assert time.monotonic() < deadline, (shown(), live())
    meters = browser.run(
        "return [...document.querySelectorAll('#queue-list .meter')].map(m => [m.dataset.key, +m.dataset.depth, +m.dataset.capacity])"
    )
    by_key = {key: (depth, capacity) for key, depth, capacity in meters}
    for block in live():
        if block.capacity and block.pid == plant.pid:
            assert by_key[f"{block.pid}-{block.index}-{block.taking}"] == (block.depth, block.capacity)
    rows = browser.run("return [...document.querySelectorAll('#pipeline-list .meter')].map(m => +m.dataset.rows)")
    assert 75 in rows
    troubles = browser.run("return document.getElementById('stuck').innerText")
    assert "stuck in receive" in troubles and f"{name}-stuck" in troubles
    nodes = browser.run("return [...document.querySelectorAll('.node')].map(n => [n.dataset.id, n.dataset.health])")
    assert [f"shm:{name}-stuck", "stuck"] in nodes


KEY = """
  const figure = document.querySelector(`canvas[data-plot="${arguments[0]}"]`).parentElement;
  const key = [...figure.querySelectorAll('.keys > span')].find(one => one.dataset.name === arguments[1]);
  return key ? key.dataset.value : null;"""


def test_plots_and_processes_show_what_was_counted(
    service: Service, browser: Browser, plant: Handles, name: str
) -> None:
    browser.open(service.url)
    wait_for(browser, name)
    (reader,) = [b for b in live() if b.pid == plant.pid and b.kind == "subscriber" and b.name == name]
    (pipeline,) = [b for b in live() if b.pid == plant.pid and b.kind == "pipeline"]
    browser.until("return document.querySelectorAll('canvas[data-plot=\"latency/\"] ~ .keys > span').length")
    latency = spread(reader.latency_counts)
    assert latency is not None and latency.measured == 100
    assert float(browser.run(KEY, "latency/", f"shm:{name}")) == round(latency.p99_ns / 1e3, 3)
    cells = f"#ledger-table tr[data-key='{reader.pid}-{reader.index}-{reader.taking}']"
    for field, value_ns in (("p50", latency.p50_ns), ("p99", latency.p99_ns)):
        shown = browser.run(f'return document.querySelector("{cells} .{field}").dataset.value')
        assert float(shown) == value_ns / 1e3
    assert float(browser.run(KEY, "depth/", f"shm:{name}")) == reader.depth
    assert float(browser.run(KEY, "lag/", "spark:archive")) == pipeline.lag
    for reason in ("overflow", "gap"):
        shown, kept = browser.run(KEY, "lost/", reason), service.watcher.history.series([f"lost/{reason}"])
        assert float(shown or 0) in (0, *kept["series"][f"lost/{reason}"]), kept  # type: ignore[index]
    assert not browser.run(KEY, "lost/", "filtered"), "what a filter keeps back is not lost"
    process = browser.run(
        "const row = document.querySelector(`#process-table tr[data-pid='${arguments[0]}']`);"
        "return [...row.cells].map(cell => cell.dataset.value)", str(plant.pid),
    )  # fmt: skip
    assert (process[0], process[2]) == (str(plant.pid), "4") and "handles.py" in process[1]
    assert int(process[3]) > 1_000_000 and int(process[5]) >= 1
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
        meter = "[...document.querySelectorAll('#queue-list .meter')].find(m => m.innerText.includes('broker:work'))"
        button = f"[...({meter})?.querySelectorAll('button') ?? []].find(b => b.textContent === '%s')"
        browser.run("window.alert = text => { window.said = text; }")
        browser.until(f"return {button % 'pause'} && Number({meter}.dataset.depth) === 3")
        assert browser.run(f"return !({button % 'resume'})")
        browser.run(f"{button % 'pause'}.click()")
        browser.until(f"return {meter}.innerText.includes('paused') && {button % 'resume'}")
        assert "work is paused" in browser.until("return window.said")
        with client.subscribe("work") as consumer:
            assert consumer.read(0.2) is None
            browser.run(f"{button % 'resume'}.click()")
            assert bytes(consumer.read(30) or b"") == b"x"


def test_rates_move_the_plots_and_the_graph(service: Service, browser: Browser, plant: Handles, name: str) -> None:
    browser.open(service.url)
    wait_for(browser, name)
    script = f"""
      const edge = [...document.querySelectorAll('.edge.pulse')].some(e => !e.classList.contains('idle'));
      const key = document.querySelector('canvas[data-plot="rate/in/"]').parentElement.querySelector('[data-name="shm:{name}"]');
      return edge && key && Number(key.dataset.value) > 0;"""
    deadline = time.monotonic() + 40
    while not browser.run(script):
        plant.do(f"add {name}/publisher matched 500", f"set {name}/publisher last_ns now")
        assert time.monotonic() < deadline
    drawn = browser.run(
        "const c = document.querySelector('canvas[data-plot=\"rate/in/\"]');"
        "return c.getContext('2d').getImageData(0, 0, c.width, c.height).data.some(v => v > 0)"
    )
    assert drawn


def test_a_field_of_a_channel_is_plotted(service: Service, browser: Browser) -> None:
    name = f"shm:/test-plot-{uuid.uuid4().hex[:8]}"
    with penstock.publisher(name, type=dict) as publisher:
        browser.open(service.url)
        option = f"[...document.querySelectorAll('#tail-address option')].some(one => one.value === '{name}')"
        browser.until(f"return {option}")
        browser.run(
            f"document.getElementById('tail-address').value = '{name}';"
            "document.getElementById('tail-fields').value = 'arm.x';"
            "document.getElementById('tail-form').requestSubmit()"
        )
        browser.until("return document.getElementById('tail-note').textContent.startsWith('subscribed')")
        publisher.publish({"arm": {"x": -2.5}})
        key = "document.querySelector('#tail-plot .keys [data-name=\"arm.x\"]')"
        browser.until(f"return {key} !== null && {key}.dataset.value === '-2.5'")
        assert browser.run("return document.getElementById('tail-plot').hidden") is False
        browser.run("document.getElementById('tail-form').requestSubmit()")


def test_alarm_when_the_books_do_not_close(service: Service, browser: Browser, plant: Handles, name: str) -> None:
    browser.open(service.url)
    wait_for(browser, name)
    assert browser.run("return document.getElementById('alarm').hidden")
    plant.do(f"add {name}/subscriber delivered 5000")
    text = browser.until("const a = document.getElementById('alarm'); return a.hidden ? '' : a.textContent")
    assert name in text and "not close" in text


def test_light_dark_and_narrow(service: Service, browser: Browser, plant: Handles, name: str) -> None:
    browser.open(service.url)
    wait_for(browser, name)
    browser.screenshot(SHOTS / "light.png")
    light = browser.run("return getComputedStyle(document.body).backgroundColor")
    browser.dark()
    browser.until(f"return getComputedStyle(document.body).backgroundColor !== '{light}'")
    browser.screenshot(SHOTS / "dark.png")
    browser.dark(False)
    browser.resize(390, 844)
    browser.until("return document.documentElement.clientWidth <= 400")
    assert browser.run("return document.documentElement.scrollWidth <= window.innerWidth")
    browser.screenshot(SHOTS / "narrow.png")
    browser.resize(1400, 1000)
    assert all(shot.stat().st_size > 10_000 for shot in SHOTS.glob("*.png"))


def test_the_console_is_silent(service: Service, browser: Browser) -> None:
    browser.open(service.url)
    browser.until("return document.body.dataset.looked")
    severe = [entry for entry in browser.log() if entry.get("level") == "SEVERE"]
    assert severe == []
