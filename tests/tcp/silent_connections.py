"""Run by a test in another process (descriptor limits): so many connections that say nothing, until told to end."""

import resource
import socket
import sys


def main() -> None:
    port, count = int(sys.argv[1]), int(sys.argv[2])
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, count + 100), hard))
    held = []
    for _ in range(count):
        connection = socket.socket()
        connection.settimeout(60)
        connection.connect(("127.0.0.1", port))
        held.append(connection)
    print(len(held), flush=True)
    sys.stdin.readline()


main()
