"""Addresses: one string that says where messages go or come from, at any reach.

=============================================  ==============================================
``bus:NAME``                                   in this process (``?id=N`` names a message id)
``shm:/NAME``                                  processes of this machine
``tcp://HOST:PORT``                            between machines, not stored
``journal:DIRECTORY#TOPIC``                    a log on disk
``broker://HOST:PORT/TOPIC?queue=NAME``        a durable broker
``nats://HOST:PORT/SUBJECT``                   servers of NATS, which others run (port 4222 if none is written)
=============================================  ==============================================

Options follow ``?``; they are those that the room's classes take. ``TOKEN@`` in front of a host is the same as
``?token=TOKEN``, and ``USER:PASSWORD@`` as ``?user=USER&password=PASSWORD``: secrets, which are never part of a host
nor printed. This module knows rooms by name only and imports one when an address of it is opened.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from types import ModuleType
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, Protocol, TypeVar, overload
from urllib.parse import parse_qsl, unquote

from penstock import clock
from penstock.channel import Publisher, Subscriber
from penstock.errors import InvalidArgument, nearest
from penstock.secrecy import SECRETS
from penstock.secrecy import without_secrets as without_secrets  # noqa: PLC0414 - also for those who know addresses only
from penstock.topics import overlap

if TYPE_CHECKING:
    from numpy import dtype, ndarray

    from penstock.durable_publisher import DurablePublisher
    from penstock.types import Codec, TypedPublisher, TypedSubscriber
    from penstock.types.image import Image

T = TypeVar("T")
Options = ParamSpec("Options")
Handle = TypeVar("Handle")
APublisher_co = TypeVar("APublisher_co", bound=Publisher[Any], covariant=True)
ASubscriber_co = TypeVar("ASubscriber_co", bound=Subscriber[Any], covariant=True)

ROOMS: Mapping[str, str] = {
    "bus": "penstock.bus",
    "shm": "penstock.shm",
    "tcp": "penstock.tcp",
    "journal": "penstock.journal",
    "broker": "penstock.broker",
    "nats": "penstock.nats",
}


LOCAL = {"bus": "bus:NAME", "shm": "shm:/NAME", "journal": "journal:DIRECTORY"}
NETWORK = {"tcp": "tcp://HOST:PORT", "broker": "broker://HOST:PORT/TOPIC", "nats": "nats://HOST[:4222]/SUBJECT"}
DEFAULT_PORTS = {"nats": 4222}  # of each host that is written without one
NO_BROKER = "there is no broker"  # what a tcp:// port of ours answers to a broker's client
EVOLVE = "compatible"  # the default of evolve=
# these reaches store messages already; their own options may have the same names
KEEPING = ("journal", "broker", "nats")
PATTERNS = ("journal", "broker", "nats")  # a subscriber's topic may have wildcards there
DEFAULT_TOPIC = "default"  # of journals and brokers


@dataclass(frozen=True, slots=True)
class Address:
    """The parts of an address. ``name`` is the bus, channel or directory; ``topic`` what follows it.

    ``text`` is the whole address without secrets, so it may be printed and logged.
    """

    scheme: str
    name: str = ""
    host: str = ""
    port: int | None = None
    topic: str = ""
    options: Mapping[str, str] = field(default_factory=dict)
    text: str = ""
    schema: str = ""  #: the schema of a typed publisher's messages, for reaches that announce it when they open

    def __str__(self) -> str:
        return self.text


def parse(text: str) -> Address:
    """Split ``text`` into its parts; ``InvalidArgument`` says what is wrong and shows the right form."""
    if not isinstance(text, str):
        raise TypeError(f"an address is a str such as 'shm:/camera', not {type(text).__name__}")
    scheme, colon, rest = text.partition(":")
    text = without_secrets(text)  # from here on `text` is redacted: use it in messages only
    if not colon or scheme not in ROOMS:
        schemes = ("broker",) if "/" in text or "," in text else ("broker", "tcp")
        meant = f"did you mean {' or '.join(f'{each}://{text}' for each in schemes)}?"
        hint = meant if _HOST_AND_PORT.match(text) else nearest(scheme, ROOMS)
        if not colon and scheme in ROOMS:
            raise InvalidArgument(f"address {text!r} is a scheme alone; write {(LOCAL | NETWORK)[scheme]}")
        known = "" if hint.startswith("valid") else f" ({', '.join(ROOMS)})"
        raise InvalidArgument(f"address {text!r} begins with no known reach{known}; {hint}")
    rest, _, query = rest.partition("?")
    written = parse_qsl(query, keep_blank_values=True)
    options = dict(written)
    for name, value in written:
        if options[name] != value:
            raise InvalidArgument(f"address {text!r} has {name!r} twice, with different values")
    if scheme in NETWORK:
        return _parse_network(scheme, rest, options, text)
    topic = ""
    if scheme == "journal":
        rest, _, topic = rest.partition("#")
        if "#" in query:
            raise InvalidArgument(f"address {text!r}: options come after the topic (journal:DIRECTORY#TOPIC?option=1)")
    name = unquote(rest)
    if not name:
        raise InvalidArgument(f"address {text!r} names nothing after '{scheme}:'")
    if scheme == "shm" and not name.startswith("/"):
        raise InvalidArgument(f"address {text!r}: a channel's name begins with '/', as in shm:/{name}")
    if scheme == "shm" and name.startswith("//"):  # a habit from URLs; it would silently name another channel
        raise InvalidArgument(f"address {text!r}: a channel is written with one slash, as in shm:/{name.lstrip('/')}")
    return Address(scheme, name=name, topic=unquote(topic), options=options, text=text)


_HOST_AND_PORT = re.compile(r"[\w.-]+:\d{1,5}(?:[/,?]|$)")
_SECOND_LOGIN = re.compile(r"@[^@,]+,")  # in what stands before the last @: a host is followed by another one
_PLACE_IN_TOPIC = re.compile(r",(?:[a-z]+://)?[^,/:]*:\d+(?:/|$)")  # another HOST:PORT


def _parse_network(scheme: str, rest: str, options: dict[str, str], text: str) -> Address:
    form = NETWORK[scheme]
    if not rest.startswith("//"):
        raise InvalidArgument(f"address {text!r} is not of the form {form}")
    place, _, topic = rest[2:].partition("/")
    login, at, place = place.rpartition("@")
    if _SECOND_LOGIN.search(login):
        form = f"{scheme}://TOKEN@A:PORT,B:PORT/NAME"
        raise InvalidArgument(
            f"the address has a secret at more than one host: write it once, {form} (an @ in it is %40)"
        )
    if at:
        options = {**_credentials(login), **options}
    if scheme == "tcp" and topic and not place:  # tcp:///path/to/socket
        return Address(scheme, name="/" + unquote(topic), options=options, text=text)
    if scheme in DEFAULT_PORTS and place:
        places = [text if _has_port(text) else f"{text}:{DEFAULT_PORTS[scheme]}" for text in place.split(",")]
        place = ",".join(places)
    host, colon, port = place.rpartition(":")
    if host.startswith("[") and host.endswith("]") and "," not in host:
        host = host[1:-1]
    least = 1 if scheme in DEFAULT_PORTS else 0  # 0: one yet to be chosen
    ports = [each.rpartition(":")[2] for each in place.split(",")] if least else [port]
    if not colon or not host or not all(one.isdigit() and least <= int(one) <= 65535 for one in ports):
        encoded = "" if at or "@" not in topic else "; a secret before @ has / as %2F"
        raise InvalidArgument(f"address {text!r} is not of the form {form} with a port of {least} to 65535{encoded}")
    if _PLACE_IN_TOPIC.search(topic):  # a:9876/orders,b:9876/orders: all of it after the first / would be a topic
        raise InvalidArgument(
            f"address {text!r}: write the name once, after the last host: {scheme}://A:PORT,B:PORT/NAME"
        )
    if scheme == "tcp" and "," in host:
        raise InvalidArgument(f"address {text!r} names several hosts: a tcp publisher is one, tcp://HOST:PORT")
    if scheme == "tcp" and topic:  # a tcp port has one stream, so a path would be ignored without an error
        raise InvalidArgument(f"address {text!r} has a path: one port is one stream, tcp://HOST:PORT")
    return Address(scheme, host=host, port=int(port), topic=unquote(topic), options=options, text=text)


def _credentials(login: str) -> dict[str, str]:
    """What stands before the @ of an address, as the options that it means."""
    first, colon, password = login.partition(":")
    return {"user": unquote(first), "password": unquote(password)} if colon else {"token": unquote(first)}


def plain(text: str) -> str:
    """An address without its options and secrets, decoded as ``parse`` does it: shm:/%41?slots=4 is shm:/A."""
    return unquote(without_secrets(text).partition("?")[0])


def places_of(host: str, port: int) -> list[tuple[str, int]]:
    """Host and port of each server that a host text names: ``a``, ``a:9876``, or several as in ``a:9876,b``. ``port``
    is for those that name none: ``broker://a,b:9876/TOPIC`` is 9876 at both. An IPv6 address alone may stand without
    brackets.
    """
    if "," not in host and host.count(":") > 1 and not host.startswith("["):
        return [(host, port)]
    return [_split(text, port) for text in host.split(",")]


def place_text(host: str, port: int) -> str:
    """HOST:PORT, as ``places_of`` reads it."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _split(text: str, port: int) -> tuple[str, int]:
    """HOST or HOST:PORT; an IPv6 address is written in brackets."""
    name, _, number = text.rpartition(":")
    if not _has_port(text):
        name, number = text, ""
    elif not number.isascii() or not number.isdigit():
        raise InvalidArgument(f"{text!r} is not HOST or HOST:PORT of a server")
    return name.removeprefix("[").removesuffix("]"), int(number) if number else port


def _has_port(text: str) -> bool:
    """Whether a port is written behind a host, of which an IPv6 address in brackets has colons too."""
    return ":" in text and not text.endswith("]")


def arrives(sink: Address, source: Address, topics: Iterable[str] | None = None) -> bool:
    """Whether a subscriber of ``source`` gets what is published at ``sink``, as far as the addresses tell.

    ``topics``: those that the subscriber reads, and patterns, where more is known of them than the address says.
    """
    if sink.scheme != source.scheme or _channels(sink, written=True).isdisjoint(_channels(source)):
        return False
    if sink.scheme not in PATTERNS:
        return True
    wanted = [source.topic or DEFAULT_TOPIC] if topics is None else topics
    return any(overlap(pattern, sink.topic or DEFAULT_TOPIC) for pattern in wanted)


def _channels(address: Address, *, written: bool = False) -> set[tuple[Any, ...]]:
    """What an address means, without its topic. What is ``written`` to a virtual channel is its multiplexer's too."""
    if address.scheme in NETWORK and not address.name:
        return {place for place in places_of(address.host, address.port or 0) if place[1]}  # 0: a port yet to be chosen
    if address.scheme == "journal":
        return {(os.path.realpath(address.name),)}
    own = {(address.name, address.options.get("mux"), address.options.get("id", "0"))}
    mux = address.options.get("mux") if written else None
    return own | {(mux, None, "0")} if mux else own


def is_loopback(host: str) -> bool:
    """Whether a host's name or number means this machine alone. A name that DNS has to resolve does not."""
    import ipaddress  # here, so that importing penstock stays light

    if host == "localhost":
        return True
    try:
        number = ipaddress.ip_address(host)
    except ValueError:
        return False
    return (getattr(number, "ipv4_mapped", None) or number).is_loopback


def check_host_name(host: Any) -> None:
    """Refuse a host that is empty or no text."""
    if not isinstance(host, str) or not host:
        raise InvalidArgument(f"host={host!r} must be text, such as '127.0.0.1' or 'localhost'")


def check_host(host: Any) -> None:
    """Refuse a host to listen on that brings a port or brackets: it would be taken for a name that others can reach."""
    check_host_name(host)
    if host.count(":") == 1 or "/" in host or host.startswith("["):
        raise InvalidArgument(f"host={host!r} must be a host alone, as 127.0.0.1 or ::1: its port is given beside it")


class ArrayLike(Protocol):
    """What numpy's numbers and images have: with such a class as type, messages are arrays. Not numpy's own classes,
    which type checkers may not have."""

    @property
    def dtype(self) -> Any: ...
    @property
    def itemsize(self) -> int: ...
    @property
    def nbytes(self) -> int: ...


@overload
def publisher(address: str, *, type: type[ArrayLike], evolve: str = ..., **options: Any) -> TypedPublisher[ndarray]: ...
@overload
def publisher(address: str, *, type: type[T], evolve: str = ..., **options: Any) -> TypedPublisher[T]: ...
@overload
def publisher(address: str, *, type: Codec[T], evolve: str = ..., **options: Any) -> TypedPublisher[T]: ...
@overload
def publisher(address: str, *, type: dtype[Any], evolve: str = ..., **options: Any) -> TypedPublisher[ndarray]: ...
@overload
def publisher(
    address: str, *, type: str | None = ..., durable: str | os.PathLike[str], **options: Any
) -> DurablePublisher: ...
@overload
def publisher(address: str, *, type: str | None = ..., **options: Any) -> Publisher: ...
@overload
def publisher(address: str, *, type: object, evolve: str = ..., **options: Any) -> TypedPublisher[Any]: ...
@overload
def publisher(address: str, **options: Any) -> Publisher: ...
def publisher(address: str, **options: Any) -> Publisher[Any]:
    """Open a publisher at any reach: ``penstock.publisher("shm:/camera", slots=16)``.

    With ``type=`` (a dataclass, a numpy dtype and so on: docs/types.md) it publishes objects; ``evolve="any"`` lets it
    replace a type that does not go with it. The other options are the reach's (None: as the channel has it, or the
    reach's default); ``penstock.shm.publisher`` and the like open the same and are typed fully:

    - every reach: type=None, evolve='compatible'
    - ``bus``, ``shm`` and ``tcp``, to keep everything on disk (docs/rooms/history.md): durable=None (a directory),
      durable_wait=False, retain_bytes=None, retain_age_s=None, segment_bytes=67108864
    - ``bus``: id=0, history=None, latest=False, history_bytes=None
    - ``shm``: slots=None, slot_size=None, overflow=None, reliable=None, timeout=None, fixed_size=False,
      max_reserved=1, type=None, checksum=False, metadata_size=None, activation=False, retirement=False,
      max_publishers=None, max_subscribers=None, local=False, mux=None, vchan_id=None, mode=None, group=None,
      spin_us=0, on_resize=None, history=None, latest=False, history_bytes=None, before=0
    - ``tcp``: overflow='block', timeout=None, depth=32768, depth_bytes=16777216, tls=None, token=None,
      insecure=False, handshake_timeout=10.0, close_timeout=5.0, keepalive=15.0, executor=None, history=None,
      latest=False, history_bytes=None, past=None
    - ``journal``: segment_bytes=67108864, max_message_bytes=67108864, retain_age_s=None, retain_bytes=None,
      sync=True
    - ``broker``: queue='', unconfirmed=0, ttl_s=None, token=None, tls=None, timeout=30.0, reconnect=True
    """
    opened: Publisher[Any] = _open_any("publisher", address, options)
    return opened


@overload
def subscriber(address: str, *, type: type[Image], evolve: str = ..., **options: Any) -> TypedSubscriber[Image]: ...
@overload
def subscriber(
    address: str, *, type: type[ArrayLike], evolve: str = ..., **options: Any
) -> TypedSubscriber[ndarray]: ...
@overload
def subscriber(address: str, *, type: type[T], evolve: str = ..., **options: Any) -> TypedSubscriber[T]: ...
@overload
def subscriber(address: str, *, type: Codec[T], evolve: str = ..., **options: Any) -> TypedSubscriber[T]: ...
@overload
def subscriber(address: str, *, type: dtype[Any], evolve: str = ..., **options: Any) -> TypedSubscriber[ndarray]: ...
@overload
def subscriber(address: str, *, type: str | None = ..., **options: Any) -> Subscriber: ...
@overload
def subscriber(address: str, *, type: object, evolve: str = ..., **options: Any) -> TypedSubscriber[Any]: ...
@overload
def subscriber(address: str, **options: Any) -> Subscriber: ...
def subscriber(address: str, **options: Any) -> Subscriber[Any]:
    """Open a subscriber at any reach: ``penstock.subscriber("shm:/camera")``.

    With ``type=`` its messages have a ``value`` of that type, and ``values()`` gives objects; ``evolve="any"`` takes
    what another type wrote, message by message. ``on_message=function`` calls it with every message from a thread of
    its own. The other options are the reach's (None: as the channel has it, or the reach's default);
    ``penstock.shm.subscriber`` and the like open the same and are typed fully:

    - every reach: type=None, evolve='compatible'
    - ``bus``, ``shm``, to begin on the disk of a publisher with durable=: start=None ('first', a position, a time,
      'last 10 min'), durable=None (its directory, where no publisher is there)
    - ``bus``: id=0, depth=1000, overflow='block', timeout=None, drop_above=None, priority=0, history=True,
      on_message=None
    - ``shm``: overflow=None, reliable=None, max_active_messages=None, type=None, checksum='raise',
      pass_activation=False, max_publishers=None, max_subscribers=None, mux=None, vchan_id=None, history=True,
      mode=None, group=None, spin_us=0, on_message=None
    - ``tcp``: max_reconnects=-1, extended=True, tls=None, token=None, max_message_size=268435456,
      held_bytes=1073741824, handshake_timeout=10.0, keepalive=15.0, reconnect_delay=0.05, reconnect_delay_max=2.0,
      executor=None, history=True, start=None, on_message=None
    - ``journal``: start='new', on_message=None
    - ``broker``: queue='', ack='next', credit=2048, ack_timeout_s=None, max_tries=None, ttl_s=None,
      exclusive=None, dead_letter=None, from_position=None, from_ordinal=None, from_time_ns=None, token=None,
      tls=None, timeout=30.0, reconnect=True, on_message=None
    """
    opened: Subscriber[Any] = _open_any("subscriber", address, options)
    return opened


def check(text: str, kind: str) -> None:
    """Check an address for a ``kind`` (publisher or subscriber) without opening it: its form and its options."""
    address = parse(text)
    function = getattr(room(address.scheme), f"open_{kind}")
    options = {**address.options}
    if wants_disk(kind, address, {}):
        for name in _disk_options(kind):
            options.pop(name, None)
    _check_handle_options(convert(options, function, address.text), kind, address)


def _open_any(kind: str, text: str, options: dict[str, Any]) -> Any:
    """Open a handle; a typed one if ``type`` is a type and not only the name that shared memory takes."""
    if options.get("type", "") is None:
        del options["type"]
    if isinstance(options.get("type"), str | None):
        if options.pop("evolve", EVOLVE) != EVOLVE:
            raise InvalidArgument("evolve= is for handles with a type: give type= too")
        return _open(kind, text, options)
    from penstock.types import handles

    wanted, evolve = options.pop("type"), options.pop("evolve", EVOLVE)
    function = options.pop("on_message", None) if kind == "subscriber" else None
    codec, terms = handles.terms_of(wanted, evolve, kind == "publisher")
    address = replace(parse(text), schema=terms.text)
    opened = _open_with(getattr(room(address.scheme), f"open_{kind}"), kind, address, options)
    return handles.wrap(opened, codec, terms, function)


def _open(kind: str, text: str, options: Mapping[str, Any]) -> Any:
    """Open a handle by the room's ``open_publisher`` or ``open_subscriber``, which take keyword options only."""
    address = parse(text)
    return _open_with(getattr(room(address.scheme), f"open_{kind}"), kind, address, options)


def _open_with(function: Callable[..., Any], kind: str, address: Address, options: Mapping[str, Any]) -> Any:
    if address.scheme != "bus":
        clock.refuse_if_virtual(f"{address.text} (of other processes)")
    if wants_disk(kind, address, options):
        return _open_durable(function, kind, address, options)
    options = {name: value for name, value in options.items() if _is_given(name, value, kind, address.scheme)}
    given = _both(convert(address.options, function, address.text), options, address)
    _check_handle_options(given, kind, address)
    return function(address, **given)


def _both(written: Mapping[str, Any], options: Mapping[str, Any], address: Address) -> dict[str, Any]:
    """What the address says and what was given beside it; nobody can know which of two values is meant."""
    for name in (name for name, value in options.items() if name in written and value is not None):
        if options[name] != written[name] and str(options[name]) != address.options[name]:
            raise InvalidArgument(f"address {address.text!r} has {name!r}, and {name}= was given with another value")
    return {**written, **{name: value for name, value in options.items() if value is not None or name not in written}}


def wants_disk(kind: str, address: Address, options: Mapping[str, Any]) -> bool:
    """Whether the handle stores its messages on disk (``durable=``), or reads stored ones (``start=``)."""
    asked = (name for name, value in options.items() if _is_given(name, value, kind, address.scheme))
    given = {*address.options, *asked}
    if address.scheme in KEEPING:
        # True, so that ``penstock.durable`` is asked and refuses it: such a reach is on disk already.
        return kind == "publisher" and "durable" in given
    return _on_disk(kind, address.scheme) and not given.isdisjoint(_disk_options(kind))


def _on_disk(kind: str, scheme: str) -> bool:
    """Whether ``penstock.durable`` opens such handles too."""
    return scheme not in KEEPING and (kind, scheme) != ("subscriber", "tcp")  # a tcp subscriber has `start` itself


@functools.cache
def _disk_options(kind: str) -> dict[str, inspect.Parameter]:
    return option_names(getattr(importlib.import_module("penstock.durable"), f"open_{kind}"))


def _is_given(name: str, value: Any, kind: str, scheme: str) -> bool:
    """Whether an option was given: one of ``penstock.durable`` that has its default value was not."""
    if name in ("start", "durable") and value is None:
        return False
    default = _disk_options(kind).get(name) if _on_disk(kind, scheme) else None
    return default is None or bool(value != default.default)


def _open_durable(function: Callable[..., Any], kind: str, address: Address, options: Mapping[str, Any]) -> Any:
    """Open it with the options of ``penstock.durable``; all others go to the room, for its live handle."""
    opened = getattr(importlib.import_module("penstock.durable"), f"open_{kind}")
    own = option_names(opened)
    live = {name: text for name, text in address.options.items() if name not in own}
    rest = _both(
        convert(live, function, address.text),
        {name: value for name, value in options.items() if name not in own},
        address,
    )
    _check_handle_options(rest, kind, address)
    texts = {name: text for name, text in address.options.items() if name in own}
    given = {name: value for name, value in options.items() if name in own}
    return opened(address, rest, **_both(convert(texts, opened, address.text), given, address))


def opener(scheme: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Make a room's ``publisher`` or ``subscriber``: it takes an address without its scheme. Its types are in
    the room's ``opening.pyi``."""
    kind = function.__name__.removeprefix("open_")
    begin = f"{scheme}://" if scheme in NETWORK else f"{scheme}:"

    def open_named(name: str, /, **options: Any) -> Any:
        other = name.partition(":")[0] if isinstance(name, str) and scheme not in NETWORK else scheme
        if other != scheme and other in ROOMS:
            raise InvalidArgument(f"{without_secrets(name)!r} is no {scheme} address: penstock.{other}.{kind} opens it")
        text = name if not isinstance(name, str) or name.startswith(f"{scheme}:") else begin + name
        return _open_any(kind, text, options)

    doc = f"{inspect.getdoc(function)}\n\n``name`` is the address, with or without its ``{begin}``."
    returned = inspect.signature(function).return_annotation
    options = {**room_options(kind, scheme, function), **option_names(_typed)}
    return _with_signature(open_named, kind, function, "name: str", returned, doc, options)


def room_options(kind: str, scheme: str, function: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    """What a room's opener takes beside ``type`` and ``evolve``: the options of its ``function``, and of
    ``penstock.durable`` where that opens such handles too."""
    own = option_names(function)
    return {**own, **_disk_options(kind), **own} if _on_disk(kind, scheme) else own


def _typed(*, type: object = None, evolve: str = EVOLVE) -> None:
    """The options that every opener has."""


def class_opener(
    handle: Callable[Concatenate[str, Options], Handle], kind: str
) -> Callable[Concatenate[Address, Options], Handle]:
    """Make a room's ``open_publisher`` or ``open_subscriber`` of a class that takes the address's name and options."""

    def open_handle(address: Address, /, *_: Options.args, **options: Options.kwargs) -> Handle:
        return handle(address.name, *_, **options)

    doc = inspect.getdoc(handle) or ""
    options = option_names(handle)
    return _with_signature(open_handle, f"open_{kind}", handle, "address: Address", handle.__name__, doc, options)


def _with_signature(
    function: Handle,
    name: str,
    inner: Callable[..., Any],
    first: str,
    returned: Any,
    doc: str,
    options: Mapping[str, inspect.Parameter],
) -> Handle:
    """Give ``function`` the name, signature and docstring that ``help`` shows."""
    word, _, kind = first.partition(": ")
    positional = inspect.Parameter(word, inspect.Parameter.POSITIONAL_ONLY, annotation=kind)
    parameters = [positional, *map(_readable, options.values())]
    shown: Any = function
    shown.__signature__ = inspect.Signature(parameters, return_annotation=returned)
    shown.__doc__, shown.__name__, shown.__qualname__ = doc, name, name
    shown.__module__ = inner.__module__
    return function


def _readable(option: inspect.Parameter) -> inspect.Parameter:
    """With a default as a user writes it: ``'block'``, not ``<Overflow.BLOCK: 'block'>``."""
    return option.replace(default=option.default.value) if isinstance(option.default, Enum) else option


def room(scheme: str) -> ModuleType:
    """The room's module; imports it if necessary."""
    return importlib.import_module(ROOMS[scheme])


def option_names(function: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    """The keyword-only parameters of ``function``."""
    parameters = inspect.signature(function).parameters.values()
    return {p.name: p for p in parameters if p.kind is inspect.Parameter.KEYWORD_ONLY}


def check_options(options: Mapping[str, Any], function: Callable[..., Any], of: str) -> None:
    """``InvalidArgument`` for the first option that ``function`` does not take, with the nearest valid ones."""
    valid = option_names(function)
    for name in options:
        if name not in valid:
            raise InvalidArgument(f"{of} has no option {name!r}; {nearest(name, valid)}")


def _check_handle_options(options: Mapping[str, Any], kind: str, address: Address) -> None:
    """``InvalidArgument`` for the first option that a ``kind`` of the reach does not take, with the nearest valid ones,
    or the side that does take it."""
    valid = _valid_options(kind, address.scheme)
    for name in options:
        if name in valid:
            continue
        if name == "type":
            # raises: this reach takes no type by name
            importlib.import_module("penstock.types").codec_of(options[name])
        other = "subscriber" if kind == "publisher" else "publisher"
        known = valid | {"type", "evolve"}
        told = f"a {other} has" if name in _valid_options(other, address.scheme) else nearest(name, known)
        raise InvalidArgument(f"{kind} of {address.text!r} has no option {name!r}; {told}")


def _valid_options(kind: str, scheme: str) -> set[str]:
    return set(room_options(kind, scheme, getattr(room(scheme), f"open_{kind}")))


def convert(texts: Mapping[str, str], function: Callable[..., Any], of: str) -> dict[str, Any]:
    """Convert the options of an address to numbers, booleans or None, unless the parameter takes text only.

    A secret stays text, even if it looks like a number.
    """
    valid = option_names(function)
    return {name: _convert_option(text, valid[name], of) if name in valid else text for name, text in texts.items()}


def _convert_option(text: str, parameter: inspect.Parameter, of: str) -> Any:
    if parameter.name in SECRETS or str(parameter.annotation).replace("None", "").strip(" |'\"") == "str":
        return text
    lowered = text.lower()
    if lowered in ("true", "false") or (lowered in ("yes", "no") and "bool" in str(parameter.annotation)):
        return lowered in ("true", "yes")
    if lowered == "none":
        return None
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    if {kind.strip(" '\"") for kind in str(parameter.annotation).split("|")} <= {"int", "float", "bool", "None"}:
        words = {"int": "a whole number", "float": "a number", "bool": "true or false"}
        kinds = [kind.strip(" '\"") for kind in str(parameter.annotation).split("|")]
        said = " or ".join(words[kind] for kind in kinds if kind != "None" and not (kind == "int" and "float" in kinds))
        raise InvalidArgument(f"{of}: {parameter.name}={text!r} must be {said}")
    return text
