# SPDX-License-Identifier: Apache-2.0
"""`Trainer(strategy="holmes")` in both Lightnings, by every spelling, without an import in the user's script."""

from __future__ import annotations

import sys
import textwrap
from types import ModuleType, SimpleNamespace

import pytest

from holmes_lightning import registry

NAMESPACES = ["lightning.pytorch", "pytorch_lightning"]
OFF = {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}


@pytest.fixture
def run_code(tmp_path, run_script):
    """Return a function that runs Python text as a script and returns its output; the script must succeed."""

    def run(text: str, *args: str, env=None, nproc=None) -> str:
        path = tmp_path / "user_script.py"
        path.write_text(textwrap.dedent(text))
        return run_script([path, *args], env=env, nproc=nproc).check()

    return run


# -- the names in the registries --------------------------------------------------------------------------------------

LISTED = """
    import importlib, sys

    def listed(namespace):
        strategies = importlib.import_module(namespace + ".strategies")
        names = getattr(strategies, "StrategyRegistry", None) or strategies.STRATEGY_REGISTRY
        print("listed in", namespace, "holmes" in names and names["holmes"]["description"])
"""
DESCRIPTION = "Pipeline, data and tensor parallel"


@pytest.mark.parametrize(
    "namespaces", [("lightning.pytorch", "lightning.fabric"), ("pytorch_lightning", "lightning_fabric")]
)
def test_listed_without_an_import(namespaces, run_code) -> None:
    after = "\n    print('strategy imported', 'holmes_lightning.strategy' in sys.modules)"
    output = run_code(LISTED + "".join(f"\n    listed('{name}')" for name in namespaces) + after)
    for name in namespaces:
        assert f"listed in {name} {DESCRIPTION}" in output
    assert "strategy imported False" in output


def test_listed_by_an_import_before(run_code) -> None:
    """The spelling that works with the autoload off too."""
    text = "\n    import holmes_lightning" + LISTED + "\n    listed('lightning.pytorch')"
    assert f"listed in lightning.pytorch {DESCRIPTION}" in run_code(text, env=OFF)


def test_listed_by_an_import_after(run_code) -> None:
    listed = "\n    listed('lightning.pytorch')"
    output = run_code(LISTED + listed + "\n    import holmes_lightning" + listed, env=OFF)
    before, after = (line for line in output.splitlines() if line.startswith("listed in"))
    assert before == "listed in lightning.pytorch False"  # the control: the autoload was off
    assert after.startswith(f"listed in lightning.pytorch {DESCRIPTION}")


def test_our_import_imports_no_torch(run_code) -> None:
    loaded = run_code("import holmes_lightning, sys; print(*sys.modules)").split()
    assert "holmes_lightning" in loaded
    assert not {"torch", "lightning", "pytorch_lightning"} & set(loaded)


def test_fabric_run_lists_it(run_script) -> None:
    output = run_script(["-m", "lightning.fabric.cli", "run", "--help"]).check()
    assert "holmes" in output


# -- the registered factories -----------------------------------------------------------------------------------------


class FakeRegistry(dict):
    """What Lightning's registry does with a registered name, in four lines."""

    def register(self, name, strategy, description=None):
        assert name not in self
        self[name] = SimpleNamespace(make=strategy, description=description)


def test_factory_builds_on_its_own_namespace(monkeypatch) -> None:
    made = SimpleNamespace(make_strategy_class=lambda namespace: lambda **kwargs: (namespace, kwargs))
    monkeypatch.setitem(sys.modules, "holmes_lightning.strategy", made)
    for namespace in NAMESPACES:
        module = ModuleType(f"{namespace}.strategies")
        module.StrategyRegistry = FakeRegistry()
        registry.register(module)
        registry.register(module)  # the second call changes nothing
        assert list(module.StrategyRegistry) == ["holmes"]
        assert module.StrategyRegistry["holmes"].make(pp=2) == (namespace, {"pp": 2})


def test_fabric_finds_its_own_strategy(run_code) -> None:
    output = run_code("""
        from lightning import Fabric
        strategy = Fabric(strategy="holmes", accelerator="cpu", devices=1).strategy
        print(type(strategy).__name__, type(strategy).__module__)
    """)
    assert "HolmesFabricStrategy holmes_lightning.fabric" in output


@pytest.mark.parametrize(
    ("imported", "namespace"),
    [
        (["lightning.pytorch"], "lightning.pytorch"),
        (["pytorch_lightning"], "pytorch_lightning"),
        (["pytorch_lightning", "lightning.pytorch"], "lightning.pytorch"),
        ([], "lightning.pytorch"),
    ],
)
def test_current_namespace(imported, namespace, monkeypatch) -> None:
    for name in NAMESPACES:
        monkeypatch.delitem(sys.modules, name, raising=False)
    for name in imported:
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    assert registry.current_namespace() == namespace


def test_current_namespace_when_only_one_is_installed(monkeypatch) -> None:
    for name in NAMESPACES:
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setattr(registry.importlib.util, "find_spec", lambda name: name == "pytorch_lightning" or None)
    assert registry.current_namespace() == "pytorch_lightning"


# -- real Trainers ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("namespace", NAMESPACES)
def test_trainer_by_name_and_by_object(namespace, run_code) -> None:
    """Both give the same class, built on this namespace, and its name leads back to it.

    jsonargparse saves the class path into config.yaml, and pickle saves the name.
    """
    output = run_code(f"""
        import pickle
        from {namespace} import Trainer
        common = dict(accelerator="cpu", devices=1, logger=False, enable_checkpointing=False, enable_progress_bar=False)
        by_name = Trainer(strategy="holmes", **common).strategy
        from holmes_lightning import HolmesStrategy
        by_object = Trainer(strategy=HolmesStrategy(pp=1), **common).strategy
        print("same", type(by_name) is type(by_object) is HolmesStrategy)
        print("bases", *(base.__module__ for base in HolmesStrategy.__mro__))
        print("name", HolmesStrategy.__module__, HolmesStrategy.__qualname__)
        print("pickled", pickle.loads(pickle.dumps(HolmesStrategy)) is HolmesStrategy)
    """)
    lines = dict(line.split(" ", 1) for line in output.splitlines()[-4:])
    assert lines["same"] == "True"
    assert f"{namespace}.strategies.strategy" in lines["bases"].split()
    assert lines["name"] == "holmes_lightning HolmesStrategy"
    assert lines["pickled"] == "True"


@pytest.mark.parametrize("namespace", NAMESPACES)
def test_lightning_cli(namespace, tmp_path, run_code) -> None:
    """Every spelling of the strategy that LightningCLI has. In one process: importing Lightning takes seconds."""
    by_class = "holmes_lightning.HolmesStrategy"
    (tmp_path / "config.yaml").write_text(
        f"trainer:\n  strategy:\n    class_path: {by_class}\n    init_args:\n      pp: 2\n"
    )
    spellings = [
        ["--trainer.strategy=holmes"],
        [f"--trainer.strategy={by_class}", "--trainer.strategy.pp=2"],
        [f"--trainer.strategy.class_path={by_class}", "--trainer.strategy.pp=2"],
        [f"--trainer.strategy.class_path={by_class}", "--trainer.strategy.init_args.pp=2"],
        ["--config", str(tmp_path / "config.yaml")],
    ]
    output = run_code(f"""
        import sys
        from {namespace}.cli import LightningCLI
        from {namespace}.demos.boring_classes import BoringModel
        common = dict(accelerator="cpu", devices=1, logger=False, enable_checkpointing=False)
        for words in {spellings!r}:
            sys.argv = ["train.py", *words]
            cli = LightningCLI(BoringModel, run=False, save_config_callback=None, trainer_defaults=common)
            from holmes_lightning import HolmesStrategy
            given = cli.config["trainer"]["strategy"]
            if not isinstance(given, str):
                given = given["class_path"] + " pp=" + str(given["init_args"]["pp"])
            print("cli", type(cli.trainer.strategy) is HolmesStrategy, given)
    """)
    lines = [line for line in output.splitlines() if line.startswith("cli ")]
    assert lines == ["cli True holmes"] + [f"cli True {by_class} pp=2"] * 4
