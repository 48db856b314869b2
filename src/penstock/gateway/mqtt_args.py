"""The args of the MQTT modules, the client that is made of them, and how it publishes.

They are checked before anything runs: an argument that the client cannot use would end the client's own thread,
unnoticed.
"""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from penstock._core.gateway import GatewayMessage
from penstock.gateway.module import options

COMMON = {"host": "127.0.0.1", "port": 1883, "client_id": None, "username": None, "password": None, "tls": None,
          "keepalive_s": 60, "will": None, "qos": 1}  # fmt: skip
WILL: dict[str, Any] = {"topic": "", "payload": "", "qos": 0, "retain": False}
_TOPIC = re.compile(r"[^+#\0]+")  # a topic without wildcards
_TOPICS = re.compile(r"(?:(?:\+|[^+#\0/]*)/)*(?:#|\+|[^+#\0/]+|(?<=/))")


def checked(args: Any, **more: Any) -> dict[str, Any]:
    """The defaults (COMMON, and ``more`` for one module), overridden by ``args``."""
    given = options(args, **COMMON, **more)
    if not 1 <= given["port"] <= 65535 or not given["host"]:
        raise ValueError("host must not be empty, and port must be 1 to 65535")
    if "@" in given["host"]:  # what stands before it is a secret, which nothing repeats
        raise ValueError("host must be only a host: give username and password as separate args")
    if not 0 <= given["keepalive_s"] <= 65535:
        raise ValueError(f"keepalive_s must be 0 to 65535, not {given['keepalive_s']}")
    if given["qos"] not in (0, 1):
        raise ValueError(f"qos must be 0 or 1, not {given['qos']!r}")
    for name in ("client_id", "username", "password"):
        if not isinstance(given[name], str | None):
            raise ValueError(f"{name} must be a text or null")  # it may be a secret
    if given["password"] is not None and given["username"] is None:
        raise ValueError("password needs a username")
    if isinstance(given["tls"], str) and not Path(given["tls"]).is_file():
        raise ValueError(f"tls: there is no file {given['tls']!r}")
    if not isinstance(given["tls"], str | bool | None):
        raise ValueError(f"tls must be true, the path of an authority's certificate, or null, not {given['tls']!r}")
    if not given.get("timeout_s", 1) > 0:
        raise ValueError(f"timeout_s must be above 0, not {given['timeout_s']}")
    if given["will"] is not None:
        _check_will(given["will"])
    _check_topics(given)
    return given


def _check_will(will: Any) -> None:
    try:
        given = options(will, **WILL)
    except ValueError as error:
        raise ValueError(f"will: {error}") from None
    if not _TOPIC.fullmatch(given["topic"]) or given["qos"] not in (0, 1):
        raise ValueError("will needs a topic without + and #, and a qos of 0 or 1")


def _check_topics(given: dict[str, Any]) -> None:
    if "topic" in given and not _TOPIC.fullmatch(given["topic"]):
        raise ValueError(f"topic must be a topic to publish to, without + and #, not {given['topic']!r}")
    if given.get("topics") == []:
        raise ValueError("topics is empty")
    for topic in given.get("topics", ()):
        if not isinstance(topic, str) or not _TOPICS.fullmatch(topic):
            raise ValueError(f"topics: {topic!r} is not a topic filter: + is one level, # at the end the rest")


def client_of(given: dict[str, Any], client_id: str, clean: bool, **more: Any) -> Any:
    """A client with these args; ``more`` is passed to the library's constructor."""
    from paho.mqtt import client as paho
    from paho.mqtt.enums import CallbackAPIVersion

    client = paho.Client(CallbackAPIVersion.VERSION2, client_id, clean_session=clean, **more)
    if given["username"] is not None:
        client.username_pw_set(given["username"], given["password"])
    if given["tls"] is not None and given["tls"] is not False:
        client.tls_set(ca_certs=given["tls"] if isinstance(given["tls"], str) else None)
    if given["will"] is not None:
        client.will_set(**given["will"])
    client.reconnect_delay_set(1, 30)
    return client


def publish_all(
    client: Any, given: dict[str, Any], messages: Sequence[GatewayMessage]
) -> list[tuple[Exception, GatewayMessage]]:
    """Publish messages together and wait for the server's confirmations; returns those that failed."""
    sent: list[tuple[GatewayMessage, Any]] = []
    failures: list[tuple[Exception, GatewayMessage]] = []
    for message in messages:
        topic = re.sub(r"{(.*?)}", lambda m, p=message.properties: p.get(m[1], "-"), given["topic"])  # type: ignore[misc]
        try:
            sent.append((message, client.publish(topic, bytes(message), given["qos"], given["retain"])))
        except ValueError as error:  # no topic to publish to, or too large
            failures.append((error, message))
    end = time.monotonic() + given["timeout_s"]
    for message, info in sent:
        try:
            if given["qos"]:
                info.wait_for_publish(max(0.001, end - time.monotonic()))
            if not info.is_published() and given["qos"]:  # raises if the connection is lost
                where = f"{given['host']}:{given['port']}"
                raise TimeoutError(f"{where} has not confirmed a message in {given['timeout_s']} s")
        except (ValueError, RuntimeError, TimeoutError) as error:
            failures.append((error, message))
    return failures
