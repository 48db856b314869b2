# ruff: noqa: SIM117 -- nesting shows who outlives whom
"""The C header and library: a C program is compiled, linked and run against channels of this process."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from penstock import shm

SOURCE = Path(__file__).parents[2] / "native" / "tests" / "programs" / "shm_c_program.c"
LONG = 30.0


def test_a_c_program_takes_part(name: str, tmp_path: Path) -> None:
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler")
    program, library = tmp_path / "program", shm.library_path()
    command = [compiler, "-std=c11", "-D_DEFAULT_SOURCE", "-Wall", "-Wextra", "-Werror", "-pedantic"]
    command += [f"-I{shm.include_directory()}", str(SOURCE), "-o", str(program), str(library)]
    subprocess.run([*command, f"-Wl,-rpath,{library.parent}"], check=True)
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
