"""Sends as fast as it can and tells how fast that was.  python performance_publisher.py [PORT [BYTES [SECONDS]]]"""

import sys
import time

from penstock import tcp


def main() -> None:
    port, size, seconds = (
        int(sys.argv[i]) if len(sys.argv) > i else default for i, default in ((1, 1588), (2, 64), (3, 10))
    )
    with tcp.Publisher(port) as publisher:
        print(f"publishing at port {publisher.port}", flush=True)
        publisher.wait_ready()
        batch = [bytes(size)] * max(1, 65536 // max(1, size))
        began = time.monotonic()
        sent = 0
        while time.monotonic() - began < seconds:
            sent += publisher.publish_many(batch)
        took = time.monotonic() - began
        print(f"{sent / took:,.0f} messages/s, {sent * size / took / 1e6:,.1f} MB/s", flush=True)


if __name__ == "__main__":
    main()
