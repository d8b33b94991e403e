"""Numbers pinned by hash: a change that is meant to move none shows here that it moves none.

probe.py computes them, pinned.json holds them, test_goldens.py compares; compare.py compares with another
revision of the code. What the probe calls by name in wm_ds is in subject.py alone.
"""
