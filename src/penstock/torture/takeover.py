"""Two brokers of one stream: whichever leads is killed, stopped or cut off under load, and the other one goes on.

One that was stopped and goes on after its lease has ended must confirm and hand out nothing. Promises: those of
``penstock.torture.replica``, and that the other one leads while the first is away.
"""

from __future__ import annotations

import random

from penstock.torture import replica
from penstock.torture.report import Report


def run(report: Report, chance: random.Random) -> None:
    replica.run(report, chance, brokers=2)
