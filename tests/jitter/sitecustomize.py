"""Imported by every Python that starts with this folder in ``PYTHONPATH``: programs that a disturbed test starts."""

import penstock_jitter

penstock_jitter.disturb_program()
