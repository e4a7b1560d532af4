"""Accelerate, the Hugging Face Trainer and Lightning in an elastic function: refused where they see one rank of several."""

import importlib
import sys

import pytest
from tqdm import tqdm

from nbelastic import UsageError
from nbelastic.programs.frameworks import WATCHED, Watch

TRAINER = '''
class Trainer:
    """It counts the ranks as its strategy does."""

    def __init__(self, seen=1):
        self.seen = seen

    @property
    def world_size(self):
        return self.seen

    def fit(self, what):
        return what
'''
FABRIC = (
    TRAINER.replace("Trainer", "Fabric").replace("fit", "setup")
    + """
    def backward(self, loss):
        return loss
"""
)
STAND_INS = {  # with the shape of the real ones
    "accelerate.accelerator": FABRIC.replace("Fabric", "Accelerator")
    .replace("world_size", "num_processes")
    .replace("setup", "prepare"),
    "lightning.pytorch.trainer.trainer": TRAINER,
    "pytorch_lightning.trainer.trainer": TRAINER,
    "lightning.fabric.fabric": FABRIC,
    "lightning_fabric.fabric": FABRIC,
}

INSTEAD = {  # what to write
    "accelerate.accelerator": "from nbelastic.integrations.accelerate import Accelerator",
    "lightning.pytorch.trainer.trainer": "from nbelastic.integrations.lightning import fit",
    "pytorch_lightning.trainer.trainer": "from nbelastic.integrations.lightning import fit",
    "lightning.fabric.fabric": "from nbelastic.integrations.lightning import Fabric",
    "lightning_fabric.fabric": "from nbelastic.integrations.lightning import Fabric",
}


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """Packages with stand-ins at the real classes' places; afterwards those that were imported before are back."""
    tops = {name.split(".")[0] for name in STAND_INS}
    real = {name: sys.modules.pop(name) for name in [*sys.modules] if name.split(".")[0] in tops}
    for name, text in STAND_INS.items():
        *packages, module = name.split(".")
        folder = tmp_path.joinpath(*packages)
        folder.mkdir(parents=True, exist_ok=True)
        for depth in range(len(packages)):
            tmp_path.joinpath(*packages[: depth + 1], "__init__.py").touch()
        (folder / f"{module}.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        del sys.modules[name]
    sys.modules.update(real)


def test_every_one_of_them_is_tried_here():
    assert STAND_INS.keys() == WATCHED.keys()


@pytest.mark.parametrize("imported", ["before", "after"])
@pytest.mark.parametrize("name", STAND_INS)
def test_what_sees_one_rank_of_several_is_refused(installed, name, imported):
    """Whether it was imported before the job or inside the function; one line gives an alternative."""
    if imported == "before":
        importlib.import_module(name)
    Watch(lambda: 3).start()
    make = getattr(importlib.import_module(name), WATCHED[name][0])
    with pytest.raises(UsageError, match="sees a world of 1, but the world has 3 ranks") as refused:
        make()
    assert "\n" not in str(refused.value)
    assert INSTEAD.get(name, "DistributedDataParallel") in str(refused.value)


@pytest.mark.parametrize(("size", "seen"), [(3, 3), (1, 1), (0, 1)], ids=["set up by hand", "alone", "outside"])
def test_what_sees_the_world_as_it_is_works(installed, size, seen):
    """The user set the environment, the world has one rank, or there is no world."""
    Watch(lambda: size).start()
    for name in STAND_INS:
        assert getattr(importlib.import_module(name), WATCHED[name][0])(seen).seen == seen


@pytest.mark.parametrize("name", STAND_INS)
def test_what_was_made_before_the_world_is_refused_when_the_world_is_entered(installed, name):
    """For example an Accelerator that is made beside the model, and used inside the function."""
    size = [0]
    watch = Watch(lambda: size[0])
    watch.start()
    made = getattr(importlib.import_module(name), WATCHED[name][0])()
    watch.check()
    size[0] = 2
    with pytest.raises(UsageError, match="sees a world of 1, but the world has 2 ranks"):
        watch.check()
    del made
    watch.check()


@pytest.mark.parametrize("name", STAND_INS)
def test_what_an_integration_makes_anew_in_each_world_is_not_refused(installed, name):
    """An integration forgets the object that it replaces inside the world."""
    size = [0]
    watch = Watch(lambda: size[0])
    watch.start()
    made = getattr(importlib.import_module(name), WATCHED[name][0])()
    watch.forget(made)
    size[0] = 2
    watch.check()


@pytest.mark.parametrize("name", STAND_INS)
def test_what_an_earlier_program_made_is_refused_only_where_this_one_uses_it(installed, name):
    """It stays in the worker's namespace: a program that does not use it runs, one that trains with it is refused."""
    size = [0]
    watch = Watch(lambda: size[0])
    watch.start()
    made = getattr(importlib.import_module(name), WATCHED[name][0])()
    watch.begin()
    size[0] = 2
    watch.check()
    use = getattr(made, WATCHED[name][3][0])
    with pytest.raises(UsageError, match="sees a world of 1, but the world has 2 ranks"):
        use("model")
    size[0] = 0
    assert use("model") == "model"


@pytest.mark.parametrize("name", STAND_INS)
def test_what_trains_alone_outside_of_a_world_is_named_once(installed, name, capsys):
    """One line for each program that does it on several workers, with an alternative. It goes on, as it may be meant."""
    size = [0]
    watch = Watch(lambda: size[0])
    watch.start()
    made = getattr(importlib.import_module(name), WATCHED[name][0])()
    *use, train = (getattr(made, method) for method in WATCHED[name][3])
    watch.begin(workers=3)
    assert [method("model") for method in use] == ["model"] * len(use)
    assert capsys.readouterr().err == ""
    for _ in range(2):
        assert train("loss") == "loss"
    (line,) = capsys.readouterr().err.splitlines()
    assert "trains outside of an elastic function, so each of the 3 workers trains alone. Write " in line
    assert INSTEAD[name] in line


@pytest.mark.parametrize("case", ["one worker", "a cell", "in the world", "set up by hand", "an integration"])
def test_what_may_train_outside_of_a_world_is_not_named(installed, case, capsys):
    """Where a worker is alone anyway, between two programs, in an elastic function, and with ranks that the user has set up.

    An integration may begin the training before there is a world.
    """
    watch = Watch(lambda: 1 if case == "in the world" else 0)
    watch.start()
    watch.begin(workers=1 if case == "one worker" else 3)
    if case == "a cell":
        watch.end()
    for name in STAND_INS:
        made = getattr(importlib.import_module(name), WATCHED[name][0])(3 if case == "set up by hand" else 1)
        if case == "an integration":
            watch.forget(made)
        getattr(made, WATCHED[name][3][-1])("model")
    assert capsys.readouterr().err == ""


def test_other_imports_are_left_alone(installed):
    """Modules that are not watched are imported as usual; missing ones raise."""
    Watch(lambda: 3).start()
    assert importlib.import_module("lightning").__name__ == "lightning"
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("accelerate.nothing")


def test_the_warning_is_not_glued_to_a_progress_bar(installed, capsys):
    """A bar leaves its line unfinished: the warning begins on a new one."""
    name = next(iter(STAND_INS))
    watch = Watch(lambda: 0)
    watch.start()
    watch.begin(workers=3)
    made = getattr(importlib.import_module(name), WATCHED[name][0])()
    with tqdm(total=2, file=sys.stderr, position=0):
        getattr(made, WATCHED[name][3][-1])("loss")
        assert "\nnbelastic: " in capsys.readouterr().err
