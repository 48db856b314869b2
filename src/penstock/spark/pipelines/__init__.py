"""Whole pipelines as plain functions from DataFrame to DataFrame; ``archive`` and ``replay`` do things with them.

``quality``, ``rollup`` and ``sessions`` work in batch and streaming; ``align`` and ``replay`` in batch.
``declared.load`` reads a pipeline from a TOML file.
"""

from __future__ import annotations

from penstock.spark.lake import Archived, archive, compact, history, read_all
from penstock.spark.pipelines.align import align, asof, grid
from penstock.spark.pipelines.quality import between_windows, quality, worst
from penstock.spark.pipelines.replay import Replayed, replay
from penstock.spark.pipelines.report import report
from penstock.spark.pipelines.rollup import rollup
from penstock.spark.pipelines.sessions import sessions

__all__ = [
    "align",
    "archive",
    "Archived",
    "asof",
    "between_windows",
    "compact",
    "grid",
    "history",
    "quality",
    "read_all",
    "replay",
    "Replayed",
    "report",
    "rollup",
    "sessions",
    "worst",
]
