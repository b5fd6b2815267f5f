# SPDX-License-Identifier: Apache-2.0
"""Training speed in labs with unequal networks: Holmes against its peers, same model, batch, ranks and data.

    sudo make bench-lab                                        # everything: a day
    sudo .venv/bin/python benchmarks/lab_throughput.py [--settings homogeneous hybrid8 hybrid25 ...]
        [--systems planned ddp ...] [--jobs hybrid8:ddp4 ...] [--repeats 3] [--turns 5]
        [--steps 3] [--together 4] [--out benchmarks/lab.md] [--add]

See lab_settings.py for the labs and the systems and lab_turns.py for how they are timed. A sitting is some jobs that
take turns, Holmes on one fabric always among them; a repetition starts all of them anew. "Limit" is the time that the
busiest rank spends in blocks, head and loss (Holmes counts it), or that the slow link takes for its bytes, if that is
more: what the same layout would reach if nothing else took time. Bytes between clusters are payload that Holmes counts
where it hands tensors to a process group.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

import lab_turns
from lab_page import REFERENCE, Results, draw, page
from lab_settings import FABRIC, TITLES, VARIANTS, host_cpus
from lab_systems import LENGTH, SIZE
from lab_turns import Key, Run


def most_together() -> int:
    """Return how many jobs there is memory for."""
    import psutil

    return max(2, min(4, psutil.virtual_memory().available // (7 * 2**30)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--settings", nargs="+", choices=TITLES, default=list(TITLES))
    parser.add_argument("--systems", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument("--jobs", nargs="+", metavar="SETTING:SYSTEM", help="these, not all systems in all settings")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--turns", type=int, default=5, help="of each job in a sitting")
    parser.add_argument("--steps", type=int, default=3, help="of a turn; the first does not count")
    parser.add_argument(
        "--together", type=int, default=most_together(), help="jobs of a sitting (each takes about 6 GiB)"
    )
    parser.add_argument("--batch", type=int, default=32, help="sequences of the whole job per step")
    parser.add_argument("--out", help="the page; a bar chart of the same name goes beside it, and the times as JSON")
    parser.add_argument("--add", action="store_true", help="add to what --out has already, of the same model and batch")
    parser.add_argument("--replicas", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--hold", nargs=3, metavar=("SETTING", "SYSTEM", "FOLDER"), help=argparse.SUPPRESS)
    parser.add_argument("--be", nargs=2, metavar=("SYSTEM", "FOLDER"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.steps < 2 or args.turns < 1:
        parser.error(f"--steps {args.steps} --turns {args.turns}: at least 2 steps (the first does not count), 1 turn")
    words = [__file__, "--turns", str(args.turns), "--steps", str(args.steps), "--batch", str(args.batch)]
    if args.be:
        name, folder = args.be[0], Path(args.be[1])
        lab_turns.be(name, folder, batch=args.batch, turns=args.turns, steps=args.steps, replicas=args.replicas)
        return
    if args.hold:
        lab_turns.hold(args.hold[0], args.hold[1], Path(args.hold[2]), turns=args.turns, words=words)
    lab_turns.end_on_sigterm()
    results: Results = {}
    commands: list[str] = []
    saved = Path(args.out).with_suffix(".json") if args.out else None
    what = f"{SIZE}; {args.batch} x {LENGTH} tokens; {host_cpus():g} CPUs per host; {FABRIC} bit/s"
    if args.add and saved is not None and saved.exists():
        kept = json.loads(saved.read_text())
        if kept["what"] != what:
            parser.error(f"--add: {saved} has {kept['what']}; this would be {what}: not to be compared")
        for *key, runs in kept["runs"]:
            results[key[0], key[1]] = [Run(**run) for run in runs]
        commands += kept.get("commands", [])
    failures: dict[Key, str] = {}
    keys = [(setting, name) for setting in args.settings for name in args.systems]
    if args.jobs:
        keys = [(setting, name) for setting, _, name in (job.partition(":") for job in args.jobs)]
        if wrong_names := [":".join(key) for key in keys if key[0] not in TITLES or key[1] not in VARIANTS]:
            parser.error(f"--jobs {' '.join(wrong_names)}: not SETTING:SYSTEM, as in --settings and --systems")
    keys = [key for key in keys if key != REFERENCE]
    size = max(1, args.together - 1)
    number = max((run.sitting for runs in results.values() for run in runs), default=0)
    chosen = f"--settings {' '.join(args.settings)} --systems {' '.join(args.systems)}"
    chosen = f"--jobs {' '.join(args.jobs)}" if args.jobs else chosen
    command = f"{chosen} --repeats {args.repeats} --turns {args.turns} --steps {args.steps} "
    commands.append(f"{command}--together {args.together} --batch {args.batch}")
    for repeat in range(args.repeats):
        for start in range(0, max(1, len(keys)), size):
            number += 1
            sitting = [REFERENCE, *keys[start : start + size]]
            print(f"{repeat + 1}/{args.repeats} {', '.join(' '.join(key) for key in sitting)}", flush=True)
            with tempfile.TemporaryDirectory(prefix="holmes-bench-") as folder:
                found, wrong = lab_turns.sit(
                    sitting, number=number, turns=args.turns, steps=args.steps, folder=Path(folder), words=words
                )
            for key, run in found.items():
                results.setdefault(key, []).append(run)
                for line in run.said:
                    print(f"    {' '.join(key)}: {line}", flush=True)
            for key, why in wrong.items():
                failures[key] = why
                print(f"    {' '.join(key)}: {why}", flush=True)
            if saved is not None:  # hours of work: kept from the first sitting on
                rows = [[*key, [asdict(run) for run in runs]] for key, runs in results.items()]
                part = saved.with_suffix(".part")
                part.write_text(json.dumps({"what": what, "commands": commands, "runs": rows}, indent=1) + "\n")
                part.replace(saved)
    if not results:
        sys.exit("nothing was measured")
    text = page(results, failures, commands, args.batch, Path(args.out or "lab.md").with_suffix(".png").name)
    print(text)
    if args.out:
        Path(args.out).write_text(text)
        draw(results, Path(args.out).with_suffix(".png"))


if __name__ == "__main__":
    main()
