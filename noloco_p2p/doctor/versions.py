"""What is installed. Looked at first, as the other checks import it."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version

from noloco_p2p._version import __version__
from noloco_p2p.doctor.check import Check

PACKAGES = ("torch", "hivemind", "grpcio", "transformers")


def versions() -> Check:
    found = {name: _version(name) for name in PACKAGES}
    told = ", ".join(f"{name} {number or 'missing'}" for name, number in found.items())
    told = f"noloco_p2p {__version__}, Python {platform.python_version()}, {told}"
    missing = [name for name, number in found.items() if number is None]
    if missing:
        return Check("versions", "failed", told, f"install what is missing: pip install {' '.join(missing)}")
    return Check("versions", "ok", told)


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
