# SPDX-License-Identifier: Apache-2.0
"""Parameters that are on their way from the rank that stepped them: nobody sees old values, nobody waits too early."""

from __future__ import annotations

import copy
import io
import json
import os
import signal
import struct
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from holmes_core.runtime.hand_out import HandOut, _Arriving
from holmes_core.runtime.torch_compat import storage_is_shared

OLD, NEW = 1.0, 2.0
WIDTH = 256  # a matrix of it is large enough to travel by itself


class Block(nn.Module):
    """A block with a matrix that travels alone and a vector that travels with others."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.unseen = False

    def forward(self, x: Tensor) -> Tensor:
        if self.unseen:  # as a compiled kernel that gets the weight's address
            with torch._C.DisableTorchFunctionSubclass():
                return F.linear(x, self.linear.weight, self.linear.bias)
        return self.linear(x)


class Net(nn.Module):
    """Two blocks and a parameter beside them."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.scale = nn.Parameter(torch.empty(3))
        self.odd = nn.Parameter(torch.empty(WIDTH, 2 * WIDTH)[:, ::2])  # not contiguous

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x * self.scale[0]


class Job:
    """One rank's model in one case: rank 0 has stepped everything to NEW; `mine` is what rank 1 stepped itself."""

    def __init__(self, rank: int, *, late: bool = True, mine: Sequence[str] = ()) -> None:
        self.net = Net()
        self.params = dict(self.net.named_parameters())
        owner = {param: int(name in mine) for name, param in self.params.items()}
        with torch.no_grad():
            for param in self.params.values():
                param.fill_(NEW if owner[param] == rank else OLD)
        values = list(self.params.values())
        self.waits = 0
        self.hand_out = HandOut(
            values, owner=owner, group=dist.group.WORLD, count=lambda *_: None, root=self.net,
            blocks=self.net.blocks, late=late, waiting=self.waiting,
        )  # fmt: skip

    def waiting(self) -> Any:
        self.waits += 1
        return nullcontext()

    def pending(self) -> list[str]:
        return [name for name, param in self.params.items() if type(param) is _Arriving]


Look = Callable[[Job], Any]
X = torch.ones(1, WIDTH)


def linear(job: Job) -> Any:
    block = job.net.blocks[1]
    out = F.linear(X, block.linear.weight)
    assert "blocks.1.linear.weight" not in job.pending()
    assert "blocks.0.linear.weight" in job.pending(), "who is not looked at is not waited for"
    return out / WIDTH


def forward_unseen(job: Job) -> Any:
    block = job.net.blocks[0]
    block.unseen = True
    out = block(X)
    assert "blocks.1.linear.weight" in job.pending()
    return (out - NEW) / WIDTH


def whole_forward(job: Job) -> Any:
    out = job.net(X)
    assert not job.pending()
    first = WIDTH * NEW + NEW
    return out / ((WIDTH * first * NEW + NEW) * NEW) * NEW


def deep_copy(job: Job) -> Any:
    twin = copy.deepcopy(job.net)
    assert {type(p) for p in twin.parameters()} == {nn.Parameter}
    return torch.cat([p.detach().reshape(-1) for p in twin.parameters()])


def saved(job: Job) -> Any:
    file = io.BytesIO()
    torch.save(job.net, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    assert {type(p) for p in loaded.parameters()} == {nn.Parameter}
    loaded(X)
    return torch.cat([p.detach().reshape(-1) for p in loaded.parameters()])


def other_thread(job: Job) -> Any:
    found: list[Tensor] = []
    threads = [threading.Thread(target=lambda: found.append(job.net.odd.detach().clone())) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30.0)
    assert len(found) == 3
    return torch.stack(found)


def in_place(job: Job) -> Any:
    with torch.no_grad():
        for param in job.params.values():
            param.mul_(3.0)
    return torch.cat([p.detach().reshape(-1) for p in job.params.values()]) / 3.0


def loaded(job: Job) -> Any:
    job.net.load_state_dict({name: torch.full_like(param, 5.0) for name, param in job.params.items()})
    job.hand_out.end()
    return torch.cat([p.detach().reshape(-1) for p in job.params.values()]) - 3.0


def fake_tensors(job: Job) -> Any:
    """What arrives while everything else is fake is real."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        job.net.blocks[0](X)
    return job.net.blocks[0].linear.bias.detach().clone()


def in_a_signal_handler(job: Job) -> Any:
    """A handler may look at what the interrupted line waits for."""
    seen: list[Tensor] = []
    before = signal.signal(signal.SIGALRM, lambda *_: seen.append(job.net.scale.detach().clone()))
    signal.setitimer(signal.ITIMER_REAL, 0.05)
    try:
        value = job.net.scale.detach().clone()
        while not seen:
            time.sleep(0.01)
    finally:
        signal.signal(signal.SIGALRM, before)
    return torch.stack([value, *seen])


def in_a_child(job: Job) -> Any:
    """A forked child, such as a loader's worker, has no threads that could receive."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(write, struct.pack("f", job.net.odd[0, 0].item()))
        os._exit(0)
    os.waitpid(child, 0)
    return torch.tensor(struct.unpack("f", os.read(read, 4)))


#: What a script may do with a parameter that is on its way; returns values of NEW.
LOOKS: dict[str, Look] = {
    "linear": linear,
    "forward unseen": forward_unseen,
    "whole forward": whole_forward,
    "deepcopy": deep_copy,
    "saved": saved,
    "other thread": other_thread,
    "in place": in_place,
    "loaded": loaded,
    "data": lambda job: job.net.odd.data.clone(),
    "norm": lambda job: torch._foreach_norm([job.net.blocks[1].linear.weight])[0] / WIDTH,
    "numpy": lambda job: torch.from_numpy(job.net.scale.detach().numpy().copy()),
    "autograd function": lambda job: _Twice.apply(job.net.odd) / 2,
    "state_dict": lambda job: job.net.state_dict()["blocks.0.linear.bias"].clone(),
    "vector": lambda job: nn.utils.parameters_to_vector(job.net.parameters()).detach(),
    "named": lambda job: torch.stack([p.detach().mean() for _, p in job.net.named_parameters()]),
    "wait": lambda job: (job.hand_out.end(), job.net.odd.detach().clone())[1],
    "given up": lambda job: (job.hand_out.give_up(30.0), job.net.odd.detach().clone())[1],
    "same class": lambda job: type(job.net.scale)(job.net.scale.data).detach().clone(),
    "function transform": lambda job: torch.func.jacrev(lambda x: job.net.scale * x)(torch.ones(3)).diagonal(),
    "fake tensors": fake_tensors,
    "signal": in_a_signal_handler,
    "fork": in_a_child,
}


class _Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor) -> Tensor:
        return weight * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 2


def harmless(job: Job) -> None:
    """What a loop does between two steps anyway waits for nothing."""
    for param in job.params.values():
        param.grad = torch.zeros(param.shape, dtype=param.dtype, device=param.device)
        assert param.grad is not None
        assert param.requires_grad
        assert param.is_leaf
        assert param.numel() == param.shape.numel()
        assert isinstance(param, nn.Parameter)
        assert {param: 1}[param] == 1
    job.net.zero_grad()
    torch.optim.SGD(job.net.parameters(), lr=1.0)
    job.net.train()
    assert len(job.pending()) == len(job.params)
    assert job.waits == 0


def work(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=60))
    outcomes: dict[str, str] = {}

    def case(name: str, job: Job, look: Callable[[], None], *, late: bool = True) -> None:
        dist.barrier()
        try:
            if rank == 1:
                for _ in range(500):  # gloo's thread keeps what the step before has sent for a moment
                    if name == "held" or not any(storage_is_shared(p) for p in job.params.values()):
                        break
                    time.sleep(0.01)
                job.hand_out.begin()
                store.set(f"begun {name}", "1")
                look()
            else:
                if late:
                    store.wait([f"begun {name}"], timedelta(seconds=30))
                    time.sleep(0.2)  # what does not wait sees old values
                job.hand_out.begin()
                if name in ("not late", "scripted", "compiled"):
                    assert not job.hand_out._transfers, "what this rank sends has left"
            job.hand_out.end()
            assert not job.pending()
            outcomes[name] = ""
        except Exception as error:  # told by the test
            outcomes[name] = f"{type(error).__name__}: {error}"
            job.hand_out.end()

    for name, look in LOOKS.items():
        job = Job(rank)

        def check(look: Look = look, job: Job = job) -> None:
            assert len(job.pending()) == len(job.params)
            found = look(job).detach()
            assert torch.allclose(found, torch.full_like(found, NEW)), found
            assert job.waits > 0

        case(name, job, check)
        assert not any(module._forward_pre_hooks for module in job.net.modules())
    job = Job(rank)
    case("harmless", job, lambda: harmless(job))

    def twice() -> None:
        job.hand_out.end()
        with torch.no_grad():
            assert all(bool((p == NEW).all()) for p in job.params.values())

    case("again", job, twice)
    for step in range(3):  # one step after the other

        def next_step(step: int = step) -> None:
            assert len(job.pending()) == len(job.params)
            assert bool((job.net.odd == NEW + step).all())
            job.net(X)

        with torch.no_grad():
            for param in job.params.values():
                param.fill_(OLD if rank else NEW + step)
        case(f"step {step}", job, next_step)
    job = Job(rank, mine=["blocks.0.linear.weight", "scale"])

    def both_send() -> None:
        assert "scale" not in job.pending(), "a copy of it is sent"
        assert "blocks.0.linear.weight" in job.pending(), "it is sent from where it lies"
        values = [float(p.detach().mean()) for p in job.params.values()]
        assert values == [NEW] * len(values)

    case("both send", job, both_send)
    job = Job(rank)
    aside = job.net.odd.detach(), job.net.scale.view(3)

    def looked_at() -> None:
        assert "odd" not in job.pending()
        assert "scale" not in job.pending()
        assert "blocks.0.linear.weight" in job.pending(), "nobody holds it"
        assert all(bool((one == NEW).all()) for one in aside)

    case("held", job, looked_at, late=False)
    job = Job(rank, late=False)
    case("not late", job, lambda: arrived(job), late=False)
    job = Job(rank)
    job.net.scripted = torch.jit.script(nn.Linear(2, 2))
    case("scripted", job, lambda: arrived(job), late=False)
    job = Job(rank)
    torch.compile(lambda x: x + 1, backend="eager")(X)
    case("compiled", job, lambda: arrived(job), late=False)
    dist.barrier()
    dist.destroy_process_group()
    Path(folder, f"{rank}.json").write_text(json.dumps(outcomes))


def arrived(job: Job) -> None:
    assert not job.pending()
    with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
        assert all(bool((p == NEW).all()) for p in job.params.values())


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    folder = tmp_path_factory.mktemp("ranks")
    mp.spawn(work, args=(str(folder),), nprocs=2)
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.parametrize(
    "name", [*LOOKS, "harmless", "again", "step 2", "both send", "held", "not late", "scripted", "compiled"]
)
def test_values_are_those_of_the_finished_step(name: str, outcomes: list[dict[str, str]]) -> None:
    assert [one[name] for one in outcomes] == ["", ""]


def test_a_rank_that_is_lost_is_an_error_where_its_values_are_needed(tmp_path: Path) -> None:
    """Nobody goes on with old values, and whoever gives up can go on with what is there."""
    mp.spawn(lose, args=(str(tmp_path),), nprocs=2)
    assert (tmp_path / "told").read_text() == "RuntimeError"


def lose(rank: int, folder: str) -> None:
    store = dist.FileStore(f"{folder}/store", 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=20))
    job = Job(rank)
    dist.barrier()
    if rank == 0:
        store.wait(["begun"], timedelta(seconds=30))
        dist.destroy_process_group()
        return
    job.hand_out.begin()
    store.set("begun", "1")
    try:
        job.net(X)
    except Exception as error:
        Path(folder, "told").write_text(type(error).__name__)
    assert job.pending()
    job.hand_out.give_up(5.0)
    assert not job.pending()
    assert bool((job.net.scale == OLD).all())
    dist.destroy_process_group()
