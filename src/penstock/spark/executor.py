"""Opens a journal on the node where a task runs, which may differ from the node that planned the query."""

from __future__ import annotations

import socket

from penstock.errors import InvalidArgument, StateError
from penstock.spark.directory import anew_text
from penstock.spark.places import Place, Range, open_place, shown


def open_range(piece: Range) -> Place:
    """The journal of a range; ``StateError`` if this node does not see it, or if it was created anew meanwhile."""
    try:
        place = open_place(piece.place)
    except InvalidArgument as error:
        raise StateError(
            f"node {socket.gethostname()} does not see the journal {shown(piece.place)}: {error}. Mount it on every "
            "node, or let a broker serve it and read broker://HOST:PORT"
        ) from None
    if place.uuid != piece.journal:
        raise StateError(anew_text(shown(piece.place)))
    return place
