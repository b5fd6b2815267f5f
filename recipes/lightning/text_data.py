# SPDX-License-Identifier: Apache-2.0
"""Packed token sequences from text files: the user's own, or the Python standard library that is on every machine."""

from __future__ import annotations

import shutil
import sysconfig
import tempfile
import zlib
from collections.abc import Callable
from pathlib import Path

import lightning as L
import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch.utils.data import DataLoader, Dataset
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

END = "<|endoftext|>"
SUFFIXES = frozenset({".txt", ".md", ".rst", ".py", ".c", ".h", ".cpp", ".cc", ".rs", ".go", ".java", ".js", ".ts"})


def find_texts(paths: list[Path], max_bytes: int) -> list[Path]:
    """List the text files below the paths (default: the standard library), in one order on every machine."""
    stdlib = Path(sysconfig.get_path("stdlib"))
    found: list[Path] = []
    for root in paths or [stdlib]:
        if root.is_file():
            found.append(root)
        below = [p for p in root.rglob("*") if p.suffix in SUFFIXES and p.is_file()]
        if not paths:  # the library itself: neither installed packages nor its tests
            skip = {"site-packages", "test", "tests", "idlelib", "lib2to3"}
            below = [p for p in below if p.suffix == ".py" and not skip & set(p.relative_to(root).parts)]
        found.extend(sorted(below))
    if not found:
        raise SystemExit(f"no text files ({', '.join(sorted(SUFFIXES))}) in {', '.join(map(str, paths))}")
    kept, total = [], 0
    for path in sorted(found, key=lambda p: zlib.crc32(p.name.encode())):  # a mixture, should max_bytes cut it
        if total < max_bytes:
            kept.append(path)
            total += path.stat().st_size
    return kept


def build_tokenizer(kind: str, texts: list[str], vocab_size: int) -> PreTrainedTokenizerBase:
    """Train a byte-level BPE on the texts, or take plain bytes (no merges), or load a Hugging Face directory."""
    if kind not in ("bpe", "bytes"):
        return AutoTokenizer.from_pretrained(kind)
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size if kind == "bpe" else 257,  # 256 bytes and the end mark
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    core.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token=END, bos_token=END, pad_token=END)


def make_once(folder: Path, write: Callable[[Path], None]) -> None:
    """Fill a folder unless it is there, whole or not at all: several hosts may share the disk and start at once."""
    if folder.is_dir():
        return
    folder.parent.mkdir(parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        write(draft)
        draft.chmod(0o755)
        draft.rename(folder)
    except OSError:
        if not folder.is_dir():  # otherwise another host was first: the same content
            raise
    finally:
        shutil.rmtree(draft, ignore_errors=True)


class PackedTokens(Dataset):
    """Sequences of equal length cut from one long row of tokens."""

    def __init__(self, path: Path, seq_len: int) -> None:
        self.tokens = np.load(path, mmap_mode="r")
        self.seq_len = seq_len

    def __len__(self) -> int:
        """Count the whole sequences."""
        return len(self.tokens) // self.seq_len

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        """Return one sequence; the model shifts the labels itself."""
        piece = self.tokens[index * self.seq_len : (index + 1) * self.seq_len]
        ids = torch.from_numpy(piece.astype(np.int64))
        return {"input_ids": ids, "labels": ids}


class TextData(L.LightningDataModule):
    """Tokenizer and token files are made once, by one process per machine, and kept in `cache`."""

    def __init__(
        self,
        *,
        paths: list[Path],
        cache: Path,
        tokenizer: str = "bpe",
        vocab_size: int = 2048,
        seq_len: int = 256,
        batch_size: int = 8,
        max_bytes: int = 64_000_000,
        val_share: float = 0.05,
        workers: int = 0,
    ) -> None:
        super().__init__()
        self.paths, self.kind, self.vocab_size = paths, tokenizer, vocab_size
        self.seq_len, self.batch_size, self.workers = seq_len, batch_size, workers
        self.max_bytes, self.val_share = max_bytes, val_share
        self.files = find_texts(paths, max_bytes)
        asked = repr((tokenizer, vocab_size, val_share, [(str(p), p.stat().st_size) for p in self.files]))
        self.cache = cache / f"{zlib.crc32(asked.encode()):08x}"  # another corpus or tokenizer: another folder

    def prepare_data(self) -> None:
        """Train the tokenizer and write train.npy and val.npy, unless they are there."""
        make_once(self.cache, self._write)

    def _write(self, folder: Path) -> None:
        texts = [p.read_text("utf-8", errors="replace") for p in self.files]
        # By file, never inside one: validation text is text that no training sequence touches.
        every = max(2, round(1 / self.val_share))
        split = {"train": [t for i, t in enumerate(texts) if i % every or len(texts) == 1], "val": texts[::every]}
        if len(texts) == 1:
            cut = int(len(texts[0]) * (1 - self.val_share))
            split = {"train": [texts[0][:cut]], "val": [texts[0][cut:]]}
        tokenizer = build_tokenizer(self.kind, sample(split["train"], 4_000_000), self.vocab_size)
        tokenizer.save_pretrained(folder / "tokenizer")
        for name, part in split.items():
            rows = tokenizer(part, add_special_tokens=False, verbose=False)["input_ids"]
            flat = np.concatenate([np.array([*row, tokenizer.eos_token_id], dtype=np.uint32) for row in rows])
            np.save(folder / f"{name}.npy", flat)

    def setup(self, stage: str) -> None:
        """Open the token files."""
        self.train = PackedTokens(self.cache / "train.npy", self.seq_len)
        self.val = PackedTokens(self.cache / "val.npy", self.seq_len)
        for name, part in (("train", self.train), ("validation", self.val)):
            if len(part) < self.batch_size:
                raise SystemExit(
                    f"{name}: {len(part)} sequences of {self.seq_len} tokens, fewer than one batch of "
                    f"{self.batch_size}: give more text, or a smaller --seq-len or --batch-size"
                )

    def train_dataloader(self) -> DataLoader:
        """Shuffle; every replica gets its own share from Lightning."""
        return DataLoader(self.train, self.batch_size, shuffle=True, drop_last=True, num_workers=self.workers)

    def val_dataloader(self) -> DataLoader:
        """Return whole batches only, so that every replica weighs the same in the mean."""
        return DataLoader(self.val, self.batch_size, drop_last=True, num_workers=self.workers)


def sample(texts: list[str], characters: int) -> list[str]:
    """Return the first texts, up to a size that trains a tokenizer in seconds."""
    taken: list[str] = []
    for text in texts:
        if characters <= 0:
            break
        taken.append(text[:characters])
        characters -= len(text)
    return taken
