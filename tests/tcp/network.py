"""Two machines in one: network namespaces joined by a pair of virtual cables, with loss by nftables and cuts by ip."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator

import pytest


def run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True, timeout=30)


class Network:
    """This process stays where it is; programs run at ``far``, which is 10.77.0.2 as seen from ``near`` (10.77.0.1)."""

    def __init__(self) -> None:
        self.near, self.far = f"pn{os.getpid()}a", f"pn{os.getpid()}b"
        self.address = "10.77.0.2"

    def __enter__(self) -> Network:
        try:
            for name in (self.near, self.far):
                run("ip", "netns", "add", name)
            run(
                "ip",
                "link",
                "add",
                "cable",
                "netns",
                self.near,
                "type",
                "veth",
                "peer",
                "name",
                "cable",
                "netns",
                self.far,
            )
            for name, address in ((self.near, "10.77.0.1/24"), (self.far, "10.77.0.2/24")):
                run("ip", "-n", name, "address", "add", address, "dev", "cable")
                run("ip", "-n", name, "link", "set", "lo", "up")
                run("ip", "-n", name, "link", "set", "cable", "up")
        except (subprocess.CalledProcessError, OSError):
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for name in (self.near, self.far):
            with contextlib.suppress(subprocess.CalledProcessError):
                run("ip", "netns", "delete", name)

    def lose(self, percent: int) -> None:
        """Drop so many packets of each hundred that arrive, on both sides."""
        for name in (self.near, self.far):
            for rule in (
                "add table ip loss",
                "add chain ip loss input { type filter hook input priority 0; }",
                f"add rule ip loss input iifname cable numgen random mod 100 < {percent} drop",
            ):
                run("ip", "netns", "exec", name, "nft", rule)

    def cut(self, down: bool) -> None:
        run("ip", "-n", self.far, "link", "set", "cable", "down" if down else "up")

    def program(self, where: str, text: str) -> subprocess.Popen[str]:
        command = ["ip", "netns", "exec", where, sys.executable, "-u", "-c", text]
        return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


@pytest.fixture
def network() -> Iterator[Network]:
    if os.geteuid() != 0:
        pytest.skip("network namespaces need root")
    if shutil.which("ip") is None or shutil.which("nft") is None:
        pytest.skip("needs the programs ip (iproute2) and nft (nftables)")
    made = Network()
    try:
        made.__enter__()
    except (subprocess.CalledProcessError, OSError) as error:
        pytest.skip(f"this kernel or container has no network namespaces: {getattr(error, 'stderr', error)}")
    yield made
    made.__exit__()
