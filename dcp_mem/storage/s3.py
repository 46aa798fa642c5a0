"""Storage in S3 and what speaks its protocol: parts sent from memory, ranges read into it."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from botocore.exceptions import ClientError

from dcp_mem.common.log import log
from dcp_mem.common.value_class import value_class
from dcp_mem.errors import CheckpointExists, StorageKeyMissing, StorageUnavailable
from dcp_mem.format.checksums import checksum
from dcp_mem.storage import (
    Copies,
    Entry,
    InParts,
    Source,
    Unfinished,
    Upload,
    part_count,
    part_nbytes,
)
from dcp_mem.storage.file_system import file_system_of
from dcp_mem.storage.s3_client import S3Client, by_s3fs
from dcp_mem.storage.streams import Body, fill
from dcp_mem.storage.translate import Translator, status_of

_MAY_NOT_LIST = {403, 405, 501}
_CHANGED = {404, 409, 412}
"""Answers to a request whose object isn't what it was; 409: another request changes it now."""
_NOT_IMPLEMENTED = {400, 405, 501}
_PROBE = ".dcp_mem/conditions"
_NO_ETAG = '"00000000000000000000000000000000"'
_CANT_COPY = {400, 403, 404, 405, 412, 416, 501}
"""Answers to a request for a copy: the source is gone, is another, or may not be read."""


class S3Storage:
    """A bucket, or a prefix in it, by botocore. Raises NotThisRoute."""

    def __init__(
        self,
        url: str,
        storage_options: Mapping[str, Any],
        opened: Callable[[Any, str], S3Client] = by_s3fs,
    ) -> None:
        self.url = url
        self._translator = Translator(url, storage_options, files_are_objects=False)
        with self._translator.errors():
            fs, path = file_system_of(url, storage_options)
            bucket, root, _ = fs.split_path(path)
            self._client = opened(fs, bucket)
        self._root = root.rstrip("/")
        self._compares: bool | None = None

    def upload(self, key: str, nbytes: int, source: Source | None = None) -> Upload:
        path = self._path(key)
        if part_count(nbytes, part_nbytes(nbytes)) == 1:
            return OnePart(self._client, path, nbytes, self._translator, self._copied_from(source))
        with self._translator.errors():
            begun = self._begun_before(path)
            if begun is None:
                algorithm = self._client.algorithm()
                answer = self._client.call("create_multipart_upload", Key=path, **algorithm)
                begun = answer["UploadId"], {}
        original = self._copied_from(source)
        return Multipart(self._client, path, nbytes, self._translator, original, begun)

    def _copied_from(self, source: Source | None) -> _Original | None:
        if source is None or not source.etag:
            return None
        etag, *parts = source.etag.split(",")
        return _Original(self._path(source.key), etag, tuple(parts))

    def put(self, key: str, data: bytes, *, create: bool = False) -> None:
        condition = {"IfNoneMatch": "*"} if create else {}
        with self._translator.errors():
            try:
                _put(self._client, self._path(key), memoryview(data), checksum(data), **condition)
            except ClientError as error:
                if create and status_of(error) == 412:
                    raise CheckpointExists(key.rpartition("/")[0], self.url) from None
                raise

    def get(self, key: str) -> bytes:
        with self._translator.errors(key):
            body = self._client.call("get_object", Key=self._path(key))["Body"]
            try:
                return bytes(body.read())
            finally:
                body.close()

    def read_into(self, key: str, offset: int, buffers: Sequence[memoryview]) -> int:
        wanted = sum(map(len, buffers))
        if wanted == 0:
            return 0
        with self._translator.errors(key):
            try:
                answer = self._client.call(
                    "get_object", Key=self._path(key), Range=f"bytes={offset}-{offset + wanted - 1}"
                )
            except ClientError as error:
                if status_of(error) == 416:  # the object ends before `offset`
                    return 0
                raise
            body, nbytes = answer["Body"], min(int(answer["ContentLength"]), wanted)
            if _first_byte(answer) != offset:
                body.close()
                raise StorageUnavailable(
                    self.url, f"bytes from {offset} on were asked for, others came ({key})"
                )
            count = fill(getattr(body, "_raw_stream", body), buffers, nbytes)
        if count < nbytes:
            raise StorageUnavailable(
                self.url, f"the answer broke off after {count} of {nbytes} bytes ({key})"
            )
        return count

    def ls(self, prefix: str) -> list[Entry]:
        start = self._below(prefix)
        found: list[Entry] = []
        with self._translator.errors():
            for page in self._client.pages("list_objects_v2", Prefix=start, Delimiter="/"):
                found += [
                    Entry(one["Prefix"][len(start) : -1], 0, True)
                    for one in page.get("CommonPrefixes", ())
                ]
                found += [_entry(one, start) for one in page.get("Contents", ())]
        return [entry for entry in found if entry.name]  # a nameless one marks the directory itself

    def tree(self, most: int) -> list[tuple[str, Entry]] | None:
        start = self._below("")
        found: list[tuple[str, Entry]] = []
        with self._translator.errors():
            for page in self._client.pages("list_objects_v2", Prefix=start):
                for one in page.get("Contents", ()):
                    path, _, name = one["Key"].rpartition("/")
                    if name:
                        found.append((path[len(start) :], _entry(one, f"{path}/" if path else "")))
                if len(found) > most:
                    return None
        return found

    def delete(self, key: str) -> None:
        with self._translator.errors():
            self._client.call("delete_object", Key=self._path(key))

    def has_conditions(self) -> bool:
        if self._compares is None:
            self._compares = self._probe()
        return self._compares

    def _probe(self) -> bool:
        """Return whether a put asks for the object's ETag.

        Some servers put whatever the ETag is. Others (radosgw) refuse the right one as well.
        """
        path = self._path(_PROBE)
        with self._translator.errors():
            etag = self._client.call("put_object", Key=path, Body=b"")["ETag"]
            takes_right, takes_wrong = (
                self._puts(path, condition) for condition in (etag, _NO_ETAG)
            )
            return takes_right and not takes_wrong

    def _puts(self, path: str, etag: str) -> bool:
        """Put nothing over an object that has this ETag; return whether the server has done it."""
        try:
            self._client.call("put_object", Key=path, Body=b"", IfMatch=etag)
        except ClientError as error:
            if status_of(error) in (412, *_NOT_IMPLEMENTED):
                return False
            raise
        return True

    def swap(self, key: str, old: bytes, new: bytes) -> bool:
        path, data, crc32c = self._path(key), memoryview(new), checksum(new)
        return self._if_unchanged(
            key, old, lambda condition: _put(self._client, path, data, crc32c, **condition)
        )

    def remove(self, key: str, old: bytes) -> bool:
        return self._if_unchanged(key, old, partial(self._delete_on, self._path(key)))

    def _delete_on(self, path: str, condition: Mapping[str, str]) -> None:
        try:
            self._client.call("delete_object", Key=path, **condition)
        except ClientError as error:
            if not condition or status_of(error) not in _NOT_IMPLEMENTED:
                raise
            # It compares when it puts, but not when it deletes.
            self._client.call("delete_object", Key=path)

    def _if_unchanged(
        self, key: str, old: bytes, act: Callable[[Mapping[str, str]], object]
    ) -> bool:
        """Act on an object on condition that it is still these bytes; return whether it was."""
        etag = self._etag_of(key, old)
        if etag is None:
            return False
        condition = {"IfMatch": etag} if self.has_conditions() else {}
        with self._translator.errors():
            try:
                act(condition)
            except ClientError as error:
                if condition and status_of(error) in _CHANGED:
                    return False
                raise
        return True

    def _etag_of(self, key: str, data: bytes) -> str | None:
        """Return what a condition names an object by; None where it is gone, or other bytes."""
        try:
            with self._translator.errors(key):
                answer = self._client.call("get_object", Key=self._path(key))
                body = answer["Body"]
                try:
                    return self._client.identity(answer) if bytes(body.read()) == data else None
                finally:
                    body.close()
        except StorageKeyMissing:
            return None

    def unfinished(self, prefix: str) -> list[Unfinished]:
        root = f"{self._root}/" if self._root else ""
        with self._translator.errors():
            return [
                Unfinished(one["Key"][len(root) :], one["Initiated"].timestamp())
                for one in self._uploads(self._below(prefix))
            ]

    def drop_unfinished(self, key: str) -> None:
        path = self._path(key)
        with self._translator.errors():
            for one in self._uploads_of(path):
                _abort(self._client, path, one["UploadId"])

    def _begun_before(self, path: str) -> tuple[str, dict[int, _Part]] | None:
        """Return the newest upload of that very object that can be continued, and its parts."""
        try:
            usable = [one for one in self._uploads_of(path) if self._takes_our_checksums(one)]
            if not usable:
                return None
            upload_id = max(usable, key=lambda one: float(one["Initiated"].timestamp()))["UploadId"]
            return upload_id, _listed_parts(self._client, path, upload_id)
        except ClientError as error:
            if _code(error) == "NoSuchUpload":  # finished or dropped meanwhile
                return None
            # A user who may write may not be allowed to list uploads. Then what was sent before a
            # kill is sent again.
            if status_of(error) in _MAY_NOT_LIST and _code(error) != "NoSuchBucket":
                log.info(
                    "can't look for parts of %s that are in %s already: %s",
                    path,
                    self.url,
                    _code(error),
                )
                return None
            raise

    def _takes_our_checksums(self, upload: Mapping[str, Any]) -> bool:
        """Return whether storage takes this client's parts; if it doesn't say, it does."""
        algorithm = upload.get("ChecksumAlgorithm")
        return algorithm is None or (algorithm == "CRC32C") == self._client.sends_checksums

    def _uploads_of(self, path: str) -> list[Mapping[str, Any]]:
        # A directory bucket lists only what is below a directory.
        prefix = (
            f"{path.rpartition('/')[0]}/".lstrip("/")
            if self._client.bucket.endswith("--x-s3")
            else path
        )
        return [one for one in self._uploads(prefix) if one["Key"] == path]

    def _uploads(self, prefix: str) -> Iterator[Mapping[str, Any]]:
        for page in self._client.pages("list_multipart_uploads", Prefix=prefix):
            yield from page.get("Uploads", ())

    def _path(self, key: str) -> str:
        return "/".join(filter(None, (self._root, key)))

    def _below(self, prefix: str) -> str:
        path = self._path(prefix)
        return f"{path}/" if path else ""


@value_class
class _Original:
    """An object that may be copied from."""

    path: str
    etag: str  # its ETag when it was stored; "" where the store didn't tell
    # ETags of its parts when they were stored: an MD5 of their bytes, unless the store encrypts.
    # For an object of one part its own.
    parts: tuple[str, ...]

    def arguments(self, bucket: str) -> dict[str, Any]:
        """Return what a request for a copy says of the source."""
        condition = {"CopySourceIfMatch": f'"{self.etag}"'} if self.etag else {}
        return {"CopySource": {"Bucket": bucket, "Key": self.path}, **condition}

    def is_copied(self, number: int, crc32c: int, result: Mapping[str, Any]) -> bool:
        """Return whether a copied part is what was stored: by its CRC32C, else by the ETag."""
        if "ChecksumCRC32C" in result:
            return bool(result["ChecksumCRC32C"] == _base64(crc32c))
        is_known = number < len(self.parts) and self.parts[number] != ""
        return is_known and _bare(result["ETag"]) == self.parts[number]


class _S3Upload(InParts):
    """What uploads to S3 have in common; `source` has the same bytes, and may be copied."""

    in_order = False
    verifies_copies = True

    def __init__(
        self,
        client: S3Client,
        path: str,
        nbytes: int,
        translator: Translator,
        source: _Original | None = None,
    ) -> None:
        super().__init__(nbytes)
        self._client, self._path, self._translator = client, path, translator
        self._is_done, self._source = False, source
        self.copies = Copies.NOTHING if source is None else client.copies

    def copy_whole(self) -> bool:
        if self._source is None:
            return False
        result = self._copied_object(self._source)
        if result is not None:
            self._is_done, self._etag = True, _bare(result["ETag"])
        return self._is_done

    def _copied_object(self, source: _Original) -> Mapping[str, Any] | None:
        arguments = {**source.arguments(self._client.bucket), **self._client.algorithm()}
        with self._translator.errors():
            return _copied(self._client, "copy_object", Key=self._path, **arguments)

    def close(self) -> None:
        return


class OnePart(_S3Upload):
    """An upload of an object that has a single part: that is put, as the object."""

    def put_part(self, number: int, data: memoryview, crc32c: int) -> bool:
        if number != 0 or len(data) != self._nbytes:
            raise ValueError(
                f"{self._path} has one part of {self._nbytes} bytes: not {number} of {len(data)}"
            )
        with self._translator.errors():
            answer = _put(self._client, self._path, data, crc32c)
        self._is_done, self._etag = True, _bare(answer.get("ETag", ""))
        return True

    def copy_part(self, number: int, crc32c: int) -> bool:
        if self._source is None:
            return False
        result = self._copied_object(self._source)
        if result is None or not self._source.is_copied(0, crc32c, result):
            return False
        self._is_done, self._etag = True, _bare(result["ETag"])
        return True

    def etag(self) -> str:
        return f"{self._etag},{self._etag}" if self._etag else ""

    def finish(self) -> None:
        if not self._is_done:
            raise ValueError(f"{self._path} has a part that was not put")


@value_class
class _Part:
    """A part as storage has it."""

    etag: str
    nbytes: int
    crc32c: str  # in base64; "" where the storage doesn't tell


class Multipart(_S3Upload):
    """A multipart upload. One cut short can be continued; it costs money until it is dropped.

    Several processes may work on the same one, with the same bytes. Each keeps its own list of
    parts; a process that finds the upload finished by another one is done.

    `begun`: its id, and the parts that storage has.
    """

    def __init__(
        self,
        client: S3Client,
        path: str,
        nbytes: int,
        translator: Translator,
        source: _Original | None,
        begun: tuple[str, dict[int, _Part]],
    ) -> None:
        super().__init__(client, path, nbytes, translator, source)
        self._upload_id, self._found = begun
        self._parts: dict[int, _Part] = {}

    def put_part(self, number: int, data: memoryview, crc32c: int) -> bool:
        found = self._found.get(number)
        if found is not None and _is_whole(found, data, crc32c):
            self._parts[number] = found
            return False
        checksum_of_it = _checksum(self._client, crc32c)
        with self._translator.errors():
            try:
                answer = self._client.call(
                    "upload_part",
                    **self._names(),
                    PartNumber=number + 1,
                    Body=Body(data),
                    **checksum_of_it,
                )
            except ClientError as error:
                self._must_be_finished(error)
                return False
        self._parts[number] = _Part(answer["ETag"], len(data), _base64(crc32c))
        return True

    def copy_part(self, number: int, crc32c: int) -> bool:
        if self._source is None:
            return False
        start, nbytes = self._range(number)
        found = self._found.get(number)
        if found is not None and found.nbytes == nbytes and self._has(found, number, crc32c):
            self._parts[number] = found
            return True
        with self._translator.errors():
            try:
                result = _copied(
                    self._client,
                    "upload_part_copy",
                    **self._names(),
                    PartNumber=number + 1,
                    CopySourceRange=f"bytes={start}-{start + nbytes - 1}",
                    **self._source.arguments(self._client.bucket),
                )
            except ClientError as error:
                self._must_be_finished(error)
                return True
        if result is None or not self._source.is_copied(number, crc32c, result):
            return False
        self._parts[number] = _Part(result["ETag"], nbytes, _base64(crc32c))
        return True

    def copy_whole(self) -> bool:
        if not super().copy_whole():
            return False
        with self._translator.errors():  # what was begun for parts
            _abort(self._client, self._path, self._upload_id)
        return True

    def _has(self, found: _Part, number: int, crc32c: int) -> bool:
        """Return whether a part that an earlier attempt has left is what would be copied."""
        assert self._source is not None
        checksum_of_it = {"ChecksumCRC32C": found.crc32c} if found.crc32c else {}
        return self._source.is_copied(number, crc32c, {"ETag": found.etag, **checksum_of_it})

    def etag(self) -> str:
        count = part_count(self._nbytes, self.part_nbytes)
        if not self._is_done or len(self._parts) < count:
            return self._etag if self._client.copies is Copies.WHOLE else ""
        return ",".join([self._etag, *(_bare(self._parts[one].etag) for one in range(count))])

    def finish(self) -> None:
        if self._is_done:
            return
        count = part_count(self._nbytes, self.part_nbytes)
        if missing := count - len(self._parts.keys() & range(count)):
            raise ValueError(f"{self._path} has {missing} of {count} parts that were not put")
        parts = [self._described(number) for number in range(count)]
        with self._translator.errors():
            try:
                answer = self._client.call(
                    "complete_multipart_upload", **self._names(), MultipartUpload={"Parts": parts}
                )
                self._etag = _bare(answer.get("ETag", ""))
            except ClientError as error:
                if _code(error) == "InvalidPart":
                    self._take_what_others_sent()
                self._must_be_finished(error)
        self._is_done = True

    def _names(self) -> dict[str, str]:
        return {"Key": self._path, "UploadId": self._upload_id}

    def _described(self, number: int) -> dict[str, Any]:
        part = self._parts[number]
        checksum_of_it = {"ChecksumCRC32C": part.crc32c} if self._client.algorithm() else {}
        return {"PartNumber": number + 1, "ETag": part.etag, **checksum_of_it}

    def _take_what_others_sent(self) -> None:
        """Take the ETags that parts of the same bytes have now: encryption changes them."""
        for number, part in _listed_parts(self._client, self._path, self._upload_id).items():
            if number in self._parts and part.crc32c and part.crc32c == self._parts[number].crc32c:
                self._parts[number] = part
        raise StorageUnavailable(
            self._translator.url, f"another process was sending parts of {self._path} as well"
        )

    def _must_be_finished(self, error: ClientError) -> None:
        """Return if the upload is gone because any process has finished it; raise otherwise."""
        if _code(error) != "NoSuchUpload":
            raise error
        try:
            stored = int(self._client.call("head_object", Key=self._path)["ContentLength"])
        except ClientError as failure:
            if status_of(failure) != 404:
                raise
            stored = -1
        if stored != self._nbytes:
            raise StorageUnavailable(
                self._translator.url, f"the upload of {self._path} was dropped meanwhile"
            )
        self._is_done = True


def _put(client: S3Client, path: str, data: memoryview, crc32c: int, **condition: str) -> Any:
    checksum_of_it = _checksum(client, crc32c)
    return client.call("put_object", Key=path, Body=Body(data), **checksum_of_it, **condition)


def _abort(client: S3Client, path: str, upload_id: str) -> None:
    try:
        client.call("abort_multipart_upload", Key=path, UploadId=upload_id)
    except ClientError as error:
        if _code(error) != "NoSuchUpload":
            raise


def _copied(client: S3Client, method: str, **arguments: Any) -> Mapping[str, Any] | None:
    """Have storage copy; return what it says of the copy, or None where it refuses."""
    try:
        answer: Mapping[str, Any] = client.call(method, **arguments)
    except ClientError as error:
        if status_of(error) in _CANT_COPY and _code(error) != "NoSuchUpload":
            log.info("storage doesn't copy to %s: %s", arguments["Key"], _code(error))
            return None
        raise
    found: Mapping[str, Any] = answer.get("CopyPartResult") or answer.get("CopyObjectResult") or {}
    return found if "ETag" in found else None


def _bare(etag: str) -> str:
    return etag.strip('"')


def _checksum(client: S3Client, crc32c: int) -> dict[str, str]:
    return {"ChecksumCRC32C": _base64(crc32c)} if client.sends_checksums else {}


def _base64(crc32c: int) -> str:
    return base64.b64encode(crc32c.to_bytes(4, "big")).decode()


def _listed_parts(client: S3Client, path: str, upload_id: str) -> dict[int, _Part]:
    pages = client.pages("list_parts", Key=path, UploadId=upload_id)
    return {part["PartNumber"] - 1: _part(part) for page in pages for part in page.get("Parts", ())}


def _part(listed: Mapping[str, Any]) -> _Part:
    return _Part(listed["ETag"], int(listed["Size"]), listed.get("ChecksumCRC32C", ""))


def _is_whole(found: _Part, data: memoryview, crc32c: int) -> bool:
    """Return whether storage has these bytes, by checksum or else by ETag, which may be an MD5."""
    if found.nbytes != len(data):
        return False
    if found.crc32c:
        return found.crc32c == _base64(crc32c)
    return found.etag.strip('"') == hashlib.md5(data, usedforsecurity=False).hexdigest()


def _first_byte(answer: Mapping[str, Any]) -> int:
    """Return where an answer's bytes begin: its range is "bytes 10-19/200", or missing for all."""
    return int(answer.get("ContentRange", "bytes 0-").split()[-1].partition("-")[0])


def _entry(listed: Mapping[str, Any], start: str) -> Entry:
    return Entry(
        listed["Key"][len(start) :],
        int(listed["Size"]),
        is_directory=False,
        modified=listed["LastModified"].timestamp(),
        md5=str(listed.get("ETag", "")).strip('"'),  # of what was put in one piece
    )


def _code(error: ClientError) -> str:
    return str(error.response.get("Error", {}).get("Code", ""))
