from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def test_the_work_queue_runs() -> None:
    example = Path(__file__).parents[2] / "examples" / "work_queue.py"
    done = subprocess.run([sys.executable, str(example)], capture_output=True, text=True, check=True)
    assert done.stdout == "20 jobs done, 1 dead letter\n"
