"""Implements the commands for the peer on this machine: `status`, `leave`, `pause`, `resume`, `ban` and `id`."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import psutil
import typer

from noloco_p2p.bans import BanList
from noloco_p2p.cli.options import Json, parse_duration, print_json, takes_settings
from noloco_p2p.control import ask, is_held
from noloco_p2p.peer_name import find, named
from noloco_p2p.settings import PeerSettings
from noloco_p2p.telemetry.console import (
    ALONE,
    count,
    counted,
    duration,
    given,
    loss,
    mib,
    numbered_stages,
    percent,
    validation,
)
from noloco_p2p.telemetry.metrics import FAILED
from noloco_p2p.telemetry.progress import line as progress_line

Timeout = Annotated[float, typer.Option("--timeout", help="Seconds to wait for the peer to pause or resume.")]
POLL_S = 0.1
EXIT_S = 5.0  # for a process that has left; in another container, its id may be that of any process here


@takes_settings("state_dir")
def status(settings: PeerSettings, as_json: Json = False) -> None:
    """Show what the peer on this machine is doing. The exit code is 1 if none is running."""
    reply = ask(settings.state_dir, "status")
    if as_json:
        state = "starting" if is_held(settings.state_dir) else "not running"
        print_json({"state": state} if reply is None else reply)
    elif reply is not None:
        print("\n".join(bootstrap_lines(reply) if reply["state"] == "bootstrap" else status_lines(reply)))
    else:
        _say_absent(settings.state_dir)
    if reply is None:
        raise typer.Exit(0 if is_held(settings.state_dir) else 1)


def _say_absent(folder: Path) -> None:
    """Say why no peer answers."""
    print(
        f"the peer in {folder} is still starting and cannot answer yet; try again, or stop it with Ctrl-C"
        if is_held(folder)
        else f"no peer is running in {folder}; --state-dir names another folder"
    )


def bootstrap_lines(reply: dict[str, Any]) -> list[str]:
    return [
        f"peer       {reply['peer_id']} (process {reply['pid']})",
        f"bootstrap  connected to {reply['neighbours']} DHT nodes",
        *(f"address    {address}" for address in reply["addresses"]),
    ]


def status_lines(reply: dict[str, Any]) -> list[str]:
    """Return the lines that show the status of a training peer."""
    is_alone = reply["state"] == "training" and not reply["live_peers"]
    others = ALONE if is_alone else counted(reply["live_peers"], "other live peer")
    if reply["live_peers_is_estimate"]:
        others = f"about {others}"
    ways = Counter(reply["neighbours"].values()).most_common()
    last = reply["last_partner"]
    partner = f", last with {named(last, reply['peers'].get(last, ''))}" if last else ""
    failed = ", ".join(f"{reply[name]} {name.removeprefix('failed_')}" for name in FAILED if reply[name])
    is_hidden = reply["settings"]["hide_contribution"]["value"]
    lines = {
        "peer": f"{reply['peer_id']} (process {reply['pid']}, noloco_p2p {reply['software']})",
        "name": reply["name"],
        "run": f"{reply['run']}, {100 * reply['progress']:.1f} % of the schedule",
        "state": f"{reply['state']} for {duration(reply['state_since_s'])}, "
        f"running for {duration(reply['running_since_s'])}",
        "why": reply["paused_because"],
        "stage": _stage(reply),
        "now": progress_line(reply["doing"]) if reply["doing"] else "",
        "swarm": f"{others}; this peer "
        + (
            f"announces {reply['address']}" if reply["is_announced"] else "cannot announce itself, see the line `fault`"
        ),
        "reach": f"{reply['reach']['state']}: {reply['reach']['sentence']}"
        + (f"\nneighbours: {', '.join(f'{number} {way}' for way, number in ways)}" if ways else ""),
        "swaps": f"{reply['swaps']} ({reply['swaps_per_min']:.1f}/min, {percent(reply['link_use'])} of the link"
        + (f", {reply['swap_s']:.2g} s each)" if reply["swap_s"] else ")")
        + partner
        + (f"; failed: {failed}" if failed else "")
        + ("" if is_alone else _mixing(reply)),
        "training": f"loss {loss(reply['loss'])}, validation {validation(reply)}, "
        f"{count(reply['tokens_per_s'])} tokens/s",
        "given": given(reply) + (" (time and tokens are hidden from other peers)" if is_hidden else ""),
        "traffic": f"{mib(reply['bytes_sent'])} out, {mib(reply['bytes_received'])} in",
        "fault": reply["last_fault"] or "none",
        "settings": "\n".join(_settings(reply["settings"])),
        "ticket": "printed by `noloco ticket`",
    }
    return [
        f"{'' if number else head:8}  {text}"
        for head, texts in lines.items()
        if texts
        for number, text in enumerate(texts.split("\n"))
    ]


def _stage(reply: dict[str, Any]) -> str:
    if reply["stage"] is None:
        return ""
    of_all = f" of {reply['stages']}" if reply["stages"] else ""
    text = (
        f"{reply['stage']}{of_all}{' (head)' if reply['stage'] == 0 else ''}, can compute "
        f"{count(reply['capacity'])} tokens/s; microbatches: {reply['microbatches']} done, "
        f"{reply['late_microbatches']} of them late, {reply['lost_microbatches']} lost, {reply['queue']} held now"
    )
    if reply["waits_for_stages"]:
        text += f"\nwaiting for {numbered_stages(reply['waits_for_stages'])}, which no peer holds"
    return text


def _mixing(reply: dict[str, Any]) -> str:
    """Return a line about what the swaps do, once a swap has measured it."""
    if reply["apart"] is None:
        return ""
    return (
        f"\nweights {percent(reply['apart'])} apart, half-differences {reply['age_steps']:.1f} steps old; "
        f"training waited for {duration(reply['blocked_s'])}"
    )


def _settings(settings: dict[str, dict[str, Any]]) -> list[str]:
    """List the settings that differ from the defaults, and their sources. `--json` lists all settings."""
    made = {name: setting for name, setting in sorted(settings.items()) if setting["origin"] != "default"}
    width = max(map(len, made), default=0)
    lines = [f"{name.ljust(width)}  {_shown(row['value'])}  ({row['origin']})" for name, row in made.items()]
    return [*lines, f"{len(settings) - len(made)} settings have their default values (shown by --json)"]


def _shown(value: Any) -> str:
    if isinstance(value, dict):
        value = [f"{name}={bound}" for name, bound in value.items()]
    if isinstance(value, (list, tuple)):
        value = ",".join(map(str, value))
    return "none" if value in (None, "") else str(value)


@takes_settings("state_dir")
def leave(
    settings: PeerSettings,
    timeout_s: float = typer.Option(120.0, "--timeout", help="Seconds to wait for the peer to exit."),
) -> None:
    """Ask the peer on this machine to leave, and wait until it has exited. The exit code is 1 if none is running."""
    folder, until_s = settings.state_dir, time.monotonic() + timeout_s
    reply = ask(folder, "leave")
    if reply is None:
        _say_absent(folder)
        raise typer.Exit(1)
    while is_held(folder):
        if time.monotonic() > until_s:
            print(f"the peer (process {reply['pid']}) was asked to leave but did not exit within {timeout_s:.0f} s")
            raise typer.Exit(1)
        time.sleep(POLL_S)
    until_s = time.monotonic() + EXIT_S
    while _is_running(reply["pid"]) and time.monotonic() < until_s:
        time.sleep(POLL_S)
    thanks = f". Thank you for {given(reply)}" if "swaps" in reply else ""
    print(f"the peer has left; run the command that started it to resume from its last checkpoint{thanks}")


def _is_running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


@takes_settings("state_dir")
def pause(settings: PeerSettings, timeout_s: Timeout = 120.0) -> None:
    """Pause the peer on this machine after its current inner step. It keeps its state in memory."""
    reply = _ask_trainer(settings.state_dir, "pause")
    if reply["refusal"]:
        print(f"the peer (process {reply['pid']}) cannot be paused: {reply['refusal']}")
        raise typer.Exit(1)
    if reply["was_asked"] and reply["state"] == "paused":
        print("the peer is already paused; run `noloco resume` to resume it")
        return
    if reply["is_script"]:
        print(
            "waiting until the script calls `peer.wait_while_paused()`, which it does if its loop checks "
            "`peer.pause_requested`",
            flush=True,
        )
    _wait_for("paused", settings.state_dir, timeout_s=timeout_s)
    print("the peer is paused: it will neither train nor swap until you run `noloco resume`")


@takes_settings("state_dir")
def resume(settings: PeerSettings, timeout_s: Timeout = 120.0) -> None:
    """Resume a paused peer. If the swarm is far ahead, the peer catches up first."""
    reply = _ask_trainer(settings.state_dir, "resume")
    if reply["stays_because"]:
        print(f"the peer remains paused: {reply['stays_because']}. To train now, restart it with --when always")
        return
    if not reply["was_asked"]:
        print(f"the peer is not paused: it is {reply['state']}")
        return
    _wait_for("training", settings.state_dir, timeout_s=timeout_s)
    print("the peer is training again")


def _ask_trainer(folder: Path, verb: str) -> dict[str, Any]:
    """Send a command to the peer, and return the answer. Exit with code 1 if there is no peer that trains."""
    reply = ask(folder, verb)
    if reply is None:
        _say_absent(folder)
        raise typer.Exit(1)
    if "error" in reply:  # a bootstrap node
        print(f"the process in {folder} is not a training peer, so it cannot be {verb}d")
        raise typer.Exit(1)
    return reply


def _wait_for(state: str, folder: Path, *, timeout_s: float) -> None:
    until_s = time.monotonic() + timeout_s
    while True:
        reply = ask(folder, "status")
        if reply is None:
            print("the peer has left")
            raise typer.Exit(1)
        if reply["state"] == state:
            return
        if time.monotonic() > until_s:
            print(f"the peer (process {reply['pid']}) is still in the state {reply['state']} after {timeout_s:.0f} s")
            raise typer.Exit(1)
        time.sleep(POLL_S)


@takes_settings("state_dir")
def ban(
    peer: str | None = typer.Argument(
        None,
        help="The peer to ban, as the log and the monitor show it: its id, the end of its id, or its name. "
        "Without it, all bans are listed.",
    ),
    reason: str = typer.Option(
        "manual ban by this peer's owner", help="The reason, as shown to the peer and in the log."
    ),
    for_: str = typer.Option("7d", "--for", help="How long the ban lasts, for example 30min, 12h or 7d."),
    lift: bool = typer.Option(False, "--lift", help="Lift the ban on this peer."),
    *,
    settings: PeerSettings,
    as_json: Json = False,
) -> None:
    """Ban a peer, or list the banned peers. A ban is local, and a running peer enforces it immediately."""
    bans = BanList(settings.state_dir / "bans.json")
    peers = _names(settings.state_dir, bans) if peer else {}
    peer_id = find(peer, peers) if peer else None
    if peer_id and lift:
        print(f"{peer_id} is no longer banned" if bans.lift(peer_id) else f"{peer_id} is not on the ban list")
    elif peer_id:
        bans.ban(peer_id, reason, for_s=parse_duration(for_, flag="--for"), name=peers.get(peer_id, ""))
        print(_banned(peer_id, bans))
    elif as_json:
        print_json({peer: asdict(ban) for peer, ban in bans.all().items()})
    else:
        for banned in bans.all():
            print(_banned(banned, bans))
        if not bans.all():
            print("no peer is banned")


def _banned(peer_id: str, bans: BanList) -> str:
    return f"{peer_id} {bans.all()[peer_id].name}".rstrip() + f" is {bans.why(peer_id)}"


def _names(folder: Path, bans: BanList) -> dict[str, str]:
    """Return the names of the peers that are banned or that a running peer knows, by id."""
    live = (ask(folder, "status") or {}).get("peers", {})
    return live | {peer: ban.name or live.get(peer, "") for peer, ban in bans.all().items()}


@takes_settings("state_dir")
def identity(settings: PeerSettings, as_json: Json = False) -> None:
    """Show the identity of this peer, or create one."""
    from noloco_p2p.identity import Identity

    path = settings.state_dir / "identity.key"
    peer_id = Identity.load_or_create(path).peer_id
    if as_json:
        print_json({"peer_id": peer_id, "key_file": str(path)})
        return
    print(peer_id)
    print(
        f"The key file is {path}. Back it up and keep it secret: it is the identity of this peer. "
        "Never use it on two machines at the same time."
    )
