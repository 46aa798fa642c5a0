"""The smallest Ceph for radosgw, as commands: a monitor, an OSD in memory and a user."""

import secrets
import uuid
from dataclasses import dataclass
from pathlib import Path

PROGRAMS = ("ceph-mon", "ceph-osd", "monmaptool", "radosgw", "radosgw-admin")
"""What has to be installed: Debian's ceph-mon, ceph-osd and radosgw."""

_MONITOR_PORT = 6789

# The intervals are shortened for a quick start (1 s instead of 11 s), and to have memory back soon
# after a delete.
_CONFIGURATION = """
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
memstore device bytes = {memory_bytes}
osd class load list = *
osd class default list = *

[client]
objecter tick interval = 0.2
rgw enable usage log = false
rgw gc obj min wait = 1
rgw gc processor period = 1
rgw multipart min part size = {least_part}
"""
_MEMORY_BYTES = 2 << 30


@dataclass(frozen=True, slots=True)
class Cluster:
    """The commands, in the order in which they have to be run."""

    home: Path
    fsid: str
    address: str

    def make_monmap(self) -> list[str]:
        monitor = f"[v1:{self.address}:{_MONITOR_PORT}]"
        return [
            "monmaptool",
            "--create",
            "--fsid",
            self.fsid,
            "--addv",
            "a",
            monitor,
            f"{self.home}/monmap",
        ]

    def make_monitor(self) -> list[str]:
        return [*self.monitor(), "--mkfs"]

    def monitor(self) -> list[str]:
        return self._command("ceph-mon", "-i", "a", "-f")

    def make_osd(self) -> list[str]:
        return [*self.osd(), "--mkfs"]

    def osd(self) -> list[str]:
        return self._command("ceph-osd", "-i", "0", "-f")

    def gateway(self, port: int) -> list[str]:
        frontend = f"beast endpoint=127.0.0.1:{port}"
        return self._command("radosgw", "-n", "client.rgw.a", "-f", "--rgw-frontends", frontend)

    def make_user(self, key: str, secret: str) -> list[str]:
        names = ("--uid", "test", "--display-name", "test")
        keys = ("--access-key", key, "--secret-key", secret)
        return self._command("radosgw-admin", "-n", "client.rgw.a", "user", "create", *names, *keys)

    def _command(self, program: str, *arguments: str) -> list[str]:
        # Who asks the monitor for settings forgets the monmap's fsid for a moment, and fails in it,
        # as chance has it.
        return [program, "-c", f"{self.home}/ceph.conf", "--no-mon-config", *arguments]


def prepared(home: Path, least_part: int) -> Cluster:
    """A new cluster, configured in an empty directory of its own.

    least_part: bytes that all parts but the last need.
    """
    # A loopback address that nobody else has leaves the ports to it.
    address = ".".join(["127", *(str(1 + secrets.randbelow(254)) for _ in range(3))])
    cluster = Cluster(home, str(uuid.uuid4()), address)
    for directory in ("monitor", "osd"):
        (home / directory).mkdir()
    settings = {
        "fsid": cluster.fsid,
        "home": home,
        "address": address,
        "memory_bytes": _MEMORY_BYTES,
        "least_part": least_part,
    }
    (home / "ceph.conf").write_text(_CONFIGURATION.format(**settings))
    return cluster
