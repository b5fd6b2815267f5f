# SPDX-License-Identifier: Apache-2.0
"""The `holmes` command: fast, clear about mistakes, and `holmes run` gives a script all it would have had without."""

from __future__ import annotations

import importlib.metadata
import json
import textwrap
from pathlib import Path

import pytest

import holmes_core
from holmes_core.cli import main

HOLMES = ["-m", "holmes_core.cli"]
OFF = {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}  # what `holmes run` must not need


@pytest.fixture
def script(tmp_path):
    """Return a function that writes a script and returns its path; the working directory is another one."""
    (tmp_path / "scripts").mkdir()

    def write(text: str, name: str = "train.py") -> Path:
        path = tmp_path / "scripts" / name
        path.write_text(textwrap.dedent(text))
        return path

    return write


def test_console_script_is_installed() -> None:
    (entry,) = importlib.metadata.entry_points(group="console_scripts", name="holmes")
    assert entry.load() is main


def test_help_imports_nothing_heavy(run_script) -> None:
    code = "import sys, holmes_core.cli\ntry: holmes_core.cli.main(['--help'])\nexcept SystemExit: print(*sys.modules)"
    output = run_script(["-c", code]).check()
    for name in ("run", "convert", "version"):
        assert f"\n  {name} " in output
    loaded = {name.split(".")[0] for name in output.splitlines()[-1].split()}
    assert "argparse" in loaded
    assert not loaded & {"torch", "lightning", "pytorch_lightning", "accelerate", "transformers", "numpy", "yaml"}


def test_version(capsys) -> None:
    assert main(["version"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert f"holmes-parallel {holmes_core.__version__}" in lines
    assert f"torch {importlib.metadata.version('torch')}" in lines


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["convrt"], "unknown command `convrt` (did you mean 'convert'?)"),
        (["fly"], "unknown command `fly`. See `holmes --help`."),
    ],
)
def test_unknown_commands(words, message, capsys) -> None:
    assert main(words) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["missing.py"], "there is no file 'missing.py' in "),
        (["-n", "0", __file__], "'0' is not a number of processes"),
        (["--config", "no.yaml", __file__], "there is no file 'no.yaml'"),
        ([], "SCRIPT"),
    ],
)
def test_run_mistakes(words, message, capsys) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["run", *words])
    assert message in capsys.readouterr().err


def test_convert_is_passed_on(capsys) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["convert", "only-one-path"])
    assert "holmes convert" in capsys.readouterr().err


def test_run_looks_like_python(script, tmp_path, run_script) -> None:
    """Arguments (ours included), paths, imports beside the script, relative configs, exit status."""
    script("WORD = 'beside'", "helper.py")
    path = script(
        """
        import json, os, sys
        import helper
        if "--fail" in sys.argv:
            sys.exit(7)
        print(json.dumps([sys.argv, __name__, __file__, sys.path[0], helper.WORD, sys.modules["__main__"] is not None,
                          os.environ["HOLMES_CONFIG"], os.environ["HOLMES_CLUSTER"], "torch" in sys.modules]))
        """
    )
    (tmp_path / "holmes.yaml").write_text("pp: 2\n")
    (tmp_path / "cluster.yaml").write_text("{}\n")
    own = ["--config", "own.yaml", "-n", "3", "--", "-h"]
    words = [*HOLMES, "run", "--config", "holmes.yaml", "--cluster", "cluster.yaml", "scripts/train.py", *own]
    shown = json.loads(run_script(words).check())
    beside = [str(path), str(path.parent), "beside"]
    given = [str(tmp_path / "holmes.yaml"), str(tmp_path / "cluster.yaml")]
    assert shown == [["scripts/train.py", *own], "__main__", *beside, True, *given, False]
    assert run_script([*HOLMES, "run", path, "--fail"]).returncode == 7


def test_run_shows_the_scripts_own_traceback(script, run_script) -> None:
    path = script("def f():\n    raise ValueError('of the script')\nf()\n")
    ended = run_script([*HOLMES, "run", path])
    assert ended.returncode == 1
    assert f'File "{path}", line 2, in f\n    raise ValueError' in ended.output


# Whether the import hook is there; that it puts "holmes" into the registries is for test_registration.py to show,
# and importing Lightning takes seconds.
KNOWN = """
    import os, sys
    {first}
    known = any(type(finder).__name__ == "ImportHook" for finder in sys.meta_path)
    os.write(1, f"rank {{os.environ.get('LOCAL_RANK')}} {{sys.argv[1:]}} {{known}}\\n".encode())  # whole lines only
"""


def test_without_run_and_autoload_it_is_unknown(script, run_script) -> None:
    """The control of the tests below: they would pass for nothing if this said True."""
    assert "rank None ['--x'] False" in run_script([script(KNOWN.format(first="import torch")), "--x"], env=OFF).check()


def test_run_registers_without_autoload(script, run_script) -> None:
    path = script(KNOWN.format(first=""))
    assert "rank None ['--x'] True" in run_script([*HOLMES, "run", path, "--x"], env=OFF).check()


def test_run_n_registers_in_each_rank(script, run_script) -> None:
    output = run_script([*HOLMES, "run", "-n", "2", script(KNOWN.format(first="")), "--x", "-n"], env=OFF).check()
    for rank in range(2):
        assert f"rank {rank} ['--x', '-n'] True" in output


def test_run_n_fails_with_the_script(script, run_script) -> None:
    assert run_script([*HOLMES, "run", "-n", "2", script("raise SystemExit(3)")]).returncode != 0


def test_lightnings_own_processes_are_registered_too(script, run_script) -> None:
    """Lightning starts rank 1 by itself, from the script's name: its launcher must come back through us."""
    path = script(
        KNOWN.format(first="import torch")
        + """
    from lightning.pytorch import Trainer
    from lightning.pytorch.demos.boring_classes import BoringModel
    trainer = Trainer(strategy="ddp", accelerator="cpu", devices=2, max_steps=1, logger=False, barebones=True)
    trainer.fit(BoringModel())
    from lightning.pytorch.strategies import StrategyRegistry
    print("done", trainer.global_rank, trainer.world_size, "holmes" in StrategyRegistry, sys.argv[0])
    """
    )
    output = run_script([*HOLMES, "run", "scripts/train.py", "--x"], env=OFF, timeout=180).check()
    assert "rank None ['--x'] True" in output
    assert "rank 1 ['--x'] True" in output
    assert f"done 1 2 True {path}" in output


def test_spawned_workers_find_the_scripts_classes(script, run_script) -> None:
    """A spawned worker imports the main module by its name: ours has to lead it to the script."""
    path = script(
        KNOWN.format(first="import multiprocessing")
        + """
    class Item:
        pass

    def work(item):
        return type(item).__name__ + " " + __name__

    if __name__ == "__main__":
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            print(pool.map(work, [Item()]))
    """
    )
    output = run_script([*HOLMES, "run", path, "--x"], env=OFF).check()
    assert output.count("rank None ['--x'] True") == 2
    assert "['Item __mp_main__']" in output


def test_run_again_alone_says_what_to_do(run_script) -> None:
    ended = run_script(["-m", "holmes_core.run_again"], env={"HOLMES_RUN_SCRIPT": None})
    assert ended.returncode == 1
    assert "use `holmes run SCRIPT" in ended.output
