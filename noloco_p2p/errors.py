"""Define every error that a user of noloco_p2p can encounter.

NolocoError
+-- SpecError            a run spec is wrong or cannot be read
+-- SettingsError        a setting of this machine is wrong (flag, environment, settings file)
+-- IdentityError        the key of this peer cannot be read, created or used
+-- TicketError          a string is not a ticket
+-- DirectoryError       the DHT or its daemon cannot be started or used
+-- PeerError            another peer is at fault; `peer` is its id
|    +-- Unreachable     no connection could be made
|    +-- TimedOut        the peer is connected, but too slow or frozen
|    +-- Refused         the peer refused, with a `code`, a sentence and `retry_after_s`
|    +-- CorruptPayload  the peer sent data that is damaged, of the wrong size or non-finite
|         +-- NotFinite  the data arrived intact, but holds NaN or infinity
+-- CheckpointError      a checkpoint cannot be written or read
+-- PushError            the hub refused a checkpoint or a model
+-- ModelError           the model named by the spec cannot be built or loaded
+-- DataError            the data named by the spec is missing or unusable
|    +-- Unbound         a binding to files on this machine is missing or wrong, which is also a SettingsError
+-- RankError            another process of this peer (one per GPU) has ended
+-- Left                 this peer was asked to leave before it began to train, which is not a fault

Each message says what happened, which peer was involved, and what to do next.
"""

from __future__ import annotations


def printable(text: str) -> str:
    r"""Return text with escapes such as `\u001b` in place of all characters that could manipulate a terminal.

    These are control characters, characters that change the direction of text, and other invisible ones. Line breaks
    and tabs remain.
    """
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() or char in "\n\t" else _escape(char) for char in text)


def _escape(char: str) -> str:
    number = ord(char)
    return f"\\u{number:04x}" if number < 0x10000 else f"\\U{number:08x}"


MAX_SENTENCE = 500  # characters of a message about another peer, because that peer may have written part of it


class NolocoError(Exception):
    """The base class of all errors that noloco_p2p raises for a user to read.

    A message is a printable line, because it may quote what a stranger wrote.
    """

    def __init__(self, message: str = "") -> None:
        super().__init__(printable(message))


class SpecError(NolocoError, ValueError):
    """A run spec is wrong. The message contains the dotted name of the field."""


class SettingsError(NolocoError, ValueError):
    """A setting of this machine is wrong. The message names the flag or field."""


class IdentityError(NolocoError):
    """The key file of this peer cannot be read, created or used."""


class TicketError(NolocoError, ValueError):
    """A string is not a ticket, or is damaged."""


class DirectoryError(NolocoError):
    """The DHT node or its daemon cannot be started or used."""


class PeerError(NolocoError):
    """Another peer is at fault.

    The error never reaches the training loop, because only the swap fails.
    """

    # What to do about it if one peer of many is affected, and if all of them are.
    advice = "training continues", "run `noloco doctor TICKET`"

    def __init__(self, message: str, *, peer: str = "") -> None:
        super().__init__(message[:MAX_SENTENCE])
        self.peer = peer


class Unreachable(PeerError):
    """No connection to the peer could be made."""

    advice = "it is gone or behind a firewall, and no action is needed", "run `noloco doctor TICKET`"


class TimedOut(PeerError):
    """The peer is connected, but it is too slow or frozen."""

    advice = "no action is needed", "check this machine's uplink and load"


SAME_EVERYWHERE = "use the same ticket and the same version of noloco_p2p everywhere"
ASK_ITS_OWNER = "ask the owner of that peer"


class Refused(PeerError):
    """The peer refused a request. `code` is meant for programs, and the message for people."""

    advice: tuple[str, str] = SAME_EVERYWHERE, SAME_EVERYWHERE

    def __init__(self, message: str, *, peer: str = "", code: str = "", retry_after_s: float = 0.0) -> None:
        super().__init__(message, peer=peer)
        self.code = code
        self.retry_after_s = retry_after_s
        if code == "BANNED":
            self.advice = ASK_ITS_OWNER, ASK_ITS_OWNER


class CorruptPayload(PeerError):
    """The peer sent data that is damaged, non-finite, or not of the announced size."""

    advice = "none of the data was applied", "none of the data was applied; test this machine's memory and network"


class NotFinite(CorruptPayload):
    """The data arrived intact, but it holds NaN, infinity, or values that would overflow when decoded."""


class CheckpointError(NolocoError):
    """A checkpoint cannot be written or read."""


class PushError(NolocoError):
    """The hub refused a checkpoint or a model. The files are still on this machine."""


class ModelError(NolocoError):
    """The model named by the spec cannot be built or loaded."""


class DataError(NolocoError):
    """The data named by the spec is missing or unusable."""


class Unbound(DataError, SettingsError):
    """A name of data in the spec is not bound to files on this machine. A restart does not change that."""


class RankError(NolocoError):
    """Another process of this peer has ended or is hanging. It holds a part of the peer's model."""


class Left(NolocoError):
    """This peer was asked to leave before it began to train. It keeps what it has fetched so far."""
