"""Load the settings of one machine. Flags override NOLOCO_* variables, which override the user's file, which overrides
the defaults.

The spec holds the settings that all peers of a run share.
"""

from __future__ import annotations

import ipaddress
import os
import re
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, ValidationError, field_validator
from pydantic.fields import FieldInfo

from noloco_p2p import peer_name
from noloco_p2p.errors import SettingsError
from noloco_p2p.spec import HUB_NAME, about, describe

DEFAULT_PORT = 31337
LAST_PORT = 65535
MULTIADDR = re.compile(r"/[!-~]+/p2p/[1-9A-HJ-NP-Za-km-z]{40,64}")
RATE = re.compile(r"(\d+(?:\.\d+)?) ?(?:([kmgKMG])bit(?:/s)?|([kMG])B/s)")
HOURS = re.compile(r"([01]\d|2[0-3]):([0-5]\d)-([01]\d|2[0-3]):([0-5]\d)")
MEMORY = re.compile(r"(\d+(?:\.\d+)?) ?([MGTmgt])(i)?B")
RATE_UNITS = {"k": 1e3, "m": 1e6, "g": 1e9}
# 2 Mbit/s; below that, two swaps and two newcomers cannot each transfer a chunk within 15 s.
MIN_RATE_BYTES_PER_S = 250_000
ENVIRONMENT_PREFIX = "NOLOCO_"
DEVICE = re.compile(r"auto|cpu|mps|cuda(:\d+)?")
DEVICES = "auto, cpu, cuda:N (NVIDIA, AMD) or mps (Apple)"


def default_state_dir() -> Path:
    """Return the default state folder: $XDG_STATE_HOME/noloco or ~/.local/state/noloco."""
    return Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "noloco"


def user_file() -> Path:
    """Return the path of the user's settings file, even if there is no such file."""
    return Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config") / "noloco" / "settings.toml"


def parse_bindings(pairs: list[str]) -> dict[str, str]:
    """Parse `--data NAME=GLOB` flags into {name: glob}. Raises SettingsError for a malformed pair."""
    return _parse_pairs(pairs, "--data", "NAME=GLOB, for example --data c4='/data/c4/*.json.gz'")


def parse_folders(pairs: list[str]) -> dict[str, str]:
    """Parse `--model NAME=FOLDER` flags into {name: folder}.

    Raises SettingsError for a malformed pair, or if a folder does not exist.
    """
    folders = _parse_pairs(pairs, "--model", "NAME=FOLDER, for example --model llama=/models/llama")
    for name, folder in folders.items():
        if not Path(folder).expanduser().is_dir():
            raise SettingsError(f"--model {name}={folder}: this folder does not exist")
    return folders


def _parse_pairs(pairs: list[str], flag: str, form: str) -> dict[str, str]:
    bindings = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals or not name or not value:
            raise SettingsError(f"{flag} {pair!r} must have the form {form}")
        bindings[name] = value
    return bindings


Count = Annotated[int, Field(gt=0)]
Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]


@dataclass(frozen=True)
class Flag:
    """The properties of a setting's flag, in addition to the type, default and description of its field."""

    name: str = ""  # a singular name for a field that holds several values, such as --model for `models`
    metavar: str | None = None
    default: str = ""  # in words, if the value is not self-explanatory
    parse: Callable[[list[str]], Any] = tuple  # for lists and tables; also applied to environment variables
    takes_file: bool = False  # on the command line, @FILE is replaced by the line in that file

    @classmethod
    def of(cls, name: str, field: FieldInfo) -> Flag:
        """Return the flag of a setting, with defaults taken from its field."""
        own = next((item for item in field.metadata if isinstance(item, cls)), cls())
        default = own.default or str(field.get_default(call_default_factory=True) or "")
        return replace(own, name=f"--{(own.name or name).replace('_', '-')}", default=default)


def kind_of(annotation: Any) -> Any:
    """Return the plain type of a setting, without `| None`, bounds or choices."""
    origin = get_origin(annotation)
    if origin is Literal:
        return str
    if origin in (Annotated, Union, UnionType):
        return kind_of(get_args(annotation)[0])
    return origin or annotation


AlwaysOrNever = Annotated[Literal["always", "never"], Flag(metavar="always|never")]


class PeerSettings(BaseModel):
    """The settings of this machine.

    `load` merges the sources. Error messages name the field and its source. Each field is also a flag
    (`cli/options.py`), a NOLOCO_* variable, a key in the user's file and a row in docs/reference.md.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    listen: Annotated[
        str, about("HOST:PORT to listen on. gRPC uses PORT, and libp2p uses PORT+1. Port 0 selects two free ports.")
    ] = f"0.0.0.0:{DEFAULT_PORT}"
    announce: Annotated[str, about("HOST[:PORT] that other peers dial, if it differs from --listen.")] = ""
    map_ports: Annotated[
        AlwaysOrNever, about("Ask the router to forward both ports (by UPnP), unless --announce is given.")
    ] = "always"
    device: Annotated[str, about(f"Device to train on: {DEVICES}.")] = "auto"
    threads: Annotated[int, Field(ge=0), about("Number of torch threads."), Flag(default="chosen by torch")] = 0
    max_steps: Annotated[Count | None, about("Leave the run after this many inner steps.")] = None
    gpus: Annotated[Count, about("Number of GPUs that share this peer's model.")] = 1
    precision: Annotated[
        Literal["auto", "bf16", "fp32"],
        about("Precision of the forward and backward passes; auto uses bf16 on GPUs that have bf16 instructions."),
    ] = "auto"
    micro_batch: Annotated[
        int,
        Field(ge=0),
        about("Number of sequences per forward and backward pass."),
        Flag(default="as many as fit in memory"),
    ] = 0
    compile: Annotated[bool, about("Compile the model with torch.compile.")] = False
    activation_checkpointing: Annotated[
        bool, about("Use less memory, at the cost of about a third more computation.")
    ] = False
    offload_optimizer: Annotated[bool, about("Keep the optimizer's moments in main memory instead of GPU memory.")] = (
        False
    )
    keep_checkpoints: Annotated[Count, about("Number of checkpoints to keep.")] = 2
    save_every_s: Annotated[Seconds, about("Seconds between two checkpoints.")] = 600.0
    report_every_s: Annotated[Seconds, about("Seconds between two reports, each a line of output.")] = 10.0
    max_upload: Annotated[
        str,
        about("Limit on the total upload rate of swaps and fetches, for example 40mbit or 5MB/s."),
        Flag(default="none"),
    ] = ""
    max_download: Annotated[
        str, about("Limit on the total download rate of swaps and fetches, for example 100mbit."), Flag(default="none")
    ] = ""
    name: Annotated[
        str,
        about(f"Public name of this peer (up to {peer_name.MAX_CHARS} characters). It does not prove your identity."),
        Flag(default="none"),
    ] = ""
    hide_contribution: Annotated[bool, about("Hide this peer's training time and token count from other peers.")] = (
        False
    )
    when: Annotated[
        str,
        about(
            "When to train: always, idle (only while other programs are barely using the processor), or between two "
            "times of day, for example 22:00-07:00."
        ),
        Flag(metavar="always|idle|HH:MM-HH:MM"),
    ] = "always"
    push_to_hub: Annotated[
        str,
        about(
            "Upload the last checkpoint to the Hugging Face hub when this peer leaves. If the repository "
            "does not exist, a private one is created."
        ),
        Flag(metavar="OWNER/NAME", default="none"),
    ] = ""
    state_dir: Annotated[
        Path,
        about("Folder for the identity, the checkpoints and the logs."),
        Flag(default="~/.local/state/noloco"),
    ] = Field(default_factory=default_state_dir)
    data: Annotated[
        dict[str, str],
        about("NAME=GLOB: the files of the data set named NAME in the spec."),
        Flag(parse=parse_bindings),
    ] = {}
    models: Annotated[
        dict[str, str],
        about("NAME=FOLDER: the folder of the model or tokenizer named NAME in the spec."),
        Flag(name="model", parse=parse_folders),
    ] = {}
    trackers: Annotated[
        tuple[Literal["tensorboard", "wandb"], ...],
        about("Tracker to log to, in addition to the JSONL file: tensorboard or wandb. Can be repeated."),
        Flag(name="tracker"),
    ] = ()
    bootstrap: Annotated[
        tuple[str, ...],
        about("Address of a peer to join through (/ip4/../tcp/../p2p/..), or @FILE that contains it. Can be repeated."),
        Flag(takes_file=True),
    ] = ()
    metrics: Annotated[str, about("Serve /metrics for Prometheus at this address."), Flag(metavar="HOST:PORT")] = ""
    stage: Annotated[
        Annotated[int, Field(ge=0)] | None,
        about("In a run with stages: the stage that this peer holds. Stage 0 reads the data."),
        Flag(default="chosen automatically"),
    ] = None
    revive_from: Annotated[
        Path | None,
        about("With --stage, start from this checkpoint or exported model if no peer holds that stage."),
        Flag(metavar="CHECKPOINT|EXPORT"),
    ] = None
    max_memory: Annotated[
        str,
        about("Maximum amount of main memory that this peer may use, for example 8GB."),
        Flag(metavar="SIZE", default="no limit"),
    ] = ""
    run_key: Annotated[
        Path | None, about("File with the key of a private run, written by `noloco init --private`.")
    ] = None
    _origins: dict[str, str] = PrivateAttr(default_factory=dict)

    @field_validator("listen")
    @classmethod
    def _listen_has_two_ports(cls, listen: str) -> str:
        host, port = split_address(listen)
        if port == LAST_PORT:
            raise ValueError(
                f"{listen!r} leaves no port for libp2p, which uses PORT+1; choose a port below {LAST_PORT}"
            )
        try:
            ipaddress.ip_address(host.strip("[]"))
        except ValueError:
            raise ValueError(
                f"{listen!r} must begin with an IP address of this machine, or with 0.0.0.0 for all of its addresses"
            ) from None
        return listen

    @field_validator("announce")
    @classmethod
    def _announce_has_host(cls, announce: str) -> str:
        if announce:
            split_address(announce if _has_port(announce) else f"{announce}:0")
        return announce

    @field_validator("metrics")
    @classmethod
    def _metrics_has_host_and_port(cls, metrics: str) -> str:
        if metrics:
            split_address(metrics)
        return metrics

    @field_validator("bootstrap")
    @classmethod
    def _bootstraps_can_be_dialled(cls, bootstrap: tuple[str, ...]) -> tuple[str, ...]:
        for address in bootstrap:
            if not MULTIADDR.fullmatch(address):
                raise ValueError(f"{address!r} is not a peer address such as /ip4/203.0.113.5/tcp/31338/p2p/12D3Koo..")
        return bootstrap

    @field_validator("device")
    @classmethod
    def _device_is_known(cls, device: str) -> str:
        if not DEVICE.fullmatch(device):
            raise ValueError(f"{device!r} is not a known device; use {DEVICES}")
        return device

    @field_validator("models")
    @classmethod
    def _absolute_folders(cls, models: dict[str, str]) -> dict[str, str]:
        return {name: str(Path(folder).expanduser().absolute()) for name, folder in models.items()}

    @field_validator("max_upload", "max_download")
    @classmethod
    def _rate_is_known(cls, rate: str) -> str:
        if rate:
            parse_rate(rate)
        return rate

    @field_validator("push_to_hub")
    @classmethod
    def _repository_is_a_name(cls, repo: str) -> str:
        if repo and not HUB_NAME.fullmatch(repo):
            raise ValueError(f"{repo!r} must have the form OWNER/NAME")
        return repo

    @field_validator("name")
    @classmethod
    def _name_is_fit(cls, name: str) -> str:
        return peer_name.check(name)

    @field_validator("when")
    @classmethod
    def _times_are_known(cls, when: str) -> str:
        if when not in ("always", "idle"):
            parse_hours(when)
        return when

    @field_validator("max_memory")
    @classmethod
    def _memory_is_known(cls, memory: str) -> str:
        if memory:
            parse_memory(memory)
        return memory

    @field_validator("state_dir", "revive_from", "run_key")
    @classmethod
    def _absolute(cls, path: Path | None) -> Path | None:
        return path and path.expanduser().absolute()

    @classmethod
    def load(cls, flags: Mapping[str, Any] | None = None) -> PeerSettings:
        """Merge all sources. A flag with the value None was not given. Raises SettingsError for a wrong value."""
        given = {name: value for name, value in (flags or {}).items() if value is not None}
        settings, values, origins = cls(), dict[str, Any](), dict[str, str]()
        for origin, prefix, found in (
            (str(user_file()), f"{user_file()}: ", _from_file(user_file())),
            ("environment", "environment NOLOCO_*: ", _from_environment(cls, os.environ)),
            ("flag", "", given),
        ):
            values |= found
            origins |= dict.fromkeys(found, origin)
            try:
                # Checked after each source, so that an error message can name that source.
                settings = cls.model_validate(values)
            except ValidationError as error:
                raise SettingsError(f"{prefix}{describe(error)}") from None
        settings._origins = origins
        return settings

    def origins(self) -> dict[str, str]:
        """Return the source of each setting: "flag", "environment", the path of the user's file, or "default"."""
        return {name: self._origins.get(name, "default") for name in type(self).model_fields}

    @property
    def upload_bytes_per_s(self) -> float | None:
        """Return the limit on the combined upload rate of this peer's swaps and fetches, or None for no limit."""
        return parse_rate(self.max_upload) if self.max_upload else None

    @property
    def download_bytes_per_s(self) -> float | None:
        """Return the limit on the combined download rate of this peer's swaps and fetches, or None for no limit."""
        return parse_rate(self.max_download) if self.max_download else None

    @property
    def hours(self) -> tuple[int, int] | None:
        """Return the minute of the day at which training may start, and the minute at which it must stop.

        None means that the peer can train at any time of day.
        """
        return None if self.when in ("always", "idle") else parse_hours(self.when)

    @property
    def max_memory_bytes(self) -> int | None:
        """Return `max_memory` in bytes, or None if there is no limit."""
        return parse_memory(self.max_memory) if self.max_memory else None

    @property
    def listen_host(self) -> str:
        """Return the IP address that gRPC and libp2p listen on."""
        return split_address(self.listen)[0]

    @property
    def listen_port(self) -> int:
        """Return the gRPC port, or 0 if any two free ports may be used for gRPC and libp2p."""
        return split_address(self.listen)[1]

    @property
    def libp2p_port(self) -> int:
        """Return the libp2p port, which follows the gRPC port, or 0 if any free port may be used."""
        return self.listen_port + 1 if self.listen_port else 0

    @property
    def announced(self) -> tuple[str, int]:
        """Return the host and gRPC port in `announce`.

        The host is "" if `announce` is not set. Port 0 stands for the listening port.
        """
        if _has_port(self.announce):
            return split_address(self.announce)
        return self.announce.strip("[]"), 0


def split_address(address: str) -> tuple[str, int]:
    """Split HOST:PORT into the host and the port. Raises ValueError with a message for the user."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or int(port) > LAST_PORT:
        raise ValueError(f"{address!r} must have the form HOST:PORT, for example 0.0.0.0:{DEFAULT_PORT}")
    return host, int(port)


def _has_port(address: str) -> bool:
    """Return whether the address is HOST:PORT or [IPV6]:PORT. An IPv6 address without brackets has no port."""
    return address.count(":") == 1 or "]:" in address


def parse_rate(rate: str) -> float:
    """Convert a rate such as 40mbit, 2.5 Mbit/s, 500kB/s or 5MB/s to bytes per second.

    The prefixes k, M and G are powers of 1,000. Raises ValueError for anything else.
    """
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


def parse_hours(text: str) -> tuple[int, int]:
    """Convert a time range such as 22:00-07:00 to its start and end, in minutes since midnight. Raises ValueError for
    anything else.
    """
    match = HOURS.fullmatch(text.strip())
    if not match or match.group(1, 2) == match.group(3, 4):
        raise ValueError(f"{text!r} is not valid; use always, idle, or two different times such as 22:00-07:00")
    hours = [int(number) for number in match.groups()]
    return 60 * hours[0] + hours[1], 60 * hours[2] + hours[3]


def parse_memory(memory: str) -> int:
    """Convert an amount of memory such as 8GB, 512MB or 7.5GiB to bytes. Raises ValueError for anything else."""
    match = MEMORY.fullmatch(memory.strip())
    if not match:
        raise ValueError(f"{memory!r} is not an amount of memory such as 512MB, 8GB or 7.5GiB")
    number, unit, binary = match.groups()
    power = "MGT".index(unit.upper()) + 2
    return int(float(number) * (1024 if binary else 1000) ** power)


def _from_file(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise SettingsError(f"{path} cannot be read as TOML: {error}") from None


def _from_environment(model: type[PeerSettings], environment: Mapping[str, str]) -> dict[str, Any]:
    """Read the NOLOCO_* variables, such as NOLOCO_LISTEN. Commas separate the values of a list and the pairs of a
    table.
    """
    values: dict[str, Any] = {}
    for name, field in model.model_fields.items():
        text = environment.get(ENVIRONMENT_PREFIX + name.upper())
        if text is not None:
            several = kind_of(field.annotation) in (tuple, dict)
            parts = [part for part in text.split(",") if part]
            values[name] = Flag.of(name, field).parse(parts) if several else text
    return values
