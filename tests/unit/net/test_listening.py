"""The Unix sockets behind the public port."""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path

import pytest

from noloco_p2p.control import fits_socket
from noloco_p2p.net.proxy import Proxy


def test_a_long_path_of_the_temporary_folder_is_no_obstacle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Batch systems set TMPDIR to a folder of the job."""
    folder = tmp_path / ("x" * 100)
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    proxy = Proxy(tls=None)
    proxy.listen("127.0.0.1", 0)
    assert fits_socket(proxy.behind.with_name("1234567890"))
    asyncio.run(proxy.close())
    assert not proxy.behind.parent.exists()
