"""Every error that a user of noloco_p2p can meet.

NolocoError
+-- SpecError            a run spec is wrong or cannot be read
+-- SettingsError        a setting of this machine is wrong (flag, environment, settings file)
+-- IdentityError        the key of this peer cannot be read, created or used
+-- TicketError          a string is not a ticket
+-- DirectoryError       the DHT or its daemon cannot be started or used
+-- PeerError            a fault of one other peer; `peer` names it
|    +-- Unreachable     no connection could be made
|    +-- TimedOut        it is connected, but too slow or frozen
|    +-- Refused         it refused: `code`, a sentence, `retry_after_s`
|    +-- CorruptPayload  what it sent is damaged, of the wrong size or not finite
|         +-- NotFinite  its data is intact, and holds NaN or infinity
+-- CheckpointError      a checkpoint cannot be written or read
+-- ModelError           the model named by the spec cannot be built or loaded
+-- DataError            the data named by the spec is missing or unusable
+-- RankError            another process of this peer (one per GPU) has ended
+-- Left                 not a fault: this peer was asked to leave before it began to train

Each message says what happened, with whom, and what to do next.
"""

from __future__ import annotations

MAX_SENTENCE = 500  # characters of a message about another peer, which may have chosen some of its words


class NolocoError(Exception):
    """Base class of all errors that noloco_p2p raises for a user to read."""


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
    """A fault of one other peer. It never reaches the training loop, because a round turns it into an outcome."""

    advice = "training continues; if it happens with many peers, run `noloco doctor TICKET`"  # what to do about it

    def __init__(self, message: str, *, peer: str = "") -> None:
        super().__init__(message[:MAX_SENTENCE])
        self.peer = peer


class Unreachable(PeerError):
    """No connection to the peer could be made."""

    advice = (
        "if it is one peer, do nothing: it is gone, or behind a firewall; "
        "if no peer can be reached, run `noloco doctor TICKET`"
    )


class TimedOut(PeerError):
    """The peer is connected but too slow, or frozen."""

    advice = "if it is one peer, do nothing; if it is all of them, check this machine's uplink and load"


class Refused(PeerError):
    """The peer refused. `code` is for programs, the message for people."""

    advice = "if it says that the run, spec or version differs: use the same ticket and the same noloco_p2p everywhere"

    def __init__(self, message: str, *, peer: str = "", code: str = "", retry_after_s: float = 0.0) -> None:
        super().__init__(message, peer=peer)
        self.code = code
        self.retry_after_s = retry_after_s


class CorruptPayload(PeerError):
    """What the peer sent is damaged, of another size than announced, or not finite."""

    advice = (
        "nothing of it was applied; if it comes from many peers, test this machine's memory and network; if it says "
        "that this peer's own gradient is not finite, lower the learning rate"
    )


class NotFinite(CorruptPayload):
    """What the peer sent arrived intact, but holds NaN, infinity, or values that would overflow when decoded."""


class CheckpointError(NolocoError):
    """A checkpoint cannot be written or read."""


class PushError(NolocoError):
    """The hub refused a checkpoint or a model, which is still on this machine."""


class ModelError(NolocoError):
    """The model named by the spec cannot be built or loaded."""


class DataError(NolocoError):
    """The data named by the spec is missing or unusable."""


class RankError(NolocoError):
    """Another process of this peer, with which it shares its model, has ended or hangs."""


class Left(NolocoError):
    """This peer was asked to leave before it began to train. What it fetched so far is kept."""
