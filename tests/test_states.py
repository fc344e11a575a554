"""States from one run to the next: which output becomes which input, and how each is made to fit."""

from __future__ import annotations

import json
from types import SimpleNamespace

import numpy as np
import pytest

from deltafuse.errors import UserError
from deltafuse.rollout_child import chain
from deltafuse.states import Link, MisfitError, Slot, as_document, carry, from_document
from deltafuse.states_map import State, pair_states


def pairs(outputs, inputs, maps=(), needed=None):
    """Sources, targets, how and why of each link."""
    wanted = [state.name for state in inputs] if needed is None else needed
    links = pair_states(outputs, inputs, maps, needed=wanted)
    return [(",".join(link.sources), ",".join(link.targets), link.how, link.why) for link in links]


def state(name, *shape, layer=None):
    return State(name, shape or None, layer)


@pytest.mark.parametrize(
    ("output", "taken"),
    [
        ("present_conv_states", "past_conv_states"),
        ("recurrent_states", "past_recurrent_states"),
        ("cache.layers.0.keys", "input.cache.layers.0.keys"),
        ("output.cache.layers.2.recurrent_states.0", "input.cache.layers.2.recurrent_states.0"),
        ("final_state", "initial_state"),
    ],
)
def test_names_are_equal_but_for_the_side(output, taken):
    others = [state("present_other", 9, 9, 9)]
    assert pairs([state(output, 2, 3, 4), *others], [state(taken, 2, 3, 4)]) == [(output, taken, "same", "name")]


def test_an_equal_name_of_other_sizes_is_no_pair():
    with pytest.raises(UserError) as error:
        pairs([state("present_x", 2, 3, 4)], [state("past_x", 5, 6, 7)])
    assert error.value.code == "state-missing"
    assert "past_x [5, 6, 7]" in str(error.value)
    assert "not taken yet: present_x. Say which it is with --map OUTPUT=past_x" in str(error.value)


def test_where_no_output_is_left_none_is_asked_for():
    with pytest.raises(UserError, match=r"^decode has no output for the state past_x \[5\] that") as error:
        pairs([], [state("past_x", 5)])
    assert error.value.code == "state-missing"


def test_layers_are_stacked_in_the_order_of_their_numbers():
    layers = [state(f"present.{number}.conv", 1, 8, 4) for number in (10, 2, 0)]
    found = pairs(layers, [state("past_conv_states", 3, 1, 8, 4)])
    assert found == [("present.0.conv,present.2.conv,present.10.conv", "past_conv_states", "stack", "name and layer")]
    back = pairs([state("present_conv_states", 3, 1, 8, 4)], [state(f"past.{n}.conv", 1, 8, 4) for n in (10, 2, 0)])
    assert back == [("present_conv_states", "past.0.conv,past.2.conv,past.10.conv", "unstack", "name and layer")]


def test_a_stack_of_another_number_of_layers_is_none():
    layers = [state(f"present.{number}.conv", 1, 8, 4) for number in range(2)]
    with pytest.raises(UserError):
        pairs(layers, [state("past_conv_states", 3, 1, 8, 4)])


def test_sizes_tell_where_names_do_not():
    outputs = [state("a", 1, 8, 4), state("b", 1, 2, 16, 16)]
    inputs = [state("x", 1, 2, 16, 16), state("y", 1, 8, 4)]
    assert pairs(outputs, inputs) == [("b", "x", "same", "sizes"), ("a", "y", "same", "sizes")]


def test_sizes_and_layers_tell_where_several_are_alike():
    outputs = [state(name, 1, 2, 16, 16, layer=layer) for name, layer in (("late", 4), ("early", 1))]
    inputs = [state(name, 1, 2, 16, 16, layer=layer) for name, layer in (("x", 1), ("y", 4))]
    assert pairs(outputs, inputs) == [
        ("early", "x", "same", "sizes and layer"), ("late", "y", "same", "sizes and layer"),
    ]  # fmt: skip


@pytest.mark.parametrize("layers", [(None, None), (3, 3)])
def test_what_is_alike_in_one_layer_is_ambiguous(layers):
    outputs = [state(name, 1, 2, 16, 16, layer=layer) for name, layer in zip("ab", layers, strict=True)]
    inputs = [state(name, 1, 2, 16, 16, layer=layer) for name, layer in zip("xy", layers, strict=True)]
    with pytest.raises(UserError) as error:
        pairs(outputs, inputs)
    assert error.value.code == "state-ambiguous"
    assert "--map a=x  --map b=x" in str(error.value)
    maps = (("a", "y"), ("b", "x"))
    assert pairs(outputs, inputs, maps) == [("b", "x", "same", "map"), ("a", "y", "same", "map")]


def test_a_map_may_stack_and_take_apart():
    layers, stack = [state(name, 1, 4, 4) for name in "ab"], state("s", 2, 1, 4, 4)
    assert pairs(layers, [stack], (("b,a", "s"),)) == [("b,a", "s", "stack", "map")]
    assert pairs([stack], layers, (("s", "b,a"),)) == [("s", "b,a", "unstack", "map")]


@pytest.mark.parametrize(
    ("outputs", "inputs", "says"),
    [
        ([state("a", 1, 4, 8)], [state("x", 2, 1, 4, 8)], r"a \[1, 4, 8\] has 3 axes and x \[2, 1, 4, 8\] 4"),
        ([state("a", 2, 4, 8)], [state("x", 3, 4, 8)], r"axis 0 of a \[2, 4, 8\] is not that of x \[3, 4, 8\]"),
        ([state("a", 1, 2), state("b", 1, 2)], [state("s", 3, 1, 2)], r"s \[3, 1, 2\] has 3 layers, and --map names 2"),
        ([state("s", 2, 1, 2)], [state("a", 1, 2), state("b", 1, 1, 2)], r"b \[1, 1, 2\] has 3 axes and s \[1, 2\] 2"),
    ],
)
def test_a_map_of_states_that_never_fit_is_refused(outputs, inputs, says):
    names = [",".join(one.name for one in some) for some in (outputs, inputs)]
    with pytest.raises(UserError, match=says) as error:
        pairs(outputs, inputs, (tuple(names),))
    assert error.value.code == "state-misfit"


def test_a_map_may_pair_what_can_be_made_to_fit():
    assert pairs([state("a", None, 8, 4)], [state("x", 1, 8, 3)], (("a", "x"),)) == [("a", "x", "same", "map")]


def test_what_need_not_come_from_anywhere_is_left():
    assert pairs([state("a", 1, 2)], [state("hidden", 7)], needed=()) == []


# Making fit.


def carried(array, shape, dtype="float32", *, tokens=5, first=True, rigid=False):
    found, notes = carry([Link(("s",), ("t",))], {"s": array}, {"t": Slot(shape, dtype, rigid)}, tokens, first=first)
    return found["t"], notes


def test_a_state_that_fits_is_carried_as_it_is():
    array = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
    found, notes = carried(array, (2, None, 4))
    assert np.array_equal(found, array)
    assert notes == ()


def test_the_last_columns_of_a_wider_one_are_kept():
    array = np.arange(8, dtype=np.float32).reshape(1, 2, 4)
    found, notes = carried(array, (1, 2, 3))
    assert found.tolist() == [[[1, 2, 3], [5, 6, 7]]]
    assert notes == ("s -> t: kept the last 3 of 4 columns of axis 2",)


def test_a_grown_cache_of_fixed_size_drops_its_oldest_entries():
    array = np.arange(7, dtype=np.float32).reshape(1, 1, 7, 1)
    found, notes = carried(array, (1, 1, 5, 1), tokens=2, first=False)
    assert found.ravel().tolist() == [2, 3, 4, 5, 6]
    assert notes == ("s -> t: dropped the oldest 2 of 7 entries of axis 2, the cache is full",)


def test_a_prefills_cache_is_put_at_the_front_of_a_larger_one():
    found, notes = carried(np.ones((1, 1, 5, 2), np.float32), (1, 1, 8, 2))
    assert found[..., 0].ravel().tolist() == [1, 1, 1, 1, 1, 0, 0, 0]
    assert "put 5 entries of axis 2 into a cache of 8" in notes[0]


def test_another_type_is_cast_and_told():
    found, notes = carried(np.ones((2, 3)), (2, 3), "float16")
    assert found.dtype == np.float16
    assert notes == ("s -> t: cast from float64 to float16",)


@pytest.mark.parametrize(
    ("shape", "slot", "options"),
    [
        ((2, 3), (2, 3, 1), {}),
        ((1, 2, 4), (1, 2, 5), {}),  # a narrower one
        ((1, 2, 40), (1, 2, 32), {}),  # no convolution has so many columns
        ((1, 2, 4), (1, 2, 3), {"rigid": True}),
        ((1, 1, 7, 2), (1, 1, 5, 2), {}),  # more than a prefill's tokens into a smaller cache
        ((1, 6, 4, 4), (1, 4, 4, 4), {}),  # heads
    ],
)
def test_what_has_no_meaning_is_refused(shape, slot, options):
    with pytest.raises(MisfitError, match="is to have"):
        carried(np.ones(shape, np.float32), slot, **options)


@pytest.mark.parametrize("how", ["same", "stack", "unstack"])
def test_carried_states_have_memory_of_their_own(how):
    given = {"s": np.ones((2, 3), np.float32), "t": np.ones((2, 3), np.float32)}
    links = {"same": (("s",), ("x",)), "stack": (("s", "t"), ("x",)), "unstack": (("s",), ("x", "y"))}[how]
    shape = {"same": (2, 3), "stack": (2, 2, 3), "unstack": (3,)}[how]
    slots = {name: Slot(shape, "float32") for name in ("x", "y")}
    found, _ = carry([Link(*links, how)], given, slots, 1, first=False)
    given["s"][:] = 7
    found["x"][:] += 1
    assert set(np.ravel(found.pop("x"))) == {2}
    assert all(set(np.ravel(other)) == {1} for other in found.values())


class Reusing:
    """A runtime that writes each step into the same memory, adds one to what it is fed and gives a view of that."""

    def __init__(self):
        self.logits = np.zeros((1, 1, 5), np.float32)

    def get_inputs(self):
        return [SimpleNamespace(name="ids"), SimpleNamespace(name="past")]

    def get_outputs(self):
        return [SimpleNamespace(name=name, type="tensor(float)") for name in ("logits", "present")]

    def run(self, wanted, feeds):
        feeds["past"] += 1
        self.logits[:] = 0
        self.logits[..., int(feeds["past"][0, 0])] = 1
        return [self.logits, feeds["past"][:]]


def test_a_chain_keeps_what_a_runtime_writes_over(tmp_path):
    np.save(tmp_path / "ids.npy", np.zeros((1, 1), np.int64))
    np.save(tmp_path / "past.npy", np.zeros((1, 2), np.float32))
    links, slots = (Link(("present",), ("past",)),), {"past": Slot((1, 2), "float32")}
    request = {
        "inputs": {name: str(tmp_path / f"{name}.npy") for name in ("ids", "past")}, "drawn": {}, "steps": 3,
        "ids": "ids", "first": 0, "tokens": None, "logits": "logits", "past": 0, "stride": 1, "clocks": {},
        "states": as_document(links, slots), "watch": {"past": False}, "outputs": ["present"],
    }  # fmt: skip
    files = chain(request, Reusing(), tmp_path)["files"]
    assert np.load(files["logits"]).argmax(-1).tolist() == [1, 2, 3]
    assert np.load(files["state past"])[:, 0].tolist() == [[0, 0], [1, 1], [2, 2], [3, 3]]
    assert np.load(files["output present"])[:, 0].tolist() == [[1, 1], [2, 2], [3, 3]]


def test_stacks_are_made_and_taken_apart():
    a, b = np.ones((1, 2), np.float32), np.zeros((1, 2), np.float32)
    slots = {"t": Slot((2, 1, 2), "float32"), "x": Slot((1, 2), "float32"), "y": Slot((1, 2), "float32")}
    stacked, _ = carry([Link(("a", "b"), ("t",), "stack")], {"a": a, "b": b}, slots, 1, first=True)
    assert np.array_equal(stacked["t"], np.stack([a, b]))
    apart, _ = carry([Link(("s",), ("y", "x"), "unstack")], {"s": stacked["t"]}, slots, 1, first=True)
    assert np.array_equal(apart["y"], a)
    with pytest.raises(MisfitError, match="2 layers for 1 input"):
        carry([Link(("s",), ("y",), "unstack")], {"s": stacked["t"]}, slots, 1, first=True)


def test_links_go_through_json():
    links = (Link(("a", "b"), ("t",), "stack", "map"),)
    slots = {"t": Slot((2, None), "float16", True)}
    assert from_document(json.loads(json.dumps(as_document(links, slots)))) == (links, slots)
    assert links[0].text == "a,b=t"
