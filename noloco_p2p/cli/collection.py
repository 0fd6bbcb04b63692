"""Tuning of Python's garbage collector in long-running commands. There is one collector for the whole process."""

from __future__ import annotations

import gc


def spare_what_is_loaded() -> None:
    """Exclude all objects that exist now, mostly those of libraries, from later garbage collections.

    A full collection takes 100 ms, during which neither training nor the network thread runs.
    """
    gc.collect()
    gc.freeze()
