"""Descriptions: what is right is taken, what is wrong is told by file and line, or by path."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.channel import Overflow
from penstock.gateway import ConfigurationError, Filter, Policy, Restart, read
from penstock.gateway.configuration import from_json, imported, parse
from penstock.gateway.loaders import recipe
from penstock.gateway.place import Place

KIND = {"name": "python", "entrypoint": "penstock.gateway.modules:Timer"}
A, B = {"name": "a", "loader": KIND}, {"name": "b", "loader": KIND}


def module(**more: Any) -> dict[str, Any]:
    return {"modules": [A, {**B, **more}], "links": []}


def link(**more: Any) -> dict[str, Any]:
    return {"modules": [A, B], "links": [{"source": "a", "sink": "b"}, {"source": "b", "sink": "a", **more}]}


def test_everything_a_file_can_say(tmp_path: Path) -> None:
    file = tmp_path / "gateway.json"
    file.write_text(
        json.dumps(
            {
                "loaders": [{"name": "mine", "type": "process", "configuration": {"timeout_ms": 5000}}],
                "modules": [
                    A,
                    {
                        **B,
                        "loader": {"name": "mine", "entrypoint": "x:Y"},
                        "args": {"n": 1},
                        "queue": {"depth": 7, "overflow": "drop_oldest", "timeout_s": 1},
                        "restart": {"policy": "on_failure", "backoff_s": 1, "max_backoff_s": 2, "limit": None},
                        "stuck_after_s": None,
                    },
                ],
                "links": [
                    {"source": "*", "sink": "journal:/tmp/x#all"},
                    {"source": "tcp://127.0.0.1:5000", "sink": "a"},
                    {"source": "a", "sink": "b", "filter": {"properties": {"k": ["v", "w"]}, "one_in": 2}},
                ],
            }
        )
    )
    made = read(file)
    b = made.modules[1]
    assert (b.queue.depth, b.queue.overflow, b.queue.timeout_s) == (7, Overflow.DROP_OLDEST, 1.0)
    assert b.restart == Restart(Policy.ON_FAILURE, 1, 2, None)
    assert b.stuck_after_s is None
    assert made.links[2].filter == Filter({"k": ("v", "w")}, one_in=2)
    assert made.addresses == ("journal:/tmp/x#all", "tcp://127.0.0.1:5000")
    assert made.loaders[0].configuration == {"timeout_ms": 5000}
    assert made == read(file), "equal descriptions compare equal"


def test_toml_says_the_same_as_json(tmp_path: Path) -> None:
    toml, plain = tmp_path / "g.toml", tmp_path / "g.json"
    toml.write_text(
        '[[modules]]\nname = "a"\nloader = {name = "python", entrypoint = "penstock.gateway.modules:Timer"}\n'
        "[modules.args]\nperiod_s = 2.0\n"
        '[[links]]\nsource = "a"\nsink = "a"\n'
    )
    plain.write_text(
        json.dumps({"modules": [{**A, "args": {"period_s": 2.0}}], "links": [{"source": "a", "sink": "a"}]})
    )
    assert read(toml).modules == read(plain).modules
    assert read(toml).links == read(plain).links
    assert read(toml.rename(tmp_path / "G.TOML")).links == read(plain).links


@pytest.mark.parametrize(
    ("name", "text", "wanted"),
    [
        ("g.json", '{\n "modules": [\n  {,\n', r"g\.json, line 3, column 4"),
        ("g.json", "", r"g\.json, line 1"),
        ("g.toml", "[[modules]]\nname = \n", r"g\.toml: .*line 2"),
        ("g.json", '{"modules": [], "modules": []}', r"'modules' stands twice"),
        ("g.json", "[" * 200000, r"g\.json.*(deep|line)"),
    ],
)
def test_a_syntax_error_names_file_and_line(tmp_path: Path, name: str, text: str, wanted: str) -> None:
    file = tmp_path / name
    file.write_text(text)
    with pytest.raises(ConfigurationError, match=wanted):
        read(file)


def test_bytes_that_are_no_text_name_the_line(tmp_path: Path) -> None:
    file = tmp_path / "g.json"
    file.write_bytes(b'{\n"modules": "\xff"}')
    with pytest.raises(ConfigurationError, match="line 2: not UTF-8"):
        read(file)


@pytest.mark.parametrize(
    ("data", "wanted"),
    [
        ([], "must be an object"),
        ({}, "^modules: is missing"),
        ({"modules": []}, "^links: is missing"),
        ({"modules": {}, "links": []}, "^modules: must be a list"),
        ({"modules": [7], "links": []}, r"^modules\[0\]: must be an object"),
        ({"modules": [], "links": [], "modulse": []}, "^modulse: is not known here; did you mean modules"),
        (module(name=None), r"^modules\[1\]\.name: must be a text, not null"),
        (module(name=""), r"^modules\[1\]\.name: is empty"),
        (module(name="*"), r'^modules\[1\]\.name: "\*" stands for every module'),
        (module(name="shm:/x"), r"^modules\[1\]\.name: .*address"),
        (module(name="a"), r"^modules\[1\]\.name: 'a' is the name of modules\[0\]"),
        ({"modules": [{"name": "a"}], "links": []}, r"^modules\[0\]\.loader: is missing"),
        (module(loader={"name": "python"}), r"^modules\[1\]\.loader\.entrypoint: is missing"),
        (module(loader={"name": "python"}), r"^modules\[1\]\.loader\.entrypoint: is missing"),
        (module(loader={"name": "python", "entrypoint": ""}), r"^modules\[1\]\.loader\.entrypoint: is empty"),
        (module(loader={"name": "pyton", "entrypoint": "x:Y"}), r"^modules\[1\]\.loader\.name: .*did you mean python"),
        (module(loader={"entrypoint": "a.b:C"}), r"""^modules\[1\]\.loader: 'a\.b:C' is a Python class; .*"name": "python\""""),
        (module(loader={"entrypoint": {"class": "a:C"}}), r"""^modules\[1\]\.loader: 'a:C' is a Python class"""),
        (module(queue={"depth": 0}), r"^modules\[1\]\.queue\.depth: is 0"),
        (module(queue={"overflow": "drop"}), r"^modules\[1\]\.queue\.overflow: .*drop_"),
        (module(restart="always"), r"^modules\[1\]\.restart: 'always' is not a choice"),
        (module(restart={"policy": "never", "limit": 0}), r"^modules\[1\]\.restart\.limit: is 0"),
        (module(restart={"policy": "never", "backoff_s": 60}), r"^modules\[1\]\.restart: backoff_s=60"),
        (module(stuck_after_s="soon"), r"^modules\[1\]\.stuck_after_s: must be a number"),
        (link(sink="*"), r'^links\[1\]\.sink: "\*" stands for every source'),
        (link(sink="c"), r"^links\[1\]\.sink: there is no module 'c'"),
        (link(source="c"), r"^links\[1\]\.source: there is no module 'c'"),
        (link(source="a", sink="b"), r"^links\[1\]: a -> b is links\[0\] already"),
        (link(source="shm:camera"), r"^links\[1\]\.source: .*begins with '/'"),
        (link(filter={"rate": 1}), r"^links\[1\]\.filter\.rate: is not known here; .*rate_per_s"),
        (link(filter={"one_in": 0}), r"^links\[1\]\.filter\.one_in: is 0"),
        (link(filter={"properties": {"k": 7}}), r"^links\[1\]\.filter\.properties\.k: must be a text"),
        (link(filter={"predicate": "nothing"}), r"^links\[1\]\.filter\.predicate: .*package\.module:name"),
        (link(filter={"predicate": "no.such:f"}), r"^links\[1\]\.filter\.predicate: importing 'no\.such' failed"),
        (link(filter={"predicate": "json:laods"}), r"^links\[1\]\.filter\.predicate: .*did you mean loads"),
        (link(source="shm:/camera?slot=4"), r"^links\[1\]\.source: subscriber of .* has no option 'slot'"),
        (link(sink="shm:/camera?slotz=4"), r"^links\[1\]\.sink: publisher of .* has no option 'slotz'; did you mean slots"),
        (link(error="broker://localhost:1/t?tokn=x"), r"^links\[1\]\.error: publisher of .* has no option 'tokn'"),
        (link(buffer="journal:/x?retain_byte=1"), r"^links\[1\]\.buffer: .* no option 'retain_byte'; did you mean retain_bytes"),
        (link(buffer="journal:/x?retain_bytes=0"), r"^links\[1\]\.buffer: retain_bytes='0' must be a size in bytes"),
        (link(buffer="journal:/x?retain_bytes=abc"), r"^links\[1\]\.buffer: retain_bytes 'abc' is no size"),
        (link(buffer="journal:/x?retain_age_s=soon"), r"^links\[1\]\.buffer: retain_age_s 'soon' is no "),
    ],
)
def test_what_is_wrong_is_told_by_its_path(data: Any, wanted: str) -> None:
    with pytest.raises(ConfigurationError, match=wanted):
        parse(data)


@pytest.mark.parametrize(
    ("loading", "args", "wanted"),
    [
        ({"entrypoint": "no.such.package:Class"}, None, r"modules\[0\]\.loader\.entrypoint: importing 'no\.such\.package' failed"),
        ({"entrypoint": "penstock.gateway.modules:Tmier"}, None, r"modules\[0\]\.loader\.entrypoint: .*did you mean Timer"),
        ({"entrypoint": "penstock.gateway.modules"}, None, r"form package\.module:name"),
        ({"entrypoint": "json:loads"}, None, "no class with a receive"),
        ({"entrypoint": {"klass": "x"}}, None, r"entrypoint\.klass: is not known"),
        ({"entrypoint": "penstock.gateway.modules:Timer"}, {"period": 1}, r"modules\[0\]\.args: 'period' is not known"),
        ({"entrypoint": "penstock.gateway.modules:Timer"}, {"period_s": "x"}, r"modules\[0\]\.args: period_s must be a number, such as 1\.0"),
        ({"name": "native", "entrypoint": "a.b:C"}, None, 'a Python class has "python" as the name of its loader'),
        ({"name": "native", "entrypoint": "/no/such.so"}, None, r"modules\[0\]\.loader\.entrypoint: cannot be loaded"),
        ({"name": "process", "entrypoint": {"activation": "none"}}, None, r"control_id: is missing"),
        ({"name": "process", "entrypoint": {"activation": "launch", "control_id": "x"}}, None, r"path: is missing"),
    ],
)
def test_what_cannot_be_loaded_is_told_by_its_path(loading: dict[str, Any], args: Any, wanted: str) -> None:
    entry = parse({"modules": [{**A, "loader": {**KIND, **loading}, "args": args}], "links": []}).modules[0]
    with pytest.raises(ConfigurationError, match=wanted):
        recipe(entry, {})


@pytest.mark.parametrize("code", [0, 3])
def test_a_module_that_exits_at_its_import_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    (tmp_path / f"exits{code}.py").write_text(f"import sys\nsys.exit({code})\n")
    monkeypatch.syspath_prepend(tmp_path)
    loading = {**KIND, "entrypoint": f"exits{code}:Class"}
    with pytest.raises(ConfigurationError, match=f"importing 'exits{code}' failed: SystemExit: {code}"):
        recipe(parse({"modules": [{**A, "loader": loading}], "links": []}).modules[0], {})


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(
        ["modules", "links", "loaders", "name", "loader", "entrypoint", "args", "source", "sink", "filter", "queue"]
    ), inner, max_size=5),
    max_leaves=25,
)  # fmt: skip


@given(JSON)
def test_any_data_is_a_description_or_a_clear_refusal(data: Any) -> None:
    for partial in (False, True):
        try:
            parse(data, partial=partial)
        except ConfigurationError as error:
            assert str(error)


@given(st.text(max_size=60))
def test_any_text_is_data_or_a_clear_refusal(text: str) -> None:
    try:
        from_json(text)
    except ConfigurationError as error:
        assert "line" in str(error) or "twice" in str(error)


def test_a_misspelled_package_is_a_wrong_file_and_a_missing_one_of_a_module_is_not(tmp_path: Path) -> None:
    (tmp_path / "wants.py").write_text("import not_there_at_all\n")
    for name, cause in (("no_such_package:Module", None), ("wants:Module", ModuleNotFoundError)):
        with pytest.MonkeyPatch.context() as patch, pytest.raises(ConfigurationError, match="importing") as told:
            patch.syspath_prepend(tmp_path)
            imported(Place(name, "class"))
        assert type(told.value.__context__) is (cause or type(None))


def test_a_file_that_ends_in_the_middle_is_told_with_its_last_line(tmp_path: Path) -> None:
    (tmp_path / "gateway.toml").write_text("links = []\nmodules = [\n")
    with pytest.raises(ConfigurationError, match="line 2"):
        read(tmp_path / "gateway.toml")
