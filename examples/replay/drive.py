"""A recorded drive, replayed twice into a gateway: equal. Then a rule finds a defect, and the inputs that it needs.

Run it: ``python examples/replay/drive.py``. The same by commands: docs/howto/replay.md.
"""

from __future__ import annotations

import json
import random
import tempfile
from pathlib import Path

from penstock.journal import Entry, Journal
from penstock.replay import GatewayTarget, Output, Rule, Script, first_break, first_difference, replay, shrink

HERE = Path(__file__).parent
BEGIN_NS = 1_700_000_000_000_000_000


def record(folder: Path) -> None:
    """A minute of a driver's orders, as ``penstock record shm:/wanted shm:/boost shm:/gear`` would store them."""
    chance = random.Random(4)
    entries = []
    for moment in sorted(chance.uniform(0, 60) for _ in range(400)):
        topic = chance.choices(("wanted", "gear", "boost"), (10, 3, 1))[0]
        order = {"speed": chance.randrange(130)} if topic == "wanted" else {}
        entries.append(Entry(topic, json.dumps(order).encode(), timestamp_ns=BEGIN_NS + round(moment * 1e9)))
    with Journal(folder) as journal:
        journal.commit(entries)


def main() -> None:
    """Record, replay twice, compare, look for the defect."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        record(folder / "drive")
        target = GatewayTarget(HERE / "cruise.toml")
        with Script(folder / "drive") as script:
            sources = target.sources(script.topics, script.story.addresses, None)
            times_ns = script.times_ns(sources)
            for out in ("out1", "out2"):
                with Output(folder / out) as output:
                    told = {"on_published": output.published, "on_left": output.left}
                    report = replay(target, script.inputs(sources), times_ns, **told)
                print(f"{out}: {report.inputs} inputs, {output.messages} messages in the output")
            difference, equal = first_difference(folder / "out1", folder / "out2")
            print("equal" if difference is None else "different", "in", equal, "messages")

            rule = Rule("value.speed <= 80", ["to.engine"])
            found = first_break(target, script.inputs(sources), times_ns, rule)
            assert found is not None
            print(f"broken by {found.shown.payload.decode()} after {found.inputs} inputs")
            inputs = list(script.inputs(sources))
            needed, _, _ = shrink(target, inputs, times_ns, rule, found)
            for one in needed:
                seconds = (one.message.timestamp_ns - BEGIN_NS) / 1e9
                print(f"needed: {seconds:.3f} s {one.message.channel} {bytes(one.message).decode()}")


if __name__ == "__main__":
    main()
