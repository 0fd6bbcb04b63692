"""What a program that stays does about Python's garbage collection, of which the whole process has one."""

from __future__ import annotations

import gc


def spare_what_is_loaded() -> None:
    """Let no later collection look at what is here now, libraries above all.

    One that looks at all of it takes 100 ms, in which neither training nor the network thread goes on.
    """
    gc.collect()
    gc.freeze()
