from __future__ import annotations

import os
import socket
from collections.abc import Iterator

import pytest

from kvferry.cli import proc
from kvferry.cli.errors import Problem
from kvferry.cli.ports import HOST, free_ports, is_free, require_free


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server((HOST, 0)) as server:
        yield server


def test_free_ports_differ_and_can_be_bound_together() -> None:
    ports = free_ports(8)
    assert len(set(ports)) == 8
    sockets = [socket.create_server((HOST, port)) for port in ports]
    for server in sockets:
        server.close()


def test_a_port_in_use_is_named_with_its_process(listener: socket.socket) -> None:
    port = listener.getsockname()[1]
    assert not is_free(port)
    with pytest.raises(Problem, match=rf"port {port} .* wanted for router, is in use by process {os.getpid()}"):
        require_free(port, "router")


def test_a_port_becomes_free_again(listener: socket.socket) -> None:
    port = listener.getsockname()[1]
    listener.close()
    require_free(port, "router")


def test_listeners_are_only_those_of_the_port(listener: socket.socket) -> None:
    port = listener.getsockname()[1]
    with socket.create_connection((HOST, port)):  # a connection from or to a port does not make a listener
        assert proc.listeners(port) == {os.getpid()}
    assert proc.listeners(free_ports(1)[0]) == set()
