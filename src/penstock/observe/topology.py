"""The graph of publishers, channels and subscribers. A pure function of the watcher's state.

Nodes are channels (an address) and what uses them (publishers, subscribers, queues, modules, pipelines), one node
for all handles of one kind that one process has on one channel. Edges point the way messages go; a gateway's links and
a bridge are edges.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from penstock.address import ROOMS
from penstock.observe.memory import TAIL
from penstock.observe.rates import PRODUCERS, flow
from penstock.observe.snapshot import Key
from penstock.observe.watcher import Look, State

__all__ = ["graph"]

#: What one drawing holds, and how many users of one kind a channel has before they share one node.
MAX_NODES = 60
MAX_USERS = 5

#: A node with many handles has the health of the worst; "idle" comes last, since one idle handle among others is fine.
_WORST_FIRST = ("books", "stuck", "losing", "late", "ok", "idle")
_TROUBLE = {word: rank for rank, word in enumerate(_WORST_FIRST[:4])}

#: Kinds that are the channel itself, not a user of it.
PLACES = ("bus", "channel", "journal", "writer", "broker", "gateway")
ARROW, SOURCE = "->", "<-"


@dataclass(slots=True)
class _Node:
    id: str
    type: str
    label: str
    room: str
    detail: str = ""
    rate_hz: float = 0.0
    messages: int = 0
    lost: int = 0
    health: str = "idle"
    reasons: list[str] = field(default_factory=list)
    pids: set[int] = field(default_factory=set)
    handles: int = 0
    places: set[str] = field(default_factory=set)  #: the channels of its handles, by which it is chosen too
    members: int = 0  #: how many nodes were joined into this one

    def add_node(self, other: _Node) -> None:
        """Join another node into this one; its users have the same channel."""
        self.handles += other.handles
        self.rate_hz += other.rate_hz
        self.messages += other.messages
        self.lost += other.lost
        self.pids |= other.pids
        self.places |= other.places
        self.reasons += other.reasons
        if _WORST_FIRST.index(other.health) < _WORST_FIRST.index(self.health):
            self.health = other.health

    def add_handle(self, look: Look) -> None:
        """Count one more handle into this node."""
        first = self.handles == 0
        self.handles += 1
        self.rate_hz += look.rate.messages_hz
        self.messages += flow(look.block)
        self.lost += look.block.lost
        self.pids.add(look.block.pid)
        self.places.add(look.block.channel)
        self.reasons += look.verdict.reasons
        if first or _WORST_FIRST.index(look.verdict.word) < _WORST_FIRST.index(self.health):
            self.health = look.verdict.word


@dataclass(slots=True)
class _Edge:
    start: str
    end: str
    rate_hz: float = 0.0
    bytes_hz: float = 0.0
    lost_hz: float = 0.0
    health: str = "idle"

    def add(self, rate_hz: float, bytes_hz: float, lost_hz: float, health: str) -> None:
        self.rate_hz += rate_hz
        self.bytes_hz += bytes_hz
        self.lost_hz += lost_hz
        if _WORST_FIRST.index(health) < _WORST_FIRST.index(self.health):
            self.health = health


def graph(state: State, chosen: str = "") -> dict[str, Any]:
    """``{"nodes": [...], "edges": [...], "left_out": n}`` for the page.

    Of the node ``chosen`` and its neighbours, or of all. Of too many, those in trouble and the busiest are kept, each
    with its neighbours, and a channel with all its users, so that no channel appears to have no source.
    """
    nodes: dict[str, _Node] = {}
    edges: dict[tuple[str, str], _Edge] = {}
    inside = _add_gateways(state, nodes, edges)
    # A broker's own journal is part of the broker: what it stores is shown by topics and queues.
    brokers = {look.block.pid for look in state.looks if (look.block.room, look.block.kind) == ("broker", "broker")}
    rest = [
        look
        for look in state.looks
        if look.block.key not in inside and not (look.block.kind == "writer" and look.block.pid in brokers)
    ]
    # A broker is shown by its topics and queues: as a place it would swallow all of them into one node.
    places = {look.block.place for look in rest if look.block.kind in PLACES and look.block.kind != "broker"}
    for look in rest:
        if look.block.room == "broker" and look.block.kind == "queue" and not look.block.address:
            _queue_node(look.block.name, nodes).add_handle(look)
        elif look.block.kind == TAIL:
            continue  # a viewer's tail is no part of the watched programs
        elif ARROW in look.block.name and not look.block.name_cut:
            _add_link(look, nodes, edges)
        elif look.block.kind in ("broker", "links"):
            continue  # other nodes already show it
        elif look.block.kind in PLACES:
            _channel_node(look.block.place, look, nodes).add_handle(look)
        elif look.block.kind == "pipeline":
            _add_pipeline(look, places, nodes, edges)
        elif look.block.kind == "module":
            _module_node(look.block.name, look, nodes).add_handle(look)
        else:
            _add_handle(look, places, nodes, edges)
    _sum_channels(nodes, edges)
    total = len(nodes)
    _fold_users(nodes, edges)
    kept = _choose(nodes, edges, chosen)
    return {
        "nodes": [_node_record(nodes[id_]) for id_ in kept],
        "edges": [_edge_record(edge) for edge in edges.values() if edge.start in kept and edge.end in kept],
        "left_out": total - sum(max(1, nodes[id_].members) for id_ in kept),
    }


def _fold_users(nodes: dict[str, _Node], edges: dict[tuple[str, str], _Edge]) -> None:
    """Merge users of one kind with the same single channel into one node, if there are many."""
    ends: dict[str, list[_Edge]] = {}
    for edge in edges.values():
        ends.setdefault(edge.start, []).append(edge)
        ends.setdefault(edge.end, []).append(edge)
    alike: dict[tuple[str, bool, str], list[_Node]] = {}
    for node in nodes.values():
        if node.type in PLACES or node.type in ("module", "pipeline", "queue") or len(ends.get(node.id, ())) != 1:
            continue
        edge = ends[node.id][0]
        reads = edge.end == node.id
        alike.setdefault((node.type, reads, edge.start if reads else edge.end), []).append(node)
    for (type_, reads, channel), members in alike.items():
        if len(members) <= MAX_USERS:
            continue
        joined = _Node(f"{type_}s of {channel}", type_, f"{len(members)} {type_}s", members[0].room)
        joined.members = len(members)
        edge = _Edge(channel, joined.id) if reads else _Edge(joined.id, channel)
        for node in sorted(members, key=lambda node: _WORST_FIRST.index(node.health)):
            joined.add_node(node)
            del nodes[node.id]
            own = edges.pop((node.id, channel), None) or edges.pop((channel, node.id))
            edge.add(own.rate_hz, own.bytes_hz, own.lost_hz, own.health)
        nodes[joined.id] = joined
        edges[edge.start, edge.end] = edge


def _choose(nodes: dict[str, _Node], edges: dict[tuple[str, str], _Edge], chosen: str) -> set[str]:
    """The nodes to draw, at most ``MAX_NODES``."""
    around: dict[str, set[str]] = {id_: set() for id_ in nodes}
    for edge in edges.values():
        around[edge.start].add(edge.end)
        around[edge.end].add(edge.start)
    if chosen:
        # A queue or module can be chosen by its place too. Nothing is drawn for a node that is gone.
        ids = [chosen] if chosen in nodes else [id_ for id_ in nodes if chosen in nodes[id_].places][:MAX_NODES]
        near = {other for id_ in ids for other in around[id_]}.difference(ids)
        return {*ids, *_busiest(near, nodes, MAX_NODES - len(ids))}
    if len(nodes) <= MAX_NODES:
        return set(nodes)
    kept: set[str] = set()
    order = sorted(nodes.values(), key=lambda node: (_TROUBLE.get(node.health, 9), -node.rate_hz, node.id))
    # Idle boxes do not fill the space that is left, unless everything is idle.
    for node in [node for node in order if node.health in _TROUBLE or node.rate_hz > 0] or order:
        together = {node.id, *around[node.id]}
        whole = together.union(*(around[id_] for id_ in together if nodes[id_].type == "channel"))
        if len(whole) <= MAX_NODES:
            together = whole
        if len(kept | together) <= MAX_NODES:
            kept |= together
    return kept or set(_busiest(set(nodes), nodes, MAX_NODES))


def _busiest(ids: set[str], nodes: dict[str, _Node], most: int) -> list[str]:
    return sorted(ids, key=lambda id_: (_TROUBLE.get(nodes[id_].health, 9), -nodes[id_].rate_hz, id_))[:most]


def _add_gateways(state: State, nodes: dict[str, _Node], edges: dict[tuple[str, str], _Edge]) -> set[Key]:
    """Add gateways: modules as nodes, links as edges, addresses that a gateway reaches as channels. Returns the keys
    of all blocks that need no node of their own: these, and the gateway's own bus and publishers, which count twice."""
    used: set[Key] = set()
    owners = {look.block.pid for look in state.looks if look.block.room == "gateway"}
    reached: set[tuple[int, str]] = set()
    for look in state.looks:
        block = look.block
        if block.room != "gateway" or block.kind not in ("module", "source", "link"):
            continue
        used.add(block.key)
        if block.kind == "link" and block.name_cut:
            continue  # it is not known which two modules it links
        if block.kind != "link":
            node = _link_end(block.name, block.pid, nodes)
            if node.type == "module":
                node.add_handle(look)
            else:
                reached.add((block.pid, node.id))
        else:
            start, _, end = (part.strip() for part in block.name.partition(ARROW))
            _add_to_edge(edges, _link_end(start, block.pid, nodes).id, _link_end(end, block.pid, nodes).id, look)
    for look in state.looks:
        block = look.block
        if block.pid in owners and (
            (block.kind in PRODUCERS and (block.pid, block.address.partition("?")[0]) in reached)
            or block.inside_gateway
        ):
            used.add(block.key)
    return used


def _link_end(name: str, pid: int, nodes: dict[str, _Node]) -> _Node:
    """The node at the end of a gateway's link: a channel if the name is an address, else a module of that process."""
    scheme, colon, _ = name.partition(":")
    if colon and scheme in ROOMS:
        bare = name.partition("?")[0]
        return nodes.setdefault(bare, _Node(bare, "channel", bare, scheme))
    key = f"module {pid} {name}"
    return nodes.setdefault(key, _Node(key, "module", name, "gateway", f"module {pid}"))


def _channel_node(where: str, look: Look, nodes: dict[str, _Node]) -> _Node:
    return nodes.setdefault(where, _Node(where, "channel", where, look.block.room))


def _module_node(name: str, look: Look, nodes: dict[str, _Node]) -> _Node:
    kind = look.block.kind if look.block.kind in ("module", "pipeline") else "module"
    return nodes.setdefault(name, _Node(name, kind, name, look.block.room, look.block.program))


def _add_pipeline(
    look: Look, places: set[str], nodes: dict[str, _Node], edges: dict[tuple[str, str], _Edge]
) -> None:
    """Add a pipeline; one named ``NAME <- SOURCE`` gets an edge from its source."""
    whole = look.block.name
    name, source = (part.strip() for part in ((whole, "") if look.block.name_cut else whole.partition(SOURCE)[::2]))
    node = _module_node(name, look, nodes)
    node.add_handle(look)
    if source:
        if source not in places:
            nodes.setdefault(source, _Node(source, "channel", source, source.partition(":")[0]))
        _add_to_edge(edges, source, node.id, look)


def _queue_node(name: str, nodes: dict[str, _Node]) -> _Node:
    return nodes.setdefault(f"queue {name}", _Node(f"queue {name}", "queue", name, "broker", "queue"))


def _add_handle(
    look: Look, places: set[str], nodes: dict[str, _Node], edges: dict[tuple[str, str], _Edge]
) -> None:
    block = look.block
    where = look.block.place
    bare = look.block.channel
    queue = "" if block.name_cut or block.kind != "subscriber" else where.partition("?queue=")[2]
    parent = next((place for place in places if bare.startswith((place + "/", place + "#"))), bare)
    # Which topics fill a queue is known only if its consumer names them.
    known = not (queue and bare.endswith("/"))
    channel_id = _channel_node(parent, look, nodes).id if known else ""
    own = bare[len(parent) + 1 :] if parent != bare else ""
    name = block.program or block.kind
    if own:  # one of several topics at that place
        name = f"{name}: {own}"
    node = nodes.setdefault(
        f"{block.pid}|{block.kind}|{where}", _Node(f"{block.pid}|{block.kind}|{where}", block.kind, name, block.room)
    )
    node.detail = f"{block.kind} {block.pid}"
    node.add_handle(look)
    if queue:  # the topic fills the queue, the queue feeds its consumer
        if known:
            _add_to_edge(edges, channel_id, _queue_node(queue, nodes).id, look)
        _add_to_edge(edges, _queue_node(queue, nodes).id, node.id, look)
        return
    ends = (node.id, channel_id) if block.kind in PRODUCERS else (channel_id, node.id)
    _add_to_edge(edges, *ends, look)


def _add_link(look: Look, nodes: dict[str, _Node], edges: dict[tuple[str, str], _Edge]) -> None:
    """Add a link or bridge, named ``FROM -> TO``: an edge between two nodes, not a node."""
    start, _, end = (part.strip() for part in look.block.name.partition(ARROW))
    for name in (start, end):
        if name not in nodes:
            type_ = "channel" if ":" in name else "module"
            nodes[name] = _Node(name, type_, name, look.block.room)
    _add_to_edge(edges, start, end, look)


def _add_to_edge(edges: dict[tuple[str, str], _Edge], start: str, end: str, look: Look) -> None:
    edge = edges.setdefault((start, end), _Edge(start, end))
    edge.add(look.rate.messages_hz, look.rate.bytes_hz, look.rate.lost_hz, look.verdict.word)


def _sum_channels(nodes: dict[str, _Node], edges: dict[tuple[str, str], _Edge]) -> None:
    """Give a channel without counters of its own the rate of its incoming edges (or of the outgoing ones, if the
    source is elsewhere), and a module that receives nothing the rate of what it sends."""
    into: dict[str, list[_Edge]] = {}
    out: dict[str, list[_Edge]] = {}
    for edge in edges.values():
        into.setdefault(edge.end, []).append(edge)
        out.setdefault(edge.start, []).append(edge)
    for node in nodes.values():
        if (node.type == "channel" and node.handles == 0) or (node.type == "module" and node.messages == 0):
            coming, going = into.get(node.id, []), out.get(node.id, [])
            node.rate_hz = sum(edge.rate_hz for edge in coming) or max((edge.rate_hz for edge in going), default=0.0)
            around = [edge.health for edge in (*coming, *going)]
            node.health = min(around, key=_WORST_FIRST.index, default="idle")


def _node_record(node: _Node) -> dict[str, Any]:
    return {
        "id": node.id, "type": node.type, "label": node.label, "room": node.room, "detail": node.detail,
        "rate_hz": node.rate_hz, "messages": node.messages, "lost": node.lost, "health": node.health,
        "reasons": node.reasons[:4], "pids": sorted(node.pids), "handles": node.handles,
    }  # fmt: skip


def _edge_record(edge: _Edge) -> dict[str, Any]:
    return {
        "from": edge.start, "to": edge.end, "rate_hz": edge.rate_hz, "bytes_hz": edge.bytes_hz,
        "lost_hz": edge.lost_hz, "health": edge.health,
    }  # fmt: skip
