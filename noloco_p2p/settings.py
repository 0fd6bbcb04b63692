"""The settings of one machine: flags > NOLOCO_* environment > user file > defaults. All peers share the spec."""

from __future__ import annotations

import ipaddress
import os
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, ValidationError, field_validator

from noloco_p2p.errors import SettingsError
from noloco_p2p.spec import describe

DEFAULT_PORT = 31337
LAST_PORT = 65535
MULTIADDR = re.compile(r"/[!-~]+/p2p/[1-9A-HJ-NP-Za-km-z]{40,64}")
RATE = re.compile(r"(\d+(?:\.\d+)?) ?(?:([kmgKMG])bit(?:/s)?|([kMG])B/s)")
MEMORY = re.compile(r"(\d+(?:\.\d+)?) ?([MGTmgt])(i)?B")
RATE_UNITS = {"k": 1e3, "m": 1e6, "g": 1e9}
MIN_RATE_BYTES_PER_S = 250_000  # 2 Mbit/s: below, two swaps and two newcomers cannot each get a chunk in 15 s
ENVIRONMENT_PREFIX = "NOLOCO_"
DEVICE = re.compile(r"auto|cpu|mps|cuda(:\d+)?")
DEVICES = "auto, cpu, cuda:N (NVIDIA, AMD) or mps (Apple)"


def default_state_dir() -> Path:
    """Where identity, checkpoints and logs live: $XDG_STATE_HOME/noloco or ~/.local/state/noloco."""
    return Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "noloco"


def user_file() -> Path:
    """The settings file of this user; it may be missing."""
    return Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config") / "noloco" / "settings.toml"


class PeerSettings(BaseModel):
    """What concerns this machine only. `load` merges the sources; messages name the field and its source."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    state_dir: Path = Field(default_factory=default_state_dir)
    listen: str = f"0.0.0.0:{DEFAULT_PORT}"
    announce: str = ""
    bootstrap: tuple[str, ...] = ()
    device: str = "auto"
    threads: Annotated[int, Field(ge=0)] = 0  # torch threads; 0 = torch decides
    max_steps: Annotated[int, Field(gt=0)] | None = None
    data: dict[str, str] = {}
    gpus: Annotated[int, Field(gt=0)] = 1  # processes that share the model of this peer, one a GPU
    precision: Literal["auto", "bf16", "fp32"] = (
        "auto"  # of forward and backward; auto: bf16 on a GPU that is fast at it
    )
    micro_batch: Annotated[int, Field(ge=0)] = 0  # sequences at a time; 0 = as many as fit
    compile: bool = False
    activation_checkpointing: bool = False
    offload_optimizer: bool = False  # moments in main memory
    models: dict[str, str] = {}  # folders of models and tokenizers, by the names that specs call them
    trackers: tuple[Literal["tensorboard", "wandb"], ...] = ()
    save_every_rounds: Annotated[int, Field(gt=0)] = 10
    keep_checkpoints: Annotated[int, Field(gt=0)] = 2
    max_upload: str = ""  # "" = as fast as the link is
    max_download: str = ""
    run_key: Path | None = None  # of a private run: this peer invites itself and others
    max_loss_rise: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None  # nats a token; None = no check
    max_memory: str = ""  # that this peer may use, such as "8GB"; "" = that of the machine
    stage: Annotated[int, Field(ge=0)] | None = None  # of a run with stages; None = one that is drawn by need
    revive_from: Path | None = None  # checkpoint or export that an empty stage goes on from
    metrics: str = ""  # HOST:PORT of /metrics for Prometheus; empty = none
    _origins: dict[str, str] = PrivateAttr(default_factory=dict)

    @field_validator("listen")
    @classmethod
    def _listen_has_two_ports(cls, listen: str) -> str:
        host, port = split_address(listen)
        if port == LAST_PORT:
            raise ValueError(f"{listen!r} must leave room for libp2p on PORT+1: choose a port below {LAST_PORT}")
        try:
            ipaddress.ip_address(host.strip("[]"))
        except ValueError:
            raise ValueError(
                f"{listen!r} must begin with an IP address of this machine; 0.0.0.0 is all of them"
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
                raise ValueError(f"{address!r} must be an address such as /ip4/203.0.113.5/tcp/31338/p2p/12D3Koo..")
        return bootstrap

    @field_validator("device")
    @classmethod
    def _device_is_known(cls, device: str) -> str:
        if not DEVICE.fullmatch(device):
            raise ValueError(f"{device!r} must be {DEVICES}")
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

    @field_validator("max_memory")
    @classmethod
    def _memory_is_known(cls, memory: str) -> str:
        if memory:
            parse_memory(memory)
        return memory

    @field_validator("state_dir")
    @classmethod
    def _absolute(cls, state_dir: Path) -> Path:
        return state_dir.expanduser().absolute()

    @classmethod
    def load(cls, flags: Mapping[str, Any] | None = None) -> PeerSettings:
        """Merge all sources; a flag that is None was not given. Raises SettingsError."""
        given = {name: value for name, value in (flags or {}).items() if value is not None}
        settings, values, origins = cls(), dict[str, Any](), dict[str, str]()
        for origin, prefix, found in (
            (str(user_file()), f"{user_file()}: ", _from_file(user_file())),
            ("environment", "environment NOLOCO_*: ", _from_environment(os.environ)),
            ("flag", "", given),
        ):
            values |= found
            origins |= dict.fromkeys(found, origin)
            try:
                settings = cls.model_validate(values)  # after each source, so that a message can name it
            except ValidationError as error:
                raise SettingsError(f"{prefix}{describe(error)}") from None
        settings._origins = origins
        return settings

    def origins(self) -> dict[str, str]:
        """Where the value of each setting came from: "flag", "environment", the path of the user file, or "default"."""
        return {name: self._origins.get(name, "default") for name in type(self).model_fields}

    @property
    def upload_bytes_per_s(self) -> float | None:
        """What all swaps and fetches of this peer may send together; None = not limited."""
        return parse_rate(self.max_upload) if self.max_upload else None

    @property
    def download_bytes_per_s(self) -> float | None:
        """The same for what they receive."""
        return parse_rate(self.max_download) if self.max_download else None

    @property
    def max_memory_bytes(self) -> int | None:
        """Bytes of `max_memory`; None = not limited."""
        return parse_memory(self.max_memory) if self.max_memory else None

    @property
    def listen_host(self) -> str:
        return split_address(self.listen)[0]

    @property
    def listen_port(self) -> int:
        """The gRPC port; 0 = any two."""
        return split_address(self.listen)[1]

    @property
    def libp2p_port(self) -> int:
        """The port beside the gRPC port; 0 = any."""
        return self.listen_port + 1 if self.listen_port else 0

    @property
    def announced(self) -> tuple[str, int]:
        """Host and gRPC port of `announce`; "" = not set, port 0 = the one listened on."""
        if _has_port(self.announce):
            return split_address(self.announce)
        return self.announce.strip("[]"), 0


def split_address(address: str) -> tuple[str, int]:
    """HOST:PORT -> (host, port). Raises ValueError in words."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or int(port) > LAST_PORT:
        raise ValueError(f"{address!r} must be HOST:PORT, for example 0.0.0.0:{DEFAULT_PORT}")
    return host, int(port)


def _has_port(address: str) -> bool:
    """HOST:PORT or [IPV6]:PORT; an IPv6 address without brackets has none."""
    return address.count(":") == 1 or "]:" in address


def parse_rate(rate: str) -> float:
    """40mbit, 2.5 Mbit/s, 500kB/s, 5MB/s -> bytes a second (k, M and G are powers of 1000). Raises ValueError."""
    match = RATE.fullmatch(rate.strip())
    if not match:  # "5mb" could be either
        raise ValueError(f"{rate!r} must be a rate in bits or bytes: 2500kbit, 40mbit, 1gbit, 500kB/s or 5MB/s")
    number, bits, num_bytes = match.groups()
    bytes_per_s = float(number) * RATE_UNITS[(bits or num_bytes).lower()] / (8 if bits else 1)
    if bytes_per_s < MIN_RATE_BYTES_PER_S:
        raise ValueError(f"{rate!r} must be at least 2mbit (250kB/s): a slower peer holds its partners up")
    return bytes_per_s


def parse_memory(memory: str) -> int:
    """8GB, 512MB or 7.5GiB -> bytes. Raises ValueError."""
    match = MEMORY.fullmatch(memory.strip())
    if not match:
        raise ValueError(f"{memory!r} must be an amount of memory such as 512MB, 8GB or 7.5GiB")
    number, unit, binary = match.groups()
    power = "MGT".index(unit.upper()) + 2
    return int(float(number) * (1024 if binary else 1000) ** power)


def parse_bindings(pairs: list[str]) -> dict[str, str]:
    """`--data NAME=GLOB` flags -> {name: glob}. Raises SettingsError."""
    return _parse_pairs(pairs, "--data", "NAME=GLOB, for example --data c4='/data/c4/*.json.gz'")


def parse_folders(pairs: list[str]) -> dict[str, str]:
    """`--model NAME=FOLDER` flags -> {name: folder}. Raises SettingsError."""
    folders = _parse_pairs(pairs, "--model", "NAME=FOLDER, for example --model llama=/models/llama")
    for name, folder in folders.items():
        if not Path(folder).expanduser().is_dir():
            raise SettingsError(f"--model {name}={folder}: there is no such folder")
    return folders


def _parse_pairs(pairs: list[str], flag: str, form: str) -> dict[str, str]:
    bindings = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals or not name or not value:
            raise SettingsError(f"{flag} {pair!r} must be {form}")
        bindings[name] = value
    return bindings


def _from_file(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise SettingsError(f"{path}: cannot be read as TOML: {error}") from None


def _from_environment(environment: Mapping[str, str]) -> dict[str, Any]:
    """NOLOCO_LISTEN=... and so on; lists are separated by commas, NOLOCO_DATA and NOLOCO_MODELS hold pairs."""
    values: dict[str, Any] = {}
    for name in PeerSettings.model_fields:
        text = environment.get(ENVIRONMENT_PREFIX + name.upper())
        if text is None:
            continue
        if name in ("bootstrap", "trackers"):
            values[name] = tuple(part for part in text.split(",") if part)
        elif name in ("data", "models"):
            parse = parse_bindings if name == "data" else parse_folders
            values[name] = parse([part for part in text.split(",") if part])
        else:
            values[name] = text
    return values
