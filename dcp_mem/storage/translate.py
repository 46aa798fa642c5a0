"""Translates what storage SDKs raise: what went wrong, may a retry help, what to do; no secrets."""

from __future__ import annotations

import errno
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from email.utils import parsedate_to_datetime
from time import time
from typing import Any
from urllib.parse import quote, unquote

from dcp_mem.config import installing
from dcp_mem.errors import (
    CredentialsExpired,
    DcpMemError,
    StorageKeyMissing,
    StorageRefused,
    StorageUnavailable,
)

_REFUSED_STATUS = {301, 400, 401, 403, 404, 405, 409, 411, 413, 501, 507}
_REFUSED_ERRNO = {errno.EACCES, errno.EPERM, errno.EROFS}
_HARMLESS = {
    "account_name",
    "connection_verify",
    "endpoint_url",
    "profile",
    "project",
    "region_name",
    "verify",
}
_NO_CONTAINER = (
    "NoSuchBucket",
    "ContainerNotFound",
    "ContainerBeingDeleted",
    "bucket does not exist",
    "container does not exist",
)
_NO_CONTAINER_TEXT = "there is no such bucket or container. Create it, or correct the URL."
_EXPIRED = (
    "ExpiredToken",
    "TokenRefreshRequired",
    "Signature not valid in the specified time frame",
    "Signature expired",
    "Lifetime validation failed",
    "AADSTS700082",
    "session associated with this profile has expired",
    "Token has expired and refresh failed",
    "refreshed credentials are still expired",
)
_EXPIRED_TEXT = (
    "the credentials have expired. Renew them where they come from: the next try takes the new ones"
)
_UNTRUSTED = ("CERTIFICATE_VERIFY_FAILED", "certificate verify failed", "CA certificate bundle")
_UNTRUSTED_TEXT = (
    "The server's certificate isn't trusted here. If its authority is a private one, name the file "
    "of its certificate in $REQUESTS_CA_BUNDLE (for S3 also $AWS_CA_BUNDLE) or $SSL_CERT_FILE, or "
    "in storage_options: client_kwargs={'verify': path} for S3, connection_verify=path for Azure."
)
_TRANSIENT = (
    "BadDigest",
    "ConditionalRequestConflict",
    "Md5Mismatch",
    "ChecksumMismatch",
    "InternalError",
    "InvalidBlockList",
    "OperationAborted",
    "OperationTimedOut",
    "RequestTimeout",
    "ServerBusy",
    "ServiceUnavailable",
    "SlowDown",
)
"""Codes that come with a status of refusal, and yet a retry helps."""
_ADVICE = {
    "QuotaExceeded": "Raise the quota, or delete old checkpoints.",
    "StorageFull": "Free space there, or delete old checkpoints.",
    "InsufficientCapacity": "Free space there, or delete old checkpoints.",
    "RequestTimeTooSkewed": "Set this machine's clock: it differs too much from the storage's.",
    "PermanentRedirect": "Give the bucket's region: client_kwargs={'region_name': ...}.",
    "NotImplemented": "This storage lacks what was asked for. If it is checksums, do without: "
    "config_kwargs={'request_checksum_calculation': 'when_required'}.",
    "AccountIsDisabled": "Enable the storage account again.",
    "InvalidObjectState": "It was archived: bring it back from the archive tier first.",
    "AuthorizationPermissionMismatch": "Give the identity a role on data there, "
    "such as Storage Blob Data Contributor.",
    "BlobImmutableDueToPolicy": "A policy keeps what is there from being changed: "
    "use another root, or change the policy.",
    "DirectoryIsNotEmpty": "It is a directory: delete what is in it first.",
    "OperationNotSupportedOnDirectory": "It is a directory, where an object was expected. "
    "Check the URL.",
    "ResourceTypeMismatch": "There is a directory where an object was expected, "
    "or the other way round. Check the URL.",
    "BlobArchived": "It was archived: bring it back from the archive tier first.",
}
_SIGNATURE = r"(?i)([?&](?:sig|x-amz-signature|x-amz-security-token)=)[^&\s'\")]+"
"""Signatures in a URL: credential objects sign with secrets that aren't in the options."""
_ERROR_CODE = r"ErrorCode:(\w+)|<Code>(\w+)</Code>"
_REFUSED_NAMES = {
    "NoCredentialsError",
    "PartialCredentialsError",
    "CredentialRetrievalError",
    "ClientAuthenticationError",
    "NoSuchBucket",
    "ResourceNotFoundError",
    "InvalidAccessKeyId",
    "ParamValidationError",
    "ProfileNotFound",
    "ConfigParseError",
    "InvalidConfigError",
    "UnknownServiceError",
    "DefaultCredentialsError",
}


class Translator:
    """Turns what a storage's SDK raises into dcp_mem's errors.

    `files_are_objects`: whether FileNotFoundError stands for a missing object, as in fsspec. An SDK
    that speaks HTTP raises it where a file with credentials is missing.
    """

    def __init__(
        self, url: str, storage_options: Mapping[str, Any], *, files_are_objects: bool = True
    ) -> None:
        self.url, self._files_are_objects = url, files_are_objects
        self._secrets = sorted(set(_secrets(storage_options)), key=len, reverse=True)

    @contextmanager
    def errors(self, key: str | None = None) -> Iterator[None]:
        """Translate what is raised inside; where `key` is None, that it is missing is a refusal."""
        try:
            yield
        except DcpMemError:
            raise
        except Exception as error:
            raise self.translated(error, key) from None

    def translated(self, error: Exception, key: str | None = None) -> DcpMemError:
        """Return the error that stands for an SDK's."""
        if says(error, *_NO_CONTAINER):
            return StorageRefused(self.url, _NO_CONTAINER_TEXT)
        if key is not None and self._is_missing(error):
            return StorageKeyMissing(self.url, key)
        text = self._redacted(f"{type(error).__name__}: {_first_line(error)}")[:600].rstrip(". ")
        if says(error, *_UNTRUSTED):
            return StorageRefused(self.url, f"{text}. {_UNTRUSTED_TEXT}")
        if isinstance(error, NotImplementedError):
            return StorageRefused(
                self.url, f"{text}. Its file system lacks what a flush needs: give another URL."
            )
        if isinstance(error, ImportError):
            protocol = self.url.partition("://")[0]
            return StorageRefused(
                self.url, f"{text}: {installing(protocol, 'the package that fsspec needs for it')}"
            )
        if says(error, *_EXPIRED):
            return CredentialsExpired(self.url, f"{_EXPIRED_TEXT} ({text})")
        if not _is_refusal(error):
            return StorageUnavailable(self.url, text, _retry_after(error))
        advice = next((advice for code, advice in _ADVICE.items() if says(error, code)), "")
        advice = advice or "Check the URL, and that the credentials may read and write there."
        return StorageRefused(self.url, f"{text}. {advice}")

    def _is_missing(self, error: Exception) -> bool:
        """Return whether an object is missing, and not what the credentials come from."""
        if isinstance(error, FileNotFoundError):
            return self._files_are_objects
        return status_of(error) == 404 and "ClientAuthenticationError" not in _names(error)

    def _redacted(self, text: str) -> str:
        for secret in self._secrets:
            text = text.replace(secret, "***")
        return re.sub(_SIGNATURE, r"\1***", text)


def says(error: BaseException | None, *words: str) -> bool:
    """Return whether one of the words, as they are, occurs in the error or one that led to it."""
    while error is not None:
        if any(word in str(error) for word in words):
            return True
        error = error.__cause__ or error.__context__
    return False


def status_of(error: BaseException | None) -> int:
    """Return the HTTP status behind an error of botocore, azure-core, aiohttp or gcsfs; 0: none."""
    while error is not None:
        response = getattr(error, "response", None)
        if isinstance(response, dict):
            return int(response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
        for name in ("status_code", "status", "code"):
            value = getattr(error, name, None)
            if isinstance(value, int):
                return value
        error = error.__cause__
    return 0


def _is_refusal(error: Exception) -> bool:
    if says(error, *_TRANSIENT):
        return False
    if _names(error) & _REFUSED_NAMES or isinstance(
        error, (PermissionError, FileNotFoundError, NotImplementedError, ValueError, TypeError)
    ):
        return True
    if isinstance(error, OSError) and error.errno in _REFUSED_ERRNO:
        return True
    return status_of(error) in _REFUSED_STATUS or says(error, "NoSuchBucket", "InvalidAccessKeyId")


def _names(error: Exception) -> set[str]:
    """Return the names of its class and of those that it derives from."""
    return {kind.__name__ for kind in type(error).__mro__}


def _retry_after(error: BaseException | None) -> float:
    """Return the seconds for which the storage asks for no request; 0.0 where it doesn't ask."""
    while error is not None:
        response = getattr(error, "response", None)
        if isinstance(response, dict):
            headers = response.get("ResponseMetadata", {}).get("HTTPHeaders", {})
        else:
            headers = getattr(response, "headers", None) or getattr(error, "headers", None) or {}
        for name, value in dict(headers).items():
            if str(name).lower() == "retry-after":
                return _seconds(str(value))
        error = error.__cause__
    return 0.0


def _seconds(text: str) -> float:
    try:
        return max(0.0, float(text))
    except ValueError:
        pass
    try:
        return max(0.0, parsedate_to_datetime(text).timestamp() - time())
    except (TypeError, ValueError):
        return 0.0


def _first_line(error: Exception) -> str:
    """Return what the error says, without the request ids and the XML of Azure's errors."""
    lines = str(error).strip().splitlines()
    code = re.search(_ERROR_CODE, "\n".join(lines[1:]))
    return (lines[0] if lines else "no reason given") + (f" ({code[1] or code[2]})" if code else "")


def _secrets(value: Any, name: str = "") -> Iterator[str]:
    """Yield every text in the options that may be a secret, as it is and as URLs have it."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            if str(key) not in _HARMLESS:
                yield from _secrets(inner, str(key).lower())
    elif isinstance(value, (list, tuple)):
        for inner in value:
            yield from _secrets(inner, name)
    elif (
        isinstance(value, str)
        and not value.startswith("http")
        and len(value) >= (3 if "pass" in name else 6)
    ):
        yield from {value, unquote(value), quote(value, safe="")}
        for part in value.lstrip("?").replace("&", ";").split(";"):
            name, _, secret = part.partition("=")
            if any(word in name.lower() for word in ("key", "sig", "token")):
                yield from _secrets(secret)
