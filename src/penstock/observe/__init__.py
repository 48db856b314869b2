"""What can be seen of running systems: counters of every live process, their rates, health and links, decoded messages.

Nothing here subscribes to what it shows unless it is asked for messages; counts come from the pages that every process
keeps anyway. The parts are loaded when used: importing this loads nothing else.
"""

from __future__ import annotations

__all__: list[str] = []
