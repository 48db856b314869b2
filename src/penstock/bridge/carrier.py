"""Carrier: ``penstock.carry`` for a bridge whose map sends some virtual channels to other ids or other sinks.

One thread uses it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from typing import Any

from penstock import _core
from penstock.carry import Carry, time_of
from penstock.channel import IdAndKey, Publisher


class Carrier(Carry):
    """Forwards to one sink, and to the publishers of those virtual channels that the map sends elsewhere."""

    def __init__(
        self,
        sink: Publisher,
        vchans: Mapping[int, int | str],
        others: Mapping[str, Publisher],
        counters: _core.Counters,
        keep_trying: Callable[[float], bool] | None = None,
        details: Callable[[Any], IdAndKey] | None = None,
    ) -> None:
        super().__init__(sink, counters, keep_trying, details)
        self._vchans = dict(vchans)
        self._others = {target: Carry(publisher, counters, keep_trying) for target, publisher in others.items()}

    def carry(self, batch: Any) -> None:
        """Publish the messages of ``batch``, in order, with the id and at the sink that the map gives them."""
        if not self._vchans:
            super().carry(batch)
            return
        # Only adjacent messages are grouped, so that the order within the batch is kept.
        for target, run in groupby(batch, lambda message: self._vchans.get(message.vchan_id)):
            if isinstance(target, str):
                self._others[target].carry(list(run))
            elif target is None:
                super().carry(list(run))
            else:
                self.carry_by(self._renumbering(target), list(run))

    def _renumbering(self, vchan_id: int) -> Callable[[Sequence[Any]], None]:
        publish: Any = self.publisher.publish

        def send(messages: Sequence[Any]) -> None:
            for message in messages:
                publish(
                    message, vchan_id=vchan_id, ordinal=message.ordinal, timestamp_ns=time_of(message),
                    properties=dict(message.properties) or None,
                )  # fmt: skip

        def to_multiplexer(messages: Sequence[Any]) -> None:
            for message in messages:
                publish(message, vchan_id=vchan_id)

        return send if self.publisher.carries_properties else to_multiplexer
