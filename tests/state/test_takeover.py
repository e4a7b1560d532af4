"""The state of a new program takes over the values of the old one's."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import nbelastic as nbe
from nbelastic.errors import StateError
from nbelastic.state.takeover import LONG, initial_values, listed, merged, take_over
from nbelastic.state.user_words import UserWords, in_users_words
from tests.state.training import no_memory


def make(width=4, lr=0.1, steps=10, **values):
    torch.manual_seed(len(values))
    model = torch.nn.Sequential(torch.nn.Linear(3, width), torch.nn.BatchNorm1d(width), torch.nn.Linear(width, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, steps)
    return nbe.TorchState(model=model, optimizer=optimizer, scheduler=scheduler, **values)


def train(state, steps=3):
    for _ in range(steps):
        state.optimizer.zero_grad()
        state.model(torch.randn(5, 3)).sum().backward()
        state.optimizer.step()
        state.scheduler.step()
        state.commit()
    return state


def taken(new, old, base):
    return take_over(new, old, base, initial_values(new))


def trained(**kwargs):
    state = make(**kwargs)
    base = initial_values(state)
    return train(state), base


def test_an_equal_program_goes_on_as_the_old_one_would():
    """Parameters, buffers, momentum, schedule, counters and random generators: the next steps are the same to the last bit."""
    old, base = trained(epoch=0)
    old.epoch = 2
    old.commit()
    new = make(epoch=0)
    assert taken(new, old, base) == ([], False)
    assert (new.epoch, new.commits) == (2, 4)
    train(new)
    result = [p.clone() for p in (*new.model.parameters(), *new.model.buffers())]
    torch.set_rng_state(old._record._random["torch"])
    train(old)
    assert all(map(torch.equal, result, (*old.model.parameters(), *old.model.buffers())))


def test_the_old_state_stays_as_it_is():
    """The new program's steps change nothing of it."""
    old, base = trained()
    before = {name: t.clone() for name, t in old.model.state_dict().items()}
    momentum = [dict(entry) for entry in old.optimizer.state_dict()["state"].values()]
    copies = [{k: v.clone() for k, v in entry.items()} for entry in momentum]
    new = make()
    taken(new, old, base)
    train(new)
    assert all(torch.equal(t, before[name]) for name, t in old.model.state_dict().items())
    assert all(torch.equal(e[k], c[k]) for e, c in zip(momentum, copies, strict=True) for k in c)


@pytest.mark.parametrize("edited", [False, True])
def test_groups_that_were_added_are_taken_over(edited):
    """A loop added one at a commit that the new program does not run. If the user trains its parameters from the start, they count."""

    def late(everything=False):
        model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 1))
        return nbe.TorchState(
            model=model, optimizer=torch.optim.AdamW((model if everything else model[1]).parameters(), lr=0.1)
        )

    old, new = late(), late(edited)
    base, model = initial_values(old), old.model
    old.optimizer.add_param_group({"params": list(model[0].parameters()), "lr": 0.02})
    model(torch.ones(2, 3)).sum().backward()
    old.optimizer.step()
    old.commit()
    take_over(new, old, base, initial_values(new))
    assert [group["lr"] for group in new.optimizer.param_groups] == ([0.1] if edited else [0.1, 0.02])
    own, theirs = (one.optimizer.state[one.model[0].bias]["exp_avg"] for one in (new, old))
    assert torch.equal(own, theirs)


def test_a_new_learning_rate_does_not_remove_groups_that_were_added():
    """The new program's groups were taken as a whole, so what the loop had unfrozen was trained no longer."""

    def late(lr):
        model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 1))
        return nbe.TorchState(model=model, optimizer=torch.optim.AdamW(model[1].parameters(), lr=lr))

    old, new = late(0.1), late(0.05)
    base = initial_values(old)
    old.optimizer.add_param_group({"params": list(old.model[0].parameters()), "lr": 0.02})
    old.commit()
    notes = take_over(new, old, base, initial_values(new)).notes
    assert [group["lr"] for group in new.optimizer.param_groups] == [0.05, 0.02]
    assert notes == ["the new program sets optimizer.lr"]


def test_what_the_user_has_edited_counts():
    """A new learning rate is used, also under a scheduler; the schedule's position goes on. A note says what was set."""
    old, base = trained(lr=0.1, patience=3)
    new = make(lr=0.5, steps=100, patience=3)
    notes = taken(new, old, base).notes
    assert new.optimizer.param_groups[0]["lr"] == 0.5
    assert (new.scheduler.step_size, new.scheduler.last_epoch, new.patience) == (100, 3, 3)
    assert any("optimizer.lr" in note and "scheduler.step_size" in note for note in notes), notes


def test_names_are_those_that_the_user_wrote():
    """A value that an integration has put into the state has the user's names for its parts, each once; private parts have none."""
    words = UserWords(
        {"progress.": None, "progress.rates": "learning_rate", "optimizer.lr": "learning_rate", "optimizer.": ""}
    )
    found = [
        "progress.rates",
        "progress.values.epoch",
        "optimizer[0].lr",
        "optimizer[1].lr",
        "optimizer[1].weight_decay",
    ]
    assert in_users_words(found, words) == ["learning_rate", "weight_decay"]
    assert in_users_words(["schedule._last_lr", "schedule.step_size", "best"], words) == ["schedule.step_size", "best"]
    callback = "position.callbacks.EarlyStopping{'monitor': 'loss', 'mode': 'min'}.patience"
    assert in_users_words([callback], UserWords({"position.callbacks.": ""})) == ["EarlyStopping.patience"]


def test_other_shapes_and_names_are_said():
    """Layers of another width, and new names, begin afresh; what is not taken over is named."""
    old, base = trained(best=1.0)
    new = make(width=6, worst=2.0)
    found = taken(new, old, base)
    assert found.may_be_unequal
    text = " ".join(found.notes)
    assert "new parameters model.0.weight" in text
    assert "starts fresh with worst" in text
    assert "does not take over best" in text
    assert torch.equal(new.model[2].bias, old.model[2].bias)
    assert not new.optimizer.state[new.model[0].weight]
    assert new.optimizer.state[new.model[2].bias]["step"] == 3


def test_another_optimizer_begins_afresh():
    """It keeps other things for its parameters."""
    old, base = trained()
    new = make()
    values = {**new._contents.values, "optimizer": torch.optim.SGD(new.model.parameters(), lr=0.1)}
    del values["scheduler"]
    found = taken(nbe.TorchState(**values), old, base)
    assert found.may_be_unequal
    assert any(note.endswith("parameters optimizer") for note in found.notes)
    assert not values["optimizer"].state


def test_a_program_that_takes_over_before_the_first_step():
    """The optimizer of the old one has kept nothing yet, and nothing is put into either."""
    old, new = make(), make()
    assert taken(new, old, initial_values(old)) == ([], False)
    assert not old.optimizer.state
    assert not new.optimizer.state


class Counting(torch.optim.SGD):
    """It keeps numbers and lists, for each parameter and for all of them."""

    def step(self, closure=None):
        super().step(closure)
        for kept in (self.state["all"], *map(self.state.__getitem__, self.param_groups[0]["params"])):
            kept["steps"] = kept.get("steps", 0) + 1
            kept.setdefault("rates", []).append(self.param_groups[0]["lr"])


def test_what_an_optimizer_keeps_beside_tensors_goes_on():
    """All of it is taken over, as a copy: a step of the new program changes nothing of the old optimizer's."""

    def made():
        model = torch.nn.Linear(3, 1)
        return nbe.TorchState(model=model, optimizer=Counting(model.parameters(), lr=0.5, momentum=0.9))

    def kept(state):
        return [(entry["steps"], entry["rates"]) for entry in state.optimizer.state.values()]

    old, new = made(), made()
    base = initial_values(old)
    old.model(torch.ones(3)).backward()
    old.optimizer.step()
    old.commit()
    taken(new, old, base)
    new.optimizer.step()
    assert kept(old) == [(1, [0.5])] * 3
    assert kept(new) == [(2, [0.5, 0.5])] * 3


def test_values_that_each_rank_may_have_made_for_itself_are_sent_to_all():
    """A new value, or one that was edited, may come from a random generator."""
    old, base = trained(patience=3)
    assert not taken(make(patience=3), old, base).may_be_unequal
    assert taken(make(patience=4), old, base).may_be_unequal
    assert taken(make(patience=3, salt=0.5), old, base).may_be_unequal


def test_a_value_that_has_become_another_type_goes_on():
    """`best=None` is a number after the first steps."""
    old, base = trained(best=None)
    old.best = 0.25
    new = make(best=None)
    assert taken(new, old, base).notes == []
    assert new.best == 0.25


def test_a_log_of_steps_goes_on_in_its_run():
    """Its key is random, and thus another one in each program and on each rank."""
    old, base = trained(log=nbe.StepLog(lambda _: None))
    new = make(log=nbe.StepLog(lambda _: None))
    assert taken(new, old, base) == ([], False)
    assert new.log.key == old.log.key


def test_a_sampler_begins_a_pass_through_other_data():
    """Its position in the old data may be beyond the end of the new data. The pass of the same data goes on."""
    old, base = trained(sampler=nbe.ElasticSampler([*range(100)]))
    old.sampler.set_epoch(2)
    old.sampler.record_batch(70)
    old.commit()
    for samples, used in ((100, 70), (50, 0)):
        new = make(sampler=nbe.ElasticSampler([*range(samples)]))
        taken(new, old, base)
        assert (new.sampler.epoch, new.sampler.used) == (2, used)


def test_objects_of_the_old_program_are_not_edited_by_the_training():
    """A new state of the old objects begins with what the training has made of them: no line says so."""
    old, base = trained()
    new = nbe.TorchState(**old._contents.values)
    assert taken(new, old, base) == ([], False)


@pytest.mark.parametrize("is_new", [False, True])
def test_a_sharded_state_and_a_whole_one_do_not_take_over_from_one_another(is_new):
    """The error names both, and says what to do instead."""
    states = [trained()[0], nbe.ShardedState(step=0)]
    old, new = states if is_new else reversed(states)
    with pytest.raises(StateError, match=rf"is a {type(new).__name__}, .* a {type(old).__name__}, .* as a new job"):
        take_over(new, old, {}, {})


def test_a_sharded_state_makes_no_values_by_itself():
    """It takes all that it needs in its next world: nothing is to be sent to all ranks before."""
    old, new = nbe.ShardedState(step=0), nbe.ShardedState(step=0)
    assert taken(new, old, initial_values(old)) == ([], False)


VALUES = st.recursive(
    st.integers() | st.text(max_size=2) | st.none(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("abc"), inner, max_size=3),
    max_leaves=6,
)


@given(VALUES, VALUES)
def test_a_program_that_was_not_edited_changes_nothing(base, present):
    """Whatever the training has made of its values."""
    assert merged(base, present, base) == present


def test_a_value_that_begins_as_nan_goes_on():
    """NaN does not equal itself, and is still no edit: `best=math.nan` is a usual first value."""
    base, edited = ({"best": math.nan, "losses": [float("nan")]} for _ in range(2))
    own: list[str] = []
    assert merged(base, {"best": 0.5, "losses": [0.7]}, edited, "state", own) == {"best": 0.5, "losses": [0.7]}
    assert own == []


@pytest.mark.parametrize(
    ("base", "edited", "is_edit"),
    [
        (torch.ones(2), torch.ones(2), False),
        (torch.ones(2), torch.zeros(2), True),
        (torch.ones(2), torch.ones(3), True),
        (torch.ones(2), torch.ones(2).double(), True),
        (torch.ones(2), 1.0, True),
        (1.0, torch.ones(2), True),
    ],
)
def test_a_tensor_is_compared_by_its_values(base, edited, is_edit):
    """A program that makes an equal tensor has not edited it."""
    present, own = 0.5, []
    assert merged(base, present, edited, "scale", own) is (edited if is_edit else present)
    assert own == ["scale"] * is_edit


def test_entries_that_come_and_go():
    """One that the user has removed stays away, and one that the training has added goes on."""
    assert merged({"a": 1, "b": 2}, {"a": 5, "b": 6, "c": 7}, {"a": 1}) == {"a": 5, "c": 7}
    assert merged({"a": 1}, {"b": 5}, {"a": 2, "b": 3}) == {"a": 2, "b": 3}


def test_parameter_groups_are_merged_one_by_one():
    """A rate that was edited in one group is set there. A program with another number of groups sets them all."""
    base, present = ([{"lr": rate, "decay": 0}] * 2 for rate in (0.1, 0.05))
    edited, own = [base[0], {"lr": 0.3, "decay": 0}], []
    assert merged(base, present, edited, "optimizer", own) == [present[0], edited[1]]
    assert merged(base[:1], present[:1], edited, "optimizer", own) == edited
    assert merged(base, present[:1], edited, "optimizer", own) == edited
    assert own == ["optimizer[1].lr", "optimizer", "optimizer"]


@pytest.mark.parametrize("first", [1, {"lr": 1}])
def test_another_list_is_one_value(first):
    """Its items may have moved."""
    assert merged([first, 2], [first, 3], [4, 2]) == [4, 2]
    assert merged([first, 2], [first, 3], [{"lr": 4}, 2]) == [{"lr": 4}, 2]


def test_a_note_names_a_few_values():
    """Short names come first, as the key of a callback may be a line of text."""
    line = "x" * (LONG + 1)
    assert listed("sets", [line, *"abc"]) == [f"the new program sets a, b, c, {line}"]
    assert listed("sets", [line, *"abcd"]) == ["the new program sets a, b, c, d and 1 more"]
    assert listed("sets", [line[1:], *"abc"]) == [f"the new program sets {line[1:]}, a, b, c"]


@given(st.dictionaries(st.sampled_from("abcd"), VALUES), st.sampled_from("abcd"), VALUES)
def test_only_an_edited_entry_is_set(base, key, value):
    """All others go on."""
    present = {name: [entry, "trained"] for name, entry in base.items()}
    edited = {**base, key: value}
    own: list[str] = []
    result = merged(base, present, edited, "state", own)
    for name in base:
        if name != key or base[name] == value:
            assert result[name] == present[name]
    if key in base and base[key] != value and not isinstance(value, dict | list):
        assert (result[key], own) == (value, [f"state.{key}"])


def test_a_program_that_fails_in_an_evaluation_leaves_the_old_one_in_train_mode(begun):
    """It uses the state itself, so that its layers are those of the old program."""
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Dropout())
    state = begun(nbe.TorchState(model=model, optimizer=torch.optim.SGD(model.parameters())))
    session = state._session
    state._set_aside()
    model[1].eval()
    state._begin_again(session)
    model.eval()
    state._take_up(session)
    assert [layer.training for layer in model.modules()] == [True, True, True]


def test_a_program_without_memory_for_copies_goes_on_from_its_commit(begun, monkeypatch):
    """A new program is refused as memory is short. The old one restores nothing of what was copied meanwhile."""
    model = torch.nn.Linear(4, 4)
    state = begun(nbe.TorchState(model=model, step=1))
    state._tensors._copies.pop(id(model.weight))  # as on a GPU, whose first copy of a tensor is not used again

    with monkeypatch.context() as patch:
        patch.setattr("nbelastic.state.tensor_snapshot.allocate", no_memory)
        with pytest.raises(RuntimeError, match="no memory"):
            state._set_aside()
    assert state.clean
    with torch.no_grad():
        model.weight += 1
        model.bias += 1
    state.undo()
    assert not state.clean
