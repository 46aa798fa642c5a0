"""A run that a web server shows is loaded as from a directory; a file is taken for no range."""

import functools
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from dcp_mem import StorageRefused, StorageUnavailable
from tests.support.checkpoints.jobs import Job, load_anew, save_two
from tests.support.processes.forks import forked
from tests.support.storage.servers import StorageRoot


class _WholeFiles(SimpleHTTPRequestHandler):
    """As `python -m http.server`: it takes no files, and ignores ranges."""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length", "0")))
        self.send_error(405)

    def log_message(self, *_: Any) -> None:
        return


class _Ranges(_WholeFiles):
    def do_GET(self) -> None:
        wanted = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        path = Path(self.translate_path(self.path))
        if wanted is None or not path.is_file():
            super().do_GET()
            return
        first, last = map(int, wanted.groups())
        data = path.read_bytes()
        piece = data[first : last + 1]
        if not piece:
            self.send_error(416)
            return
        self.send_response(206)
        self.send_header("Content-Range", f"bytes {first}-{first + len(piece) - 1}/{len(data)}")
        self.send_header("Content-Length", str(len(piece)))
        self.end_headers()
        self.wfile.write(piece)


class _Failing(_Ranges):
    """Fails where it is asked for a file's size."""

    def do_HEAD(self) -> None:
        self.send_error(503)

    def do_GET(self) -> None:
        if Path(self.translate_path(self.path)).is_file():
            self.send_error(503)
        else:
            super().do_GET()


Serving = Callable[[type[_WholeFiles]], AbstractContextManager[str]]


@pytest.fixture
def serving(tmp_path: Path) -> Serving:
    """Returns a context with the URL under which a server of a kind shows `tmp_path`."""

    @contextmanager
    def serve(kind: type[_WholeFiles]) -> Iterator[str]:
        handler = functools.partial(kind, directory=str(tmp_path))
        with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
            thread = threading.Thread(target=server.serve_forever)
            thread.start()
            try:
                yield f"http://127.0.0.1:{server.server_address[1]}"
            finally:
                server.shutdown()
                thread.join()

    return serve


@pytest.fixture
def job(tmp_path: Path, memory_root: Path) -> Job:
    """A job whose two checkpoints lie in `tmp_path`."""
    job = Job(str(tmp_path / "run"), str(memory_root))
    forked(save_two, job)
    return job


def test_a_run_is_loaded_from_a_server_that_knows_ranges(
    job: Job, memory_root: Path, serving: Serving
) -> None:
    with serving(_Ranges) as url:
        loaded = forked(load_anew, Job(f"{url}/run", str(memory_root / "other")))
    assert (loaded.number, loaded.report.source) == (2, "storage")


@pytest.mark.parametrize("offset", [0, 3])
def test_a_whole_file_is_never_taken_for_a_range(
    tmp_path: Path, serving: Serving, offset: int
) -> None:
    (tmp_path / "file").write_bytes(b"0123456789")
    buffer = bytearray(5)
    with serving(_Ranges) as url:
        assert StorageRoot(url).storage().read_into("file", offset, [memoryview(buffer)]) == 5
    assert buffer == b"0123456789"[offset : offset + 5]
    with serving(_WholeFiles) as url, pytest.raises(StorageRefused, match="ignores ranges"):
        StorageRoot(url).storage().read_into("file", offset, [memoryview(buffer)])


def test_listings_have_the_sizes_of_files(tmp_path: Path, serving: Serving) -> None:
    (tmp_path / "directory").mkdir()
    (tmp_path / "file").write_bytes(b"0123456789")
    (tmp_path / "gone").symlink_to(tmp_path / "nowhere")
    with serving(_WholeFiles) as url:
        listed = StorageRoot(url).storage().ls("")
        assert StorageRoot(url).storage().ls("absent") == []
    assert sorted((one.name, one.nbytes, one.is_directory) for one in listed) == [
        ("directory", 0, True),
        ("file", 10, False),
    ]


def test_a_file_whose_size_the_server_fails_to_tell_is_not_taken_for_a_missing_one(
    tmp_path: Path, serving: Serving
) -> None:
    (tmp_path / "file").write_bytes(b"0123456789")
    with serving(_Failing) as url, pytest.raises(StorageUnavailable, match="503"):
        StorageRoot(url).storage().ls("")
