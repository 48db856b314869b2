"""Whole pipelines as plain functions from DataFrame to DataFrame."""

from __future__ import annotations

from penstock.spark.pipelines.align import align, asof, grid
from penstock.spark.pipelines.quality import between_windows, quality, worst
from penstock.spark.pipelines.replay import Replayed, replay
from penstock.spark.pipelines.report import report
from penstock.spark.pipelines.rollup import rollup
from penstock.spark.pipelines.sessions import sessions

__all__ = [
    "align",
    "asof",
    "between_windows",
    "grid",
    "quality",
    "Replayed",
    "replay",
    "report",
    "rollup",
    "sessions",
    "worst",
]
