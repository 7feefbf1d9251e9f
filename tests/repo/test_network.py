"""Tests reach this machine and no other: neither this process nor the programs they start."""

import socket
import subprocess
import sys

import pytest
from pytest_socket import SocketConnectBlockedError

ELSEWHERE = ("192.0.2.1", 443)  # reserved for documentation (RFC 5737): nobody answers there


@pytest.mark.filterwarnings("ignore:A test tried to use socket")
def test_a_connection_to_another_machine_is_refused_before_it_is_tried() -> None:
    with socket.socket() as connection, pytest.raises(SocketConnectBlockedError):
        connection.connect(ELSEWHERE)


def test_loopback_is_reached() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket() as connection:
        connection.connect(server.getsockname())


@pytest.mark.thorough  # loads transformers
def test_a_program_that_a_test_starts_asks_no_hub() -> None:
    asked = "from transformers import AutoConfig; AutoConfig.from_pretrained('tandem/is-not-there')"
    done = subprocess.run([sys.executable, "-c", asked], capture_output=True, text=True)
    assert done.returncode == 1
    assert "offline" in done.stderr.lower()
