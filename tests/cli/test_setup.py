"""``doctor`` and ``config``."""

from __future__ import annotations

import json
from pathlib import Path

from .command import run


def test_doctor_finds_this_machine_fit() -> None:
    done = run("doctor", "--json")
    findings = [json.loads(line) for line in done.stdout.splitlines()]
    by_check = {finding["check"]: finding for finding in findings}
    assert by_check["native core"]["verdict"] == "ok"
    assert {"python", "shared memory", "descriptors", "memory", "java", "spark", "clock"} <= set(by_check)
    assert done.returncode == (4 if any(f["verdict"] == "bad" for f in findings) else 0)
    assert all(finding["remedy"] for finding in findings if finding["verdict"] == "bad")


def test_doctor_tells_what_is_bad(tmp_path: Path) -> None:
    done = run("doctor", "--json", JAVA_HOME=str(tmp_path), PATH="/nonexistent")
    java = next(f for f in map(json.loads, done.stdout.splitlines()) if f["check"] == "java")
    assert java["verdict"] in ("note", "ok")


def test_config_shows_the_origin_of_each_value(tmp_path: Path) -> None:
    (tmp_path / "penstock.toml").write_text('[sub]\nformat = "hex"\ntimeout = 5\n[top]\nevery = 2.0\n')
    done = run("config", "show", "--json", cwd=tmp_path, PENSTOCK_SUB_FORMAT="json")
    rows = {(r["command"], r["option"]): r for r in map(json.loads, done.stdout.splitlines())}
    assert rows["sub", "format"]["value"] == "json" and rows["sub", "format"]["origin"] == "PENSTOCK_SUB_FORMAT"
    assert rows["sub", "timeout"]["origin"] == "penstock.toml" and rows["top", "every"]["value"] == 2.0


def test_config_all_lists_defaults() -> None:
    rows = [json.loads(line) for line in run("config", "show", "--all", "--json").stdout.splitlines()]
    assert {"command": "sub", "option": "format", "value": "text", "origin": "default"} in rows


def test_config_refuses_an_unknown_table(tmp_path: Path) -> None:
    (tmp_path / "penstock.toml").write_text("[subb]\nx = 1\n")
    done = run("config", "show", cwd=tmp_path)
    assert done.returncode == 2 and "sub" in done.stderr


def test_config_file_by_variable(tmp_path: Path) -> None:
    (tmp_path / "other.toml").write_text('[sub]\nformat = "hex"\n')
    done = run("config", "show", "--json", PENSTOCK_CONFIG=str(tmp_path / "other.toml"))
    assert json.loads(done.stdout.splitlines()[0])["value"] == "hex"
    missing = run("config", "show", PENSTOCK_CONFIG=str(tmp_path / "none.toml"))
    assert missing.returncode == 2 and "none.toml" in missing.stderr
