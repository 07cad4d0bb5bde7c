"""Which connections are too many for a client address."""

import pytest
from corun.runtime.server.connection import IdleConnections, client_of


def test_the_longest_idle_of_the_same_client_is_too_many() -> None:
    idle = IdleConnections[int](2)
    assert [idle.add(one, "a") for one in (1, 2, 3)] == [False, False, True]
    assert [idle.take_surplus("a") for _ in range(2)] == [1, None]
    assert not any(idle.add(one, "b") for one in (4, 5))
    assert idle.take_surplus("b") is None
    idle.discard(2, "a")
    assert not idle.add(6, "a")
    assert idle.add(7, "a")
    assert idle.take_surplus("a") == 3


def test_connections_that_are_used_at_once_are_not_too_many() -> None:
    idle = IdleConnections[int](2)
    assert idle.take_surplus("a") is None
    for one in range(1000):
        idle.add(one, "a")
    for one in range(998):
        idle.discard(one, "a")
    assert idle.take_surplus("a") is None


def test_any_client_with_too_many() -> None:
    idle = IdleConnections[int](2)
    for one in (1, 2, 3, 4):
        idle.add(one, "a")
    idle.add(5, "b")
    assert [idle.take_surplus() for _ in range(3)] == [1, 2, None]
    idle.add(6, "a")
    idle.discard(3, "a")
    assert idle.take_surplus() is None


def test_one_that_is_idle_already_stays_in_its_place() -> None:
    idle = IdleConnections[int](2)
    assert [idle.add(one, "a") for one in (1, 2, 1, 3)] == [False, False, False, True]
    assert idle.take_surplus("a") == 1


def test_zero_is_no_limit() -> None:
    idle = IdleConnections[int](0)
    assert not any(idle.add(one, "a") for one in range(1, 1000))
    idle.discard(1, "a")


def test_what_was_never_idle_can_be_removed() -> None:
    idle = IdleConnections[int](1)
    idle.discard(1, "a")
    idle.add(1, "a")
    idle.discard(1, "a")
    idle.discard(1, "a")


@pytest.mark.parametrize(
    ("host", "client"),
    [
        ("127.0.0.1", "127.0.0.1"),
        ("", ""),
        ("::ffff:10.0.0.1", "10.0.0.1"),
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::/64"),
        ("2001:db8:1:2::9", "2001:db8:1:2::/64"),
        ("fe80::1%eth0", "fe80::/64"),
        ("::1", "::/64"),
    ],
)
def test_clients(host: str, client: str) -> None:
    assert client_of(host) == client
