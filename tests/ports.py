"""Ports of loopback for servers that tests start in processes of their own."""

import socket

_given: set[int] = set()


def free_port() -> int:
    """That nobody listened on a moment ago, and that this process was not given before."""
    while True:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port: int = probe.getsockname()[1]
        if port not in _given:
            _given.add(port)
            return port
