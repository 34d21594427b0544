"""gRPC channel and server settings that both ends must agree on, as measured: a frozen peer is noticed within two
seconds only when all three ping settings are set, and the server must permit that many pings."""

from __future__ import annotations

from .params import GrpcParams

INTERNAL_MESSAGE_BYTES = 64 << 20

# one worker or controller per channel: its reconnect back-off must not be shared with a later channel to that address
CLIENT_OPTIONS: list[tuple[str, int]] = [
    ("grpc.keepalive_time_ms", 1000),
    ("grpc.keepalive_timeout_ms", 1000),
    ("grpc.http2.ping_timeout_ms", 1000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
    ("grpc.max_receive_message_length", INTERNAL_MESSAGE_BYTES),
    ("grpc.max_send_message_length", INTERNAL_MESSAGE_BYTES),
]


def public_options(params: GrpcParams, message_bytes: int, *, shared: bool = False) -> list[tuple[str, int]]:
    """For the port that clients connect to; message_bytes: the largest message that is taken; shared: with other
    routers."""
    options = [
        ("grpc.so_reuseport", int(shared)),
        ("grpc.keepalive_time_ms", _ms(params.keepalive_s)),
        ("grpc.keepalive_timeout_ms", _ms(params.keepalive_timeout_s)),
        ("grpc.http2.ping_timeout_ms", _ms(params.keepalive_timeout_s)),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.min_ping_interval_without_data_ms", _ms(params.min_ping_interval_s)),
        ("grpc.max_concurrent_streams", params.max_streams),
        ("grpc.max_receive_message_length", message_bytes),
        ("grpc.max_send_message_length", -1),  # an answer is as large as its request made it
        ("grpc.enable_channelz", int(params.channelz)),
    ]
    if params.max_connection_age_s is not None:
        options.append(("grpc.max_connection_age_ms", _ms(params.max_connection_age_s)))
    return options


def _ms(seconds: float) -> int:
    return max(1, round(1000 * seconds))


def server_options(message_bytes: int, *, shared: bool = False) -> list[tuple[str, int]]:
    """For a server that our clients ping once a second; a taken port is an error instead of a silent share, unless
    `shared` says otherwise."""
    return [
        ("grpc.so_reuseport", int(shared)),
        ("grpc.http2.min_ping_interval_without_data_ms", 500),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.max_receive_message_length", message_bytes),
        ("grpc.max_send_message_length", message_bytes),
    ]
