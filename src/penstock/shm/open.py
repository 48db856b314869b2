"""What ``penstock.publisher("shm:/NAME")`` and ``penstock.subscriber("shm:/NAME")`` open."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.address import class_opener, opener
from penstock.shm.publisher import Publisher
from penstock.shm.subscriber import Subscriber

open_publisher = class_opener(Publisher, "publisher")
open_subscriber = class_opener(Subscriber, "subscriber")
if TYPE_CHECKING:
    from penstock.shm.opening import publisher, subscriber
else:
    publisher = opener("shm", open_publisher)
    subscriber = opener("shm", open_subscriber)

__all__ = ["open_publisher", "open_subscriber", "publisher", "subscriber"]
