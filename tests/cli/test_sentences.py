"""What a stranger gets wrong, and the one sentence that answers: no trace, the right code, what to do about it."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.journal import Journal

from .command import run

FAILED, USAGE, TIME_OVER, WRONG = 1, 2, 3, 4


@pytest.fixture
def taken() -> Iterator[int]:
    """A port on which somebody listens already."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield listener.getsockname()[1]


@pytest.fixture
def free() -> Iterator[int]:
    """A port that nobody listens on, and that nobody else can get meanwhile."""
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        yield holder.getsockname()[1]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "file").write_text("")
    (tmp_path / "empty").mkdir()
    (tmp_path / "bad.json").write_text("{")
    return tmp_path


def sentence(folder: Path, code: int, *arguments: str) -> str:
    done = run(*arguments, cwd=folder, stdin="")
    assert done.returncode == code, (done.returncode, done.stderr)
    assert "Traceback" not in done.stderr + done.stdout
    return done.stderr + done.stdout


@pytest.mark.parametrize("command", ["info", "verify", "repair", "cat"])
def test_what_is_no_journal(folder: Path, command: str) -> None:
    assert "there is no directory nowhere" in sentence(folder, USAGE, "journal", command, "nowhere")
    for name in ("empty", "file"):
        assert f"{name} is not a journal" in sentence(folder, USAGE, "journal", command, name)
    assert not (folder / "nowhere").exists()


@pytest.mark.parametrize(
    "arguments",
    [
        ["pub", "journal:file#t", "x"],
        ["sub", "journal:file#t", "--timeout", "0"],
        ["broker", "file", "0"],
        ["record", "shm:/test-sentences", "-o", "file"],
    ],
    ids=lambda arguments: arguments[0],
)
def test_a_file_where_a_directory_is_wanted(folder: Path, arguments: list[str]) -> None:
    said = sentence(folder, FAILED, *arguments)
    assert "file is a file; give the name of a directory" in said, said


def test_a_port_that_is_taken(folder: Path, taken: int) -> None:
    for arguments in (
        ["broker", "store", str(taken)],
        ["monitor", "--port", str(taken)],
        ["pub", f"tcp://127.0.0.1:{taken}", "x"],
    ):
        said = sentence(folder, FAILED, *arguments)
        assert str(taken) in said and "in use" in said, said


def test_an_address_of_another_machine_cannot_be_listened_at(folder: Path) -> None:
    assert "insecure" in sentence(folder, USAGE, "pub", "tcp://192.0.2.1:4444", "x")
    assert "192.0.2.1:4444" in sentence(folder, FAILED, "pub", "tcp://192.0.2.1:4444?insecure=true", "x")
    assert "192.0.2.1:4444" in sentence(folder, FAILED, "broker", "store", "4444", "--host", "192.0.2.1", "--insecure")


@pytest.mark.parametrize("command", ["sub", "pub", "delay"])
def test_a_broker_that_is_not_there(folder: Path, free: int, command: str) -> None:
    body = ["x"] if command == "pub" else []
    said = sentence(folder, FAILED, command, f"broker://127.0.0.1:{free}/t", *body, "--timeout", "0.2")
    assert f"127.0.0.1:{free}" in said and "nobody listens" in said, said


def test_a_broker_that_is_not_there_cannot_be_recorded(folder: Path, free: int) -> None:
    words = sentence(folder, FAILED, "record", f"broker://127.0.0.1:{free}/t?queue=q&timeout=1", "-o", "run1")
    assert f"the broker at 127.0.0.1:{free} cannot be reached" in words and "None" not in words
    assert not (folder / "run1").exists()


def test_why_asks_nothing_of_a_broker_that_is_not_there(folder: Path, free: int) -> None:
    said = sentence(folder, WRONG, "why", f"broker://127.0.0.1:{free}/t")
    assert "nobody listens" in said and "statistics" not in said, said


def test_a_file_that_is_not_there_is_told_before_anybody_is_waited_for(folder: Path) -> None:
    for more in ([], ["--lines"]):
        said = sentence(folder, USAGE, "pub", "shm:/test-sentences", "--file", "nowhere", *more)
        assert "nowhere: No such file" in said, said


@pytest.mark.parametrize(
    "words",
    [
        "broker b 0 --tokens nowhere",
        "broker b 0 --certificate nowhere",
        "broker b 0 --store nats://127.0.0.1:1/s --store-authority nowhere",
        "replica b --store nats://127.0.0.1:1/s --store-authority nowhere",
        "monitor --port 0 --tls-certificate nowhere --tls-key nowhere",
        "run nowhere",
        "import nowhere -o imported",
        "bridge shm:/test-a shm:/test-b --vchans nowhere",
    ],
)
def test_a_file_that_is_not_there_is_wrong_usage_of_every_command(folder: Path, words: str) -> None:
    assert "nowhere" in sentence(folder, USAGE, *words.split())


@pytest.mark.parametrize("words", ["broker b 0", "monitor --port 0", "foxglove --port 0", "pub tcp://0.0.0.0:0 hello"])
def test_listening_beyond_this_machine_without_a_protection_is_wrong_usage(folder: Path, words: str) -> None:
    host = [] if "0.0.0.0" in words else ["--host", "0.0.0.0"]
    assert "insecure" in sentence(folder, USAGE, *words.split(), *host)


def test_a_bridge_to_nobody_says_only_that(folder: Path, free: int) -> None:
    said = sentence(folder, FAILED, "bridge", f"tcp://127.0.0.1:{free}", "shm:/test-sentences")
    assert "nobody listens there" in said and said.count("\n") == 1, said


def test_a_file_that_is_no_mcap_is_called_that(folder: Path) -> None:
    pytest.importorskip("mcap")
    for content in (b"", b"x\n", b"x" * 100):
        (folder / "x.mcap").write_bytes(content)
        assert "x.mcap is not an MCAP file" in sentence(folder, FAILED, "import", "x.mcap", "-o", f"to{len(content)}")


def test_the_refusal_of_a_quantity_names_all_that_is_taken(folder: Path) -> None:
    said = sentence(folder, USAGE, "record", "shm:/test-sentences", "-o", "r", "--split", "lots")
    assert "--split 'lots' is neither a size (500M) nor a duration" in said, said
    said = sentence(folder, USAGE, "pub", "shm:/test-sentences", "hi", "--wait", "0", "--history", "many")
    assert "history 'many' is neither a number of messages nor a duration" in said, said


def test_one_message_is_no_messages(folder: Path) -> None:
    assert "published 1 message," in sentence(folder, 0, "pub", "journal:one#t", "hi")
    assert "wrote 1 message to" in sentence(folder, 0, "export", "one", "--to", "csv", "-o", "x.csv")
    assert "1 message, positions" in sentence(folder, 0, "journal", "info", "one")
    assert "played 1 message in" in sentence(folder, 0, "play", "one", "--map", "t=journal:two#t")


def test_a_folder_that_stands_where_sql_expects_a_query_is_told_how_to_be_written(folder: Path) -> None:
    pytest.importorskip("duckdb")
    sentence(folder, 0, "pub", "journal:one#t", "hi")
    said = sentence(folder, USAGE, "sql", "select count(*) from (one)")
    assert "there is a folder one; write it directly after FROM or JOIN, without brackets" in said, said


def test_rates_of_what_is_no_address(folder: Path) -> None:
    assert "did you mean shm" in sentence(folder, USAGE, "hz", "shn:/camera")
    assert "nobody on this machine has shm:/test-nobody" in sentence(folder, FAILED, "bw", "shm:/test-nobody")


def test_a_misspelt_inner_command_names_the_nearest(folder: Path) -> None:
    assert "verify" in sentence(folder, USAGE, "journal", "verfy", "empty")


@pytest.mark.parametrize("command", ["play", "export"])
def test_what_is_no_recording(folder: Path, command: str) -> None:
    more = ["--to", "csv", "-o", "out.csv"] if command == "export" else []
    for name in ("nowhere", "empty", "file"):
        assert f"{name} is no recording" in sentence(folder, USAGE, command, name, *more)
    (folder / "drive.mcap").touch()
    assert "penstock import drive.mcap -o DIRECTORY" in sentence(folder, USAGE, command, "drive.mcap", *more)


def test_a_broken_gateway_file_is_told_with_its_line(folder: Path) -> None:
    assert "bad.json, line 1" in sentence(folder, USAGE, "run", "bad.json")


@pytest.mark.parametrize(("name", "settings", "what"), [
    ("align", (), "--set onto=TOPIC"), ("rollup", (), "at least one aggregate"),
    ("rollup", ("--set", "every_s=1", "--set", "n=count(*)"), "every_s=1 is no aggregate"),
])  # fmt: skip
def test_what_a_pipeline_misses_is_told_before_spark_starts(
    folder: Path, name: str, settings: tuple[str, ...], what: str
) -> None:
    pytest.importorskip("numpy")
    with Journal(folder / "log") as journal:
        journal.append("t", b"x")
    said = sentence(folder, USAGE, "pipeline", name, "--from", "log", "--to", "out", *settings)
    assert what in said and "rows" not in said


def test_a_file_that_would_append_everything_again_and_again_is_told(folder: Path) -> None:
    pytest.importorskip("pyspark")
    (folder / "p.toml").write_text('[source]\npath = "log"\n[sink]\npath = "out"\n')
    assert "append all its rows at every run" in sentence(folder, USAGE, "pipeline", "p.toml", "--every", "10s")


@pytest.mark.parametrize("words", [("why", "shm:/x"), ("shm", "ls"), ("shm", "clean"), ("autopsy", "shm:/x")])
def test_a_directory_of_shared_memory_that_cannot_be_is_one_sentence(words: tuple[str, ...]) -> None:
    done = run(*words, PENSTOCK_SHM_DIR="/etc/passwd")
    assert done.returncode in (1, 2)
    assert "Traceback" not in done.stderr
    assert "PENSTOCK_SHM_DIR=/etc/passwd cannot be used: Not a directory" in done.stderr
    assert "Permission denied" not in done.stderr


def test_a_link_to_a_directory_of_shared_memory_is_told_as_that(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir(0o700)
    (tmp_path / "link").symlink_to(tmp_path / "there")
    done = run("pub", "shm:/x", "hello", PENSTOCK_SHM_DIR=str(tmp_path / "link"))
    assert done.returncode in (1, 2)
    assert "cannot be used (it is a symbolic link; name the directory itself)" in done.stderr


def test_an_absent_directory_of_shared_memory_has_one_reason(tmp_path: Path) -> None:
    absent = tmp_path / "no" / "dir"
    done = run("pub", "shm:/x", "hello", PENSTOCK_SHM_DIR=str(absent))
    assert done.returncode in (1, 2)
    assert f"PENSTOCK_SHM_DIR={absent} cannot be used: No such file or directory" in done.stderr
    assert "Permission denied" not in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize(
    "words",
    ["ls --watch inf", "ls --watch nan", "hz shm:/x --every 1e300", "bw shm:/x --window inf", "delay shm:/x --every inf",
     "pub shm:/x y --wait 0 -n 2 --rate 1e-300", "pub shm:/x y --timeout 1e300", "sub shm:/x --timeout inf",
     "call shm:/x y --timeout inf", "top --every inf", "why shm:/x --seconds inf"],
)  # fmt: skip
def test_numbers_that_overflow_the_clock_are_refused(words: str) -> None:
    done = run(*words.split(), timeout=30)
    assert done.returncode == 2 and words.split()[-2] in done.stderr and "Traceback" not in done.stderr, done


def test_a_folder_is_found_whatever_the_locale_and_named_where_it_cannot_be(folder: Path) -> None:
    with Journal(folder / "né") as journal:
        journal.append("a", b"x")
    plain = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    done = run("journal", "cat", "né", "--json", cwd=folder, **plain)
    assert done.returncode == 0 and '"a"' in done.stdout, done.stderr
    (folder / "né").rename(folder / "bad\udcff")
    assert r"bad\udcff: the path of a journal must be UTF-8" in sentence(folder, USAGE, "journal", "cat", "bad\udcff")


@pytest.mark.parametrize("command", [("sub", "journal:j#a", "--from", "start", "--timeout", "1"), ("journal", "cat", "j")])
def test_damage_comes_with_its_remedy(folder: Path, command: tuple[str, ...]) -> None:
    with Journal(folder / "j") as journal:
        for number in range(20):
            journal.append("a", b"message %d" % number)
    (log,) = (folder / "j").glob("*.log")
    log.write_bytes(log.read_bytes().replace(b"message 7", b"message 8"))
    told = sentence(folder, FAILED, *command)
    assert told.count("penstock journal repair ") == 1 and "positions 8 to 8 are damaged" in told
