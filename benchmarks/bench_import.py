# SPDX-License-Identifier: Apache-2.0
"""What an installed Holmes costs a process that never asks for it: its share of `import torch`, and of later imports.

CPU time, in fresh processes; the least of several is the cost, the rest is the machine. `python bench_import.py [N]`.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys

MEASURE = """
import time, sys
import torch
start = time.process_time()
import _holmes_autoload
_holmes_autoload.activate()
cost = time.process_time() - start
hook = sys.meta_path[0]
start = time.process_time()
for _ in range(10000):
    hook.find_spec("a.module.nobody.waits.for")
later = (time.process_time() - start) / 10000
print(cost * 1e3, later * 1e6, len([name for name in sys.modules if "holmes" in name]))
"""


def main() -> None:
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 9
    env = {name: value for name, value in os.environ.items() if name != "HOLMES_CONFIG"}
    env["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"  # here it is called by hand, to be timed alone
    rows = []
    for _ in range(count):
        done = subprocess.run([sys.executable, "-c", MEASURE], env=env, check=True, capture_output=True, text=True)
        rows.append([float(word) for word in done.stdout.split()])
    costs, later, modules = zip(*rows, strict=True)
    print(f"import torch:  {min(costs):.2f} ms more (median {statistics.median(costs):.2f}), {modules[0]:.0f} modules")
    print(f"later imports: {min(later):.2f} us more each")


if __name__ == "__main__":
    main()
