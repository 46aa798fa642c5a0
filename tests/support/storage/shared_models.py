"""Have all clients of botocore in this process share the files that describe S3's requests.

Every client reads and parses them anew, which takes longer than a small flush. Importing this
module is enough: the tests' process does, and the server that forks processes for tests, which also
reads them beforehand.
"""

import functools
from typing import Any

import botocore.session
from botocore.loaders import JSONFileLoader

_load_file = JSONFileLoader.load_file


@functools.cache
def _read_once(path: str) -> Any:
    return _load_file(JSONFileLoader(), path)


def read_beforehand() -> None:
    """Read what a client of S3 needs. No request is sent."""
    botocore.session.get_session().create_client(
        "s3", region_name="us-east-1", aws_access_key_id="none", aws_secret_access_key="none"
    )


JSONFileLoader.load_file = lambda _, path: _read_once(path)
