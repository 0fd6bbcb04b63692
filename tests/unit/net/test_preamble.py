"""Headers pass only after the caller has acknowledged the settings, however its bytes arrive."""

from __future__ import annotations

import pytest
from harness.header_bombs import ACK, CONTINUATION, HEADERS, PREFACE, SETTINGS, frame

from noloco_p2p.net.proxy import PUSH_PROMISE, Preamble

DATA, PING, WINDOW_UPDATE = 0, 6, 8
OWN_SETTINGS = frame(SETTINGS, bytes(6))
ACKNOWLEDGED = frame(SETTINGS, flags=ACK)
CALL = frame(HEADERS, bytes(range(200)), stream=1) + frame(CONTINUATION, bytes(20), stream=1)


def admits(data: bytes, *, piece_bytes: int) -> bool:
    preamble = Preamble()
    pieces = (data[start : start + piece_bytes] for start in range(0, len(data), piece_bytes))
    return all(preamble.admits(memoryview(piece)) for piece in pieces)


@pytest.mark.parametrize("piece_bytes", [1, 7, 9, 33, 1000])
@pytest.mark.parametrize("between", [b"", frame(PING, bytes(8)), frame(WINDOW_UPDATE, bytes(4)), frame(99, CALL)])
def test_headers_pass_after_the_acknowledgement_and_not_before(piece_bytes: int, between: bytes) -> None:
    begin = PREFACE + OWN_SETTINGS + between
    assert admits(begin + ACKNOWLEDGED + CALL, piece_bytes=piece_bytes)
    assert not admits(begin + CALL + ACKNOWLEDGED, piece_bytes=piece_bytes)


@pytest.mark.parametrize("kind", [HEADERS, PUSH_PROMISE, CONTINUATION])
def test_no_frame_that_contains_headers_passes(kind: int) -> None:
    assert not admits(PREFACE + OWN_SETTINGS + frame(kind, bytes(20), stream=1), piece_bytes=1000)


def test_only_an_acknowledgement_of_settings_counts() -> None:
    for wrong in (frame(PING, bytes(8), flags=ACK), frame(SETTINGS), frame(DATA, ACKNOWLEDGED, stream=1)):
        assert not admits(PREFACE + wrong + CALL, piece_bytes=1000)
