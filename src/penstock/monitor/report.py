"""A state as one JSON object, as the API returns it and the page shows it. Pure functions."""

from __future__ import annotations

from typing import Any

from penstock.observe.rates import flow
from penstock.observe.topology import graph, place_of
from penstock.observe.watcher import Look, State, summary

__all__ = ["handle_record", "state_record"]


def handle_record(look: Look) -> dict[str, Any]:
    """One handle: its ledger, its rates, the verdict."""
    block, ledger, latency = look.block, look.block.ledger, look.latency
    return {
        "key": f"{block.pid}-{block.index}-{block.taking}",
        "where": place_of(look), "name": block.name,
        "address": block.address, "room": block.room, "kind": block.kind, "pid": block.pid,
        "program": block.program, "state": block.state, "opened_ns": block.opened_ns,
        "messages": flow(block), "bytes": block.bytes,
        "matched": ledger.matched, "delivered": ledger.delivered, "dropped": dict(ledger.dropped),
        "dropped_count": block.dropped_count, "lost": block.lost, "expired": ledger.expired,
        "in_flight": block.in_flight, "redelivered": ledger.redelivered, "errors": block.errors,
        "depth": block.depth, "capacity": block.capacity, "peers": block.peers, "memory_bytes": block.memory_bytes,
        "lag": block.lag, "idle_s": block.idle_s,
        "latency_us": block.latency_ns / 1e3 if block.latency_ns else None,
        "latency_p50_us": latency.p50_ns / 1e3 if latency else None,
        "latency_p99_us": latency.p99_ns / 1e3 if latency else None,
        "rate_hz": look.rate.messages_hz, "bytes_hz": look.rate.bytes_hz, "lost_hz": look.rate.lost_hz,
        "health": look.verdict.word, "reasons": list(look.verdict.reasons),
    }  # fmt: skip


def state_record(state: State) -> dict[str, Any]:
    """The whole state of one look."""
    processes = [
        {"pid": p.pid, "command": p.command, "resident_bytes": p.resident_bytes, "threads": p.threads,
         "cores": round(state.processor.get(p.pid, 0.0), 3)}
        for p in state.processes.values()
    ]  # fmt: skip
    return {
        "time_s": state.time_ns / 1e9,
        "summary": summary(state),
        "handles": [handle_record(look) for look in state.looks],
        "processes": processes,
        "shared": state.shared,
        "graph": graph(state),
    }
