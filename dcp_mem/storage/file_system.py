"""The file system that fsspec finds for a URL, opened in the same way for all routes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import fsspec.core


def file_system_of(url: str, storage_options: Mapping[str, Any]) -> tuple[Any, str]:
    """Return the file system that fsspec finds for a URL, and the URL's path in it.

    The instance isn't shared, and its listings aren't cached: a cached one goes stale.

    Args:
        url: With a protocol that fsspec knows.
        storage_options: Of the user; they count more than what is set here.

    Raises:
        Exception: What fsspec and the SDKs raise.
    """
    options = {"skip_instance_cache": True, "use_listings_cache": False, **storage_options}
    return fsspec.core.url_to_fs(url, **options)  # type: ignore[no-any-return]
