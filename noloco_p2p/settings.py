"""Load the settings of one machine. Flags override NOLOCO_* variables, which override the user's file, which overrides
the defaults.

The spec holds the settings that all peers of a run share.
"""

from __future__ import annotations

import difflib
import ipaddress
import logging
import os
import re
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, PrivateAttr, ValidationError
from pydantic.fields import FieldInfo

from noloco_p2p import peer_name
from noloco_p2p.errors import SettingsError
from noloco_p2p.spec import HUB_NAME, TrainerSpec, describe, field

log = logging.getLogger(__name__)

DEFAULT_PORT = 31337
ALL_ADDRESSES, THIS_MACHINE = "0.0.0.0", "127.0.0.1"
LAST_PORT = 65535
MULTIADDR = re.compile(r"/[!-~]+/p2p/[1-9A-HJ-NP-Za-km-z]{40,64}")
RATE = re.compile(r"(\d+(?:\.\d+)?) ?(?:([kmgKMG])bit(?:/s)?|([kMG])B/s)")
HOURS = re.compile(r"([01]\d|2[0-3]):([0-5]\d)-([01]\d|2[0-3]):([0-5]\d)")
MEMORY = re.compile(r"(\d+(?:\.\d+)?) ?([MGTmgt])(i)?B")
RATE_UNITS = {"k": 1e3, "m": 1e6, "g": 1e9}
# 2 Mbit/s; below that, two swaps and two newcomers cannot each transfer a chunk within 15 s.
MIN_RATE_BYTES_PER_S = 250_000
ENVIRONMENT_PREFIX = "NOLOCO_"
# Variables of the files in docker/ and of the tests.
OTHER_VARIABLES = frozenset(
    f"{ENVIRONMENT_PREFIX}{name}"
    for name in (
        *("GRAFANA", "IMAGE", "PROMETHEUS", "RENDER_GID", "ROCM_IMAGE", "SPEC", "TARGET", "TICKET", "WEB"),
        *("SCREENSHOTS", "UPDATE_API"),
    )
)
DEVICE = re.compile(r"auto|cpu|mps|cuda(:\d+)?")
DEVICES = "auto, cpu, cuda:N (NVIDIA, AMD) or mps (Apple)"


def default_state_dir() -> Path:
    """Return the default state folder: $XDG_STATE_HOME/noloco or ~/.local/state/noloco."""
    return Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "noloco"


def user_file() -> Path:
    """Return the path of the user's settings file, even if there is no such file."""
    return Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config") / "noloco" / "settings.toml"


Count = Annotated[int, Field(gt=0)]
Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]


# The settings in the groups of `noloco join --help`.
GROUPS = {
    "Network": ("listen", "announce", "map_ports", "max_upload", "max_download", "bootstrap", "run_key"),
    "What others see": ("name", "hide_contribution"),
    "When to train": ("when", "max_steps"),
    "Computation": (
        *("device", "threads", "gpus", "precision", "micro_batch", "compile", "activation_checkpointing"),
        *("liger", "offload_optimizer", "max_memory"),
    ),
    "Data and models": ("data", "models"),
    "Stages": ("stage", "revive_from"),
    "Checkpoints": ("state_dir", "keep_checkpoints", "save_every_s", "push_to_hub"),
    "Reports": ("report_every_s", "metrics", "trackers"),
}


@dataclass(frozen=True)
class Flag:
    """The properties of a setting's flag, in addition to the type, default and description of its field."""

    name: str = ""  # a singular name for a field that holds several values, such as --model for `models`
    metavar: str | None = None
    default: str = ""  # in words, if the value is not self-explanatory

    @classmethod
    def of(cls, name: str, setting: FieldInfo) -> Flag:
        """Return the flag of a setting, with defaults taken from its field."""
        own = next((item for item in setting.metadata if isinstance(item, cls)), cls())
        default = own.default or str(setting.get_default(call_default_factory=True) or "")
        return replace(own, name=f"--{(own.name or name).replace('_', '-')}", default=default)


def kind_of(annotation: Any) -> Any:
    """Return the plain type of a setting, without `| None`, bounds or choices."""
    origin = get_origin(annotation)
    if origin is Literal:
        return str
    if origin in (Annotated, Union, UnionType):
        return kind_of(get_args(annotation)[0])
    return origin or annotation


def split_address(address: str, *, host: str = "") -> tuple[str, int]:
    """Split HOST:PORT into the host and the port. `host` is that of an address which is only a port.

    Raises ValueError with a message for the user.
    """
    given, _, port = address.rpartition(":")
    host = given or host
    if not host or not port.isdigit() or int(port) > LAST_PORT:
        raise ValueError(f"{address!r} must have the form HOST:PORT, for example 0.0.0.0:{DEFAULT_PORT}")
    return host, int(port)


def split_announced(address: str) -> tuple[str, int]:
    """Split HOST[:PORT]. The port is 0 if there is none. An IPv6 address without brackets has no port."""
    has_port = address.count(":") == 1 or "]:" in address
    return split_address(address) if has_port else (address.strip("[]"), 0)


def _check_listen(listen: str) -> None:
    host, port = split_address(listen, host=ALL_ADDRESSES)
    if port == LAST_PORT:
        raise ValueError(f"{listen!r} leaves no port for libp2p, which uses PORT+1; choose a port below {LAST_PORT}")
    try:
        ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        raise ValueError(
            f"{listen!r} must begin with an IP address of this machine, or with 0.0.0.0 for all of its addresses"
        ) from None


def _check_bootstrap(addresses: tuple[str, ...]) -> None:
    if (address := next((each for each in addresses if not MULTIADDR.fullmatch(each)), None)) is not None:
        raise ValueError(f"{address!r} is not a peer address such as /ip4/203.0.113.5/tcp/31338/p2p/12D3Koo..")


def _check_device(device: str) -> None:
    if not DEVICE.fullmatch(device):
        raise ValueError(f"{device!r} is not a known device; use {DEVICES}")


def _check_repository(repo: str) -> None:
    if repo and not HUB_NAME.fullmatch(repo):
        raise ValueError(f"{repo!r} must have the form OWNER/NAME")


def parse_rate(rate: str) -> float | None:
    """Convert a rate such as 40mbit, 2.5 Mbit/s, 500kB/s or 5MB/s to bytes per second.

    The prefixes k, M and G are powers of 1,000. The result is None for "". Raises ValueError for anything else.
    """
    if not rate:
        return None
    match = RATE.fullmatch(rate.strip())
    if not match:  # "5mb" could mean bits or bytes
        raise ValueError(f"{rate!r} is not a rate in bits or bytes, such as 2500kbit, 40mbit, 1gbit, 500kB/s or 5MB/s")
    number, bits, num_bytes = match.groups()
    bytes_per_s = float(number) * RATE_UNITS[(bits or num_bytes).lower()] / (8 if bits else 1)
    if bytes_per_s < MIN_RATE_BYTES_PER_S:
        raise ValueError(
            f"{rate!r} is too low: the minimum is 2mbit (250kB/s), because a slower peer would delay its partners"
        )
    return bytes_per_s


def parse_hours(text: str) -> tuple[int, int] | None:
    """Convert a time range such as 22:00-07:00 to its start and end, in minutes since midnight.

    The result is None for always and idle. Raises ValueError for anything else.
    """
    if text in ("always", "idle"):
        return None
    match = HOURS.fullmatch(text.strip())
    if not match or match.group(1, 2) == match.group(3, 4):
        raise ValueError(f"{text!r} is not valid; use always, idle, or two different times such as 22:00-07:00")
    hours = [int(number) for number in match.groups()]
    return 60 * hours[0] + hours[1], 60 * hours[2] + hours[3]


def parse_memory(memory: str) -> int | None:
    """Convert an amount of memory such as 8GB, 512MB or 7.5GiB to bytes.

    The result is None for "". Raises ValueError for anything else.
    """
    if not memory:
        return None
    match = MEMORY.fullmatch(memory.strip())
    if not match:
        raise ValueError(f"{memory!r} is not an amount of memory such as 512MB, 8GB or 7.5GiB")
    number, unit, binary = match.groups()
    power = "MGT".index(unit.upper()) + 2
    return int(float(number) * (1024 if binary else 1000) ** power)


def _readable(parse: Callable[[Any], object]) -> AfterValidator:
    """Return a check that `parse` can read a value."""

    def check(value: Any) -> Any:
        parse(value)
        return value

    return AfterValidator(check)


def _several(value: Any) -> Any:
    """Split the value of an environment variable at its commas."""
    return [part for part in value.split(",") if part] if isinstance(value, str) else value


def _pairs(value: Any) -> Any:
    """Convert the values of a flag or a variable, each of the form NAME=VALUE, to a table."""
    if isinstance(parts := _several(value), dict):
        return parts
    pairs = [part.partition("=") for part in parts]
    if wrong := next(("".join(pair) for pair in pairs if not all(pair)), None):
        raise ValueError(f"{wrong!r} must have the form NAME=VALUE, for example c4='/data/c4/*.json.gz'")
    return {name: value for name, _, value in pairs}


def _absolute(path: Path | None) -> Path | None:
    return path and path.expanduser().absolute()


AbsolutePath = Annotated[Path, AfterValidator(_absolute)]
AbsoluteFolder = Annotated[str, AfterValidator(lambda folder: str(_absolute(Path(folder))))]
Rate = Annotated[str, _readable(parse_rate), Flag(default="none")]


class PeerSettings(BaseModel):
    """The settings of this machine.

    `load` merges the sources. Error messages name the field and its source. Each field is also a flag
    (`cli/options.py`), a NOLOCO_* variable, a key in the user's file and a row in docs/reference.md.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    listen: Annotated[str, _readable(_check_listen)] = field(
        f"{ALL_ADDRESSES}:{DEFAULT_PORT}",
        "[HOST:]PORT to listen on. gRPC uses PORT, and libp2p uses PORT+1. Port 0 selects two free ports.",
    )
    announce: Annotated[str, _readable(split_announced)] = field(
        "", "HOST[:PORT] that other peers dial, if it differs from --listen."
    )
    map_ports: Annotated[Literal["always", "never"], Flag(metavar="always|never")] = field(
        "always", "Ask the router to forward both ports (by UPnP), unless --announce is given."
    )
    device: Annotated[str, _readable(_check_device)] = field("auto", f"Device to compute on: {DEVICES}.")
    threads: Annotated[int, Flag(default="chosen by torch")] = field(0, "Number of torch threads.", ge=0)
    max_steps: Count | None = field(None, "Leave the run after this many inner steps.")
    gpus: Count = field(1, "Number of GPUs that share this peer's model.")
    precision: Literal["auto", "bf16", "fp32"] = field(
        "auto", "Precision of the forward and backward passes; auto uses bf16 on GPUs that have bf16 instructions."
    )
    micro_batch: Annotated[int, Flag(default="as many as fit in memory")] = field(
        0, "Number of sequences per forward and backward pass.", ge=0
    )
    compile: bool = field(False, "Compile the model with torch.compile.")
    liger: bool = field(False, "Use the fused GPU kernels of liger-kernel (extra `fast`), also for the loss.")
    activation_checkpointing: bool = field(False, "Use less memory, at the cost of about a third more computation.")
    offload_optimizer: bool = field(False, "Keep the optimizer's moments in main memory instead of GPU memory.")
    keep_checkpoints: Count = field(2, "Number of checkpoints to keep.")
    save_every_s: Seconds = field(600.0, "Seconds between two checkpoints.")
    report_every_s: Seconds = field(10.0, "Seconds between two reports, each a line of output.")
    max_upload: Rate = field(
        "",
        "Limit on the total upload rate of swaps and fetches, for example 40mbit or 5MB/s. With any limit, this peer "
        "does not relay calls for others.",
    )
    max_download: Rate = field("", "Limit on the total download rate of swaps and fetches, for example 100mbit.")
    name: Annotated[str, AfterValidator(peer_name.check), Flag(default="none")] = field(
        "", f"Public name of this peer (up to {peer_name.MAX_CHARS} characters). It does not prove your identity."
    )
    hide_contribution: bool = field(False, "Hide this peer's training time and token count from other peers.")
    when: Annotated[str, _readable(parse_hours), Flag(metavar="always|idle|HH:MM-HH:MM")] = field(
        "always",
        "When to train: always, idle (only while other programs are barely using the processor), or between two "
        "times of day, for example 22:00-07:00.",
    )
    push_to_hub: Annotated[str, _readable(_check_repository), Flag(metavar="OWNER/NAME", default="none")] = field(
        "",
        "Upload the last checkpoint to the Hugging Face hub when this peer leaves. If the repository "
        "does not exist, a private one is created.",
    )
    state_dir: Annotated[AbsolutePath, Flag(default="~/.local/state/noloco")] = Field(
        default_factory=default_state_dir, description="Folder for the identity, the checkpoints and the logs."
    )
    data: Annotated[dict[str, str], BeforeValidator(_pairs)] = field(
        {}, "NAME=GLOB: the files of the data set named NAME in the spec."
    )
    models: Annotated[dict[str, AbsoluteFolder], BeforeValidator(_pairs), Flag(name="model")] = field(
        {}, "NAME=FOLDER: the folder of the model or tokenizer named NAME in the spec."
    )
    trackers: Annotated[
        tuple[Literal["tensorboard", "wandb"], ...], BeforeValidator(_several), Flag(name="tracker")
    ] = field((), "Tracker to log to, in addition to the JSONL file: tensorboard or wandb. Can be repeated.")
    bootstrap: Annotated[tuple[str, ...], BeforeValidator(_several), _readable(_check_bootstrap)] = field(
        (), "Address of a peer to join through (/ip4/../tcp/../p2p/..), or @FILE that contains it. Can be repeated."
    )
    metrics: Annotated[
        str, _readable(lambda text: text and split_address(text, host=THIS_MACHINE)), Flag(metavar="[HOST:]PORT")
    ] = field("", f"Serve /metrics for Prometheus at this address; without HOST, at {THIS_MACHINE}.")
    stage: Annotated[Annotated[int, Field(ge=0)] | None, Flag(default="chosen automatically")] = field(
        None, "In a run with stages: the stage that this peer holds. Stage 0 reads the data."
    )
    revive_from: Annotated[AbsolutePath | None, Flag(metavar="CHECKPOINT|EXPORT")] = field(
        None, "With --stage, start from this checkpoint or exported model if no peer holds that stage."
    )
    max_memory: Annotated[str, _readable(parse_memory), Flag(metavar="SIZE", default="no limit")] = field(
        "", "Refuse runs, and choose no stage, that need more main memory than this, for example 8GB."
    )
    run_key: AbsolutePath | None = field(
        None, "File with the key of a private run, written by `noloco init --private`."
    )
    _origins: dict[str, str] = PrivateAttr(default_factory=dict)

    @classmethod
    def load(cls, flags: Mapping[str, Any] | None = None) -> PeerSettings:
        """Merge all sources. A flag with the value None was not given. Raises SettingsError for a wrong value."""
        file = user_file()
        sources = {
            str(file): _from_file(file),
            "environment": _from_environment(cls),
            "flag": {name: value for name, value in (flags or {}).items() if value is not None},
        }
        settings, values, origins = cls(), dict[str, Any](), dict[str, str]()
        for origin, found in sources.items():
            values |= found
            origins |= dict.fromkeys(found, origin)
            try:
                # Checked after each source, so that an error message can name that source.
                settings = cls.model_validate(values)
            except ValidationError as error:
                prefix = {"environment": "environment NOLOCO_*: ", "flag": ""}.get(origin, f"{origin}: ")
                raise SettingsError(f"{prefix}{describe(error, cls)}") from None
        settings._origins = origins
        return settings

    def origins(self) -> dict[str, str]:
        """Return the source of each setting: "flag", "environment", the path of the user's file, or "default"."""
        return {name: self._origins.get(name, "default") for name in type(self).model_fields}

    def check_names(self, spec: TrainerSpec) -> None:
        """Raise SettingsError if the command line binds a name that the spec does not use.

        The environment and the user's file may bind names for several runs.
        """
        reads = [part.source for part, _ in spec.data.parts()]
        models = list(
            dict.fromkeys(name for name in (spec.model.pretrained, spec.data.tokenizer) if name not in ("", "bytes"))
        )
        used = {"data": ("data set", "reads", reads), "models": ("model", "uses", models)}
        for setting, (kind, verb, names) in used.items():
            bound = getattr(self, setting) if self.origins()[setting] == "flag" else {}
            for name in bound:
                if name not in names and not (setting == "data" and name.removesuffix(".validation") in names):
                    listed = ", ".join(map(repr, names))
                    raise SettingsError(f"the spec names no {kind} {name!r}; it {verb} {listed or 'none'}")

    @property
    def upload_bytes_per_s(self) -> float | None:
        """Return the limit on the combined upload rate of this peer's swaps and fetches, or None for no limit."""
        return parse_rate(self.max_upload)

    @property
    def download_bytes_per_s(self) -> float | None:
        """Return the limit on the combined download rate of this peer's swaps and fetches, or None for no limit."""
        return parse_rate(self.max_download)

    @property
    def listen_host(self) -> str:
        """Return the IP address that gRPC and libp2p listen on."""
        return split_address(self.listen, host=ALL_ADDRESSES)[0]

    @property
    def listen_port(self) -> int:
        """Return the gRPC port, or 0 if any two free ports may be used for gRPC and libp2p."""
        return split_address(self.listen, host=ALL_ADDRESSES)[1]

    @property
    def libp2p_port(self) -> int:
        """Return the libp2p port, which follows the gRPC port, or 0 if any free port may be used."""
        return self.listen_port + 1 if self.listen_port else 0

    @property
    def announced(self) -> tuple[str, int]:
        """Return the host and gRPC port in `announce`.

        The host is "" if `announce` is not set. Port 0 stands for the listening port.
        """
        return split_announced(self.announce)


def _from_environment(model: type[PeerSettings]) -> dict[str, str]:
    variables = {name: ENVIRONMENT_PREFIX + name.upper() for name in model.model_fields}
    for variable in sorted(os.environ.keys() - {*variables.values(), *OTHER_VARIABLES}):
        prefix, name = variable[: len(ENVIRONMENT_PREFIX)].upper(), variable[len(ENVIRONMENT_PREFIX) :].lower()
        if prefix == ENVIRONMENT_PREFIX:
            meant = [variables[close] for close in difflib.get_close_matches(name, variables, n=1)]
            remedy = f"did you mean {meant[0]}?" if meant else "docs/reference.md lists all settings"
            log.warning("the environment variable %s is ignored, because it is not a setting: %s", variable, remedy)
    return {name: os.environ[variable] for name, variable in variables.items() if variable in os.environ}


def _from_file(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except FileNotFoundError:
        return {}
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise SettingsError(f"{path} cannot be read as TOML: {error}") from None
