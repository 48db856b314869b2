"""Files as people write them: YAML, values from the environment and from secret files, includes, defaults; the schema."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from penstock import PenstockError
from penstock.gateway import ConfigurationError, Gateway, read
from penstock.gateway.modules import Timer
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
        ("a: &a [x, x, x, x, x, x, x, x]\n" + "".join(f"{b}: &{b} [*{a}, *{a}, *{a}, *{a}, *{a}, *{a}, *{a}, *{a}]\n"
         for a, b in itertools.pairwise("abcdefghij")) + "modules: *j\nlinks: []\n", "aliases stand for more than"),
        ("modules: &m [*m]\nlinks: []\n", "aliases stand for more than"),
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
        "f": "$${SITE}", "i": "$${", "j": "costs $5 {x}", "g": ["${bool:NOBODY_SET_THIS:-yes}", 1, None], "h": "${float:NOBODY_SET_THIS:-1.5}",
    }  # fmt: skip
    assert args_of(tmp_path, given) == {
        "a": "north/x", "b": "else", "c": "secret", "d": 123, "e": "0123", "f": "${SITE}", "g": [True, 1, None], "h": 1.5,
        "i": "${", "j": "costs $5 {x}",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("value", "wanted"),
    [
        ("${NOBODY_SET_THIS}", r"g\.json: modules\[0\]\.args\.x: the environment variable NOBODY_SET_THIS is not set"),
        ("${file:missing}", r"modules\[0\]\.args\.x: missing cannot be read"),
        ("${int:HOME}", r"is not of the kind int"),
        ("a ${int:HOME}", r"must stand alone"),
        ("${a b}", r"no name of an environment variable"),
        ("${HOME", r"g\.json: modules\[0\]\.args\.x: '\$\{HOME' has a \$\{ without its \}"),
        ("${HOME} and ${HOME", r"without its \}"),
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


@pytest.mark.parametrize(
    ("defaults", "wanted"),
    [
        ({"modul": {}}, r"g\.json: defaults\.modul: is not known here; did you mean module"),
        ({"module": {"stuck_after": 3}}, r"defaults\.module\.stuck_after: is not known here; .*stuck_after_s"),
        ({"module": {"queue": {"deep": 3}}}, r"defaults\.module\.queue\.deep: is not known"),
        ({"module": {"restart": "always"}}, r"defaults\.module\.restart: "),
        ({"link": {"deliver": "at_least_once"}}, r"defaults\.link\.deliver: is not known"),
        ({"link": {"ttl_s": "x"}}, r"defaults\.link\.ttl_s: must be a number"),
        ({"link": {"buffer": "shm:/x"}}, r"defaults\.link\.buffer: must be journal:DIRECTORY"),
        ({"link": []}, r"defaults\.link: must be an object"),
        (7, r"defaults: must be an object"),
    ],
)
def test_what_is_wrong_in_defaults_is_told_there_also_where_no_entry_takes_it(
    tmp_path: Path, defaults: Any, wanted: str
) -> None:
    file = write(tmp_path / "g.json", {"defaults": defaults, "modules": [], "links": []})
    with pytest.raises(ConfigurationError, match=wanted):
        read(file)


def test_what_is_wrong_in_an_included_file_is_told_with_its_name(tmp_path: Path) -> None:
    one = {"name": "a", "loader": TIMER}
    write(tmp_path / "common.json", {"modules": [one, {**one, "nmae": 1}]})
    file = write(tmp_path / "g.json", {"include": ["common.json"], "modules": [one], "links": []})
    with pytest.raises(ConfigurationError, match=r"common\.json: modules\[1\]\.nmae: is not known here"):
        read(file)
    write(tmp_path / "common.json", {"modules": [one]})
    with pytest.raises(ConfigurationError, match=r"g\.json: modules\[0\]\.name: 'a' is the name of modules\[0\] of .*common"):
        read(file)
    write(tmp_path / "common.json", {"modules": 7})
    with pytest.raises(ConfigurationError, match=r"common\.json: modules: must be a list"):
        read(file)


class Refuses(Timer):
    def create(self, broker: Any, configuration: Any) -> None:
        raise OSError("no device")


class Unstarted(Timer):
    def start(self) -> None:
        raise OSError("no device")


@pytest.mark.parametrize(
    ("kind", "links", "wanted"),
    [
        ("Refuses", [], r"g\.json: modules\[0\]: module 'a' failed in create: OSError: no device"),
        ("Unstarted", [], r"g\.json: modules\[0\]: module 'a' failed in start: OSError: no device"),
        ("Timer", [{"source": "a", "sink": "journal:/proc/no/such#t"}], r"g\.json: links\[0\]: "),
    ],
)
def test_what_fails_at_run_time_is_told_with_file_and_place(
    tmp_path: Path, kind: str, links: list[Any], wanted: str
) -> None:
    loader = {"name": "python", "entrypoint": f"tests.gateway.test_files:{kind}"}
    restart = {"restart": "never"}
    file = write(tmp_path / "g.json", {"modules": [{"name": "a", "loader": loader, **restart}], "links": links})
    with pytest.raises(PenstockError, match=wanted):
        Gateway.from_file(file)


def test_a_file_may_say_where_its_schema_is(tmp_path: Path) -> None:
    jsonschema = pytest.importorskip("jsonschema")
    data = {"$schema": "./gateway.schema.json", "modules": [], "links": []}
    jsonschema.validate(data, schema())
    assert read(write(tmp_path / "g.json", data)).modules == ()


def test_an_included_file_that_is_not_there_is_told_with_its_place(tmp_path: Path) -> None:
    file = write(tmp_path / "g.json", {"include": ["none.json"], "modules": [], "links": []})
    with pytest.raises(ConfigurationError, match=r"g\.json: include\[0\]: none\.json cannot be read: No such file"):
        read(file)
