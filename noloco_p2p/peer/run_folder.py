"""Keep the data of a run on this machine between starts: its folder, the spec, and the invitation to a private run."""

from __future__ import annotations

import logging
import os
import time
from pathlib import Path

from noloco_p2p.atomic_file import write_atomically
from noloco_p2p.errors import CheckpointError, SettingsError, SpecError
from noloco_p2p.identity import Identity
from noloco_p2p.invitation import Invitation, invite
from noloco_p2p.settings import PeerSettings
from noloco_p2p.spec import Spec
from noloco_p2p.ticket import Ticket

log = logging.getLogger(__name__)

SPEC_FILE = "spec.json"
INVITATION_FILE = "invitation"  # a secret
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
        found = _kept_invitation(target, settings.state_dir)
    if found:
        found.check_time(time.time())
    return found


def _kept_invitation(spec: Spec, state_dir: Path) -> Invitation:
    try:
        return Invitation.decode((folder_of(state_dir, spec.run_id) / INVITATION_FILE).read_bytes())
    except OSError:
        raise SettingsError(
            f"the run {spec.name} is private: join with a ticket, or with --run-key FILE if you have its key"
        ) from None
