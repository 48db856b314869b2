"""Actions of the page, when the monitor was started with ``--allow-actions``: on queues of brokers on this machine.

Each action finds the broker's port by the process that counts the queue, and connects as any client does, so that the
broker's permissions apply here too. Any thread.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from penstock.errors import InvalidArgument, RefusedError, nearest

__all__ = ["ACTIONS", "act"]


def act(name: str, arguments: Mapping[str, Any]) -> str:
    """Carry out an action and say what was done; ``InvalidArgument`` for an unknown action or a wrong argument."""
    if name not in ACTIONS:
        raise InvalidArgument(f"there is no action {name!r}; {nearest(name, ACTIONS)}")
    queue, pid = arguments.get("queue"), arguments.get("pid")
    if not isinstance(queue, str) or not isinstance(pid, int):
        raise InvalidArgument("an action needs the queue's name and the pid of its broker")
    return ACTIONS[name](queue, pid)


def purge(queue: str, pid: int) -> str:
    """Drop all messages of the queue."""
    return f"{_ask(pid, queue, 'purge')} messages of {queue} were dropped"


def redrive(queue: str, pid: int) -> str:
    """Put the queue's dead letters back into it."""
    return f"{_ask(pid, queue, 'redrive')} dead letters went back to {queue}"


def pause(queue: str, pid: int) -> str:
    """Stop delivery from the queue until it is resumed; messages published meanwhile wait on disk."""
    _ask(pid, queue, "pause")
    return f"{queue} is paused: its messages wait until it is resumed"


def resume(queue: str, pid: int) -> str:
    """Resume delivery from the queue."""
    _ask(pid, queue, "resume")
    return f"{queue} hands out messages again"


ACTIONS: dict[str, Callable[[str, int], str]] = {
    "purge": purge,
    "redrive": redrive,
    "pause": pause,
    "resume": resume,
}


def _ask(pid: int, queue: str, verb: str) -> int:
    from penstock.broker import Client

    problem: Exception | None = None
    # A broker's process may listen on other ports too: try each until one knows the queue.
    for port in ports(pid):
        try:
            with Client("127.0.0.1", port, timeout=5.0, reconnect=False) as client:
                if any(known["queue"] == queue for known in client.queues()):
                    return int(getattr(client, verb)(queue) or 0)
        except Exception as error:  # what listens there may speak another protocol
            problem = error
    raise RefusedError(
        f"process {pid} has no queue {queue!r} that can be reached" + (f": {problem}" if problem else "")
    )


def ports(pid: int) -> Iterator[int]:
    """The TCP ports on which a process listens."""
    # Linux lists a process's descriptors as socket inodes, and the listening ports (state 0A) by the same inodes.
    inodes = set()
    try:
        for descriptor in Path(f"/proc/{pid}/fd").iterdir():
            try:
                target = os.readlink(descriptor)
            except OSError:  # closed meanwhile
                continue
            if target.startswith("socket:["):
                inodes.add(target[8:-1])
        lines = Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]
    except OSError:
        return
    for line in lines:
        fields = line.split()
        if fields[3] == "0A" and fields[9] in inodes:
            yield int(fields[1].rpartition(":")[2], 16)
