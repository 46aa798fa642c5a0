"""The smallest Ceph that radosgw, its S3 server, runs on: a monitor, an OSD in memory, a user."""

from __future__ import annotations

import secrets
import shutil
import uuid
from dataclasses import dataclass
from typing import TYPE_CHECKING

from benchmarks.harness.scratch import Skipped

if TYPE_CHECKING:
    from pathlib import Path

PROGRAMS = ("ceph-mon", "ceph-osd", "monmaptool", "radosgw", "radosgw-admin")
"""Of Debian's packages ceph-mon, ceph-osd and radosgw."""
MONITOR_PORT = 6789
# Intervals are short for a quick start, and to have memory back soon after a delete.
CONFIGURATION = """
[global]
fsid = {fsid}
monmap = {home}/monmap
public addr = {address}
ms bind ipv6 = false
ms bind msgr2 = false
auth cluster required = none
auth service required = none
auth client required = none
keyring = /dev/null
run dir = {home}
admin socket =
log to file = false
err to stderr = true
[mon]
mon data = {home}/monitor
mon data avail crit = 0
mon allow pool size one = true
mon max pg per osd = 2000
paxos propose interval = 0.02
paxos min wait = 0.01
osd pool default size = 1
osd pool default min size = 1
osd pool default pg num = 1
osd pool default pgp num = 1
osd pool default pg autoscale mode = off
osd crush chooseleaf type = 0
[osd]
osd data = {home}/osd
osd journal =
osd objectstore = memstore
memstore device bytes = 2147483648
osd class load list = *
osd class default list = *
[client]
objecter tick interval = 0.2
rgw enable usage log = false
rgw gc obj min wait = 1
rgw gc processor period = 1
"""


@dataclass(frozen=True, slots=True)
class Ceph:
    """The commands that make and start it."""

    home: Path
    fsid: str
    address: str

    @classmethod
    def prepared(cls, home: Path) -> Ceph:
        """Configure a new Ceph in an empty directory.

        Raises:
            Skipped: A program of Ceph is missing.
        """
        if missing := [program for program in PROGRAMS if shutil.which(program) is None]:
            raise Skipped(f"{', '.join(missing)} of Ceph missing")
        # A loopback address of its own leaves all ports to it.
        address = ".".join(["127", *(str(1 + secrets.randbelow(254)) for _ in range(3))])
        ceph = cls(home, str(uuid.uuid4()), address)
        for directory in ("monitor", "osd"):
            (home / directory).mkdir()
        text = CONFIGURATION.format(fsid=ceph.fsid, home=home, address=address)
        (home / "ceph.conf").write_text(text)
        return ceph

    def make_monitor(self) -> list[list[str]]:
        at = f"[v1:{self.address}:{MONITOR_PORT}]"
        options = ("--create", "--fsid", self.fsid, "--addv", "a", at, f"{self.home}/monmap")
        return [["monmaptool", *options], [*self.monitor(), "--mkfs"]]

    def monitor(self) -> list[str]:
        return self._command("ceph-mon", "-i", "a", "-f")

    def osd(self) -> list[str]:
        return self._command("ceph-osd", "-i", "0", "-f")

    def gateway(self, port: int) -> list[str]:
        frontend = f"beast endpoint=127.0.0.1:{port}"
        return self._command("radosgw", "-n", "client.rgw.a", "-f", "--rgw-frontends", frontend)

    def make_user(self, key: str, secret: str) -> list[str]:
        names = ("user", "create", "--uid", "bench", "--display-name", "bench")
        keys = ("--access-key", key, "--secret-key", secret)
        return self._command("radosgw-admin", "-n", "client.rgw.a", *names, *keys)

    def _command(self, program: str, *arguments: str) -> list[str]:
        # A program that asks the monitor for settings forgets the fsid for a moment, and may fail.
        return [program, "-c", f"{self.home}/ceph.conf", "--no-mon-config", *arguments]
