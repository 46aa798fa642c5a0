"""An environment without surprises: no job, memory root, account or proxy of the developer's."""

import contextlib
import os
from collections.abc import Iterator

import pytest

from tests.support.private import private_directory, remove_abandoned

_FOREIGN = ("AWS_", "AZURE_", "DCP_MEM_", "GOOGLE_", "SLURM_", "TORCHELASTIC_")
_KEPT_VARIABLES = {
    "DCP_MEM_AZURITE",
    "DCP_MEM_NIXL_TCP",
    "DCP_MEM_NO_NODES",
    "DCP_MEM_NO_RADOSGW",
    "DCP_MEM_TRANSPORT",
}


@contextlib.contextmanager
def hermetic_environment() -> Iterator[None]:
    """Keep the developer's variables from tests and their children; restore them at the end."""
    remove_abandoned()
    with pytest.MonkeyPatch.context() as patch, private_directory("default") as default_root:
        for name in list(os.environ):
            if name.startswith(_FOREIGN) and name not in _KEPT_VARIABLES:
                patch.delenv(name)
        patch.setenv("AWS_EC2_METADATA_DISABLED", "true")
        # Else gcsfs asks for the kind of a bucket by gRPC, which no server of the tests speaks.
        patch.setenv("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")
        patch.setenv("DCP_MEM_ROOT", str(default_root))
        for name in ("NO_PROXY", "no_proxy"):
            patch.setenv(name, "127.0.0.1,localhost")
        # Torch looks up the name of each connection's address. Where no name server answers, that
        # takes ten seconds, and a store's host serves nobody meanwhile.
        patch.setenv("RES_OPTIONS", "timeout:1 attempts:1")
        yield
