"""The publisher. ``publish``, ``publish_many``, ``reserve``, ``wait`` and ``close`` are native; what is here happens
once a handle or once a growth.

Rules: any thread. Reliable: waits while a reliable subscriber has not seen the oldest message, or while there
is no subscriber. Unreliable: never waits, overwrites the oldest message that nobody holds.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from penstock import channel
from penstock._core import shm as native
from penstock.channel import Buffer, Ledger, Overflow, choose
from penstock.errors import InvalidArgument, RefusedError, warn_user
from penstock.history import Kept, kept_of

if TYPE_CHECKING:
    ResizeCallback = Callable[["Publisher", int, int], Any]


DEFAULT_SLOT_SIZE = 4096
MAX_SLOTS_FOR_TIME = 1 << 16

MAX_SCHEMA_BYTES = 262_144  # longest text of all versions of a channel's type, as in the native core


class Publisher(native.Publisher, channel.Publisher):
    """One writing handle on a shared-memory channel. ``docs/rooms/shm.md`` has the table of options."""

    reserve_waits = True

    def __init__(
        self,
        name: str,
        *,
        slots: int | None = None,
        slot_size: int | None = None,
        overflow: str | Overflow | None = None,
        reliable: bool | None = None,
        timeout: float | None = None,
        fixed_size: bool = False,
        max_reserved: int = 1,
        type: str | None = None,
        checksum: bool = False,
        metadata_size: int | None = None,
        activation: bool = False,
        retirement: bool = False,
        max_publishers: int | None = None,
        max_subscribers: int | None = None,
        local: bool = False,
        mux: str | None = None,
        vchan_id: int | None = None,
        mode: int | None = None,
        group: int | str | None = None,
        spin_us: int = 0,
        on_resize: ResizeCallback | None = None,
        history: int | str | None = None,
        latest: bool = False,
        history_bytes: int | str | None = None,
        before: int = 0,
    ) -> None:
        kept = kept_of(history, latest, history_bytes)
        if kept.messages and mux is not None:
            raise InvalidArgument(f"channel {name!r}: a virtual channel shares its mux's slots and has no history")
        if vchan_id is not None and mux is None:
            raise InvalidArgument(f"channel {name!r}: vchan_id={vchan_id} needs mux=, the multiplexer that it is on")
        if before and mux is not None:
            raise InvalidArgument(f"channel {name!r}: a virtual channel begins with ordinal 1, not {before + 1}")
        self.name = name
        self.mux = mux
        self.reliable = reliable = is_reliable(name, overflow, reliable)
        channel.check_flag("activation", activation)
        self.local = local
        self._on_resize = on_resize
        super().__init__(
            name=name, slots=slots, slot_size=slot_size, reliable=reliable, timeout=timeout, fixed_size=fixed_size,
            max_reserved=max_reserved, type=type, checksum=checksum, metadata_size=metadata_size, retirement=retirement,
            max_publishers=max_publishers, max_subscribers=max_subscribers, local=local, mux=mux, vchan_id=vchan_id,
            mode=mode, group=group_id(group), spin_us=spin_us, history_messages=kept.messages, history_ns=kept.age_ns,
            history_bytes=kept.bytes, history_slots=history_slots(kept, slot_size),
            before=before,
        )  # fmt: skip
        #: Whether the activation message was published; False too where none was asked for.
        self.activated = activation and self._activate()
        if activation and not self.activated:
            warn_user(f"channel {name!r}: the activation message found no slot and was not published")

    def agree(self, terms: channel.Terms) -> None:
        agree_on_schema(self, terms)

    @property
    def schema(self) -> str | None:
        """What describes the channel's type, or None."""
        return newest_schema(self)

    def forward(self, batch: Any) -> int:
        """Publish messages of any reach with the metadata they have; refused if this channel has no room for
        metadata."""
        size = len(batch[0].metadata or b"") if len(batch) else 0  # the same for all: they come from one channel
        if size > self.metadata_size:
            raise InvalidArgument(
                f"channel {self.name!r} has {self.metadata_size} bytes of metadata, and the messages bring {size}; "
                f"open it with metadata_size={size}"
            )
        if not size:
            return self.publish_many(batch)
        for message in batch:
            self.publish(message, metadata=message.metadata)
        return len(batch)

    def on_resize(self, function: ResizeCallback | None) -> None:
        """``function(publisher, old_size, new_size)`` is asked before slots grow; False vetoes it. None unsets it."""
        if function is not None and not callable(function):
            raise TypeError(f"on_resize takes a function or None, not {function.__class__.__name__}")
        self._on_resize = function

    def _grow(self, size: int) -> None:
        """Slots of at least ``size`` bytes; called by the native side when a message does not fit."""
        if self._on_resize is not None and not self.fixed_size:
            old, new = self.slot_size, self._grown_size(size)
            if self._on_resize(self, old, new) is False:
                raise RefusedError(f"channel {self.name!r}: growing its slots from {old} to {new} bytes was vetoed")
        self._do_grow(size)

    def _publish_now(self, data: Buffer, options: Mapping[str, Any]) -> int:
        if not self.reliable:
            return self.publish(data, **options)
        try:
            return self.publish(data, **{**options, "timeout": 0})
        except TimeoutError:
            raise BlockingIOError from None

    @property
    def ledger(self) -> Ledger:
        """What was published. At this reach a published message counts as delivered: it is in the channel.

        A message of an unreliable publisher that found no slot, because reliable subscribers had not read what was in
        them, is dropped (``overflow``).
        """
        published, given_up = self._counts()
        dropped = {"overflow": given_up} if given_up else {}
        return Ledger(matched=published + given_up, delivered=published, dropped=dropped)

    def __repr__(self) -> str:
        return f"<shm.Publisher {self.name!r}{', closed' if self.closed else ''}>"


def history_slots(kept: Kept, slot_size: int | None) -> int:
    """How many slots the history needs: one per message; if it is bounded by time, as many as its bytes fill."""
    if not kept.age_ns:
        return kept.messages
    return min(max(1, kept.bytes // (slot_size or DEFAULT_SLOT_SIZE)), MAX_SLOTS_FOR_TIME)


def agree_on_schema(handle: Any, terms: channel.Terms) -> None:
    """The first typed handle sets the channel's type. The types of later ones must be compatible with all before.

    The channel stores the versions one per line, the newest last. It accepts a new version only if the stored ones are
    still those that it was compared with.
    """
    where = f"channel {handle.name!r}"
    there, known = handle._agree_on_schema(terms.name, terms.text, None)
    while True:
        if not known:
            terms.check_name(there, where)
        versions = terms.added_to(known.splitlines(), where)
        if versions is None or not (known or terms.replaces):
            return
        text = "\n".join(versions)
        while len(text) > MAX_SCHEMA_BYTES:
            text = text.partition("\n")[2]
        there, known = handle._agree_on_schema(terms.name if terms.replaces else there, text, known)
        if known == text:
            return


def schemas(handle: Any) -> list[str]:
    """What describes the channel's type, every version, the newest last."""
    known: str = handle._agree_on_schema("", "", None)[1]
    return known.splitlines()


def newest_schema(handle: Any) -> str | None:
    """What describes the channel's type, or None."""
    return next(reversed(schemas(handle)), None)


def is_reliable(name: str, overflow: str | Overflow | None, reliable: bool | None) -> bool:
    """``overflow`` in the contract's words; ``reliable`` in this reach's."""
    channel.check_flag("reliable", reliable)
    if overflow is None:
        return bool(reliable)
    chosen = choose(Overflow, overflow, "overflow")
    if chosen is Overflow.DROP_NEWEST:
        raise InvalidArgument(f"shm:{name}: overflow='drop_newest' is not possible here; use 'block' or 'drop_oldest'")
    if reliable is not None and reliable != (chosen is Overflow.BLOCK):
        raise InvalidArgument(f"shm:{name}: overflow={overflow!r} and reliable={reliable} contradict each other")
    return chosen is Overflow.BLOCK


def group_id(group: int | str | None) -> int | None:
    """The number of a group given by number or name."""
    if group is None or isinstance(group, int):
        return group
    import grp  # not on every platform, and seldom needed

    try:
        return grp.getgrnam(group).gr_gid
    except KeyError:
        raise InvalidArgument(f"group={group!r}: this machine has no group of that name (uid {os.getuid()})") from None
