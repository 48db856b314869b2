"""Configuration: a gateway as a file (JSON, TOML or YAML) or as plain data, checked before anything is made.

A file may take values from the environment and from secret files (``values.py``), include others (``include``) and
give its entries defaults (``defaults``). Files of the reference are understood: ``native`` is the loader where none is
named, ``outprocess`` is ``process``, keys may be dotted.

A syntax error names the file and the line; anything else names the path of the value, as in ``modules[2].loader.name``.
All functions are pure but ``read``; any thread may call them.
"""

from __future__ import annotations

import importlib
import json
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from penstock import address
from penstock.channel import Overflow, choose
from penstock.errors import InvalidArgument, PenstockError, nearest
from penstock.gateway.filters import Filter
from penstock.gateway.links import STAR, Delivery, Link, LinkOptions
from penstock.gateway.place import ConfigurationError, Place
from penstock.gateway.supervision import Policy, Restart
from penstock.gateway.values import resolved, with_defaults

MAX_FILE_BYTES = 16 << 20
MAX_INCLUDES = 8
ABSENT = {"java": "Java", "node": "Node.js", "dotnet": ".NET"}  # loaders of the reference that are not here
KINDS = ("python", "process", "native")
LINK_OPTIONS = (
    "delivery",
    "max_tries",
    "backoff_s",
    "max_backoff_s",
    "ordered",
    "ttl_s",
    "max_messages",
    "max_bytes",
    "overflow",
)


@dataclass(frozen=True, slots=True)
class QueueOptions:
    """How a module's queue behaves: its length, and what a publisher meets when it is full."""

    depth: int = 1024
    overflow: Overflow = Overflow.BLOCK
    timeout_s: float | None = None
    priority: int = 0  # of those linked to one source, who is less gets a message first

    def __post_init__(self) -> None:
        object.__setattr__(self, "overflow", choose(Overflow, self.overflow, "overflow"))


@dataclass(frozen=True, slots=True)
class LoaderEntry:
    """A loader under a name of the user's, with what all its modules share."""

    name: str
    kind: str
    configuration: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ModuleEntry:
    """One module: what makes it, its args and how it is looked after."""

    name: str
    loader: str
    entrypoint: Any
    args: Any = None
    queue: QueueOptions = field(default_factory=QueueOptions)
    restart: Restart | None = None  # None: what is usual for its kind
    stuck_after_s: float | None = 10.0
    where: tuple[str, str | None] = field(default=("", None), compare=False)  # its path, and its file


@dataclass(frozen=True, slots=True)
class Configuration:
    """A whole gateway."""

    modules: tuple[ModuleEntry, ...] = ()
    links: tuple[Link, ...] = ()
    loaders: tuple[LoaderEntry, ...] = ()
    file: str | None = None

    @property
    def addresses(self) -> tuple[str, ...]:
        """The link ends that are addresses, each once, in order."""
        ends = [end for link in self.links for end in link.ends if is_address(end)]
        return tuple(dict.fromkeys(ends))


def is_address(end: str) -> bool:
    """Whether a link's end is an address; what has no known scheme is a module's name."""
    return end.partition(":")[0] in address.ROOMS and ":" in end


def read(path: str | Path) -> Configuration:
    """The gateway that a file describes: ``.toml`` is TOML, ``.yaml`` and ``.yml`` YAML, everything else JSON."""
    return parse(_with_includes(Path(path), ()), file=str(path))


def _with_includes(path: Path, within: tuple[Path, ...]) -> Any:
    """A file's data with everything filled in; what it includes comes first."""
    if path.resolve() in within or len(within) >= MAX_INCLUDES:
        raise ConfigurationError(f"{path}: includes itself, or files nested more than {MAX_INCLUDES} deep")
    data = with_defaults(resolved(Place(_loaded(path), "", str(path))))
    if not isinstance(data, Mapping) or "include" not in data:
        return data
    data = dict(data)
    wanted = Place({"include": data.pop("include")}, "", str(path)).items("include")
    parts = [_with_includes(path.parent / place.text(), (*within, path.resolve())) for place in wanted]
    for key in ("loaders", "modules", "links"):
        lists = [part[key] for part in (*parts, data) if isinstance(part, Mapping) and key in part]
        if lists:
            data[key] = [entry for entries in lists for entry in (entries if isinstance(entries, list) else [entries])]
    return data


def _loaded(path: Path) -> Any:
    with path.open("rb") as file:
        data = file.read(MAX_FILE_BYTES + 1)
    if len(data) > MAX_FILE_BYTES:
        raise ConfigurationError(f"{path}: larger than {MAX_FILE_BYTES >> 20} MiB")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        raise ConfigurationError(f"{path}, line {line}: not UTF-8") from None
    if path.suffix in (".yaml", ".yml"):
        return _yaml(text, path)
    return _toml(text, path) if path.suffix == ".toml" else from_json(text, str(path))


def _yaml(text: str, path: Path) -> Any:
    try:
        import yaml  # type: ignore[import-untyped]
    except ImportError:
        raise ConfigurationError(f"{path}: YAML needs PyYAML: pip install 'penstock[yaml]'") from None

    class Loader(yaml.SafeLoader):  # type: ignore[misc]
        """Refuses a key that stands twice in one mapping."""

        def construct_mapping(self, node: Any, deep: bool = False) -> Any:
            keys = [self.construct_object(key, deep=True) for key, _ in node.value]
            twice = next((key for key in keys if keys.count(key) > 1), None)
            if twice is not None:
                raise yaml.constructor.ConstructorError(None, None, f"the key {twice!r} stands twice", node.start_mark)
            return super().construct_mapping(node, deep)

    try:
        return yaml.load(text, Loader)  # noqa: S506 (a SafeLoader)
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark is not None else 1
        raise ConfigurationError(f"{path}, line {line}: {error.problem}") from None
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        raise ConfigurationError(f"{path}: {error}") from None


def from_json(text: str, file: str | None = None) -> Any:
    """JSON as data; a key that stands twice is refused."""
    try:
        return json.loads(text, object_pairs_hook=_once)
    except json.JSONDecodeError as error:
        where = f"{file}, line {error.lineno}" if file else f"line {error.lineno}"
        raise ConfigurationError(f"{where}, column {error.colno}: {error.msg}") from None
    except _Twice as error:
        raise ConfigurationError(f"{file or 'JSON'}: the key {error.args[0]!r} stands twice in one object") from None
    except RecursionError:
        raise ConfigurationError(f"{file or 'JSON'}: nested too deep") from None
    except ValueError as error:  # a number of more digits than Python converts
        raise ConfigurationError(f"{file or 'JSON'}: {error}") from None


class _Twice(Exception):
    pass


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        keys = [key for key, _ in pairs]
        raise _Twice(next(key for key in keys if keys.count(key) > 1))
    return found


def _toml(text: str, path: Path) -> Any:
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise ConfigurationError(f"{path}: nested too deep") from None
    except ValueError as error:  # TOMLDecodeError, or a number of more digits than Python converts
        raise ConfigurationError(f"{path}: {error}") from None


def parse(data: Any, *, file: str | None = None, partial: bool = False) -> Configuration:
    """Plain data as a configuration. ``partial`` is for updates: either of modules and links may be missing, and
    links may name modules that are there already."""
    top = Place(data, "", file)
    top.only("modules", "links", "loaders")
    if not partial:
        top.need("modules", "links")
    loaders = tuple(_loader(place) for place in top.items("loaders"))
    modules = tuple(_module(place, loaders) for place in top.items("modules"))
    links = tuple(_link(place) for place in top.items("links"))
    _check_names(top, modules)
    if not partial:
        _check_ends(top, modules, links)
    return Configuration(modules, links, loaders, file)


def _loader(place: Place) -> LoaderEntry:
    place.only("type", "name", "configuration")
    place.need("name", "type")
    kind = place["type"].choice(KINDS)
    return LoaderEntry(place["name"].text(), kind, place["configuration"].mapping() if "configuration" in place else {})


def _module(place: Place, loaders: tuple[LoaderEntry, ...]) -> ModuleEntry:
    place.only("name", "loader", "args", "queue", "restart", "stuck_after_s")
    place.need("name", "loader")
    name = place["name"].text()
    if name == STAR:
        place["name"].fail(f'"{STAR}" stands for every module and cannot name one')
    if is_address(name):
        place["name"].fail(f"{address.without_secrets(name)!r} reads as an address; a module's name has no scheme")
    loader = place["loader"]
    loader.only("name", "entrypoint")
    loader.need("entrypoint")
    entrypoint = loader["entrypoint"]
    kind = "native"  # as in files of the reference
    if "name" in loader:
        named = loader["name"].value
        if named in ABSENT and named not in [entry.name for entry in loaders]:
            loader["name"].fail(f"modules in {ABSENT[named]} are not loaded here; see the loader process")
        if named == "outprocess":
            loader, entrypoint = _outprocess(loader)
        kind = loader["name"].choice((*KINDS, *(entry.name for entry in loaders)), what="loader")
    if entrypoint.value in (None, "", {}):
        entrypoint.fail("is empty")
    return ModuleEntry(
        name,
        kind,
        entrypoint.value,
        place["args"].value if "args" in place else None,
        _queue(place["queue"]) if "queue" in place else QueueOptions(),
        restart(place["restart"]) if "restart" in place else None,
        place["stuck_after_s"].number(0, optional=True) if "stuck_after_s" in place else 10.0,
        (place.path, place.file),
    )


def _outprocess(loader: Place) -> tuple[Place, Place]:
    """The reference's ``outprocess`` with its dotted keys, as ``process``."""
    given = loader["entrypoint"]
    given.only("activation.type", "control.id", "message.id", "timeout", "launch")
    given.need("activation.type", "control.id")
    found: dict[str, Any] = {
        "activation": given["activation.type"].choice(("none", "launch")),
        "control_id": given["control.id"].text(),
    }
    if "timeout" in given:
        found["timeout_ms"] = given["timeout"].number(1)
    if "launch" in given:
        launch = given["launch"]
        launch.only("path", "args", "grace.period.ms")
        for name, ours in (("path", "path"), ("args", "args"), ("grace.period.ms", "grace_period_ms")):
            if name in launch:
                found[ours] = launch[name].value
    data = Place({"name": "process", "entrypoint": found}, loader.path, loader.file)
    return data, data["entrypoint"]


def module_entry(data: Mapping[str, Any], loaders: tuple[LoaderEntry, ...]) -> ModuleEntry:
    """One module's description, checked."""
    return _module(Place(data, ""), loaders)


def with_care(
    entry: ModuleEntry, queue: QueueOptions | None, restart: Restart | None, stuck_after_s: float | None
) -> ModuleEntry:
    """The same module, looked after as said here."""
    return replace(entry, queue=queue or QueueOptions(), restart=restart, stuck_after_s=stuck_after_s)


def _queue(place: Place) -> QueueOptions:
    place.only("depth", "overflow", "timeout_s", "priority")
    depth = place["depth"].whole(1, 1 << 20) if "depth" in place else 1024
    overflow = (
        Overflow(place["overflow"].choice([o.value for o in Overflow])) if "overflow" in place else Overflow.BLOCK
    )
    timeout_s = place["timeout_s"].number(0, optional=True) if "timeout_s" in place else None
    return QueueOptions(depth, overflow, timeout_s, place["priority"].whole(0, 255) if "priority" in place else 0)


def restart(place: Place) -> Restart:
    """A policy by its name alone, or with its figures."""
    policies = [policy.value for policy in Policy]
    if isinstance(place.value, str):
        return Restart(Policy(place.choice(policies)))
    place.only("policy", "backoff_s", "max_backoff_s", "limit")
    place.need("policy")
    figures: dict[str, Any] = {name: place[name].number(0) for name in ("backoff_s", "max_backoff_s") if name in place}
    if "limit" in place:
        figures["limit"] = place["limit"].whole(1, optional=True)
    with place.checking():
        return Restart(Policy(place["policy"].choice(policies)), **figures)


def _link(place: Place) -> Link:
    place.only("source", "sink", "filter", "buffer", "error", *LINK_OPTIONS)
    place.need("source", "sink")
    ends = place["source"].text(), place["sink"].text()
    if ends[1] == STAR:
        place["sink"].fail(f'"{STAR}" stands for every source and cannot be a sink')
    for name, end in zip(("source", "sink"), ends, strict=True):
        if is_address(end):
            with place[name].checking():
                address.parse(end)
    return Link(
        *ends,
        link_filter(place["filter"]) if "filter" in place else None,
        _link_options(place),
        _buffer(place["buffer"]) if "buffer" in place else None,
        place["error"].text() if "error" in place else None,
    )


def _link_options(place: Place) -> LinkOptions:
    given: dict[str, Any] = {}
    if "delivery" in place:
        given["delivery"] = Delivery(place["delivery"].choice([one.value for one in Delivery]))
    for name in ("max_tries", "max_messages", "max_bytes"):
        if name in place:
            given[name] = place[name].whole(1, optional=True)
    for name in ("backoff_s", "max_backoff_s", "ttl_s"):
        if name in place:
            given[name] = place[name].number(0, optional=name == "ttl_s")
    if "ordered" in place:
        if not isinstance(place["ordered"].value, bool):
            place["ordered"].fail("is true or false")
        given["ordered"] = place["ordered"].value
    if "overflow" in place:
        given["overflow"] = Overflow(place["overflow"].choice(("block", "drop_newest")))
    with place.checking():
        return LinkOptions(**given)


def _buffer(place: Place) -> str:
    text = place.text()
    with place.checking():
        if address.parse(text).scheme != "journal":
            place.fail("is journal:DIRECTORY, with ?retain_bytes= and ?retain_age_s= to bound it")
    return text


def link_filter(place: Place) -> Filter:
    """A link's filter; its predicate is named as ``package.module:function``."""
    place.only("properties", "min_bytes", "max_bytes", "one_in", "rate_per_s", "predicate")
    given: dict[str, Any] = {}
    if "properties" in place:
        given["properties"] = _wanted_properties(place["properties"])
    for name in ("min_bytes", "max_bytes", "one_in"):
        if name in place:
            given[name] = place[name].whole(0)
    if "rate_per_s" in place:
        given["rate_per_s"] = place["rate_per_s"].number(0)
    if "predicate" in place:
        given["predicate"] = imported(place["predicate"])
    with place.checking():
        return Filter(**given)


def _wanted_properties(place: Place) -> dict[str, str | tuple[str, ...] | None]:
    wanted: dict[str, str | tuple[str, ...] | None] = {}
    for name, value in place.mapping().items():
        if isinstance(value, list) and all(isinstance(item, str) for item in value):
            wanted[name] = tuple(value)
        elif value is None or isinstance(value, str):
            wanted[name] = value
        else:
            place[name].fail(f"is a text, a list of texts or null, not {value!r}")
    return wanted


def imported(place: Place) -> Any:
    """What ``package.module:name`` names; the error says which part is not there."""
    text = place.text()
    module, colon, name = text.partition(":")
    if not colon or not module or not name:
        place.fail(f"{text!r} is not of the form package.module:name")
    try:
        found: Any = importlib.import_module(module)
        for part in name.split("."):
            found = getattr(found, part)
    except PenstockError:
        raise
    except AttributeError:
        place.fail(f"{module!r} has no {name!r}; {nearest(name, [n for n in dir(found) if not n.startswith('_')])}")
    except Exception as error:
        place.fail(f"importing {module!r} failed: {type(error).__name__}: {error}", error)
    return found


def _check_names(top: Place, modules: tuple[ModuleEntry, ...]) -> None:
    seen: dict[str, int] = {}
    for index, module in enumerate(modules):
        if module.name in seen:
            top["modules"][index]["name"].fail(f"{module.name!r} is the name of modules[{seen[module.name]}] already")
        seen[module.name] = index


def _check_ends(top: Place, modules: tuple[ModuleEntry, ...], links: tuple[Link, ...]) -> None:
    names = [module.name for module in modules]
    seen: dict[tuple[str, str], int] = {}
    for index, link in enumerate(links):
        place = top["links"][index]
        for end, name in zip(("source", "sink"), link.ends, strict=True):
            if end == "source" and name.rpartition(".")[0] in names:
                continue  # a named output
            if name not in names and not is_address(name) and not (end == "source" and name == STAR):
                place[end].fail(f"there is no module {address.without_secrets(name)!r}; {nearest(name, names)}")
        if link.error is not None and link.error not in names and not is_address(link.error):
            place["error"].fail(f"there is no module {link.error!r}; {nearest(link.error, names)}")
        if link.ends in seen:
            place.fail(f"{link} is links[{seen[link.ends]}] already")
        seen[link.ends] = index


__all__ = [
    "Configuration",
    "ConfigurationError",
    "InvalidArgument",
    "LoaderEntry",
    "ModuleEntry",
    "QueueOptions",
    "from_json",
    "imported",
    "is_address",
    "link_filter",
    "module_entry",
    "parse",
    "read",
    "restart",
    "with_care",
]
