"""Links: whole messages, in order, without blocking, and with a detected end."""

import os
import socket

import msgspec
import pytest
from corun.cpu_workers.ipc import IpcError, Link, link_pair
from support.residue import open_descriptors


class Note(msgspec.Struct, frozen=True, tag=True, array_like=True):
    number: int
    text: str = ""


class Other(msgspec.Struct, frozen=True, tag=True, array_like=True):
    pass


def links() -> tuple[Link[Note | Other], Link[Note | Other]]:
    left, right = link_pair()
    return Link(left, Note | Other), Link(right, Note | Other)


def test_messages_arrive_whole_and_in_order() -> None:
    left, right = links()
    for number in range(20):
        left.send(Note(number, "x" * 1000))
    left.send(Other())
    assert right.receive() == [*(Note(number, "x" * 1000) for number in range(20)), Other()]
    assert right.receive() == []
    assert not right.at_end
    left.close()
    assert right.receive() == []
    assert right.at_end
    right.close()


def test_what_a_slow_peer_does_not_take_is_kept() -> None:
    left, right = links()
    for number in range(2000):
        left.send(Note(number, "x" * 1000))
    received: list[Note | Other] = []
    while len(received) < 2000:
        new = right.receive()
        assert new
        received += new
        left.flush()
    assert received == [Note(number, "x" * 1000) for number in range(2000)]
    left.close()
    right.close()


def test_sending_to_a_peer_that_is_gone_ends_the_link() -> None:
    left, right = links()
    right.close()
    left.send(Note(1))
    assert left.at_end
    left.send(Note(2))
    left.close()
    left.close()


def test_a_broken_message_is_an_error() -> None:
    ours, theirs = link_pair()
    link: Link[Note] = Link(ours, Note)
    theirs.send(b"\xc1")
    with pytest.raises(IpcError, match="cannot be decoded"):
        link.receive()
    link.close()
    theirs.close()


def test_waiting_for_one_message_leaves_the_next() -> None:
    left, right = links()
    assert right.wait_one(0.01) is None
    left.send(Note(1))
    left.send(Note(2))
    assert right.wait_one(10) == Note(1)
    assert right.wait_one(10) == Note(2)
    left.send(Note(3))
    left.close()
    assert right.wait_one(10) == Note(3)
    assert right.wait_one(10) is None
    right.close()


def test_descriptors_go_with_messages() -> None:
    left, right = links()
    before = open_descriptors()
    reader, writer = os.pipe()
    left.send(Note(1), writer)
    left.send(Note(2), writer)
    left.send(Note(3))
    os.close(writer)
    (first, descriptor), (_, second), (third, none) = right.receive_with_descriptors()
    assert (first, third, none) == (Note(1), Note(3), None)
    assert descriptor is not None and second is not None
    os.close(second)
    os.write(descriptor, b"x")
    assert os.read(reader, 1) == b"x"
    os.close(descriptor)
    left.send(Note(4), reader)
    assert right.receive() == [Note(4)]  # unexpected descriptors are closed
    left.send(Note(5), reader)
    os.close(reader)
    right.close()
    left.send(Note(6), 0)
    left.close()
    assert not open_descriptors() - before


def test_ends_are_not_inherited() -> None:
    ours, theirs = link_pair()
    assert not ours.get_inheritable()
    assert ours.type == socket.SOCK_SEQPACKET
    ours.close()
    theirs.close()
