# SPDX-License-Identifier: Apache-2.0
"""NCCL's name lists: what a value selects, and what is wrong with it."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holmes_core.cluster.hca_list import (
    NameList,
    exact_hcas,
    exact_interface,
    lint_hcas,
    lint_interfaces,
    lint_list,
)
from holmes_core.cluster.nic import Inventory, Nic


def devices(count: int) -> list[tuple[str, int]]:
    return [(f"mlx5_{number}", 1) for number in range(count)]


@pytest.mark.parametrize(
    ("value", "selected"),
    [
        ("", "0 1 2 10"),
        ("mlx5", "0 1 2 10"),
        ("mlx5_1", "1 10"),
        ("=mlx5_1", "1"),
        ("=mlx5_1,mlx5_2", "1 2"),
        ("^mlx5_1", "0 2"),
        ("^=mlx5_1", "0 2 10"),
        ("=mlx5_1:1", "1"),
        ("=mlx5_1:2", ""),
        ("=^mlx5_1", ""),
        ("mlx5_0, mlx5_2", "0"),
    ],
)
def test_what_a_value_selects(value: str, selected: str) -> None:
    ports = [(f"mlx5_{number}", 1) for number in (0, 1, 2, 10)]
    assert lint_list(value, ports).selected == tuple(f"mlx5_{number}" for number in selected.split())


def test_modifiers_once_at_the_beginning() -> None:
    found = lint_list("^=mlx5_8,^=mlx5_14", devices(16))
    assert len(found.selected) == 15
    assert "mlx5_14" in found.selected
    assert "modifiers are allowed once, at the beginning: '^=mlx5_14'" in found.problems[0]
    assert found.suggestion == "^=mlx5_8,mlx5_14"
    assert len(lint_list(found.suggestion, devices(16)).selected) == 14


def test_a_name_without_a_device() -> None:
    found = lint_list("^=mlx5_0,mlx5_5,mlxl5_7", devices(9))
    assert found.selected == tuple(f"mlx5_{number}" for number in (1, 2, 3, 4, 6, 7, 8))
    assert found.problems == ("NCCL_IB_HCA=^=mlx5_0,mlx5_5,mlxl5_7: mlxl5_7 names no device (did you mean 'mlx5_7'?)",)
    assert found.suggestion == "^=mlx5_0,mlx5_5,mlx5_7"


@pytest.mark.parametrize(
    ("value", "problem", "suggestion"),
    [
        ("mlx5_1", "mlx5_1 is the beginning of mlx5_10, mlx5_11, too", "=mlx5_1"),
        ("=mlx5_1, mlx5_2", "no space is allowed: ' mlx5_2'", "=mlx5_1,mlx5_2"),
        ("=mlx5_1:3", "mlx5_1 has no port 3", ""),
        ("=ib0", "it leaves nothing in use", ""),
        ("=mlx5_3_dma", "mlx5_3_dma names no device (did you mean 'mlx5_3'?)", "=mlx5_3"),
    ],
)
def test_problems(value: str, problem: str, suggestion: str) -> None:
    found = lint_list(value, devices(12))
    assert any(problem in text for text in found.problems)
    assert found.suggestion == suggestion


def test_right_values_have_no_problem() -> None:
    for value in ("", "mlx5", "=mlx5_0,mlx5_1", "^mlx5_11", "^=mlx5_3:1"):
        assert lint_list(value, devices(12)).problems == ()


def host(*nics: Nic, rails: tuple[str, ...] = (), kind: str = "infiniband", ethernet: str = "") -> Inventory:
    return Inventory(host="n1", nics=nics, rails=rails, kind=kind, ethernet=ethernet)  # type: ignore[arg-type]


MIXED = host(
    Nic(device="mlx5_0", kind="infiniband"),
    Nic(device="mlx5_1", kind="infiniband"),
    Nic(device="mlx5_2", kind="roce"),
    Nic(device="mlx5_3", kind="infiniband", usable=False, reason="port is down"),
    rails=("mlx5_0", "mlx5_1"),
)


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        ("mlx5", "different kinds (infiniband, roce)"),
        ("^mlx5_3", "different kinds (infiniband, roce)"),
        ("=mlx5_0", "it leaves out 1 of 2 rails: mlx5_1"),
        ("=mlx5_2", "it selects none of the rails (mlx5_0, mlx5_1)"),
        ("=mlx5_0,mlx5_1,mlx5_3", "it selects what cannot be used: mlx5_3 (port is down)"),
    ],
)
def test_what_is_selected_has_to_work_together(value: str, problem: str) -> None:
    found = lint_hcas(value, MIXED)
    assert any(problem in text for text in found.problems)
    assert found.suggestion == "=mlx5_0,mlx5_1"
    assert lint_hcas(found.suggestion, MIXED).problems == ()


def test_exact_lists() -> None:
    assert exact_hcas(MIXED) == "=mlx5_0,mlx5_1"
    planes = host(*[Nic(device="card", port=port, kind="roce") for port in (3, 6)], rails=("card",), kind="roce")
    assert exact_hcas(planes) == "=card:3,card:6"
    assert exact_hcas(host(Nic(device="x", kind="efa"), rails=("x",), kind="efa")) == ""
    assert exact_hcas(host()) == ""
    assert exact_interface(host(ethernet="bond0")) == "=bond0"
    assert exact_interface(host()) == ""


def test_interfaces() -> None:
    nics = [
        Nic(device="bond0", netdev="bond0", kind="ethernet", addresses=("192.0.2.7/27",)),
        Nic(device="bond0.29", netdev="bond0.29", kind="ethernet", addresses=("198.51.100.9/16",)),
        Nic(device="lo", netdev="lo", kind="ethernet", usable=False, reason="loopback: no other host can be reached"),
    ]
    inventory = host(*nics, kind="ethernet", ethernet="bond0")
    assert lint_interfaces("bond0", inventory).suggestion == "=bond0"
    assert lint_interfaces("=bond0", inventory).problems == ()
    assert lint_interfaces("=bond0", inventory).selected == ("bond0",)
    [problem] = lint_interfaces("lo", inventory).problems
    assert "no other host can be reached over lo" in problem
    assert lint_interfaces("lo", inventory, several_hosts=False).problems == ()
    assert lint_interfaces("eno1", inventory).suggestion == "=bond0"


@settings(max_examples=200, deadline=None)
@given(st.text(alphabet="^=,: mlx5_01x", max_size=20), st.integers(0, 4))
def test_any_text_is_judged(value: str, count: int) -> None:
    found = lint_list(value, devices(count))
    parsed = NameList.parse(value)
    assert found.selected == tuple(name for name, port in devices(count) if parsed.selects(name, port))
    if found.suggestion:
        assert not any("modifiers" in text for text in lint_list(found.suggestion, devices(count)).problems)
