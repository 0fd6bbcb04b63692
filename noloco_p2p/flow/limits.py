"""This module defines the limits and deadlines of the pipeline and explains them. Sizes follow from the run spec."""

from __future__ import annotations

# Late gradients are harmful. A gradient that is three inner steps late increases the loss more than a lost one does.
# With a quarter of a batch in flight, gradients are at most a quarter of a step late on average.
IN_FLIGHT_SHARE = 0.25
# A step on less than half a batch is mostly noise. Its gradients count toward the next step instead.
SMALLEST_STEP_BATCHES = 0.5
# When a step of a replica has this many batches, heads that are ahead of the median must wait for the others.
LARGEST_STEP_BATCHES = 4.0

# A head that is silent for too long loses its vote, because dead heads must not hold up the median. The limit is a
# multiple of the usual interval between two of its microbatches at this replica, which depends on the stage's size.
VOTE_INTERVALS = 8.0
SHORTEST_VOTE_S = 15.0  # the lower limit, because a head is silent while its machine pauses
VOTE_S = 120.0  # the upper limit, which also applies to a head that has been heard from only once

# A head that has finished repeats its final mark, because a peer that had not seen its record did not count the first.
TELL_AGAIN_S = 30.0

# A microbatch is given up after this multiple of the head's median latency. Queues alone can double or triple it.
DEADLINE_LATENCIES = 4.0
NUM_LATENCIES = 32  # number of latencies in the median; they cover a few steps of the head
FIRST_DEADLINE_S = 120.0  # used until a latency is measured; it is long because the first tasks compile and allocate
SHORTEST_DEADLINE_S = 10.0  # long enough that swarms on one machine lose no microbatches when the machine pauses
LONGEST_DEADLINE_S = 600.0  # limits how long a forged Want can hold a slot

# A head that loses a microbatch pauses so that it does not waste its data. The pause doubles with each further loss.
FIRST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 32.0

TICK_S = 0.25  # how often the driver calls `tick`
# If a neighbour does not answer a Want for this long, the next neighbour is asked.
ASK_PATIENCE_S = 1.0
ASK_AGAIN_S = 5.0  # after this time, all neighbours are asked again, in case a slot is free or a frame was lost

# The number of Forwards that a node requests slots for or sends at a time. A single one rarely saturates the uplink, so
# slots are requested while others are being sent. With too many, reserved slots would wait for the uplink of this node.
MAX_UNDER_WAY = 4
MAX_SINKS = 8  # sinks in a Want, which are enough to choose from and take only 400 bytes
MAX_WANTS_PER_PEER = 8  # a neighbour sends MAX_UNDER_WAY Wants at a time, but earlier ones may still be queued
MAX_MAIL = 64  # unread frames about one microbatch; neighbours send only a few
FAIR_SHARES = 2.0  # limit for a head while others wait, relative to its fair share of a step's slots
MAX_HEADS = 1024  # heads that a replica remembers; it forgets those that have been silent for longest
SEEN_NUMBERS = 1024  # numbers remembered per head; a head launches fewer microbatches within the longest deadline


def num_rooms(*, memory_bytes: int, microbatch_bytes: int, batch_tokens: int, microbatch_tokens: int) -> int:
    """Return how many slots a replica has, or how many microbatches a head may have in flight. It is at least 1.

    `microbatch_bytes` is the size of one slot, which holds the encoded input, output and gradient of a microbatch.
    """
    in_flight = int(IN_FLIGHT_SHARE * batch_tokens / microbatch_tokens)
    return max(1, min(in_flight, memory_bytes // microbatch_bytes))
