"""Tunes Python's garbage collector in long-running commands. Each process has a single collector."""

from __future__ import annotations

import gc


def spare_what_is_loaded() -> None:
    """Exclude all objects that exist now, mostly those of libraries, from later garbage collections.

    A full collection takes 100 ms, and blocks both training and the network thread.
    """
    gc.collect()
    gc.freeze()
