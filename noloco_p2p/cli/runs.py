"""Implements the commands that help others to enter a run: `noloco init`, `noloco ticket` and `noloco bootstrap`."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from noloco_p2p.cli import entry
from noloco_p2p.cli.options import Changes, parse_changes, parse_duration, takes_settings
from noloco_p2p.control import answering, ask, hold
from noloco_p2p.errors import SettingsError
from noloco_p2p.settings import PeerSettings

if TYPE_CHECKING:
    from noloco_p2p.identity import Identity
    from noloco_p2p.ticket import Ticket

log = logging.getLogger(__name__)


@takes_settings("models")
def init(
    file: Path = typer.Argument(Path("run.toml"), help="Where to write the run spec."),
    preset: str = typer.Option(
        "tiny",
        help="tiny, small, medium or large (the last three are the paper's sizes), paper (the paper's exact outer "
        "step), or finetune (adapters for a chat model).",
    ),
    name: str | None = typer.Option(None, help="Name of the run.", show_default="the preset"),
    private: bool = typer.Option(
        False, "--private", help="Let only peers with an invitation join. The run key is written next to the spec."
    ),
    stages: int = typer.Option(1, min=1, help="Cut the model into this many stages, and print what each stage needs."),
    pretrained: str | None = typer.Option(
        None, metavar="NAME", help="The pretrained model and tokenizer to start from.", show_default=False
    ),
    changes: Changes = None,
    *,
    settings: PeerSettings,
    force: bool = typer.Option(False, "--force", help="Overwrite an existing file."),
) -> None:
    """Write a commented run spec, and print what it costs a peer."""
    from noloco_p2p.presets import PRESETS, describe_size, describe_tokens, render

    if preset not in PRESETS:
        raise SettingsError(f"--preset {preset}: no such preset; choose one of {', '.join(PRESETS)}")
    if file.exists() and not force:
        raise SettingsError(f"{file} already exists; choose another name, or overwrite it with --force")
    spec, how = PRESETS[preset], f"{file}"
    if name:
        spec = spec.with_changes({"name": name}, origin="--name")
    if pretrained:
        named = {"model.pretrained": pretrained, "data.tokenizer": pretrained}
        spec = spec.with_changes(named, origin="--pretrained")
    spec = spec.with_changes(parse_changes(changes), origin="--set")
    settings.check_names(spec)
    if stages > 1:
        from noloco_p2p.trainer.stage_choice import StageNeeds  # imports torch, which takes seconds

        found = StageNeeds.of(spec, stages, folders=settings.models)
        spec, needs = found.spec, found.lines()
    elif spec.model.pretrained or spec.model.lora.rank:
        from noloco_p2p.trainer.needs import Sizes

        is_here = not spec.model.pretrained or spec.model.pretrained in settings.models  # the hub may be slow
        sizes = Sizes.of(spec.model, folders=settings.models) if is_here else None
        needs = sizes.lines(spec) if sizes else []
        needs.append(f"to see what it costs a peer, run: noloco doctor {file}")  # which reads the model's config
    else:
        from noloco_p2p.trainer.needs import Counts, estimate

        has_gpu = settings.device not in ("cpu", "mps")  # perhaps; to find out, torch would have to be loaded
        found = estimate(spec, Counts.of_sizes(spec.model), settings, has_gpu=has_gpu, num_ranks=settings.gpus)
        needs = found.lines()[1:]
    key_file = file.with_suffix(".key")
    if private:
        from noloco_p2p.identity import Identity

        spec = spec.with_changes({"run_key": Identity.load_or_create(key_file).peer_id}, origin="--private")
        how += f" --run-key {key_file}"
    try:
        file.write_text(render(spec), encoding="utf-8")
    except OSError as error:
        raise SettingsError(f"{file} cannot be written: {error}") from None
    if stages > 1:
        how += " --stage 0"
    print(f"wrote {file}: {describe_size(spec)}; start the run with: noloco join {how}")
    for line in (f"tokens: {describe_tokens(spec)}", *needs):
        print(line)
    if private:
        print(f"{key_file} is the run key, which signs invitations. Back it up and keep it secret.")
        print("each ticket is an invitation; `noloco ticket --run-key FILE --expires 7d` creates one that expires")


@takes_settings("state_dir", "run_key")
def ticket(
    settings: PeerSettings,
    expires: str | None = typer.Option(
        None,
        help="For private runs: how long the invitation is valid, such as 30min, 12h or 7d.",
        show_default="7d with the run key",
    ),
) -> None:
    """Print a ticket for the run of the peer on this machine, with the addresses that are reachable now."""
    from noloco_p2p.identity import Identity
    from noloco_p2p.invitation import date
    from noloco_p2p.ticket import Ticket

    reply = ask(settings.state_dir, "status")
    if reply is None or "ticket" not in reply:
        print(f"no training peer is running in {settings.state_dir}")
        raise typer.Exit(1)
    found = Ticket.decode(reply["ticket"])
    key = Identity.load(settings.run_key) if settings.run_key else None
    is_asked = expires or settings.origins()["run_key"] == "flag"
    # The run key in the user's file may be that of another run.
    if is_asked or (key and found.invitation and key.peer_id == found.invitation.run_key):
        found = _invited(found, key, parse_duration(expires or "7d", flag="--expires"))
    print(found.encode(), flush=True)
    if found.invitation:
        print(f"the invitation is valid until {date(found.invitation.expires_at_s)}", file=sys.stderr)


def _invited(ticket: Ticket, key: Identity | None, for_s: float) -> Ticket:
    """Return the ticket with an invitation that expires after `for_s` seconds.

    Raises SettingsError if the run is open, or if `key` is missing or is the key of another run.
    """
    from noloco_p2p.invitation import invite

    if ticket.invitation is None:
        raise SettingsError(
            "--expires and --run-key work only for private runs; this run is open, and its tickets do not expire"
        )
    if key is None:
        raise SettingsError(
            "--expires requires the run key (--run-key FILE); without it, a peer can only pass on its own invitation"
        )
    if key.peer_id != ticket.invitation.run_key:
        raise SettingsError("--run-key is the key of another run")
    return replace(ticket, invitation=invite(key, expires_at_s=time.time() + for_s, seed=os.urandom(32)))


@takes_settings("listen", "announce", "state_dir", "bootstrap")
def bootstrap(
    settings: PeerSettings,
    address_file: Path | None = typer.Option(
        None, help="Write this node's address to FILE, for use with --bootstrap @FILE.", show_default=False
    ),
) -> None:
    """Run a DHT node through which peers can join a run. It has no model and no data."""
    import uvloop

    from noloco_p2p.identity import Identity
    from noloco_p2p.peer.run_folder import check_free

    entry.check_writable(address_file, flag="--address-file")
    with hold(settings.state_dir):
        if settings.libp2p_port:
            check_free(settings.listen_host, settings.libp2p_port)
        identity = Identity.load_or_create(settings.state_dir / "identity.key")
        print("starting (loading hivemind takes a few seconds)", flush=True)
        uvloop.run(_serve(settings, identity, address_file=address_file))
    print("left", flush=True)


async def _serve(settings: PeerSettings, identity: Identity, *, address_file: Path | None) -> None:
    from noloco_p2p.swarm.dialer import AddressBook
    from noloco_p2p.swarm.directory import SwarmDirectory
    from noloco_p2p.tcp import Mirror

    stop = asyncio.Event()

    def stop_or_exit(signum: int) -> None:
        """Stop the node cleanly at the first signal, and exit immediately at the second."""
        if stop.is_set():
            os._exit(128 + signum)
        stop.set()

    for signum in entry.leaving_signals():
        asyncio.get_running_loop().add_signal_handler(signum, stop_or_exit, signum)
    announce_host, announce_port = settings.announced
    directory = await SwarmDirectory(
        identity_path=settings.state_dir / "identity.key",
        identity=identity,
        listen_host=settings.listen_host,
        listen_port=settings.libp2p_port,
        announce_host=announce_host or None,
        announce_port=announce_port + 1 if announce_port else 0,
        bootstraps=settings.bootstrap,
        address_book=AddressBook(settings.state_dir / "address_book.json"),
        spec_digest=None,
    ).start()
    mirror = Mirror()
    try:
        mirror_port = await mirror.start(settings.listen_host, settings.listen_port)
        if directory.relay:
            directory.relay.mirror_port = announce_port or mirror_port
    except OSError as error:
        log.warning(
            "cannot listen on port %d, so this node cannot help peers punch holes through their routers: %s",
            settings.listen_port,
            error,
        )

    def on_leave() -> dict[str, object]:
        stop.set()
        return {"leaving": True, "pid": os.getpid()}

    def on_status() -> dict[str, object]:
        own = {"peer_id": directory.peer_id, "pid": os.getpid(), "state": "bootstrap"}
        return {**own, "addresses": directory.multiaddrs(), "neighbours": len(directory.node.neighbours())}

    try:
        async with answering(settings.state_dir, {"status": on_status, "leave": on_leave}):
            for multiaddr in directory.multiaddrs():
                print(multiaddr)
            entry.write(address_file, directory.multiaddrs()[0], flag="--address-file")
            print(f"others can join with: noloco join SPEC.toml --bootstrap {directory.multiaddrs()[0]}", flush=True)
            await stop.wait()
    finally:
        await mirror.stop()
        await directory.stop()
