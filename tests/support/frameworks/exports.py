"""What tests of exports hand to the process that makes them: functions that it can import."""

import os
import time
from collections.abc import Callable

GATE = "DCP_MEM_TEST_GATE"
"""Variable with the path of a file that `once_open` waits for."""
_PAUSE_SECONDS = 0.02


def shouted(name: str) -> str | None:
    """A name in capitals; leaves out what is called "secret"."""
    return None if name.endswith("secret") else name.upper()


def once_open(name: str) -> str:
    """The name as it is, once the gate's file is there; leaves another one."""
    while not os.path.exists(os.environ[GATE]):
        time.sleep(_PAUSE_SECONDS)
    with open(f"{os.environ[GATE]}.passed", "w"):
        return name


def failing(name: str) -> str:
    """Raises."""
    raise RuntimeError(f"no name for {name}")


class Names:
    """Has functions of names."""

    @staticmethod
    def kept(name: str) -> str:
        return name

    def of_object(self, name: str) -> str:
        return name


def made_within() -> Callable[[str], str]:
    """A function that no other process can import."""

    def within(name: str) -> str:
        return name

    return within
