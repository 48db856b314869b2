"""Receives as fast as it can and tells how fast that was, each second.  python performance_subscriber.py [PORT]"""

import sys
import time

import penstock
from penstock import tcp


def main() -> None:
    port = int(sys.argv[1]) if len(sys.argv) > 1 else 1588
    with tcp.Subscriber() as subscriber:
        subscriber.add_session("127.0.0.1", port, max_reconnects=0 if len(sys.argv) > 1 else -1)
        messages = total = 0
        began = time.monotonic()
        try:
            while True:
                batch = subscriber.read_many(4096, timeout=1)
                messages += len(batch)
                total += batch.total_bytes
                if (took := time.monotonic() - began) >= 1:
                    lost = subscriber.ledger.lost
                    print(f"{messages / took:,.0f} messages/s, {total / took / 1e6:,.1f} MB/s, {lost} lost", flush=True)
                    messages = total = 0
                    began = time.monotonic()
        except penstock.ClosedError:
            print(f"the publisher has gone; {subscriber.ledger.delivered} messages in all", flush=True)


if __name__ == "__main__":
    main()
