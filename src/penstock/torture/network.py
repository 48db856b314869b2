"""Machines in one: each is a network namespace with an address of its own, and nftables drops packets between them.

The scenario's process is the router, in a network namespace of its own too (``namespace`` gives the command for that):
every packet between two machines passes it. Nothing of this is seen outside, and all of it goes with the processes. The
scenario's own connections to the machines are never cut. One thread.
"""

from __future__ import annotations

import collections
import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Self

PROGRAMS = ("unshare", "nsenter", "ip", "nft")
FORWARD = Path("/proc/sys/net/ipv4/ip_forward")
RULES = """table ip torture {
  set cut { type ifname . ifname; }
  chain forward { type filter hook forward priority 0; iifname . oifname @cut drop; }
}"""
HOLD = "import sys; print(flush=True); sys.stdin.read()"  # keeps a namespace until its input ends


class Machine:
    """One machine; ``within`` is put before a command that runs there."""

    def __init__(self, name: str, address: str = "127.0.0.1", within: Iterable[str] = ()) -> None:
        self.name = name
        self.address = address
        self.within = list(within)


class Network:
    """The machines, and the connections that are cut at the moment."""

    def __init__(self) -> None:
        self._machines: list[Machine] = []
        self._holders: list[subprocess.Popen[bytes]] = []
        self._cut: collections.Counter[tuple[str, str]] = collections.Counter()

    def machine(self, name: str) -> Machine:
        """A new one. ``name`` is that of its network interface here: 15 letters at most."""
        holder = subprocess.Popen(
            ["unshare", "--net", sys.executable, "-c", HOLD], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        self._holders.append(holder)
        assert holder.stdout is not None
        holder.stdout.readline()  # it is in its namespace
        number = len(self._holders)
        here, there = f"10.77.{number}.1", f"10.77.{number}.2"
        within = ["nsenter", "--target", str(holder.pid), "--net", "--"]
        _run("ip", "link", "add", name, "type", "veth", "peer", "name", "cable", "netns", str(holder.pid))
        _run("ip", "address", "add", f"{here}/30", "dev", name)
        _run("ip", "link", "set", name, "up")
        for words in ("link set lo up", f"address add {there}/30 dev cable", "link set cable up"):
            _run(*within, "ip", *words.split())
        _run(*within, "ip", "route", "add", "default", "via", here)
        self._machines.append(Machine(name, there, within))
        return self._machines[-1]

    @contextlib.contextmanager
    def cut(self, pairs: Iterable[tuple[Machine, Machine]]) -> Iterator[None]:
        """Drop what the first of each pair sends to the second, until the block is left."""
        names = collections.Counter((one.name, other.name) for one, other in pairs)
        self._cut += names
        self._drop()
        try:
            yield
        finally:
            self._cut -= names
            self._drop()

    def _drop(self) -> None:
        lines = ["flush set ip torture cut"]
        lines += [f"add element ip torture cut {{ {one} . {other} }}" for one, other in self._cut]
        _run("nft", "-f", "-", text="\n".join(lines))

    def __enter__(self) -> Self:
        _run("ip", "link", "set", "lo", "up")
        FORWARD.write_text("1")
        _run("nft", "-f", "-", text=RULES)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for holder in self._holders:
            holder.kill()
            holder.communicate()


def namespace() -> tuple[list[str], str]:
    """The command that runs another one in a network namespace where ``Network`` works; where there is none, why."""
    missing = [program for program in PROGRAMS if shutil.which(program) is None]
    if missing:
        return [], f"no program {', '.join(missing)}"
    ways = [["unshare", "--net"], ["unshare", "--user", "--map-root-user", "--net"]]
    reason = ""
    for way in ways if os.getuid() == 0 else ways[1:]:
        probe = [*way, sys.executable, "-m", "penstock.torture.network"]
        done = subprocess.run(probe, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)
        if done.returncode == 0:
            return way, ""
        reason = (done.stderr.strip() or f"code {done.returncode}").splitlines()[-1]
    return [], reason


def _run(*command: str, text: str = "") -> None:
    done = subprocess.run(command, capture_output=True, text=True, input=text, check=False)
    if done.returncode != 0:
        raise OSError(f"{' '.join(command)}: {done.stderr.strip()}")


if __name__ == "__main__":  # the probe
    with Network() as network, network.cut([(network.machine("one"), network.machine("other"))]):
        pass
