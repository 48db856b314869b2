"""The frame of the command: help, completion, exit codes, configuration, broken pipes, Ctrl-C."""

from __future__ import annotations

import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

import penstock
from penstock import _core
from penstock.cli.commands import COMMANDS, Entry, load
from penstock.cli.group import application
from penstock.journal import Journal
from penstock.recording.story import read_story

from .command import HERE, environment, run

INSTALLED = [entry.name for entry in COMMANDS if entry.installed]


def loaded_by(arguments: list[str], heavy: set[str]) -> tuple[set[str], str]:
    """Which of these modules a command loads, and what it prints."""
    code = (
        "import sys\nfrom penstock.cli import main\n"
        f"try:\n    main({arguments!r})\nexcept SystemExit as end:\n    assert not end.code\n"
        f"print('LOADED', *({heavy!r} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], text=True, capture_output=True, env=environment(), timeout=60)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.rpartition("LOADED")[2].split()), done.stdout


def test_help_lists_every_command_and_loads_none() -> None:
    heavy = {"penstock._core", "numpy", "pyarrow", "pyspark", "starlette", "uvicorn", "penstock.cli.sub"}
    loaded, said = loaded_by(["--help"], heavy)
    assert not loaded
    for name in INSTALLED:
        assert f" {name} " in said


def test_a_command_loads_what_it_needs() -> None:
    loaded, _ = loaded_by(["ls"], {"pydantic", "numpy", "pyarrow", "pyspark", "starlette", "uvicorn", "asyncio"})
    assert not loaded


def test_version() -> None:
    done = run("--version")
    assert done.returncode == 0 and done.stdout.startswith("penstock ")


def test_help_of_one_command() -> None:
    done = run("sub", "--help")
    assert done.returncode == 0 and "Usage: penstock sub" in done.stdout and "Example:" in done.stdout, done.stderr


def test_unknown_command_names_the_nearest() -> None:
    done = run("subb")
    assert done.returncode == 2 and "sub" in done.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ["sub"],
        ["sub", "shm:/x", "--count", "0"],
        ["sub", "shm:/x", "--format", "xml"],
        ["sub", "nothing"],
        ["sub", "shm:/x", "--filter", "size >"],
    ],
)
def test_wrong_usage_is_code_2_without_a_trace(arguments: list[str]) -> None:
    done = run(*arguments)
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr and done.stderr.strip()


def test_completion_gives_commands() -> None:
    done = run(_PENSTOCK_COMPLETE="complete_bash", COMP_WORDS="penstock s", COMP_CWORD="1")
    assert "sub" in done.stdout.split()


def test_a_misspelt_setting_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "penstock.toml").write_text('[sub]\nfromat = "json"\n')
    done = run("sub", "shm:/x", "--timeout", "0", cwd=tmp_path)
    assert done.returncode == 2
    assert "penstock.toml" in done.stderr and "format" in done.stderr


def test_a_broken_file_is_told_with_its_line(tmp_path: Path) -> None:
    (tmp_path / "penstock.toml").write_text("[sub\n")
    done = run("sub", "shm:/x", "--timeout", "0", cwd=tmp_path)
    assert done.returncode == 2 and "penstock.toml" in done.stderr and "line 1" in done.stderr
    assert run("--help", cwd=tmp_path).returncode == 0


def test_a_variable_sets_a_default() -> None:
    done = run("sub", "shm:/x", PENSTOCK_SUB_FORMAT="nonsense")
    assert done.returncode == 2 and "nonsense" in done.stderr


@pytest.mark.parametrize(
    "variables",
    [
        {"_PENSTOCK_COMPLETE": "complete_bash", "COMP_WORDS": "penstock sub shm:/complete", "COMP_CWORD": "2"},
        {"_PENSTOCK_COMPLETE": "complete_zsh", "_TYPER_COMPLETE_ARGS": "penstock sub shm:/complete"},
        {
            "_PENSTOCK_COMPLETE": "complete_fish", "_TYPER_COMPLETE_ARGS": "penstock sub shm:/complete",
            "_TYPER_COMPLETE_FISH_ACTION": "get-args",
        },
    ],
    ids=["bash", "zsh", "fish"],
)  # fmt: skip
def test_completion_gives_addresses_in_use(variables: dict[str, str]) -> None:
    name = f"/complete-{uuid.uuid4().hex[:8]}"
    with penstock.publisher(f"shm:{name}"):
        done = run(**variables)
    assert name in done.stdout and not done.stderr, (done.stdout, done.stderr)


@pytest.mark.parametrize(
    ("words", "answer"),
    [
        ("penstock sub shm : {0}", "{1}"),
        ("penstock sub shm :", "{1}"),  # bash replaces what follows the colon
        ("penstock info shm", "shm:{1}"),
        ("penstock info shm : {0}", "{1}"),
        ("penstock pipeline roll", "rollup"),
        ("penstock play {3}/run --topic ", "front.a"),
        ("penstock export {3}/run --to csv -t fro", "front.a"),
        ("penstock journal cat {3}/run --topic fro", "front.a"),
        ("penstock sub journal : {3}/ru", "{3}/run"),
        ("penstock sub journal : {3}/run", "{3}/run#front.a"),
        ("penstock sub journal : {3}/", "{3}/deep/er/log"),
        ("penstock queue show broker : //127.0.0.1 : 1 job", "jobs-{2}"),
    ],
)
def test_completion_in_bash_survives_colons(words: str, answer: str, tmp_path: Path) -> None:
    """Bash ends a word at each colon, and puts the answer in the place of the last one."""
    key = uuid.uuid4().hex[:8]
    typed = words.format(f"/complete-{key}", None, None, tmp_path).split(" ")
    for place in ("run", "deep/er/log"):
        with Journal(tmp_path / place) as journal:
            journal.append("front.a", b"x")
    queue = _core.Counters("broker", "queue", f"jobs-{key}")
    with penstock.publisher(f"shm:/complete-{key}-whole"):
        done = run(_PENSTOCK_COMPLETE="complete_bash", COMP_WORDS="\n".join(typed), COMP_CWORD=str(len(typed) - 1))
    queue.close()
    expected = answer.format(None, f"/complete-{key}-whole", key, tmp_path)
    assert expected in done.stdout.splitlines() and not done.stderr, (done.stdout, done.stderr)


def test_completion_can_be_installed() -> None:
    shell = f"{' '.join([*HERE, '--show-completion'])}; exit $?"  # the shell is who started it: here a bash, always
    done = subprocess.run(["bash", "-c", shell], text=True, capture_output=True, env=environment(), timeout=60)
    assert "_PENSTOCK_COMPLETE=complete_bash" in done.stdout, done.stderr


def through_a_shell(line: str) -> subprocess.CompletedProcess[str]:
    """``{penstock}`` in the line is the command; the exit code is that of the line's first part."""
    shell = line.format(penstock=" ".join(HERE)) + "; exit ${PIPESTATUS[0]}"
    return subprocess.run(["bash", "-c", shell], text=True, capture_output=True, env=environment(), timeout=60)


@pytest.mark.parametrize(
    "arguments",
    ["ls", "config show --all", "doctor", "--help", "sub --help", "--version", "journal", "subb", "sub shm:/x -n 0"],
)
@pytest.mark.parametrize("reader", ["head -c 1 > /dev/null", "true"])
def test_a_closed_pipe_is_no_failure(arguments: str, reader: str) -> None:
    done = through_a_shell(f"{{penstock}} {arguments} 2>&1 | {reader}")
    wrong_usage = 2 if arguments in ("journal", "subb", "sub shm:/x -n 0") else 0
    assert done.returncode in (0, 4, 141, wrong_usage) and not done.stderr, (done.returncode, done.stderr)


@pytest.mark.parametrize("arguments", ["--help", "doctor", "why shm:/none", "journal cat j", "journal cat j --raw"])
def test_a_full_disk_behind_the_output_is_one_sentence(arguments: str, tmp_path: Path) -> None:
    """Whatever was printed: little, what fills the buffer, the report of a check that fails."""
    with Journal(tmp_path / "j") as journal:
        for _ in range(1000):
            journal.append("t", b"x" * 40)
    buffered = "PYTHONUNBUFFERED=1" if arguments == "doctor" else "-u PYTHONUNBUFFERED"
    done = through_a_shell(f"cd {tmp_path}; env {buffered} {{penstock}} {arguments} > /dev/full")
    assert (done.returncode, done.stderr) == (1, "penstock: standard output: No space left on device\n")


@pytest.mark.parametrize("options", ["", "--raw", "--json", "--follow"])
def test_a_closed_output_is_one_sentence(tmp_path: Path, options: str) -> None:
    with Journal(tmp_path / "j") as journal:
        journal.append("t", b"x")
    done = through_a_shell(f"{{penstock}} journal cat {tmp_path}/j {options} >&-")
    assert done.returncode == 1 and done.stderr == "penstock: standard output is closed: there is nowhere to print to\n"


def test_a_closed_output_ends_only_what_needs_it(tmp_path: Path) -> None:
    assert through_a_shell("{penstock} --version 2>&-").stdout.startswith("penstock ")
    assert through_a_shell("{penstock} --version >&- <&-").returncode == 1
    assert through_a_shell("{penstock} subb >&- 2>&-").returncode == 2
    name = f"shm:/unheard-{uuid.uuid4().hex[:8]}"
    done = through_a_shell(f"{{penstock}} record {name} -o {tmp_path}/r --seconds 0.1 >&-")
    assert done.returncode == 0 and not done.stderr
    assert read_story(tmp_path / "r").ended, "it worked to its end"


STARTS = """
import os, signal, sys, threading, time
from penstock.cli import exits, signals

if sys.argv[1] == "start":
    signals.end_at_once()
    try:
        os.kill(os.getpid(), signal.{0})
    except BaseException:
        pass
else:
    class Dropped:
        def __del__(self):
            os.kill(os.getpid(), signal.{0})

    start = threading.Thread.start
    threading.Thread.start = lambda self: (start(self), time.sleep(0.1))  # a loaded machine: the hook is long at work

    def command():
        Dropped()
        while True:
            time.sleep(0.01)  # pause() would wait for ever where the signal came just before it

    with exits.ending():
        exits.unwinding(command)()
"""


@pytest.mark.parametrize("place", ["start", "finaliser"])
@pytest.mark.parametrize(("name", "code"), [("SIGINT", 130), ("SIGTERM", 143)])
def test_no_signal_is_swallowed(name: str, code: int, place: str) -> None:
    """Python drops what is raised in a finaliser, and a library may catch everything while it is imported."""
    done = subprocess.run(
        [sys.executable, "-c", STARTS.format(name), place], capture_output=True, text=True, timeout=60, env=environment()
    )
    assert (done.returncode, done.stderr) == (code, "")


IMPORTS = """
import os, runpy, signal, sys

loud = []

def interrupt(event, arguments):
    if event == "import" and not (pid := os.fork()):
        signal.raise_signal(signal.SIGINT)
    elif event == "import" and os.waitpid(pid, 0)[1] != 130 << 8:
        loud.append(arguments[0])

sys.argv = ["penstock", "ls", "--help"]
sys.addaudithook(interrupt)
try:
    runpy.run_module("penstock", run_name="__main__")
except SystemExit:
    print("LOUD", *loud)
"""


def test_ctrl_c_during_an_import_ends_a_command_quietly() -> None:
    """At every import of a command a process is forked in which Ctrl-C comes just then."""
    done = subprocess.run(
        [sys.executable, "-c", IMPORTS], capture_output=True, text=True, timeout=60, env=environment()
    )
    loud = set(done.stdout.rpartition("LOUD")[2].split())
    assert loud <= {"pkgutil", "penstock", "penstock.__main__", "penstock.cli", "penstock.cli.signals"}, done.stderr


def test_importing_the_command_leaves_signals_alone() -> None:
    code = "import signal, penstock.cli; print(signal.getsignal(signal.SIGINT) is signal.default_int_handler)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, env=environment())
    assert done.stdout == "True\n"


def test_a_job_in_the_background_ignores_ctrl_c() -> None:
    code = "import signal; from penstock.cli import signals; signals.end_at_once(); signal.raise_signal(signal.SIGINT)"
    line = f"trap '' INT; {sys.executable} -c '{code}'"
    assert subprocess.run(["sh", "-c", line], timeout=60, env=environment(), check=False).returncode == 0


def leaves(command: Any, path: str) -> Iterator[tuple[str, Any]]:
    if not hasattr(command, "commands"):
        yield path, command
    for name, inner in getattr(command, "commands", {}).items():
        yield from leaves(inner, f"{path} {name}")


@pytest.mark.parametrize("entry", COMMANDS, ids=lambda entry: entry.name)
def test_every_command_speaks_json_and_shows_an_example(entry: Entry) -> None:
    pytest.importorskip("pyspark" if entry.extra == "spark" else "typer")
    for path, command in leaves(typer.main.get_command(load(entry)), entry.name):
        options = {option for parameter in command.params for option in parameter.opts}
        assert "--json" in options, f"penstock {path} has no --json"
        assert "Example" in (command.help or ""), f"penstock {path} shows no example"
        assert all(parameter.help for parameter in command.params if parameter.param_type_name == "option"), path


@pytest.mark.parametrize("entry", [e for e in COMMANDS if e.extra != "spark"], ids=lambda entry: entry.name)
def test_the_help_of_a_command_cuts_nothing_at_80_columns(
    entry: Entry, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    if not entry.installed:
        pytest.skip("not part of this build")
    monkeypatch.setenv("COLUMNS", "80")
    command = application([entry], "").real(entry.name)
    for path, inner in [(entry.name, command), *leaves(command, entry.name)]:
        context = inner.make_context(path, [], resilient_parsing=True)
        inner.format_help(context, context.make_formatter())
        said = capsys.readouterr().out
        assert all(len(line.rstrip()) <= 80 for line in said.splitlines()), said
        assert "…" not in said and "<bool>" not in said, said
        assert "Example" in said.rpartition("Options")[2], f"{path}: the example does not come last"
        for parameter in inner.params:
            assert all(f"{name}" in said for name in parameter.opts if name.startswith("--")), parameter.opts


def test_help_fits_80_columns_and_ends_with_examples() -> None:
    done = run("--help", COLUMNS="80")
    assert done.returncode == 0 and all(len(line.rstrip()) <= 80 for line in done.stdout.splitlines())
    places = [done.stdout.index(f" {panel} ") for panel in ("Try", "Look", "Keep", "Run")]
    assert places == sorted(places) < [done.stdout.index("Examples")]
    for entry in COMMANDS:  # no summary is cut or wrapped
        assert not entry.installed or entry.summary in done.stdout, entry.name
