"""Implements the command `noloco evaluate`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from noloco_p2p.cli.options import Json, print_json, takes_settings
from noloco_p2p.settings import PeerSettings


@takes_settings("data", "models", "device")
def evaluate(
    checkpoints: Annotated[
        list[Path],
        typer.Argument(
            metavar="CHECKPOINT...",
            help="Checkpoints or run folders. If there are several, their mean is also evaluated.",
        ),
    ],
    settings: PeerSettings,
    as_json: Json = False,
) -> None:
    """Measure the perplexity of each peer's weights and of the merged model on the held-out sequences of the run."""
    from noloco_p2p.peer.run_folder import check_checkpoint_folder

    for folder in checkpoints:
        check_checkpoint_folder(folder)
    from noloco_p2p.telemetry.progress import Progress
    from noloco_p2p.trainer.evaluate import perplexity
    from noloco_p2p.trainer.loop import choose_device
    from noloco_p2p.trainer.swarm_evaluation import evaluate_each

    evaluation = evaluate_each(
        checkpoints,
        device=choose_device(settings.device),
        bindings=settings.data,
        models=settings.models,
        progress=None if as_json else Progress(print),
    )
    if as_json:
        print_json(
            {
                "run": evaluation.spec.name,
                "num_sequences": evaluation.num_sequences,
                "peers": [
                    {"checkpoint": str(folder), "validation_loss": loss, "perplexity": perplexity(loss)}
                    for folder, loss in evaluation.losses.items()
                ],
                "merged": {"validation_loss": evaluation.merged_loss, "perplexity": perplexity(evaluation.merged_loss)},
                "spread": evaluation.spread,
            }
        )
        return
    rows = [(str(folder), loss) for folder, loss in evaluation.losses.items()]
    if len(rows) > 1:
        rows.append((f"mean of {len(rows)} checkpoints", evaluation.merged_loss))
    for name, loss in rows:
        print(f"{name}: validation loss {loss:.4f}, perplexity {perplexity(loss):.4g}")
    if len(evaluation.losses) > 1:
        print(f"spread of the weights: {100 * evaluation.spread:.2g} % of their norm")
    print(f"measured on {evaluation.num_sequences} held-out sequences of run {evaluation.spec.name}")
