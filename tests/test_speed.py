"""benchmark/speed.py and plan.py: the workload, FLOPs and bytes against counts by hand, the table. Nothing is timed."""

import csv
import json
import math
import os
import subprocess
import sys

import pytest
import torch
from conftest import ROOT
from torch.profiler import ProfilerActivity, profile
from transformers import AutoModelForCausalLM, GPTNeoXConfig, GPTNeoXForCausalLM

sys.path.insert(0, str(ROOT / "benchmark"))
import bounds  # noqa: E402
import ilql_sampling  # noqa: E402
import plan  # noqa: E402
import save_cost  # noqa: E402
import speed  # noqa: E402
import speed_worker  # noqa: E402

import ilql  # noqa: E402
import ppo  # noqa: E402

# ------------------------------------------------------------------------------------------------------------- workload


def test_drawn_words_have_the_lengths_of_the_real_posts(tmp_path):
    """Without the data: queries of mean 346 and standard deviation 94, summaries of mean 34 and at most 53 with EOS."""
    speed.make_tokenizer(tmp_path)
    tokenizer = speed.AutoTokenizer.from_pretrained(tmp_path)
    posts, comparisons = speed.make_raw(300)
    queries = [len(tokenizer(speed.tldr_dataset.TLDR_TEMPLATE.format(**post)).input_ids) for post in posts]
    summaries = [len(tokenizer(post["summary"]).input_ids) + 1 for post in posts]
    assert abs(sum(queries) / 300 - 346) < 20 and max(queries) <= 530
    assert abs(sum(summaries) / 300 - 34) < 2 and max(summaries) <= 50
    assert all(len(row["summaries"]) == 2 and row["choice"] in (0, 1) for row in comparisons)


def test_picked_rows_stand_for_all_lengths():
    lengths = [(7 * i) % 100 for i in range(100)]  # 0 to 99, shuffled
    picked = [lengths[row] for row in speed.pick_rows(lengths, 10)]
    assert picked == [5, 15, 25, 35, 45, 55, 65, 75, 85, 95]


def test_workload_gives_both_sides_the_same_tokens(tmp_path):
    """Drawn data through tldr_dataset.py; the peer's rows are the dataset's without padding."""
    args = speed.Args(batch_size=4, folder=str(tmp_path / "work"), data=str(tmp_path / "absent"), dataset_rows=4)
    workload = speed.make_workload(args)
    assert workload["source"] == "drawn words"
    rows = {stage: json.loads(open(workload[stage]).read()) for stage in ("ppo", "sft", "reward", "dpo")}
    dataset = speed.tldr_dataset.Dataset.load_from_disk(f"{workload['data']}/sft/train")
    for row, query, joint in zip(rows["ppo"], dataset["query_token"], dataset["query_reference_response_token"]):
        assert joint[: len(row["input_ids"])] == row["input_ids"] == [t for t in query if t != 50_277]
    for pair, dpo in zip(rows["reward"], rows["dpo"]):
        for side in ("chosen_ids", "rejected_ids"):
            assert pair[side] == dpo["prompt_ids"] + dpo[side] and pair[side][-1] == 0


@pytest.mark.parametrize("mean", [20.0, 35.0])
def test_sampled_responses_have_the_mean_length(tmp_path, mean):
    """Random policies whose logit of EOS is set end their samples as planned, cut at 53."""
    speed.make_tokenizer(tmp_path / "tokenizer")
    speed.SHAPES["d16"] = (1, 16, 2)
    paths = speed.make_models("d16", tmp_path, str(tmp_path / "tokenizer"), mean)
    policy = AutoModelForCausalLM.from_pretrained(paths["model"])
    with torch.no_grad():
        logits = policy(torch.randint(2, 50_000, (8, 30))).logits.flatten(0, 1) / speed.TEMPERATURE
    p = logits[:, :50_277].softmax(-1)[:, 0].mean().item()
    assert (1 - (1 - p) ** 53) / p == pytest.approx(mean, rel=0.05)


def test_updates_of_ppo_are_measured_one_by_one(tmp_path, chain, sft_dataset):
    """Our side for real: ppo.py in a process of its own, held before each update."""
    fields = {"sft_model": str(chain.sft), "reward_model": str(chain.reward), "dataset": str(sft_dataset)}
    fields |= {"output_dir": "run", "batch_size": 8, "micro_batch_size": 4, "total_episodes": 24, "response_length": 12}
    fields["sample_every"] = 100  # samples for the table of a run would count as generation
    spec = {"root": str(speed.ROOT), "stage": "ppo", "side": "ours", "device": "cpu", "eos": 0, "args": fields}
    (tmp_path / "spec.json").write_text(json.dumps(spec))
    command = [sys.executable, str(speed.ROOT / "benchmark/speed_worker.py"), "spec.json"]
    environment = os.environ | {"ACCELERATE_USE_CPU": "true"}
    options = {"cwd": tmp_path, "capture_output": True, "text": True, "env": environment, "timeout": 300}
    result = subprocess.run(command, input="matmul\nstep\nstep\nend\n", **options)
    ready, rate, *updates = map(json.loads, result.stdout.splitlines())
    assert ready == {"ready": True} and rate["flops_per_second"] > 0 and len(updates) == 2, result.stderr[-2000:]
    for update in updates:
        phases = update["phases"]
        assert 1 <= update["response_length"] <= 12 and 0 < phases["generation"] < phases["rollout"]
        assert phases["rollout"] + phases["update"] < update["seconds"]


def test_lengths_end_at_the_first_eos():
    responses = torch.tensor([[5, 0, 0, 7], [5, 6, 7, 8], [0, 5, 6, 7]])
    assert speed_worker.lengths_until_eos(responses, 0) == [2, 4, 1]


# ---------------------------------------------------------------------------------------------------------------- FLOPs


def test_flops_by_hand():
    """One layer, D = 2: projections 24 D^2 = 96 a token (QKV 24, output 8, MLP 64); attention 4 D = 8 a pair."""
    speed.SHAPES["hand"] = (1, 2, 1)
    assert speed.body_flops("hand", 3) == 3 * 96 + 8 * 6  # 1 + 2 + 3 pairs
    assert speed.body_flops("hand", 3, start=2) == 96 + 8 * 3  # the last token alone
    assert speed.head_flops("hand", 5) == 2 * 2 * 50_304 * 5
    parts = speed.ppo_flops("hand", [3], 0)
    body = 3 * 96 + 8 * 6
    assert parts == {"generation": body, "scoring": 4 * body, "update": 4 * 3 * 2 * body}
    pair = body + 96 + 8 * 3  # what they share is computed once
    row = {"prompt_ids": [1, 2], "chosen_ids": [3], "rejected_ids": [4]}
    assert speed.stage_flops("dpo", "hand", [row]) == 4 * (pair + speed.head_flops("hand", 2))
    row = {"chosen_ids": [1, 2, 3], "rejected_ids": [1, 2, 4]}
    assert speed.stage_flops("reward", "hand", [row]) == 3 * pair


def test_flops_are_those_that_torch_counts():
    """Against torch's own counter on a real GPT-NeoX: linear layers exactly, attention as full instead of causal."""
    from torch.utils.flop_counter import FlopCounterMode

    layers, hidden, heads = speed.SHAPES["d128"]
    size = {"hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": heads}
    model = GPTNeoXForCausalLM(GPTNeoXConfig(**size, intermediate_size=4 * hidden, vocab_size=speed.VOCAB_SIZE))
    model.set_attn_implementation("eager")
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(torch.zeros(1, 20, dtype=torch.long))
    full_attention = layers * 4 * hidden * 20 * 20
    causal_attention = layers * 4 * hidden * 20 * 21 / 2
    ours = speed.body_flops("d128", 20) - causal_attention + full_attention + speed.head_flops("d128", 20)
    # transformers makes the rotary angles by a product of (dim, 1) and (1, L), too
    assert counter.get_total_flops() == pytest.approx(ours, rel=1e-3)


# ---------------------------------------------------------------------------------------------------------------- table


def fake_reports(seconds: list[float], memory: float, length: float = 30.0) -> list[dict]:
    phases = {"generation": 1.0, "rollout": 3.0, "update": 4.0}
    common = {"phases": phases, "peak_gib": memory, "response_length": length}
    return [{"seconds": s, "cpu_seconds": s / 2} | common for s in seconds]


def test_summary_of_reports(tmp_path):
    path = tmp_path / "ppo.json"
    path.write_text(json.dumps([{"input_ids": [1] * 300}]))
    reports = {"ours": fake_reports([8.0, 10.0, 16.0], 1.0), "peer": fake_reports([40.0, 20.0, 30.0], 4.0, 40.0)}
    args = speed.Args(batch_size=16)
    row = speed.summarise("ppo", "d128", args, "tuned", reports, 1e11, {"ppo": str(path)})
    assert (row["ours_median"], row["ours_min"], row["ours_max"]) == (1.6, 1.0, 2.0)
    assert row["ratio"] == pytest.approx(1.6 / (16 / 30)) and row["ratio_cpu"] == pytest.approx(3.0)
    assert row["memory_ratio"] == 0.25 and row["ours_scoring_s"] == 2.0 and row["ours_busy"] == 0.5
    flops = sum(speed.ppo_flops("d128", [300], 30.0).values())
    assert row["ours_fraction"] == pytest.approx(1.6 * flops / 1e11) and row["gflop"] == pytest.approx(flops / 1e9)
    assert (row["ours_response_length"], row["peer_response_length"]) == (30.0, 40.0)
    flops = sum(speed.ppo_flops("d128", [300], 40.0).values())
    assert row["peer_fraction"] == pytest.approx(16 / 30 * flops / 1e11)
    update = speed.ppo_flops("d128", [300], 30.0)["update"]
    assert row["ours_update_fraction"] == pytest.approx(16 * update / 4.0 / 1e11)  # 16 rows in 4 seconds
    row = speed.summarise("dataset", "tokens", speed.Args(dataset_rows=96), "plain", reports, 0.0, {})
    assert row["ours_median"] == 2 * (96 + 4) / 10.0  # posts and comparisons, and four of each for validation


def test_rows_of_the_table():
    stages, models = ("ppo", "sft", "dataset"), ("d128", "d256")
    quick = speed.plan(speed.Args(quick=True, stages=stages, models=models, allocators=("tuned",)))
    dataset = [("dataset", "tokens", "plain"), ("dataset", "lengths, too", "plain")]
    assert quick == [("ppo", "d128", "tuned"), ("ppo", "d256", "tuned"), ("sft", "d128", "tuned"), *dataset]
    gpu = speed.plan(speed.Args(stages=stages[:2], models=models, device="cuda"))
    assert gpu == [(stage, model, "plain") for stage in stages[:2] for model in models]


def test_table_keeps_rows_that_are_not_measured_again(tmp_path):
    row = dict.fromkeys(speed.COLUMNS, "") | {"stage": "sft", "model": "d128", "precision": "fp32"}
    first, second = (row | {"allocator": name, "ratio": 2.0} for name in ("plain", "tuned"))
    speed.write_table([first, second], tmp_path / "speed")
    speed.write_table([second | {"ratio": 3.0, "ours_fraction": 0.5}], tmp_path / "speed")
    with (tmp_path / "speed.csv").open() as lines:
        table = list(csv.DictReader(lines))
    assert [(row["allocator"], row["ratio"]) for row in table] == [("plain", "2"), ("tuned", "3")]
    assert (tmp_path / "speed.md").read_text().splitlines()[-1].endswith("| 50% |  |")


# ----------------------------------------------------------------------------------------------------------------- plan


@pytest.mark.parametrize("shape", ["d128", "70m"])
def test_parameters_are_those_of_transformers(shape):
    layers, hidden, vocabulary = plan.SHAPES[shape]
    size = {"hidden_size": hidden, "num_hidden_layers": layers, "intermediate_size": 4 * hidden}
    with torch.device("meta"):
        model = GPTNeoXForCausalLM(GPTNeoXConfig(**size, num_attention_heads=4, vocab_size=vocabulary))
        heads = ilql.ILQL(model)
    assert plan.count_parameters(shape) == sum(parameter.numel() for parameter in model.parameters())
    body = model.gpt_neox
    assert plan.count_parameters(shape, head=False) == sum(parameter.numel() for parameter in body.parameters())
    trained = sum(parameter.numel() for parameter in heads.parameters() if parameter.requires_grad)
    assert plan.count_trained(plan.Args(model=shape, stage="ilql")) == trained
    targets = sum(parameter.numel() for parameter in heads.target_q_heads.parameters())
    assert 2 * plan.count_q_head(shape) == targets


def test_memory_of_the_static_parts_by_hand():
    """PPO of pythia-1b in fp32: 4 + 4 + 8 bytes a trained parameter, 4 a frozen one; ZeRO-2 on 4 ranks shares 14."""
    policy, scorer = plan.count_parameters("1b"), plan.count_parameters("1b", head=False) + 2048
    parts = plan.memory(plan.Args(model="pythia-1b", gpus=1, precision="fp32"), 1)
    assert parts["weights"] == parts["frozen models"] == parts["gradients"] == 4 * (policy + scorer)
    assert parts["optimiser"] == 8 * (policy + scorer)
    assert parts["peak"] == sum(size for name, size in parts.items() if name != "peak")
    shared = plan.memory(plan.Args(model="pythia-1b", gpus=4, zero=2, offload=True), 1)
    assert shared["weights"] == 2 * (policy + scorer) and shared["frozen models"] == 2 * policy
    assert shared["gradients"] + shared["optimiser"] == 14 * (policy + scorer) / 4 + 2 * 5e8  # and DeepSpeed's bucket
    high = plan.memory(plan.Args(model="pythia-1b", gpus=4, zero=2, offload=True, precision="fp32"), 1)
    assert high["weights"] == 2 * shared["weights"] and high["optimiser"] == shared["optimiser"]


def test_a_frozen_model_that_scores_counts_where_it_makes_the_peak():
    """12B with --offload: the SFT policy, 2 bytes a parameter, comes to the GPU before there are activations."""
    args = plan.Args(model="pythia-12b", gpus=32, zero=2, offload=True, gpu="a100-80")
    parts = plan.memory(args, 1)
    assert parts["frozen models"] == 2 * plan.count_parameters("12b") and parts["KV cache (sampling)"] == 0
    assert plan.memory(args, 8)["frozen models"] == 0  # activations of an update are more than that


def test_offloaded_models_come_to_the_gpu_once_an_update():
    """Two models of 2 bytes a parameter at 6 GB/s; on a processor they are where they are used."""
    args = plan.Args(model="pythia-1b", gpus=8, zero=2, offload=True)
    seconds = plan.seconds_per_update(args, 8)["offload"]
    assert seconds == pytest.approx(2 * 2 * plan.count_parameters("1b") / 6e9)
    assert "offload" not in plan.seconds_per_update(plan.replace(args, gpu="cpu"), 8)


def test_zero_reduces_the_gradients_of_every_micro_batch():
    """32 rows a rank, micro-batches of 8: four reductions and one gathering of bf16 weights in each of 4 epochs."""
    args = plan.Args(model="pythia-1b", gpus=8, zero=2, batch_size=256)
    trained = plan.count_parameters("1b") + plan.count_parameters("1b", head=False) + 2048
    bytes_moved = 4 * (4 + 1) * 2 * trained
    assert plan.seconds_per_update(args, 8)["exchange"] == pytest.approx(bytes_moved / 400e9)


def test_a_pair_is_a_post_with_two_summaries_in_memory():
    """pythia-1b under autocast: 16 layers of width 2048, which keep 40 widths of bytes a token, and keys and values of
    the post once more for the second summary; the backward pass of one layer takes 24."""
    reward, dpo = (plan.memory(plan.Args(stage=stage, longest=500), 4) for stage in ("reward", "dpo"))
    assert dpo["activations"] == reward["activations"] and dpo["logits"] == 14 * 50304 * 2 * 4 * 169
    tokens = 4 * (500 + 169)
    assert reward["activations"] == 2048 * (16 * (40 * tokens + 4 * 4 * 500) + 24 * tokens)


def test_memory_of_ilqls_heads_by_hand():
    """One layer, D = 2, V = 100: a Q head has 2 x 4 + 4 and 4 x 100 + 100 weights, the V head 2 x 4 + 4 and 4 + 1."""
    plan.SHAPES["hand"] = (1, 2, 100)
    q_head, v_head = 12 + 500, 12 + 5
    policy = plan.count_parameters("hand")
    settings = {"model": "hand", "stage": "ilql", "gpus": 1, "longest": 60, "longest_summary": 10}
    parts, low = (plan.memory(plan.Args(precision=p, zero=z, **settings), 3) for p, z in (("fp32", 0), ("bf16", 2)))
    assert parts["weights"] == 4 * (policy + 2 * q_head + v_head) and low["weights"] == parts["weights"] / 2
    assert parts["target heads"] == low["target heads"] == 4 * 2 * q_head
    actions = 2 * 3 * 10  # three logits of 4 bytes and their log-softmax; between D and V 2D wide
    assert parts["logits"] == actions * (3 * (4 + 4) * 100 + 12 * 4 * 4)
    reward = plan.memory(plan.Args(stage="reward", model="hand", longest=120, longest_summary=0), 3)
    ilql = plan.memory(plan.Args(stage="ilql", model="hand", longest=60, longest_summary=0), 3)
    assert ilql["activations"] == reward["activations"] - 2 * 2 * 2 * 3 * 120  # without posts that pairs share


def test_ilql_at_6_9b_needs_a_smaller_micro_batch():
    """benchmark/run.sh gives it --micro_batch_size 4 on 8 GPUs of 80 GiB."""
    settings = {"model": "pythia-6.9b", "stage": "ilql", "gpus": 8, "gpu": "h100", "zero": 2}
    assert plan.plan(plan.Args(**settings))["micro-batch"] == 4
    assert not plan.plan(plan.Args(micro_batch_size=8, **settings))["fits"]


def test_memory_of_the_stages_is_what_speed_py_measured(capsys):
    """SFT, reward model and DPO at d128 and d256 in the table of docs/performance."""
    ratios = plan.compare(str(ROOT / "docs/performance/speed.csv"))
    assert len(ratios) == 6 and all(0.85 < ratio < 1.15 for ratio in ratios)
    assert capsys.readouterr().out.count("| dpo |") == 2


def test_memory_of_sampling_by_hand():
    """Where activations are recomputed, the keys and values of 8 micro-batches are more; beside them lies a layer of
    the queries or, where many tokens are sampled, logits of 28 bytes."""
    settings = {"gpus": 32, "zero": 2, "gpu": "h200", "gradient_checkpointing": True}
    parts = plan.memory(plan.Args(model="pythia-12b", **settings), 2)
    assert parts["KV cache (sampling)"] == 2 * 36 * 5120 * 2 * (8 * 2) * 512 and parts["logits"] == 0
    assert parts["activations"] == 12 * 5120 * 2 * (8 * 2) * 512
    parts = plan.memory(plan.Args(model="pythia-12b", longest=1024, response_length=512, **settings), 2)
    assert parts["KV cache (sampling)"] == 2 * 36 * 5120 * 2 * (8 * 2) * 1024 and parts["logits"] == 28 * 50688 * 8 * 2


def test_no_more_rows_are_sampled_than_a_rank_has():
    """16 rows a rank: in micro-batches of 4 all are sampled together; evaluation takes 4 micro-batches of any size."""
    args = plan.Args(model="pythia-12b", gpus=32, zero=2, gpu="h200", gradient_checkpointing=True)
    two, four, sixteen = (plan.memory(args, micro)["KV cache (sampling)"] for micro in (2, 4, 16))
    assert two == four == sixteen / 4


def test_memory_of_sampling_is_what_torch_allocates(monkeypatch):
    """Peak of `generate` in fp32, against the plan's keys and values with a layer of the queries: within 5%."""

    class Tokenizer:
        eos_token_id, pad_token_id, __len__ = 511, 510, lambda self: 510

    layers, hidden, rows, length, new = 8, 64, 16, 128, 4
    size = {"hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": 4, "vocab_size": 512}
    model, peak, now = GPTNeoXForCausalLM(GPTNeoXConfig(**size, intermediate_size=4 * hidden)).eval(), 0, 0
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        ppo.generate(model, torch.randint(1, 510, (rows, length)), Tokenizer(), new, 0.7)
    for event in profiler.profiler.kineto_results.events():
        now += event.nbytes() if event.name() == "[memory]" else 0
        peak = max(peak, now)
    monkeypatch.setitem(plan.SHAPES, "hand", (layers, hidden, 512))
    settings = {"gpus": 1, "precision": "fp32", "longest": length + new, "response_length": new}
    parts = plan.memory(plan.Args(model="hand", gradient_checkpointing=True, **settings), rows // 8)
    assert parts["KV cache (sampling)"] + parts["activations"] == pytest.approx(peak, rel=0.05)


def test_recomputing_costs_a_third_more_in_the_update_alone():
    plain, again = (plan.seconds_per_update(plan.Args(gpus=1, gradient_checkpointing=on), 8) for on in (False, True))
    assert again == plain | {"update": pytest.approx(plain["update"] * 4 / 3)}


def test_a_token_of_eight_micro_batches_reads_the_weights_once():
    """64 rows a rank: micro-batches of 4 are sampled in two turns of 32 rows, of 8 and of 16 in one."""
    four, eight, sixteen = (plan.seconds_per_update(plan.Args(gpus=8), micro)["decoding"] for micro in (4, 8, 16))
    turn = 53 * (2 * plan.count_parameters("1b") / (3.35e12 * 0.5) + 16 * 20 * 8e-6)
    assert eight == sixteen == pytest.approx(four - turn)


def test_flops_of_a_pair_by_hand():
    """One layer, D = 2, a post of 346 tokens and two summaries of 38, once forward and twice backward."""
    plan.SHAPES["hand"] = (1, 2, 100)
    pair, logits = 24 * 4 * 422 + 2 * 2 * 422**2, 2 * 2 * 100 * 38
    assert plan.flops_per_row("hand", "reward") == {"update": 3 * pair}
    both = pair + 2 * logits
    assert plan.flops_per_row("hand", "dpo") == {"scoring": both, "update": 3 * both}


def test_the_experiment_takes_the_lightest_setting_that_fits():
    settings = [{"zero": 0}, {"zero": 2}, {"zero": 2, "offload": True}]
    rows = plan.plan_experiment(plan.Args(gpus=8))
    assert rows[0]["setting"] == settings[0] and rows[-1]["setting"] != settings[0]
    for row in rows:
        lighter = settings[: [*settings, row["setting"]].index(row["setting"])]
        tries = (plan.Args(gpus=8, model=row["model"], stage=row["stage"], **setting) for setting in lighter)
        assert row["fits"] and not any(plan.plan(args)["fits"] for args in tries)


def test_fp32_has_a_peak_of_its_own():
    """An H100 has 989 TFLOP/s in bf16 and 67 in fp32."""
    low, high = (plan.seconds_per_update(plan.Args(precision=name), 8)["update"] for name in ("bf16", "fp32"))
    assert high == pytest.approx(low * 989 / 67)


def test_micro_batch_divides_the_rows_of_a_rank():
    """100 rows on 10 GPUs are 10 a rank; 512 can't be shared out over 6, and ppo.py would refuse to."""
    assert plan.plan(plan.Args(gpus=10, batch_size=100))["micro-batch"] == 2
    with pytest.raises(ValueError, match="--batch_size of ppo: .* = 6, found 512"):
        plan.plan(plan.Args(gpus=6))


def test_micro_batch_is_the_largest_that_fits():
    args = plan.Args(model="pythia-1b", gpus=1, gpu="h100", zero=2)
    micro = plan.largest_micro_batch(args)
    room = 0.92 * 80 * plan.GIB
    assert micro and plan.memory(args, micro)["peak"] < room <= plan.memory(args, 2 * micro)["peak"]
    assert plan.largest_micro_batch(plan.Args(model="pythia-12b", gpus=1)) == 0
    assert plan.plan(plan.Args(model="pythia-12b", gpus=1))["hours"] == math.inf


def test_hours_add_up():
    """Twice the GPUs halve what is computed; the hours are updates times seconds."""
    one, two = (plan.seconds_per_update(plan.Args(gpus=n), 16) for n in (1, 2))
    assert one["update"] == pytest.approx(2 * two["update"]) and one["exchange"] == 0 < two["exchange"]
    result = plan.plan(plan.Args(gpus=8))
    seconds = sum(plan.seconds_per_update(plan.Args(gpus=8), result["micro-batch"]).values())
    assert result["hours"] == pytest.approx(1_000_000 / 512 * seconds / 3600)


def test_command_line_of_the_whole_experiment():
    command = [sys.executable, "benchmark/plan.py", "--experiment", "--gpus", "8"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    rows = [line for line in done.stdout.splitlines() if line.startswith("| pythia-")]
    assert len(rows) == 12 and "GPU hours" in done.stdout.splitlines()[-1]


def test_unknown_names_are_refused():
    with pytest.raises(ValueError, match="--model: expected pythia-.* found 'pythia-3b'"):
        plan.main(plan.Args(model="pythia-3b"))
    with pytest.raises(ValueError, match="--gpu: .* found 'tpu'"):
        plan.main(plan.Args(gpu="tpu"))


@pytest.mark.parametrize("name, value", [("gpus", 0), ("response_length", 0), ("longest", -1), ("zero", 1)])
def test_numbers_out_of_range_are_refused_by_the_plan(name, value):
    with pytest.raises(ValueError, match=f"--{name}: expected .* found {value}"):
        plan.main(plan.Args(**{name: value}))


@pytest.mark.parametrize("name", ["models", "stages", "allocators", "precision", "device"])
def test_unknown_names_are_refused_by_the_benchmark(name):
    value = "d1" if name in ("precision", "device") else ("d1",)
    with pytest.raises(ValueError, match=f"--{name}: expected some of .* found 'd1'"):
        speed.main(speed.Args(**{name: value}))


@pytest.mark.parametrize("name", ["micro_batch_size", "repetitions"])
def test_numbers_out_of_range_are_refused_by_the_benchmark(name):
    with pytest.raises(ValueError, match=f"--{name}: expected 1 or more, found 0"):
        speed.main(speed.Args(**{name: 0}))


def test_activations_are_those_that_autograd_keeps():
    """Bytes of tensors kept for the backward pass by one layer more, against the plan's 18 D floats a token."""
    from transformers import GPTNeoXModel

    kept, tokens, hidden = [], 4 * 64, 32
    for layers in (1, 2):
        size = {"hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": 4, "vocab_size": 100}
        model, storages = GPTNeoXModel(GPTNeoXConfig(**size, intermediate_size=4 * hidden)), {}
        weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}

        def note(tensor, storages=storages, weights=weights):
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in weights:
                storages[storage.data_ptr()] = (storage.nbytes(), tensor)  # held, so that no address comes twice
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            model(torch.zeros(4, 64, dtype=torch.long), use_cache=False)
        kept.append(sum(nbytes for nbytes, _ in storages.values()))
    plan.SHAPES["hand"] = (1, hidden, 100)
    plan.SHAPES["more"] = (2, hidden, 100)
    settings = {"gpus": 1, "precision": "fp32", "longest": 64, "stage": "sft"}
    one, two = (plan.memory(plan.Args(model=model, **settings), 4)["activations"] for model in ("hand", "more"))
    assert two - one == 18 * hidden * 4 * tokens
    assert kept[1] - kept[0] == pytest.approx(two - one, rel=0.03)


def test_sampling_of_ilql_is_timed_beside_transformers(capsys):
    ilql_sampling.main(ilql_sampling.Args(posts=2, longest=8, response_length=3, rounds=1))
    lines = capsys.readouterr().out.splitlines()[2:]
    assert len(lines) == 5 and all(float(line.split("|")[2]) > 0 for line in lines)


@pytest.mark.parametrize("script", [bounds, save_cost])
def test_a_missing_quickstart_names_the_command(script, tmp_path):
    with pytest.raises(FileNotFoundError, match=f"SEED=7 OUT={tmp_path} bash benchmark/quickstart.sh"):
        script.main(script.Args(folder=tmp_path, seed=7))
    assert not any(tmp_path.iterdir())
