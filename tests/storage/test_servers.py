"""Every storage of the tests starts empty, and keeps what it is given."""

from tests.support.storage.servers import StorageRoot


def test_a_root_is_empty_and_returns_what_was_written(storage_root: StorageRoot) -> None:
    assert storage_root.names() == []
    storage_root.write("step-1/__0_0.distcp", b"shard")
    assert storage_root.names() == ["step-1/__0_0.distcp"]
    assert storage_root.read("step-1/__0_0.distcp") == b"shard"
