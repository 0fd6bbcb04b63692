"""Implements the command `noloco status`."""

from __future__ import annotations

from collections import Counter
from typing import Any

import typer

from noloco_p2p.cli.options import Json, print_json, takes_settings
from noloco_p2p.settings import PeerSettings
from noloco_p2p.telemetry.console import count, counted, duration, loss, mib, named, numbered_stages, percent
from noloco_p2p.telemetry.metrics import FAILED
from noloco_p2p.telemetry.progress import line as progress_line


@takes_settings("state_dir")
def status(settings: PeerSettings, as_json: Json = False) -> None:
    """Show what the peer on this machine is doing. The exit code is 1 if none is running."""
    from noloco_p2p.control import FolderLock, ask

    folder = settings.state_dir
    reply = ask(folder, "status")
    if reply is None:
        is_starting = FolderLock(folder).is_held()
        if as_json:
            print_json({"state": "starting" if is_starting else "not running"})
        else:
            print(f"a peer is starting in {folder}" if is_starting else f"no peer is running in {folder}")
        raise typer.Exit(0 if is_starting else 1)
    if as_json:
        print_json(reply)
        return
    for line in bootstrap_lines(reply) if reply["state"] == "bootstrap" else lines(reply):
        print(line)


def lines(reply: dict[str, Any]) -> list[str]:
    """Return the lines that show the status of a training peer."""
    others = counted(reply["live_peers"], "other live peer")
    if reply["live_peers_is_estimate"]:
        others = f"about {others}"
    return [
        f"peer      {reply['peer_id']} (process {reply['pid']}, noloco_p2p {reply['software']})",
        *([f"name      {reply['name']}"] if reply["name"] else []),
        f"run       {reply['run']}, {100 * reply['progress']:.1f} % of the schedule",
        f"state     {reply['state']} for {duration(reply['state_since_s'])}, "
        f"running for {duration(reply['running_since_s'])}",
        *([f"why       {reply['paused_because']}"] if reply["paused_because"] else []),
        *stage_lines(reply),
        *([f"now       {progress_line(reply['doing'])}"] if reply["doing"] else []),
        f"swarm     {others}; this peer announces {reply['address']}",
        f"reach     {reply['reach']['state']}: {reply['reach']['sentence']}",
        *([f"          neighbours: {ways(reply['neighbours'])}"] if reply["neighbours"] else []),
        f"swaps     {swaps_line(reply)}",
        *([f"          {mixing_line(reply)}"] if reply["apart"] is not None else []),
        f"training  loss {loss(reply['loss'])}, validation {loss(reply['validation_loss'])}, "
        f"{count(reply['tokens_per_s'])} tokens/s",
        f"given     {contribution(reply)}",
        f"traffic   {mib(reply['bytes_sent'])} out, {mib(reply['bytes_received'])} in",
        f"fault     {reply['last_fault'] or 'none'}",
        *settings_lines(reply["settings"]),
        f"ticket    {reply['ticket']}",
    ]


def ways(neighbours: dict[str, str]) -> str:
    """Format the number of neighbours by kind of connection, such as `3 direct, 1 punched`."""
    return ", ".join(f"{number} {way}" for way, number in Counter(neighbours.values()).most_common())


def contribution(reply: dict[str, Any]) -> str:
    """Format the contribution: `2 h 5 min of training, 3.41M tokens, 41 swaps`. Some trainers do not count tokens."""
    tokens = "" if reply["tokens"] is None else f"{count(reply['tokens'])} tokens, "
    hidden = " (time and tokens are hidden from other peers)" if reply["settings"]["hide_contribution"]["value"] else ""
    return f"{duration(reply['trained_s'])} of training, {tokens}{counted(reply['swaps'], 'swap')}{hidden}"


def stage_lines(reply: dict[str, Any]) -> list[str]:
    """Return the lines that show the status of a stage, or no lines for a peer that holds the whole model."""
    if reply["stage"] is None:
        return []
    of_all = f" of {reply['stages']}" if reply["stages"] else ""
    shown = [
        f"stage     {reply['stage']}{of_all}{' (head)' if reply['stage'] == 0 else ''}, can compute "
        f"{count(reply['capacity'])} tokens/s; microbatches: {reply['microbatches']} done, "
        f"{reply['late_microbatches']} of them late, {reply['lost_microbatches']} lost, {reply['queue']} held now"
    ]
    if reply["waits_for_stages"]:
        shown.append(f"          waiting for {numbered_stages(reply['waits_for_stages'])}, which no peer holds")
    return shown


def swaps_line(reply: dict[str, Any]) -> str:
    """Format the swaps: `1234 (12.0/min, 83 % of the link), last with ..7f3a1c; failed: 3 slow`."""
    partner = f", last with {named(reply['last_partner'])}" if reply["last_partner"] else ""
    failed = ", ".join(f"{reply[name]} {name.removeprefix('failed_')}" for name in FAILED if reply[name])
    return (
        f"{reply['swaps']} ({reply['swaps_per_min']:.1f}/min, {percent(reply['link_use'])} of the link){partner}"
        f"{f'; failed: {failed}' if failed else ''}"
    )


def mixing_line(reply: dict[str, Any]) -> str:
    """Format what the swaps do: `weights 0.31 % apart, half-differences 2.1 steps old; training waited for 12 s`."""
    return (
        f"weights {percent(reply['apart'])} apart, half-differences {reply['age_steps']:.1f} steps old; "
        f"training waited for {duration(reply['blocked_s'])}"
    )


def settings_lines(settings: dict[str, dict[str, Any]]) -> list[str]:
    """List the settings that differ from the defaults, and their sources. `--json` lists all settings."""
    made = {name: setting for name, setting in sorted(settings.items()) if setting["origin"] != "default"}
    width = max(map(len, made), default=0)
    lines = [f"{name.ljust(width)}  {_shown(row['value'])}  ({row['origin']})" for name, row in made.items()]
    lines.append(f"{len(settings) - len(made)} settings have their default values (shown by --json)")
    return [f"{'settings' if index == 0 else '':8}  {line}" for index, line in enumerate(lines)]


def _shown(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return ",".join(map(str, value)) or "none"
    if isinstance(value, dict):
        return ",".join(f"{name}={bound}" for name, bound in value.items()) or "none"
    return "none" if value in (None, "") else str(value)


def bootstrap_lines(reply: dict[str, Any]) -> list[str]:
    return [
        f"peer       {reply['peer_id']} (process {reply['pid']})",
        f"bootstrap  connected to {reply['neighbours']} DHT nodes",
        *(f"address    {address}" for address in reply["addresses"]),
    ]
