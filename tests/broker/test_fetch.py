"""Range fetch and staging without native code."""

from __future__ import annotations

import subprocess
import sys

import pytest

from penstock.broker import Client, Server
from penstock.broker.fetch import RangeClient
from penstock.errors import RefusedError


def test_ranges_come_whole_and_in_order(server: Server, client: Client) -> None:
    client.publish_many("a.x", [b"%d" % i * 10 for i in range(500)])
    client.publish_many("b", [b"", b"y"])
    client.publish("a.z", b"last", ttl_s=1000)
    with RangeClient(port=server.port) as reader:
        assert (reader.first, reader.frontier) == (1, 504)
        found = [message for part in reader.ranges(1, 504, most_bytes=2000) for message in part]
        assert [message.position for message in found] == list(range(1, 504))
        assert [message.payload for message in found[:500]] == [b"%d" % i * 10 for i in range(500)]
        assert (found[502].topic, found[502].ordinal, found[502].payload) == ("a.z", 1, b"last")
        assert set(found[502].properties) == {"$expires_ns"}
        assert [m.position for part in reader.ranges(10, 20) for m in part] == list(range(10, 20))
        assert [m.topic for part in reader.ranges(1, 504, topics=["b"]) for m in part] == ["b", "b"]
        assert reader.fetch(504).next == 504


def test_columns_without_a_loop(server: Server, client: Client) -> None:
    pytest.importorskip("pyarrow")
    client.publish_many("t", [b"%d" % i for i in range(1000)])
    client.publish("u", b"p", ttl_s=1000)
    client.publish("u", b"")
    with RangeClient(port=server.port) as reader:
        table = reader.fetch(1).record_batch(["position", "topic", "ordinal", "size", "payload"])
        assert table.column("payload").to_pylist() == [*(b"%d" % i for i in range(1000)), b"p", b""]
        assert table.column("topic").to_pylist() == ["t"] * 1000 + ["u"] * 2
        assert table.column("position").to_pylist() == list(range(1, 1003))
        assert reader.fetch(2000).record_batch().num_rows == 0


def test_staging_becomes_visible_at_once_and_once(server: Server, client: Client) -> None:
    with RangeClient(port=server.port) as one, RangeClient(port=server.port) as two:
        assert one.stage("q-7.part-0", "out", [b"a", b"b"]) == 2
        assert two.stage("q-7.part-1", "out", [b"c"] * 5000) == 5000
        assert two.stage("q-7.part-1-failed", "out", [b"never"]) == 1
        assert one.frontier == 1
        assert one.commit("q-7", ["q-7.part-0", "q-7.part-1"]) == (1, 5002, False)
        assert two.commit("q-7", ["q-7.part-0", "q-7.part-1"]) == (1, 5002, True)
        two.abort("q-7.part-1-failed")
        assert one.frontier == 5003
        with pytest.raises(RefusedError, match="nothing is staged"):
            one.commit("q-8", ["missing"])
    assert client.statistics()["staged_bytes"] == 0


def test_no_native_code_is_loaded() -> None:
    code = "import sys, penstock.broker.fetch; assert not any('_core' in name or name == 'numpy' for name in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
