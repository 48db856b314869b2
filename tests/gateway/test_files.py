"""Files as people write them: YAML, values from the environment and from secret files, includes, defaults; the schema."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from penstock.gateway import ConfigurationError, read
from penstock.gateway.schema import schema

TIMER = {"name": "python", "entrypoint": "penstock.gateway.modules:Timer"}


def write(path: Path, data: Any) -> Path:
    path.write_text(data if isinstance(data, str) else json.dumps(data))
    return path


def test_yaml_toml_and_json_say_the_same(tmp_path: Path) -> None:
    data = {"modules": [{"name": "t", "loader": TIMER, "args": {"period_s": 0.5}}], "links": []}
    yaml = """
modules:
  - name: t
    loader: {name: python, entrypoint: "penstock.gateway.modules:Timer"}
    args: {period_s: 0.5}
links: []
"""
    toml = """
links = []
[[modules]]
name = "t"
loader = {name = "python", entrypoint = "penstock.gateway.modules:Timer"}
args = {period_s = 0.5}
"""
    texts = {"json": json.dumps(data), "yaml": yaml, "toml": toml}
    found = [read(write(tmp_path / f"g.{suffix}", text)).modules for suffix, text in texts.items()]
    assert found[0] == found[1] == found[2]


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("modules: [\n", r"g\.yaml, line 2"),
        ("modules: []\nlinks: []\nlinks: []\n", r"g\.yaml, line 1: the key 'links' stands twice"),
        ("!!python/object/apply:os.system ['true']\n", r"g\.yaml, line 1"),
    ],
)
def test_wrong_yaml_is_told_by_its_line(tmp_path: Path, text: str, wanted: str) -> None:
    with pytest.raises(ConfigurationError, match=wanted):
        read(write(tmp_path / "g.yaml", text))


def args_of(tmp_path: Path, args: Any) -> Any:
    file = write(tmp_path / "g.json", {"modules": [{"name": "t", "loader": TIMER, "args": args}], "links": []})
    return read(file).modules[0].args


def test_values_from_the_environment_and_from_secret_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SITE", "north")
    monkeypatch.setenv("DIGITS", "0123")
    (tmp_path / "token").write_text("secret\n")
    given = {
        "a": "${SITE}/x", "b": "${NOBODY_SET_THIS:-else}", "c": "${file:token}", "d": "${int:DIGITS}", "e": "${DIGITS}",
        "f": "$${SITE}", "g": ["${bool:NOBODY_SET_THIS:-yes}", 1, None], "h": "${float:NOBODY_SET_THIS:-1.5}",
    }  # fmt: skip
    assert args_of(tmp_path, given) == {
        "a": "north/x", "b": "else", "c": "secret", "d": 123, "e": "0123", "f": "${SITE}", "g": [True, 1, None], "h": 1.5
    }  # fmt: skip


@pytest.mark.parametrize(
    ("value", "wanted"),
    [
        ("${NOBODY_SET_THIS}", r"g\.json: modules\[0\]\.args\.x: the environment variable NOBODY_SET_THIS is not set"),
        ("${file:missing}", r"modules\[0\]\.args\.x: missing cannot be read"),
        ("${int:HOME}", r"is not of the kind int"),
        ("a ${int:HOME}", r"must stand alone"),
        ("${a b}", r"no name of an environment variable"),
    ],
)
def test_what_cannot_be_filled_in_is_told_by_its_place(tmp_path: Path, value: str, wanted: str) -> None:
    with pytest.raises(ConfigurationError, match=wanted):
        args_of(tmp_path, {"x": value})


def test_includes_and_defaults(tmp_path: Path) -> None:
    write(tmp_path / "common.json", {"modules": [{"name": "sink", "loader": TIMER}]})
    file = write(
        tmp_path / "g.json",
        {
            "include": ["common.json"],
            "defaults": {"module": {"loader": TIMER, "stuck_after_s": 3}, "link": {"delivery": "at_least_once"}},
            "modules": [{"name": "a"}, {"name": "b", "stuck_after_s": 4}],
            "links": [{"source": "a", "sink": "sink"}],
        },
    )
    found = read(file)
    assert [(entry.name, entry.stuck_after_s) for entry in found.modules] == [("sink", 10.0), ("a", 3.0), ("b", 4.0)]
    assert found.links[0].options.delivery == "at_least_once"
    write(tmp_path / "common.json", {"include": ["g.json"]})
    with pytest.raises(ConfigurationError, match="includes itself"):
        read(file)


def test_files_of_the_reference(tmp_path: Path) -> None:
    launch = {"path": "/bin/module", "args": ["x"], "grace.period.ms": 5000}
    entrypoint = {"activation.type": "launch", "control.id": "/tmp/c", "launch": launch}
    file = write(
        tmp_path / "g.json",
        {
            "modules": [
                {"name": "one", "loader": {"entrypoint": {"module.path": "/x.so"}}, "args": "text"},
                {"name": "two", "loader": {"name": "outprocess", "entrypoint": entrypoint}, "args": None},
            ],
            "links": [{"source": "*", "sink": "one"}],
        },
    )
    one, two = read(file).modules
    assert (one.loader, one.entrypoint) == ("native", {"module.path": "/x.so"})
    assert two.loader == "process"
    assert two.entrypoint == {
        "activation": "launch", "control_id": "/tmp/c", "path": "/bin/module", "args": ["x"], "grace_period_ms": 5000
    }  # fmt: skip
    wrong = {"modules": [{"name": "x", "loader": {"name": "java", "entrypoint": {"class.name": "X"}}}], "links": []}
    with pytest.raises(ConfigurationError, match=r"modules in Java are not loaded here"):
        read(write(tmp_path / "g.json", wrong))


def test_the_schema_names_every_key_that_is_understood() -> None:
    found = schema()
    module, link = (found["properties"][name]["items"]["properties"] for name in ("modules", "links"))
    assert {"name", "loader", "args", "queue", "restart", "stuck_after_s"} == set(module)
    assert {"source", "sink", "filter", "buffer", "error", "delivery", "max_tries", "ttl_s"} <= set(link)
    assert json.loads(json.dumps(found)) == found
