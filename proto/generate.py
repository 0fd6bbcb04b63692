"""Regenerate noloco_p2p/net/wire/v1 from peer.proto, or check with --check whether it is up to date.

    python proto/generate.py [--check]

The generator is deliberately older than the runtime, because its code works with every protobuf from 5.29 to 7. It
needs a different version of protobuf than the package, so it has its own environment (.proto-venv), which is created on
first use.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "proto" / "noloco_p2p" / "wire" / "v1" / "peer.proto"
TARGET = ROOT / "noloco_p2p" / "net" / "wire" / "v1"
ENVIRONMENT = ROOT / ".proto-venv"
GENERATOR = "grpcio-tools==1.71.2"
FILES = ("peer_pb2.py", "peer_pb2.pyi")


def generator_python() -> Path:
    """Return the interpreter of the generator's own environment. The environment is created if it does not exist."""
    python = ENVIRONMENT / "bin" / "python"
    if not python.exists():
        venv.create(ENVIRONMENT, with_pip=True)
    missing = subprocess.run([python, "-c", "import grpc_tools"], capture_output=True, check=False).returncode
    if missing:
        subprocess.run([python, "-m", "pip", "install", "--quiet", GENERATOR, "setuptools<81"], check=True)
    return python


def generate(folder: Path) -> None:
    subprocess.run(
        [
            *(str(generator_python()), "-m", "grpc_tools.protoc", f"-I{SOURCE.parent}"),
            *(f"--python_out={folder}", f"--pyi_out={folder}", SOURCE.name),
        ],
        check=True,
    )


def main() -> int:
    if "--check" not in sys.argv[1:]:
        generate(TARGET)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        generate(Path(folder))
        stale = [name for name in FILES if (Path(folder) / name).read_text() != (TARGET / name).read_text()]
    for name in stale:
        print(f"{TARGET / name} is not what peer.proto says: run python proto/generate.py")
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main())
