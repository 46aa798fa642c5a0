"""URLs as Azure's portal, Spark and Azure ML write them."""

import pytest

from dcp_mem import ConfigError
from dcp_mem.config import checkpoint_name, root_url

_ABFS = "abfs://ckpts@mine.dfs.core.windows.net"


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("wasbs://ckpts@mine.blob.core.windows.net/runs/42", f"{_ABFS}/runs/42"),
        ("wasb://ckpts@mine.blob.core.windows.net/runs/42/", f"{_ABFS}/runs/42"),
        ("wasbs://ckpts@mine.blob.core.windows.net", _ABFS),
        ("https://mine.blob.core.windows.net/ckpts/runs/42", f"{_ABFS}/runs/42"),
        ("https://mine.dfs.core.windows.net/ckpts/", _ABFS),
        (f"{_ABFS}/runs/42", f"{_ABFS}/runs/42"),
        ("abfs://ckpts/runs/42", "abfs://ckpts/runs/42"),
    ],
)
def test_urls_of_azure_mean_their_container(given: str, expected: str) -> None:
    pytest.importorskip("adlfs")
    assert root_url(given) == expected
    assert checkpoint_name(expected, f"{given.rstrip('/')}/step-1") == "step-1"


@pytest.mark.parametrize(
    "given",
    [
        "azureml://datastores/workspaceblobstore/paths/runs/42",
        "azureml://subscriptions/s/resourcegroups/r/workspaces/w/datastores/d/paths/runs/42",
        "wasbs://ckpts/runs/42",
        "wasbs://mine.blob.core.windows.net/ckpts",
        "https://mine.blob.core.windows.net/",
        "https://mine.blob.core.windows.net/ckpts/runs?restype=container",
    ],
)
def test_urls_that_name_no_container_are_refused_with_the_form_that_does(given: str) -> None:
    with pytest.raises(ConfigError, match="give abfs://container/path, with storage_options"):
        root_url(given)


@pytest.mark.parametrize(
    ("given", "command"),
    [
        ("azureml://datastores/mine/paths/runs/42/", "show --name mine`"),
        (
            "azureml://subscriptions/s/resourceGroups/r/workspaces/w/datastores/mine/paths/runs/42",
            "show --name mine -g r -w w`",
        ),
    ],
)
def test_a_datastores_url_is_refused_with_the_url_to_give(given: str, command: str) -> None:
    with pytest.raises(ConfigError) as caught:
        root_url(given)
    assert command in str(caught.value)
    assert "'abfs://CONTAINER@ACCOUNT.dfs.core.windows.net/runs/42' means" in str(caught.value)


def test_a_url_with_a_signature_is_refused_without_showing_it() -> None:
    url = "https://mine.blob.core.windows.net/ckpts?sv=2024&sig=c2VjcmV0"
    with pytest.raises(ConfigError, match="storage_options=") as caught:
        root_url(url)
    assert "c2VjcmV0" not in str(caught.value)
