# SPDX-License-Identifier: Apache-2.0
"""Checkpoints that were changed after they were written: a clear error or the same values, and never foreign code."""

from __future__ import annotations

import json
import os
import pickle
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from holmes_core.convert import ConvertError, convert_checkpoint
from holmes_core.errors import HolmesError
from holmes_core.runtime.checkpoint import (
    check_checkpoint,
    latest_checkpoint,
    load_file,
    load_tree,
    load_whole,
    save_parts,
    tree_bytes,
)
from holmes_core.runtime.checkpoint_files import BLOCK, MANIFEST, seal
from holmes_core.runtime.checkpoint_parts import Part, local_chunks, parts_in, placeholder
from holmes_core.runtime.checkpoint_place import put_in_place, replaced_path, retire, saving_path
from holmes_core.runtime.checkpoint_saver import save_file


def part(name: str, tensor: torch.Tensor) -> torch.Tensor:
    shape = tuple(tensor.shape)
    return placeholder(Part(name=name, shape=shape, dtype=tensor.dtype, tensor=tensor, chunks=local_chunks(shape)))


def values() -> dict[str, Any]:
    torch.manual_seed(0)
    return {
        "state_dict": {
            "embed.weight": torch.randn(11, 3),
            "half": torch.randn(4, 2, 5).to(torch.bfloat16),
            "none": torch.zeros(0, 4),
            "one": torch.tensor(3.5),
            "seen": torch.arange(7),
            "mask": torch.tensor([True, False]),
        },
        "optimizer_states": [{"state": {0: {"step": torch.tensor(2.0), "exp_avg": torch.randn(11, 3)}}}],
        "epoch": 3,
        "words": ["a", ("b", 1.5, None)],
    }


def save(folder: Path, name: str = "a.ckpt") -> Path:
    """Save parts in this process alone."""
    tree = values()
    tree["state_dict"] = {key: part(key, value) for key, value in tree["state_dict"].items()}
    state = tree["optimizer_states"][0]["state"][0]
    state["exp_avg"] = part("optimizer.0/embed.weight/exp_avg", state["exp_avg"])
    path = folder / name
    temporary = saving_path(path)
    temporary.mkdir()
    save_parts(path, temporary, parts_in(tree), files={"state.pt": tree_bytes(tree)}, group=None)
    return path


def same(found: Any, expected: Any) -> bool:
    if isinstance(expected, torch.Tensor):
        return isinstance(found, torch.Tensor) and found.dtype == expected.dtype and torch.equal(found, expected)
    if isinstance(expected, dict):
        return list(found) == list(expected) and all(same(found[key], value) for key, value in expected.items())
    if isinstance(expected, (list, tuple)):
        return len(found) == len(expected) and all(map(same, found, expected))
    return bool(found == expected)


def test_what_is_saved_comes_back(tmp_path: Path) -> None:
    path = save(tmp_path)
    assert same(load_whole(load_tree(path)), values())
    assert not list(tmp_path.glob(".*"))
    save_file(tmp_path / "b.ckpt", values())
    assert same(load_file(tmp_path / "b.ckpt"), values())


def test_torch_reads_the_parts_too(tmp_path: Path) -> None:
    """The layout is that of torch's own reader of safetensors in parts."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader

    path = save(tmp_path)
    found = {"embed.weight": torch.zeros(11, 3)}
    dcp.load(found, storage_reader=HuggingFaceStorageReader(str(path)), no_dist=True)
    assert torch.equal(found["embed.weight"], values()["state_dict"]["embed.weight"])


# ---- damage ---------------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    save(folder)
    save_file(folder / "b.ckpt", values())
    return folder


DAMAGE = st.tuples(
    st.sampled_from(["flip", "cut", "grow", "zero", "remove"]), st.integers(0, 10**6), st.integers(1, 255)
)


def damage(path: Path, kind: str, at: int, bits: int) -> None:
    data = bytearray(path.read_bytes())
    at %= len(data)
    if kind == "remove":
        path.unlink()
        return
    if kind == "flip":
        data[at] ^= bits
    elif kind == "cut":
        del data[at:]
    elif kind == "zero":
        data[at : at + 64] = bytes(len(data[at : at + 64]))
    else:
        data[at:at] = bytes([bits])
    path.write_bytes(data)


def load(path: Path) -> Any:
    return load_whole(load_tree(path)) if path.is_dir() else load_file(path)


def one(saved: Path, which: int, how: tuple[str, int, int]) -> None:
    files = [*sorted((saved / "a.ckpt").iterdir()), saved / "b.ckpt"]
    file = files[which % len(files)]
    path, before = (file if file.parent == saved else file.parent), file.read_bytes()
    try:
        damage(file, *how)
        found, told = None, ""
        try:
            found = load(path)
        except HolmesError as error:
            told = str(error)
        assert str(path) in told or same(found, values()), f"other values, or no clear word: {told}"
        assert "\ndo: " in told or not told
        skipped: list[str] = []
        newest = latest_checkpoint(saved, say=skipped.append)  # it never raises; one of the two is whole
        assert newest is not None
        assert newest != path or same(found, values())
    finally:
        file.write_bytes(before)


def fuzz(saved: Path, count: int) -> None:
    @settings(
        max_examples=count, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck)
    )
    @given(which=st.integers(0, 3), how=DAMAGE)
    def check(which: int, how: tuple[str, int, int]) -> None:
        one(saved, which, how)

    check()


def test_damage_is_noticed(saved: Path) -> None:
    fuzz(saved, 60)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_damage_is_noticed_ten_thousand_times(saved: Path) -> None:
    fuzz(saved, 10_000)


def test_a_manifest_that_lies(tmp_path: Path) -> None:
    """Not a flipped byte but a wrong statement with a right checksum."""
    path = save(tmp_path)
    text = (path / MANIFEST).read_text()

    def lie(change: Any) -> str:
        import zlib

        whole = json.loads(text)
        change(whole["checkpoint"])
        body = json.dumps(whole["checkpoint"], sort_keys=True, separators=(",", ":")).encode()
        (path / MANIFEST).write_text(json.dumps({"crc32": zlib.crc32(body), "checkpoint": whole["checkpoint"]}))
        with pytest.raises(HolmesError) as caught:
            load(path)
        return str(caught.value)

    def outside(body: Any) -> None:
        body["files"]["../../etc/passwd"] = body["files"]["state.pt"]

    def too_far(body: Any) -> None:
        body["tensors"]["embed.weight"]["chunks"][0][1] += 10**6

    def too_large(body: Any) -> None:
        body["tensors"]["embed.weight"]["shape"] = [10**9, 3]

    def missing(body: Any) -> None:
        body["tensors"]["embed.weight"]["chunks"] = []

    assert "../../etc/passwd" in lie(outside)
    assert "does not fit" in lie(too_far)
    assert "of the 3,000,000,000 elements of embed.weight" in lie(too_large)
    assert "holds 0 of the 33 elements" in lie(missing)
    assert "has no tensor embed.weight" in lie(lambda body: body["tensors"].pop("embed.weight"))
    assert "format 9" in lie(lambda body: body.update(format=9))


# ---- foreign code ---------------------------------------------------------------------------------------------------
class Evil:
    """Unpickling this runs a command."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.mark}",)


def test_pickles_run_no_code(tmp_path: Path) -> None:
    mark = tmp_path / "ran"
    pickle.loads(pickle.dumps(Evil(mark)))
    assert mark.exists(), "the attack works where nothing stops it"
    mark.unlink()
    path = save(tmp_path)
    torch.save({"state_dict": Evil(mark)}, path / "state.pt")
    (path / ".metadata").write_bytes(pickle.dumps(Evil(mark)))
    (path / MANIFEST).unlink()
    seal(path, kind="sharded", known={}, tensors={})
    single = tmp_path / "b.ckpt"
    torch.save({"state_dict": Evil(mark)}, single)
    for attacked in (path, single):
        with pytest.raises(HolmesError, match=r"holds more than tensors and plain values"):
            load(attacked)
        with pytest.raises(ConvertError):
            convert_checkpoint(attacked, tmp_path / "out")
        check_checkpoint(attacked)
    assert latest_checkpoint(tmp_path) is not None
    assert not mark.exists()


# ---- the newest good one ---------------------------------------------------------------------------------------------
def test_latest_skips_what_is_torn(tmp_path: Path) -> None:
    lines: list[str] = []

    def latest() -> Any:
        lines.clear()
        found = latest_checkpoint(tmp_path, say=lines.append)
        return found.name if found else None

    assert latest() is None
    below = tmp_path / "version_0" / "checkpoints"
    below.mkdir(parents=True)
    save_file(below / "step=1.ckpt", values())
    os.utime(below / "step=1.ckpt", (1, 1))
    assert latest() == "step=1.ckpt"
    two = save(below, "step=2.ckpt")
    assert latest() == "step=2.ckpt"
    save(below, "step=3.ckpt")
    assert latest() == "step=3.ckpt"
    assert lines == []
    (below / "step=3.ckpt" / "state.pt").unlink()
    assert latest() == "step=2.ckpt"
    assert len(lines) == 1
    assert "step=3.ckpt" in lines[0]
    assert "state.pt" in lines[0]
    data = bytearray((two / "rank-00000.safetensors").read_bytes())
    data[-1] ^= 1
    (two / "rank-00000.safetensors").write_bytes(data)
    assert latest_checkpoint(tmp_path, contents=False, say=lines.append) == two
    assert latest() == "step=1.ckpt"
    assert any("differ from what was written" in line for line in lines)
    shutil.copytree(two, saving_path(below / "step=4.ckpt"))
    (two / MANIFEST).unlink()
    assert latest() == "step=1.ckpt"
    assert any("saving it was interrupted" in line for line in lines)
    (below / "step=1.ckpt").write_bytes((below / "step=1.ckpt").read_bytes()[:300])
    assert latest() is None
    assert any(re.search(r"step=1.ckpt: .*cannot be read", line) for line in lines)


@pytest.mark.parametrize("file", ["trainer_state.json", "optimizer.pt", "model.safetensors", "rng_state_0.pth"])
def test_a_torn_folder_of_transformers_trainer_is_skipped(tmp_path: Path, file: str) -> None:
    """Trainer itself would take the newest folder, complete or not."""
    from safetensors.torch import save_file as save_tensors
    from transformers.trainer_utils import get_last_checkpoint

    for step in (2, 4):
        folder = tmp_path / f"checkpoint-{step}"
        folder.mkdir()
        save_tensors({"weight": torch.ones(3)}, folder / "model.safetensors")
        for name in ("optimizer.pt", "rng_state_0.pth", "training_args.bin"):
            torch.save({"a": torch.ones(3)}, folder / name)
        (folder / "trainer_state.json").write_text("{}")
        os.utime(folder / "trainer_state.json", (step, step))
    assert latest_checkpoint(tmp_path) == tmp_path / "checkpoint-4"
    torn = tmp_path / "checkpoint-4" / file
    if file == "trainer_state.json":  # it is written last
        torn.unlink()
    else:
        torn.write_bytes(torn.read_bytes()[:-9])
    lines: list[str] = []
    assert get_last_checkpoint(str(tmp_path)) == str(tmp_path / "checkpoint-4")
    assert latest_checkpoint(tmp_path, say=lines.append) == tmp_path / "checkpoint-2"
    assert len(lines) == 1
    assert "skipping checkpoint" in lines[0]


def test_the_one_before_is_found_where_a_job_died_between_two_renames(tmp_path: Path) -> None:
    path = save(tmp_path)
    os.rename(path, replaced_path(path))
    assert latest_checkpoint(tmp_path) == replaced_path(path)
    save(tmp_path)
    assert latest_checkpoint(tmp_path) == path
    assert not replaced_path(path).exists()


def test_names_change_hands_in_one_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from holmes_core.runtime import checkpoint_place

    def put(name: str, text: str) -> None:
        new = tmp_path / "new"
        new.mkdir()
        (new / "file").write_text(text)
        put_in_place(new, tmp_path / name)

    for exchange in (True, False):
        if not exchange:  # as on file systems that cannot
            monkeypatch.setattr(checkpoint_place, "_exchange", lambda one, other: False)
        for text in ("first", "second"):
            put("a", text)
            assert (tmp_path / "a" / "file").read_text() == text
        (tmp_path / "b").symlink_to(tmp_path / "a")
        put("b", "no link")
        assert not (tmp_path / "b").is_symlink()
        assert (tmp_path / "a" / "file").read_text() == "second"
        assert sorted(os.listdir(tmp_path)) == ["a", "b"]
        shutil.rmtree(tmp_path / "a")
        shutil.rmtree(tmp_path / "b")


@pytest.mark.parametrize("exchange", [True, False])
def test_what_else_is_in_a_folder_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, exchange: bool) -> None:
    """Scripts save into folders that hold logs, other checkpoints, their own files: nothing of that is ever deleted."""
    from holmes_core.runtime import checkpoint_place

    if not exchange:
        monkeypatch.setattr(checkpoint_place, "_exchange", lambda one, other: False)
    out = tmp_path / "out"
    (out / "logs").mkdir(parents=True)
    (out / "logs/events").write_text("log")
    (out / "state.pt").write_text("an older checkpoint of another tool")
    inner = save(out, "step_1")
    assert save(tmp_path, "out") == out
    assert same(load_whole(load_tree(out)), values())
    assert (out / "logs/events").read_text() == "log"
    assert same(load_whole(load_tree(inner)), values())
    (out / "tokenizer.json").write_text("{}")  # what a script adds to a checkpoint
    save(tmp_path, "out")
    assert same(load_whole(load_tree(out)), values())
    assert (out / "tokenizer.json").read_text() == "{}"
    assert (out / "logs/events").read_text() == "log"
    assert same(load_whole(load_tree(inner)), values())
    shutil.copytree(out, saving_path(out))  # what is left where a job dies after two names were exchanged
    (out / "tokenizer.json").unlink()
    retire(saving_path(out), out)
    assert (out / "tokenizer.json").read_text() == "{}"
    assert not [path for path in tmp_path.iterdir() if path != out]


def test_a_file_never_replaces_a_folder_of_other_things(tmp_path: Path) -> None:
    folder = tmp_path / "out"
    folder.mkdir()
    (folder / "mine").write_text("mine")
    with pytest.raises(HolmesError, match="out is a folder, and no checkpoint"):
        save_file(folder, values())
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert (folder / "mine").read_text() == "mine"


def test_only_the_wanted_blocks_are_read(tmp_path: Path) -> None:
    """A damaged block that nobody asks for does no harm to a reader of other rows."""
    from holmes_core.runtime.checkpoint import Reads
    from holmes_core.runtime.checkpoint_parts import part_of
    from holmes_core.runtime.shard import TensorShard

    rows, columns = 64, BLOCK // 4 // 8
    tensor = torch.arange(rows * columns, dtype=torch.float32).reshape(rows, columns)
    tree, path = {"x": part("x", tensor)}, tmp_path / "a"
    saving_path(path).mkdir()
    save_parts(path, saving_path(path), parts_in(tree), files={"state.pt": tree_bytes(tree)}, group=None)
    file = path / "rank-00000.safetensors"
    with file.open("r+b") as opened:
        opened.seek(file.stat().st_size - 100)
        opened.write(b"damage")
    stored = part_of(load_tree(path)["x"])
    assert stored is not None
    for dim, sections in ((0, (rows,)), (0, (16, 48)), (1, (columns,))):
        shard = TensorShard(dim=dim, full_shape=(rows, columns), sections=sections)
        for rank in range(4):
            reads = Reads()
            found = reads.want(stored, shard, rank, 4)
            touches = rank == 3 or dim == 1
            if touches:
                with pytest.raises(HolmesError, match="differ from what was written"):
                    reads.run()
            else:
                reads.run()
                assert torch.equal(found, shard.take(tensor, rank, 4))
