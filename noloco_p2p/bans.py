"""Keep a list of temporarily banned peers: those that the owner of this peer banned, and those that misbehaved.

A ban is local and expires. A peer that collects STRIKES strikes within a few minutes is banned for an hour. Strikes
fade over time. The list is kept in a file, which `noloco ban` can change while a peer is running.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from noloco_p2p.atomic_file import write_atomically
from noloco_p2p.errors import SettingsError
from noloco_p2p.identity import public_key_of
from noloco_p2p.peer_name import named, shown
from noloco_p2p.telemetry.console import duration

log = logging.getLogger(__name__)

STRIKES = 3.0
STRIKE_HALF_LIFE_S = 600.0
STRUCK_OUT_S = 3600.0
MAX_BANS = 4096
LOOK_AGAIN_S = 1.0


@dataclass(frozen=True, slots=True)
class Ban:
    """A temporary ban of one peer."""

    reason: str
    until_s: float  # Unix
    name: str = ""  # of the peer when it was banned, because nobody announces it afterwards


class BanList:
    """The bans that this peer enforces.

    To find out whether a peer is banned, call `why`; the `in` operator is not supported. The list picks up changes to
    the file within a second.
    """

    def __init__(self, path: Path, *, clock: Callable[[], float] = time.time) -> None:
        self._path = path
        self._clock = clock
        self._bans: dict[str, Ban] = {}
        self._strikes: dict[str, tuple[float, float]] = {}  # peer id -> (strikes, time of the last one)
        self._stamp: tuple[int, int] | None = None
        self._fault = ""  # why the file cannot be read
        self._looked_at_s = -LOOK_AGAIN_S

    def why(self, peer_id: str) -> str:
        """Return the reason for a ban, worded for the banned peer and for the log, or "" if there is no ban."""
        if (ban := self.all().get(peer_id)) is None:
            return ""
        left_s = 60 * max(1, round((ban.until_s - self._clock()) / 60))
        return f"banned here for another {duration(left_s)}: {ban.reason}"

    def all(self) -> dict[str, Ban]:
        """Return the bans that are in effect now, by peer id."""
        now_s = self._clock()
        if abs(now_s - self._looked_at_s) >= LOOK_AGAIN_S:  # the clock may be set back
            self._looked_at_s = now_s
            if (stamp := self._stamp_of_file()) != self._stamp:
                self._stamp, self._bans = stamp, self._read()
        self._bans = {peer_id: ban for peer_id, ban in self._bans.items() if ban.until_s > now_s}
        return self._bans

    def ban(self, peer_id: str, reason: str, *, for_s: float, name: str = "") -> None:
        """Ban a peer for `for_s` seconds. There are at most MAX_BANS bans, and those that would end first end early.

        Raises SettingsError if `peer_id` is not a valid peer id, or if the file cannot be written.
        """
        try:
            public_key_of(peer_id)
        except ValueError:
            raise SettingsError(f"{peer_id!r} is not a peer id; `noloco status` and the log show peer ids") from None
        bans = {**self.all(), peer_id: Ban(reason, self._clock() + for_s, name)}
        # So bans of new identities, which last an hour, end none of the owner's, which last a week.
        self._bans = dict(sorted(bans.items(), key=lambda item: item[1].until_s)[-MAX_BANS:])
        self._save()

    def lift(self, peer_id: str) -> bool:
        """Lift a ban, and return whether the peer was banned."""
        was_banned = self.all().pop(peer_id, None) is not None
        self._strikes.pop(peer_id, None)
        self._save()
        return was_banned

    def strike(self, peer_id: str, reason: str) -> None:
        """Count a strike against a peer for an action that no honest peer takes, and ban it after too many strikes.

        This never raises an error.
        """
        now_s = self._clock()
        strikes, counted_s = self._strikes.pop(peer_id, (0.0, now_s))
        strikes = strikes * 0.5 ** (max(0.0, now_s - counted_s) / STRIKE_HALF_LIFE_S) + 1.0
        self._strikes[peer_id] = (strikes, now_s)
        while len(self._strikes) > MAX_BANS:
            del self._strikes[next(iter(self._strikes))]
        if strikes > STRIKES - 0.5:  # three strikes within minutes are enough, but not three within hours
            del self._strikes[peer_id]
            log.warning("%s is banned for an hour: %s", named(peer_id), reason)
            try:
                self.ban(peer_id, reason[:200], for_s=STRUCK_OUT_S)
            except SettingsError as error:
                log.warning("%s", error)

    def _read(self) -> dict[str, Ban]:
        self._fault = ""
        try:
            values: Any = json.loads(self._path.read_text(encoding="utf-8"))
            return {
                peer: Ban(str(ban["reason"]), float(ban["until_s"]), shown(ban.get("name")))
                for peer, ban in values.items()
            }
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            self._fault = f"{self._path}: the ban list cannot be read: {error}; repair the file, or move it away"
            log.warning("%s", self._fault)
            return self._bans

    def _save(self) -> None:
        if self._fault:  # writing would delete what it contains
            raise SettingsError(self._fault)
        values = {peer: asdict(ban) for peer, ban in self._bans.items()}
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(self._path, json.dumps(values).encode())
        except OSError as error:
            raise SettingsError(f"{self._path}: the ban list cannot be written: {error.strerror}") from None
        self._stamp = self._stamp_of_file()

    def _stamp_of_file(self) -> tuple[int, int] | None:
        try:
            found = self._path.stat()
        except OSError:
            return None
        return found.st_mtime_ns, found.st_ino
