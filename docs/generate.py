"""Write docs/reference.md and docker/run.toml, or with --check report whether they are up to date.

python docs/generate.py [--check]
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path

from pydantic import BaseModel
from pydantic.fields import FieldInfo

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from noloco_p2p import __all__
from noloco_p2p.presets import PRESETS, is_section, render, sections
from noloco_p2p.settings import Flag, PeerSettings
from noloco_p2p.spec import TrainerSpec
from noloco_p2p.telemetry import prometheus
from noloco_p2p.telemetry.console import duration, mib
from noloco_p2p.telemetry.metrics import METRICS
from noloco_p2p.trainer.needs import Counts, estimate


def table(rows: list[tuple[str, ...]]) -> list[str]:
    head, *body = rows
    return [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}", *(f"| {' | '.join(row)} |" for row in body), ""]


def reference_page() -> list[str]:
    return [HEAD, *spec(), *settings(), *costs(), *metrics(), *api()]


HEAD = """# Reference

`docs/generate.py` writes this page from `spec.py`, `settings.py`, `trainer/needs.py` and `telemetry/`. Change those
files, not this page.

* [The run spec](#the-run-spec): what all peers of a run share
* [The settings of one machine](#the-settings-of-one-machine)
* [What a run costs a machine](#what-a-run-costs-a-machine)
* [Metrics](#metrics)
* [The Python API](#the-python-api)
"""
SPEC_HEAD = """## The run spec

The run spec is a TOML file that all peers of a run share. `noloco init run.toml` writes a spec that contains these
explanations as comments. The spec of a run cannot be changed: if any value differs, the digest differs, and the spec
belongs to another run. `noloco fork` starts a new run, with a changed spec, from the weights of an old run.
"""
SETTINGS_HEAD = """## The settings of one machine

These settings (device, ports, limits, paths of data) are not part of the run spec. `noloco join` has a flag for each of
them. A flag takes precedence over an environment variable, which takes precedence over the file
`~/.config/noloco/settings.toml`. The variable of `--max-upload` is `NOLOCO_MAX_UPLOAD`, and its key in the file
`max_upload`; only those of `--model` and `--tracker` differ: `models` and `trackers`.
"""
COSTS_HEAD = """## What a run costs a machine

`noloco init`, `noloco doctor` and `noloco join` print these costs for a run. The table shows them for Llamas with
32,000 tokens and the default settings, without activations. A peer on a CPU needs the sum of both kinds of memory. A
peer on a GPU also keeps a copy of a checkpoint in main memory while it writes the checkpoint; if that would take more
than half of the free memory, training waits for the disk instead. The disk holds up to three checkpoints. At 100
Mbit/s, swaps send and receive up to 45 GB per hour each way, and far less if the model is small.

Weights, gradients and moments are in fp32. With `--precision bf16`, the passes use copies of 2 bytes per parameter,
which count as activations. A script whose parameters are in bf16 needs half as much memory for them, their gradients
and their moments. With `outer.alpha` above 0, there are 8 bytes more per parameter in main memory and in a checkpoint.
"""
COSTS = ("model", "optimizer", "bytes per parameter", "memory of the model", "other main memory", "checkpoint")
COSTS += ("written per day", "state of a newcomer", "a newcomer trains at 100 Mbit/s after")
SIZE_FIELDS = [f"model.{name}" for name in ("vocab_size", "hidden_size", "num_layers", "num_heads", "mlp_size")]
SIZE_FIELDS += ["model.tied_embeddings"]
SIZES = {
    "138M": (32_000, 768, 12, 12, 3072, True),  # the model of benchmarks/size.py
    "1.3B": (32_000, 2048, 24, 16, 5504, False),
    "6.7B": (32_000, 4096, 32, 32, 11_008, False),
}
AGGREGATE = re.compile(r"(?:\([^)]*\)|[^:(])*")  # what stands before the meaning of the metric itself
METRICS_HEAD = """## Metrics

A counter never decreases, not even when the peer restarts. The loss is omitted until it is known.

### One peer

`noloco join --metrics PORT` serves these metrics at `/metrics`. `noloco status --json` and the events `report`,
`finished` and `stopped` contain the same metrics, without the prefix `noloco_` and suffix `_total`. There, names end in
`_s`, `_per_s` and `_per_min` instead of `_seconds` and `_per_second`.
"""
SWARM_HEAD = """### The swarm

`noloco monitor TICKET --web` reads these metrics from the records in the directory, and serves them at `/metrics`. They
aggregate the metrics of peers with the same names and units. All are gauges.
"""
API_HEAD = """## The Python API

These names can be imported from `noloco_p2p`. The documentation site shows the docstring of each of them here, and
Python's `help(noloco_p2p.NoLoCo)` prints the same text.
"""


def spec() -> list[str]:
    lines = [SPEC_HEAD, *_fields("", TrainerSpec)]
    for name, about, section in sections():
        lines += [f"### [{name}]", "", about, "", *_fields(f"{name}.", section)]
    return lines


def _fields(prefix: str, section: type[BaseModel]) -> list[str]:
    rows = [
        (f"`{prefix}{name}`", _default(field), field.description or "")
        for name, field in section.model_fields.items()
        if not is_section(field)
    ]
    return table([("field", "default", "meaning"), *rows])


def _default(field: FieldInfo) -> str:
    return "required" if field.is_required() else f"`{field.default!r}`" if field.default is not None else "unset"


def settings() -> list[str]:
    rows = []
    for name, field in PeerSettings.model_fields.items():
        flag = Flag.of(name, field)
        rows.append((f"`{flag.name}`", flag.default or "", field.description or ""))
    return [SETTINGS_HEAD, *table([("flag", "default", "meaning"), *rows])]


def costs() -> list[str]:
    rows: list[tuple[str, ...]] = [COSTS]
    for name, sizes in SIZES.items():
        for optimizer, offloads in (("adamw", False), ("muon", False), ("adamw", True)):
            changes = dict(zip(SIZE_FIELDS, sizes, strict=True)) | {"train.inner_optimizer": optimizer}
            spec = PRESETS["tiny"].with_changes(changes)
            found = estimate(spec, Counts.of_sizes(spec.model), PeerSettings(offload_optimizer=offloads), has_gpu=True)
            amounts = (found.model_bytes, found.host_bytes, found.checkpoint_bytes)
            flag, per_parameter = " `--offload-optimizer`" * offloads, found.model_bytes / found.num_parameters
            texts = (mib(each) for each in (*amounts, found.written_bytes_per_day, found.state_bytes))
            rows.append((name, optimizer + flag, f"{per_parameter:.3g}", *texts, duration(found.begin_s)))
    return [COSTS_HEAD, *table(rows)]


def metrics() -> list[str]:
    swarm = prometheus.OF_A_SWARM
    peers = [(_named(family), family.kind, family.unit, family.meaning) for family in prometheus.OF_A_PEER]
    meanings = [AGGREGATE.match(family.meaning)[0].strip() for family in swarm]
    swarms = [
        (", ".join(_named(family) for family, its in zip(swarm, meanings, strict=True) if its == meaning), meaning)
        for meaning in dict.fromkeys(meanings)
    ]
    texts = [(f"`{name}`", about.unit, about.meaning) for name, about in METRICS.items() if about.kind == "text"]
    return [
        METRICS_HEAD,
        *table([("name", "kind", "unit", "meaning"), *peers]),
        "This field is only in the status and in events:",
        "",
        *table([("name", "unit", "meaning"), *texts]),
        SWARM_HEAD,
        *table([("names", "meaning"), *swarms]),
    ]


def _named(family: prometheus.Family) -> str:
    return f"`{family.full_name}`" + (f" {{{', '.join(family.labels)}}}" if family.labels else "")


def api() -> list[str]:
    """Return the public names, which mkdocstrings replaces by their docstrings."""
    return [API_HEAD, *(f"::: noloco_p2p.{name}\n" for name in __all__ if name != "__version__")]


def docker_spec() -> list[str]:
    """Return the spec of the swarm that docker/compose.yaml starts, as `noloco init --name swarm` writes it."""
    return render(PRESETS["tiny"].with_changes({"name": "swarm"})).splitlines()


PAGES: dict[str, Callable[[], list[str]]] = {"docs/reference.md": reference_page, "docker/run.toml": docker_spec}


def main() -> int:
    stale = []
    for name, page in PAGES.items():
        text = "\n".join(page()).rstrip() + "\n"
        path = ROOT / name
        if "--check" not in sys.argv[1:]:
            path.write_text(text, encoding="utf-8")
        elif not path.exists() or path.read_text(encoding="utf-8") != text:
            stale.append(str(path))
    if stale:
        print(f"out of date: {', '.join(stale)}; run python docs/generate.py")
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main())
