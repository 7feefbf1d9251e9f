"""Tests take their ports from one place, and are given each only once."""

import re
import socket
from pathlib import Path

from tests.ports import free_port

TESTS = Path(__file__).parents[1]
# A port that is read from a socket of its own, rather than from the server that listens on it.
_OWN_HELPER = re.compile(r"def \w*free_port|port\b.* = probe\.getsockname")


def test_a_port_is_free_and_given_once() -> None:
    ports = [free_port() for _ in range(50)]
    assert len(set(ports)) == len(ports)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", ports[0]))


def test_there_is_one_way_to_a_free_port() -> None:
    found = [
        str(path.relative_to(TESTS))
        for path in TESTS.rglob("*.py")
        if path != Path(__file__) and _OWN_HELPER.search(path.read_text(encoding="utf-8"))
    ]
    assert found == ["ports.py"]
