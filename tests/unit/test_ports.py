"""Ports for servers that come back to the same address."""

import socket
from pathlib import Path

from bsfg.testing.ports import FreePorts


def test_none_is_given_twice_nor_by_two_parts_nor_by_the_system() -> None:
    """A client's connection, which takes any port, can never sit on one that a server wants back."""
    first_of_system = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    given = list[int]()
    for part in range(3):
        ports = FreePorts()
        ports.share(part, 3)
        given += [ports.next() for _ in range(200)]
    assert len(set(given)) == 600
    assert 1024 < min(given) <= max(given) < first_of_system


def test_one_in_use_is_passed_over() -> None:
    """Whatever listens somewhere in the range is left alone, and the round goes on behind its end."""
    ports = FreePorts()
    ports.share(0, 5_000)
    all_of_them = {ports.next() for _ in range(100)}
    with socket.create_server(("127.0.0.1", min(all_of_them))):
        assert min(all_of_them) not in {ports.next() for _ in range(100)}
