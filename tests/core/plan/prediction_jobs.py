# SPDX-License-Identifier: Apache-2.0
"""Small jobs for the tests of predictions."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from holmes_core.plan.cost import Choice, CostModel, Job
from holmes_core.plan.hardware import GPUS, ClusterHardware, Hardware, Link
from holmes_core.plan.profile import ModelProfile
from holmes_core.plan.profile_config import profile_of_config
from holmes_core.plan.search import split_blocks

KINDS = ("infiniband", "roce", "ethernet")


def gpt(hidden: int = 3072, layers: int = 30, heads: int = 32, seq: int = 2048, **more: Any) -> ModelProfile:
    sizes = {"n_embd": hidden, "n_layer": layers, "n_head": heads, "n_positions": seq, "vocab_size": 51200}
    return profile_of_config({"model_type": "gpt2", "tie_word_embeddings": False, **sizes, **more}, seq=seq)


def cluster(name: str, *hosts: int, kind: str = "infiniband", gpu: str = "A100-80GB", **more: Any) -> ClusterHardware:
    values = {"nics": 4, "nic_rate": 200.0, "ethernet_rate": 25.0, **more}
    return ClusterHardware(name=name, kind=kind, hosts=hosts, gpu=GPUS[gpu], **values)


def job(*clusters: ClusterHardware, batch: int = 64, profile: ModelProfile | None = None, **more: Any) -> Job:
    links = more.pop("links", ())
    hardware = Hardware(clusters=clusters, links=links)
    return Job(profile=profile or gpt(), hardware=hardware, batch=batch, **more)


def two_clusters(**more: Any) -> Job:
    rate = more.pop("ethernet_rate", 25.0)
    return job(cluster("a", 8, 8, ethernet_rate=rate), cluster("b", 8, 8, kind="roce", ethernet_rate=rate), **more)


def choice(work: Job, **values: Any) -> Choice:
    """A choice whose stages and blocks follow from its degrees."""
    clusters = work.hardware.clusters
    values = {"tp": 1, "dp": 1, "order": tuple(range(len(clusters))), **values}
    width = values["tp"] * values["dp"]
    values.setdefault("stages", tuple(clusters[index].ranks // width for index in values["order"]))
    plain = Choice(**values)
    if not plain.layers_per_stage:
        layers = split_blocks(CostModel(work), plain)
        assert layers is not None
        plain = Choice(**{**values, "layers_per_stage": layers})
    return plain


@st.composite
def small_jobs(draw: st.DrawFn) -> Job:
    """Jobs whose every layout can be tried."""
    clusters = []
    for index in range(draw(st.integers(1, 3))):
        hosts = draw(st.lists(st.sampled_from([1, 2, 4]), min_size=1, max_size=2))
        clusters.append(
            cluster(
                "abc"[index],
                *hosts,
                kind=draw(st.sampled_from(KINDS)),
                gpu=draw(st.sampled_from(["A100-80GB", "V100-16GB", "L4"])),
                ethernet_rate=draw(st.sampled_from([0.2, 1.0, 10.0, 100.0])),
            )
        )
    links = ()
    if len(clusters) > 1:
        links = (Link(between=("a", "b"), rate=draw(st.sampled_from([0.5, 5.0])), latency=1e-3),)
    layers, batch = draw(st.integers(4, 9)), draw(st.sampled_from([6, 8, 12]))
    profile = gpt(draw(st.sampled_from([256, 2048])), layers, draw(st.sampled_from([2, 8])), 512)
    return job(*clusters, batch=batch, profile=profile, links=links)
