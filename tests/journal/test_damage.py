"""Damage of every kind: told with its place when read or verified, never passed over, and repaired without more loss."""

from __future__ import annotations

import os
import random
import shutil
import struct
from collections.abc import Callable
from pathlib import Path

import pytest

from penstock.errors import CorruptionError, InvalidArgument, PenstockError
from penstock.journal import Journal, layout
from penstock.journal.commands import cat
from penstock.journal.repairs import repair
from penstock.journal.verify import verify

Held = dict[int, bytes]


def fill(directory: Path) -> Held:
    """Several segments of single messages and batches."""
    held: Held = {}
    with Journal(directory, segment_bytes=65536) as journal:
        for i in range(120):
            data = b"%d-" % i * (1 + i * 13 % 700)
            if i % 10 == 0:
                first, _ = journal.append_many(f"t.{i % 3}", [data, b"", data[:5]])
                held |= {first: data, first + 1: b"", first + 2: data[:5]}
            else:
                held[journal.append(f"t.{i % 3}", data, key=f"k{i % 7}")] = data
        journal.commit(states=[(5, b"state")])
    assert len(list(directory.glob("*.log"))) > 1
    return held


def read_back(journal: Journal) -> tuple[Held, set[int]]:
    """What can be read, and what is told to be damaged."""
    held: Held = {}
    damaged: set[int] = set()
    for position in range(1, journal.frontier):
        try:
            held[position] = bytes(journal.read(position))
        except CorruptionError as error:
            assert error.place
            damaged.add(position)
        except LookupError:
            pass
    return held, damaged


def flip(path: Path, offset: int, mask: int = 1) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ mask]))


def test_a_flipped_bit_anywhere_costs_at_most_its_record(tmp_path: Path, seed: int) -> None:
    held = fill(tmp_path / "j")
    chance = random.Random(seed)
    for turn in range(25):
        copy = tmp_path / "copy"
        shutil.copytree(tmp_path / "j", copy)
        logs = sorted(copy.glob("*.log"))
        log = chance.choice(logs)
        ends = [layout.decode_segment_header(log.read_bytes(), "").seal]
        end = (
            ends[0].end
            if ends[0]
            else layout.FRONTIER_COPY.unpack_from((copy / "frontier").read_bytes(), layout.FRONTIER_COPIES[0])[3]
        )
        offset = chance.randrange(layout.SEGMENT_HEADER_BYTES, end)
        flip(log, offset, 1 << chance.randrange(8))
        found = verify(copy)
        assert found, f"turn {turn}: a flipped bit at {log}:{offset} was not seen"
        assert any(item.path == str(log) and item.offset <= offset <= item.offset + item.bytes for item in found), found
        with Journal(copy, mode="read") as journal:
            left, damaged = read_back(journal)
        lost = set(held) - set(left)
        assert all(left[position] == held[position] for position in left), "nothing wrong is ever handed out"
        assert lost == damaged and len(lost) <= 1, (lost, damaged)
        report = repair(copy)
        assert {p for first, last in report.lost for p in range(first, last + 1)} == lost
        assert verify(copy) == []
        with Journal(copy, mode="read") as journal:
            again, damaged = read_back(journal)
            assert again == left and not damaged
            assert [(hole.first, hole.last, hole.reason) for hole in journal.holes] == [(p, p, "lost") for p in lost]
        with Journal(copy, segment_bytes=65536) as journal:
            assert journal.append("t.0", b"more") == len(held) + 1
        shutil.rmtree(copy)


def test_opening_with_damage_in_the_last_segment_goes_on_after_it(tmp_path: Path) -> None:
    held = fill(tmp_path / "j")
    log = sorted((tmp_path / "j").glob("*.log"))[-1]
    flip(log, layout.SEGMENT_HEADER_BYTES + layout.BATCH.size + 1000)
    with Journal(tmp_path / "j") as journal:
        assert journal.recovery.damage and not journal.recovery.torn_bytes, "good batches follow: not a torn tail"
        assert journal.append("t.1", b"after") == len(held) + 1
        left, damaged = read_back(journal)
        assert set(left) | damaged == set(range(1, len(held) + 2))


def test_a_truncated_last_segment_loses_its_end_and_numbers_are_not_used_again(tmp_path: Path) -> None:
    held = fill(tmp_path / "j")
    log = sorted((tmp_path / "j").glob("*.log"))[-1]
    end = layout.FRONTIER_COPY.unpack_from((tmp_path / "j" / "frontier").read_bytes(), layout.FRONTIER_COPIES[0])[3]
    os.truncate(log, end - 3000)
    assert verify(tmp_path / "j")
    with Journal(tmp_path / "j", mode="read") as journal:
        left, damaged = read_back(journal)
        assert damaged and set(left) | damaged == set(held)
    with Journal(tmp_path / "j") as journal:
        assert journal.recovery.damage
        assert journal.append("t.1", b"after") == len(held) + 1, "positions that readers have seen are never used again"
        assert bytes(journal.read(len(held) + 1)) == b"after"
    report = repair(tmp_path / "j")
    assert report.lost == [(min(damaged), max(damaged))]
    assert verify(tmp_path / "j") == []


@pytest.mark.parametrize("tail", [b"\x01", b"PBAT" * 100, os.urandom(4999) + b"\x01"])
def test_a_nonsense_tail_is_closed_off_and_told(tmp_path: Path, tail: bytes) -> None:
    held = fill(tmp_path / "j")
    log = sorted((tmp_path / "j").glob("*.log"))[-1]
    end = layout.FRONTIER_COPY.unpack_from((tmp_path / "j" / "frontier").read_bytes(), layout.FRONTIER_COPIES[0])[3]
    with log.open("r+b") as file:
        file.seek(end)
        file.write(tail)
    size = log.stat().st_size
    with Journal(tmp_path / "j") as journal:
        assert journal.recovery.torn_bytes == len(tail) and str(end) in journal.recovery.torn_place
        assert not journal.recovery.damage
        assert journal.append("t.1", b"after") == len(held) + 1
        assert read_back(journal)[0] == held | {len(held) + 1: b"after"}
        assert list(journal.state_records()) == [(5, b"state")]
    assert log.stat().st_size == size, "what others may have mapped is never truncated"


def test_damaged_and_missing_headers_and_files(tmp_path: Path) -> None:
    held = fill(tmp_path / "j")
    logs = sorted((tmp_path / "j").glob("*.log"))
    flip(logs[0], 33)  # the nonce
    assert any("header" in item.text for item in verify(tmp_path / "j"))
    report = repair(tmp_path / "j")
    assert report.lost == [] and report.rewritten == [str(logs[0])]
    with Journal(tmp_path / "j") as journal:
        assert read_back(journal) == (held, set())
    logs = sorted((tmp_path / "j").glob("*.log"))
    first = int(logs[1].name[:20])
    following = int(logs[2].name[:20])
    logs[1].unlink()
    assert any(item.first == first and item.last == following - 1 for item in verify(tmp_path / "j"))
    with Journal(tmp_path / "j", mode="read") as journal, pytest.raises(CorruptionError):
        journal.read(first)
    assert repair(tmp_path / "j").lost == [(first, following - 1)]
    with Journal(tmp_path / "j", mode="read") as journal:
        left, damaged = read_back(journal)
        assert not damaged and set(held) - set(left) == set(range(first, following))


def test_the_frontier_file_is_made_anew(tmp_path: Path) -> None:
    held = fill(tmp_path / "j")
    (tmp_path / "j" / "frontier").unlink()
    with Journal(tmp_path / "j") as journal:
        assert journal.frontier == len(held) + 1
    (tmp_path / "j" / "frontier").write_bytes(b"nonsense")
    with pytest.raises(CorruptionError, match="frontier"):
        Journal(tmp_path / "j", mode="read")
    with Journal(tmp_path / "j") as journal:
        assert read_back(journal) == (held, set())


def test_what_is_not_a_journal_is_refused_untouched(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("x")
    with pytest.raises(InvalidArgument, match="not a journal"):
        Journal(tmp_path)
    assert sorted(os.listdir(tmp_path)) == ["precious"]
    other = tmp_path / "other"
    Journal(other).close()
    marker = other / layout.MARKER_NAME
    marker.write_bytes(marker.read_bytes().replace(b"journal 2", b"journal 9"))
    before = {path.name: path.read_bytes() for path in other.iterdir()}
    for mode in ("read", "write"):
        with pytest.raises(InvalidArgument, match="version 9"):
            Journal(other, mode=mode)  # type: ignore[arg-type]
    assert {path.name: path.read_bytes() for path in other.iterdir()} == before
    with pytest.raises(InvalidArgument, match="not a journal"):
        Journal(tmp_path / "missing", mode="read")


def test_random_bytes_in_any_file_never_crash_a_reader(tmp_path: Path, seed: int) -> None:
    held = fill(tmp_path / "j")
    chance = random.Random(seed)
    for _ in range(30):
        copy = tmp_path / "copy"
        shutil.copytree(tmp_path / "j", copy)
        path = chance.choice(sorted(copy.iterdir()))
        data = bytearray(path.read_bytes())
        for _ in range(chance.randrange(1, 20)):
            if data:
                at = chance.randrange(len(data))
                data[at : at + 8] = struct.pack("<Q", chance.choice([0, 1, 2**63, 2**64 - 1, chance.randrange(2**64)]))
        path.write_bytes(data[: chance.choice([len(data), len(data) // 2, 0])])
        try:
            with Journal(copy, mode="read") as journal:
                left, _ = read_back(journal)
                assert all(held.get(position) == data for position, data in left.items())
                journal.find_time(0)
                journal.find_ordinal("t.1", 10)
                assert journal.topics is not None
        except (PenstockError, OSError):
            pass
        try:
            verify(copy)
            repair(copy)
            with Journal(copy) as journal:
                journal.append("t.0", b"more")
        except (PenstockError, OSError):
            pass
        shutil.rmtree(copy)


def test_a_journal_that_has_lost_all_segments_is_not_empty(tmp_path: Path) -> None:
    fill(tmp_path / "j")
    for log in (tmp_path / "j").glob("*.log"):
        log.unlink()
    with Journal(tmp_path / "j", mode="read") as journal:
        reads: list[Callable[[], object]] = [
            lambda: journal.read(3),
            lambda: journal.read_many(1),
            lambda: list(journal.batches()),
            lambda: list(cat(tmp_path / "j")),
            lambda: journal.follow(1).read(0),
        ]
        for read in reads:
            with pytest.raises(CorruptionError, match=f"positions 1 to {journal.frontier - 1} are damaged") as caught:
                read()
            assert caught.value.positions == (1, journal.frontier)
            assert f"penstock journal repair {tmp_path / 'j'}" in str(caught.value)


def test_repair_says_that_it_made_a_missing_frontier_anew(tmp_path: Path) -> None:
    held = fill(tmp_path / "j")
    (tmp_path / "j" / "frontier").unlink()
    assert [item.text for item in verify(tmp_path / "j")] == ["the frontier file is missing or damaged"]
    report = repair(tmp_path / "j")
    assert [item.text for item in report.damage] == ["the frontier file was missing: made anew"] and not report.lost
    assert not report.whole and report.kept_messages == len(held) and not verify(tmp_path / "j")
    assert repair(tmp_path / "j").whole


def test_repair_counts_what_was_in_segments_that_are_all_missing(tmp_path: Path) -> None:
    fill(tmp_path / "j")
    frontier = Journal(tmp_path / "j", mode="read").frontier
    for log in (tmp_path / "j").glob("*.log"):
        log.unlink()
    report = repair(tmp_path / "j")
    assert (report.lost, report.kept_messages) == ([(1, frontier - 1)], 0)
    assert not verify(tmp_path / "j")
    with Journal(tmp_path / "j") as journal:
        assert journal.append("t", b"on") == frontier
