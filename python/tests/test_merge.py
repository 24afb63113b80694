import json

import numpy as np
import pytest

import refit


class Part:
    """A tensor as far as a description looks at it."""

    def __init__(self, *shape, dtype="float32"):
        self.shape, self.dtype = shape, dtype


def described(side, mesh, placements, shapes_by_rank, names=None):
    return [refit.describe_state_dict({name: Part(*shape) for name, shape in shapes.items()}, side, rank=rank,
                                      mesh=mesh, placements=placements, names=names)
            for rank, shapes in enumerate(shapes_by_rank)]


def source():
    return described("source", {"dp": 2}, {"*.weight": "Shard(0)"}, [
        {"layers.0.weight": (3, 4), "layers.1.weight": (3, 4), "scale": (2,)},
        {"layers.0.weight": (2, 4), "layers.1.weight": (2, 4), "scale": (2,)}])


def destination(names=None):
    return described("destination", {"tp": 2}, {"*.weight": "Shard(1)"},
                     [{"layers.0.weight": (5, 2), "layers.1.weight": (5, 2), "scale": (2,)}] * 2, names)


def test_descriptions_become_an_ordinary_generic_job():
    job = refit.merge(json.loads(json.dumps([source(), destination()])))
    assert job["model"]["parameters"][0] == {"name": "layers.0.weight", "shape": [5, 4], "dtype": "fp32"}
    assert job["source"] == {
        "layout": "generic",
        "meshes": {"mesh0": {"axes": {"dp": 2}, "ranks": [0, 1]}, "mesh1": {"axes": {"replicate": 2}, "ranks": [0, 1]}},
        "tensors": [{"match": "scale", "mesh": "mesh1", "placements": ["Replicate"]},
                    {"match": "layers.*.weight", "mesh": "mesh0", "placements": ["Shard(0)"]}]}
    assert "topology" not in job and "options" not in job
    plan = refit.compile(json.dumps(job))
    assert plan.tensors(1)["layers.0.weight"].shape == (2, 4)
    assert plan.verify().destination_elements == 2 * 5 * 4 + 2 * 2


def test_the_merged_job_moves_the_right_values():
    plan = refit.compile(refit.merge(source(), destination()))
    whole = np.arange(20, dtype=np.float32).reshape(5, 4)
    scale = np.array([8, 9], np.float32)
    tensors = [{"layers.0.weight": whole[:3].copy(), "layers.1.weight": -whole[:3], "scale": scale},
               {"layers.0.weight": whole[3:].copy(), "layers.1.weight": -whole[3:], "scale": scale.copy()}]
    tensors += [{"layers.0.weight": np.zeros((5, 2), np.float32), "layers.1.weight": np.zeros((5, 2), np.float32),
                 "scale": np.zeros(2, np.float32)} for _ in range(2)]
    refit.run_local(plan, tensors)
    for rank, columns in ((2, slice(0, 2)), (3, slice(2, 4))):
        np.testing.assert_array_equal(tensors[rank]["layers.0.weight"], whole[:, columns])
        np.testing.assert_array_equal(tensors[rank]["layers.1.weight"], -whole[:, columns])
        np.testing.assert_array_equal(tensors[rank]["scale"], scale)


def test_names_map_tensors_to_parameters():
    prefixed = described("destination", {"tp": 2}, {"*.weight": "Shard(1)"}, [
        {"engine.layers.0.weight": (5, 2), "engine.layers.1.weight": (5, 2), "factor": (2,)}] * 2,
        names=lambda name: {"factor": "scale"}.get(name, name.removeprefix("engine.")))
    job = refit.merge(source(), prefixed)
    assert [rule.get("rename") for rule in job["destination"]["tensors"]] == ["factor", "engine.{name}"]
    assert list(refit.compile(job).tensors(2)) == ["engine.layers.0.weight", "engine.layers.1.weight", "factor"]


def test_numbers_that_lie_differently_get_rules_of_their_own():
    def rank(number, stage):  # a layer for each of two stages
        return refit.describe_state_dict({f"layers.{stage}.weight": Part(4, 4)}, "source", rank=number,
                                         mesh={"one": 1}, ranks=[number], placements={"*": "Replicate"})

    whole = refit.describe_state_dict({f"layers.{i}.weight": Part(4, 4) for i in range(2)}, "destination", rank=0)
    job = refit.merge(rank(0, 0), rank(1, 1), whole)
    assert [rule["match"] for rule in job["source"]["tensors"]] == ["layers.0.weight", "layers.1.weight"]
    plan = refit.compile(job)
    assert list(plan.tensors(0)) == ["layers.0.weight"] and list(plan.tensors(1)) == ["layers.1.weight"]


def test_a_glob_that_would_take_other_parameters_gives_way():
    # "*" also matches dots: "layers.*.weight" would take "layers.0.mlp.weight".
    shapes = {"layers.0.weight": (4,), "layers.1.weight": (4,), "layers.0.mlp.weight": (4,), "layers.1.mlp.weight": (4,)}
    placements = {"*.mlp.weight": "Shard(0)"}
    halves = {name: (2,) if "mlp" in name else shape for name, shape in shapes.items()}
    sources = described("source", {"dp": 2}, placements, [halves, halves])
    whole = described("destination", {"tp": 1}, {}, [shapes])
    plan = refit.compile(refit.merge(sources, whole))
    assert {name: info.shape for name, info in plan.tensors(1).items()} == halves


def engines(count):
    return [refit.describe_state_dict({"a": Part(2)}, "destination", rank=rank, mesh={"tp": 2},
                                      ranks=[rank // 2 * 2, rank // 2 * 2 + 1], placements={"a": "Shard(0)"})
            for rank in range(2 * count)]


def whole_source():
    return refit.describe_state_dict({"a": Part(4)}, "source", rank=0)


def test_engines_with_meshes_of_their_own_are_replicas_if_one_says_so():
    job = refit.merge(whole_source(), engines(2), replicas={"destination": 2})
    assert job["destination"]["meshes"]["mesh0"] == {"axes": {"replica": 2, "tp": 2}, "ranks": [0, 1, 2, 3]}
    assert refit.compile(job).stats.moved_bytes == 2 * 4 * 4


# Two groups that number their experts alike look just like two engines.
def test_meshes_that_nobody_calls_replicas_are_refused():
    with pytest.raises(refit.MergeError, match=r"""destination: "a" is on 2 meshes {'tp': 2}, of ranks \[0, 1\] and """
                                               r"""\[2, 3\]; if they are copies, pass replicas={"destination": 2}, if """
                                               "they are parts, give them names of their own or one mesh"):
        refit.merge(whole_source(), engines(2))


def test_another_number_of_replicas_than_was_said_is_refused():
    with pytest.raises(refit.MergeError, match=r"""on 3 meshes .* and others; wanted 2, as replicas\["destination"\] says"""):
        refit.merge(whole_source(), engines(3), replicas={"destination": 2})


@pytest.mark.parametrize("replicas", [{"destinations": 2}, {"source": 0}, {"source": "two"}, {"source": True}])
def test_replicas_of_no_side_are_refused(replicas):
    with pytest.raises(refit.MergeError, match="replicas has .*; wanted a number from 1 on for source and destination"):
        refit.merge(whole_source(), engines(1), replicas=replicas)


def test_hosts_come_from_the_descriptions():
    here, there = source(), destination()
    for description in there:
        description["host"] = "another"
    assert refit.merge(here, there)["topology"] == {"hosts": [0, 0, 1, 1]}


@pytest.mark.parametrize("spoil, message", [
    (lambda s, d: s.pop(0), r"source ranks \[0\] are missing"),
    (lambda s, d: s.append(s[0]), r"source ranks \[0\] are described twice"),
    (lambda s, d: d.clear(), "no description of the destination"),
    (lambda s, d: s[1]["tensors"][0].update(dtype="bf16"),
     '"layers.0.weight" has dtype fp32 on rank 0, bf16 on rank 1'),
    (lambda s, d: s[0]["tensors"][0].update(shape=[6, 4]) or s[1]["tensors"][0].update(shape=[6, 4]),
     r'"layers.0.weight" is \[2, 4\] on rank 1; wanted \[3, 4\], the part of \[6, 4\] by Shard\(0\) on mesh'),
    (lambda s, d: [t["tensors"].pop() for t in d], '"scale" is on the source only; name it in `exclude`'),
    (lambda s, d: [t["tensors"][2].update(shape=[3], local_shape=[3]) for t in d],
     r'"scale" is \[2\] on the source, \[3\] on the destination'),
    (lambda s, d: d[1]["tensors"].pop(0), "rank 1 does not fit"),
])
def test_what_does_not_fit_is_named(spoil, message):
    sources, destinations = source(), destination()
    spoil(sources, destinations)
    with pytest.raises(refit.MergeError, match=message):
        refit.merge(sources, destinations)


def test_an_excluded_parameter_is_left_alone():
    destinations = destination()
    for description in destinations:
        description["tensors"].pop()
    plan = refit.compile(refit.merge(source(), destinations, exclude=["scale"]))
    assert "scale" not in plan.tensors(2)
    assert plan.stats.moved_bytes == 4 * 2 * 5 * 4


def in_bf16(descriptions):
    for description in descriptions:
        for tensor in description["tensors"]:
            tensor["dtype"] = "bf16"
    return descriptions


def test_a_cast_that_nobody_declared_is_an_error():
    with pytest.raises(refit.MergeError) as raised:
        refit.merge(source(), in_bf16(destination()))
    assert str(raised.value) == (
        'descriptions do not fit:\n  "layers.0.weight" and 2 others are fp32 on the source, bf16 on the destination; if '
        'the refit is to cast, pass casts="*" or globs of the parameters to cast')
    with pytest.raises(refit.MergeError, match='\n  "scale" is fp32 on the source, bf16 on the destination'):
        refit.merge(source(), in_bf16(destination()), casts="layers.*")


@pytest.mark.parametrize("casts", ["*", ["layers.*", "scale"]])
def test_a_declared_cast_is_part_of_the_job(casts):
    job = refit.merge(source(), in_bf16(destination()), casts=casts)
    assert {rule["dtype"] for rule in job["destination"]["tensors"]} == {"bf16"}
    plan = refit.compile(job)
    assert {info.dtype for info in plan.tensors(0).values()} == {"fp32"}
    assert {info.dtype for info in plan.tensors(2).values()} == {"bf16"}


def test_an_excluded_parameter_may_have_another_dtype():
    destinations = destination()
    for description in destinations:
        description["tensors"][2]["dtype"] = "bf16"
    assert refit.compile(refit.merge(source(), destinations, exclude="scale")).skipped(2) == {"scale"}


def test_one_glob_need_not_be_a_list():
    destinations = destination()
    for description in destinations:
        description["tensors"].pop()
    job = refit.merge(source(), destinations, exclude="scale")
    assert job["options"] == {"exclude": ["scale"]}
    with pytest.raises(refit.MergeError, match="exclude has 3; wanted a glob or a list of globs"):
        refit.merge(source(), destinations, exclude=[3])


@pytest.mark.parametrize("stranger", ["x", b"x", None, 3])
def test_what_is_no_description_is_refused(stranger):
    with pytest.raises(refit.MergeError, match="not a description: .*; wanted what describe returns"):
        refit.merge([stranger, *source()], destination())


def test_a_placement_that_does_not_exist_is_named():
    with pytest.raises(refit.InvalidArgument, match=r'"\*": unknown placement "Partial"'):
        refit.describe_state_dict({}, "source", rank=0, mesh={"dp": 1}, placements={"*": "Partial"})
