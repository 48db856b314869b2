# Written by scripts/openers.py from the signatures of open_publisher and open_subscriber.
import datetime
import os
import ssl
from collections.abc import Callable
from typing import Any, TypedDict, TypeVar, Unpack, overload

from numpy import dtype, ndarray

from penstock._core import Message
from penstock.address import ArrayLike
from penstock.durable_publisher import DurablePublisher
from penstock.tcp import Executor, Publisher, Subscriber
from penstock.tcp.past import Past
from penstock.types import Codec, TypedPublisher, TypedSubscriber
from penstock.types.image import Image

T = TypeVar("T")

class PublisherOptions(TypedDict, total=False):
    overflow: str
    timeout: float | None
    depth: int
    depth_bytes: int
    tls: ssl.SSLContext | None
    token: str | bytes | None
    insecure: bool
    handshake_timeout: float
    close_timeout: float
    keepalive: float | None
    executor: Executor | None
    history: int | str | None
    latest: bool
    history_bytes: int | str | None
    past: Past | None
    durable_wait: bool
    retain_bytes: int | str | None
    retain_age_s: float | str | None
    segment_bytes: int | str

@overload
def publisher(
    name: str, /, *, type: type[ArrayLike], evolve: str = ...,
    durable: str | os.PathLike[str] | None = ...,
    **options: Unpack[PublisherOptions],
) -> TypedPublisher[ndarray[Any, Any]]: ...
@overload
def publisher(
    name: str, /, *, type: type[T], evolve: str = ...,
    durable: str | os.PathLike[str] | None = ...,
    **options: Unpack[PublisherOptions],
) -> TypedPublisher[T]: ...
@overload
def publisher(
    name: str, /, *, type: Codec[T], evolve: str = ...,
    durable: str | os.PathLike[str] | None = ...,
    **options: Unpack[PublisherOptions],
) -> TypedPublisher[T]: ...
@overload
def publisher(
    name: str, /, *, type: dtype[Any], evolve: str = ...,
    durable: str | os.PathLike[str] | None = ...,
    **options: Unpack[PublisherOptions],
) -> TypedPublisher[ndarray[Any, Any]]: ...
@overload
def publisher(
    name: str, /, *, type: None = ..., evolve: str = ...,
    durable: str | os.PathLike[str],
    **options: Unpack[PublisherOptions],
) -> DurablePublisher: ...
@overload
def publisher(
    name: str, /, *, type: None = ..., evolve: str = ...,
    durable: None = ...,
    **options: Unpack[PublisherOptions],
) -> Publisher: ...

class SubscriberOptions(TypedDict, total=False):
    max_reconnects: int
    extended: bool
    tls: ssl.SSLContext | None
    token: str | bytes | None
    max_message_size: int
    held_bytes: int
    handshake_timeout: float
    keepalive: float | None
    reconnect_delay: float
    reconnect_delay_max: float
    executor: Executor | None
    history: bool
    start: int | str | datetime.datetime | None
    on_message: Callable[[Message], Any] | None

@overload
def subscriber(
    name: str, /, *, type: type[Image], evolve: str = ...,
    **options: Unpack[SubscriberOptions],
) -> TypedSubscriber[Image]: ...
@overload
def subscriber(
    name: str, /, *, type: type[ArrayLike], evolve: str = ...,
    **options: Unpack[SubscriberOptions],
) -> TypedSubscriber[ndarray[Any, Any]]: ...
@overload
def subscriber(
    name: str, /, *, type: type[T], evolve: str = ...,
    **options: Unpack[SubscriberOptions],
) -> TypedSubscriber[T]: ...
@overload
def subscriber(
    name: str, /, *, type: Codec[T], evolve: str = ...,
    **options: Unpack[SubscriberOptions],
) -> TypedSubscriber[T]: ...
@overload
def subscriber(
    name: str, /, *, type: dtype[Any], evolve: str = ...,
    **options: Unpack[SubscriberOptions],
) -> TypedSubscriber[ndarray[Any, Any]]: ...
@overload
def subscriber(
    name: str, /, *, type: None = ..., evolve: str = ...,
    **options: Unpack[SubscriberOptions],
) -> Subscriber: ...
