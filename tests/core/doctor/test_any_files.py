# SPDX-License-Identifier: Apache-2.0
"""`holmes doctor` is given any files: it finds something, or says which file cannot be read and why. It never fails."""

from __future__ import annotations

import contextlib
import gzip
import io
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from holmes_core.cli import main
from holmes_core.cluster.sources import inventory_from_texts
from tests.core.cluster.test_sources import ADDRESSES, IBSTAT, IBSTATUS, MATRIX, SHOW_GIDS, XML
from tests.core.damage import damaged_bytes, damaged_json
from tests.core.doctor.test_logs import FAULTS

OUTPUTS = [IBSTAT, IBSTATUS, SHOW_GIDS, MATRIX, ADDRESSES, XML]
INVENTORIES = [
    json.dumps(inventory_from_texts({"a": text}, host=f"h{index}").to_json()) for index, text in enumerate(OUTPUTS)
]
LOGS = ["\n".join(lines) for lines, _, _ in FAULTS.values()]
PACKED = [gzip.compress(text.encode()) for text in LOGS[:8]]
FILES = st.one_of(
    damaged_bytes([text.encode() for text in OUTPUTS]).map(lambda data: ("h1.out.txt", data)),
    damaged_bytes([text.encode() for text in LOGS]).map(lambda data: ("job.log", data)),
    damaged_bytes(PACKED).map(lambda data: ("job.log.gz", data)),
    damaged_bytes([text.encode() for text in INVENTORIES]).map(lambda data: ("cut.json", data)),
    damaged_json(INVENTORIES).map(lambda text: ("host.json", text.encode())),
    st.binary(max_size=60).map(lambda data: ("any.log", data)),
)
SETTINGS = settings(deadline=None, database=None, suppress_health_check=list(HealthCheck))


def check(folder: Path, files: list[tuple[str, bytes]]) -> None:
    names = []
    for index, (name, data) in enumerate(files):
        path = folder / str(index) / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(data)
        names.append(str(path))
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = main(["doctor", "--json", *names])
    if status == 2:
        assert any(name in err.getvalue() for name in names) or "host" in err.getvalue(), err.getvalue()
        assert "do: " in err.getvalue()
    else:
        assert json.loads(out.getvalue())["status"] == status


def fuzz(folder: Path) -> Callable[[], None]:
    @given(st.lists(FILES, min_size=1, max_size=3))
    def run(files: list[tuple[str, bytes]]) -> None:
        check(folder, files)

    return run


def test_any_files(tmp_path: Path) -> None:
    settings(SETTINGS, max_examples=60)(fuzz(tmp_path))()


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_ten_thousand_files(tmp_path: Path) -> None:
    settings(SETTINGS, max_examples=10_000)(fuzz(tmp_path))()
