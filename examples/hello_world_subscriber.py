"""Hello world over TCP: prints what it hears.  python hello_world_subscriber.py [PORT [COUNT]]"""

import sys

from penstock import tcp


def main() -> None:
    port = int(sys.argv[1]) if len(sys.argv) > 1 else 1588
    count = int(sys.argv[2]) if len(sys.argv) > 2 else 0
    with tcp.Subscriber() as subscriber:
        subscriber.add_session("127.0.0.1", port)
        for message in subscriber:
            print(f"received {bytes(message).decode()!r} from {message.channel}", flush=True)
            count -= 1
            if count == 0:
                return


if __name__ == "__main__":
    main()
