"""Azure Blob Storage and ADLS Gen2, through the synchronous SDK that adlfs brings."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from time import time
from typing import Any

from azure.core import MatchConditions
from azure.core.exceptions import HttpResponseError
from azure.storage.blob import BlobBlock, BlobClient, BlobPrefix, BlobProperties

from dcp_mem.errors import CheckpointExists, StorageKeyMissing, StorageRefused
from dcp_mem.format.checksums import checksum
from dcp_mem.storage import (
    Copies,
    Entry,
    InParts,
    Source,
    Unfinished,
    part_count,
    part_nbytes,
    scatter,
)
from dcp_mem.storage.azure_client import Pieces, service_client, signed_for_copying
from dcp_mem.storage.file_system import file_system_of
from dcp_mem.storage.streams import fill
from dcp_mem.storage.translate import Translator, says, status_of

# MD5 costs 1.5 CPU-seconds per GB: manifests and metadata get it, parts don't: their own checksums
# are verified when they are read.
_PUT_AT_ONCE = 4 << 20
_SERVED = re.compile(r"bytes (\d+)-(\d+)/")
_CHANGED = ("ConditionNotMet", "BlobNotFound", "PathNotFound", "TargetConditionNotMet")
_MOST_COPIED = 256 << 20
"""The longest blob that Azure copies while the client waits."""
_CANT_COPY = {400, 401, 403, 404, 409, 412, 416, 501}
_MISSING: dict[str, Any] = {"match_condition": MatchConditions.IfMissing}
_THERE = ("BlobAlreadyExists", "PathAlreadyExists", "UnauthorizedBlobOverwrite")


class AzureStorage:
    """A container, or what is under a prefix in it, with adlfs's account and credentials."""

    def __init__(self, url: str, storage_options: Mapping[str, Any]) -> None:
        self.url = url
        self._translator = Translator(url, storage_options, files_are_objects=False)
        with self._translator.errors():
            fs, path = file_system_of(url, storage_options)
            service = service_client(fs)
        container, _, self._root = path.strip("/").partition("/")
        with self._translator.errors():
            self._container = service.get_container_client(container)
        self._may_have_directories = True

    def upload(self, key: str, nbytes: int, source: Source | None = None) -> AzureUpload:
        blob, stored = self._blob(key), set[str]()
        if nbytes > part_nbytes(nbytes):
            with suppress(StorageKeyMissing), self._translator.errors(key):
                blocks = itertools.chain(*blob.get_block_list("all"))
                stored = {block.id for block in blocks if _is_as_long(block)}
        upload = AzureUpload(blob, nbytes, stored, self._translator)
        if source is not None and source.nbytes == nbytes <= _MOST_COPIED:
            upload.copies = Copies.WHOLE
            upload.source = self._blob(source.key), source.etag
        return upload

    def put(self, key: str, data: bytes, *, create: bool = False) -> None:
        with self._translator.errors():
            try:
                self._store(key, data, _MISSING if create else {})
            except HttpResponseError as error:
                if create and says(error, *_THERE):
                    raise CheckpointExists(key.rpartition("/")[0], self.url) from None
                raise

    def _store(self, key: str, data: bytes, condition: Mapping[str, Any]) -> None:
        blob, view = self._blob(key), memoryview(data)
        if len(data) <= _PUT_AT_ONCE:
            is_new = condition.get("match_condition") is MatchConditions.IfMissing
            blob.upload_blob(data, overwrite=not is_new, validate_content=True, **condition)
            return
        # No stored blocks are counted on: they may be of other bytes.
        upload = AzureUpload(blob, len(data), set(), self._translator)
        for number in range(part_count(len(data), upload.part_nbytes)):
            part = view[number * upload.part_nbytes :][: upload.part_nbytes]
            upload.put_part(number, part, checksum(part))
        upload.commit(**condition)

    def get(self, key: str) -> bytes:
        with self._translator.errors(key):
            return _read_all(self._blob(key))

    def read_into(self, key: str, offset: int, buffers: Sequence[memoryview]) -> int:
        if not any(map(len, buffers)):
            return 0
        with self._translator.errors(key):
            try:
                return _read_into(self._blob(key), offset, buffers)
            except HttpResponseError as error:
                if status_of(error) == 416:  # the object ends before `offset`
                    return 0
                raise

    def ls(self, prefix: str) -> list[Entry]:
        start, directories, files = self._start(prefix), set[str](), list[Entry]()
        with suppress(StorageKeyMissing), self._translator.errors(prefix):
            for item in self._container.walk_blobs(start, include=["metadata"], delimiter="/"):
                name = item.name[len(start) :].rstrip("/")
                is_marker = not isinstance(item, BlobPrefix) and _is_marker(item)
                if is_marker or isinstance(item, BlobPrefix):
                    directories.add(name)
                else:
                    files.append(_entry(name, item))
        # An empty blob with a directory's name marks that directory; what has no name is the listed
        # directory itself.
        shown = [
            file for file in files if file.name and (file.nbytes or file.name not in directories)
        ]
        return shown + [Entry(name, 0, is_directory=True) for name in directories if name]

    def tree(self, most: int) -> list[tuple[str, Entry]] | None:
        start, found = self._start(""), list[tuple[str, Entry]]()
        with self._translator.errors():
            for blob in self._container.list_blobs(start, include=["metadata"]):
                path, _, name = blob.name.rpartition("/")
                if name and not _is_marker(blob):
                    found.append((path[len(start) :], _entry(name, blob)))
                if len(found) > most:
                    return None
        return found

    def delete(self, key: str) -> None:
        self._delete(key, {})

    def _delete(self, key: str, condition: Mapping[str, Any]) -> bool:
        """Delete a blob, and directories that are empty then; return whether it was there."""
        was_there = True
        try:
            with self._translator.errors(key):
                try:
                    # Because of `delete_snapshots`, an account with directories refuses to delete a
                    # directory here, even an empty one.
                    self._blob(key).delete_blob(delete_snapshots="include", **condition)
                except HttpResponseError as error:
                    if condition and says(error, *_CHANGED):
                        return False
                    raise
        except StorageKeyMissing:
            was_there = False
        if self._may_have_directories:
            self._remove_empty_directories(key.rpartition("/")[0], was_there=was_there)
        return was_there

    def _remove_empty_directories(self, directory: str, *, was_there: bool) -> None:
        """Remove a directory that is empty now, and those above it: they would stay without files.

        An account that has none for a blob that was there has no directories at all.
        """
        is_first = True
        while directory:
            try:
                with self._translator.errors(directory):
                    blob = self._blob(directory)
                    facts = blob.get_blob_properties()
                    if not _is_marker(facts):
                        return
                    blob.delete_blob(**_unchanged(str(facts.etag)))
            except StorageKeyMissing:
                self._may_have_directories = not (is_first and was_there)
                return
            except StorageRefused:  # it isn't empty, or may not be removed
                return
            directory, is_first = directory.rpartition("/")[0], False

    def has_conditions(self) -> bool:
        return True

    def swap(self, key: str, old: bytes, new: bytes) -> bool:
        etag = self._etag_of(key, old)
        if etag is None:
            return False
        with self._translator.errors():
            try:
                self._store(key, new, _unchanged(etag))
            except HttpResponseError as error:
                if says(error, *_CHANGED):
                    return False
                raise
        return True

    def remove(self, key: str, old: bytes) -> bool:
        etag = self._etag_of(key, old)
        if etag is None:
            return False
        return self._delete(key, _unchanged(etag))

    def _etag_of(self, key: str, data: bytes) -> str | None:
        """Return the ETag of a blob; None where it isn't these bytes, or is gone."""
        try:
            with self._translator.errors(key):
                etag = str(self._blob(key).get_blob_properties().etag)
                return etag if _read_all(self._blob(key)) == data else None
        except StorageKeyMissing:
            return None

    def unfinished(self, prefix: str) -> list[Unfinished]:
        start = self._start(prefix)
        with self._translator.errors():
            listed = self._container.list_blobs(start, include=["uncommittedblobs"])
            begun = {blob.name: _modified(blob) or time() for blob in listed if not blob.size}
            if begun:
                # Empty blobs are listed as well. Azure gives uncommitted ones no time, but
                # emulators do; so uncommitted are those that a plain listing doesn't have.
                for blob in self._container.list_blobs(start):
                    begun.pop(blob.name, None)
        return [Unfinished(name[len(self._start("")) :], when) for name, when in begun.items()]

    def drop_unfinished(self, key: str) -> None:
        blob = self._blob(key)
        with suppress(StorageKeyMissing), self._translator.errors(key):
            if not any(blob.get_block_list("uncommitted")):
                return
            # Blocks are dropped only by a commit that leaves them out: commit an empty blob, and
            # delete it.
            try:
                made = blob.commit_block_list([], **_MISSING)
                blob.delete_blob(**_unchanged(str(made["etag"])))
            except HttpResponseError as error:
                if status_of(error) not in (409, 412):  # there is an object
                    raise

    def _blob(self, key: str) -> BlobClient:
        return self._container.get_blob_client(f"{self._root}/{key}" if self._root else key)

    def _start(self, prefix: str) -> str:
        """Return what the names of all blobs under the prefix begin with."""
        path = "/".join(part for part in (self._root, prefix) if part)
        return f"{path}/" if path else ""


class AzureUpload(InParts):
    """Blocks of a blob, and the commit that makes a blob of them.

    A block's id says which part it is, and of which bytes: a block that an earlier process has put
    counts if the id is the same. An object of one part takes the same way: the SDK's public calls
    would copy its bytes.

    `source`: blob that may be copied, and its ETag; None for none.
    """

    in_order = False
    verifies_copies = True
    source: tuple[BlobClient, str] | None = None

    def __init__(
        self, blob: BlobClient, nbytes: int, stored: set[str], translator: Translator
    ) -> None:
        super().__init__(nbytes)
        self._blob, self._stored, self._translator = blob, stored, translator
        self._put: dict[int, str] = {}

    def put_part(self, number: int, data: memoryview, crc32c: int) -> bool:
        block = _block_id(number, crc32c, len(data))
        is_new = block not in self._stored
        if is_new and data:  # there are no empty blocks
            with self._translator.errors():
                self._blob.stage_block(block, Pieces(data), length=len(data))
        if data:
            self._put[number] = block
        self._missing.discard(number)
        return is_new

    def copy_whole(self) -> bool:
        if self.source is None:
            return False
        with self._translator.errors():
            try:
                answer = self._blob.start_copy_from_url(
                    requires_sync=True,
                    source_etag=self.source[1],
                    source_match_condition=MatchConditions.IfNotModified,
                    **signed_for_copying(self.source[0]),
                )
                facts = self._blob.get_blob_properties()
            except HttpResponseError as error:
                if status_of(error) in _CANT_COPY:
                    return False
                raise
        self._etag = str(facts.etag)
        return answer["copy_status"] == "success" and facts.size == self._nbytes

    def finish(self) -> None:
        self._check_that_all_were_put()
        with self._translator.errors():
            self.commit()

    def commit(self, **conditions: Any) -> None:
        """Make the blob of the blocks. Raises HttpResponseError."""
        # The latest of each id: after a commit whose answer was lost these are the committed ones.
        answer = self._blob.commit_block_list(
            [BlobBlock(self._put[number]) for number in sorted(self._put)], **conditions
        )
        self._etag = str(answer["etag"])

    def close(self) -> None:
        """Leave the blocks: they stay for a week, and a later upload goes on with them."""


def _block_id(number: int, crc32c: int, nbytes: int) -> str:
    """Return the id of a part's block: Azure wants ids of one length for all blocks of a blob."""
    return f"{number:05d}-{crc32c:08x}-{nbytes:010x}"


def _is_as_long(block: BlobBlock) -> bool:
    return str(block.id).endswith(f"-{block.size:010x}")


def _is_marker(blob: BlobProperties) -> bool:
    """Return whether the blob stands for a directory: a real one, or a placeholder for one."""
    metadata: Any = blob.metadata  # None where it was not asked for, whatever the SDK declares
    return str((metadata or {}).get("hdi_isfolder", "")).lower() == "true"


def _entry(name: str, blob: BlobProperties) -> Entry:
    md5 = blob.content_settings.content_md5  # of what was put in one piece
    return Entry(
        name, blob.size, is_directory=False, modified=_modified(blob), md5=bytes(md5 or b"").hex()
    )


def _modified(blob: BlobProperties) -> float:
    when: Any = blob.last_modified  # None where nothing was committed
    return 0.0 if when is None else float(when.timestamp())


def _unchanged(etag: str) -> dict[str, Any]:
    """Return the arguments of a request that is refused where the blob is another one by now."""
    return {"etag": etag, "match_condition": MatchConditions.IfNotModified}


def _read_all(blob: BlobClient) -> bytes:
    """Return all bytes of the blob."""
    operation = _operation(blob)
    if operation is None:
        return bytes(blob.download_blob().readall())
    with _answer(operation) as answer:
        return bytes(answer.raw.read())


def _read_into(blob: BlobClient, offset: int, buffers: Sequence[memoryview]) -> int:
    """Fill the buffers with the bytes from `offset` on; return how many there were."""
    wanted = sum(map(len, buffers))
    operation = _operation(blob)
    if operation is None:
        return _read_publicly(blob, offset, wanted, buffers)
    with _answer(operation, range=f"bytes={offset}-{offset + wanted - 1}") as answer:
        served = _SERVED.match(answer.headers.get("Content-Range", ""))
        if served is None or int(served[1]) != offset:
            got = answer.headers.get("Content-Range", "all")
            raise OSError(f"asked for bytes from {offset} on, got {got}")
        nbytes = min(wanted, int(served[2]) + 1 - offset)
        count = fill(answer.raw, buffers, nbytes)
        if count < nbytes:
            raise OSError(f"the answer ended after {count} of {nbytes} bytes")
        return count


def _operation(blob: BlobClient) -> Any:
    """Return what is below the SDK's public download, which copies what it reads, twice.

    A later SDK may lack it.
    """
    return getattr(getattr(getattr(blob, "_client", None), "blob", None), "download", None)


@contextmanager
def _answer(operation: Any, **options: Any) -> Iterator[Any]:
    """Open the answer of `requests`; its connection is used again if it is read to its end."""
    answer = operation(cls=lambda response, *_: response, **options).http_response.internal_response
    with closing(answer):
        yield answer


def _read_publicly(
    blob: BlobClient, offset: int, wanted: int, buffers: Sequence[memoryview]
) -> int:
    done = 0
    for piece in blob.download_blob(offset, wanted).chunks():
        scatter(piece, done, buffers)
        done += len(piece)
    return done
