"""Write the generated files of docs/ and docker/, or with --check report whether they are up to date.

python docs/generate.py [--check]
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

from pydantic import BaseModel
from pydantic.fields import FieldInfo

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks" / "study")]

from noloco_p2p.presets import PRESETS, is_section, render, sections
from noloco_p2p.settings import ENVIRONMENT_PREFIX, Flag, PeerSettings
from noloco_p2p.spec import TrainerSpec
from noloco_p2p.telemetry import prometheus
from noloco_p2p.telemetry.metrics import METRICS


def table(rows: list[tuple[str, ...]]) -> list[str]:
    head, *body = rows
    return [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}", *(f"| {' | '.join(row)} |" for row in body), ""]


# metrics.md

METRICS_HEAD = """# Metrics

`docs/generate.py` writes this page from `telemetry/metrics.py` and `telemetry/prometheus.py`. Change those files,
not this page.

A counter never decreases, not even when the peer restarts. The loss is omitted until it is known.
"""


def families(families: tuple[prometheus.Family, ...]) -> list[str]:
    rows = [(f"`{family.full_name}`{_labels(family)}", family.kind, family.unit, family.meaning) for family in families]
    return table([("name", "kind", "unit", "meaning"), *rows])


def _labels(family: prometheus.Family) -> str:
    return f" {{{', '.join(family.labels)}}}" if family.labels else ""


def metrics_page() -> list[str]:
    own = (*prometheus.PEER, prometheus.LIVE_PEERS, prometheus.PEER_INFO)
    swarm = (
        *(prometheus.SWARM_PEERS, *prometheus.SWARM, prometheus.SWARM_ALONE),
        *(*prometheus.STAGES, prometheus.DIRECTORY_AGE),
    )
    rows = [(f"`{name}`", about.unit, about.meaning) for name, about in METRICS.items() if about.kind == "text"]
    return [
        METRICS_HEAD,
        "## One peer",
        "",
        "`noloco join --metrics HOST:PORT` serves these metrics at `/metrics`. `noloco status --json` and the events",
        "`round`, `finished` and `stopped` contain the same metrics, without the prefix `noloco_` and suffix `_total`.",
        "",
        *families(own),
        "These fields are only in the status and in events:",
        "",
        *table([("name", "unit", "meaning"), *rows]),
        "## The swarm",
        "",
        "`noloco monitor TICKET --web` reads these metrics from the records in the directory, and serves them at",
        "`/metrics`. The number of label values does not grow with the swarm.",
        "",
        *families(swarm),
    ]


# spec.md

SPEC_HEAD = """# The run spec

`docs/generate.py` writes this page from `spec.py`. Change that file, not this page.

The run spec is a TOML file that all peers of a run share. `noloco init run.toml` writes a spec that contains these
explanations as comments. The spec of a run cannot be changed: if any value differs, the digest differs, and the spec
belongs to another run. `noloco fork` starts a new run, with a changed spec, from the weights of an old run. The
settings of one machine (device, ports, limits, paths of data) are not part of the spec. They have [their own
page](settings.md).
"""


def spec_page() -> list[str]:
    lines = [SPEC_HEAD, *_fields("", TrainerSpec)]
    for name, about, section in sections():
        lines += [f"## [{name}]", "", about, "", *_fields(f"{name}.", section)]
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


# settings.md

SETTINGS_HEAD = """# The settings of one machine

`docs/generate.py` writes this page from `settings.py`. Change that file, not this page.

The settings of one machine are not part of the run spec. `noloco join` has a flag for each of them. A flag takes
precedence over an environment variable, which takes precedence over the file `~/.config/noloco/settings.toml`.
"""


def settings_page() -> list[str]:
    rows = []
    for name, field in PeerSettings.model_fields.items():
        flag = Flag.of(name, field)
        variable = f"{ENVIRONMENT_PREFIX}{name.upper()}"
        rows.append((f"`{flag.name}`", f"`{variable}`", flag.default or "", field.description or ""))
    return [SETTINGS_HEAD, *table([("flag", "variable", "default", "meaning"), *rows])]


# bandwidth.md

BANDWIDTH_HEAD = """# What a run sends

`docs/generate.py` writes this page from the presets and the codecs' payload sizes. Change those, not this page.

The table shows how much data a peer sends its partner in each round. The peer receives the same amount. Frames,
digests, TLS and TCP add 5 to 8 % to this ([versus_allreduce](../benchmarks/results/versus_allreduce.txt)). Modulo
coding can add another tenth, because a chunk is sent again if its bound did not hold. `modulo` can also add up to half
a byte per number, for chunks that need more than four bits per number. "With momentum" means that `outer.alpha` is
above 0 and `outer.swap_momentum` is set.

A round should last at least two and a half times as long as the transfer of its early part. If `outer.max_wait_s` is 0,
a round should last at least three times as long as its whole swap. `outer.inner_steps = "auto"` ensures this.

[Targets that were missed](results.md#targets-that-were-missed) lists the measured overhead and goodput of swaps on a
link, and the time for which they block training.
"""
COSTS_HEAD = """\
## What a swap costs this machine

These figures were measured on two cores that also ran other programs. For this reason, times are processor times unless
stated otherwise. The scripts are in `benchmarks/`, and their output is in `benchmarks/results/`.
"""
COSTS_TAIL = """\
"Two cores" excludes the time during which the training thread waits for a core. When a bare stream at 100 Mbit/s ran in
parallel, the measured training speed was 1.03 times the speed without a stream. So if a figure exceeds its target by
less than 0.03, we call the result undecided. "One core" compares speeds in training steps per second of processor time.
Both figures include the effect of other programs on the caches.

Encoding and adding read each number from main memory once. Then they make 7 and about 20 passes, respectively, over
each chunk of 1 MiB in the cache. We tried smaller chunks, but they were slower, because each torch operation has a
fixed cost. Encoding runs on the device of the model, even if that is an accelerator, so only encoded payloads are
copied to the CPU. Adding runs on the CPU, because slow weights are in main memory.
"""
CODECS = {
    "fp32": ("fp32", "fp32", "fp32"),
    "bf16 + int8": ("bf16", "bf16", "int8"),
    "modulo8 + int4": ("modulo8", "modulo8", "int4"),
    "modulo + int2": ("modulo", "modulo8", "int2"),  # as `noloco init` writes it
}
SIZES = ("small", "medium", "large")
ROUND_MINUTES = (5, 30)
LINKS_MBIT_S = (20, 100)


def bandwidth_page() -> list[str]:
    heads = (
        *("model", "parameters", "weights + gradient", "MB per round"),
        *(f"minutes at {rate} Mbit/s" for rate in LINKS_MBIT_S),
        *(f"MB per hour, rounds of {minutes} min" for minutes in ROUND_MINUTES),
    )
    rows = [
        _bandwidth_row(size, codecs, sends_momentum=sends_momentum)
        for size in SIZES
        for codecs in CODECS
        for sends_momentum in (False, True)
    ]
    return [BANDWIDTH_HEAD, *table([heads, *rows]), COSTS_HEAD, *table(costs()), COSTS_TAIL.rstrip()]


def costs() -> list[tuple[str, ...]]:
    """Return the measured costs of encoding, adding, and training beside a swap, from benchmarks/results/."""
    from figures import claim, line

    def seconds(*claims: str) -> str:
        return f"{sum(claim('boundary', each) for each in claims):.2f} s of one core"

    def beside(rate_mbit_s: int, cores: str) -> float:
        return line("overhead_busy.txt", rf"^a swap at {rate_mbit_s} Mbit/s: training beside it, {cores} +([\d.]+)")

    def ms_per_mb(what: str) -> str:
        return f"{claim('goodput', f'{what}: processor time of both sides'):.1f}"

    behind = [f"behind: {what}" for what in ("norm of a coded", "coding slow weights", "checking slow weights")]
    goodput = claim("goodput", "swap / bare gRPC stream")
    return [
        ("what was measured", "result", "target"),
        ("encoding the outer gradient at the boundary, 125M, modulo8 + int4", seconds("boundary: coding"), ""),
        ("adding a swap at the boundary, 125M, modulo8 + int4", seconds("boundary: adding"), ""),
        ("adding an outer gradient that arrived late, 125M", seconds("eager: adding"), ""),
        ("copying 125M fp32 numbers in memory, for comparison", seconds("copy of the weights"), ""),
        ("encoding and checking during training, 125M, modulo8 + int4", seconds(*behind), ""),
        *(
            (
                f"training during a swap (bf16) at {name}, {cores}",
                f"{beside(rate, cores):.2f} of the speed without a swap",
                reached(beside(rate, cores), target) if cores == "two cores" else "",
            )
            for name, rate, target in (("100 Mbit/s", 100, 0.98), ("1 Gbit/s", 1000, 0.88))
            for cores in ("two cores", "one core")
        ),
        ("goodput of a swap relative to a bare TLS stream, on loopback", f"{goodput:.2f}", reached(goodput, 0.6)),
        (
            "processor time of a swap, bf16 + bf16 + int4",
            f"{ms_per_mb('swap')} ms/MB (bare TLS stream: {ms_per_mb('bare gRPC stream')})",
            "",
        ),
        ("processor time of a swap, modulo + int2", f"{ms_per_mb('swap as init writes it')} ms/MB", ""),
    ]


ERROR = 0.03  # in the same run, training beside a bare stream was measured at 1.03 of its speed


def reached(value: float, target: float) -> str:
    if value < target:
        return f"{target:g}: missed"
    return f"{target:g}: {'met' if value >= target + ERROR else 'undecided'}"


def _bandwidth_row(size: str, codecs: str, *, sends_momentum: bool) -> tuple[str, ...]:
    from noloco_p2p.gossip.frames import Part
    from noloco_p2p.gossip.sections import part_bytes, section_plans

    names = ("codec.slow_weights", "codec.outer_momentum", "codec.outer_gradient")
    spec = PRESETS[size].with_changes(dict(zip(names, CODECS[codecs], strict=True)))
    num_parameters = spec.model.num_parameters()
    plans = section_plans(spec.codec, swap_momentum=sends_momentum, num_elements=num_parameters)
    megabytes = sum(part_bytes(plans, part) for part in Part) / 1e6
    return (
        *(size, f"{num_parameters / 1e6:,.0f}M", f"{codecs}{', with momentum' if sends_momentum else ''}"),
        f"{megabytes:,.0f}",
        *(f"{megabytes * 8 / rate / 60:,.1f}" for rate in LINKS_MBIT_S),
        *(f"{megabytes * 60 / minutes:,.0f}" for minutes in ROUND_MINUTES),
    )


# docker/run.toml


def docker_spec() -> list[str]:
    """Return the spec of the swarm that docker/compose.yaml starts, as `noloco init --name swarm` writes it."""
    return render(PRESETS["tiny"].with_changes({"name": "swarm"})).splitlines()


PAGES: dict[str, Callable[[], list[str]]] = {
    "docs/metrics.md": metrics_page,
    "docs/spec.md": spec_page,
    "docs/settings.md": settings_page,
    "docs/bandwidth.md": bandwidth_page,
    "docker/run.toml": docker_spec,
}


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
