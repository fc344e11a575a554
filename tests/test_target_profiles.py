"""Profiles as data: what every target must say of itself, options that choose within one, targets of a user's own."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from deltafuse import targets
from deltafuse.dims import symbol
from deltafuse.errors import UserError
from deltafuse.lint import lint
from deltafuse.lowering import fused_type
from deltafuse.match import Plan
from deltafuse.reasons import TEXTS, Reason
from deltafuse.rollback import rollback
from deltafuse.targets import Case, Limit, Profile, TargetOptions
from deltafuse.targets.runtime import runtime_notes
from deltafuse.verify import verify
from deltafuse.wire import scan
from exports import export
from hand_match import BF16, FLOAT, HALF, Site, match

TESTS = "\n".join(path.read_text() for path in sorted(Path(__file__).parent.glob("test_*.py")))
PROFILES = [targets.get(name) for name in targets.names()]
DECODE = {"tokens": 1, "qkv_layout": "BTHD"}

OWN = """
from dataclasses import replace
from deltafuse.targets.ascend_310p import PROFILE as BASE
PROFILE = replace(BASE, name="mine", title="a target of my own", requires=())
"""


def refusal(profile: Profile, site: Site, **options) -> Reason:
    result = profile.plan(match(site), TargetOptions(**options))
    assert isinstance(result, Reason)
    assert profile.choose(match(site), TargetOptions(**options)) == result
    return result


@pytest.mark.parametrize("profile", PROFILES, ids=lambda profile: profile.name)
def test_every_limit_has_a_code_with_a_text_a_mark_and_a_test(profile):
    assert profile.limits
    for limit in profile.limits:
        assert limit.code in TEXTS
        assert limit.mark in ("V", "S", "A")
        assert limit.fact
        # asserted as a value of its own somewhere
        assert f'"{limit.code}"' in TESTS


#: A case that every operator takes, whose sizes are those of the source's.
WITHIN = Case(
    batch=1, tokens=1, tokens_text="1", key_heads=16, value_heads=16, key_dim=16, value_dim=16,
    dtypes={"query": FLOAT}, boundary=BF16, options=TargetOptions(opset=27),
)  # fmt: skip
#: target, signature ("" for all of them) and code of a limit -> the last case within it and the first beyond.
HEADS, RATIO = {"key_heads": 4, "value_heads": 8}, {"key_heads": 4, "value_heads": 6}
NARROW = {"dtypes": {"value": BF16}, "boundary": HALF}
ALLOWED = {**NARROW, "options": TargetOptions(allow_bf16_to_fp16=True)}
EDGES: dict[tuple[str, str, str], tuple[dict, dict]] = {
    ("ascend-310p", "", "head-ratio"): (HEADS, RATIO),
    ("ascend-310p", "", "head-size"): ({"key_dim": 128, "value_dim": 999}, {"key_dim": 129}),
    ("ascend-310p", "", "static-batch"): ({"batch": symbol("n")}, {"batch": 2}),
    ("ascend-310p", "", "bf16-boundary"): (ALLOWED, NARROW),
    ("ascend-310p", "10-input", "rgdr-tokens"): ({"tokens": 8}, {"tokens": 9}),
    ("ascend-310p", "10-input", "rgdr-head-size"): ({"key_dim": 32, "value_dim": 48}, {"value_dim": 24}),
    ("ascend-310p", "10-input", "rgdr-batch-heads"): (
        {"options": TargetOptions(batch=2)}, {"options": TargetOptions(batch=2), "value_heads": 8}
    ),
    ("ascend-310p", "7-input", "per-channel-decay"): ({}, {"per_channel": True}),
    ("ascend-310p", "8-input", "per-channel-decay"): ({}, {"per_channel": True}),
    ("ascend-310p", "8-input", "decay-required"): ({}, {"decays": False}),
    ("ascend-a2", "", "per-channel-decay"): ({}, {"per_channel": True}),
    ("ascend-a2", "", "head-ratio"): (HEADS, RATIO),
    ("ascend-a2", "", "static-batch"): ({"batch": symbol("n")}, {"batch": 2}),
    ("ascend-a2", "", "bf16-boundary"): (ALLOWED, NARROW),
    ("ascend-a2", "10-input", "rgdr-boundary"): ({}, {"boundary": HALF}),
    ("ascend-a2", "10-input", "rgdr-tokens"): ({"tokens": 8}, {"tokens": None}),
    ("ascend-a2", "10-input", "head-size"): ({"key_dim": 512}, {"key_dim": 513}),
    ("ascend-a2", "10-input", "value-head-size"): ({"value_dim": 512}, {"value_dim": 513}),
    ("ascend-a2", "10-input", "head-count"): ({"value_heads": 256}, {"value_heads": 272}),
    ("ascend-a2", "7-input", "head-size"): ({"key_dim": 128}, {"key_dim": 129}),
    ("ascend-a2", "7-input", "value-head-size"): ({"value_dim": 128}, {"value_dim": 129}),
    ("ascend-a2", "7-input", "head-count"): ({"value_heads": 64}, {"value_heads": 80}),
    ("onnx", "", "head-ratio"): (HEADS, RATIO),
    ("onnx", "", "opset-below"): ({"options": TargetOptions(opset=13)}, {"options": TargetOptions(opset=12)}),
    ("ort", "", "head-ratio"): (HEADS, RATIO),
}  # fmt: skip


def limits_of(profile: Profile) -> dict[tuple[str, str, str], Limit]:
    own = [(operator.signature, limit) for operator in profile.operators for limit in operator.limits]
    return {(profile.name, of, one.code): one for of, one in [*(("", limit) for limit in profile.shared), *own]}


def test_every_limit_holds_where_it_says_and_not_before():
    known = {key: limit for profile in PROFILES for key, limit in limits_of(profile).items()}
    assert known.keys() == EDGES.keys()
    for key, limit in known.items():
        within, beyond = EDGES[key]
        assert limit.check(replace(WITHIN, **within)) is None, key
        reason = limit.check(replace(WITHIN, **beyond))
        assert isinstance(reason, Reason), key
        assert reason.code == key[2]
        assert reason.what
        assert reason.fix


@pytest.mark.parametrize("profile", PROFILES, ids=lambda profile: profile.name)
def test_every_operator_is_whole(profile):
    assert profile.title
    assert profile.requires
    for operator in profile.operators:
        names = [port.name for port in operator.inputs]
        assert len(set(names)) == len(names)
        assert {"query", "key", "value", "beta", "g", "state"} <= {port.role for port in operator.inputs}
        assert [port.role for port in operator.outputs] == ["out", "final_state"]
        assert len({rule.name for rule in operator.attributes}) == len(operator.attributes)


def test_targets_are_listed_with_their_limits(fuse):
    outcome = fuse("targets")
    assert outcome.exit == 0
    for profile in PROFILES:
        assert f"{profile.name}: {profile.title}" in outcome.out
        for limit in profile.limits:
            assert f"{limit.mark}  {limit.code}" in outcome.out
        for needed in profile.requires:
            assert f"needs {needed.package} {needed.version}" in outcome.out
    document = {entry["name"]: entry for entry in fuse("targets", "--json").document["targets"]}
    assert document["ort"]["opset"] == {"domain": "com.microsoft", "version": 1}
    assert document["onnx"]["opset"] == {"domain": "", "version": 27}
    assert document["ascend-310p"]["signatures"] == ["10-input", "7-input", "8-input"]
    assert [port["name"] for port in document["ort"]["operators"][0]["inputs"]][3:] == ["past_state", "decay", "beta"]


def test_a_target_of_the_users_own(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(OWN)
    profile = targets.get(str(path))
    assert profile.name == "mine"
    assert profile.choose(match(Site()), TargetOptions()) == "ChunkGatedDeltaRule"


@pytest.mark.parametrize(
    ("text", "says"),
    [(None, "no target file"), ("PROFILE = 3", "no PROFILE"), ("import nothing_like_this", "cannot be imported")],
)
def test_a_target_file_that_cannot_be_used(text, says, tmp_path, fuse):
    path = tmp_path / "mine.py"
    if text is not None:
        path.write_text(text)
    outcome = fuse(tmp_path / "model.onnx", "-o", tmp_path / "out.onnx", "--target", path, "--json")
    assert (outcome.exit, outcome.document["error"]["code"]) == (1, "target-file")
    assert says in outcome.document["error"]["text"]


@pytest.mark.parametrize(
    ("name", "options", "says"),
    [
        ("ascend-310p", {"boundary": "bf16"}, "give --boundary fp16"),
        ("ascend-310p", {"signature": "9-input"}, "give one of: 10-input, 7-input, 8-input"),
        ("ort", {"op": "cgdr"}, "leave --op out"),
        ("onnx", {"op": "rgdr"}, "leave --op out"),
    ],
)
def test_options_that_a_target_does_not_have(name, options, says):
    with pytest.raises(UserError, match=says) as caught:
        targets.get(name).plan(match(Site()), TargetOptions(**options))
    assert caught.value.code == "option"


#: target -> what it takes of each option that leaves a choice.
TAKEN = {
    "ascend-310p": {"boundary": ["fp16"], "signature": ["10-input", "7-input", "8-input"], "op": ["cgdr", "rgdr"]},
    "ascend-a2": {"boundary": ["fp16", "bf16"], "signature": ["10-input", "7-input"], "op": ["cgdr", "rgdr"]},
    "onnx": {"boundary": ["fp16", "bf16", "fp32"], "signature": ["27"], "op": []},
    "ort": {"boundary": ["fp16", "bf16", "fp32"], "signature": ["1"], "op": []},
}
CHOICES = {
    "boundary": ["fp16", "bf16", "fp32"], "signature": ["10-input", "7-input", "8-input", "27", "1"],
    "op": ["cgdr", "rgdr"],
}  # fmt: skip


#: Options that do nothing for a target, and what is said of them.
IDLE = [
    ("ort", ("--allow-bf16-to-fp16",), "has no limit that --allow-bf16-to-fp16 lifts; leave it out"),
    ("onnx", ("--allow-bf16-to-fp16",), "has no limit that --allow-bf16-to-fp16 lifts; leave it out"),
    ("ort", ("--batch", 2), "leave --batch out"),
    ("ort", ("--op", "rgdr"), "leave --op out"),
    ("onnx", ("--signature", "8-input"), "give one of: 27"),
    ("ascend-310p", ("--boundary", "bf16"), "give --boundary fp16"),
]


@pytest.mark.parametrize("command", ["inspect", "--dry-run"])
@pytest.mark.parametrize(("name", "options", "says"), IDLE)
def test_an_option_that_the_target_does_not_take_is_told_without_any_site(name, options, says, command, tmp_path, fuse):
    # No site, and a fused convolution alone, which no forced operator is of.
    for source, rules in (("nm_softmax", ()), ("full_decode_ts17", ("--rules", "causal_conv"))):
        outcome = fuse(command, export(source).path, "--target", name, *options, *rules, "--json")
        assert (outcome.exit, outcome.document["error"]["code"]) == (1, "option")
        assert f"target {name} " in outcome.document["error"]["text"]
        assert says in outcome.document["error"]["text"]


@pytest.mark.parametrize("name", targets.names())
def test_an_option_that_the_target_takes_is_taken_without_any_site(name, fuse):
    given = [("--no-pin",), ("--batch", 1), ("--timeout", 60)]
    given += [("--boundary", TAKEN[name]["boundary"][0]), ("--signature", TAKEN[name]["signature"][0])]
    given += [("--batch", 2), ("--op", "cgdr"), ("--allow-bf16-to-fp16",)] * name.startswith("ascend")
    for options in given:
        assert fuse("inspect", export("nm_softmax").path, "--target", name, *options).exit == 3


@pytest.mark.parametrize("name", TAKEN)
def test_each_choice_is_taken_or_refused_with_what_is_taken(name):
    target = targets.get(name)
    for option, values in CHOICES.items():
        for value in values:
            given = TargetOptions(**{option: value})
            if value in TAKEN[name][option]:
                assert isinstance(target.plan(match(Site()), given), Plan | Reason)
                continue
            with pytest.raises(UserError) as caught:
                target.plan(match(Site()), given)
            assert caught.value.code == "option"
            assert ", ".join(TAKEN[name][option]) in str(caught.value)
            assert ("give" if TAKEN[name][option] else f"leave --{option} out") in str(caught.value)


# ascend-a2


A2 = targets.get("ascend-a2")


@pytest.mark.parametrize(
    ("site", "options", "op", "boundary"),
    [
        (Site(), {}, "ChunkGatedDeltaRule", HALF),
        (Site(dtype=BF16, state_dtype=BF16), {}, "ChunkGatedDeltaRule", BF16),
        (Site(dtype=HALF), {"boundary": "bf16"}, "ChunkGatedDeltaRule", BF16),
        (Site(**DECODE), {}, "ChunkGatedDeltaRule", HALF),
        (Site(**DECODE), {"boundary": "bf16"}, "RecurrentGatedDeltaRule", BF16),
        (Site(**DECODE, key_dim=256, value_dim=256), {"boundary": "bf16"}, "RecurrentGatedDeltaRule", BF16),
        (Site(tokens=9), {"boundary": "bf16"}, "ChunkGatedDeltaRule", BF16),
    ],
)
def test_a2_has_one_type_for_all_operands(site, options, op, boundary):
    plan = A2.plan(match(site), TargetOptions(**options))
    assert isinstance(plan, Plan)
    assert plan.op == op
    (node,) = (node for node in plan.nodes if fused_type(node))
    attributes = {attribute.name: attribute for attribute in node.attribute}
    assert attributes["dtype"].i == boundary
    assert {info.type.tensor_type.elem_type for info in plan.value_info} == {boundary}
    types = {name: cast.attribute[0].i for cast in plan.nodes if cast.op_type == "Cast" for name in cast.output}
    ports = dict(zip(["query", "key", "value", "beta"], node.input, strict=False))
    source = BF16 if site.dtype == BF16 else site.dtype
    for value in ports.values():
        assert types.get(value, source) == boundary or source == boundary
    if op == "RecurrentGatedDeltaRule":
        assert list(attributes["output_types"].ints) == [45, 45]


def test_a2_limits():
    assert refusal(A2, Site(key_dim=144)).code == "head-size"
    reason = refusal(A2, Site(value_dim=144))
    assert (reason.code, reason.args) == ("value-head-size", {"value_dim": 144, "limit": 128})
    reason = refusal(A2, Site(key_heads=65, value_heads=65))
    assert (reason.code, reason.args["limit"]) == ("head-count", 64)
    assert refusal(A2, Site(key_heads=3, value_heads=4)).code == "head-ratio"
    assert refusal(A2, Site(batch=2)).code == "static-batch"
    assert refusal(A2, Site(**DECODE), op="rgdr").code == "rgdr-boundary"
    assert refusal(A2, Site(tokens=9), op="rgdr", boundary="bf16").args == {"tokens": 9, "limit": 8}
    reason = refusal(A2, Site(**DECODE, key_dim=528), op="rgdr", boundary="bf16")
    assert (reason.code, reason.args["limit"]) == ("head-size", 512)
    assert refusal(A2, Site(dtype=BF16, state_dtype=BF16), boundary="fp16").code == "bf16-boundary"


# The older signature of ChunkGatedDeltaRule.


def test_the_older_signature_has_eight_inputs_and_a_float16_gate():
    plan = targets.get("ascend-310p").plan(match(Site(g_dtype=FLOAT)), TargetOptions(signature="8-input"))
    assert isinstance(plan, Plan)
    (node,) = (node for node in plan.nodes if fused_type(node))
    attributes = {attribute.name: attribute for attribute in node.attribute}
    names = [name.decode() for name in attributes["input_names"].strings]
    assert names == ["query", "key", "value", "g", "beta", "initial_state", "cu_seqlens", "ssm_state_indices"]
    assert "optional_input_names" not in attributes
    assert list(attributes["input_index"].ints) == list(range(8)) == list(range(len(node.input)))
    assert attributes["chunk_size"].i == 64
    types = {name: cast.attribute[0].i for cast in plan.nodes if cast.op_type == "Cast" for name in cast.output}
    assert types[node.input[3]] == HALF
    assert "g" in plan.notes[0]


def test_decode_keeps_its_operator_beside_an_older_chunk_signature():
    site = Site(**DECODE)
    options = TargetOptions(signature="8-input")
    assert targets.get("ascend-310p").choose(match(site), options) == "RecurrentGatedDeltaRule"


# Whole files.


@pytest.mark.parametrize(
    ("fixture", "options", "op"),
    [
        ("rec_ts17_half", ("--target", "ascend-a2", "--boundary", "bf16"), "RecurrentGatedDeltaRule"),
        ("rec_ts17_half", ("--target", "ascend-a2", "--boundary", "fp16"), "ChunkGatedDeltaRule"),
        ("chunk_dy20_half", ("--target", "ascend-a2", "--boundary", "bf16"), "ChunkGatedDeltaRule"),
        ("chunk_ts14", ("--signature", "8-input"), "ChunkGatedDeltaRule"),
    ],
)
def test_a_file_of_another_boundary_or_signature_is_equal_good_and_comes_back(fixture, options, op, tmp_path, fuse):
    source, fused, back = export(fixture).path, tmp_path / "fused.onnx", tmp_path / "back.onnx"
    outcome = fuse(source, "-o", fused, *options, "--json")
    assert (outcome.exit, [site["op"] for site in outcome.document["sites"]]) == (0, [op])
    verdict = verify(source, fused, level="site")
    assert (verdict.exit, [site.verdict for site in verdict.sites], verdict.notes) == (0, ["equal"], ())
    target = "ascend-a2" if "ascend-a2" in options else "ascend-310p"
    assert lint(fused, target).findings == ()
    assert rollback(fused, back).mode == "bytes"
    assert back.read_bytes() == source.read_bytes()


def test_a_target_file_of_the_users_own_fuses(tmp_path, fuse):
    path = tmp_path / "mine.py"
    path.write_text(OWN)
    outcome = fuse(export("chunk_ts14").path, "-o", tmp_path / "fused.onnx", "--target", path, "--json")
    assert (outcome.exit, outcome.document["target"]) == (0, str(path))


@pytest.mark.parametrize("dtype", ["FLOAT16", "BFLOAT16"])
@pytest.mark.parametrize("name", ["full_decode_ts17", "full_prefill_ts17"])
def test_a_convolution_has_the_types_that_the_target_takes(name, dtype, tmp_path, fuse):
    own, fused = tmp_path / "narrow.py", tmp_path / "fused.onnx"
    own.write_text(
        "from dataclasses import replace\n"
        "from deltafuse.targets.onnxruntime_contrib import PROFILE as BASE\n"
        f"from deltafuse.targets.profile import {dtype}\n"
        f"PROFILE = replace(BASE, name='narrow', boundaries=({dtype},))\n"
    )
    source = export(name).path
    assert fuse(source, "-o", fused, "--target", own).exit == 0
    graph = scan(fused).graph
    assert (graph.op.count("CausalConvWithState"), graph.op.count("LinearAttention")) == (3, 3)
    assert lint(fused, str(own)).findings == ()
    report = verify(source, fused)
    assert report.exit == 0
    assert {site.verdict for site in report.sites} == {"equal"}
    assert report.network is not None


def test_an_onnxruntime_that_is_too_old_is_named(tmp_path, fuse):
    fused = tmp_path / "fused.onnx"
    assert fuse(export("chunk_ts14").path, "-o", fused, "--target", "ort").exit == 0
    graph = scan(fused).graph
    (note,) = runtime_notes(graph, "1.24.2")
    assert "onnxruntime 1.24.2 is installed" in note
    assert "target ort needs 1.25.1" in note
    assert runtime_notes(graph, "1.25.1") == ()
    assert runtime_notes(scan(export("chunk_ts14").path).graph, "1.24.2") == ()
