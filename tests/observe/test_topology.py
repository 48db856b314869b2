"""What of the graph is drawn: all where it is small; else whole neighbourhoods, trouble first."""

from __future__ import annotations

import dataclasses
from typing import Any

from penstock.observe import health
from penstock.observe.rates import Rate
from penstock.observe.snapshot import Block
from penstock.observe.topology import MAX_NODES, MAX_USERS, graph
from penstock.observe.watcher import Look, State


def look(number: int, kind: str, name: str, word: str = "ok", rate_hz: float = 1.0, pid: int | None = None) -> Look:
    block = Block(pid or number, number, 0, "test", "shm", kind, name, "", 0, 0)
    return Look(block, Rate(rate_hz), health.Verdict(word, ("because",) if word != "ok" else ()))


def plant(channels: int, readers: int = 2) -> list[Look]:
    looks, number = [], 0
    for channel in range(channels):
        for kind in ("publisher", *["subscriber"] * readers):
            number += 1
            looks.append(look(number, kind, f"/c{channel}", rate_hz=channel))
    return looks


def drawn(looks: list[Look], chosen: str = "") -> tuple[dict[str, Any], set[str], set[str]]:
    made = graph(State(1, tuple(looks)), chosen)
    ends = {end for edge in made["edges"] for end in (edge["from"], edge["to"])}
    return made, {node["id"] for node in made["nodes"]}, ends


def test_a_small_graph_is_drawn_whole() -> None:
    made, nodes, ends = drawn(plant(5))
    assert len(nodes) == 5 * 4 and nodes == ends and made["left_out"] == 0


def test_of_a_large_one_whole_neighbourhoods_are_drawn_trouble_first() -> None:
    looks = plant(200)
    looks.append(look(10_000, "subscriber", "/c0", "stuck", 0.0))
    made, nodes, ends = drawn(looks)
    assert len(nodes) <= MAX_NODES and nodes == ends, "no box without its lines"
    assert {"shm:/c0", "shm:/c199"} <= nodes and "shm:/c1" not in nodes
    assert made["left_out"] + len(nodes) == 200 * 4 + 1


def test_idle_boxes_do_not_fill_the_space_that_is_left() -> None:
    idle = [look(number, "module", f"idle{number}", "idle", 0.0) for number in range(1000, 1100)]
    _, nodes, ends = drawn(plant(3) + idle)
    assert nodes == ends and len(nodes) == 2 * 4, "of three channels one does not move"
    assert len(drawn(idle)[1]) == MAX_NODES, "all are idle"


def test_of_a_large_one_each_channel_has_all_its_users() -> None:
    looks = plant(200, readers=4)
    for number in range(0, 200, 20):
        looks.append(look(10_000 + number, "subscriber", f"/c{number}", "stuck", 0.0))
    made, nodes, _ = drawn(looks)
    assert len(nodes) <= MAX_NODES
    for channel in (node["id"] for node in made["nodes"] if node["type"] == "channel"):
        users = sum(look.block.channel == channel for look in looks)
        assert sum(channel in (edge["from"], edge["to"]) for edge in made["edges"]) == users


def test_what_is_chosen_is_drawn_with_its_neighbours_alone() -> None:
    made, nodes, ends = drawn(plant(200), "shm:/c7")
    assert len(nodes) == 4 and nodes == ends and "shm:/c7" in nodes and made["left_out"] == 796
    assert drawn(plant(200), "shm:/nowhere")[1] == set()


def test_a_queue_is_chosen_by_its_place_and_the_journal_of_its_broker_is_not_drawn() -> None:
    base = look(0, "queue", "work")
    broker = [
        dataclasses.replace(base, block=dataclasses.replace(base.block, room=room, kind=kind, name=name, pid=1, index=at))
        for at, (room, kind, name) in enumerate((
            ("broker", "queue", "work"), ("broker", "broker", "127.0.0.1:1"), ("journal", "writer", "/store"),
            ("broker", "subscriber", "127.0.0.1:1/t?queue=work"), ("broker", "publisher", "127.0.0.1:1/t"),
        ))
    ]  # fmt: skip
    _, nodes, ends = drawn(broker)
    assert nodes == ends and "journal:/store" not in nodes
    assert drawn(broker, "broker:work")[1] == {"queue work", "broker://127.0.0.1:1/t", "1|subscriber|broker://127.0.0.1:1/t?queue=work"}


def test_of_a_queue_without_a_topic_only_what_is_known_is_drawn() -> None:
    base = look(0, "queue", "work")
    broker = [
        dataclasses.replace(base, block=dataclasses.replace(base.block, room="broker", kind=kind, name=name, pid=1, index=at))
        for at, (kind, name) in enumerate((
            ("queue", "work"), ("subscriber", "127.0.0.1:1/?queue=work"), ("publisher", "127.0.0.1:1/t"),
        ))
    ]  # fmt: skip
    made, nodes, _ = drawn(broker)
    consumer = "1|subscriber|broker://127.0.0.1:1/?queue=work"
    assert nodes == {"queue work", consumer, "broker://127.0.0.1:1/t", "1|publisher|broker://127.0.0.1:1/t"}
    assert ("queue work", consumer) in {(edge["from"], edge["to"]) for edge in made["edges"]} and len(made["edges"]) == 2


def test_many_users_of_one_channel_are_one_box_with_the_health_of_the_worst() -> None:
    looks = [look(0, "publisher", "/c"), *(look(n, "subscriber", "/c", rate_hz=2.0) for n in range(1, 51))]
    looks.append(look(99, "subscriber", "/c", "losing", 0.0))
    made, nodes, ends = drawn(looks)
    assert len(nodes) == 3 and nodes == ends and made["left_out"] == 0
    (users,) = [node for node in made["nodes"] if node["label"] == "51 subscribers"]
    assert (users["rate_hz"], users["handles"], users["health"]) == (100.0, 51, "losing")
    (edge,) = [edge for edge in made["edges"] if edge["to"] == users["id"]]
    assert edge["rate_hz"] == 100.0 and edge["health"] == "losing"
    assert len(drawn(looks[: MAX_USERS + 1])[1]) == MAX_USERS + 2, "few ones stay apart"
