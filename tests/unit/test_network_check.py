"""What `dcp-mem doctor --peers`, with and without `--transport`, makes of the figures of nodes."""

from dataclasses import replace

import pytest
from click.testing import CliRunner

from dcp_mem.cli.main import main
from dcp_mem.operations.doctor import Check, Severity
from dcp_mem.operations.network import Node, judge_network, judge_transport

GOOD = Node(
    rank=0,
    host="node-0",
    address="10.0.0.1",
    interface="eth0",
    speed=200e9,
    faster=(),
    latency=50e-6,
    rate=2e9,
)


def _nodes(count: int, **differing: object) -> list[Node]:
    """Nodes of which the last one differs."""
    nodes = [replace(GOOD, rank=rank, host=f"node-{rank}") for rank in range(count)]
    return [*nodes[:-1], replace(nodes[-1], **differing)]  # type: ignore[arg-type]


def _checks(nodes: list[Node]) -> dict[str, Check]:
    return {check.name: check for check in judge_network(nodes)}


def test_nodes_that_are_alike_are_well() -> None:
    checks = _checks(_nodes(4))
    assert {check.verdict for check in checks.values()} == {Severity.OK}
    assert checks["interface"].found == "eth0 on 4 nodes, 4 processes"
    assert checks["latency"].found == "50 µs for a small message"
    assert checks["bandwidth"].found.startswith("2.00 GB/s")


def test_a_slow_node_is_named() -> None:
    check = _checks(_nodes(40, rate=0.1e9))["bandwidth"]
    assert check.verdict == Severity.WARN
    assert "node-39 (rank 39): 0.10 GB/s" in check.advice
    assert "node-38" not in check.advice


def test_many_slow_nodes_are_counted() -> None:
    nodes = [replace(one, rate=2e9 if one.rank else 20e9) for one in _nodes(40)]
    assert "and 34 more" in _checks(nodes)["bandwidth"].advice


def test_a_much_faster_interface_that_is_not_used_is_named() -> None:
    check = _checks(_nodes(3, speed=10e9, faster=[("ib0", 400e9)]))["speed of interface"]
    assert check.verdict == Severity.WARN
    assert "node-2 (rank 2) also has ib0, up, of 400 Gb/s" in check.advice
    assert "GLOO_SOCKET_IFNAME=ib0" in check.advice
    assert check.found == "10 Gb/s, 200 Gb/s"


@pytest.mark.parametrize("address", ["127.0.1.1", "::1"])
def test_a_node_that_others_cannot_reach_is_a_failure(address: str) -> None:
    check = _checks(_nodes(2, address=address, interface="lo"))["interface"]
    assert check.verdict == Severity.FAIL
    assert "node-1 (rank 1) can't be reached" in check.advice


def test_processes_of_one_machine_may_use_loopback() -> None:
    nodes = [replace(GOOD, rank=rank, address="127.0.0.1", interface="lo") for rank in range(2)]
    assert _checks(nodes)["interface"].verdict == Severity.OK


def test_alone_it_says_how_to_start_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    outcome = CliRunner().invoke(main, ["doctor", "--peers"])
    assert outcome.exit_code != 0
    assert "torchrun --no-python" in outcome.output + str(outcome.exception)


# -- with --transport ------------------------------------------------------------------------------

TRANSPORT = Node(rank=0, host="node-0", devices=("mlx5_0",), rate=40e9, cpu=0.02e-9)


def _transport_checks(**differing: object) -> dict[str, Check]:
    """The checks of four nodes of which the last one differs."""
    nodes = [replace(TRANSPORT, rank=rank, host=f"node-{rank}") for rank in range(4)]
    nodes[-1] = replace(nodes[-1], **differing)  # type: ignore[arg-type]
    return {check.name: check for check in judge_transport(nodes, "nixl")}


def test_nodes_with_cards_that_work_are_well() -> None:
    checks = _transport_checks()
    assert {check.verdict for check in checks.values()} == {Severity.OK}
    assert checks["RDMA"].found == "mlx5_0"
    assert checks["transport"].found == "nixl between all nodes, bytes as they were sent"
    assert checks["bandwidth of copies"].found == (
        "40.00 GB/s out and as much in, 0.02 CPU-seconds per GB"
    )


def test_a_node_where_it_does_not_work_fails_and_says_why() -> None:
    check = _transport_checks(trouble="NIXL can't be imported")["transport"]
    assert check.verdict is Severity.FAIL
    assert "node-3 (rank 3): NIXL can't be imported" in check.advice


def test_what_is_wrong_with_one_node_names_it() -> None:
    for differing, name, verdict in (
        ({"is_equal": False}, "transport", Severity.FAIL),
        ({"devices": ()}, "RDMA", Severity.WARN),
        ({"locked_nbytes": 8 << 20}, "locked memory", Severity.WARN),
        ({"rate": 10e9}, "bandwidth of copies", Severity.WARN),
    ):
        check = _transport_checks(**differing)[name]
        assert check.verdict is verdict
        assert "node-3 (rank 3)" in check.advice


def test_the_option_goes_with_peers_alone() -> None:
    result = CliRunner().invoke(main, ["doctor", "--transport", "nixl"])
    assert result.exit_code == 2
    assert "--transport goes with --peers" in result.output
