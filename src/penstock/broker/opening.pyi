# Written by scripts/openers.py from the signatures of open_publisher and open_subscriber.
from collections.abc import Callable
from typing import Any, TypedDict, TypeVar, Unpack, overload

from numpy import dtype, ndarray

from penstock._core import Message
from penstock.address import ArrayLike
from penstock.broker import Publisher, Subscriber
from penstock.types import Codec, TypedPublisher, TypedSubscriber
from penstock.types.image import Image

T = TypeVar("T")

class PublisherOptions(TypedDict, total=False):
    queue: str
    unconfirmed: int
    ttl_s: float | None
    token: str | None
    tls: bool | str | None
    timeout: float
    reconnect: bool

@overload
def publisher(
    name: str, /, *, type: type[ArrayLike], evolve: str = ...,
    **options: Unpack[PublisherOptions],
) -> TypedPublisher[ndarray[Any, Any]]: ...
@overload
def publisher(
    name: str, /, *, type: type[T], evolve: str = ...,
    **options: Unpack[PublisherOptions],
) -> TypedPublisher[T]: ...
@overload
def publisher(
    name: str, /, *, type: Codec[T], evolve: str = ...,
    **options: Unpack[PublisherOptions],
) -> TypedPublisher[T]: ...
@overload
def publisher(
    name: str, /, *, type: dtype[Any], evolve: str = ...,
    **options: Unpack[PublisherOptions],
) -> TypedPublisher[ndarray[Any, Any]]: ...
@overload
def publisher(
    name: str, /, *, type: None = ..., evolve: str = ...,
    **options: Unpack[PublisherOptions],
) -> Publisher: ...

class SubscriberOptions(TypedDict, total=False):
    queue: str
    ack: str
    credit: int
    ack_timeout_s: float | None
    max_tries: int | None
    ttl_s: float | None
    exclusive: bool | None
    dead_letter: str | None
    from_position: int | None
    from_ordinal: int | None
    from_time_ns: int | None
    token: str | None
    tls: bool | str | None
    timeout: float
    reconnect: bool
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
