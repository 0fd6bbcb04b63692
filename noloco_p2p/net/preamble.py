"""Let no headers of a caller pass before it has acknowledged the settings of the server.

HTTP/2 compresses headers. With HPACK (RFC 7541), one byte can repeat a header of 4 KB that was sent before. A server
can forbid this table, and limit the size of all headers together, but gRPC applies these settings only once the caller
has acknowledged them. Until then, it keeps up to 16 MiB of headers for 14 KB that it has received, and builds a message
about them that is equally long. gRPC's own callers acknowledge the settings before they send their first headers.
"""

from __future__ import annotations

PREFACE_BYTES, FRAME_HEADER_BYTES = 24, 9
SETTINGS, ACK = 4, 1
HEADERS, PUSH_PROMISE, CONTINUATION = 1, 5, 9  # the frames that contain headers


class Preamble:
    """The frames of a caller (RFC 9113) up to its acknowledgement."""

    def __init__(self) -> None:
        self._num_skipped = PREFACE_BYTES  # the bytes until the next frame begins
        self._header = b""  # of the frame that begins
        self._is_over = False

    def admits(self, data: memoryview) -> bool:
        """Return whether the caller may send this data next."""
        while data and not self._is_over:
            if self._num_skipped:
                num_bytes = min(self._num_skipped, len(data))
                self._num_skipped -= num_bytes
            else:
                num_bytes = FRAME_HEADER_BYTES - len(self._header)
                self._header += data[:num_bytes]
            data = data[num_bytes:]
            if len(self._header) == FRAME_HEADER_BYTES:
                kind, flags = self._header[3:5]
                if kind in (HEADERS, PUSH_PROMISE, CONTINUATION):
                    return False
                self._is_over = kind == SETTINGS and bool(flags & ACK)
                self._num_skipped, self._header = int.from_bytes(self._header[:3]), b""
        return True
