"""Machines in network namespaces, as ``penstock torture replica`` has them, are cut off in each direction."""

from __future__ import annotations

import subprocess
import sys

import pytest

from penstock.torture import network

CUT = """
import socket, subprocess, sys
from penstock.torture.network import Network

SERVER = "import socket\\ns = socket.create_server((sys.argv[1], 0)); print(s.getsockname()[1], flush=True)\\nwhile True: s.accept()[0].send(b'.')"
ASK = "import socket; print(socket.create_connection((sys.argv[1], int(sys.argv[2])), float(sys.argv[3])).recv(1))"

def ask(machine, port, seconds):
    command = [*machine.within, sys.executable, "-c", "import sys; " + ASK, one.address, str(port), str(seconds)]
    return subprocess.run(command, capture_output=True).returncode == 0

with Network() as network:
    one, other, third = network.machine("one"), network.machine("other"), network.machine("third")
    server = subprocess.Popen([*one.within, sys.executable, "-c", "import sys; " + SERVER, one.address], stdout=subprocess.PIPE)
    port = int(server.stdout.readline())
    try:
        assert ask(other, port, 60)
        with network.cut([(one, other)]):
            assert not ask(other, port, 0.2)
            with network.cut([(other, one)]):
                assert not ask(other, port, 0.2) and ask(third, port, 60)
            assert not ask(other, port, 0.2)
            socket.create_connection((one.address, port), 60).close()
        assert ask(other, port, 60)
    finally:
        server.kill()
"""


def test_machines_are_cut_off_in_each_direction() -> None:
    way, reason = network.namespace()
    if reason:
        pytest.skip(f"machines cannot be cut off here: {reason}")
    done = subprocess.run([*way, sys.executable, "-c", CUT], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
