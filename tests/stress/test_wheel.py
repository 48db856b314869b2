"""The wheels in ``dist`` (``make wheel``): each in an empty environment, without a compiler on the PATH."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
WHEELS = sorted((ROOT / "dist").glob("*.whl"))
README = re.findall(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(), re.M | re.S)
PUBLISH = """
import penstock
with penstock.publisher("shm:/wheel", reliable=True) as publisher:
    assert publisher.wait_ready(1, 60)
    publisher.publish(b"over")
    print("published")
    input()  # the channel stays until the other has read
"""
READ = """
import penstock
with penstock.subscriber("shm:/wheel", reliable=True) as subscriber:
    print(bytes(subscriber.read(timeout=60)).decode())
"""
pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.skipif(not WHEELS, reason="no wheel in dist: make wheel"),
]


def interpreter(wheel: Path) -> str | None:
    """One at hand that the wheel is for."""
    tag = re.search(r"-cp3(\d+)-", wheel.name)
    assert tag is not None
    if sys.version_info[:2] == (3, int(tag[1])):
        return sys.executable
    found = sorted((Path.home() / ".pyenv" / "versions").glob(f"3.{tag[1]}.*/bin/python3"))
    return str(found[-1]) if found else shutil.which(f"python3.{tag[1]}")


@pytest.fixture(scope="module", params=WHEELS, ids=lambda path: path.name)
def installed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder of programs of an environment that has the wheel, numpy and nothing else."""
    python = interpreter(request.param)
    if python is None:
        pytest.skip("no Python at hand for it")
    place = tmp_path_factory.mktemp("environment")
    subprocess.run([python, "-m", "venv", place], check=True, timeout=300)
    install = [place / "bin" / "python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*install, f"{request.param}[numpy]"], check=True, env=environment(place / "bin"), timeout=500)
    yield place / "bin"


def environment(programs: Path) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "CMAKE", "VIRTUAL"))}
    return {**kept, "PATH": str(programs), "PYTHONSAFEPATH": "1"}


def run(programs: Path, *command: str, place: Path) -> subprocess.CompletedProcess[str]:
    words = [str(programs / command[0]), *command[1:]]
    return subprocess.run(words, env=environment(programs), cwd=place, capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize("number", range(len(README)))
def test_the_examples_of_readme(installed: Path, number: int, tmp_path: Path) -> None:
    (tmp_path / "example.py").write_text(README[number])
    done = run(installed, "python", "example.py", place=tmp_path)
    assert done.returncode == 0 and done.stdout.strip() and not done.stderr, done.stderr


def test_the_command(installed: Path, tmp_path: Path) -> None:
    told = run(installed, "penstock", "doctor", place=tmp_path)
    assert told.returncode == 0, told.stdout + told.stderr
    listed = run(installed, "penstock", "--help", place=tmp_path).stdout
    assert " doctor " in listed and " bench " not in listed, "its scripts are not in a wheel"


def test_shared_memory_between_two_processes(installed: Path, tmp_path: Path) -> None:
    command = [installed / "python", "-c", PUBLISH]
    publisher = subprocess.Popen(
        command, env=environment(installed), cwd=tmp_path, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        read = run(installed, "python", "-c", READ, place=tmp_path)
        assert (read.stdout, read.stderr) == ("over\n", "")
        out, _ = publisher.communicate("\n", timeout=60)
        assert publisher.returncode == 0 and out == "published\n"
    finally:
        publisher.kill()
        publisher.communicate()


def test_nothing_but_the_package_is_in_it(installed: Path, tmp_path: Path) -> None:
    where = run(installed, "python", "-c", "import penstock._core as c; print(c.__file__)", place=tmp_path).stdout
    assert Path(where).is_relative_to(installed.parent), where


def test_the_source_distribution_is_the_same_every_time(tmp_path: Path) -> None:
    specification = importlib.util.spec_from_file_location("wheels", ROOT / "scripts" / "wheels.py")
    assert specification is not None and specification.loader is not None
    wheels = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(wheels)
    folders = [tmp_path / name for name in ("one", "two")]
    for folder in folders:
        folder.mkdir()
    first, second = (wheels.build_sdist(folder, "1700000000").read_bytes() for folder in folders)
    assert first == second
