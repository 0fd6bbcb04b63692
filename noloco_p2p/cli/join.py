"""Implements the command `noloco join`."""

from __future__ import annotations

import gc
import logging
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING

import typer

from noloco_p2p.cli import entry
from noloco_p2p.cli import gpus as gpus_of_peer
from noloco_p2p.cli.options import takes_settings
from noloco_p2p.control import hold
from noloco_p2p.errors import Left, RankError, printable
from noloco_p2p.settings import PeerSettings
from noloco_p2p.telemetry.console import given, outlive_output
from noloco_p2p.ticket import Ticket

if TYPE_CHECKING:
    from types import FrameType

    from noloco_p2p.cli.gpus import OwnRank
    from noloco_p2p.peer.peer import Peer
    from noloco_p2p.spec import TrainerSpec

log = logging.getLogger(__name__)

STDOUT = 1
ASKED = b"leaving after this inner step (press Ctrl-C again to exit immediately, without a checkpoint)\n"


@takes_settings()
def join(
    settings: PeerSettings,
    run: str = typer.Argument(
        ...,
        metavar="SPEC.toml|TICKET",
        help="A run spec to start a run, or a ticket (or @FILE containing one) to join an existing run.",
    ),
    ticket_file: Path | None = typer.Option(
        None, help="Write this peer's ticket to FILE, for use with `noloco join @FILE`.", show_default=False
    ),
) -> None:
    """Start or join a run, and train. Ctrl-C leaves cleanly, and the same command resumes later."""
    own = gpus_of_peer.own_rank()
    if own and own.rank:
        return _follow(own, settings)
    target = entry.opened(run)
    _check(target, settings)
    entry.check_writable(ticket_file, flag="--ticket-file")
    if settings.gpus > 1 and own is None:
        raise typer.Exit(gpus_of_peer.launch(sys.argv[1:], settings.gpus))
    interrupts: list[int] = []

    def interrupt(signum: int, frame: FrameType | None) -> None:
        """End the program at once: before training, there is nothing to save."""
        interrupts.append(signum)
        raise KeyboardInterrupt

    outlive_output()
    entry.on_leaving(interrupt)
    with hold(settings.state_dir) as lock:  # so that `noloco status` and `noloco leave` find a peer that is starting
        _say("starting (loading torch and hivemind takes a few seconds)")
        try:
            _train(target, settings, ticket_file, own, lock, interrupts)
        except Left:
            _say("left before training began; run the same command to resume the download")
        except Exception:
            if interrupts:  # libraries that are being imported turn a KeyboardInterrupt into other errors
                raise KeyboardInterrupt from None
            raise


def _train(
    target: TrainerSpec | Ticket,
    settings: PeerSettings,
    ticket_file: Path | None,
    own: OwnRank | None,
    lock: IO[bytes],
    interrupts: list[int],
) -> None:
    """Train until the run is done or the peer is asked to leave. Raises Left if the peer is asked to leave before
    training begins.

    `lock` is closed just before `Peer.join` locks the same folder. `interrupts` are the signals that
    have arrived before training.
    """
    from noloco_p2p.devices import describe
    from noloco_p2p.peer.peer import Peer
    from noloco_p2p.spec import TrainerSpec
    from noloco_p2p.swarm.addresses import only_public
    from noloco_p2p.swarm.relay import MAX_CALLS
    from noloco_p2p.telemetry.progress import Progress
    from noloco_p2p.trainer.compute import choose_device
    from noloco_p2p.trainer.loop import Trainer
    from noloco_p2p.trainer.ranks import Ranks, told
    from noloco_p2p.trainer.stage_trainer import StageTrainer

    here = choose_device(settings.device, own.gpu if own else None)
    if isinstance(target, Ticket):
        _say(f"looking for live peers of run {target.run_name}")
    lock.close()
    with (
        told(),
        Ranks(own.rank, own.num_ranks, here) if own else nullcontext() as ranks,
        Peer.join(target, settings, progress=Progress(_tell)) as peer,
    ):
        spec = TrainerSpec.of(peer.spec)
        settings.check_names(spec)
        _say(f"peer {peer.peer_id} of run {spec.name} ({spec.digest()[:16]}), announcing {peer.address}")
        _say(f"training on {describe(here)} ({here})")
        if peer.metrics_address:
            _say(f"metrics at http://{peer.metrics_address}/metrics")
        for warning in [*spec.warnings(), *_warnings(settings)]:
            log.warning(warning)
        trainer = StageTrainer(peer, say=_tell) if spec.pipeline.stages > 1 else Trainer(peer, say=_tell, ranks=ranks)
        step = trainer.inner_step
        for warning in [*step.compute.warnings(here, spec), *step.warnings(spec.data.sequence_length)]:
            log.warning(warning)
        needs = trainer.needs()
        for line in needs.lines(for_others=not isinstance(target, Ticket)):
            _say(line)
        for warning in needs.warnings(settings):
            log.warning(warning)
        peer.wait_for_router()
        if isinstance(target, Ticket):
            _say("others join with the ticket that `noloco ticket` prints")
        else:
            _say(f"others join with:\nnoloco join {peer.ticket}")
            if not only_public(Ticket.decode(peer.ticket).addresses):
                _say("(it has only private addresses; for peers on other networks, restart with --announce HOST)")
        if not settings.max_upload:
            _say(
                f"if others can reach this peer, it also relays up to {MAX_CALLS} calls between other peers at once; "
                "any --max-upload stops that"
            )
        entry.write(ticket_file, peer.ticket, flag="--ticket-file", is_secret=bool(spec.run_key))
        _leave_on_signals(peer)
        if interrupts:  # a `__del__` has swallowed it, which happens while libraries are imported
            raise KeyboardInterrupt
        gc.collect()
        gc.freeze()  # a full collection takes 100 ms, mostly for objects of libraries, and blocks both threads
        checkpoint = trainer.train()
        while isinstance(trainer, StageTrainer) and trainer.switches_to is not None:
            trainer = StageTrainer(peer, say=_tell, stage=trainer.switches_to)
            checkpoint = trainer.train()
        if ranks:
            ranks.stop()
        if trainer.finished and not peer.leave_requested.is_set():
            peer.announce("done")
            _say("the run is done; this peer will serve its state to newcomers until Ctrl-C or `noloco leave`")
            trainer.serve()
        if peer.fault:
            raise peer.fault
        _say(f"leaving; thank you for {given(peer.metrics.as_dict())}")
    if checkpoint and settings.push_to_hub:
        from noloco_p2p.trainer.export import push

        _say(f"pushing {checkpoint} to the hub")
        _say(f"pushed to {push(checkpoint, settings.push_to_hub)}")
    if checkpoint is None:
        _say("left without a final checkpoint because of the error above")
        raise typer.Exit(1)
    _say("left; run the same command to resume")


def _follow(own: OwnRank, settings: PeerSettings) -> None:
    """Run a rank other than 0. Only rank 0 handles signals, and the other ranks end when it ends."""
    entry.on_leaving(signal.SIG_IGN)
    from noloco_p2p.trainer.compute import choose_device
    from noloco_p2p.trainer.ranks import Ranks, told
    from noloco_p2p.trainer.sharded import follow

    try:
        with told(), Ranks(own.rank, own.num_ranks, choose_device(settings.device, own.gpu)) as ranks:
            follow(ranks, settings)
    except RankError as error:
        log.info("rank %d: %s", own.rank, error)
        raise typer.Exit(gpus_of_peer.FAILED) from None


def _check(target: TrainerSpec | Ticket, settings: PeerSettings) -> None:
    """Check the settings and ports before the slow imports."""
    from noloco_p2p.peer.run_folder import Ports

    hold(settings.state_dir).close()
    Ports(settings).check()
    check_access(target, settings)
    if settings.push_to_hub:
        from noloco_p2p.trainer.export import claim_repo

        claim_repo(settings.push_to_hub)


def check_access(target: TrainerSpec | Ticket, settings: PeerSettings) -> None:
    """Raise SettingsError, TicketError or DataError if this machine lacks an invitation, or the data of a spec."""
    from noloco_p2p.peer.run_folder import find_invitation

    find_invitation(target, settings)
    if isinstance(target, Ticket):
        return
    from noloco_p2p.data.sources import check_bindings
    from noloco_p2p.trainer.cut import check_stages

    settings.check_names(target)
    check_stages(target, settings)
    if target.pipeline.stages == 1 or settings.stage == 0:
        check_bindings(target.data, settings.data)


def _warnings(settings: PeerSettings) -> Iterator[str]:
    """Warn about settings of this machine that have no effect, and about a host that nobody may be able to resolve."""
    from noloco_p2p.swarm.addresses import resolves

    host = settings.announced[0]
    if host and not resolves(host):
        yield f"--announce {host}: this machine cannot resolve this name, but other peers must resolve it to connect"


def _leave_on_signals(peer: Peer) -> None:
    """Leave cleanly at the first SIGINT, SIGTERM or SIGHUP, and exit at once at the second.

    An earlier `noloco leave` does not count as the first signal.
    """
    is_signalled = False

    def leave(signum: int, frame: FrameType | None) -> None:
        nonlocal is_signalled
        if is_signalled and signum == signal.SIGHUP:  # a shell and the system can both send it when a terminal closes
            return
        if is_signalled:
            os._exit(128 + signum)
        is_signalled = True
        with suppress(OSError):
            after_echo = b"\n" if signum == signal.SIGINT and os.isatty(STDOUT) else b""  # the terminal shows ^C
            os.write(STDOUT, after_echo + ASKED)  # print is not safe in a signal handler
        peer.request_leave()

    entry.on_leaving(leave)


def _tell(line: str) -> None:
    """Print a line about progress, with the time."""
    _say(f"{time.strftime('%H:%M:%S')} {line}")


def _say(line: str) -> None:
    print(printable(line), flush=True)  # rich passes escapes on while a bar is drawn
