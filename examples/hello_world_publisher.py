"""Hello world over TCP: offers a greeting at a port twice a second.  python hello_world_publisher.py [PORT [COUNT]]"""

import itertools
import sys
import time

from penstock import tcp


def main() -> None:
    port = int(sys.argv[1]) if len(sys.argv) > 1 else 1588
    count = int(sys.argv[2]) if len(sys.argv) > 2 else 0
    with tcp.Publisher(port) as publisher:
        print(f"publishing at port {publisher.port}", flush=True)
        publisher.wait_ready()
        for _ in range(count) if count else itertools.count():
            publisher.publish(b"Hello World")
            time.sleep(0.5)


if __name__ == "__main__":
    main()
