# Written by scripts/openers.py from the signatures of open_publisher and open_subscriber.
import datetime
import os
from collections.abc import Callable
from typing import Any, TypedDict, TypeVar, Unpack, overload

from numpy import dtype, ndarray

from penstock.address import ArrayLike
from penstock.channel import Overflow
from penstock.durable_publisher import DurablePublisher
from penstock.journal.follow import Follower
from penstock.shm import Publisher, Subscriber
from penstock.shm.publisher import ResizeCallback
from penstock.types import Codec, TypedPublisher, TypedSubscriber
from penstock.types.image import Image

T = TypeVar("T")

class PublisherOptions(TypedDict, total=False):
    slots: int | None
    slot_size: int | None
    overflow: str | Overflow | None
    reliable: bool | None
    timeout: float | None
    fixed_size: bool
    max_reserved: int
    checksum: bool
    metadata_size: int | None
    activation: bool
    retirement: bool
    max_publishers: int | None
    max_subscribers: int | None
    local: bool
    mux: str | None
    vchan_id: int | None
    mode: int | None
    group: int | str | None
    spin_us: int
    on_resize: ResizeCallback | None
    history: int | str | None
    latest: bool
    history_bytes: int | str | None
    before: int
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
    name: str, /, *, type: str | None = ..., evolve: str = ...,
    durable: str | os.PathLike[str],
    **options: Unpack[PublisherOptions],
) -> DurablePublisher: ...
@overload
def publisher(
    name: str, /, *, type: str | None = ..., evolve: str = ...,
    durable: None = ...,
    **options: Unpack[PublisherOptions],
) -> Publisher: ...

class SubscriberOptions(TypedDict, total=False):
    overflow: str | Overflow | None
    reliable: bool | None
    max_active_messages: int | None
    checksum: str
    pass_activation: bool
    max_publishers: int | None
    max_subscribers: int | None
    mux: str | None
    vchan_id: int | None
    history: bool
    mode: int | None
    group: int | str | None
    spin_us: int
    on_message: Callable[..., Any] | None

@overload
def subscriber(
    name: str, /, *, type: type[Image], evolve: str = ...,
    start: int | str | datetime.datetime | None = ...,
    durable: str | os.PathLike[str] | None = ...,
    **options: Unpack[SubscriberOptions],
) -> TypedSubscriber[Image]: ...
@overload
def subscriber(
    name: str, /, *, type: type[ArrayLike], evolve: str = ...,
    start: int | str | datetime.datetime | None = ...,
    durable: str | os.PathLike[str] | None = ...,
    **options: Unpack[SubscriberOptions],
) -> TypedSubscriber[ndarray[Any, Any]]: ...
@overload
def subscriber(
    name: str, /, *, type: type[T], evolve: str = ...,
    start: int | str | datetime.datetime | None = ...,
    durable: str | os.PathLike[str] | None = ...,
    **options: Unpack[SubscriberOptions],
) -> TypedSubscriber[T]: ...
@overload
def subscriber(
    name: str, /, *, type: Codec[T], evolve: str = ...,
    start: int | str | datetime.datetime | None = ...,
    durable: str | os.PathLike[str] | None = ...,
    **options: Unpack[SubscriberOptions],
) -> TypedSubscriber[T]: ...
@overload
def subscriber(
    name: str, /, *, type: dtype[Any], evolve: str = ...,
    start: int | str | datetime.datetime | None = ...,
    durable: str | os.PathLike[str] | None = ...,
    **options: Unpack[SubscriberOptions],
) -> TypedSubscriber[ndarray[Any, Any]]: ...
@overload
def subscriber(
    name: str, /, *, type: str | None = ..., evolve: str = ...,
    start: int | str | datetime.datetime,
    durable: str | os.PathLike[str] | None = ...,
    **options: Unpack[SubscriberOptions],
) -> Follower: ...
@overload
def subscriber(
    name: str, /, *, type: str | None = ..., evolve: str = ...,
    start: None = ...,
    durable: str | os.PathLike[str],
    **options: Unpack[SubscriberOptions],
) -> Follower: ...
@overload
def subscriber(
    name: str, /, *, type: str | None = ..., evolve: str = ...,
    start: None = ...,
    durable: None = ...,
    **options: Unpack[SubscriberOptions],
) -> Subscriber: ...
