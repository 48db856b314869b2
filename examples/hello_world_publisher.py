"""Hello world over TCP: offers a greeting at a port twice a second.  python hello_world_publisher.py [PORT [COUNT]]"""

import sys
import time

from penstock import tcp


def main() -> None:
    port = int(sys.argv[1]) if len(sys.argv) > 1 else 1588
    count = int(sys.argv[2]) if len(sys.argv) > 2 else 0
    with tcp.Publisher(port) as publisher:
        print(f"publishing at port {publisher.port}", flush=True)
        while True:
            publisher.publish(b"Hello World")
            if count and publisher.ledger.matched >= count:
                return
            time.sleep(0.5 if not count else 0.01)


if __name__ == "__main__":
    main()
