# SPDX-License-Identifier: Apache-2.0
"""The autoload: cheap, silent, idempotent, and never a reason for `import torch` or a host's import to fail."""

from __future__ import annotations

import importlib
import importlib.util
import shutil
import sys
import textwrap
from pathlib import Path

import pytest

import holmes_core.autoload as autoload
from holmes_core.autoload import ImportHook

SHARED = Path(__file__).parents[1] / "shared"

# Run with -S: no site-packages, so the only Holmes is the one laid out below. torch's own loading of entry points, word
# for word (torch/__init__.py, _import_device_backends), in a second; test_real_torch does one case with torch itself.
TORCH_AUTOLOAD = """
    from importlib.metadata import entry_points
    found = entry_points(group="torch.backends")
    assert [e.name for e in found] == ["holmes"], found
    for e in found:
        e.load()()
    print("torch is imported")
"""


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """A site-packages folder with what an installed Holmes leaves there: files and the entry point."""
    site = tmp_path / "site"
    shutil.copytree(SHARED / "holmes_core", site / "holmes_core", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(SHARED / "_holmes_autoload.py", site)
    info = site / "holmes_parallel-0.0.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: holmes-parallel\nVersion: 0.0.0\n")
    (info / "entry_points.txt").write_text("[torch.backends]\nholmes = _holmes_autoload:activate\n")
    return site


def break_nothing(site: Path) -> None:
    pass


def delete_core(site: Path) -> None:
    shutil.rmtree(site / "holmes_core")


def empty_core(site: Path) -> None:
    shutil.rmtree(site / "holmes_core")
    (site / "holmes_core").mkdir()


def syntax_error(site: Path) -> None:
    (site / "holmes_core/__init__.py").write_text("def (:\n")


def null_bytes(site: Path) -> None:
    (site / "holmes_core/autoload.py").write_bytes(b"\0" * 64)


def activate_raises(site: Path) -> None:
    (site / "holmes_core/autoload.py").write_text("def activate():\n    raise ValueError('on purpose')\n")


BROKEN = [delete_core, empty_core, syntax_error, null_bytes, activate_raises]


def test_entry_point_is_the_shield() -> None:
    pyproject = (SHARED.parent / "pyproject.toml").read_text()
    assert '[project.entry-points."torch.backends"]\nholmes = "_holmes_autoload:activate"' in pyproject


@pytest.mark.parametrize("flags", [[], ["-W", "error"]], ids=["warnings", "warnings are errors"])
@pytest.mark.parametrize("damage", BROKEN)
def test_broken_holmes_does_not_break_torch(damage, flags, site, run_script) -> None:
    damage(site)
    code = textwrap.dedent(TORCH_AUTOLOAD)
    output = run_script([*flags, "-S", "-c", code], env={"PYTHONPATH": str(site)}).check()
    assert "torch is imported" in output
    assert ("Holmes is installed but cannot be loaded" in output) is not flags
    if not flags:
        assert "pip uninstall holmes-parallel" in output


def test_healthy_holmes_is_silent(site, run_script) -> None:
    code = textwrap.dedent(TORCH_AUTOLOAD) + "import sys; print(type(sys.meta_path[0]).__name__)"
    output = run_script(["-W", "error", "-S", "-c", code], env={"PYTHONPATH": str(site)}).check()
    assert output.split("\n") == ["torch is imported", "ImportHook", ""]


@pytest.mark.parametrize("damage", [break_nothing, delete_core, activate_raises])
def test_real_torch(damage, site, tmp_path, run_script) -> None:
    damage(site)
    # PYTHONPATH comes before site-packages: this Holmes hides the installed one, its entry point included.
    code = "import torch, sys, _holmes_autoload; print(_holmes_autoload.__file__, torch.ones(2).sum().item())"
    output = run_script(["-c", code], env={"PYTHONPATH": str(site)}).check()
    assert f"{site}/_holmes_autoload.py 2.0" in output


@pytest.mark.parametrize("name", ["HOLMES_AUTOLOAD", "TORCH_DEVICE_BACKEND_AUTOLOAD"])
def test_switches(name, run_script) -> None:
    code = "import sys, torch; print([type(f).__name__ for f in sys.meta_path], 'holmes_core' in sys.modules)"
    assert "ImportHook" in run_script(["-c", code]).check()
    output = run_script(["-c", code], env={name: "0"}).check()
    assert "ImportHook" not in output
    assert "False" in output


def test_cost(run_script) -> None:
    """What it imports, exactly: that decides the cost (2 ms on an idle core), and no busy machine changes it."""
    code = """
        import contextlib, importlib, os, sys, typing, warnings  # torch has imported them
        from time import process_time
        before, start = set(sys.modules), process_time()
        import _holmes_autoload
        _holmes_autoload.activate()
        print("ms", (process_time() - start) * 1e3)
        print("new", *sorted(set(sys.modules) - before))
    """
    outputs = [run_script(["-c", textwrap.dedent(code)]).check().splitlines() for _ in range(3)]
    for output in outputs:
        assert output[1] == "new _holmes_autoload holmes_core holmes_core.autoload"
    assert min(float(output[0].split()[1]) for output in outputs) < 50.0  # something is badly wrong above


# -- the hook itself, on a host made for the test ---------------------------------------------------------------------


@pytest.fixture
def host(tmp_path, monkeypatch):
    """A package `host` with a module `host.registry` to wait for, a `calls` list, and the hook on sys.meta_path."""
    (tmp_path / "host").mkdir()
    (tmp_path / "host/__init__.py").write_text("")
    (tmp_path / "host/registry.py").write_text("READY = {}\n")
    (tmp_path / "host_hook.py").write_text("calls = []\ndef call(module):\n    calls.append(module.__name__)\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(autoload, "_HOOKS", {"host.registry": ("READY", "host_hook:call")})
    hook = ImportHook()
    monkeypatch.setattr(sys, "meta_path", [hook, *(f for f in sys.meta_path if not isinstance(f, ImportHook))])
    importlib.invalidate_caches()
    yield hook
    for name in [name for name in sys.modules if name.split(".")[0] in ("host", "host_hook")]:
        del sys.modules[name]


def calls() -> list[str]:
    return importlib.import_module("host_hook").calls


def test_called_once_when_the_import_ends(host) -> None:
    module = importlib.import_module("host.registry")
    assert calls() == ["host.registry"]
    assert isinstance(module.__loader__, importlib.machinery.SourceFileLoader)
    host.check_imported()
    assert module.__spec__.loader.get_source("host.registry") == "READY = {}\n"


def test_called_for_a_module_imported_before(host) -> None:
    sys.meta_path.remove(host)
    importlib.import_module("host.registry")
    sys.meta_path.insert(0, host)
    host.check_imported()
    assert calls() == ["host.registry"]


def test_called_for_a_module_that_was_half_imported(host, tmp_path) -> None:
    """The host imports torch, torch activates Holmes, and only then the host's registry comes to be."""
    sys.meta_path.remove(host)
    (tmp_path / "host/registry.py").write_text("import host.torch\nREADY = {}\nimport host.later\n")
    (tmp_path / "host/torch.py").write_text(
        "import sys\nimport host_hook\nsys.meta_path.insert(0, host_hook.hook)\nhost_hook.hook.check_imported()\n"
        "host_hook.calls.append('activated')\n"
    )
    (tmp_path / "host/later.py").write_text("")
    importlib.import_module("host_hook").hook = host
    importlib.import_module("host.registry")
    importlib.import_module("json.tool")
    assert calls() == ["activated", "host.registry"]


def test_called_again_after_a_reload(host) -> None:
    importlib.reload(importlib.import_module("host.registry"))
    assert calls() == ["host.registry", "host.registry"]


def test_a_failing_hook_is_a_warning(host, tmp_path) -> None:
    (tmp_path / "host_hook.py").write_text("raise ValueError('on purpose')\n")
    with pytest.warns(RuntimeWarning, match=r"host\.registry: ValueError: on purpose.*import host_hook"):
        assert importlib.import_module("host.registry").READY == {}


def test_two_hooks_that_ask_each_other(host, monkeypatch) -> None:
    """Post-import hooks of other packages find the real spec as we do: by asking everybody else."""

    class Other:
        def find_spec(self, name, path=None, target=None):
            if name != "host.registry":
                return None
            specs = (finder.find_spec(name, path) for finder in sys.meta_path if finder is not self)
            return next((spec for spec in specs if spec is not None), None)

    monkeypatch.setattr(sys, "meta_path", [Other(), *sys.meta_path])
    importlib.import_module("host.registry")
    assert calls() == ["host.registry"]


def test_a_failing_import_fails_as_without_us(host, tmp_path) -> None:
    (tmp_path / "host/registry.py").write_text("import nothing_of_that_name\n")
    with pytest.raises(ModuleNotFoundError, match="nothing_of_that_name"):
        importlib.import_module("host.registry")
    assert calls() == []


def test_activate_twice_is_once(monkeypatch) -> None:
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    autoload.activate()
    autoload.activate()
    assert sum(isinstance(finder, ImportHook) for finder in sys.meta_path) == 1
