"""docs/howto/edge.md: its file, run against a real MQTT server and an uplink that is not there at first."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from tests.gateway.conftest import eventually
from tests.gateway.test_mqtt import MOSQUITTO, Broker

paho = pytest.importorskip("paho.mqtt.client")
pytestmark = pytest.mark.skipif(MOSQUITTO is None, reason="mosquitto is not installed")
PAGE = Path(__file__).parents[2] / "docs" / "howto" / "edge.md"


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def test_the_device_of_the_page_loses_nothing_while_its_uplink_is_gone(tmp_path: Path) -> None:
    text = re.search(r"^```toml\n(.*?)^```", PAGE.read_text(), re.M | re.S)[1]  # type: ignore[index]
    assert len(text.splitlines()) <= 10
    (tmp_path / "device.toml").write_text(text)
    broker, port = Broker(tmp_path), free_port()
    environment = {**os.environ, "MQTT_PORT": str(broker.port), "UPLINK": f"http://127.0.0.1:{port}/in"}
    errors = tmp_path / "errors"
    posted: list[bytes] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            posted.append(self.rfile.read(int(self.headers["Content-Length"])))
            self.send_response(204)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    command = [sys.executable, "-m", "penstock", "run", "device.toml"]
    with errors.open("w") as target:
        process = subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=target, stderr=target)
    server = None
    try:
        eventually(lambda: "running" in errors.read_text())
        client = paho.Client(paho.CallbackAPIVersion.VERSION2)
        client.connect("127.0.0.1", broker.port)
        client.loop_start()
        # The first ones go to a session that may not be there yet: until one has reached the uplink's module.
        eventually(lambda: "failed in receive" in errors.read_text() or speak(client, b"probe"))
        wanted = [b"%d" % n for n in range(100)]
        for content in wanted:
            speak(client, content)
        client.publish("plant/boiler/humidity", b"kept back", 1).wait_for_publish(60)
        server = HTTPServer(("127.0.0.1", port), Handler)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        eventually(lambda: posted[-1:] == [b"99"])
        assert [content for content in dict.fromkeys(posted) if content != b"probe"] == wanted, "in order, none missing"
        client.disconnect()
        client.loop_stop()
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0, errors.read_text()
    finally:
        process.kill()
        process.wait()
        broker.stop()
        if server is not None:
            server.shutdown()
            server.server_close()


def speak(client: object, content: bytes) -> None:
    client.publish("plant/boiler/temperature", content, 1).wait_for_publish(60)  # type: ignore[attr-defined]
