import collections
import json
import os
import pathlib
import pickle
import signal
import stat
import threading
import types
import warnings

import pytest

import refit

EXAMPLES = pathlib.Path(__file__).resolve().parents[2] / "examples"
GOLDENS = EXAMPLES.parent / "tests" / "golden" / "jobs"


def test_a_plan_says_what_its_job_said(tiny_job):
    job = {**tiny_job, "options": {"bucket_bytes": 65536, "exclude": ["none.*"]}}
    plan = refit.Plan.from_bytes(refit.compile(job).to_bytes())
    said = {key: value for key, value in plan.job.items() if not key.endswith((".meshes", ".tensors"))}
    assert said == {"source.layout": "generic", "destination.layout": "generic", "options.bucket_bytes": "65536",
                    "options.exclude": "[none.*]", "model": "3 params"}
    assert plan.job["source.meshes"] == "{m: {axes: {dp: 2}}}"
    # The digests are of what is executed. A long value is cut, and told from another by its digest.
    others = [refit.compile({**job, "options": {**job["options"], "exclude": ["none.*" * count]}}) for count in (50, 51)]
    assert all(other.digest == plan.digest for other in others)
    texts = [other.job["options.exclude"] for other in others]
    assert texts[0] != texts[1] and texts[0][:200] == texts[1][:200] and max(map(len, texts)) < 250


def test_a_config_in_the_place_of_a_job_is_told_in_one_sentence():
    config = json.loads((EXAMPLES / "models" / "qwen3-0.6b.json").read_text())
    of_transformers = types.SimpleNamespace(to_dict=lambda: config)
    for given in (config, of_transformers):
        with pytest.raises(refit.InvalidArgument, match='^the job is the config of a model, qwen3; wanted {"model": that, "source": '):
            refit.compile(given)
        (reason,) = refit.supports(given)
        assert reason.startswith("the job is the config of a model"), reason


def test_a_job_compiles_to_the_same_plan_from_file_dict_and_text(tiny_job, job_file):
    of_file = refit.compile(job_file)
    of_path_text = refit.compile(str(job_file))
    of_dict = refit.compile(tiny_job)
    of_text = refit.compile("// a comment\n" + job_file.read_text())
    assert {of_path_text.digest, of_dict.digest, of_text.digest} == {of_file.digest}
    assert of_dict.inputs_digest == of_file.inputs_digest


def test_a_model_may_be_the_dict_of_a_config(models):
    config = json.loads((models / "qwen3-0.6b.json").read_text())
    job = {"source": {"layout": "megatron", "tensor_parallel": 2}, "destination": {"layout": "vllm"}}
    of_dict = refit.compile({**job, "model": config})
    of_path = refit.compile({**job, "model": models / "qwen3-0.6b.json"})
    assert of_dict == of_path
    assert of_dict.inputs_digest == of_path.inputs_digest


def test_paths_of_a_dict_are_relative_to_the_given_directory(models):
    job = {"model": "qwen3-0.6b.json", "source": {"layout": "megatron"}, "destination": {"layout": "vllm"}}
    assert refit.compile(job, directory=models).stats.params == 310
    with pytest.raises(refit.JobError, match="qwen3-0.6b.json"):
        refit.compile(job, directory=models.parent)


def test_a_job_may_be_made_of_any_mappings(tiny_job):
    def as_proxies(value):
        if isinstance(value, dict):
            return types.MappingProxyType({key: as_proxies(inner) for key, inner in value.items()})
        return [as_proxies(inner) for inner in value] if isinstance(value, list) else value

    assert refit.compile(as_proxies(tiny_job)) == refit.compile(tiny_job)


def test_a_config_may_be_any_mapping(models):
    config = json.loads((models / "qwen3-0.6b.json").read_text())
    sides = {"source": {"layout": "megatron"}, "destination": {"layout": "vllm"}}
    wanted = refit.compile({"model": config, **sides})
    assert refit.compile({"model": collections.UserDict(config), **sides}) == wanted


def test_mistakes_of_a_job_are_raised_with_their_places(tiny_job):
    text = json.dumps({**tiny_job, "model": {"parameters": tiny_job["model"]}}, indent=1)
    with pytest.raises(refit.JobError) as raised:
        refit.compile(text.replace('"placements"', '"placement"', 1))
    assert raised.value.code == "INVALID_ARGUMENT"
    line = 1 + next(i for i, line in enumerate(text.splitlines()) if '"placements"' in line)
    assert ("<job>", line) in [(place.file, place.line) for place in raised.value.places]
    assert 'unknown key "placement" in source.tensors[0]; did you mean "placements"?' in str(raised.value)


def test_doubts_about_a_job_are_python_warnings(models):
    job = {"model": models / "qwen3-0.6b.json", "source": {"layout": "megatron", "data_parallel": 8},
           "destination": {"layout": "vllm"}}
    with pytest.warns(refit.JobWarning, match=r'"gpus_per_host": 8') as heard:
        plan = refit.compile(job)
    assert len(heard) == 1 and heard[0].filename == __file__
    assert str(heard[0].message).startswith("<job>:1:1: warning: topology.gpus_per_host is not given")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plan.verify(job)  # compiles it again, and has no doubts of its own
        refit.compile({**job, "topology": {"gpus_per_host": 8}})
        with pytest.raises(refit.JobWarning):
            refit.compile(job)


def test_a_missing_job_file_is_not_found(tmp_path):
    with pytest.raises(refit.NotFound, match="missing.json"):
        refit.compile(tmp_path / "missing.json")


@pytest.mark.parametrize("use", [refit.compile, refit.Plan.load])
def test_a_missing_file_is_an_error_of_the_standard_kind_too(tmp_path, use):
    path = str(tmp_path / "missing")
    with pytest.raises(FileNotFoundError) as raised:
        use(path)
    assert isinstance(raised.value, (refit.FileNotFound, refit.NotFound, OSError))
    assert str(raised.value) == f"{path}: No such file or directory"
    assert (raised.value.filename, raised.value.code) == (path, "NOT_FOUND")
    copy = pickle.loads(pickle.dumps(raised.value))
    assert (type(copy), str(copy), copy.filename) == (refit.FileNotFound, str(raised.value), path)


@pytest.mark.parametrize("use", [refit.compile, refit.Plan.load])
def test_a_directory_is_no_job_and_no_plan(tmp_path, use):
    with pytest.raises(refit.FileError, match=f"{tmp_path}: Is a directory"):
        use(tmp_path)


def test_a_plan_that_cannot_be_read_is_named(tiny_job, tmp_path):
    path = tmp_path / "job.json"
    path.write_text("{}")
    with pytest.raises(ValueError, match=f"^{path}: not a plan"):
        refit.Plan.load(path)


def test_a_plan_is_saved_and_loaded_whole(tiny_job, tmp_path):
    plan = refit.compile(tiny_job)
    plan.save(tmp_path / "plan.refit")
    loaded = refit.Plan.load(tmp_path / "plan.refit")
    assert loaded == plan and loaded.to_bytes() == plan.to_bytes()
    assert pickle.loads(pickle.dumps(plan)) == plan
    assert [file.name for file in tmp_path.iterdir()] == ["plan.refit"]


def test_save_replaces_what_a_link_names_and_keeps_its_mode(tiny_job, tmp_path):
    plan = refit.compile(tiny_job)
    target, link, dangling = tmp_path / "target", tmp_path / "link", tmp_path / "dangling"
    target.write_text("older")
    target.chmod(0o660)
    link.symlink_to("target")
    dangling.symlink_to("made")
    plan.save(link)
    plan.save(dangling)
    assert link.is_symlink() and dangling.is_symlink()
    assert target.read_bytes() == (tmp_path / "made").read_bytes() == plan.to_bytes()
    assert stat.S_IMODE(target.stat().st_mode) == 0o660
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dangling", "link", "made", "target"]


def test_save_writes_to_a_pipe(tiny_job, tmp_path):
    plan = refit.compile(tiny_job)
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    read = []
    reader = threading.Thread(target=lambda: read.append(pipe.read_bytes()))
    reader.start()
    plan.save(pipe)
    reader.join()
    assert read == [plan.to_bytes()] and stat.S_ISFIFO(pipe.stat().st_mode)


def test_what_a_signal_raises_ends_a_save_as_it_is(tiny_job, tmp_path):
    plan = refit.compile(tiny_job)
    pipe = tmp_path / "pipe"  # nobody reads
    os.mkfifo(pipe)

    def late(*_):
        raise TimeoutError("too late")

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, 0.2)
    try:
        with pytest.raises(TimeoutError, match="^too late$"):
            plan.save(pipe)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def test_save_writes_to_a_device(tiny_job, tmp_path):
    device = tmp_path / "null"  # of its own: another's must not be at stake
    try:
        os.mknod(device, stat.S_IFCHR | 0o666, os.makedev(1, 3))
        device.open("wb").close()
    except PermissionError:
        pytest.skip("needs the right to make devices")
    refit.compile(tiny_job).save(device)
    assert stat.S_ISCHR(device.stat().st_mode)


def test_save_says_why_it_cannot(tiny_job, tmp_path):
    plan = refit.compile(tiny_job)
    with pytest.raises(FileNotFoundError, match="absent/plan.refit: cannot write: No such file or directory"):
        plan.save(tmp_path / "absent" / "plan.refit")
    with pytest.raises(refit.FileError, match="cannot write: Is a directory"):
        plan.save(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_damaged_plan_is_refused(tiny_job):
    data = bytearray(refit.compile(tiny_job).to_bytes())
    data[len(data) // 2] ^= 1
    with pytest.raises(refit.InvalidArgument, match="digest"):
        refit.Plan.from_bytes(bytes(data))


def test_a_plan_says_what_each_rank_binds(tiny_job):
    plan = refit.compile(tiny_job)
    assert (plan.world_size, plan.source_ranks, plan.destination_ranks) == (4, 2, 2)
    assert plan.tensors(1) == {"layers.0.weight": ("fp32", (4, 6)), "layers.1.weight": ("fp32", (4, 6)),
                               "norm.weight": ("fp32", (6,))}
    assert plan.tensors(3)["layers.1.weight"].shape == (8, 3)
    assert [plan.side(rank) for rank in range(4)] == ["source", "source", "destination", "destination"]
    with pytest.raises(refit.InvalidArgument, match="rank 4 is not one of the plan's 4 ranks"):
        plan.tensors(4)


@pytest.mark.parametrize("name, groups, is_refused", [("deepseek-v3", 8, False), ("deepseek-v3", None, False), ("deepseek-v3", 1, True),
                                                      ("deepseek-v3", 0, True), ("nemotron-3-nano-30b-a3b", 1, True),
                                                      ("nemotron-3-nano-30b-a3b", 2, False)])
def test_experts_stand_in_turn_only_where_routers_choose_groups(models, name, groups, is_refused):
    config = {**json.loads((models / f"{name}.json").read_text()), "n_group": groups}
    job = {"model": config, "source": {"layout": "fsdp"},
           "destination": {"layout": "vllm", "tensor_parallel": 2, "expert_parallel": True, "experts": {"placement": "round_robin"}}}
    if is_refused:
        with pytest.raises(refit.JobError, match=f"experts of {config['model_type']} linearly all the same"):
            refit.compile(job)
    else:
        assert refit.compile(job).requirements(1)["expert_placement"] == "round_robin"


def test_a_plan_says_how_each_ranks_framework_must_be_set(models):
    job = {"model": str(models / "qwen3-30b-a3b.json"),
           "source": {"layout": "megatron", "expert_parallel": 2, "data_parallel": 2},
           "destination": {"layout": "vllm", "tensor_parallel": 2, "expert_parallel": True}}
    plan = refit.compile(job)
    assert plan.requirements(1) == {"moe_mlp_glu_interleave_size": "none"}
    assert plan.requirements(2) == {"expert_placement": "linear", "moe_backend": "triton"}
    job["destination"] = {"layout": "vllm", "moe_backend": "flashinfer_cutlass"}
    assert refit.compile(job).requirements(2) == {"moe_backend": "flashinfer_cutlass"}
    job["model"] = str(models / "qwen3-0.6b.json")
    job["source"] = {"layout": "megatron"}
    job["destination"] = {"layout": "vllm"}
    assert refit.compile(job).requirements(1) == {}


def test_stats_and_traffic_agree(tiny_job):
    plan = refit.compile(tiny_job)
    # Both layers whole, and the norm once for each destination rank, 4 bytes an element.
    assert plan.stats.moved_bytes == 4 * (2 * 8 * 6 + 2 * 6)
    assert sum(plan.traffic().values()) == plan.stats.moved_bytes
    # Each source rank has half of the rows of each half of the columns.
    assert all(plan.traffic()[source, destination] >= 2 * 4 * (4 * 3) for source in (0, 1) for destination in (2, 3))
    assert str(plan.stats).startswith("ranks")


@pytest.mark.parametrize("job", [EXAMPLES / "jobs" / "qwen3-4b-dp8-to-dp8.json",  # deals
                                 *(job for job in sorted(GOLDENS.glob("*.json")) if ".config" not in job.name)],
                         ids=lambda job: job.stem)
def test_traffic_adds_up_to_what_is_moved_with_and_without_dealing(job):
    plan = refit.compile(job)
    traffic = plan.traffic()
    assert sum(traffic.values()) == plan.stats.moved_bytes == plan.verify().moved_bytes
    assert all(traffic.values())


def test_a_difference_has_the_bytes_of_each_pair_that_deals():
    dealing = (GOLDENS / "tiny-dealt-relays.json").read_text()
    direct = dealing.replace('[0, 0, 0, 0, 1, 1, 1, 1]}', '[0, 0, 0, 0, 1, 1, 1, 1]}, "options": {"delta": true}')
    assert direct != dealing
    before, after = refit.compile(direct), refit.compile(dealing)
    told = {}
    for difference in before.diff(after).differences:
        if difference["rule"] == "BYTES_CHANGED":
            sizes = difference["text"].rpartition(": ")[2].removesuffix(" bytes").split(" -> ")
            told.update({tuple(pair): tuple(map(int, sizes)) for pair in difference["pairs"]})
    assert sum(to - of for of, to in told.values()) == after.stats.moved_bytes - before.stats.moved_bytes
    sizes = {pair: (before.traffic().get(pair, 0), after.traffic().get(pair, 0))
             for pair in {*before.traffic(), *after.traffic()}}
    assert told == {pair: (a, b) for pair, (a, b) in sizes.items() if a != b}


def test_verify_proves_and_tells_another_job(tiny_job):
    plan = refit.compile(tiny_job)
    assert plan.verify(job=tiny_job).destination_elements == 2 * 8 * 6 + 2 * 6
    tiny_job["options"] = {"bucket_bytes": 4096}
    with pytest.raises(refit.ProofError, match="not the plan of this job; job -> plan: LIMITS_CHANGED bucket_bytes"):
        plan.verify(job=tiny_job)


def test_verify_tells_models_of_equal_shapes_apart(models):
    config = json.loads((models / "qwen3-next-80b-a3b.json").read_text())
    config.update(num_hidden_layers=4, num_experts=2)
    assert (config["linear_num_key_heads"], config["linear_key_head_dim"]) == (16, 128)
    job = {"model": config, "source": {"layout": "megatron", "tensor_parallel": 2}, "destination": {"layout": "vllm"}}
    other = {**job, "model": {**config, "linear_num_key_heads": 32, "linear_key_head_dim": 64}}
    plan = refit.compile(job)
    assert plan.inputs_digest != refit.compile(other).inputs_digest
    plan.verify(job=job)
    with pytest.raises(refit.ProofError, match=r"not the plan of this job; job -> plan: LAYOUT_CHANGED"):
        plan.verify(job=other)


def test_verify_takes_a_job_that_writes_a_default_out(tiny_job):
    plan = refit.compile(tiny_job)
    plan.verify(job={**tiny_job, "options": {"peer": "direct", "staging_bytes": 1 << 30}})
    # Another link speed changes what is expected of the plan, and nothing that it does.
    plan.verify(job={**tiny_job, "topology": {"peer_gigabytes_per_second": 300}})


def test_diff_tells_contract_from_schedule(tiny_job):
    plan = refit.compile(tiny_job)
    assert plan.diff(refit.compile(tiny_job)).same
    tiny_job["destination"]["tensors"][0]["placements"] = ["Shard(0)"]
    difference = plan.diff(refit.compile(tiny_job))
    assert not difference.same
    assert {entry["class"] for entry in difference.differences} >= {"contract"}
    assert "wrong" not in str(difference) and difference.summary in str(difference)


def test_progress_moves_a_bar_to_its_end(tiny_job):
    bars = []

    class Bar:  # as tqdm.tqdm
        def __init__(self, total, desc):
            self.total, self.desc, self.n, self.closed = total, desc, 0, False
            bars.append(self)

        def update(self, n):
            self.n += n

        def close(self):
            self.closed = True

    plan = refit.compile(tiny_job, progress=Bar)
    plan.verify(progress=Bar)
    assert [(bar.desc, bar.n == bar.total > 2, bar.closed) for bar in bars] == [
        ("compile", True, True), ("verify", True, True)]


def test_what_a_progress_bar_raises_ends_the_compilation(tiny_job):
    class Bar:
        def __init__(self, total, desc):
            pass

        def update(self, n):
            raise KeyboardInterrupt

        def close(self):
            pass

    with pytest.raises(KeyboardInterrupt):
        refit.compile(tiny_job, progress=Bar)


def test_a_plan_shows_itself_in_a_line_and_in_a_notebook(tiny_job):
    plan = refit.compile(tiny_job)
    assert repr(plan) == f"<refit.Plan {plan.digest[:8]}: 2 -> 2 ranks, 3 params, 432 bytes moved>"
    assert plan._repr_html_().startswith("<table>") and plan.digest in plan._repr_html_()


def test_plot_draws_the_traffic_matrix(tiny_job):
    pytest.importorskip("matplotlib")
    plan = refit.compile(tiny_job)
    matrix = plan.plot().axes[0].images[0].get_array()
    assert matrix.shape == (2, 2)
    assert matrix.sum() * 2**20 == pytest.approx(plan.stats.moved_bytes)


@pytest.mark.parametrize("ranks", [1, 8, 256])
def test_no_label_of_a_plot_lies_over_another(ranks):
    pytest.importorskip("matplotlib")
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    side = {"layout": "generic", "meshes": {"m": {"axes": {"ranks": ranks}}}}
    plan = refit.compile({
        "model": [{"name": "weight", "shape": [512, 512], "dtype": "fp32"}],
        "source": {**side, "tensors": [{"match": "*", "mesh": "m", "placements": ["Shard(0)"]}]},
        "destination": {**side, "tensors": [{"match": "*", "mesh": "m", "placements": ["Shard(1)"]}]},
        "topology": {"gpus_per_host": 8}})
    drawn = plan.plot()
    canvas = FigureCanvasAgg(drawn)
    canvas.draw()
    matrix, bars = drawn.axes[:2]
    assert matrix.images[0].get_array().shape == (ranks, ranks)
    for axes in (matrix, bars):
        for axis in (axes.xaxis, axes.yaxis):
            labels = [label for label in axis.get_ticklabels() if label.get_text()]
            assert len(labels) >= min(ranks, 3)
            boxes = [label.get_window_extent(canvas.get_renderer()).padded(2) for label in labels]
            assert not [(i, j) for i in range(len(boxes)) for j in range(i) if boxes[i].overlaps(boxes[j])]
        for bar in axes.patches:  # the legend is above them
            if axes.get_legend() is not None:
                assert not axes.get_legend().get_window_extent().overlaps(bar.get_window_extent())


def test_text_of_a_tensor_that_is_not_there(tiny_job):
    plan = refit.compile(tiny_job)
    for shown in (plan.text, plan.json):
        with pytest.raises(refit.NotFound, match='tensor "zzz": no param, buffer or skip of this plan has such a name'):
            shown(0, "zzz")


def test_a_tensor_with_excluded_elements_is_left_alone(models):
    def of(config, *excluded, **destination):
        plan = refit.compile({"model": config, "source": {"layout": "fsdp"}, "destination": {"layout": "vllm", **destination},
                              "options": {"exclude": list(excluded)}})
        return plan.left_alone(1), plan.skipped(1)

    dense = {**json.loads((models / "qwen3-0.6b.json").read_text()), "num_hidden_layers": 2}
    fused = {f"model.layers.{layer}.self_attn.qkv_proj.weight" for layer in range(2)}
    assert of(dense) == (set(), set())
    assert of(dense, "*.k_proj.weight") == (fused, set())
    assert of(dense, "model.layers.1.self_attn.?_proj.weight", "model.norm.weight")[0] == {
        "model.layers.1.self_attn.qkv_proj.weight", "model.layers.1.self_attn.o_proj.weight", "model.norm.weight"}
    # What the worker derives is no refit's to write.
    latent = {**json.loads((models / "deepseek-v3.json").read_text()), "num_hidden_layers": 1, "first_k_dense_replace": 1}
    left_alone, skipped = of(latent)
    assert not left_alone and any(name.endswith(".W_UV") for name in skipped)
