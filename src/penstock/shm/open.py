"""What ``penstock.publisher("shm:/NAME")`` and ``penstock.subscriber("shm:/NAME")`` open."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from penstock.address import Address
from penstock.channel import Overflow, choose
from penstock.errors import InvalidArgument
from penstock.shm.publisher import Publisher
from penstock.shm.subscriber import Subscriber


def _reliable(address: Address, overflow: str | None, reliable: bool | None) -> bool:
    """``overflow`` in the contract's words; ``reliable`` in this reach's."""
    if overflow is None:
        return bool(reliable)
    chosen = choose(Overflow, overflow, "overflow")
    if chosen is Overflow.DROP_NEWEST:
        raise InvalidArgument(f"{address}: overflow='drop_newest' is not possible here; use 'block' or 'drop_oldest'")
    if reliable is not None and reliable != (chosen is Overflow.BLOCK):
        raise InvalidArgument(f"{address}: overflow={overflow!r} and reliable={reliable} contradict each other")
    return chosen is Overflow.BLOCK


def open_publisher(
    address: Address,
    *,
    overflow: str | None = None,
    reliable: bool | None = None,
    slots: int | None = None,
    slot_size: int | None = None,
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
    on_resize: Callable[..., Any] | None = None,
) -> Publisher:
    """A publisher of the channel that ``address`` names."""
    return Publisher(
        address.name, reliable=_reliable(address, overflow, reliable), slots=slots, slot_size=slot_size,
        timeout=timeout, fixed_size=fixed_size, max_reserved=max_reserved, type=type, checksum=checksum,
        metadata_size=metadata_size, activation=activation, retirement=retirement, max_publishers=max_publishers,
        max_subscribers=max_subscribers, local=local, mux=mux, vchan_id=vchan_id, mode=mode, group=group,
        spin_us=spin_us, on_resize=on_resize,
    )  # fmt: skip


def open_subscriber(
    address: Address,
    *,
    overflow: str | None = None,
    reliable: bool | None = None,
    max_active_messages: int | None = None,
    type: str | None = None,
    checksum: str = "raise",
    pass_activation: bool = False,
    max_publishers: int | None = None,
    max_subscribers: int | None = None,
    mux: str | None = None,
    vchan_id: int | None = None,
    history: bool = True,
    mode: int | None = None,
    group: int | str | None = None,
    spin_us: int = 0,
) -> Subscriber:
    """A subscriber of the channel that ``address`` names."""
    return Subscriber(
        address.name, reliable=_reliable(address, overflow, reliable), max_active_messages=max_active_messages,
        type=type, checksum=checksum, pass_activation=pass_activation, max_publishers=max_publishers,
        max_subscribers=max_subscribers, mux=mux, vchan_id=vchan_id, history=history, mode=mode, group=group,
        spin_us=spin_us,
    )  # fmt: skip
