"""The edge device: a gateway whose sensors are linked to an address at every reach, and a display on the bus."""

from __future__ import annotations

import threading
import time
from typing import Any

import penstock
from penstock.cli.demo.latency import Latencies
from penstock.cli.demo.part import Stage
from penstock.cli.demo.sensors import Camera, Temperature, Vibration
from penstock.gateway import Gateway

SENSORS = {"temperature": Temperature, "vibration": Vibration, "camera": Camera}


def run(stage: Stage) -> None:
    """Publish until told to stop; then drain, and tell the final counts."""
    links: list[list[str]] = stage.configuration["links"]
    display = penstock.subscriber("bus:plant") if any(to == "bus:plant" for _, to in links) else None
    latencies = Latencies()
    done = threading.Event()
    reader = threading.Thread(target=_read, args=(display, latencies, done), name="display", daemon=True)
    with Gateway() as gateway:
        for name, sensor in SENSORS.items():
            gateway.add_module(name, sensor)
        for start, end in links:
            gateway.add_link(start, end)
        for address in stage.configuration["awaited"]:
            if not gateway.module(address).wait_ready(2, 30.0):  # the reader and the recorder
                raise TimeoutError(f"{address}: its subscribers did not connect in time")
        gateway.start()
        reader.start()
        sensors = {name: gateway.module(name) for name in SENSORS}
        stage.tell(ready=True)
        while not stage.stop.wait(0.5):
            stage.tell(**_report(sensors, display, latencies))
        for sensor in sensors.values():
            sensor.stop()
        gateway.destroy(20.0)
    _drain(display)
    done.set()
    reader.join(10)
    stage.tell(**_report(sensors, display, latencies), finished=True)
    if display is not None:
        display.close()


def _read(display: penstock.Subscriber | None, latencies: Latencies, done: threading.Event) -> None:
    while display is not None and not done.is_set():
        _take(display, latencies)


def _take(display: penstock.Subscriber, latencies: Latencies) -> None:
    batch = display.read_many(512, 0.2)
    now_ns = time.time_ns()
    for message in batch:
        latencies.add(now_ns - message.timestamp_ns)


def _drain(display: penstock.Subscriber | None) -> None:
    deadline = time.monotonic() + 10
    while display is not None and display.ledger.in_flight and time.monotonic() < deadline:
        time.sleep(0.02)


def _report(sensors: dict[str, Any], display: penstock.Subscriber | None, latencies: Latencies) -> dict[str, Any]:
    bus = {}
    if display is not None:
        ledger = display.ledger
        bus = {"delivered": ledger.delivered, "lost": ledger.lost, "balanced": ledger.balanced, **latencies.figures()}
    return {"published": {name: sensor.published for name, sensor in sensors.items()}, "bus": bus}
