"""Ask and answer: a planner that is asked for routes, first from a thread, then from asyncio.

Run it as it is; in real life server and client are in two processes (shm:), on two machines (tcp://), or the request
waits on disk until a server is there (broker://).
"""

from __future__ import annotations

import asyncio

import penstock


def plan(payload: bytes) -> bytes:
    """The answer to one request. What it raises reaches the client as text."""
    goal = payload.decode()
    if not goal:
        raise ValueError("no goal given")
    return f"north, then east to the {goal}".encode()


async def many(client: penstock.calls.Client) -> None:
    answers = await asyncio.gather(*(client.call_async(goal, timeout=10.0) for goal in (b"dock", b"gate", b"shed")))
    for answer in answers:
        print("awaited:", answer.decode())


def main() -> None:
    with penstock.server("shm:/example/plan", plan), penstock.client("shm:/example/plan") as client:
        print("called:", client.call(b"dock", timeout=10.0).decode())
        try:
            client.call(b"", timeout=10.0)
        except penstock.CallFailed as error:
            print("failed:", error)
        asyncio.run(many(client))
        print("calls:", client.ledger.matched, "answered:", client.ledger.delivered, "lost:", client.ledger.lost)
    with penstock.client("shm:/example/plan") as client:
        try:
            client.call(b"dock")
        except penstock.PeerGone as error:
            print("gone:", error)


if __name__ == "__main__":
    main()
