"""Configuration: a gateway described by a file (JSON, TOML or YAML) or by plain data, checked before anything is
created.

A file may take values from the environment and from secret files (``values.py``), include others (``include``) and
give its entries defaults (``defaults``). Files of Azure IoT Edge v1 are understood: ``native`` is the loader
where none is named, ``outprocess`` is ``process``, keys may be dotted.

A syntax error names the file and the line; anything else names the path of the value, as in ``modules[2].loader.name``.
All functions are pure but ``read``; any thread may call them.
"""

from __future__ import annotations

import difflib
import importlib
import json
import re
import tomllib
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from penstock import address
from penstock.channel import Overflow
from penstock.errors import InvalidArgument, PenstockError, nearest
from penstock.gateway.filters import CHECKS as FILTER_CHECKS
from penstock.gateway.filters import Filter
from penstock.gateway.links import CHECKS as LINK_CHECKS
from penstock.gateway.links import STAR, Link, LinkOptions
from penstock.gateway.place import Checks, ConfigurationError, Place, check_options, checked, located
from penstock.gateway.supervision import CHECKS as RESTART_CHECKS
from penstock.gateway.supervision import Policy, Restart
from penstock.gateway.values import resolved, secret_files, with_defaults
from penstock.quantities import check_duration, check_size

MAX_VALUES = 1_000_000  # of a YAML file, its aliases filled in
MAX_FILE_BYTES = 16 << 20
MAX_INCLUDES = 8
ABSENT = {"java": "Java", "node": "Node.js", "dotnet": ".NET"}  # loaders of Azure IoT Edge v1 that do not exist here
KINDS = ("python", "process", "native")
BUFFER = " (buffer)"  # the end of the name of a buffer's module
TOP_KEYS = ("modules", "links", "loaders", "$schema")  # ``include`` and ``defaults`` have been resolved before
MODULE_KEYS = ("name", "loader", "args", "queue", "restart", "stuck_after_s")
BUFFER_OPTIONS = {"retain_bytes": check_size, "retain_age_s": check_duration}
LINK_KEYS = ("source", "sink", "filter", "buffer", "error", *LINK_CHECKS)
OWN_ERROR = "is the link's own sink, which has failed at these messages: name another module or an address"
QUEUE_CHECKS: Checks = {
    "depth": lambda place: place.integer(1, 1 << 20),
    "overflow": lambda place: place.member(Overflow),
    "timeout_s": lambda place: place.number(0, optional=True),
    "priority": lambda place: place.integer(0, 255),
}


@dataclass(frozen=True, slots=True)
class QueueOptions:
    """A module's queue: its length, and what happens to a publisher when it is full."""

    depth: int = 1024
    overflow: Overflow = Overflow.BLOCK
    timeout_s: float | None = None
    priority: int = 0  # of the sinks of one source, those with a lower number get a message first

    def __post_init__(self) -> None:
        check_options(self, QUEUE_CHECKS)


@dataclass(frozen=True, slots=True)
class LoaderEntry:
    """A loader that the user has named, with the options that its modules share."""

    name: str
    kind: str
    configuration: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ModuleEntry:
    """One module: its loader, its args and its supervision."""

    name: str
    loader: str
    entrypoint: Any
    args: Any = None
    queue: QueueOptions = field(default_factory=QueueOptions)
    restart: Restart | None = None  # None: the default of its kind
    stuck_after_s: float | None = 10.0
    where: tuple[str, str | None] = field(default=("", None), compare=False)  # its path, and its file


@dataclass(frozen=True, slots=True)
class Configuration:
    """A whole gateway."""

    modules: tuple[ModuleEntry, ...] = ()
    links: tuple[Link, ...] = ()
    loaders: tuple[LoaderEntry, ...] = ()
    file: str | None = None
    # all files that were read: this one, included ones, secrets
    files: tuple[str, ...] = field(default=(), compare=False)

    @property
    def addresses(self) -> tuple[str, ...]:
        """The link ends that are addresses, each once, in order."""
        ends = [end for link in self.links for end in link.ends if is_address(end)]
        return tuple(dict.fromkeys(ends))

    def without(self, names: Container[str]) -> Configuration:
        """The same without these modules."""
        return replace(self, modules=tuple(entry for entry in self.modules if entry.name not in names))


def is_address(end: str) -> bool:
    """Whether a link's end is an address; without a known scheme it is the name of a module. The module of a buffer is
    called after its link, and so perhaps after the address at which that begins.
    """
    return end.partition(":")[0] in address.ROOMS and ":" in end and not end.endswith(BUFFER)


def missing_end(end: str, modules: Iterable[str]) -> str:
    """The error text for a link's end that is neither a module nor an address."""
    scheme, colon, rest = end.partition(":")
    close = difflib.get_close_matches(scheme, address.ROOMS, n=1) if colon else []
    hint = f"did you mean {address.without_secrets(f'{close[0]}:{rest}')}?" if close else nearest(end, modules)
    return f"there is no module {address.without_secrets(end)!r}; {hint}"


def read(path: str | Path) -> Configuration:
    """The gateway that a file describes: ``.toml`` is TOML, ``.yaml`` and ``.yml`` YAML, everything else JSON."""
    files: list[Path] = []
    found = _together(_files(Path(path), (), files), str(path), partial=False)
    return replace(found, files=tuple(map(str, files)))


def _files(path: Path, within: tuple[Path, ...], files: list[Path]) -> list[Place]:
    """The data of a file with all values resolved, preceded by those of the files that it includes. Adds every file
    read to ``files``."""
    if path.resolve() in within or len(within) >= MAX_INCLUDES:
        raise ConfigurationError(f"{path}: includes itself, or files nested more than {MAX_INCLUDES} deep")
    raw = _loaded(path)
    files += [path, *secret_files(raw, path.parent)]
    top = Place(resolved(Place(raw, "", str(path))), "", str(path))
    if isinstance(top.value, Mapping) and "defaults" in top:
        _check_defaults(top["defaults"])
    data = with_defaults(top)
    included: list[Place] = []
    if isinstance(data, Mapping) and "include" in data:
        data = {key: value for key, value in data.items() if key != "include"}
        for place in top.items("include"):
            try:
                included += _files(path.parent / place.text(), (*within, path.resolve()), files)
            except OSError as error:
                place.fail(f"{place.text()} cannot be read: {error.strerror}", error)
    return [*included, Place(data, "", str(path))]


def _check_defaults(place: Place) -> None:
    """Check the defaults themselves, so that an error names them and not an entry."""
    place.only("module", "link")
    if "module" in place:
        module = place["module"]
        module.only(*MODULE_KEYS)
        _supervision(module)
        if "loader" in module:
            module["loader"].only("name", "entrypoint")
    if "link" in place:
        link = place["link"]
        link.only(*LINK_KEYS)
        given = checked(link, LINK_CHECKS)
        given.pop("overflow", None)  # the bound that it is about may be an entry's own
        with link.checking():
            LinkOptions(**given)
        _link_parts(link)
        for name in ("source", "sink"):
            if name in link:
                _check_end(link[name], name)


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
    ending = path.suffix.lower()
    if ending in (".yaml", ".yml"):
        return _yaml(text, path)
    return _toml(text, path) if ending == ".toml" else from_json(text, str(path))


def _yaml(text: str, path: Path) -> Any:
    try:
        import yaml  # type: ignore[import-untyped]
    except ImportError:
        raise ConfigurationError(f"{path}: YAML needs PyYAML: pip install 'penstock[yaml]'") from None

    class Loader(yaml.SafeLoader):  # type: ignore[misc]
        """Refuses a key that occurs twice in one mapping."""

        def construct_mapping(self, node: Any, deep: bool = False) -> Any:
            keys = [self.construct_object(key, deep=True) for key, _ in node.value]
            twice = next((key for key in keys if keys.count(key) > 1), None)
            if twice is not None:
                raise yaml.constructor.ConstructorError(None, None, f"the key {twice!r} stands twice", node.start_mark)
            return super().construct_mapping(node, deep)

    try:
        found = yaml.load(text, Loader)  # noqa: S506 (a SafeLoader)
        _check_size(found)
        return found
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark is not None else 1
        raise ConfigurationError(f"{path}, line {line}: {error.problem}") from None
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        raise ConfigurationError(f"{path}: {error}") from None


def _check_size(data: Any) -> None:
    """Aliases may stand for more values than anybody could look at, or for themselves."""
    left, waiting = MAX_VALUES, [data]
    while waiting:
        value = waiting.pop()
        inner = list(value.values()) if isinstance(value, dict) else value if isinstance(value, list) else []
        left -= 1 + len(inner)
        if left < 0:
            raise ValueError(f"its aliases stand for more than {MAX_VALUES} values")
        waiting += inner


def from_json(text: str, file: str | None = None) -> Any:
    """Parse JSON; a key that occurs twice is refused."""
    try:
        return json.loads(text, object_pairs_hook=_without_duplicates)
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


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
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
        last = f" (line {len(text.splitlines()) or 1})" if "at end of document" in str(error) else ""
        raise ConfigurationError(f"{path}: {error}{last}") from None


def parse(data: Any, *, file: str | None = None, partial: bool = False) -> Configuration:
    """Plain data as a configuration. ``partial`` is for updates: modules or links may be missing, and links may name
    modules that exist already."""
    return _together([Place(data, "", file)], file, partial=partial)


def _together(tops: list[Place], file: str | None, *, partial: bool) -> Configuration:
    for top in tops:
        top.only(*TOP_KEYS)
    for name in ("modules", "links") if not partial else ():
        if not any(name in top for top in tops):
            tops[-1].need(name)
    loaders = tuple(_loader(place) for top in tops for place in top.items("loaders"))
    module_places = [place for top in tops for place in top.items("modules")]
    modules = tuple(_module(place, loaders) for place in module_places)
    link_places = [place for top in tops for place in top.items("links")]
    links = tuple(_link(place) for place in link_places)
    _check_names(module_places, modules)
    if not partial:
        _check_ends(link_places, modules, links)
    return Configuration(modules, links, loaders, file)


def _loader(place: Place) -> LoaderEntry:
    place.only("type", "name", "configuration")
    place.need("name", "type")
    kind = place["type"].choice(KINDS)
    return LoaderEntry(place["name"].text(), kind, place["configuration"].mapping() if "configuration" in place else {})


def _module(place: Place, loaders: tuple[LoaderEntry, ...]) -> ModuleEntry:
    place.only(*MODULE_KEYS)
    place.need("name", "loader")
    name = module_name(place["name"])
    loader = place["loader"]
    loader.only("name", "entrypoint")
    loader.need("entrypoint")
    entrypoint = loader["entrypoint"]
    kind = "native"  # as in files of Azure IoT Edge v1
    if "name" not in loader:
        _refuse_python(loader)
    else:
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
        *_supervision(place),
        (place.path, place.file),
    )


def _refuse_python(loader: Place) -> None:
    """Without a name the loader is ``native``: who gives it a class has left out which one is meant."""
    given = loader["entrypoint"].value
    given = given.get("class") if isinstance(given, Mapping) else given
    if isinstance(given, str) and re.fullmatch(r"[\w.]+:[\w.]+", given):
        loader.fail(f'{given!r} is a Python class; name its loader: "name": "python", or "process" for its own process')


def module_name(place: Place) -> str:
    """A name that a link can name, and that lines and tables can show."""
    name = place.text()
    if name == STAR:
        place.fail(f'"{STAR}" stands for every module and cannot name one')
    if is_address(name):
        place.fail(f"{address.without_secrets(name)!r} reads as an address; a module's name has no scheme")
    if not name.isprintable():
        place.fail(f"{name!r} holds characters that cannot be printed")
    return name


def _supervision(place: Place) -> tuple[QueueOptions, Restart | None, float | None]:
    """A module's supervision: its restart policy and ``stuck_after_s``."""
    return (
        _queue(place["queue"]) if "queue" in place else QueueOptions(),
        restart(place["restart"]) if "restart" in place else None,
        place["stuck_after_s"].seconds(optional=True) if "stuck_after_s" in place else 10.0,
    )


def _outprocess(loader: Place) -> tuple[Place, Place]:
    """The ``outprocess`` of Azure IoT Edge v1 with its dotted keys, as ``process``."""
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


def with_supervision(
    entry: ModuleEntry, queue: QueueOptions | None, restart: Restart | None, stuck_after_s: float | None
) -> ModuleEntry:
    """The same module with other supervision."""
    return replace(entry, queue=queue or QueueOptions(), restart=restart, stuck_after_s=stuck_after_s)


def _queue(place: Place) -> QueueOptions:
    place.only(*QUEUE_CHECKS)
    return QueueOptions(**checked(place, QUEUE_CHECKS))


def restart(place: Place) -> Restart:
    """A restart policy, given by its name or as an object."""
    if isinstance(place.value, str):
        return Restart(place.member(Policy))
    place.only(*RESTART_CHECKS)
    place.need("policy")
    given = checked(place, RESTART_CHECKS)
    with place.checking():
        return Restart(**given)


def _link(place: Place) -> Link:
    place.only(*LINK_KEYS)
    place.need("source", "sink")
    ends = _check_end(place["source"], "source"), _check_end(place["sink"], "sink")
    accepts, buffer, error = _link_parts(place)
    if error == ends[1]:
        place["error"].fail(f"{address.without_secrets(error)!r} {OWN_ERROR}")
    return Link(*ends, accepts, _link_options(place), buffer, error, (place.path, place.file))


def _check_end(place: Place, role: str) -> str:
    end = place.text()
    if role == "sink" and end == STAR:
        place.fail(f'"{STAR}" stands for every source and cannot be a sink')
    if role == "source" and end.endswith(".") and not is_address(end):
        place.fail(f"{end!r} names no output; an output of a module is MODULE.OUTPUT")
    if is_address(end):
        with place.checking():
            address.check(end, "subscriber" if role == "source" else "publisher")
    return end


def _link_parts(place: Place) -> tuple[Filter | None, str | None, str | None]:
    return (
        link_filter(place["filter"]) if "filter" in place else None,
        check_buffer(place["buffer"]) if "buffer" in place else None,
        _check_end(place["error"], "sink") if "error" in place else None,
    )


def _link_options(place: Place) -> LinkOptions:
    given = checked(place, LINK_CHECKS)
    with place.checking():
        return LinkOptions(**given)


def check_buffer(place: Place) -> str:
    """The address of a link's buffer."""
    text = place.text()
    with place.checking():
        parsed = address.parse(text)
        if parsed.scheme != "journal" or parsed.topic:
            place.fail("must be journal:DIRECTORY, with ?retain_bytes= and ?retain_age_s= to bound it")
        for name, value in parsed.options.items():
            if name not in BUFFER_OPTIONS:
                place.fail(f"a buffer has no option {name!r}; {nearest(name, BUFFER_OPTIONS)}")
            BUFFER_OPTIONS[name](value, name)
    return text


def link_filter(place: Place) -> Filter:
    """A link's filter; its predicate is named as ``package.module:function``."""
    place.only(*FILTER_CHECKS, "predicate", "type")
    given = checked(place, {**FILTER_CHECKS, "predicate": imported, "type": imported})
    with place.checking():
        return Filter(**given)


def imported(place: Place) -> Any:
    """The object that ``package.module:name`` names; the error says which part does not exist."""
    text = place.text()
    module, colon, name = text.partition(":")
    if not colon or not module or not name:
        place.fail(f"{text!r} is not of the form package.module:name")
    try:
        found: Any = importlib.import_module(module)
        for part in name.split("."):
            found = getattr(found, part)
    except PenstockError as error:
        raise located((place.path, place.file), error)  # noqa: B904  # the same error
    except AttributeError:
        place.fail(f"{module!r} has no {name!r}; {nearest(name, [n for n in dir(found) if not n.startswith('_')])}")
    except (Exception, SystemExit) as error:  # sys.exit in a module is no wish of the user to end the command
        told = f"importing {module!r} failed: {type(error).__name__}: {error}"
        if not isinstance(error, ModuleNotFoundError) or not f"{module}.".startswith(f"{error.name}."):
            place.fail(told, error)  # the cause names a missing package that the module imports
    else:
        return found
    place.fail(told)


def _check_names(places: list[Place], modules: tuple[ModuleEntry, ...]) -> None:
    seen: dict[str, Place] = {}
    for place, module in zip(places, modules, strict=True):
        if module.name in seen:
            place["name"].fail(f"{module.name!r} is the name of {_named(seen[module.name], place)} already")
        seen[module.name] = place
    for place, module in zip(places, modules, strict=True):
        if (owner := output_of(module.name, seen)) is not None:
            place["name"].fail(f"{module.name!r} reads as an output of {_named(seen[owner], place)}, {owner!r}")


def output_of(name: str, modules: Container[str]) -> str | None:
    """The one of ``modules`` that a name reads as an output of (``MODULE.OUTPUT``), if there is one."""
    ends = (at for at, letter in enumerate(name) if letter == ".")
    return next((name[:at] for at in ends if name[:at] in modules), None)


def _named(place: Place, near: Place) -> str:
    return place.path if place.file == near.file else f"{place.path} of {place.file}"


def _check_ends(places: list[Place], modules: tuple[ModuleEntry, ...], links: tuple[Link, ...]) -> None:
    names = dict.fromkeys(module.name for module in modules)
    seen: dict[tuple[str, str], Place] = {}
    for place, link in zip(places, links, strict=True):
        for end, name in zip(("source", "sink"), link.ends, strict=True):
            if end == "source" and name.rpartition(".")[0] in names:
                continue  # a named output
            if name not in names and not is_address(name) and not (end == "source" and name == STAR):
                place[end].fail(missing_end(name, names))
        if link.error is not None and link.error not in names and not is_address(link.error):
            place["error"].fail(missing_end(link.error, names))
        if link.ends in seen:
            place.fail(f"{link} is {_named(seen[link.ends], place)} already")
        seen[link.ends] = place


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
    "with_supervision",
]
