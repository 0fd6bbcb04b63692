"""Keep what a peer reuses at its next start: its two ports, and of each run the folder, the spec and the invitation."""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Callable, Coroutine
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from noloco_p2p.atomic_file import write_atomically
from noloco_p2p.errors import CheckpointError, DirectoryError, SettingsError, SpecError
from noloco_p2p.identity import Identity
from noloco_p2p.invitation import Invitation, invite
from noloco_p2p.settings import PeerSettings
from noloco_p2p.spec import Spec
from noloco_p2p.swarm.daemon import probe_port
from noloco_p2p.ticket import Ticket

log = logging.getLogger(__name__)
T = TypeVar("T")

SPEC_FILE = "spec.json"
PORTS_FILE = "ports.json"
INVITATION_FILE = "invitation"  # a secret
NUMBER_FILE = "first-number"
NUMBERS_USED = 10**10  # more than a head uses in a year
MAX_CHANGES = 5  # named in a warning
OWN_INVITATION_S = 365 * 86400.0  # validity of the invitation that the holder of the run key issues to itself


def folder_of(state_dir: Path, run_id: str) -> Path:
    """Return the folder in which this machine keeps the spec, checkpoints and events of a run."""
    return state_dir / "runs" / run_id


def stage_folder(run_folder: Path, stage: int) -> Path:
    """Return the folder of a peer's checkpoints for one stage."""
    return run_folder / f"stage-{stage}"


def check_checkpoint_folder(folder: Path) -> None:
    """Raise CheckpointError if a checkpoint does not exist. This fails fast, before the slow imports."""
    if not folder.is_dir():
        raise CheckpointError(f"{folder} does not exist; a peer prints the path of its checkpoint when it leaves")
    if (folder / "config.json").is_file():
        raise CheckpointError(
            f"{folder} is an exported model; this command reads a checkpoint, or the folder of a run, which a peer "
            "keeps in its state folder. Other tools, such as lm_eval, read an exported model"
        )


def write_run(spec: Spec, invitation: Invitation | None, folder: Path) -> None:
    """Store the spec and the invitation for the next start. Raises SettingsError if the folder cannot be written."""
    path = folder / SPEC_FILE
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(path, spec.canonical_json())
        if invitation:
            write_atomically(folder / INVITATION_FILE, invitation.encode(), mode=0o600)
    except OSError as error:
        raise SettingsError(f"{path} cannot be written: {error.strerror}; use another --state-dir") from None


def first_number(run_folder: Path) -> int:
    """Return the number of a head's first microbatch, above all that it has used before, as replicas refuse others.

    It is the time in milliseconds, unless the clock of this machine was ahead at an earlier start.
    """
    path, number, before = run_folder / NUMBER_FILE, int(1000 * time.time()), 0
    with suppress(OSError, ValueError):
        before = int(path.read_text())
    if before >= number:
        number = before + NUMBERS_USED
    try:
        write_atomically(path, str(number).encode())
    except OSError as error:
        log.warning("the numbers of microbatches could not be saved for the next start: %s", error)
    return number


def warn_if_edited(spec: Spec, state_dir: Path) -> None:
    """Warn if this spec begins a new run although this machine has a run of the same name. Only a fork means to."""
    if folder_of(state_dir, spec.run_id).exists():
        return
    for path in sorted(state_dir.glob(f"runs/{spec.name}-*/{SPEC_FILE}"), key=lambda each: -each.stat().st_mtime):
        with suppress(OSError, ValueError, AttributeError):
            before, now = _flat(json.loads(path.read_bytes())), _flat(json.loads(spec.canonical_json()))
            changed = [key for key in sorted(now | before) if now.get(key) != before.get(key)]
            if before["name"] != spec.name or "model.start" in changed:
                continue
            changes = ", ".join(f"{key} was {before.get(key)}, is {now.get(key)}" for key in changed[:MAX_CHANGES])
            log.warning(
                "the spec of %s was edited, so this is a new run, which starts from step 0: %s. To continue the run in "
                "%s, undo the change; to start a run from its weights with a changed spec, use `noloco fork`",
                spec.name,
                changes + ", .." * (len(changed) > MAX_CHANGES),
                path.parent,
            )
            return


def _flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested fields by their dotted names."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return flat


def read_spec(ticket: Ticket, state_dir: Path) -> Spec | None:
    """Return the spec of the ticket's run, or None if this machine does not have it in full."""
    path = folder_of(state_dir, ticket.run_id) / SPEC_FILE
    if not path.exists():
        return None
    try:
        return Spec.from_json(path.read_bytes(), expected_digest=ticket.spec_digest, origin=str(path))
    except (SpecError, OSError) as error:  # the file is incomplete, for example because the disk was full
        log.warning("the stored spec cannot be used and will be fetched again: %s", error)
        return None


def find_invitation(target: Spec | Ticket, settings: PeerSettings) -> Invitation | None:
    """Return the invitation to a private run, or None for a public run.

    The invitation comes from the ticket, is made with the run key, or was stored earlier. Raises SettingsError,
    TicketError or IdentityError.
    """
    if isinstance(target, Ticket):
        found = target.invitation
    elif not target.run_key:
        found = None
    elif settings.run_key:
        key = Identity.load(settings.run_key)
        if key.peer_id != target.run_key:
            raise SettingsError(f"--run-key {settings.run_key}: this is not the run key that the run spec names")
        found = invite(key, expires_at_s=time.time() + OWN_INVITATION_S, seed=os.urandom(32))
    else:
        path = folder_of(settings.state_dir, target.run_id) / INVITATION_FILE
        try:
            found = Invitation.decode(path.read_bytes())
        except FileNotFoundError:
            raise SettingsError(
                f"the run {target.name} is private: join with a ticket, or with --run-key FILE if you have its key"
            ) from None
        except OSError as error:
            raise SettingsError(
                f"the invitation {path} cannot be read: {error.strerror}; repair the access to it"
            ) from None
    if found:
        found.check_time(time.time())
    return found


class Ports:
    """The ports of `--listen HOST:PORT`: PORT is for gRPC, and PORT+1 is for libp2p.

    Port 0 stands for the two ports of the last start if they are free, and for any two free ports otherwise.
    """

    def __init__(self, settings: PeerSettings) -> None:
        self._file = settings.state_dir / PORTS_FILE
        self._host = settings.listen_host
        self._fixed = settings.listen_port != 0
        fixed = {"grpc": settings.listen_port, "libp2p": settings.libp2p_port}
        ports = fixed if self._fixed else remembered_ports(settings.state_dir)
        self.grpc, self.libp2p = ports.get("grpc", 0), ports.get("libp2p", 0)

    def check(self) -> None:
        """Raise SettingsError if a port that the user named is in use. Call this before anything is started."""
        if self._fixed:
            check_free(self._host, self.grpc, self.libp2p)

    async def try_both(self, port: int, start: Callable[[int], Coroutine[Any, Any, T]]) -> T:
        """Start on `port`. If `port` is remembered and now in use, start on any free port instead."""
        try:
            return await start(port)
        except (SettingsError, DirectoryError):
            if self._fixed or port == 0:
                raise
            return await start(0)

    def remember(self, *, grpc: int, libp2p: int) -> None:
        try:
            write_atomically(self._file, json.dumps({"grpc": grpc, "libp2p": libp2p}).encode())
        except OSError as error:
            log.warning("the ports could not be saved for the next start: %s", error)


def remembered_ports(state_dir: Path) -> dict[str, int]:
    """Return the ports `grpc` and `libp2p` of the peer that runs or last ran in this folder, or {} if unknown."""
    try:
        ports = json.loads((state_dir / PORTS_FILE).read_text())
        return {name: int(ports[name]) for name in ("grpc", "libp2p")}
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def check_free(host: str, *ports: int) -> None:
    """Raise SettingsError if a port is in use, or if the host is not an address of this machine."""
    try:
        for port in ports:
            probe_port(host, port)
    except DirectoryError as error:
        raise SettingsError(str(error)) from None
