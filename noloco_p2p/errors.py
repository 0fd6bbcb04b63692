"""Every error a user of noloco_p2p can meet.

NolocoError
 +-- SpecError            a run spec is wrong or cannot be read
 +-- SettingsError        a setting of this machine is wrong (flag, environment, settings file)
 +-- IdentityError        the key of this peer cannot be read, created or used
 +-- TicketError          a string is not a ticket
 +-- DirectoryError       the DHT or its daemon cannot be started or used
 +-- PeerError            something about one other peer; `peer` names it
 |    +-- Unreachable     no connection could be made
 |    +-- TimedOut        connected, but too slow or frozen
 |    +-- Refused         it answered no: `code`, a sentence, `retry_after_s`
 |    +-- CorruptPayload  what it sent is damaged, of another size or not finite
 |         +-- NotFinite  it is whole, and holds NaN or infinity
 +-- CheckpointError      a checkpoint cannot be written or read
 +-- ModelError           the model named by the spec cannot be built or loaded
 +-- DataError            the data named by the spec is missing or unusable
 +-- RankError            another process of this peer, one a GPU, is gone
 +-- Left                 no fault: this peer was asked to leave before it began to train

Each message says what happened, with whom, and what to do next.
"""

from __future__ import annotations

MAX_SENTENCE = 500  # characters of a message about another peer, which may have chosen some of its words


class NolocoError(Exception):
    """Base of all errors that noloco_p2p raises for a user to read."""


class SpecError(NolocoError, ValueError):
    """A run spec is wrong; the message names the dotted field."""


class SettingsError(NolocoError, ValueError):
    """A setting of this machine is wrong; the message names the flag or field."""


class IdentityError(NolocoError):
    """The key file of this peer cannot be read, created or used."""


class TicketError(NolocoError, ValueError):
    """A string is not a ticket, or is damaged."""


class DirectoryError(NolocoError):
    """The DHT node or its daemon cannot be started or used."""


class PeerError(NolocoError):
    """A fault of one other peer. It never reaches the training loop: a round turns it into an outcome."""

    advice = "training goes on; if it comes again with many peers, run `noloco doctor TICKET`"  # what to do about it

    def __init__(self, message: str, *, peer: str = "") -> None:
        super().__init__(message[:MAX_SENTENCE])
        self.peer = peer


class Unreachable(PeerError):
    """No connection to the peer could be made."""

    advice = (
        "nothing to do when it is one peer: it is gone, or behind a firewall; "
        "if no peer can be reached, run `noloco doctor TICKET`"
    )


class TimedOut(PeerError):
    """The peer is connected but too slow, or frozen."""

    advice = "nothing to do when it is one peer; if it is all of them, look at this machine's uplink and load"


class Refused(PeerError):
    """The peer answered no. `code` is for programs, the message is for people."""

    advice = "if it says that the run, spec or version differs: use the same ticket and the same noloco_p2p everywhere"

    def __init__(self, message: str, *, peer: str = "", code: str = "", retry_after_s: float = 0.0) -> None:
        super().__init__(message, peer=peer)
        self.code = code
        self.retry_after_s = retry_after_s


class CorruptPayload(PeerError):
    """What the peer sent is damaged, of another size than announced, or not finite."""

    advice = (
        "nothing of it was applied; if it comes from many peers, test this machine's memory and network; if it says "
        "that the own gradient is not finite, lower the learning rate"
    )


class NotFinite(CorruptPayload):
    """What the peer sent came as it was sent, and holds NaN, infinity, or what would overflow once decoded."""


class CheckpointError(NolocoError):
    """A checkpoint cannot be written or read."""


class PushError(NolocoError):
    """The hub does not take a checkpoint or a model. Both are still on this machine."""


class ModelError(NolocoError):
    """The model named by the spec cannot be built or loaded."""


class DataError(NolocoError):
    """The data named by the spec is missing or unusable."""


class RankError(NolocoError):
    """Another process of this peer, of those that share its model, has ended or hangs."""


class Left(NolocoError):
    """This peer was asked to leave before it began to train. What was fetched so far is kept."""
