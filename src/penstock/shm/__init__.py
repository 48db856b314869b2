"""Shared-memory channels: publish and subscribe between the processes of one machine, without a server.

The first user of a channel creates it, the last one removes it; the others reclaim what a killed process held.
``penstock.publisher("shm:/camera")`` opens one; the classes here have everything the reach can do.

Rules: several threads may use one handle (all but waiting is done with the GIL); a forked child opens its own.
"""

from __future__ import annotations

from penstock._core import Message
from penstock._core.shm import MAX_VCHAN_ID
from penstock.shm.deaths import DeadMember, Death, deaths
from penstock.shm.directory import Channel, Member, Swept, channels, clean, include_directory, library_path, sweep
from penstock.shm.open import open_publisher, open_subscriber, publisher, subscriber
from penstock.shm.publisher import Publisher
from penstock.shm.subscriber import Subscriber, WeakReference
from penstock.shm.vchans import read_vchans, write_vchans

__all__ = [
    "MAX_VCHAN_ID",
    "Channel",
    "DeadMember",
    "Death",
    "Member",
    "Message",
    "Publisher",
    "Subscriber",
    "Swept",
    "WeakReference",
    "channels",
    "clean",
    "deaths",
    "include_directory",
    "library_path",
    "open_publisher",
    "open_subscriber",
    "publisher",
    "subscriber",
    "sweep",
    "read_vchans",
    "write_vchans",
]
