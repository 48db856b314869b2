# ruff: noqa: SIM117 -- nesting shows who outlives whom
"""The C header and library: a C program is compiled, linked and run against channels of this process."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from penstock import shm

EXAMPLES = Path(__file__).parents[2] / "examples"
SOURCE = Path(__file__).parents[2] / "native" / "tests" / "programs" / "shm_c_program.c"
LONG = 30.0


def built(source: Path, directory: Path) -> Path:
    """The program, compiled against the header and the library of the package."""
    compilers, standard = (("gcc", "cc"), "c11") if source.suffix == ".c" else (("g++", "c++"), "c++17")
    compiler = next(filter(None, map(shutil.which, compilers)), None)
    if compiler is None:
        pytest.skip("no compiler")
    program, library = directory / source.stem, shm.library_path()
    command = [compiler, f"-std={standard}", "-D_DEFAULT_SOURCE", "-Wall", "-Wextra", "-Werror", "-pedantic"]
    command += [f"-I{shm.include_directory()}", str(source), "-o", str(program), str(library)]
    subprocess.run([*command, f"-Wl,-rpath,{library.parent}"], check=True)
    return program


@pytest.mark.parametrize("example", ["channels.c", "channels.cpp"])
def test_the_examples(example: str, tmp_path: Path) -> None:
    done = subprocess.run([built(EXAMPLES / example, tmp_path)], capture_output=True, text=True, timeout=LONG)
    assert done.returncode == 0, done.stderr
    if example == "channels.c":
        assert done.stdout == "hello from C (front, message 1)\n"
    else:
        assert done.stdout.splitlines()[:2] == ["hello from C++ (message 1)", "newest: 41"]
        assert "must begin with '/'" in done.stdout.splitlines()[2]


def test_a_c_program_takes_part(name: str, tmp_path: Path) -> None:
    program = built(SOURCE, tmp_path)
    with shm.Publisher(f"{name}/in", reliable=True, timeout=LONG) as publisher:
        with shm.Subscriber(f"{name}/out", reliable=True) as subscriber:
            process = subprocess.Popen([program, name], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
            assert publisher.wait_ready(1, LONG)
            sent = [b"%d" % i * (1 + i % 9) for i in range(200)]
            for data in sent:
                publisher.publish(data)
                message = subscriber.read(LONG)
                assert message is not None and bytes(message) == data
                del message
            publisher.publish(b"")
            out, errors = process.communicate(timeout=LONG)
            assert (process.returncode, out) == (0, "ok\n"), errors
