from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from penstock import Ledger, _core


def blocks(name: str) -> list[dict[str, object]]:
    return [block for block in _core.counters_read() if block["name"] == name]


def test_the_ledger_balances() -> None:
    counters = _core.Counters("test", "subscriber", "one")
    counters.add("matched", 10)
    counters.add("delivered", 4)
    counters.drop("overflow", 3)
    counters.add("expired")
    ledger = Ledger.of(counters.snapshot())
    assert ledger == Ledger(matched=10, delivered=4, dropped={"overflow": 3}, expired=1, in_flight=2)
    assert ledger.balanced and ledger.lost == 3
    counters.close()


def test_unknown_names() -> None:
    counters = _core.Counters("test", "x", "two")
    with pytest.raises(KeyError):
        counters.add("nothing")
    with pytest.raises(KeyError):
        counters.drop("boredom")
    counters.close()
    with pytest.raises(ValueError):
        counters.add("matched")


def test_others_see_them_and_files_are_private() -> None:
    counters = _core.Counters("test", "publisher", "three")
    counters.add("matched", 7)
    program = "from penstock import _core; print([b['matched'] for b in _core.counters_read() if b['name'] == 'three'])"
    output = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert output.strip() == "[7]"
    pages = list(Path(_core.counters_directory()).glob(f"counters.{os.getpid()}.*"))
    assert pages and all(page.stat().st_mode & 0o777 == 0o600 for page in pages)
    counters.close()
    assert blocks("three") == []


def test_more_handles_than_one_page_holds() -> None:
    many = [_core.Counters("test", "x", f"many{i}") for i in range(300)]
    many[299].add("matched")
    assert blocks("many299")[0]["matched"] == 1
    del many


def test_a_name_is_kept_whole_up_to_399_bytes() -> None:
    """That is every name of shared memory, of a topic, and of a topic behind a host name."""
    for name in ("n" * 180, "n" * 399):
        counters = _core.Counters("test", "x", name)
        seen = counters.snapshot()
        assert (seen["name"], seen["name_cut"]) == (name, False) and _core.counters_name(name) == name
        counters.close()


def test_a_name_with_no_room_is_told_apart_by_its_hash() -> None:
    """An identity is never a cut text: two names that differ in the middle alone are two, and neither is a third."""
    first, second = ("head" + middle * 500 + "tail" for middle in "ab")
    cut = []
    for name in (first, second, first):
        counters = _core.Counters("test", "x", name)
        seen = counters.snapshot()
        assert seen["name_cut"] and seen["name"] == _core.counters_name(name)
        cut.append(str(seen["name"]))
        counters.close()
    assert cut[0] != cut[1] and cut[0] == cut[2]
    assert all(name.startswith("head") and "\u2026" in name and "tail [" in name for name in cut)


@pytest.mark.parametrize("character", ["é", "水", "🌊"])
def test_a_name_is_cut_between_characters(character: str) -> None:
    """Whatever its place in the name: a cut in the midst of one would be no text, and nobody could read the page."""
    for before in range(4):
        text = "n" * before + character * 200 + "n" * before
        counters = _core.Counters(text, text, text)
        counters.state(text)
        seen = counters.snapshot()
        for field, most_bytes in (("room", 15), ("kind", 15), ("state", 95)):
            kept = str(seen[field])
            assert text.startswith(kept) and most_bytes - 4 < len(kept.encode()) <= most_bytes, (field, kept)
        head, cut, tail = str(seen["name"]).rpartition(" [")[0].partition("\u2026")
        assert (text.startswith(head) and text.endswith(tail)) if cut else seen["name"] == text
        assert "\ufffd" not in str(seen["name"])
        assert blocks(str(seen["name"]))
        counters.close()


def test_a_program_whose_name_is_no_text_is_listed_with_all_others(tmp_path: Path) -> None:
    script = os.fsencode(tmp_path) + b"/caf\xe9-" + b"x" * 20 + "水".encode() * 8 + b".py"
    with open(script, "w") as file:
        file.write("from penstock import _core\nc = _core.Counters('test', 'x', 'odd')\nprint('up', flush=True)\ninput()\n")
    child = subprocess.Popen([os.fsencode(sys.executable), script], stdout=subprocess.PIPE, stdin=subprocess.PIPE)
    try:
        assert child.stdout is not None and child.stdout.readline() == b"up\n"
        (seen,) = blocks("odd")
        assert str(seen["program"]).startswith("caf\ufffd-xxx") and seen["pid"] == child.pid
    finally:
        child.communicate(b"\n", timeout=30)


def test_a_killed_process_leaves_no_page() -> None:
    program = "from penstock import _core; c = _core.Counters('test', 'x', 'killed'); print('up', flush=True); input()"
    child = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, stdin=subprocess.PIPE)
    assert child.stdout is not None and child.stdout.readline() == b"up\n"
    assert len(blocks("killed")) == 1
    child.send_signal(signal.SIGKILL)
    child.communicate()
    assert blocks("killed") == []
    assert not list(Path(_core.counters_directory()).glob(f"counters.{child.pid}.*"))


def test_a_forked_child_has_its_own() -> None:
    counters = _core.Counters("test", "x", "forked")
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            mine = _core.Counters("test", "x", "child")
            mine.add("matched")
            counters.close()
            code = 0 if len(blocks("forked")) == 1 else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert len(blocks("forked")) == 1
    counters.close()
