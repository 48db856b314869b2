"""The recorder as a part of the demo: shared memory, TCP and the broker into one journal."""

from __future__ import annotations

from pathlib import Path

from penstock.cli.demo.part import Stage
from penstock.recording.recorder import Plan, Recorder


def run(stage: Stage) -> None:
    """Record until told to stop; what has arrived by then is stored too."""
    plan = Plan(Path(stage.configuration["directory"]), stage.configuration["topics"])
    with Recorder(plan) as recorder:
        stage.tell(ready=True)
        while not stage.stop.wait(0.5):
            stage.tell(recorded=recorder.totals())
        recorder.stop()
        stage.tell(recorded=recorder.totals(), errors=recorder.errors, finished=True)
