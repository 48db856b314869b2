"""What ``penstock.publisher("shm:/NAME")`` and ``penstock.subscriber("shm:/NAME")`` open."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, TypeVar

from penstock.address import Address
from penstock.channel import Overflow, choose
from penstock.errors import InvalidArgument
from penstock.shm.publisher import Publisher
from penstock.shm.subscriber import Subscriber

Opener = TypeVar("Opener", bound=Callable[..., Any])


def _with_options_of(handle: type[Any]) -> Callable[[Opener], Opener]:
    """The function takes the options of the handle beside its own: they are written down where they are used."""

    def wrap(function: Opener) -> Opener:
        own = inspect.signature(function)
        parameters = {name: p for name, p in own.parameters.items() if p.kind is not inspect.Parameter.VAR_KEYWORD}
        for parameter in inspect.signature(handle.__init__).parameters.values():
            if parameter.kind is inspect.Parameter.KEYWORD_ONLY:
                parameters.setdefault(parameter.name, parameter)
        function.__signature__ = own.replace(parameters=list(parameters.values()))  # type: ignore[attr-defined]
        return function

    return wrap


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


@_with_options_of(Publisher)
def open_publisher(
    address: Address, *, overflow: str | None = None, reliable: bool | None = None, **options: Any
) -> Publisher:
    """A publisher of the channel that ``address`` names."""
    return Publisher(address.name, reliable=_reliable(address, overflow, reliable), **options)


@_with_options_of(Subscriber)
def open_subscriber(
    address: Address, *, overflow: str | None = None, reliable: bool | None = None, **options: Any
) -> Subscriber:
    """A subscriber of the channel that ``address`` names."""
    return Subscriber(address.name, reliable=_reliable(address, overflow, reliable), **options)
