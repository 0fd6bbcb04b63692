"""Builds the report of a demo from the events that its peers logged, and from the mean of their models."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from noloco_p2p.demo.processes import DemoPeer
from noloco_p2p.spec import TrainerSpec
from noloco_p2p.telemetry.console import aligned, counted, loss, mib, named
from noloco_p2p.telemetry.events import read_events

FAILURES = ("failed_unreachable", "failed_slow", "failed_corrupt", "failed_abandoned")


def evaluate_and_export(spec: TrainerSpec, folders: Sequence[Sequence[Path]], export_dir: Path) -> dict[str, float]:
    """Merge the newest checkpoints of the peers, evaluate the merged model, and export it.

    `folders` has one list of run folders for each stage. Call it in a process that has imported torch.
    """
    from noloco_p2p.trainer.export import export_model
    from noloco_p2p.trainer.model import build_tokenizer
    from noloco_p2p.trainer.swarm_evaluation import evaluate_swarm

    evaluation = evaluate_swarm(spec, folders)
    export_model(evaluation.model, build_tokenizer(spec.data), export_dir)
    return {"merged_loss": evaluation.merged_loss, "spread": evaluation.spread}


def result_of(peer: DemoPeer) -> dict[str, Any]:
    events = [event for path in peer.folder.glob("runs/*/events.jsonl") for event in read_events(path)]
    losses = [event["validation_loss"] for event in events if event["event"] == "evaluated"]
    reports = [event for event in events if event["event"] in ("report", "finished", "stopped")]
    last = reports[-1] if reports else {}
    started = [event["peer_id"] for event in events if event["event"] == "started"]
    return {
        "peer_id": started[0] if started else "",
        "stage": peer.stage,
        "failed": sum(last.get(key, 0) for key in FAILURES),
        "loss_start": losses[0] if losses else None,
        "loss_end": losses[-1] if losses else None,
        **{key: last.get(key, 0) for key in ("step", "swaps", "bytes_sent", "bytes_received")},
        "exit_code": peer.exit_code,
        "kills": peer.kills,
    }


def report_lines(report: dict[str, Any]) -> list[str]:
    """Return the lines of the report."""
    peers = report["peers"]
    mean = counted(report["merged_peers"], "peer") + ("" if peers[0]["stage"] is None else ", stage by stage")
    return [
        *aligned(_report_rows(peers)),
        "",
        f"merged model (mean of {mean}): validation loss {loss(report['merged_loss'])}",
        f"spread of the weights: {100 * report['spread']:.2f} % of their norm",
        f"exported for transformers: {report['export_dir']}",
        f"wall time: {report['wall_s']:.0f} s",
        *_kill_lines(peers),
    ]


def _report_rows(peers: Sequence[Mapping[str, Any]]) -> list[tuple[str, ...]]:
    stage = () if peers[0]["stage"] is None else ("stage",)
    rows: list[tuple[str, ...]] = [
        ("peer", *stage, "id", "steps", "swaps", "failed", "validation loss", "sent", "received")
    ]
    for index, peer in enumerate(peers):
        change = f"{loss(peer['loss_start'])} -> {loss(peer['loss_end'])}"
        row = (
            named(peer["peer_id"]) if peer["peer_id"] else "-",
            *(str(peer[key]) for key in ("step", "swaps", "failed")),
            "-" if peer["stage"] else change,
            mib(peer["bytes_sent"]),
            mib(peer["bytes_received"]),
        )
        rows.append((f"peer {index}", *(str(peer[key]) for key in stage), *row))
    return rows


def _kill_lines(peers: list[dict[str, Any]]) -> list[str]:
    killed = [f"peer {index}: {peer['kills']}" for index, peer in enumerate(peers) if peer["kills"]]
    total = sum(peer["kills"] for peer in peers)
    return [f"killed and restarted: {total} times ({', '.join(killed)})"] if killed else []


def failure_lines(peers: Sequence[DemoPeer]) -> list[str]:
    """List the peers that failed, and how they ended. The list is empty if all succeeded."""
    return [
        f"peer {peer.index} {peer.ending}; its log {peer.log} ends with: {peer.last_line()}"
        for peer in peers
        if peer.exit_code
    ]
