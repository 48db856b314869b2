"""Replay: a recording into a gateway or a bus program, in recorded time on one thread, the same way every time.

``replay`` runs it once, ``first_difference`` compares two outputs, ``first_break`` and ``shrink`` find the inputs that
a broken rule needs. The order and what is promised for whom: ``penstock.gateway.stage``.

A virtual clock is in use while a replay runs, in the whole process: one replay at a time, in any one thread.
"""

from penstock.gateway.stage import Failure
from penstock.replay.apart import apart
from penstock.replay.compare import Difference, first_difference
from penstock.replay.output import Output
from penstock.replay.rule import Break, Rule, Verdict, first_break, judge, judge_all, shrink
from penstock.replay.run import Report, replay
from penstock.replay.script import Input, Script, store_inputs
from penstock.replay.target import GatewayTarget, ProgramError, ProgramTarget, Target, target

__all__ = [
    "Break",
    "Difference",
    "Failure",
    "GatewayTarget",
    "Input",
    "Output",
    "ProgramError",
    "ProgramTarget",
    "Report",
    "Rule",
    "Script",
    "Target",
    "Verdict",
    "apart",
    "first_break",
    "first_difference",
    "judge",
    "judge_all",
    "replay",
    "shrink",
    "store_inputs",
    "target",
]
