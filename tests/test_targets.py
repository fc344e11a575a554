"""The registry of targets and the changes of layout."""

from __future__ import annotations

import numpy as np
import pytest

from deltafuse import targets
from deltafuse.errors import UserError
from deltafuse.targets.layout import Move, moves
from hand_match import arrange, parts


def test_get_returns_the_target_of_that_name():
    assert targets.get("ascend-310p").name == "ascend-310p"
    assert "ascend-310p" in targets.names()


def test_every_target_lists_its_limits():
    for name in targets.names():
        limits = targets.get(name).limits
        assert limits
        assert all(limit.code and limit.fact and limit.mark in "VSA" for limit in limits)


def test_an_unknown_target_is_a_user_error_that_lists_the_known():
    with pytest.raises(UserError, match="ascend-310p") as caught:
        targets.get("ascend-999")
    assert caught.value.code == "unknown-target"


SIZES = {"B": 1, "T": None, "H": 4, "D": 8, "K": 8, "V": 16}


@pytest.mark.parametrize(
    ("source", "target", "expected"),
    [
        ("THD", "THD", []),
        ("BTHD", "THD", [Move("Reshape", (-1, 4, 8))]),
        ("BT(HD)", "THD", [Move("Reshape", (-1, 4, 8))]),
        ("(BT)HD", "THD", []),
        ("BHTD", "THD", [Move("Transpose", (0, 2, 1, 3)), Move("Reshape", (-1, 4, 8))]),
        ("(BH)TD", "THD", [Move("Transpose", (1, 0, 2))]),
        ("B(HD)T", "THD", [Move("Reshape", (4, 8, -1)), Move("Transpose", (2, 0, 1))]),
        ("BTH", "TH", [Move("Reshape", (-1, 4))]),
        ("BTH1", "TH", [Move("Reshape", (-1, 4))]),
        ("BHKV", "BHVK", [Move("Transpose", (0, 1, 3, 2))]),
        ("BHVK", "BHVK", []),
        ("(BH)VK", "BHVK", [Move("Reshape", (1, 4, 16, 8))]),
        ("(BH)KV", "BHVK", [Move("Transpose", (0, 2, 1)), Move("Reshape", (1, 4, 16, 8))]),
        ("THD", "BTHD", [Move("Reshape", (1, -1, 4, 8))]),
        ("THD", "BT(HD)", [Move("Reshape", (1, -1, 32))]),
        ("THD", "BHTD", [Move("Transpose", (1, 0, 2)), Move("Reshape", (1, 4, -1, 8))]),
        ("THD", "(BTH)D", [Move("Reshape", (-1, 8))]),
        ("(BT)(HD)", "THD", [Move("Reshape", (-1, 4, 8))]),
    ],
)
def test_moves_are_as_few_as_can_be(source, target, expected):
    assert moves(source, target, SIZES) == tuple(expected)


@pytest.mark.parametrize(
    ("source", "target", "expected"),
    [
        ("BHTD", "THD", [Move("Reshape", (-1, 4, 8))]),
        ("BHD", "THD", []),
        ("THD", "BHD", []),
        ("BH", "TH", []),
        ("BHT", "TH", [Move("Reshape", (-1, 4))]),
    ],
)
def test_an_axis_of_one_token_moves_no_data(source, target, expected):
    assert moves(source, target, {**SIZES, "T": 1}) == tuple(expected)


LAYOUTS = ["BTHD", "BHTD", "BT(HD)", "(BH)TD", "B(HD)T", "BTDH", "THD", "TBHD", "BH1TD"]


@pytest.mark.parametrize("target", ["THD", *LAYOUTS])
@pytest.mark.parametrize("source", LAYOUTS)
@pytest.mark.parametrize("tokens", [1, 3])
def test_moves_give_the_target_array(source, target, tokens):
    plain = np.arange(tokens * 32).reshape(1, tokens, 4, 8)
    array = arrange(plain, "BTHD", source)
    for move in moves(source, target, {**SIZES, "T": tokens}):
        array = array.transpose(move.values) if move.op == "Transpose" else array.reshape(move.values)
    np.testing.assert_array_equal(array, arrange(plain, "BTHD", target))
    assert array.ndim == len(parts(target))
