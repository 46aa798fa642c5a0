"""What ranks of a node give each other: strangers are turned away, and who ends is noticed."""

import socket
import threading
from contextlib import closing

import pytest

from dcp_mem.comm.peers import PeerLost
from dcp_mem.loading.peers import Door, Giver

_TOKEN, _SECONDS = b"0123456789abcdef", 20.0


def test_a_stranger_is_turned_away_and_the_neighbour_behind_it_is_served() -> None:
    with closing(Door()) as door:
        welcoming = threading.Thread(
            target=door.welcome, args=(_TOKEN, [1], _SECONDS, lambda: None)
        )
        welcoming.start()
        with socket.socket(socket.AF_UNIX) as stranger:
            stranger.connect(f"\0{door.name}")
            stranger.sendall(b"x" * 20)
            stranger.settimeout(_SECONDS)
            assert stranger.recv(1) == b""
        with closing(Giver(0, door.name, _TOKEN, 1, _SECONDS)) as giver:
            door.give(1, 3, 7, memoryview(b"bytes"))
            assert giver.header() == (3, 7, 5)
            data = memoryview(bytearray(5))
            giver.receive(data)
            assert bytes(data) == b"bytes"
            welcoming.join()
            door.close()
            with pytest.raises(PeerLost, match="the process has ended, or has left the load"):
                giver.header()


def test_who_waits_to_give_is_woken_where_the_load_has_failed() -> None:
    raised: list[type] = []

    def act(wait: str) -> None:
        try:
            door.give(1, 0, 0, memoryview(b"x")) if wait == "give" else door.welcome(
                _TOKEN, [1], _SECONDS, lambda: None
            )
        except (PeerLost, OSError) as error:
            raised.append(type(error))

    door = Door()
    waiting = [threading.Thread(target=act, args=(wait,)) for wait in ("give", "welcome")]
    for thread in waiting:
        thread.start()
    door.close()
    for thread in waiting:
        thread.join(_SECONDS)
    assert len(raised) == 2
