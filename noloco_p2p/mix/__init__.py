"""Swap slices of the weights with random live peers, one after another, while training continues.

A swap has one part and one commit. `gossip.py` finds partners and runs swaps on the network thread, and `exchange.py`
is the only door to the training thread, which copies slices and adds half-differences between two inner steps.
"""
