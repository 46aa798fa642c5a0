"""The ways to move bytes, by name. Only the process that takes a route imports its module."""

from __future__ import annotations

from benchmarks.harness.storage.cost import Route
from benchmarks.harness.storage.targets import AZURE, GOOGLE, S3

BOTH = (S3, AZURE)

FLOOR = Route("raw sockets (floor)", "floor", "upload", BOTH, leaves_objects=False)
SDK = Route("raw SDK, from memoryviews", "sdk", "upload", BOTH)
DCP_MEM = Route("dcp_mem", "agent", "upload", (*BOTH, GOOGLE))
PIPE_FILE = Route("fsspec pipe_file", "fsspec_own", "pipe_file", BOTH)
OPEN_WRITE = Route("fsspec open().write", "fsspec_own", "open_write", BOTH)
FSSPEC_WRITER = Route("dcp.save, torch's FsspecWriter", "dcp_writers", "torch_fsspec", BOTH)
CONNECTOR = Route(
    "dcp.save, s3torchconnector", "s3_connector", "upload", (S3,), ("s3torchconnector",)
)
UPLOADS = (
    FLOOR,
    SDK,
    DCP_MEM,
    PIPE_FILE,
    OPEN_WRITE,
    FSSPEC_WRITER,
    CONNECTOR,
    Route("boto3 upload_fileobj", "boto", "upload_fileobj", (S3,), ("boto3",)),
    Route("azstoragetorch BlobIO", "azure_torch", "upload", (AZURE,), ("azstoragetorch",)),
    Route("obstore put", "object_store", "put", BOTH, ("obstore",)),
)

READ_FLOOR = Route("raw sockets (floor)", "floor", "read", BOTH)
READ_SDK = Route("raw SDK, into memoryviews", "sdk", "read", BOTH)
READ_DCP_MEM = Route("dcp_mem", "agent", "read", BOTH)
CAT_RANGES = Route("fsspec cat_ranges", "fsspec_own", "cat_ranges", BOTH)
READS = (
    READ_FLOOR,
    READ_SDK,
    READ_DCP_MEM,
    CAT_RANGES,
    Route("boto3 download_fileobj", "boto", "download_fileobj", (S3,), ("boto3",)),
    Route("obstore get_ranges", "object_store", "get_ranges", BOTH, ("obstore",)),
)
