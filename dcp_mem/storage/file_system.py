"""The file system that fsspec finds for a URL, opened in the same way for all routes."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

_AUTHORITIES = ("REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "SSL_CERT_FILE")


def file_system_of(url: str, storage_options: Mapping[str, Any]) -> tuple[Any, str]:
    """Return the file system that fsspec finds for a URL, and the URL's path in it.

    The instance isn't shared, and its listings aren't cached: a cached one goes stale.

    `storage_options`: of the user; they count more than what is set here. Raises Exception.
    """
    # Jobs on directories never need it, and it takes a tenth of the time to import dcp_mem.
    import fsspec.core

    options = {"skip_instance_cache": True, "use_listings_cache": False, **storage_options}
    return fsspec.core.url_to_fs(url, **options)  # type: ignore[no-any-return]


def trusted_authorities(*own_variables: str) -> str | None:
    """Return the certificates that the environment trusts, where an SDK wouldn't look for them.

    Each SDK looks at a few variables; users set any of them.

    `own_variables`: those that the SDK looks at by itself: they come first. Returns a file; None
    where the SDK finds out by itself.
    """
    if any(map(os.environ.get, own_variables)):
        return None
    named = [os.environ.get(variable, "") for variable in _AUTHORITIES]
    return next((path for path in named if os.path.isfile(path)), None)


def refuse_missing_authorities(trusted: Any) -> None:
    """Make sure that a file of certificates is there: SDKs take a missing one for a broken line.

    Raises FileNotFoundError.
    """
    if isinstance(trusted, str) and not os.path.exists(trusted):
        raise FileNotFoundError(f"the file of trusted certificates, {trusted}, is missing")
