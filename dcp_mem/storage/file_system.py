"""The file system that fsspec finds for a URL, opened in the same way for all routes."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

_AUTHORITIES = ("REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "SSL_CERT_FILE")


def file_system_of(url: str, storage_options: Mapping[str, Any]) -> tuple[Any, str]:
    """Return a URL's file system, for nobody else and without cached listings, and its path."""
    # Jobs on directories never need it, and it takes a tenth of the time to import dcp_mem.
    import fsspec.core

    options = {"skip_instance_cache": True, "use_listings_cache": False, **storage_options}
    return fsspec.core.url_to_fs(url, **options)  # type: ignore[no-any-return]


def trusted_authorities(*own_variables: str) -> str | None:
    """Return a file of certificates that the environment names and an SDK wouldn't look at."""
    if any(map(os.environ.get, own_variables)):
        return None
    named = [os.environ.get(variable, "") for variable in _AUTHORITIES]
    return next((path for path in named if os.path.isfile(path)), None)


def refuse_missing_authorities(trusted: Any) -> None:
    """Make sure that a file of certificates is there: SDKs take a missing one for a broken line."""
    if isinstance(trusted, str) and not os.path.exists(trusted):
        raise FileNotFoundError(f"the file of trusted certificates, {trusted}, is missing")
