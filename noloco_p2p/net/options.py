"""gRPC options, each with what it is for. Measured effects stand in docs/operations.md."""

from __future__ import annotations

MAX_MESSAGE_BYTES = (1 << 20) + (64 << 10)  # one chunk and its frame

_ALIVE = [
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    # Keepalive alone does not see a frozen process, as its kernel still acknowledges. A ping and its answer stand in
    # line behind data sent before: 1 MB each way at 2 Mbit/s is 8 s, and a time-out of 5 s broke swaps.
    ("grpc.http2.ping_timeout_ms", 15_000),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    # Nothing is ever inflated: a message that is compressed is refused, so that none can grow. Payloads are coded.
    ("grpc.compression_enabled_algorithms_bitset", 1),
]

CLIENT = [
    *_ALIVE,
    ("grpc.use_local_subchannel_pool", 1),  # a swap has a connection of its own
    ("grpc.enable_retries", 0),  # a swap is never silently sent again
    ("grpc.enable_http_proxy", 0),
]

SERVER = [
    *_ALIVE,
    # Without these two a long call with keepalive dies of "too_many_pings".
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 5_000),
    ("grpc.http2.max_ping_strikes", 0),
    # A connection is for one call, which is made at once. So strangers cannot keep one: TLS within 5 s, a call within
    # 8 s, and no further call on it after 10 s; a call that runs goes on (the grace is infinite).
    ("grpc.server_handshake_timeout_ms", 5_000),
    ("grpc.max_connection_idle_ms", 8_000),
    ("grpc.max_connection_age_ms", 10_000),
    ("grpc.max_concurrent_streams", 4),
    ("grpc.max_allowed_incoming_connections", 512),  # never reached: `proxy.py` counts
]
