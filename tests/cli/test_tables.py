"""Tables keep their numbers at any width; names are text whatever they hold; ``top`` follows its keys."""

from __future__ import annotations

import io

import pytest
from rich.console import Console
from rich.table import Table

from penstock.cli import show
from penstock.cli.top import View, _table
from penstock.observe.health import Verdict
from penstock.observe.rates import Rate
from penstock.observe.watcher import Look, State
from tests.observe.test_watcher import block

COLUMNS = ("address", "kind", "pid", "messages", "lost", "state")
ROWS = [
    ("shm:/factory/line-1/camera/front", "publisher", "1234567", "12,345,678", "1,234", "waits for a subscriber"),
    ("shm:/[red]x[/red]/:car:/\x1b[2J", "subscriber", "7", "0", "0", ""),
]


def printed(table: Table, width: int) -> list[str]:
    out = io.StringIO()
    Console(file=out, width=width, markup=False, emoji=False, highlight=False).print(table)
    return [line.rstrip() for line in out.getvalue().splitlines()]


@pytest.mark.parametrize("width", [60, 80, 100, 200])
def test_numbers_are_never_cut(width: int) -> None:
    lines = printed(show.table(COLUMNS, ROWS, ("pid", "messages", "lost"), width=width), width)
    assert len(lines) == 3 and all(len(line) <= width for line in lines)
    for number in ("1234567", "12,345,678", "1,234", "publisher"):
        assert number in lines[1].split(), lines
    assert "lost" in lines[0] and "pid" in lines[0]


@pytest.mark.parametrize("width", [40, 50, 60, 80])
def test_a_number_that_finds_no_room_goes_whole_and_is_named(width: int) -> None:
    columns = ("position", "topic", "size", "timestamp_ns", "ordinal")
    row = ("1234567", "camera.front.left.upper", "1048576", "1794903595197942346", "9999999")
    lines = printed(show.table(columns, [row], columns[:1] + columns[2:], width=width), width)
    assert all(len(line) <= width for line in lines)
    shown, numbers = lines[0].split(), [word for word in lines[1].split() if word.isdigit()]
    assert numbers == [number for name, number in zip(columns, row, strict=True) if name in shown and number.isdigit()]
    lacking = [name for name in columns if name not in shown]
    assert " ".join(lines[2:]) == (f"no room for {', '.join(lacking)}" if lacking else "")


@pytest.mark.parametrize("width", [60, 80, 100, 120])
def test_top_tells_fifty_handles_apart_and_keeps_its_numbers(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(show, "columns_of", lambda stream: width)
    looks = tuple(look(f"/arm/{at:02d}/position", "ok", 12345.0) for at in range(50))
    out = io.StringIO()
    Console(file=out, width=width, height=60).print(_table(State(looks=looks), View(), 50))
    lines = [line.rstrip() for line in out.getvalue().splitlines()]
    assert len(lines) == 53 and all(len(line) <= width for line in lines)
    assert "health" in lines[1] and "rate" in lines[1] and "lost" in lines[1]
    assert all("12.3 k/s" in line and line.endswith("ok") for line in lines[2:52])
    if width >= 80:
        assert len({line.split()[0] for line in lines[2:52]}) == 50, lines[:5]


def test_the_title_of_top_counts_the_rows_that_are_shown() -> None:
    state = State(looks=(look("/a", "ok", 9), look("/b", "losing", 5, 3)))
    out = io.StringIO()
    Console(file=out, width=120).print(_table(state, View(match="/a")))
    assert " 0 lost  1 handle in 1 process" in out.getvalue().splitlines()[0]


def test_names_are_shortened_in_the_middle_and_free_text_goes_first() -> None:
    narrow = printed(show.table(COLUMNS, ROWS, width=60), 60)
    assert narrow[1].startswith("shm:/fact") and "…" in narrow[1] and "front" in narrow[1]
    assert "waits" not in narrow[1]
    wide = printed(show.table(COLUMNS, ROWS, width=200), 200)
    assert wide[1].endswith("waits for a subscriber") and "shm:/factory/line-1/camera/front" in wide[1]


@pytest.mark.parametrize(
    "form",
    ["shm:/plant/line{}/machine{}/temperature", "shm:/a-very-long-beginning/{}/{}", "shm:/{}/{}/a-very-long-end-of-a-name"],
)
def test_names_that_are_shortened_stay_different(form: str) -> None:
    rows = [(form.format(number % 7, number), "publisher", str(number)) for number in range(50)]
    shown = printed(show.table(("address", "kind", "messages"), rows, ("messages",), width=42), 42)
    assert len({line.split()[0] for line in shown[1:51]}) == 50, shown


def test_names_are_text() -> None:
    lines = printed(show.table(COLUMNS, ROWS, width=200), 200)
    assert "shm:/[red]x[/red]/:car:/\\x1b[2J" in lines[2]


def test_the_console_prints_text(capsys: pytest.CaptureFixture[str]) -> None:
    show.console().print("shm:/[link=http://x]a[/link] [nope :car:")
    assert capsys.readouterr().out.strip() == "shm:/[link=http://x]a[/link] [nope :car:"


def test_latencies_beyond_the_last_bucket() -> None:
    assert show.latency_text(2.0**35) == "> 34 s"
    assert show.latency_text(1.5e6) == "1.5 ms"


def look(name: str, word: str, rate: float, lost: int = 0) -> Look:
    dropped = {"overflow": lost}
    return Look(block(name=name, dropped=dropped), Rate(messages_hz=rate), Verdict(word))


def test_top_shows_trouble_first_and_follows_its_keys() -> None:
    state = State(looks=(look("/a", "ok", 9), look("/b", "stuck", 0), look("/c", "losing", 5, 3), look("/d", "idle", 0)))
    view = View()

    def names() -> list[str]:
        return [chosen.block.name for chosen in view.chosen(state)]

    assert names() == ["/b", "/c", "/d", "/a"]
    assert view.handle_key("s", 2) and view.sort == "rate" and names()[0] == "/a"
    for key in ("/", "c", "x", "backspace", "enter"):
        assert view.handle_key(key, 2)
    assert names() == ["/c"] and not view.typing
    assert view.handle_key("/", 2) and view.handle_key("escape", 2) and len(names()) == 4
    assert view.handle_key("page down", 2) and view.first == 2 and view.handle_key("up", 2) and view.first == 1
    assert view.handle_key("end", 2) and view.first > 4 and view.handle_key("home", 2) and view.first == 0
    assert view.handle_key(" ", 2) and view.paused
    assert not view.handle_key("q", 2)
