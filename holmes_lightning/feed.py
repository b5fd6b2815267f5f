# SPDX-License-Identifier: Apache-2.0
"""Go on in the middle of an epoch: the same order of samples, without loading those that were trained on.

Lightning counts batches but neither skips them after a restart nor restores random state, so that a resumed epoch
starts over with its first batches, in another order. Each training DataLoader is watched here: the random state its
order was drawn from goes into the checkpoint; a resumed run draws the same order and drops the indices already used.
"""

from __future__ import annotations

import itertools
import random
import sys
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, SequentialSampler

from holmes_core.errors import ConfigError

__all__ = ["Feed", "Feeds", "RandomState", "batch_size_of", "progress_of"]

RandomState = dict[str, Any]


def batch_size_of(trainer: Any) -> int | None:
    """Return the training loader's ``batch_size``, or a data module's, before any loader is made; None if not known."""
    source = getattr(getattr(trainer.fit_loop, "_data_source", None), "instance", None)
    found = [getattr(one, "batch_size", None) for one in (source, getattr(source, "hparams", None))]
    return next((size for size in found if isinstance(size, int) and size > 0), None)


def _generators(loader: Any) -> list[torch.Generator]:
    batch_sampler = getattr(loader, "batch_sampler", None)
    owners = (loader, getattr(loader, "sampler", None), batch_sampler, getattr(batch_sampler, "sampler", None))
    found = [getattr(owner, "generator", None) for owner in owners]
    return list({id(g): g for g in found if isinstance(g, torch.Generator)}.values())


def snapshot(device: torch.device, loaders: list[Any]) -> RandomState:
    """Return the random state of this process, in types that ``torch.load(weights_only=True)`` accepts."""
    version, words, gauss = random.getstate()
    state: RandomState = {
        "torch": torch.get_rng_state(),
        "python": (version, torch.tensor(words, dtype=torch.int64), gauss),
        "generators": [g.get_state() for loader in loaders for g in _generators(loader)],
    }
    if "numpy" in sys.modules:
        kind, keys, position, has_gauss, cached = sys.modules["numpy"].random.get_state()
        words = torch.tensor(keys.tolist(), dtype=torch.int64)
        state["numpy"] = (str(kind), words, int(position), int(has_gauss), float(cached))
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def restore(state: RandomState | None, device: torch.device, loaders: list[Any]) -> None:
    """Set what `snapshot` returned."""
    if state is None:
        return
    torch.set_rng_state(state["torch"])
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words.tolist()), gauss))
    for generator, value in zip((g for dl in loaders for g in _generators(dl)), state["generators"], strict=False):
        generator.set_state(value)
    if "numpy" in state and "numpy" in sys.modules:
        numpy: Any = sys.modules["numpy"]
        kind, words, *rest = state["numpy"]
        numpy.random.set_state((kind, numpy.array(words.tolist(), dtype=numpy.uint32), *rest))
    if "cuda" in state and device.type == "cuda":
        torch.cuda.set_rng_state(state["cuda"], device)


@dataclass(frozen=True, kw_only=True)
class Progress:
    """Where a restored fit loop goes on.

    Attributes:
        epoch: The epoch that the first iteration over the data belongs to.
        done: Batches of it that were trained on.
    """

    epoch: int
    done: int


def progress_of(fit_loop: Any) -> Progress:
    """Read the counters of Lightning's fit loop, as restored."""
    epochs, batches = fit_loop.epoch_progress.current, fit_loop.epoch_loop.batch_progress
    if epochs.started <= epochs.processed:  # between epochs; the batch counters still show the one before
        return Progress(epoch=epochs.processed, done=0)
    if batches.is_last_batch and batches.current.processed >= batches.current.ready:
        return Progress(epoch=epochs.processed + 1, done=0)
    return Progress(epoch=epochs.processed, done=batches.current.processed)


class Feed:
    """One training loader: what its order was drawn from, and how many batches to drop after a restart."""

    def __init__(self, loader: Any, device: torch.device) -> None:
        self.loader, self._device = loader, device
        self.started: RandomState | None = None
        self.drawn: RandomState | None = None
        #: After a restart, until the first batch is trained on.
        self.resuming = False
        self.after: RandomState | None = None
        self._saved: Mapping[str, Any] = {}
        self._now: RandomState | None = None
        self._skip, self._epoch = 0, 0

    @property
    def is_stream(self) -> bool:
        """Whether nothing but reading finds the next sample."""
        return not isinstance(self.loader, DataLoader) or isinstance(self.loader.dataset, IterableDataset)

    def resume(self, *, skip: int, epoch: int, saved: Mapping[str, Any], now: RandomState | None) -> None:
        """Let the next iteration go on after `skip` batches."""
        self._skip, self._epoch, self._saved, self._now, self.resuming = skip, epoch, saved, now, True

    def _snapshot(self) -> RandomState:
        return snapshot(self._device, [self.loader])

    def _restore(self, state: RandomState | None) -> None:
        restore(state, self._device, [self.loader])

    def iterate(self, make: Any) -> Iterator[Any]:
        """Stand in for the loader's ``__iter__``."""
        self.after = None
        if self.resuming:
            self._set_epoch()
            self._restore(self._saved.get("started") if self._skip else self._now)
        self.started, self.drawn = self._snapshot(), None
        iterator = make()
        if self.resuming:
            if self._skip and self.is_stream:
                for _ in range(self._skip):
                    next(iterator, None)
            self.after = self._now if self._skip else self._snapshot()
        return iterator

    def indices(self, sampler: Any) -> Iterator[Any]:
        """Stand in for the sampler's ``__iter__``; it starts when the first batch, or the first worker, asks for it."""
        resuming, skip = self.resuming, 0 if self.is_stream else self._skip
        if resuming:
            self._restore(self._saved.get("drawn") if skip else self.after)
        self.drawn = self._snapshot()
        iterator = iter(sampler)
        if resuming and skip:
            next(itertools.islice(iterator, skip - 1, skip), None)
            self._restore(self._now)
        yield from iterator

    def _set_epoch(self) -> None:
        # Lightning tells the sampler the epoch after workers have drawn their first indices.
        batch_sampler = getattr(self.loader, "batch_sampler", None)
        for owner in (getattr(self.loader, "sampler", None), getattr(batch_sampler, "sampler", None)):
            if callable(set_epoch := getattr(owner, "set_epoch", None)):
                set_epoch(self._epoch)

    # ---- the loader's class ------------------------------------------------------------------------------------------
    def watch(self) -> Any:
        """Return a loader that reports to this feed: the same object for a DataLoader."""
        if not isinstance(self.loader, DataLoader):
            return _WatchedIterable(self)
        self.loader.__class__ = _watched_class(type(self.loader))
        vars(self.loader)["_holmes_feed"] = self
        return self.loader

    def release(self) -> None:
        """Give the loader its own class back."""
        kind = getattr(type(self.loader), "_holmes_watches", None)
        if kind is not None:
            self.loader.__class__ = kind
            vars(self.loader).pop("_holmes_feed", None)


def _watched_class(kind: type[Any]) -> type[Any]:
    """Return a subclass that reports to the loader's feed."""
    kind = getattr(kind, "_holmes_watches", kind)

    def iterate(self: Any) -> Iterator[Any]:
        feed = vars(self).get("_holmes_feed")
        return kind.__iter__(self) if feed is None else feed.iterate(lambda: kind.__iter__(self))

    def index_sampler(self: Any) -> Any:
        sampler = super(made, self)._index_sampler
        feed = vars(self).get("_holmes_feed")
        return sampler if feed is None else _Indices(sampler, feed)

    body = {"__iter__": iterate, "_index_sampler": property(index_sampler), "_holmes_watches": kind}
    # One base: the layout must not change.
    made: Any = type(kind.__name__, (kind,), {"__module__": kind.__module__, **body})
    return made


class _Indices:
    def __init__(self, sampler: Any, feed: Feed) -> None:
        self._sampler, self._feed = sampler, feed

    def __iter__(self) -> Iterator[Any]:
        return self._feed.indices(self._sampler)

    def __len__(self) -> int:
        return len(self._sampler)

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["_sampler"], name)


class _WatchedIterable:
    """Any other iterable of batches."""

    def __init__(self, feed: Feed) -> None:
        self._feed = feed

    def __iter__(self) -> Iterator[Any]:
        return self._feed.iterate(lambda: iter(self._feed.loader))

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["_feed"].loader, name)


class Feeds:
    """All training loaders of a run.

    Args:
        device: This rank's device.
        dp: Number of replicas.
        replica: This rank's replica.
    """

    def __init__(self, *, device: torch.device, dp: int, replica: int) -> None:
        self._device, self._dp, self._replica = device, dp, replica
        self._feeds: list[Feed] = []
        self._restored: Mapping[str, Any] | None = None

    def load(self, saved: Mapping[str, Any]) -> None:
        """Take what `state` returned; loaders that are added from now on go on from there."""
        self._restored = saved

    @property
    def _now(self) -> RandomState | None:
        return _of_replica((self._restored or {}).get("random"), self._replica)

    def add(self, loader: Any, progress: Progress | None) -> Any:
        """Watch one more training loader; returns what to iterate over instead.

        Args:
            loader: The loader.
            progress: Where the run goes on; None: at its start.

        Raises:
            ConfigError: The position in the epoch means other samples now.
        """
        if callable(getattr(loader, "load_state_dict", None)) and callable(getattr(loader, "state_dict", None)):
            return loader  # it keeps its own place, and Lightning restores it
        if not isinstance(loader, DataLoader) and (progress is None or not progress.done):
            return loader
        feed = Feed(loader, self._device)
        row = len(self._feeds)
        self._feeds.append(feed)
        if progress is not None:
            rows = (self._restored or {}).get("loaders", ())
            saved = rows[row] if row < len(rows) else {}
            if progress.done:
                self._check(saved, loader, progress.done)
            if progress.done and not saved and not isinstance(getattr(loader, "sampler", None), SequentialSampler):
                warnings.warn(
                    f"The checkpoint was saved by another strategy after {progress.done} batches of an epoch. As many"
                    " are skipped now, but how the samples were shuffled is not in the checkpoint: some will be"
                    " trained on twice, others left out. Resume from the end of an epoch to avoid this.",
                    stacklevel=2,
                )
            skip = progress.done
            if row and skip and hasattr(loader, "__len__"):  # shorter loaders beside the first start over
                skip %= max(1, len(loader))
            own = _of_replica(saved.get("replicas"), self._replica) or {}
            feed.resume(skip=skip, epoch=progress.epoch, saved=own, now=self._now)
        return feed.watch()

    def _check(self, saved: Mapping[str, Any], loader: Any, done: int) -> None:
        size = _batch_size(loader)
        was = (self._restored or {}).get("dp"), saved.get("batch_size")
        if not saved or was[0] is None or was == (self._dp, size):
            return
        raise ConfigError(
            seen=f"the checkpoint was saved after {done} batches of an epoch, by {was[0]} replicas with batches of"
            f" {was[1]}; now there are {self._dp} replicas with batches of {size}",
            where="fit(ckpt_path=...)",
            means=f"{done} batches are {done * was[0] * (was[1] or 1)} samples there and"
            f" {done * self._dp * (size or 1)} samples here: some would be left out or trained on twice",
            do=f"resume with dp: {was[0]} and batches of {was[1]}, or from a checkpoint of the end of an epoch",
        )

    def restore(self) -> None:
        """Set the random state that the run goes on with (the loop starts now)."""
        if self._restored is None:
            return
        last = next((feed.after for feed in reversed(self._feeds) if feed.after is not None), self._now)
        restore(last, self._device, [feed.loader for feed in self._feeds])

    def started(self) -> None:
        """A batch is trained on: the restart is over."""
        if self._restored is not None:
            self._restored = None
            for feed in self._feeds:
                feed.resuming, feed.after = False, None

    def clear(self) -> None:
        """Forget loaders that are about to be replaced."""
        self.release()
        self._feeds = []

    def release(self) -> None:
        """Give all loaders their own classes back."""
        for feed in self._feeds:
            feed.release()

    # ---- what is saved -----------------------------------------------------------------------------------------------
    def mine(self) -> dict[str, Any]:
        """Return this replica's part of `state`."""
        return {
            "random": snapshot(self._device, [feed.loader for feed in self._feeds]),
            "loaders": [{"started": feed.started, "drawn": feed.drawn} for feed in self._feeds],
        }

    def state(self, replicas: list[dict[str, Any]]) -> dict[str, Any]:
        """Return what a checkpoint needs, given every replica's part."""
        rows = []
        for row, feed in enumerate(self._feeds):
            parts = [part["loaders"][row] for part in replicas]
            rows.append({"batch_size": _batch_size(feed.loader), "replicas": _once(parts)})
        return {"dp": self._dp, "loaders": rows, "random": _once([part["random"] for part in replicas])}


def _batch_size(loader: Any) -> int | None:
    sampler = getattr(loader, "batch_sampler", None)
    return getattr(sampler, "batch_size", getattr(loader, "batch_size", None))


def _of_replica(parts: Any, replica: int) -> Any:
    if not parts:
        return None
    return parts[replica] if replica < len(parts) else parts[0]


def _once(parts: list[Any]) -> list[Any]:
    """One entry where all are equal."""
    return parts[:1] if all(_equal(part, parts[0]) for part in parts[1:]) else parts


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and torch.equal(a, b)
    if isinstance(a, dict):
        return isinstance(b, dict) and a.keys() == b.keys() and all(_equal(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)):
        return isinstance(b, (list, tuple)) and len(a) == len(b) and all(map(_equal, a, b))
    return bool(a == b)
