# SPDX-License-Identifier: Apache-2.0
"""Training speed in labs with unequal networks: Holmes against its peers, same model, batch, ranks and data.

    sudo make bench-lab                                        # everything: hours
    sudo .venv/bin/python benchmarks/lab_throughput.py [--settings homogeneous hybrid8 hybrid25 ...]
        [--systems holmes ddp ...] [--repeats 3] [--steps 6] [--out benchmarks/lab.md]

Four hosts with one rank each; CPU quotas that add up to the machine, so that nobody computes in another's waiting time.
`homogeneous` joins them by one fast fabric; in `hybridN` two clusters of two are joined by Ethernet at 1/N of the
fabric's rate; `three8` are clusters of two, one and one; `ethernet8` has no fabric at all. Runs are interleaved, each
in a lab of its own; the median over steps of all repetitions counts, the first steps of a run do not. Of each system
the best of its variants counts; all are printed. Peers use one network for all ranks, as they do: the one that all
hosts share. "Busiest rank computes" is the time it spends in blocks, head and loss (Holmes counts it): the limit that
the same layout would reach if nothing else took time, as long as no link has more to do than that. Bytes between
clusters are payload that Holmes counts where it hands tensors to a process group.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

FABRIC = 2_500_000_000  # bit/s; what two virtual CPUs can move beside their computing
WARM_UP = 2
TITLES = {
    "homogeneous": "one fabric",
    "hybrid8": "two clusters, Ethernet 1/8",
    "hybrid25": "two clusters, Ethernet 1/25",
    "hybrid100": "two clusters, Ethernet 1/100",
    "three8": "three clusters (2, 1, 1 hosts), Ethernet 1/8",
    "ethernet8": "Ethernet only, at 1/8",
}


@dataclass(frozen=True, kw_only=True)
class Variant:
    """One way to run a system.

    Args:
        system: Whose best variant counts.
        kind: Of `lab_systems.train`.
        label: Of this variant.
        options: For `lab_systems.train`.
        config: For Holmes.
    """

    system: str
    kind: str
    label: str
    options: dict[str, Any] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)


def _holmes(label: str, replicas: int, kind: str = "holmes", system: str = "Holmes", **config: Any) -> Variant:
    options = {"replicas": replicas}
    return Variant(system=system, kind=kind, label=label, options=options, config={"probe": "off", **config})


PP2: dict[str, Any] = {"pp": 2, "layers_per_stage": [6, 5]}
BEST: dict[str, Any] = {**PP2, "num_microbatches": 8, "defer_weights": True, "taper": True}
#: Pipeline ranks of "planned" in each setting; what else there is to decide, the job decides.
PLANNED = {"homogeneous": 1, "three8": 4, "ethernet8": 4}
VARIANTS = {
    "planned": _holmes("as the job plans itself", 2, probe="auto", print_plan=True),
    "planned-accelerate": _holmes(
        "as the job plans itself", 2, kind="holmes_accelerate", system="Holmes (Accelerate)", probe="auto",
        print_plan=True,
    ),
    "holmes": _holmes("pp 2 x dp 2, 8 micro-batches, deferred weights, taper", 2, **BEST),
    "holmes16": _holmes("the same, 16 micro-batches", 2, **{**BEST, "num_microbatches": 16}),
    "even": _holmes("without taper", 2, **{**BEST, "taper": False}),
    "plain": _holmes("without deferred weights", 2, **{**BEST, "defer_weights": False}),
    "first": _holmes("with the embedding on the first rank", 2, **BEST, embedding="first"),
    "late": _holmes("gradients summed after the backward", 2, **BEST, overlap=False),
    "ahead": _holmes("one micro-batch further ahead", 2, **BEST, run_ahead=1),
    "whole": _holmes("every replica steps all (sharding none)", 2, **BEST, sharding="none"),
    "dp": _holmes("dp 4", 4, pp=1),
    "dpwhole": _holmes("dp 4, every replica steps all", 4, pp=1, sharding="none"),
    "pp4": _holmes("pp 4, 8 micro-batches", 1, **{**BEST, "pp": 4, "layers_per_stage": [3, 3, 3, 2]}),
    "holmes-accelerate": _holmes(
        "pp 2 x dp 2, 8 micro-batches", 2, kind="holmes_accelerate", system="Holmes (Accelerate)", **BEST
    ),
    "ddp": Variant(system="Lightning DDP", kind="ddp", label="25 MB buckets", options={"bucket_cap_mb": 25}),
    "ddp4": Variant(system="Lightning DDP", kind="ddp", label="4 MB buckets", options={"bucket_cap_mb": 4}),
    "fsdp2": Variant(
        system="Lightning FSDP2", kind="fsdp2", label="parameters kept after the forward", options={"reshard": False}
    ),
    "fsdp2-reshard": Variant(
        system="Lightning FSDP2", kind="fsdp2", label="parameters gathered twice", options={"reshard": True}
    ),
    "accelerate-ddp": Variant(
        system="Accelerate DDP", kind="accelerate_ddp", label="25 MB buckets", options={"bucket_cap_mb": 25}
    ),
    "accelerate-fsdp2": Variant(
        system="Accelerate FSDP2", kind="accelerate_fsdp2", label="parameters kept", options={"reshard": False}
    ),
    "composed": Variant(
        system="torch pipelining + FSDP2", kind="composed", label="pp 2 x dp 2, 8 micro-batches",
        options={"replicas": 2, "microbatches": 8, "reshard": False},
    ),
    "composed4": Variant(
        system="torch pipelining + FSDP2", kind="composed", label="pp 2 x dp 2, 4 micro-batches",
        options={"replicas": 2, "microbatches": 4, "reshard": False},
    ),
}  # fmt: skip


def spec_of(setting: str) -> dict[str, Any]:
    """Return the lab's specification."""
    cpu = {"cpu": round((os.cpu_count() or 1) / 4, 3)}
    rates = {"rdma_rate": f"{FABRIC}bit", **cpu}
    if setting == "homogeneous":
        clusters = [{"name": "a", "kind": "roce", "hosts": 4}]
        return {"clusters": clusters, "ethernet_rate": f"{FABRIC}bit", **rates}
    part = int(setting.lstrip("abcdefghijklmnopqrstuvwxyz"))
    rates["ethernet_rate"] = f"{FABRIC // part}bit"
    if setting.startswith("ethernet"):
        return {"clusters": [{"name": "a", "kind": "ethernet", "hosts": 4}], **rates}
    kinds = {"a": ("infiniband", 2), "b": ("roce", 2)}
    if setting.startswith("three"):
        kinds = {"a": ("infiniband", 2), "b": ("roce", 1), "c": ("roce", 1)}
    return {"clusters": [{"name": n, "kind": k, "hosts": h} for n, (k, h) in kinds.items()], **rates}


@dataclass(kw_only=True)
class Times:
    """What was measured of one variant in one setting.

    Args:
        seconds: Of each step that counts, of all runs.
        computes: Of each run of Holmes: seconds per step that its busiest rank computes.
        across: Of each run of Holmes: bytes per step between clusters, and those of them that are sums of gradients.
    """

    seconds: list[float] = field(default_factory=list)
    computes: list[float] = field(default_factory=list)
    across: list[tuple[float, float]] = field(default_factory=list)

    def add(self, other: Times) -> None:
        """Add another run."""
        self.seconds += other.seconds
        self.computes += other.computes
        self.across += other.across

    @property
    def median(self) -> float:
        """Seconds per step."""
        return statistics.median(self.seconds)


def run(setting: str, name: str, command: Callable[[int], list[str]], folder: Path) -> tuple[int, list[str]]:
    """Run ranks of a variant in a fresh lab.

    Args:
        setting: The lab.
        name: The variant.
        command: What a rank runs, by the number of replicas.
        folder: For the configuration.

    Returns:
        The exit status, and what was printed.
    """
    from holmes_core.lab.job import run_job
    from holmes_core.lab.session import Lab
    from holmes_core.lab.spec_file import parse_spec

    variant = VARIANTS[name]
    env = {"OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}
    given = variant.config
    replicas = variant.options.get("replicas", 4)
    if name.startswith("planned"):
        pp = PLANNED.get(setting, 2)
        given, replicas = {**given, "pp": pp}, 4 // pp
    if variant.config:
        config = folder / "holmes.yaml"
        config.write_text(json.dumps({"print_plan": False, "timeout": 120, **given}))
        env["HOLMES_CONFIG"] = str(config)
    else:  # what a user has to type where names do not resolve; Holmes needs none
        env["GLOO_SOCKET_IFNAME"] = "rdma0" if setting == "homogeneous" else "eth0"
    lines: list[str] = []
    lab = Lab.up(parse_spec(spec_of(setting)), name="bench-")
    try:
        done = run_job(lab, command(replicas), torchrun=True, env=env, timeout=900, write=lines.append)
    finally:
        lab.down()
    return done.returncode, lines


def measure(setting: str, name: str, *, batch: int, steps: int) -> Times | str:
    """Run one variant in a fresh lab.

    Returns:
        What was measured; or why nothing was.
    """
    with tempfile.TemporaryDirectory(prefix="holmes-bench-") as folder:
        out = Path(folder) / "times.json"
        words = [sys.executable, __file__, "--be", name, "--batch", str(batch), "--steps", str(steps)]
        words += ["--out", str(out), "--replicas"]
        status, lines = run(setting, name, lambda replicas: [*words, str(replicas)], Path(folder))
        if status or not out.exists():
            causes = [line for line in lines if "Error" in line] or lines or ["no output"]
            return causes[-1].strip()[:200]
        for line in lines:
            if any(word in line for word in ("by what was measured", "measured in", "predicted:")):
                print(f"    {line.partition('| ')[2].strip()}", flush=True)
        found = Times(seconds=json.loads(out.read_text()))
        if notes := [json.loads(file.read_text()) for file in out.parent.glob("notes.*")]:
            compute, across, sums = (list(column) for column in zip(*notes, strict=True))
            found.computes, found.across = [max(compute)], [(sum(across), sum(sums))]
        return found


def be(name: str, *, batch: int, steps: int, replicas: int, out: str) -> None:
    """Be one rank; rank 0 writes seconds per step."""
    import lab_systems

    variant = VARIANTS[name]
    options = {**variant.options, "replicas": replicas}
    clock = lab_systems.train(variant.kind, options, batch=batch, steps=steps + WARM_UP)
    if notes := lab_systems.NOTES:
        per_step = [(end - start) / steps for start, end in zip(notes[WARM_UP - 1], notes[-1], strict=True)]
        Path(out).with_name(f"notes.{os.environ['RANK']}").write_text(json.dumps(per_step))
    if os.environ["RANK"] == "0":
        Path(out).write_text(json.dumps(list(lab_systems.step_seconds(clock, WARM_UP))))


Results = dict[tuple[str, str], Times]  # by setting and variant


def best_of(results: Results, setting: str) -> dict[str, tuple[float, str]]:
    """Return each system's best variant in a setting: median seconds per step, and its name."""
    found: dict[str, tuple[float, str]] = {}
    for (where, name), times in results.items():
        if where == setting:
            middle, system = times.median, VARIANTS[name].system
            found[system] = min(found.get(system, (middle, name)), (middle, name))
    return found


def bound(setting: str, batch: int) -> int:
    """Return the bytes that clusters must exchange per step: activations and their gradients, in float32.

    Once per border between clusters; and once more between the last and the first, for the tied embedding: embedded
    micro-batches, or its gradients and values (which with these sizes are as much).
    """
    from lab_systems import LENGTH, WIDTH

    clusters = len(spec_of(setting)["clusters"])
    return 0 if clusters == 1 else 2 * clusters * batch * LENGTH * WIDTH * 4


def page(
    results: Results, failures: dict[tuple[str, str], str], settings: Sequence[str], words: str, batch: int
) -> str:
    """Return the result page."""
    from lab_systems import LENGTH

    lines = [
        "# Training speed in the lab",
        "",
        f"A GPT-2 of 28 M parameters (11 blocks, tied embedding), {batch} x {LENGTH} tokens per step, AdamW, fp32; 4 "
        f"hosts with one rank and {(os.cpu_count() or 1) / 4:g} CPUs each, fabric {FABRIC / 1e9:g} Gbit/s.",
        f"torch {version('torch')}, lightning {version('lightning')}, accelerate {version('accelerate')}, transformers "
        f"{version('transformers')}, Python {platform.python_version()}, Linux {platform.release()}.",
        "",
        f"`python benchmarks/lab_throughput.py {words}`. Medians over the steps of interleaved runs; load average at "
        f"the end {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores. Of each system the best variant counts.",
        "",
        "![seconds per step](lab.png)",
        "",
        "| setting | system | best variant | s/step | tokens/s | against Holmes | Holmes against one fabric |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    base = best_of(results, "homogeneous").get("Holmes")
    for setting in settings:
        found = best_of(results, setting)
        ours = found.get("Holmes")
        for system, (seconds, name) in sorted(found.items(), key=lambda item: item[1]):
            against = f"{seconds / ours[0]:.2f} x" if ours else "-"
            speed = f"{base[0] / seconds:.2f}" if base and system == "Holmes" else ""
            lines.append(
                f"| {TITLES[setting]} | {system} | {VARIANTS[name].label} | {seconds:.2f} | "
                f"{batch * LENGTH / seconds:.0f} | {against} | {speed} |"
            )
    lines += [
        "",
        "## Every variant",
        "",
        "| setting | system | variant | s/step | quartiles | steps | busiest rank computes | MB between clusters |",
    ]
    lines += ["| --- | --- | --- | --- | --- | --- | --- | --- |"]
    for (setting, name), times in sorted(results.items(), key=lambda item: list(TITLES).index(item[0][0])):
        computes = statistics.median(times.computes or [0.0])
        part = f"{computes:.2f} s, {computes / times.median:.0%}" if computes else "-"
        low, middle, high = statistics.quantiles(times.seconds, n=4) if len(times.seconds) > 1 else times.seconds * 3
        sent = "-"
        if times.across and (least := bound(setting, batch)):
            total, sums = (statistics.median(column) for column in zip(*times.across, strict=True))
            sent = f"{total / 1e6:.1f} ({total / least:.2f} of the bound; sums of gradients {sums / 1e6:.1f})"
        lines.append(
            f"| {TITLES[setting]} | {VARIANTS[name].system} | {VARIANTS[name].label} | {middle:.2f} | "
            f"{low:.2f} - {high:.2f} | {len(times.seconds)} | {part} | {sent} |"
        )
    lines += [f"| {TITLES[s]} | {VARIANTS[n].system} | {VARIANTS[n].label} | - | {why} | 0 | - | - |" for (s, n), why
              in failures.items()]  # fmt: skip
    return "\n".join(lines) + "\n"


def draw(results: Results, settings: Sequence[str], path: Path) -> None:
    """Draw seconds per step: a group of bars per setting, a bar per system."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    systems = sorted({VARIANTS[name].system for _, name in results})
    systems.sort(key=lambda system: not system.startswith("Holmes"))
    figure, axes = plt.subplots(figsize=(10, 4.5), layout="constrained")
    width = 0.8 / len(systems)
    top = 4 * max(best_of(results, s).get("Holmes", (1.0, ""))[0] for s in settings)
    for place, system in enumerate(systems):
        for group, setting in enumerate(settings):
            found = best_of(results, setting).get(system)
            if found is None:
                continue
            x = group + (place - (len(systems) - 1) / 2) * width
            axes.bar(x, min(found[0], top), width * 0.92, color=f"C{place}", label=system)
            axes.text(x, min(found[0], top), f"{found[0]:.1f}", ha="center", va="bottom", fontsize=7)
    titles = [TITLES[s].replace(", Eth", "\nEth").replace(", at", "\nat") for s in settings]
    axes.set_xticks(range(len(settings)), titles, fontsize=8)
    axes.set_ylabel("seconds per step (bars are cut at the top)")
    axes.set_ylim(0, top * 1.1)
    handles, labels = axes.get_legend_handles_labels()
    unique = dict(zip(labels, handles, strict=True))
    axes.legend(unique.values(), unique.keys(), fontsize=8, frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=130)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--settings", nargs="+", choices=TITLES, default=list(TITLES))
    parser.add_argument("--systems", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--batch", type=int, default=32, help="sequences of the whole job per step")
    parser.add_argument("--out", help="the page; a bar chart of the same name goes beside it, and the times as JSON")
    parser.add_argument("--add", action="store_true", help="add to the times that --out has already")
    parser.add_argument("--replicas", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--be", choices=VARIANTS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.be:
        be(args.be, batch=args.batch, steps=args.steps, replicas=args.replicas, out=args.out)
        return
    results: Results = {}
    failures: dict[tuple[str, str], str] = {}
    saved = Path(args.out).with_suffix(".json") if args.out else None
    if args.add and saved is not None and saved.exists():
        for setting, name, times in json.loads(saved.read_text()):
            results[setting, name] = Times(**times)
    for repeat in range(args.repeats):
        for setting in args.settings:
            for name in args.systems:
                found = measure(setting, name, batch=args.batch, steps=args.steps)
                if isinstance(found, str):
                    failures[setting, name] = found
                    print(f"{repeat + 1}/{args.repeats} {setting} {name}: {found}", flush=True)
                    continue
                results.setdefault((setting, name), Times()).add(found)
                print(f"{repeat + 1}/{args.repeats} {setting} {name}: {found.median:.2f} s", flush=True)
                if saved is not None:  # hours of work: kept from the first run on
                    saved.write_text(json.dumps([[*key, asdict(one)] for key, one in results.items()], indent=1) + "\n")
    settings = [s for s in TITLES if any(where == s for where, _ in results)]
    words = f"--settings {' '.join(args.settings)} --systems {' '.join(args.systems)}"
    words += f" --repeats {args.repeats} --steps {args.steps} --batch {args.batch}"
    text = page(results, failures, settings, words, args.batch)
    print(text)
    if args.out:
        Path(args.out).write_text(text)
        draw(results, settings, Path(args.out).with_suffix(".png"))


if __name__ == "__main__":
    main()
