"""What `dcp-mem doctor --peers --transport` makes of the figures of nodes."""

from dataclasses import replace

from click.testing import CliRunner

from dcp_mem.cli.main import main
from dcp_mem.operations.doctor import Check, Severity
from dcp_mem.operations.network import NodeTransport, judge_transport

GOOD = NodeTransport(rank=0, host="node-0", trouble="", devices=("mlx5_0",), rate=40e9, cpu=0.02e-9)


def _checks(**differing: object) -> dict[str, Check]:
    """The checks of four nodes of which the last one differs."""
    nodes = [replace(GOOD, rank=rank, host=f"node-{rank}") for rank in range(4)]
    nodes[-1] = replace(nodes[-1], **differing)  # type: ignore[arg-type]
    return {check.name: check for check in judge_transport(nodes, "nixl")}


def test_nodes_with_cards_that_work_are_well() -> None:
    checks = _checks()
    assert {check.verdict for check in checks.values()} == {Severity.OK}
    assert checks["RDMA"].found == "mlx5_0"
    assert checks["transport"].found == "nixl between all nodes, bytes as they were sent"
    assert checks["bandwidth of copies"].found == (
        "40.00 GB/s out and as much in, 0.02 CPU-seconds per GB"
    )


def test_a_node_where_it_does_not_work_fails_and_says_why() -> None:
    check = _checks(trouble="NIXL can't be imported")["transport"]
    assert check.verdict is Severity.FAIL
    assert "node-3 (rank 3): NIXL can't be imported" in check.advice


def test_what_is_wrong_with_one_node_names_it() -> None:
    for differing, name, verdict in (
        ({"is_equal": False}, "transport", Severity.FAIL),
        ({"devices": ()}, "RDMA", Severity.WARN),
        ({"locked_nbytes": 8 << 20}, "locked memory", Severity.WARN),
        ({"rate": 10e9}, "bandwidth of copies", Severity.WARN),
    ):
        check = _checks(**differing)[name]
        assert check.verdict is verdict
        assert "node-3 (rank 3)" in check.advice


def test_the_option_goes_with_peers_alone() -> None:
    result = CliRunner().invoke(main, ["doctor", "--transport", "nixl"])
    assert result.exit_code == 2
    assert "--transport goes with --peers" in result.output
