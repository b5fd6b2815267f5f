# SPDX-License-Identifier: Apache-2.0
"""The result page of lab_throughput.py, and its picture."""

from __future__ import annotations

import platform
import re
import statistics
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

from lab_settings import FABRIC, TITLES, VARIANTS, bound, host_cpus
from lab_turns import Key, Run

Results = dict[Key, list[Run]]
#: One fabric, as the job plans itself: in every sitting, and what all others are compared with.
REFERENCE: Key = ("homogeneous", "planned")
#: What is asked of Holmes: its speed on one fabric is 1.
GOALS = {"hybrid8": 0.99, "hybrid25": 0.95, "hybrid100": 0.80}
#: At most this part of a peer's time: half, where a ring of all gradients takes longer than computing; else no more
#: than it, as far as this can be told.
PARTS = {"hybrid25": 0.5, "hybrid100": 0.5}
LEVEL = 1.01
#: All means at once, which variants with one of them changed are compared with.
BASE = "holmes"


def seconds(results: Results, key: Key) -> list[float]:
    """Return seconds of each step that counts."""
    return [one for run in results[key] for turn in run.turns for one in turn]


def speeds(results: Results, key: Key, base: Key = REFERENCE) -> list[float]:
    """Return, for each turn, how fast a job was as a part of another's speed in the same round of the same sitting."""
    found = []
    for run in results[key]:
        for other in results.get(base, []):
            if other.sitting == run.sitting:
                pairs = zip(other.turns, run.turns, strict=False)
                found += [statistics.median(theirs) / statistics.median(own) for theirs, own in pairs]
    return found


def best_of(results: Results, setting: str) -> dict[str, Key]:
    """Return each peer's best variant in a setting, by its median speed; of Holmes, what the job plans by itself."""
    found: dict[str, Key] = {}
    for key in results:
        if key[0] == setting and speeds(results, key):
            system = VARIANTS[key[1]].system
            if system.startswith("Holmes") and not key[1].startswith("planned"):
                continue
            found[system] = max(found.get(system, key), key, key=lambda one: statistics.median(speeds(results, one)))
    return found


def against(results: Results, key: Key, base: Key) -> str:
    """Return how many times as long a job takes as another: in the same rounds, or (~) by way of the reference."""
    if pairs := speeds(results, base, key):
        return f"{statistics.median(pairs):.2f} x"
    return f"~ {statistics.median(speeds(results, base)) / statistics.median(speeds(results, key)):.2f} x"


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """Return the quartiles; of one value, that value thrice."""
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else [*values] * 3
    return low, middle, high


def limit(results: Results, key: Key) -> tuple[float, str] | None:
    """Return the seconds that a step of Holmes cannot go below with this layout, and what takes them; None of peers.

    The busiest rank's computing, or what the rank that sends most sends over its port at the port's rate.
    """
    runs = [run for run in results[key] if run.computes]
    if not runs:
        return None
    computes = statistics.median(run.computes for run in runs)
    rate = FABRIC if key[0] == "homogeneous" else FABRIC // int(key[0].lstrip("abcdefghijklmnopqrstuvwxyz"))
    sends = statistics.median(run.link for run in runs) * 8 / rate
    return (computes, "computing") if computes >= sends else (sends, "the slow link")


def ablations(results: Results) -> list[str]:
    """Return a table of Holmes' means, each switched off or on alone: against the layout that has them all."""
    lines: list[str] = []
    for setting in TITLES:
        base = (setting, BASE)
        keys = [(setting, name) for name, one in VARIANTS.items() if one.kind == "holmes" and one.config.get("pp")]
        for key in keys:
            if base in results and key in results and key != base:
                lines.append(f"| {TITLES[setting]} | {VARIANTS[key[1]].label} | {against(results, key, base)} | "
                             f"{statistics.median(seconds(results, key)):.2f} |")  # fmt: skip
    if lines:
        head = f"One at a time, against: {VARIANTS[BASE].label}. More than 1 x: the means gains."
        lines = ["", "## What each means gains", "", head, "", "| setting | instead | time | s/step |",
                 "| --- | --- | --- | --- |", *lines]  # fmt: skip
    return lines


def plans(results: Results) -> list[str]:
    """Return a table of what each job chose that planned itself, and how far its prediction was from its steps."""
    rows: list[str] = []
    errors: list[float] = []
    for key, runs in results.items():
        for run in runs if key[1].startswith("planned") else []:
            said = " ".join(run.said)
            chose = re.search(r"by what was measured: ([^;]*)", said)
            predicted = re.search(r"([\d.]+) s per step", said)
            took = statistics.median(one for turn in run.turns for one in turn)
            cells = ["-", "-"]
            if predicted is not None:
                errors.append(float(predicted[1]) / took - 1)
                cells = [predicted[1], f"{errors[-1]:+.0%}"]
            rows.append(f"| {TITLES[key[0]]} | {VARIANTS[key[1]].system} | {chose[1] if chose else '-'} | {cells[0]} | "
                        f"{took:.2f} | {cells[1]} |")  # fmt: skip
    if not errors:
        return []
    typical, worst = statistics.median(map(abs, errors)), max(map(abs, errors))
    return ["", "## What jobs chose that planned themselves", "",
            f"With what each measured in its first seconds. Predictions: median {typical:.1%} from the steps that "
            f"followed, worst {worst:.0%}.", "",
            "| setting | system | chosen | predicted, s | measured, s | |", "| --- | --- | --- | --- | --- | --- |",
            *rows]  # fmt: skip


def goals(results: Results, batch: int) -> list[str]:
    """Return a table of what is asked of Holmes and what was measured."""
    rows: list[tuple[str, str, bool]] = []
    for setting in TITLES:
        found = best_of(results, setting)
        if "Holmes" not in found:
            continue
        own = found["Holmes"]
        speed = statistics.median(speeds(results, own))
        if setting in GOALS:
            asked = f"{TITLES[setting]}: at least {GOALS[setting]:.2f} of one fabric's speed"
            rows.append((asked, f"{speed:.3f}", speed >= GOALS[setting]))
        peers = {s: statistics.median(speeds(results, key)) for s, key in found.items() if not s.startswith("Holmes")}
        if peers:
            best = max(peers, key=lambda peer: peers[peer])
            rounds = min(len(speeds(results, found[best])), len(speeds(results, own)))
            part = PARTS.get(setting, LEVEL)
            asked = "every peer takes at least twice the time" if part < 1 else "no peer is faster"
            all_peers = {one.system for one in VARIANTS.values() if not one.system.startswith("Holmes")}
            rows.append((
                f"{TITLES[setting]}: {asked} ({len(peers)} of {len(all_peers)} measured)",
                f"{best}, the fastest: {against(results, found[best], own)} Holmes' time; {rounds} rounds",
                peers[best] <= part * speed,
            ))  # fmt: skip
        if least := bound(setting, batch):
            total, sums = (statistics.median(run.across[kind] for run in results[own]) for kind in (0, 1))
            rows.append((
                f"{TITLES[setting]}: at most 1.05 x the bytes that must cross; 0 of them are sums of replicas",
                f"{total / least:.2f} x; {sums / 1e6:.1f} MB",
                total <= 1.05 * least and not sums,
            ))  # fmt: skip
    lines = [f"| {asked} | {measured} | {'yes' if met else 'NO'} |" for asked, measured, met in rows]
    return ["", "## Goals", "", "| asked | measured | met |", "| --- | --- | --- |", *lines] if lines else []


def page(results: Results, failures: dict[Key, str], commands: Sequence[str], batch: int, picture: str) -> str:
    """Return the result page.

    Args:
        results: What was measured.
        failures: What was not, and why.
        commands: The arguments of each call of lab_throughput.py that measured it.
        batch: Sequences per step.
        picture: Name of the bar chart's file.
    """
    from lab_systems import LENGTH, SIZE

    settings = [setting for setting in TITLES if any(where == setting for where, _ in results)]
    lines = [
        "# Training speed in the lab",
        "",
        f"{SIZE}, {batch} x {LENGTH} tokens per step, AdamW, fp32; 4 "
        f"hosts with one rank and {host_cpus():g} CPUs each, fabric {FABRIC / 1e9:g} Gbit/s.",
        f"torch {version('torch')}, lightning {version('lightning')}, accelerate {version('accelerate')}, transformers "
        f"{version('transformers')}, Python {platform.python_version()}, Linux {platform.release()}.",
        "",
        "Jobs of a sitting train in turn, some steps each; speeds are medians over turns, each against Holmes on one "
        "fabric in the same round (seconds are of the hour they were measured in). Of each peer the best variant "
        "counts; Holmes plans by itself. `python benchmarks/lab_throughput.py` with:",
        "",
        *[f"- `{words}`" for words in commands],
        "",
        f"![speed]({picture})",
        "",
        "| setting | system | best variant | speed (one fabric: 1) | time of Holmes' | s/step | tokens/s |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for setting in settings:
        found = best_of(results, setting)
        ranked = {system: statistics.median(speeds(results, key)) for system, key in found.items()}
        for system, speed in sorted(ranked.items(), key=lambda item: -item[1]):
            middle = statistics.median(seconds(results, found[system]))
            times = against(results, found[system], found["Holmes"]) if "Holmes" in found else "-"
            lines.append(
                f"| {TITLES[setting]} | {system} | {VARIANTS[found[system][1]].label} | {speed:.2f} | {times} | "
                f"{middle:.2f} | {batch * LENGTH / middle:.0f} |"
            )
    lines += goals(results, batch)
    lines += [
        "",
        "## Every variant",
        "",
        "| setting | system | variant | speed, quartiles | rounds | s/step | limit | MB between clusters |",
    ]
    lines += ["| --- | --- | --- | --- | --- | --- | --- | --- |"]
    for key in sorted(results, key=lambda key: (list(TITLES).index(key[0]), list(VARIANTS).index(key[1]))):
        runs, middle = results[key], statistics.median(seconds(results, key))
        part = sent = "-"
        if least_time := limit(results, key):
            part = f"{least_time[0]:.2f} s ({least_time[1]}), {least_time[0] / middle:.0%}"
        if least_time and (least := bound(key[0], batch)):
            total, sums = (statistics.median(run.across[kind] for run in runs) for kind in (0, 1))
            sent = f"{total / 1e6:.1f} ({total / least:.2f} of the bound; between replicas {sums / 1e6:.1f})"
        found_speeds = speeds(results, key)
        low, half, high = quartiles(found_speeds or [float("nan")])
        lines.append(
            f"| {TITLES[key[0]]} | {VARIANTS[key[1]].system} | {VARIANTS[key[1]].label} | {half:.3f} ({low:.2f} - "
            f"{high:.2f}) | {len(found_speeds)} in {len(runs)} | {middle:.2f} | {part} | {sent} |"
        )
    lines += [f"| {TITLES[s]} | {VARIANTS[n].system} | {VARIANTS[n].label} | - | 0 | {why} | - | - |" for (s, n), why
              in failures.items() if (s, n) not in results]  # fmt: skip
    lines += [*ablations(results), *plans(results)]
    return "\n".join(lines) + "\n"


def draw(results: Results, path: Path) -> None:
    """Draw how fast each system is: a group of bars per setting, a bar per system."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    settings = [setting for setting in TITLES if any(where == setting for where, _ in results)]
    systems = sorted({VARIANTS[name].system for _, name in results})
    systems.sort(key=lambda system: not system.startswith("Holmes"))
    figure, axes = plt.subplots(figsize=(10, 4.5), layout="constrained")
    width = 0.8 / len(systems)
    for place, system in enumerate(systems):
        for group, setting in enumerate(settings):
            key = best_of(results, setting).get(system)
            if key is None:
                continue
            speed = statistics.median(speeds(results, key))
            x = group + (place - (len(systems) - 1) / 2) * width
            axes.bar(x, speed, width * 0.92, color=f"C{place}", label=system)
            axes.text(x, speed, f"{speed:.2f}", ha="center", va="bottom", fontsize=6)
    titles = [TITLES[s].replace(", Eth", "\nEth").replace(", at", "\nat") for s in settings]
    axes.set_xticks(range(len(settings)), titles, fontsize=8)
    axes.set_ylabel("speed; Holmes on one fabric is 1")
    axes.axhline(1.0, color="grey", linewidth=0.6, zorder=0)
    handles, labels = axes.get_legend_handles_labels()
    unique = dict(zip(labels, handles, strict=True))
    axes.legend(unique.values(), unique.keys(), fontsize=8, frameon=False, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=130)
