"""``PENSTOCK_JITTER=SEED``: the tests on a disturbed schedule. ``penstock_jitter`` has what is disturbed.

Programs that tests start are disturbed too: ``sitecustomize`` here is imported by each Python that has this folder in
``PYTHONPATH``.
"""
