"""Hierarchical state machines: who is asked, who is left, who is entered."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from penstock.bus import PASS, Bus, State, StateMachine
from penstock.errors import InvalidArgument, StateError


@dataclass
class Event:
    id: int


class Tree:
    """top > sub > (start, sibling); top > other > far; lone. Every handler passes unless told where to go."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.goto: dict[str, State | None] = {}
        self.top = self.state("top")
        self.sub = self.state("sub", self.top)
        self.start = self.state("start", self.sub)
        self.sibling = self.state("sibling", self.sub)
        self.child = self.state("child", self.start)
        self.other = self.state("other", self.top)
        self.far = self.state("far", self.other)
        self.lone = self.state("lone")
        self.machine = StateMachine(self.start)

    def state(self, name: str, parent: State | None = None) -> State:
        def on_message(message: Any) -> Any:
            self.log.append(f"?{name}")
            return self.goto.get(name, PASS)

        return State(
            name,
            parent,
            on_enter=lambda: self.log.append(f"+{name}"),
            on_exit=lambda: self.log.append(f"-{name}"),
            on_message=on_message,
        )

    def send(self, **goto: State | None) -> list[str]:
        self.goto = goto
        self.log.clear()
        self.machine(Event(1))
        return list(self.log)


@pytest.fixture
def tree() -> Tree:
    made = Tree()
    made.machine.start()
    return made


def test_start_enters_from_the_top(tree: Tree) -> None:
    assert tree.log == ["+top", "+sub", "+start"]
    assert tree.machine.current is tree.start


def test_passing_goes_up_to_the_top(tree: Tree) -> None:
    assert tree.send() == ["?start", "?sub", "?top"]
    assert tree.machine.unhandled == 1


def test_consuming_stops_there(tree: Tree) -> None:
    assert tree.send(sub=None) == ["?start", "?sub"]
    assert tree.machine.unhandled == 0


def test_to_a_child(tree: Tree) -> None:
    assert tree.send(start=tree.child) == ["?start", "+child"]
    assert tree.machine.is_in(tree.start) and tree.machine.current is tree.child


def test_to_a_sibling(tree: Tree) -> None:
    assert tree.send(start=tree.sibling) == ["?start", "-start", "+sibling"]


def test_to_a_far_branch(tree: Tree) -> None:
    assert tree.send(start=tree.far) == ["?start", "-start", "-sub", "+other", "+far"]


def test_the_parent_goes_for_its_child(tree: Tree) -> None:
    assert tree.send(sub=tree.sibling) == ["?start", "?sub", "-start", "+sibling"]


def test_the_top_goes_for_its_grandchild(tree: Tree) -> None:
    assert tree.send(top=tree.far) == ["?start", "?sub", "?top", "-start", "-sub", "+other", "+far"]


def test_to_another_top(tree: Tree) -> None:
    assert tree.send(start=tree.lone) == ["?start", "-start", "-sub", "-top", "+lone"]
    assert tree.send(lone=tree.start) == ["?lone", "-lone", "+top", "+sub", "+start"]


def test_to_self_sends_nothing(tree: Tree) -> None:
    assert tree.send(start=tree.start) == ["?start"]


def test_to_its_own_parent(tree: Tree) -> None:
    assert tree.send(sub=tree.sub) == ["?start", "?sub", "-start"]
    assert tree.machine.current is tree.sub


def test_eight_levels() -> None:
    log: list[str] = []
    states: list[State] = []
    for level in range(8):
        states.append(
            State(
                str(level),
                states[-1] if states else None,
                on_enter=lambda level=level: log.append(f"+{level}"),
                on_exit=lambda level=level: log.append(f"-{level}"),
            )
        )
    other = State("other", states[0], on_enter=lambda: log.append("+other"))
    states[0].on(1)(lambda message: other)
    machine = StateMachine(states[7]).start()
    assert log == [f"+{level}" for level in range(8)]
    log.clear()
    machine(Event(1))
    assert log == [f"-{level}" for level in range(7, 0, -1)] + ["+other"]
    with pytest.raises(InvalidArgument, match="9 levels"):
        State("too deep", states[7])


def test_on_a_bus() -> None:
    off, on = State("off"), State("on")

    @off.on(1)
    def press(message: Any) -> State:
        return on

    @on.on(1)
    def press_again(message: Any) -> State:
        return off

    machine = StateMachine(off).start()
    with Bus(mode="direct") as bus:
        bus.subscribe(1, 2, kind="callback", handler=machine)
        bus.publish(b"", 1)
        assert machine.current is on
        bus.publish(b"", 2)
        assert machine.current is on and machine.unhandled == 1
        bus.publish(b"", 1)
        assert machine.current is off


def test_a_message_from_inside_an_action_is_handled_afterwards() -> None:
    seen: list[str] = []
    one, two = State("one"), State("two")

    @one.on(1)
    def go(message: Any) -> State:
        machine(Event(2))
        seen.append("one")
        return two

    @two.on(2)
    def arrived(message: Any) -> None:
        seen.append("two")

    machine = StateMachine(one).start()
    machine(Event(1))
    assert seen == ["one", "two"]


def test_misuse() -> None:
    state, other = State("state"), State("other")
    machine = StateMachine(state)
    with pytest.raises(StateError, match=r"start\(\)"):
        machine(Event(1))
    machine.start()
    with pytest.raises(StateError, match="before"):
        machine.start()
    state.on(1)(lambda message: "nonsense")  # type: ignore[arg-type,return-value]
    with pytest.raises(TypeError, match="nonsense"):
        machine(Event(1))
    state.on_exit(lambda: machine.transition(other))
    with pytest.raises(StateError, match="action"):
        machine.transition(other)


def test_an_action_that_raises_leaves_the_machine_usable() -> None:
    a, b = State("a"), State("b")
    a.on(1)(lambda message: b)
    b.on_enter(lambda: 1 / 0)
    machine = StateMachine(a).start()
    with pytest.raises(ZeroDivisionError):
        machine(Event(1))
    assert machine.current is b, "it is where it was going, and goes on from there"
    machine.transition(a)
    assert machine.current is a


def test_an_action_that_is_assigned_is_refused() -> None:
    state = State("idle")
    with pytest.raises(AttributeError, match=r"state\.on_enter\(function\)"):
        state.on_enter = print  # type: ignore[method-assign, assignment]
    with pytest.raises(AttributeError, match=r"state\.on_exit\(function\)"):
        state.on_exit = print  # type: ignore[method-assign, assignment]
