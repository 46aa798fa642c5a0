"""Says for whom a call waits, and finds ranks that can't meet because their roots differ.

A rank that waits for a while notes in the store where it waits, all its threads in one note. So
the others can tell a rank that isn't there from one that waits for somebody else itself, or under
another root.
"""

from __future__ import annotations

import hashlib
import json
import threading
import time
from collections.abc import Sequence
from contextlib import suppress

from dcp_mem.comm.timed_store import TimedStore
from dcp_mem.common.log import log
from dcp_mem.config import Purpose, wait_warning
from dcp_mem.errors import ConfigError

_METHODS = {"save": "save()", "load": "load() or restore()"}
_NOTE_SHARE = 1 / 6
"""Of the time until the first line, after which a rank notes that it waits."""
_NOTE_SECONDS = 5.0
"""The longest that taking a note back may take: the store may be gone."""
_noted: dict[str, list[tuple[str, ...]]] = {}  # by key, where threads of this process wait
_noting = threading.Lock()


class Waits:
    """One rank's waits in calls of one purpose; one at a time."""

    def __init__(
        self, purpose: Purpose | str, rank: int, members: Sequence[int], store: TimedStore, run: str
    ) -> None:
        purpose = purpose if isinstance(purpose, Purpose) else Purpose(purpose)
        facts = repr((purpose.verb, run, list(members)))
        self._board = f"dcp_mem/waits/{hashlib.sha256(facts.encode()).hexdigest()[:16]}"
        self._purpose, self._rank, self._members, self._store = purpose, rank, members, store
        self._pause, self._method, self._call = wait_warning(), "", ""
        self._began = self._next = 0.0
        self._is_first = self._is_noted = False

    def enter(self, call: str, method: str) -> None:
        """Begin a call of a method; "" for what the purpose is for."""
        # Without a name, a wait of any length is no news.
        self._method = method or _METHODS.get(self._purpose.verb, "")
        self._call, self._is_first = call, True

    def begin(self) -> None:
        """Begin an exchange."""
        self._began = time.monotonic()
        self._next = self._began + self._pause

    def look(self, rank: int, *, can_differ: bool) -> None:
        """Called now and then while an exchange waits for a rank.

        `can_differ`: whether the two have never met. Raises ConfigError.
        """
        now = time.monotonic()
        waited = now - self._began
        if not self._method or waited < self._pause * _NOTE_SHARE:
            return
        with suppress(RuntimeError):  # the store is gone, or silent: the call ends by that
            if not self._is_noted:
                self._note()
            if now < self._next:
                return
            self._next = now + waited  # the next line after twice the time
            where, call = self._where(rank)
            if where is not None and where != self._purpose and can_differ:
                self._take_back()  # the note stays: the other rank has to read it too
                raise self._different(rank, where)
            if where != self._purpose or call != self._call:  # else it waits itself
                self._say(self._members[rank], waited)

    def end(self) -> None:
        """End the exchange, whether its ranks have all come or not."""
        self._is_first = False
        if self._is_noted:
            self._take_back()
            with suppress(RuntimeError):
                self._write(_NOTE_SECONDS)

    def _note(self) -> None:
        with _noting:
            _noted.setdefault(self._key(self._rank), []).append((*self._purpose, self._call))
        self._is_noted = True
        self._write()

    def _take_back(self) -> None:
        with _noting:
            _noted[self._key(self._rank)].remove((*self._purpose, self._call))
        self._is_noted = False

    def _write(self, seconds: float | None = None) -> None:
        key = self._key(self._rank)
        with _noting:  # the last one to write has what all have noted
            self._store.set(key, json.dumps(_noted[key]), seconds)

    def _key(self, rank: int) -> str:
        return f"{self._board}/{rank}"

    def _where(self, rank: int) -> tuple[Purpose | None, str]:
        """Return where a rank waits, and in which call: here, if it does; None where nowhere."""
        if not self._store.check(self._key(rank)):
            return None, ""
        try:
            notes = [tuple(map(str, one)) for one in json.loads(self._store.get(self._key(rank)))]
            found = [(Purpose(*purpose), call) for *purpose, call in notes]
        except (ValueError, TypeError):
            return None, ""
        here = self._purpose, self._call
        found.sort(key=lambda one: (one != here, one[0] != self._purpose))
        return found[0] if found else (None, "")

    def _say(self, rank: int, waited: float) -> None:
        if self._is_first:
            text = "waiting for %.0f s: rank %d hasn't called %s; call it on all ranks"
            log.warning(text, waited, rank, self._method)
        else:
            text = "waiting for %.0f s: rank %d is in %s too, but not as far (slow, or stopped?)"
            log.warning(text, waited, rank, self._method)

    def _different(self, rank: int, where: Purpose) -> ConfigError:
        found = sorted([(self._members[self._rank], self._purpose), (self._members[rank], where)])
        named = ", ".join(f"rank {one} has {at.root or f'job {at.job}'}" for one, at in found)
        return ConfigError(
            f"the ranks wait for each other under different roots: {named} (is a time or a rank in "
            f"the path?). Give all ranks the same one, such as rank 0's, broadcast"
        )
