"""A channel of several lines: connections beside each other, where one can't fill the card.

One thread moves the bytes of a connection, at either end. A message goes over one line. Both ranks
choose it by the lengths of the messages before, which both know.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from dcp_mem.comm.collectives import Channel, PendingMessage


class LinedChannel:
    """One rank's end of a channel of several lines."""

    def __init__(self, lines: Sequence[Channel]) -> None:
        """Put lines together.

        `lines`: in the same order on both ranks, and new; closed with this channel.
        """
        self._lines = lines
        self._sent, self._received = _Turns(len(lines)), _Turns(len(lines))

    def send(self, data: Any) -> PendingMessage:
        """Begin to send the bytes of a buffer.

        `data`: a buffer, left alone until the message is sent.
        """
        return _LineMessage(self, self._lines[self._sent.next(len(data))].send(data))

    def receive(self, data: Any) -> PendingMessage:
        """Begin to receive bytes into a buffer."""
        return _LineMessage(self, self._lines[self._received.next(len(data))].receive(data))

    @contextmanager
    def registered(self, memory: Any) -> Iterator[None]:
        """Make memory known to all lines, for the length of a context."""
        with ExitStack() as stack:
            for line in self._lines:
                stack.enter_context(line.registered(memory))
            yield

    def close(self) -> None:
        """Close all lines."""
        for line in self._lines:
            line.close()


class _Turns:
    """Choose a line for each message: the one that has been given the fewest bytes."""

    def __init__(self, count: int) -> None:
        self._nbytes = [0] * count

    def next(self, nbytes: int) -> int:
        line = min(range(len(self._nbytes)), key=self._nbytes.__getitem__)
        self._nbytes[line] += nbytes
        return line


class _LineMessage:
    """A message of one line. Where it fails, all lines are closed: the channel has failed."""

    def __init__(self, channel: LinedChannel, message: PendingMessage) -> None:
        self._channel, self._message = channel, message

    def wait(self) -> None:
        try:
            self._message.wait()
        except Exception:
            self._channel.close()
            raise
