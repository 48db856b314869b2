"""A state as one JSON object, as the API returns it and the page shows it. Pure functions."""

from __future__ import annotations

from typing import Any

from penstock.observe.rates import flow
from penstock.observe.topology import graph
from penstock.observe.watcher import Look, State, summary

__all__ = ["Changes", "handle_record", "state_record"]


def handle_record(look: Look) -> dict[str, Any]:
    """One handle: its ledger, its rates, the verdict."""
    block, ledger, latency = look.block, look.block.ledger, look.latency
    return {
        "key": "-".join(map(str, block.key)),
        "where": block.place, "channel": block.channel, "name": block.name, "name_cut": block.name_cut,
        "address": block.address, "room": block.room, "kind": block.kind, "pid": block.pid,
        "program": block.program, "state": block.state, "opened_ns": block.opened_ns,
        "messages": flow(block), "bytes": block.bytes,
        "matched": ledger.matched, "delivered": ledger.delivered, "dropped": dict(ledger.dropped),
        "dropped_count": block.dropped_count, "lost": block.lost, "expired": ledger.expired,
        "in_flight": block.in_flight, "redelivered": ledger.redelivered, "errors": block.errors,
        "depth": block.depth, "capacity": block.capacity, "peers": block.peers, "memory_bytes": block.memory_bytes,
        "lag": block.lag, "last_s": block.last_ns / 1e9 if block.last_ns else None, "internal": block.inside_gateway,
        "latency_us": block.latency_ns / 1e3 if block.latency_ns else None,
        "latency_p50_us": latency.p50_ns / 1e3 if latency else None,
        "latency_p99_us": latency.p99_ns / 1e3 if latency else None,
        "rate_hz": look.rate.messages_hz, "bytes_hz": look.rate.bytes_hz, "lost_hz": look.rate.lost_hz,
        "health": look.verdict.word, "reasons": list(look.verdict.reasons),
    }  # fmt: skip


def state_record(state: State, chosen: str = "") -> dict[str, Any]:
    """The whole state at one reading; if a node is ``chosen``, the graph shows only that node and its neighbours."""
    programs = {look.block.pid: look.block.program for look in state.looks}  # has a name for code in the line, too
    processes = [
        {"pid": p.pid, "program": p.program or programs.get(p.pid, ""), "command": p.command,
         "resident_bytes": p.resident_bytes, "threads": p.threads, "cores": round(state.processor.get(p.pid, 0.0), 3)}
        for p in state.processes.values()
    ]  # fmt: skip
    return {
        "time_s": state.time_ns / 1e9,
        "summary": summary(state),
        "handles": [handle_record(look) for look in state.looks],
        "processes": processes,
        "shared": state.shared,
        "graph": graph(state, chosen),
    }


class Changes:
    """The difference between two states for a page that has the earlier one: what changed, and the keys that are
    gone.
    """

    def __init__(self) -> None:
        self._sent: dict[str, dict[str, Any]] | None = None

    def of(self, record: dict[str, Any]) -> dict[str, Any]:
        """``{"state": ..., "whole": bool, "gone": [keys]}``: the first is complete, later ones contain only changes."""
        now = {handle["key"]: handle for handle in record["handles"]}
        before, self._sent = self._sent, now
        if before is None:
            return {"state": record, "whole": True, "gone": []}
        changed = [handle for key, handle in now.items() if _fixed(before.get(key)) != _fixed(handle)]
        gone = [key for key in before if key not in now]
        return {"state": {**record, "handles": changed}, "whole": False, "gone": gone}


def _fixed(handle: dict[str, Any] | None) -> dict[str, Any] | None:
    """The record without the idle time of an idle handle, which the page counts itself."""
    return {**handle, "reasons": []} if handle is not None and handle["health"] == "idle" else handle
