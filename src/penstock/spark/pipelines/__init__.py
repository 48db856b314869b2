"""Whole pipelines as plain functions from DataFrame to DataFrame; ``archive`` and ``replay`` do things with them.

``quality``, ``rollup`` and ``sessions`` work in batch and streaming; ``align`` and ``replay`` in batch.
``declared.load`` reads a pipeline from a TOML file.
"""

from __future__ import annotations

from penstock.spark.pipelines.align import align, asof, grid
from penstock.spark.pipelines.archive import Archived, Manifest, archive, history, read_all, read_manifest
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
    "grid",
    "history",
    "Manifest",
    "quality",
    "read_all",
    "read_manifest",
    "replay",
    "Replayed",
    "report",
    "rollup",
    "sessions",
    "worst",
]
