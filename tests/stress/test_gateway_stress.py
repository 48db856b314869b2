"""A gateway under change: modules and links come and go at random while sources flood it; the books must balance."""

from __future__ import annotations

import random
import threading
from collections import defaultdict

from tests.gateway.conftest import eventually

from penstock.gateway import DrainError, Gateway, GatewayMessage, Module, QueueOptions

CHANGES = 400


class Flooder(Module):
    """Publishes numbers on a thread of its own until it is stopped."""

    def start(self) -> None:
        self.stopping = threading.Event()
        self.thread = threading.Thread(target=self.run)
        self.thread.start()

    def run(self) -> None:
        number = 0
        while not self.stopping.is_set():
            self.publish(b"%s %d" % (self.name.encode(), number))
            number += 1

    def stop(self) -> None:
        self.stopping.set()
        self.thread.join()


class Checker(Module):
    """Each source's numbers must rise; passes every tenth message on, so that cycles arise."""

    def __init__(self) -> None:
        self.last: dict[bytes, int] = defaultdict(lambda: -1)
        self.wrong: list[bytes] = []
        self.count = 0

    def receive(self, message: GatewayMessage) -> None:
        self.count += 1
        if message.channel and message.channel.startswith("flood"):
            name, number = bytes(message).split()
            if int(number) <= self.last[name]:
                self.wrong.append(bytes(message))
            self.last[name] = int(number)
        if self.count % 10 == 0:
            self.broker.publish(self, message)


def test_a_gateway_under_change_keeps_order_and_balances_its_books(seed: int) -> None:
    chance = random.Random(seed)
    gateway = Gateway(cycle_timeout_s=0.05)
    seen: list[Checker] = []
    queues = []
    names: dict[str, str] = {}
    numbers = iter(range(1_000_000))

    def add(kind: str) -> None:
        name = f"{kind}-{next(numbers)}"
        options = QueueOptions(depth=chance.choice((1, 8, 256)))
        gateway.add_module(name, Flooder if kind == "flood" else Checker, queue=options)
        names[name] = kind
        worker = gateway.broker.worker_of(gateway.module(name))
        queues.append(worker.queue)
        if kind == "check":
            seen.append(gateway.module(name))

    def remove() -> None:
        name = chance.choice(list(names))
        try:
            gateway.remove_module(name, drain=chance.random() < 0.7, timeout=30)
        except DrainError:
            return
        del names[name]

    def link() -> None:
        ends = {line.ends for line in gateway.links()}
        source, sink = chance.choice([*names, "*"]), chance.choice(list(names))
        if (source, sink) in ends:
            gateway.remove_link(source, sink)
        elif sink != source:
            gateway.add_link(source, sink)

    gateway.start()
    for kind in ("flood", "flood", "check", "check", "check"):
        add(kind)
    for _ in range(CHANGES):
        action = chance.random()
        if action < 0.15 and len(names) < 9:
            add(chance.choice(("flood", "check", "check")))
        elif action < 0.25 and len(names) > 4:
            remove()
        else:
            link()
    gateway.destroy(timeout=30)
    assert [module.wrong for module in seen if module.wrong] == []
    assert sum(module.count for module in seen) > 0
    for queue in queues:
        eventually(lambda queue=queue: queue.ledger.balanced and queue.ledger.in_flight == 0)
