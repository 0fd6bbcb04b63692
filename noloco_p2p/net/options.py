"""Define the gRPC options, each with its reason."""

from __future__ import annotations

MAX_MESSAGE_BYTES = (1 << 20) + (64 << 10)  # one chunk and its frame

_ALIVE = [
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    # Keepalive alone does not notice a frozen process, because its kernel still acknowledges data. A ping and its
    # answer wait behind data that was sent before. With 1 MB in each direction at 2 Mbit/s, they take 8 s, and a
    # timeout of 5 s broke swaps.
    ("grpc.http2.ping_timeout_ms", 15_000),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    # Compressed messages are refused, so that none can grow when it is decompressed. Payloads are already encoded.
    ("grpc.compression_enabled_algorithms_bitset", 1),
]

CLIENT = [
    *_ALIVE,
    ("grpc.use_local_subchannel_pool", 1),  # a swap has its own connection
    ("grpc.enable_retries", 0),  # a swap is never silently repeated
    ("grpc.enable_http_proxy", 0),
]

SERVER = [
    *_ALIVE,
    # Without these two options, a long call with keepalive ends with "too_many_pings".
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 5_000),
    ("grpc.http2.max_ping_strikes", 0),
    # A connection serves one call, which is made at once. To prevent strangers from holding connections, the handshake
    # of HTTP/2 must end within 5 s, and a call must begin within 8 s. After 10 s, no further call is accepted, but a
    # running one continues.
    ("grpc.server_handshake_timeout_ms", 5_000),
    ("grpc.max_connection_idle_ms", 8_000),
    ("grpc.max_connection_age_ms", 10_000),
    ("grpc.max_concurrent_streams", 4),
    # No table of headers, in which a few bytes could repeat a long header (`proxy.py`).
    ("grpc.http2.hpack_table_size.decoder", 0),
    ("grpc.max_allowed_incoming_connections", 512),  # never reached, because `proxy.py` limits connections
]
