"""What a commit keeps of models and optimizers, how it is set again, and what is refused by name."""

from contextlib import contextmanager

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import nbelastic as nbe
from nbelastic.errors import StateError, UsageError
from nbelastic.sharded.arena import ShardTensor
from nbelastic.sharded.bound import Bound, bind_values, whole_but_trained
from nbelastic.sharded.bound_checks import check_small
from nbelastic.sharded.chunks import Layout, Parameter
from nbelastic.sharded.parameters import local_tensor
from nbelastic.sharded.refill import check_fits
from tests.sharded.fake_world import fake_world, sharded

OPTIMIZERS = {
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.1),
    "AdamW fused": lambda p: torch.optim.AdamW(p, lr=0.1, fused=True),
    "AdamW foreach": lambda p: torch.optim.AdamW(p, lr=0.1, foreach=True),
    "AdamW with a tensor as rate": lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.1), foreach=False),
    "Adam amsgrad": lambda p: torch.optim.Adam(p, lr=0.1, amsgrad=True),
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1),
    "SGD momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.1, centered=True, momentum=0.9),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=0.1),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
}


def trained(mesh, optimize, steps=1):
    """A sharded model with fewer rows than ranks in one layer, its optimizer, and steps with given gradients."""
    torch.manual_seed(1)
    model = sharded(nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1)), mesh)
    optimizer = optimize(model.parameters())
    train(model, optimizer, range(steps))
    return Bound({"model": model}, {"optimizer": optimizer}), model, optimizer


def train(model, optimizer, steps):
    for step in steps:
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, step + 1.0)
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("rank", [0, 3])
def test_an_optimizer_goes_on_from_what_was_kept(kind, rank):
    """With its settings, scalars and tensors set again, a new optimizer's next step is that of the first one."""
    with fake_world(rank, 4) as mesh:
        first, model, optimizer = trained(mesh, OPTIMIZERS[kind], 2)
        settings, scalars = first.settings(), first.scalars()
        shard = {name: tensor.clone() for name, tensor in first.shard().items()}
        second, other, new = trained(mesh, OPTIMIZERS[kind])
        with torch.no_grad():
            for name, tensor in shard.items():
                if not name.optimizer:
                    local_tensor(second.parameters[name.parameter]).copy_(tensor)
        second.set_optimizers(settings, scalars, {name: one for name, one in shard.items() if name.optimizer})
        assert list(second.shard()) == list(shard)
        for one, its in ((model, optimizer), (other, new)):
            train(one, its, [2])
        for one, wanted in zip(other.parameters(), model.parameters(), strict=True):
            assert torch.equal(local_tensor(one), local_tensor(wanted))


def test_groups_and_rates_are_kept():
    """A schedule's learning rate comes back with its group; groups of other parameters are an error."""
    with fake_world(0, 1) as mesh:
        bound, _, optimizer = trained(mesh, OPTIMIZERS["SGD momentum"])
        optimizer.param_groups[0]["lr"] = 0.025
        settings = bound.settings()
        other, model, new = trained(mesh, OPTIMIZERS["SGD momentum"])
        other.set_optimizers(settings, bound.scalars(), {})
        assert new.param_groups[0]["lr"] == 0.025
        two = torch.optim.SGD(
            [{"params": list(model[0].parameters())}, {"params": list(model[1].parameters())}], lr=1.0
        )
        with pytest.raises(StateError, match="the groups of optimizer have other parameters"):
            Bound({"model": model}, {"optimizer": two}).set_optimizers(settings, bound.scalars(), {})


def test_buffers_are_kept_also_those_of_no_checkpoint():
    """A buffer may be a whole DTensor. Saved buffers of other names or shapes are an error that names them."""
    with fake_world(0, 2) as mesh:
        model = nn.BatchNorm1d(2).requires_grad_(False)
        model.register_buffer("extra", torch.ones(3), persistent=False)
        model.register_buffer("whole", distribute_tensor(torch.ones(2), mesh, [Replicate()], src_data_rank=None))
        bound = Bound({"model": model}, {})
        kept = {"model": {key: one.clone() + 1 for key, one in bound.buffers()["model"].items()}}
        bound.set_buffers(kept)
        assert (model.extra.tolist(), model.num_batches_tracked.item()) == ([2.0] * 3, 1)
        assert model.whole.to_local().tolist() == [2.0, 2.0]
        kept["model"]["running_var"] = torch.ones(4)
        with pytest.raises(StateError, match=r"the buffer model.running_var is \(2,\) here and \(4,\) in the commit"):
            bound.set_buffers(kept)
        del kept["model"]["running_var"]
        with pytest.raises(StateError, match="model has the buffer running_var only here"):
            bound.set_buffers(kept)


def test_a_cache_that_forward_passes_have_enlarged_is_restored():
    """Such as a rotary table: the model is built again in each world, and its table is short then. It ended the job."""
    model = nn.Sequential(nn.Linear(1, 1)).requires_grad_(False)
    model[0].register_buffer("table", torch.zeros(1), persistent=False)
    model[0].register_buffer("scale", None)
    wanted = {"model": {"0.table": torch.arange(3), "0.scale": torch.ones(2)}}
    for _ in range(2):
        Bound({"model": torch.compile(model, backend="eager")}, {}).set_buffers(wanted)
        assert (model[0].table.tolist(), model[0].scale.tolist()) == ([0, 1, 2], [1, 1])
        model[0].table[0] = 7  # the commit keeps its own


@contextmanager
def watched(bound):
    bound.watch(lambda: None)
    try:
        yield
    finally:
        bound.unwatch()


@pytest.mark.parametrize("reduce", [None, torch.float64], ids=["plain", "in another precision"])
@pytest.mark.parametrize("shared", [True, False], ids=["shared", "not shared yet"])
def test_gradients_that_no_step_has_used_are_noticed(shared, reduce):
    """Also those of a backward pass without communication, which no parameter shows: a commit would lose them."""
    with fake_world(0, 2) as mesh:
        model = fully_shard(nn.Linear(4, 4), mesh=mesh, mp_policy=MixedPrecisionPolicy(reduce_dtype=reduce))
        bound = Bound({"model": model}, {"optimizer": torch.optim.SGD(model.parameters())})
        with watched(bound):
            assert not bound.accumulates
            model.set_requires_gradient_sync(shared)
            model(torch.ones(1, 4)).sum().backward()
            assert (model.weight.grad is not None) == shared
            assert bound.accumulates
            model.set_requires_gradient_sync(True)
            model(torch.ones(1, 4)).sum().backward()
            model.zero_grad()
            assert not bound.accumulates


def test_gradients_that_a_step_has_used_are_no_accumulation():
    """Whether the program drops them before the next backward pass or at once, and with a backward pass in the step itself."""
    with fake_world(0, 2) as mesh:
        model = fully_shard(nn.Linear(4, 4), mesh=mesh)
        optimizer = torch.optim.SGD(model.parameters())
        bound = Bound({"model": model}, {"optimizer": optimizer})

        def backward():
            model(torch.ones(1, 4)).sum().backward()

        with watched(bound):
            backward()
            optimizer.step()
            assert (bound.accumulates, bound.has_stepped) == (False, True)
            backward()
            assert bound.accumulates
            optimizer.step(backward)
            bound.committed()
            assert (bound.accumulates, bound.has_stepped) == (False, False)
            assert model.weight.grad is not None


def linear():
    return nn.Linear(2, 2)


def wrapped(name):
    """A module of a class that is called as the wrapper is."""
    return type(name, (nn.Sequential,), {})(linear())


def subclassed(model):
    kind = type("Quantized", (torch.Tensor,), {})
    model.weight = nn.Parameter(torch.ones(2, 2).as_subclass(kind), requires_grad=False)
    return model


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (lambda: wrapped("FullyShardedDataParallel"), r"model is sharded with .*\(FSDP1\): use fully_shard"),
        (lambda: wrapped("DistributedDataParallel"), "model is wrapped in DistributedDataParallel: use fully_shard"),
        (lambda: nn.Sequential(wrapped("DistributedDataParallel")), "model is wrapped in DistributedDataParallel"),
        (lambda: subclassed(linear()), "model.weight is stored as Quantized: ShardedState keeps plain tensors only"),
    ],
)
def test_models_that_are_refused(model, message):
    """The error names the model and what to use instead."""
    with pytest.raises(StateError, match=message):
        Bound({"model": model()}, {})


def test_sharded_buffers_are_refused():
    """Only buffers that every rank has as a whole are recovered."""
    with fake_world(0, 2) as mesh:
        model = linear()
        model.register_buffer("cache", distribute_tensor(torch.ones(4), mesh, [Shard(0)], src_data_rank=None))
        with pytest.raises(StateError, match=r"the buffer model\.cache is sharded"):
            Bound({"model": model}, {})


class ZeroRedundancyOptimizer(torch.optim.SGD):
    """Torch's needs a process group when it is made."""


@pytest.mark.parametrize(
    ("optimizer", "message"),
    [
        (lambda m: torch.optim.LBFGS(m.parameters()), "optimizer is LBFGS, which changes parameters within a step"),
        (
            lambda m: ZeroRedundancyOptimizer(m.parameters(), lr=1.0),
            "optimizer is ZeroRedundancyOptimizer: use a plain",
        ),
        (lambda m: torch.optim.SGD(linear().parameters(), lr=1.0), "optimizer trains 2 parameters of no bound model"),
    ],
)
def test_optimizers_that_are_refused(optimizer, message):
    """The error names the optimizer and what to do."""
    model = linear()
    with pytest.raises(StateError, match=message):
        Bound({"model": model}, {"optimizer": optimizer(model)})


def test_a_model_without_an_optimizer_is_refused_if_it_is_trained():
    """A commit counts what optimizers do. A model without gradients needs none."""
    with pytest.raises(StateError, match=r"bind\(\) has got no optimizer"):
        Bound({"model": linear()}, {})
    Bound({"model": linear().requires_grad_(False)}, {})


def test_a_model_that_is_not_sharded_is_refused():
    """Without fully_shard each rank would train a model of its own."""
    model = linear()
    bound = Bound({"model": model}, {"optimizer": torch.optim.SGD(model.parameters(), lr=1.0)})
    with pytest.raises(StateError, match=r"model: no parameter is sharded, .* Call fully_shard\(model, mesh"):
        whole_but_trained(bound)


def test_a_layer_that_is_trained_and_not_sharded_is_named():
    """Torch averages the gradients of sharded layers only. Frozen layers need no average."""
    with fake_world(0, 1) as mesh:
        model = nn.Sequential(linear(), linear())
        sharded(model[0], mesh)
        bound = Bound({"model": model}, {"optimizer": torch.optim.SGD(model.parameters(), lr=1.0)})
        assert whole_but_trained(bound).startswith("model.1.weight and 1 more are trained and not sharded: ")
        model[1].requires_grad_(False)
        assert whole_but_trained(bound) is None


@pytest.mark.parametrize("name", ["model", "optimizer", "scheduler"])
def test_what_belongs_into_bind_is_refused_before(name):
    """A scheduler belongs to an optimizer, and that to a sharded model."""
    model = linear()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    value = {"model": model, "optimizer": optimizer, "scheduler": torch.optim.lr_scheduler.ConstantLR(optimizer)}[name]
    with pytest.raises(StateError, match=rf"after fully_shard, and give it to bind\({name}=…\)"):
        check_small({name: value})


def entry(value):
    """An optimizer that keeps `value` for the weight of a model."""
    model = linear()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    optimizer.state[model.weight]["kept"] = value
    return Bound({"model": model}, {"optimizer": optimizer})


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (torch.ones(2), "optimizer keeps 'kept' for model.weight, which is not split as the parameter is"),
        (torch.ones(2, 2, device="meta"), "optimizer keeps 'kept' for model.weight on the meta device"),
        ({"of": torch.ones(2, 2)}, "optimizer keeps 'kept' for model.weight, with tensors inside of a dict"),
        ([torch.tensor(1.0), torch.ones(2, 2)], "model.weight, with tensors inside of a list"),
    ],
)
def test_optimizer_tensors_that_are_refused(value, message):
    """Tensors of another shape than the parameter's have no chunk, and those on meta no values."""
    with pytest.raises(StateError, match=message):
        entry(value).shard()


def test_factored_tensors_are_refused():
    """Adafactor keeps a row and a column for each weight."""
    model = linear()
    optimizer = torch.optim.Adafactor(model.parameters())
    bound = Bound({"model": model}, {"optimizer": optimizer})
    train(model, optimizer, [0])
    with pytest.raises(StateError, match=r"optimizer keeps 'row_var' for model\.weight, which is not split"):
        bound.shard()


def test_what_an_optimizer_keeps_for_no_parameter_is_refused():
    """Neither entries of the whole optimizer nor parameters that came later are recovered silently wrong."""
    model = linear()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    bound = Bound({"model": model}, {"optimizer": optimizer})
    optimizer.state["all"] = torch.ones(1)
    with pytest.raises(StateError, match="optimizer keeps 'all' for no parameter"):
        bound.shard()
    optimizer.state.clear()
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]})
    for read in (bound.settings, bound.shard):  # a commit reads the settings first
        with pytest.raises(StateError, match="optimizer has got a parameter of no bound model after bind"):
            read()


def test_another_model_than_the_commits_is_refused():
    """The first difference is named: a parameter, its shape or type, an optimizer, a model."""
    model = linear()
    bound = Bound({"model": model}, {"optimizer": torch.optim.SGD(model.parameters(), lr=1.0)})

    def layout(**shapes):
        return Layout(1, ("a",), {name: Parameter(shape, "float32", (None,)) for name, shape in shapes.items()})

    record = {"optimizers": {"optimizer": {}}, "buffers": {"model": {}}}
    here = layout(w=(2,))
    check_fits(here, here, bound, record)
    for old, changed, message in [
        (layout(w=(2,), b=(2,)), {}, "the parameter b is not bound here, and is in the commit"),
        (layout(), {}, "the parameter w is bound here, and not in the commit"),
        (layout(w=(3,)), {}, r"w is float32 \(2,\) here and float32 \(3,\) in the commit"),
        (here, {"optimizers": {}}, "the optimizer optimizer is bound here, and not in the commit"),
        (here, {"buffers": {"model": {}, "ema": {}}}, "the model ema is not bound here, and is in the commit"),
        (here, {"kinds": {"optimizer": "Adam"}}, "SGD here and Adam in the commit"),
    ]:
        with pytest.raises(StateError, match=message):
            check_fits(old, here, bound, record | changed)


class Unplain:
    """It has a state that no newcomer can read."""

    def state_dict(self):
        return {"self": self}

    def load_state_dict(self, state):
        raise NotImplementedError


MODEL = linear()


class Sharp(torch.optim.SGD):
    """As SAM: it has another optimizer."""

    def __init__(self, parameters):
        super().__init__(parameters)
        self.base = torch.optim.SGD(self.param_groups, momentum=0.9)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"model": MODEL, "sharp": Sharp(MODEL.parameters())}, r"as bind\(sharp=sharp, base=sharp\.base, …\)"),
        ({"optimizer": 1}, r"bind\(optimizer=…\) takes models, optimizers and what has a state_dict\(\), not int"),
        ({}, r"bind\(\) needs the sharded model"),
        ({"step": linear()}, "'step' cannot be the name of a bound value"),
        ({"commit": linear()}, "'commit' cannot be the name of a bound value"),
        (
            {"model": linear().requires_grad_(False), "schedule": Unplain()},
            "'schedule' is or holds something that is not plain",
        ),
    ],
)
def test_values_that_cannot_be_bound(values, message):
    """Each is refused at `bind`, and not when a newcomer needs it."""
    with pytest.raises(StateError, match=message):
        bind_values(values, {"step", "commit"})


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: nbe.ShardedState(model=linear()), StateError, r"model is a Linear: make it inside .* bind\(model=…\)"),
        (lambda: nbe.ShardedState(linear()), UsageError, "a state's values have names"),
        (lambda: nbe.ShardedState(every=0), UsageError, r"ShardedState\(every=0\): at least 1"),
        (lambda: nbe.ShardedState(copies=-1), UsageError, r"ShardedState\(copies=-1\): at least 0"),
        (lambda: nbe.ShardedState(step=0).bind(model=linear()), UsageError, r"bind\(\) works inside a function"),
        (lambda: nbe.ShardedState(step=0).commit(), UsageError, r"call bind\(model=…, optimizer=…\) before commit"),
        (lambda: nbe.ShardedState(step=0).restore(), StateError, "cannot return to a commit within a generation"),
    ],
)
def test_wrong_calls_are_refused(make, error, message):
    """Each error says what to call instead."""
    with pytest.raises(error, match=message):
        make()


def test_names_of_tensors():
    """A parameter's name is the model's and its own; an optimizer's tensor has the optimizer's name first."""
    assert ShardTensor("model.0.weight").key == "model.0.weight"
    assert ShardTensor("model.0.weight", "optimizer", "exp_avg").key == "optimizer.model.0.weight.exp_avg"
