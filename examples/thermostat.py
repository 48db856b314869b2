"""A thermostat: two sensors, a controller that is a state machine, a display, and an alarm that comes late.

    python examples/thermostat.py

The sensors publish temperatures on a bus; the controller heats or rests, and warns (a delayed message to itself) when
heating takes too long; the display reads its queue in a thread of its own. Time is virtual: every run is the same.
"""

from __future__ import annotations

import struct
import threading
from typing import Any

from penstock.bus import Bus, DelayedMessage, QueueSubscriber, SlabAllocator, State, StateMachine, VirtualClock

TEMPERATURE, HEATER = 1, 2  # public
TOO_LONG = 5000  # private to the controller
WANTED, SLACK = 20.0, 0.5
READING = struct.Struct("<Bd")  # room, degrees


class Controller(StateMachine):
    """Rests until it is cold, heats until it is warm."""

    def __init__(self, bus: Bus, clock: VirtualClock) -> None:
        self.bus = bus
        self.working = State("working")
        self.resting = State("resting", self.working, on_message=self.when_resting)
        self.heating = State("heating", self.working, on_message=self.when_heating)
        self.heating.on_enter(self.start_heating)
        self.heating.on_exit(self.stop_heating)
        self.warnings = 0
        super().__init__(self.resting)
        self.subscriber = bus.subscribe(TEMPERATURE, kind="callback", handler=self)
        self.patience = DelayedMessage(self.subscriber, TOO_LONG, clock=clock)
        self.start()

    def when_resting(self, message: Any) -> State | None:
        return self.heating if READING.unpack(message)[1] < WANTED - SLACK else None

    def when_heating(self, message: Any) -> State | None:
        if message.id == TOO_LONG:
            self.warnings += 1
            return None
        return self.resting if READING.unpack(message)[1] > WANTED + SLACK else None

    def start_heating(self) -> None:
        self.bus.publish(b"on", HEATER)
        self.patience.start(60)

    def stop_heating(self) -> None:
        self.bus.publish(b"off", HEATER)
        self.patience.abort()


def show(message: Any) -> None:
    if message.id == HEATER:
        print("heater", bytes(message).decode())
    else:
        room, degrees = READING.unpack(message)
        print(f"room {room}: {degrees:.1f} degrees")


def display(queue: QueueSubscriber) -> None:
    for message in queue:  # until the bus is closed and the queue is empty
        show(message)


def main() -> None:
    clock = VirtualClock()
    bus = Bus("house", mode="direct")
    readings = SlabAllocator(READING.size, 64, name="readings")
    bus.add_allocator(readings)
    queue = bus.subscribe(TEMPERATURE, HEATER, depth=16, name="display")
    controller = Controller(bus, clock)
    screen = threading.Thread(target=display, args=(queue,))
    screen.start()
    degrees = 21.0
    for _minute in range(12):
        draft = bus.allocate(TEMPERATURE, READING.size, readings, timeout=1)
        READING.pack_into(draft, 0, 1, degrees)
        bus.publish(draft)
        clock.advance(30)
        degrees += 0.4 if controller.is_in(controller.heating) else -0.7
    bus.close()
    screen.join()
    print(f"{controller.warnings} warning(s); display {queue.ledger.delivered} of {queue.ledger.matched}")


if __name__ == "__main__":
    main()
