"""Arguments of a wrong type: the error is one line that names the argument and what it must be."""

from concurrent.futures import Future

import pytest

import nbelastic as nbe
from nbelastic.client.checkpoints import checkpoint_plan
from nbelastic.client.waiting import wait_for_result
from nbelastic.protocol.settings import NEEDED, OPTIONAL
from nbelastic.state import checkpoints as saving
from nbelastic.system.argument_types import NAMES, check_kind

WRONG = {
    "a whole number": ("2", 1.5, [1]),
    "a number of seconds": ("soon", b"5", {"a": 1}),
    "two numbers of seconds": (5, {1.0, 2.0}, ("a", "b")),
    "text": (5, b"x", ["x"]),
    "a list of names": ("torch", 5, [1]),
    "a path": (5, ["x"], object()),
    "a dict": (5, "a=1", ["a=1"]),
}
GIVEN = [(name, value, kind.words) for name, kind in {**NEEDED, **OPTIONAL}.items() for value in WRONG[kind.words]] + [
    (name, None, kind.words) for name, kind in NEEDED.items()
]


def refused(make, *args, **options):
    """The text of the UsageError that this call raises, which has one line."""
    with pytest.raises(nbe.UsageError) as error:
        make(*args, **options)
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize(("name", "value", "words"), GIVEN)
def test_an_argument_of_a_cluster_that_is_of_a_wrong_type_is_named(name, value, words):
    assert refused(nbe.Cluster, **{name: value}).startswith(f"{name} must be {words}, not ")


def test_every_argument_of_a_cluster_that_has_a_type_is_tried():
    """The other arguments have tests of their own, or may have any type."""
    known = nbe.Cluster.__init__.__kwdefaults__.keys()
    assert known - NEEDED.keys() - OPTIONAL.keys() == {
        *("discovery", "keep", "code_sync", "requirements", "chaos", "exclude_differing")
    }


@pytest.mark.parametrize("seconds", [None, [1], object()])
def test_a_timeout_that_is_not_a_number_is_named(seconds):
    assert refused(nbe.Cluster, timeouts={"recover": seconds}).startswith("timeouts: recover=")


def test_a_range_has_two_ends():
    assert refused(nbe.Cluster, cooldown=(1, 2, 3)).startswith("cooldown=(1, 2, 3): two numbers")


@pytest.mark.parametrize("hosts", [5, [1], b"gpu1", object()])
def test_hosts_that_are_not_text_are_refused(hosts):
    line = 'hosts must be text or a list of texts, as "gpu1:4", not '
    assert refused(nbe.Cluster, hosts).startswith(line)
    assert refused(nbe.FixedHosts, hosts).startswith(line)


def test_discoveries_of_a_wrong_type_are_refused():
    assert (
        refused(nbe.Cluster, discovery=5) == "discovery must be a script's path or have a method hosts(): int has none."
    )
    assert refused(nbe.ScriptDiscovery, None) == "command must be text, not None."
    assert refused(nbe.ScriptDiscovery, "true", "2") == "slots must be a whole number, not a str."
    assert refused(nbe.FixedHosts, "gpu1", None) == "slots must be a whole number, not None."


def test_checkpoints_of_a_wrong_type_are_refused():
    state = nbe.ObjectState(step=0)
    assert refused(checkpoint_plan, 5, None, None) == "checkpoint must be a path, not an int."
    assert refused(state.save, 5) == refused(state.load, 5) == "path must be a path, not an int."
    assert refused(saving.save, state, "x", keep="3") == "keep must be a whole number, not a str."
    assert refused(saving.save, state, "x", keep=0) == "keep=0: at least 1."


def test_states_of_a_wrong_type_are_refused():
    assert refused(nbe.TorchState, 5) == "a state's values have names: TorchState(model=model, step=0)."
    assert refused(nbe.elastic, None) == "nbe.elastic decorates a function(state, …), not NoneType."
    assert refused(nbe.ObjectState().register_reset_callbacks, [5]) == "a reset callback must be a function, not 5."
    assert refused(nbe.ObjectState().register_reset_callbacks, 5) == "a reset callback must be a function, not 5."


@pytest.mark.parametrize("seed", [None, "x", float("nan"), float("inf"), [1]])
def test_seeds_and_epochs_that_are_not_numbers_are_refused(seed):
    assert refused(nbe.ElasticSampler, range(4), seed=seed).startswith("seed must be a whole number, not ")
    assert refused(nbe.ElasticSampler(range(4)).set_epoch, seed).startswith("epoch must be a whole number, not ")


@pytest.mark.parametrize("state", [None, 5, {"used": 1}, {"used": "x", "epoch": 1}, [1]])
def test_an_invalid_state_of_a_sampler_is_refused(state):
    """The sampler does not change."""
    sampler = nbe.ElasticSampler(range(4))
    with pytest.raises(nbe.StateError, match="not a state of an ElasticSampler"):
        sampler.load_state_dict(state)
    assert sampler.used == 0


def test_numbers_of_other_libraries_are_numbers():
    """Such as NumPy's."""
    numpy = pytest.importorskip("numpy")
    cluster = nbe.Cluster("localhost:2", min=numpy.int64(2), silence=numpy.float32(5), elastic_timeout=60)
    assert cluster._link.configuration.settings.limits.min == 2
    check_kind("preload", ("torch", "numpy"), NAMES)


@pytest.mark.parametrize(("timeout", "words"), [(float("nan"), "timeout=nan: give a number"), ("5", "timeout must be")])
def test_a_timeout_that_is_not_a_number_of_seconds(timeout, words):
    """It is refused: a wait for NaN seconds would have no end."""
    assert refused(wait_for_result, Future(), timeout, str).startswith(words)


def test_the_home_folder_of_an_unknown_user():
    """A path that begins with `~` and an unknown name is refused, wherever it is given."""
    for given in (
        {"log_dir": "~nobody-here/logs"},
        {"requirements": "~nobody-here/r.txt"},
        {"code_folders": ["~nobody-here"]},
    ):
        assert refused(nbe.Cluster, **given).endswith(": this machine has no such home folder.")
    assert refused(checkpoint_plan, "~nobody-here/kept", None, None).startswith("~nobody-here/kept: ")
    assert refused(saving.as_folder, "~nobody-here/kept").startswith("~nobody-here/kept: ")
