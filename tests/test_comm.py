"""Collective times against hand arithmetic, published curves' shape, and their laws."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpucalc.formulas import comm as f


def test_bus_factors_by_hand() -> None:
    assert f.all_reduce_bus_factor(ranks=8) == 1.75
    assert f.gather_bus_factor(ranks=8) == 0.875
    assert f.all_reduce_bus_factor(ranks=1) == 0


def test_latencies_by_hand() -> None:
    assert f.link_latency_s(alpha0_s=5.7e-6, alpha_step_s=1.82e-6, ranks=8) == pytest.approx(16.62e-6)
    assert f.network_latency_s(alpha0_s=33.6e-6, alpha_step_s=14.2e-6, nodes=2) == pytest.approx(33.6e-6)
    assert f.network_latency_s(alpha0_s=33.6e-6, alpha_step_s=14.2e-6, nodes=8) == pytest.approx(62.0e-6)


def test_collective_by_hand() -> None:
    # alpha 4, transfer 100 x 1.5 / 1.5 = 100, ramp 2 x 0.5 x sqrt(4 x 100) = 20
    time = f.collective_s(
        message_bytes=100.0, ranks=4, bus_factor=1.5, alpha_s=4.0, ramp=0.5, bus_bytes_per_s=1.5
    )
    assert time == pytest.approx(124.0)
    alone = f.collective_s(
        message_bytes=100.0, ranks=1, bus_factor=0.0, alpha_s=4.0, ramp=0.5, bus_bytes_per_s=1.5
    )
    assert alone == 0


def test_all_reduce_of_512_mib_on_eight_h100() -> None:
    # Published curve: 2111 us (445 GB/s). The class constants: within the 8 % quoted from 1 MB up.
    time = f.collective_s(
        message_bytes=512 * 2**20,
        ranks=8,
        bus_factor=1.75,
        alpha_s=5.7e-6 + 6 * 1.82e-6,
        ramp=0.75,
        bus_bytes_per_s=511e9,
    )
    assert time == pytest.approx(2111e-6, rel=0.08)


def test_placement_by_hand() -> None:
    # 8 GPUs per domain. tp 4 inside; dp 8 at stride 4: 32 ranks apart, 4 nodes, 2 ranks in each.
    assert f.group_nodes(ranks=4, stride=1, domain=8) == 1
    assert f.group_nodes(ranks=8, stride=4, domain=8) == 4
    assert f.group_ranks_per_node(ranks=8, stride=4, domain=8) == 2
    # pp 4 at stride 16: each rank on a node of its own
    assert f.group_nodes(ranks=4, stride=16, domain=8) == 4
    assert f.group_ranks_per_node(ranks=4, stride=16, domain=8) == 1


def test_network_bandwidth_by_hand() -> None:
    rest = {"intra_bus_bytes_per_s": 393e9, "node_nic_bytes_per_s": 400e9, "gpus_per_node": 8}
    whole = f.network_bus_bytes_per_s(
        nodes=4, ranks_per_node=8, two_node_factor=1.7, ring_factor=0.95, **rest
    )
    assert whole == pytest.approx(380e9)
    two = f.network_bus_bytes_per_s(nodes=2, ranks_per_node=8, two_node_factor=1.7, ring_factor=0.95, **rest)
    assert two == pytest.approx(393e9)  # the links inside bind
    one = f.network_bus_bytes_per_s(nodes=4, ranks_per_node=1, two_node_factor=1.7, ring_factor=0.95, **rest)
    assert one == pytest.approx(47.5e9)  # one NIC of eight


def test_all_to_all_by_hand() -> None:
    # 8 ranks, 4 per node, 800 bytes each: 300 stay inside at 100 B/s, 400 leave at 50 B/s
    time = f.all_to_all_s(
        message_bytes=800.0,
        ranks=8,
        ranks_per_node=4,
        alpha_s=1.0,
        intra_bytes_per_s=100.0,
        nic_bytes_per_s=50.0,
    )
    assert time == pytest.approx(9.0)


def test_messages_by_hand() -> None:
    assert f.point_to_point_s(message_bytes=100.0, alpha_s=1.0, link_bytes_per_s=50.0) == 3
    assert f.tensor_parallel_message_bytes(tokens=10, hidden=4, element_bytes=2) == 80
    assert f.ring_step_bytes(tokens=10, kv_width=6, element_bytes=2) == 120
    assert f.dispatch_bytes(tokens=10, top_k=2, hidden=4, element_bytes=2) == 160
    assert f.gradient_message_bytes(params=10, element_bytes=4) == 40
    assert f.weight_message_bytes(params=10, element_bytes=2) == 20
    assert f.stage_message_bytes(tokens=10, hidden=4, element_bytes=2, divided_by=2) == 40
    assert f.exposed_s(communication_s=5.0, compute_s=4.0, overlap=0.5) == 3
    assert f.exposed_s(communication_s=1.0, compute_s=4.0, overlap=0.5) == 0


sizes = st.floats(min_value=1.0, max_value=1e11)
bandwidths = st.floats(min_value=1e9, max_value=1e12)


@given(size=sizes, bandwidth=bandwidths, ranks=st.integers(1, 4096), ramp=st.floats(0, 1))
def test_laws_of_a_collective(size: float, bandwidth: float, ranks: int, ramp: float) -> None:
    def time(size: float, bandwidth: float, ranks: int) -> float:
        result: float = f.collective_s(
            message_bytes=size,
            ranks=ranks,
            bus_factor=f.all_reduce_bus_factor(ranks=ranks),
            alpha_s=f.link_latency_s(alpha0_s=1e-5, alpha_step_s=1e-6, ranks=ranks),
            ramp=ramp,
            bus_bytes_per_s=bandwidth,
        )
        return result

    base = time(size, bandwidth, ranks)
    assert time(size, 2 * bandwidth, ranks) <= base
    assert time(2 * size, bandwidth, ranks) >= base
    assert time(size, bandwidth, ranks + 1) >= base
    assert time(size, bandwidth, 1) == 0


@given(st.lists(st.tuples(st.integers(1, 64), st.integers(1, 64)), min_size=1, max_size=6))
def test_columns_equal_scalars(rows: list[tuple[int, int]]) -> None:
    ranks = np.array([row[0] for row in rows], dtype=np.float64)
    stride = np.array([row[1] for row in rows], dtype=np.float64)
    nodes = f.group_nodes(ranks=ranks, stride=stride, domain=8)
    inside = f.group_ranks_per_node(ranks=ranks, stride=stride, domain=8)
    for i, (n, s) in enumerate(rows):
        assert nodes[i] == f.group_nodes(ranks=n, stride=s, domain=8)
        assert inside[i] == f.group_ranks_per_node(ranks=n, stride=s, domain=8)
