"""A camera publishes numpy frames in shared memory; a second process shows rate and latency, without a copy.

    python examples/camera.py                 # both, for five seconds
    python examples/camera.py publish         # in one terminal
    python examples/camera.py watch           # in another
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time

import numpy

import penstock

CHANNEL = "shm:/examples/camera"
SHAPE = (480, 640, 3)


def publish(seconds: float, rate_hz: float) -> None:
    """Write frames straight into the channel's memory."""
    size = int(numpy.prod(SHAPE))
    with penstock.publisher(CHANNEL, slots=16, slot_size=size) as camera:
        deadline = time.monotonic() + seconds
        number = 0
        while time.monotonic() < deadline:
            with camera.reserve(size) as draft:
                frame = draft.array(SHAPE, "uint8")
                frame[:] = number % 256  # what a real camera would capture into it
                del frame  # no view may be left when the frame is published
            number += 1
            time.sleep(1 / rate_hz)
        print(f"camera: {number} frames published", flush=True)


def watch(seconds: float) -> None:
    """Look at each frame where it lies."""
    with penstock.subscriber(CHANNEL) as subscriber:
        deadline = time.monotonic() + seconds
        latencies_ns: list[int] = []
        began = time.monotonic()
        while (left := deadline - time.monotonic()) > 0:
            message = subscriber.read(min(left, 0.5))
            if message is None:
                continue
            latencies_ns.append(time.time_ns() - message.timestamp_ns)
            frame = message.array(SHAPE, "uint8")
            assert (frame == frame[0, 0, 0]).all(), "a torn frame"
            del frame, message
        rate = len(latencies_ns) / (time.monotonic() - began)
        median_us = sorted(latencies_ns)[len(latencies_ns) // 2] / 1000 if latencies_ns else float("nan")
        print(f"watcher: {len(latencies_ns)} frames, {rate:.1f} a second, median latency {median_us:.0f} us, "
              f"{subscriber.ledger.lost} lost", flush=True)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", nargs="?", choices=["publish", "watch", "both"], default="both")
    parser.add_argument("--seconds", type=float, default=5)
    parser.add_argument("--rate", type=float, default=60, help="frames a second")
    arguments = parser.parse_args()
    if arguments.part == "publish":
        publish(arguments.seconds, arguments.rate)
    elif arguments.part == "watch":
        watch(arguments.seconds)
    else:
        watcher = subprocess.Popen([sys.executable, __file__, "watch", "--seconds", str(arguments.seconds)])
        publish(arguments.seconds, arguments.rate)
        watcher.wait()


if __name__ == "__main__":
    main()
