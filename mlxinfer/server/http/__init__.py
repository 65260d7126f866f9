"""HTTP without any API: bytes, headers, limits, replies, event streams, errors on the wire."""
