"""TypedPublisher and TypedSubscriber: one wrapper over the contract, the same at every reach.

Rules: attributes beyond the contract (``port``, ``ack``, ``flush``) are those of the inner handle. Messages are the
reach's own; their ``value`` is decoded when it is asked for. Threads: as the inner handle.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import AsyncIterator, Callable, Generator, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from penstock.channel import LOG_FAILURES_S, Handle, IdAndKey, Ledger, Publisher, Reservation, Subscriber
from penstock.errors import ClosedError, DecodeError, InvalidArgument
from penstock.types.codec import ArrayDraft, Codec, codec_of
from penstock.types.schema import Terms

if TYPE_CHECKING:
    from numpy import ndarray

    from penstock._core import Batch, Draft, Message

T = TypeVar("T")
logger = logging.getLogger("penstock")


class _Wrapper(Handle):
    """What both take from the inner handle."""

    inner: Any
    codec: Codec[Any]

    @property
    def schema(self) -> str | None:
        """The schema of the channel's messages, or None."""
        return self.inner.schema  # type: ignore[no-any-return]

    @property
    def ledger(self) -> Ledger:
        """A snapshot of the counts."""
        return self.inner.ledger  # type: ignore[no-any-return]

    def close(self) -> None:
        """Release everything. Closing twice does nothing."""
        self.inner.close()

    def __exit__(self, *error: Any) -> None:
        self.inner.__exit__(*error)  # what happens after an error depends on the reach: a queue redelivers the message
        self.close()

    async def __aexit__(self, *error: Any) -> None:
        self.__exit__(*error)

    @property
    def closed(self) -> bool:
        """Whether ``close`` was called."""
        return self.inner.closed  # type: ignore[no-any-return]

    def __getattr__(self, name: str) -> Any:
        return getattr(_inner(self, name), name)


class TypedPublisher(_Wrapper, Publisher[T]):
    """A publisher of objects."""

    inner: Publisher

    def __init__(self, inner: Publisher, codec: Codec[T]) -> None:
        self.inner = inner
        self.codec = codec
        self._encode = codec.encode
        vars(self)["publish"] = _publishing(inner.publish, codec)  # so that a message costs only one Python call
        words = ("carries_properties", "carries_properties_of_many", "carries_details")
        vars(self).update({word: getattr(inner, word) for word in words})

    def publish(self, value: T, **options: Any) -> int | None:  # type: ignore[override]  # bytes are for forward()
        """Publish an object; gives its ordinal where the reach knows it. The options are the reach's."""
        return self.publish(value, **options)  # the function that __init__ has set

    def publish_many(self, batch: Iterable[T], **options: Any) -> int:  # type: ignore[override]
        """Publish each of them, in order; gives how many. One that cannot be encoded: none is published."""
        many: Callable[..., int] = self.inner.publish_many
        encoded = [self._encode(value) for value in batch]
        try:
            return many(encoded, **options)
        except TypeError:
            check_encoded(self.codec, *encoded)
            raise

    def reserve(self, *size: Any, **options: Any) -> ArrayDraft:  # type: ignore[override]  # a draft of arrays
        """With a numpy dtype, an array of so many items (1) in the reach's own memory; with ``Image`` one of a shape,
        dtype and encoding.

        ``with publisher.reserve(10) as array`` publishes at its end: the array itself, or a copy of it where a view of
        it (``xyz = array["xyz"]``) has a name still and could write into what others read.
        """
        draft = self.codec.draft
        if draft is None:
            raise InvalidArgument(
                f"reserve is for numpy dtypes and Image, not {self.codec.name}: publish objects; "
                "publisher.inner.reserve gives a draft of bytes"
            )
        again: Callable[[], Draft] | None = None

        def take(size: int, **options: Any) -> Draft:
            nonlocal again
            again = partial(self.inner.reserve, size, **options)
            return again()

        taken = draft(take, *size, **options)
        taken.take_another = again
        return taken

    def reserve_async(self, *size: Any, **options: Any) -> ArrayReservation:
        """``reserve`` for asyncio: ``async with publisher.reserve_async(10) as array``."""
        take: Any = partial(self.reserve, *size)
        return ArrayReservation(self._in_worker, take, options)

    def wait_ready(self, subscribers: int = 1, timeout: float | None = None) -> bool:
        """Wait until so many subscribers are there."""
        return self.inner.wait_ready(subscribers, timeout)

    def on_resize(self, function: Callable[[Any, int, int], Any] | None) -> None:
        """``function(publisher, old_size, new_size)`` is asked before slots grow, where the reach has slots."""
        _inner(self, "on_resize").on_resize(function)

    def forward(self, batch: Batch | Sequence[Message]) -> int:
        """Publish messages of any reach unchanged, without decoding them."""
        return self.inner.forward(batch)

    def forward_details(self, batch: Sequence[Message], details: Sequence[IdAndKey]) -> int:
        """``forward`` with the id and the key of each."""
        return self.inner.forward_details(batch, details)

    def _publish_now(self, data: Any, options: Mapping[str, Any]) -> int | None:
        encoded = self._encode(data)
        try:
            return self.inner._publish_now(encoded, options)
        except TypeError:
            check_encoded(self.codec, encoded)
            raise

    def __repr__(self) -> str:
        return f"<{self.codec.name} to {self.inner!r}>"


class ArrayReservation(Reservation):
    """Awaited, it gives the draft; entered, the array."""

    if TYPE_CHECKING:

        def __await__(self) -> Generator[Any, Any, ArrayDraft]: ...  # type: ignore[override]

    async def __aenter__(self) -> ndarray[Any, Any]:  # type: ignore[override]
        taken: Any = await super().__aenter__()
        array: ndarray[Any, Any] = taken.array
        return array


def _publishing(publish: Callable[..., int | None], codec: Codec[Any]) -> Callable[..., int | None]:
    encode = codec.encode

    def publish_value(value: Any, **options: Any) -> int | None:
        encoded = encode(value)
        try:
            return publish(encoded, **options) if options else publish(encoded)
        except TypeError:
            check_encoded(codec, encoded)
            raise

    publish_value.__qualname__ = publish_value.__name__ = "publish"  # Python's errors about its arguments name it
    return publish_value


def check_encoded(codec: Codec[Any], *encoded: Any) -> None:
    """``TypeError`` if a codec, which may be the user's own, does not return bytes."""
    for one in encoded:
        try:
            memoryview(one)
        except TypeError:
            raise TypeError(f"encode of {codec.name} gives {type(one).__name__}, and bytes are wanted") from None


def _reading(inner: Subscriber, decoder: Any) -> Callable[..., Any]:
    inner_read: Callable[..., Any] = inner.read

    def read(timeout: float | None = None) -> Any:
        try:
            message = inner_read(timeout)
        except ClosedError:
            _tell_refusal(inner)
            raise
        if message is not None:
            message._decoder = decoder
        return message

    return read


def _tell_refusal(inner: Any) -> None:
    """Raise why there is nothing to read: some reaches learn only after opening that the types differ."""
    refusal = getattr(inner, "refusal", None)
    if refusal is not None:
        raise type(refusal)(str(refusal)) from None  # a new error each time: the stored one would collect tracebacks


class Decoding(Generic[T]):
    """Decodes messages and counts failures. It has no reference to the handle, which may be garbage-collected first."""

    def __init__(self, codec: Codec[T]) -> None:
        self.errors = 0
        self.told = 0.0

        def failed(message: Any, error: Exception, fast: Any = codec.fast, make: Any = codec.decode) -> T:
            """Called when the decoder raised: try ``decode`` if that was ``fast``, else raise an error that names the
            message.
            """
            if fast is not None:
                try:
                    return make(message)  # type: ignore[no-any-return]
                except Exception as other:
                    error = other
            if message.released:
                raise error
            self.errors += 1
            raise _undecodable(codec.name, message, error) from error

        def decode(message: Any, make: Callable[[Any], T] = codec.fast or codec.decode) -> T:
            try:
                return make(message)
            except Exception as error:
                return failed(message, error)

        self.decode = decode
        self.decoder = (codec.fast or codec.decode, failed)  # in the form that native/message/message.cpp expects


def _undecodable(name: str, message: Any, error: Exception) -> DecodeError:
    place = f"message {message.ordinal} of {message.channel}"
    if message.position is not None:
        place += f" (position {message.position})"
    reason = str(error).partition("\n")[0] or type(error).__name__
    return DecodeError(f"{place}, {message.size} bytes, is not {name}: {reason}", message)


class TypedSubscriber(_Wrapper, Subscriber[T]):
    """A subscriber whose messages have a ``value``."""

    inner: Subscriber

    def __init__(self, inner: Subscriber, codec: Codec[T]) -> None:
        self.inner = inner
        self.codec = codec
        self._decoding = Decoding(codec)
        self._decode = self._decoding.decode
        self._decoder = self._decoding.decoder
        vars(self)["read"] = _reading(inner, self._decoder)

    def read(self, timeout: float | None = None) -> Message[T] | None:
        """The next message, or None when the time is over."""
        return self.read(timeout)  # the function that __init__ has set

    def read_newest(self, timeout: float | None = None) -> Message[T] | None:
        """The newest message, where the reach can skip the others."""
        message: Any = _inner(self, "read_newest").read_newest(timeout)
        if message is not None:
            message._decoder = self._decoder
        return message  # type: ignore[no-any-return]

    def read_all(self) -> list[Message[T]]:
        """Every message that is there, as many as may be held, where the reach has it."""
        messages: list[Any] = _inner(self, "read_all").read_all()
        for message in messages:
            message._decoder = self._decoder
        return messages

    def find(self, timestamp_ns: int) -> Message[T] | None:
        """The first message still there at or after that time, where the reach can find it."""
        message: Any = _inner(self, "find").find(timestamp_ns)
        if message is not None:
            message._decoder = self._decoder
        return message  # type: ignore[no-any-return]

    def read_many(self, most: int = 1024, timeout: float | None = None) -> Batch[T] | list[Message[T]]:
        """Up to ``most`` messages that are there; waits for the first one only. Empty when the time is over."""
        try:
            batch: Any = self.inner.read_many(most, timeout)
        except ClosedError:
            _tell_refusal(self.inner)
            raise
        if isinstance(batch, list):
            for message in batch:
                message._decoder = self._decoder
        else:
            batch._decoder = self._decoder
        return batch  # type: ignore[no-any-return]

    def on_dropped(self, function: Callable[[Any, int], Any] | None) -> None:
        """``function(subscriber, count)`` is told when messages were overwritten before they were read, where the reach
        tells it."""
        _inner(self, "on_dropped").on_dropped(function)

    @property
    def _caller(self) -> threading.Thread | None:
        return self.inner._caller

    @_caller.setter
    def _caller(self, thread: threading.Thread | None) -> None:
        self.inner._caller = thread  # which waits for it before it acknowledges

    def _wait_for_call(self) -> bool:
        return self.inner._wait_for_call()

    def _was_not_handled(self, message: Message[Any]) -> None:
        self.inner._was_not_handled(message)

    # --- objects

    def values(self, timeout: float | None = None, errors: str = "skip") -> Iterator[T]:
        """Objects as they come, until closed or nothing comes for ``timeout`` seconds.

        A message that cannot be decoded is counted in ``decode_errors``, logged now and then and skipped; with
        ``errors="raise"`` the error is raised, and the loop may be started again after it.
        """
        raises = _raises(errors)
        read: Callable[..., Any] = self.read
        decode = self._decode
        try:
            while (message := read(timeout)) is not None:
                try:
                    value = decode(message)
                except DecodeError as error:
                    if raises:
                        raise
                    self._note(error)
                    continue
                finally:
                    message = None  # keep no reference here: only the value may keep the message alive
                yield value
                del value
        except ClosedError:
            if not self.closed:
                raise

    async def values_async(self, timeout: float | None = None, errors: str = "skip") -> AsyncIterator[T]:
        """``values`` for asyncio."""
        raises = _raises(errors)
        try:
            while (message := await self.read_async(timeout)) is not None:
                try:
                    value = self._decode(message)
                except DecodeError as error:
                    if raises:
                        raise
                    self._note(error)
                    continue
                finally:
                    del message
                yield value
                del value
        except ClosedError:
            if not self.closed:
                raise

    @property
    def decode_errors(self) -> int:
        """How many messages could not be decoded when their value was asked for."""
        return self._decoding.errors

    def _note(self, error: DecodeError) -> None:
        now = time.monotonic()
        if not self._decoding.told or now - self._decoding.told >= LOG_FAILURES_S:
            self._decoding.told = now
            logger.warning("%r: %s (%d so far)", self, error, self._decoding.errors)

    # --- the contract, by the inner handle

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until there is something to read; False when the time is over."""
        return self.inner.wait(timeout)

    def fileno(self) -> int:
        """A descriptor that is readable when a message may be there."""
        return self.inner.fileno()

    def _available_messages(self) -> Iterator[Message[T]]:
        for message in self.inner._available_messages():
            message._decoder = self._decoder
            there = [message]
            del message
            yield there.pop()  # type: ignore[misc]  # nothing here keeps it

    def _begin_wait(self) -> None:
        self.inner._begin_wait()

    def _end_wait(self) -> None:
        self.inner._end_wait()

    def schema_of(self, topic: str | None) -> str | None:
        """The schema of one of its topics, or None."""
        return self.inner.schema_of(topic)

    def schemas_of(self, topic: str | None) -> list[str]:
        """Every stored version of it, the newest last."""
        return self.inner.schemas_of(topic)

    def __repr__(self) -> str:
        return f"<{self.codec.name} of {self.inner!r}>"


def terms_of(kind: Any, evolve: str, writes: bool) -> tuple[Codec[Any], Terms]:
    """The codec of a type, and the terms by which a handle of that type joins a channel."""
    if evolve not in ("compatible", "any"):
        raise InvalidArgument(f"evolve={evolve!r} is not a choice; valid: any, compatible")
    codec = codec_of(kind)
    return codec, Terms(codec.described(), writes, evolve == "any")


def wrap(inner: Any, codec: Codec[Any], terms: Terms, on_message: Callable[..., Any] | None = None) -> Any:
    """The typed handle over ``inner``, which is closed if the types are not compatible."""
    try:
        inner.agree(terms)
    except BaseException:
        inner.close()
        raise
    if terms.writes:
        return TypedPublisher(inner, codec)
    return TypedSubscriber(inner, codec).call_in_thread(on_message)


def _inner(handle: Any, name: str) -> Any:
    try:
        return vars(handle)["inner"]
    except KeyError:  # while it is being constructed or copied
        raise AttributeError(name) from None


def _raises(errors: str) -> bool:
    if errors not in ("skip", "raise"):
        raise InvalidArgument(f"errors={errors!r} is not a choice; valid: skip, raise")
    return errors == "raise"
