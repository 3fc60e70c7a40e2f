"""What main hands to its parts, in every script: optimiser, schedule, temperatures, models, random numbers, ranks."""

import itertools
import json
import math
import time
from contextlib import nullcontext
from resource import RUSAGE_SELF, getrusage
from types import SimpleNamespace

import pytest
import torch
from accelerate import Accelerator
from conftest import ROOT, make_sft_rows, read_events
from datasets import DatasetDict, load_from_disk
from test_end_to_end import command_line, launch, two_processes
from transformers import AutoModelForCausalLM

import dpo
import ilql
import ppo
import reward
import sft

SCRIPTS = {"sft": sft, "reward": reward, "ppo": ppo, "dpo": dpo, "ilql": ilql}
PAD = 320


@pytest.fixture(params=SCRIPTS)
def stage(request) -> str:
    return request.param


@pytest.fixture
def run(tmp_path, chain, request):
    """Function run(stage, **fields) -> (final metrics, output folder) of a run of the script in this process."""

    def start(stage: str, **fields):
        models = {"reward": [chain.sft], "dpo": [chain.sft], "ppo": [chain.sft, chain.reward]}.get(stage, [])
        return request.getfixturevalue(f"run_{stage}")(*models, tmp_path / stage, **{"eval_rows": 2} | fields)

    return start


def watch(monkeypatch, script, name: str, note) -> list:
    """Have script.name write down note(*its arguments) at each call -> the notes."""
    notes, real = [], getattr(script, name)

    def watched(*args, **kwargs):
        notes.append(note(*args))
        return real(*args, **kwargs)

    monkeypatch.setattr(script, name, watched)
    return notes


# --------------------------------------------------------------------------------------------------------- every stage


def test_episodes_a_second_and_peak_memory_are_of_this_run(chain, stage):
    folder = getattr(chain, stage)
    events, age = read_events(folder), time.time() - (folder / "run.lock").stat().st_mtime
    rates = events["perf/episodes_per_second"]
    if stage == "ppo":  # of each update, 8 episodes
        parts = [[value for _, value in events[f"perf/seconds_{name}"]] for name in ("rollout", "update")]
        seconds = [sum(update) for update in zip(*parts)]
        assert [rate for _, rate in rates] == pytest.approx([8 / x for x in seconds]) and 0 < sum(seconds) < age
    else:  # since the run began
        seconds = [episodes / rate for episodes, rate in rates]
        assert 0 < seconds[0] and seconds == sorted(seconds) and seconds[-1] < age
    peak = getrusage(RUSAGE_SELF).ru_maxrss / 2**20
    assert all(0.1 < gib < 1.001 * peak for _, gib in events["perf/peak_memory_gib"])


def test_the_optimiser_gets_the_rate_of_the_schedule(run, stage, monkeypatch):
    rates = watch(monkeypatch, SCRIPTS[stage], "step", lambda a, m, optimizer, *rest: optimizer.param_groups[0]["lr"])
    _, folder = run(stage, lr=1e-2)
    if stage == "ppo":  # linear over 3 updates of 4 steps
        expected = [1e-2 * (1 - i // 4 / 3) for i in range(12)]
    else:  # 13 rows in batches of 4
        expected = [1e-2 * 0.5 * (1 + math.cos(math.pi * i / 4)) for i in range(4)]
    assert rates == pytest.approx(expected)
    logged = [rate for _, rate in read_events(folder)["train/lr"]]
    assert logged == pytest.approx(expected[:: 4 if stage == "ppo" else 1])


@pytest.mark.parametrize("stage", ["sft", "reward", "dpo", "ilql"], indirect=True)
def test_the_smallest_part_of_an_epoch_is_a_row(run, stage):
    assert [step for step, _ in read_events(run(stage, num_epochs=0.01)[1])["train/lr"]] == [1]


def test_adamw_gets_its_flags(run, stage, monkeypatch):
    real, given = torch.optim.AdamW, {}
    monkeypatch.setattr(torch.optim, "AdamW", lambda parameters, **kw: given.update(kw) or real(parameters, **kw))
    length = {"total_episodes": 8} if stage == "ppo" else {"max_updates": 1}
    run(stage, lr=2e-3, adam_eps=3e-4, weight_decay=0.02, **length)
    assert (given["lr"], given["eps"], given["weight_decay"]) == (2e-3, 3e-4, 0.02)


@pytest.mark.parametrize("stage", ["sft", "reward", "dpo", "ilql"], indirect=True)
def test_a_run_that_is_ended_early_has_its_whole_schedule(run, stage):
    """As --max_updates says: the rate falls to zero over these updates, not over the epoch's."""
    _, folder = run(stage, lr=1e-2, max_updates=2)
    assert [rate for _, rate in read_events(folder)["train/lr"]] == pytest.approx([1e-2, 5e-3])


@pytest.mark.parametrize("stage", ["sft", "reward", "dpo", "ilql"], indirect=True)
def test_what_an_interrupted_run_had_done_does_not_count_as_its_speed(run, stage, monkeypatch):
    """Each update takes a second by this clock; 13 rows in batches of 4."""
    script, real = SCRIPTS[stage], SCRIPTS[stage].Checkpoints.save

    def save_and_die(checkpoints, update, num_updates):
        real(checkpoints, update, num_updates)
        assert update != 2, "killed"

    clock = itertools.count()
    monkeypatch.setattr(script, "time", SimpleNamespace(time=lambda: next(clock), monotonic=time.monotonic))
    monkeypatch.setattr(script.Checkpoints, "save", save_and_die)
    with pytest.raises(AssertionError, match="killed"):
        run(stage, save_every=2)
    monkeypatch.setattr(script.Checkpoints, "save", real)
    _, folder = run(stage, save_every=2)
    rates = [rate for _, rate in read_events(folder)["perf/episodes_per_second"]]
    assert rates == pytest.approx([4, 4, 4, 5 / 2])


@pytest.mark.parametrize("stage", ["ppo", "dpo"], indirect=True)
def test_eos_rate_and_length_are_of_summaries_and_not_of_their_padding(run, stage, monkeypatch):
    """Of two summaries one ends, after two tokens, and one is cut off after 12."""
    real = SCRIPTS[stage].generate

    def generate(policy, queries, tokenizer, response_length, temperature):
        responses, logprobs = real(policy, queries, tokenizer, response_length, temperature)
        if temperature == 0.02:
            responses = torch.full_like(responses, 7)
            responses[0, 1], responses[0, 2:] = 0, PAD
        return responses, logprobs

    monkeypatch.setattr(SCRIPTS[stage], "generate", generate)
    metrics, _ = run(stage, eval_temperature=0.02)
    assert [metrics[f"eval/validation/{name}"] for name in ("eos_rate", "response_length")] == [0.5, 7]


@pytest.mark.parametrize("stage", ["sft", "ppo", "dpo"], indirect=True)
def test_summaries_are_of_the_policy_that_is_trained(run, stage, monkeypatch):
    policies = watch(monkeypatch, SCRIPTS[stage], "generate", lambda policy, *rest: policy)
    saved = AutoModelForCausalLM.from_pretrained(run(stage, lr=1e-2)[1]).state_dict()
    assert policies
    for policy in policies:
        assert all(torch.equal(weight, saved[name]) for name, weight in policy.state_dict().items())


def test_ranks_draw_numbers_of_their_own_and_a_repeated_row_counts_once(stage, monkeypatch):
    """Three rows on two ranks, one at a time: for the third the second rank has none, and repeats it."""
    pieces, ranks = [], {"num_processes": 2, "device": torch.device("cpu"), "autocast": nullcontext}
    monkeypatch.setattr(SCRIPTS[stage], "gather_object", lambda own: pieces.extend(own) or pieces)
    for rank in (0, 1):
        accelerator = SimpleNamespace(process_index=rank, **ranks)
        found = SCRIPTS[stage].map_rows(accelerator, lambda rows: torch.rand(len(rows)), torch.arange(1, 4), 1)
    assert len(found) == len(found.unique()) == 3


def test_evaluations_draw_the_same_numbers_wherever_training_stands(stage):
    drawn = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        lengths = torch.arange(1, 7)
        drawn.append(SCRIPTS[stage].map_rows(Accelerator(), lambda rows: torch.rand(len(rows)), lengths, 4))
        assert torch.initial_seed() == seed
    assert torch.equal(*drawn) and len(drawn[0].unique()) == 6


def test_an_infinite_gradient_of_a_finite_loss_changes_no_weight(stage, tmp_path):
    model, accelerator = torch.nn.Linear(2, 1), Accelerator(project_dir=str(tmp_path))
    model.weight.grad, model.bias.grad = torch.full((1, 2), math.inf), torch.zeros(1)
    before, optimizer = model.weight.detach().clone(), torch.optim.SGD(model.parameters(), lr=1.0)
    with pytest.raises(FloatingPointError, match="update 7: not finite.*'train/grad_norm': inf"):
        SCRIPTS[stage].step(accelerator, model, optimizer, {"train/loss": 1.0}, {}, 7)
    assert torch.equal(model.weight, before) and (tmp_path / "not_finite_0.pt").exists()


# -------------------------------------------------------------------------------------------------------- temperatures


def test_temperatures_of_samples(run, monkeypatch):
    seen = {name: watch(monkeypatch, SCRIPTS[name], "generate", lambda *args: args[-1]) for name in ("sft", "ppo")}
    run("sft", max_updates=1, eval_temperature=0.02)
    assert set(seen["sft"]) == {0.02}
    run("ppo", total_episodes=8, sample_every=9, temperature=0.9, eval_temperature=0.02)
    # before training, in the rollout, whose two micro-batches are sampled together, and in the evaluation
    assert seen["ppo"][:2] == [0.02, 0.9] and set(seen["ppo"][2:]) == {0.02}


def test_dpos_kl_is_of_the_distribution_that_was_sampled(run, monkeypatch):
    sampled = watch(monkeypatch, dpo, "generate", lambda *args: args[-1])
    scored = watch(monkeypatch, dpo, "pair_logprobs", lambda *args: args[4:])  # is it a mean, and its temperature
    run("dpo", max_updates=1, temperature=0.9, eval_temperature=0.02, average_logprobs=True)
    assert sampled == [0.02, 0.9] and [x for x in scored if len(x) > 1] == [(False, 0.9)] * 2


def test_dpos_kl_is_a_sum_over_a_summary(run, monkeypatch):
    """Log-probabilities of 1 a token against the reference's 0: the KL is the mean length."""
    lengths, calls, generate, pair_logprobs = [], [], dpo.generate, dpo.pair_logprobs

    def note_lengths(*args):
        responses, logprobs = generate(*args)
        lengths.append((responses != PAD).sum(1).float())
        return responses, logprobs

    def one_nat_a_token(policy, pairs, rows, *settings, **more):
        if len(settings) < 3:  # of comparisons
            return pair_logprobs(policy, pairs, rows, *settings, **more)
        calls.append(policy)
        return torch.stack([(pairs[column] != PAD).sum(1) for column in dpo.COLUMNS[1:]]).float() * (len(calls) % 2)

    monkeypatch.setattr(dpo, "generate", note_lengths)
    monkeypatch.setattr(dpo, "pair_logprobs", one_nat_a_token)
    metrics, _ = run("dpo", max_updates=1, eval_rows=0)
    mean_length = torch.cat(lengths[1::2]).mean().item()  # of what is sampled after the near-greedy summaries
    assert len(calls) == len(lengths) and metrics["objective/kl"] == pytest.approx(mean_length)


# --------------------------------------------------------------------------------------------------------------- PPO


def test_kl_and_scores_are_to_the_models_that_ppo_started_from(run, chain, monkeypatch):
    """In the last update the policy has moved on from the SFT policy, and the value model from the reward model."""
    rollouts, real = [], ppo.collect_rollout
    monkeypatch.setattr(ppo, "collect_rollout", lambda *args: rollouts.append(real(*args)) or rollouts[-1])
    run("ppo", lr=1e-2)
    last, sft_policy = rollouts[-1], AutoModelForCausalLM.from_pretrained(chain.sft)
    with torch.no_grad():
        expected, _ = ppo.get_logprobs(sft_policy, last["queries"], last["responses"], PAD, 0.7)
        tokens = torch.cat([last["queries"], last["responses"]], dim=1)
        scores = ppo.get_scores(ppo.load_reward_model(str(chain.reward), PAD), tokens, PAD)
    torch.testing.assert_close(last["ref_logprobs"], expected, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(last["scores"], scores, atol=1e-4, rtol=1e-4)
    assert (last["logprobs"] - expected).abs().max() > 1e-2


def test_an_updates_metrics_are_means_over_its_steps(run, monkeypatch):
    steps, real = [], ppo.step
    monkeypatch.setattr(ppo, "step", lambda *args: steps.append(real(*args)) or steps[-1])
    _, folder = run("ppo", total_episodes=8)
    losses = [metrics["value/loss"] for metrics in steps]
    assert len(set(losses)) == 4 and read_events(folder)["value/loss"][0][1] == pytest.approx(sum(losses) / 4, rel=1e-4)


def test_seconds_of_the_rollout_are_not_those_of_the_update(run, monkeypatch):
    """By this clock sampling takes three seconds, and all else no time."""
    now = [0]
    monkeypatch.setattr(ppo, "time", SimpleNamespace(time=lambda: now[0], monotonic=time.monotonic))
    watch(monkeypatch, ppo, "collect_rollout", lambda *args: now.append(now.pop() + 3))
    events = read_events(run("ppo", total_episodes=8)[1])
    assert [events[f"perf/seconds_{phase}"][0][1] for phase in ("rollout", "update")] == [3, 0]


def test_samples_are_taken_after_every_nth_update(run):
    _, folder = run("ppo", sample_every=2)
    assert [path.name for path in (folder / "samples_training").iterdir()] == ["00000000.jsonl", "00000016.jsonl"]


@pytest.mark.parametrize(("score", "rate"), [(0.0, 0), (1.0, 1), (-1.0, 0)])
def test_a_summary_wins_where_it_scores_above_its_reference(run, monkeypatch, score, rate):
    """A tie is no win. Summaries have 12 columns here, references 30; those score 0."""
    real = ppo.load_reward_model

    def load(*args):  # it checks the probes' scores first
        model = real(*args)
        monkeypatch.setattr(ppo, "get_scores", lambda m, x, pad: torch.full((len(x),), score * (x.shape[1] == 112)))
        return model

    monkeypatch.setattr(ppo, "load_reward_model", load)
    metrics, folder = run("ppo", total_episodes=8)
    found = [metrics[f"eval/validation/{name}"] for name in ("score", "reference_score", "score_win_rate")]
    assert found == [score, 0, rate]
    samples = (folder / "samples_training/00000000.jsonl").read_text().splitlines()
    assert [json.loads(line)["score"] for line in samples] == [score] * 2


def test_the_value_model_keeps_the_shift_of_a_model_without_norm_bias(tmp_path, base_models, run_reward, run_ppo):
    _, path = run_reward(base_models["llama"], tmp_path / "reward", eval_rows=2)
    bias = json.loads((path / "config.json").read_text())["score_bias"]
    _, folder = run_ppo(base_models["llama"], path, tmp_path / "ppo", lr=0.0, total_episodes=8, eval_rows=2)
    assert abs(bias) > 1e-3 and json.loads((folder / "value_model/config.json").read_text())["score_bias"] == bias


SPY = """
import sys, torch, tyro
sys.path.insert(0, {root!r})
import ppo
real, real_step, gradients = ppo.add_advantages, ppo.step, []
def spy(rollout, args, reduce_sum):
    result = real(rollout, args, reduce_sum)
    seed = {{"seed": torch.tensor(torch.initial_seed())}}
    torch.save(result | seed, f"{folder}/rank{{ppo.Accelerator().process_index}}.pt")
    return result
def spy_step(accelerator, model, *rest):
    gradients.append([parameter.grad.clone() for parameter in model.parameters()])
    torch.save(gradients[0], f"{folder}/gradients{{accelerator.process_index}}.pt")
    return real_step(accelerator, model, *rest)
ppo.add_advantages, ppo.step = spy, spy_step
ppo.main(tyro.cli(ppo.Args))
"""


def test_ranks_share_a_batch_whiten_it_together_and_exchange_gradients(
    tmp_path, monkeypatch, chain, base_models, sft_dataset, comparisons
):
    more = ["--batch_size", "8", "--micro_batch_size", "2", "--total_episodes", "8", "--eval_rows", "2"]
    inputs = (chain, base_models["gpt_neox"], sft_dataset, comparisons)
    _, *arguments = command_line("ppo", tmp_path / "two", *inputs, *more)
    (tmp_path / "spy.py").write_text(SPY.format(root=str(ROOT), folder=str(tmp_path)))
    launch([*two_processes(), str(tmp_path / "spy.py"), *arguments], {})
    ranks = [torch.load(tmp_path / f"rank{rank}.pt") for rank in (0, 1)]
    # each row of the batch is on one rank
    train = load_from_disk(sft_dataset)["train"]["query_token"]
    rows = [train[i] for i in ppo.stream_rows(44413, 13, 0, 8).tolist()]
    found = [row for rank in ranks for row in rank["queries"].tolist()]
    expected, found = (sorted([token for token in row if token != PAD] for row in some) for some in (rows, found))
    assert found == expected
    # mean 0 and variance 1 over both, not over each
    kept = [rank["advantages"][rank["response_mask"]] for rank in ranks]
    assert torch.cat(kept).mean().item() == pytest.approx(0, abs=1e-4) and kept[0].mean().abs() > 1e-3
    assert torch.cat(kept).square().mean().item() == pytest.approx(1, abs=1e-3)
    entropy = torch.cat([rank["entropies"][rank["response_mask"]] for rank in ranks]).mean().item()
    assert read_events(tmp_path / "two")["objective/entropy"][0][1] == pytest.approx(entropy, abs=1e-4)
    assert ranks[0]["seed"] != ranks[1]["seed"]  # else both sample with the same random numbers
    # the gradient of one process that has all rows
    args = ppo.Args(**json.loads((tmp_path / "two/run.json").read_text())["args"])
    rollout = {name: torch.cat([rank[name] for rank in ranks]) for name in ranks[0] if name != "seed"}
    policy, value_model = AutoModelForCausalLM.from_pretrained(chain.sft), ppo.load_reward_model(str(chain.reward), PAD)
    accelerator, model = ppo.Accelerator(project_dir=str(tmp_path)), ppo.ActorCritic(policy, value_model)
    optimizer, found = torch.optim.SGD(model.parameters(), lr=0.0), []
    real = ppo.step
    monkeypatch.setattr(ppo, "step", lambda *x: found.append([p.grad.clone() for p in model.parameters()]) or real(*x))
    next(ppo.update_model(accelerator, model, optimizer, rollout, PAD, args, update=0))
    for rank in (0, 1):
        torch.testing.assert_close(torch.load(tmp_path / f"gradients{rank}.pt"), found[0], atol=1e-5, rtol=1e-4)
    assert all(gradient.abs().max() > 1e-3 for gradient in (found[0][0], found[0][-1]))


# ------------------------------------------------------------------------------------------------------ reward and ILQL


def test_all_references_count_in_the_normalisation(tmp_path, run, tokenizer):
    rows = make_sft_rows(tokenizer, 80, 1)
    DatasetDict({"train": rows, "validation": rows}).save_to_disk(tmp_path / "posts")
    _, folder = run("reward", sft_dataset=str(tmp_path / "posts"), max_updates=1)
    with torch.no_grad():
        tokens = torch.tensor(rows["query_reference_response_token"])
        scores = reward.get_scores(reward.load_reward_model(str(folder), PAD), tokens, PAD)
    assert scores.mean().item() == pytest.approx(0, abs=1e-4) and abs(scores[:64].mean().item()) > 1e-3


def test_scores_that_differ_by_padding_side_are_reported(run, monkeypatch):
    real = reward.get_scores

    def get_scores(model, tokens, pad):  # a probe is a row alone, without padding
        return real(model, tokens, pad) + (tokens[:, 0] == pad) * (len(tokens) > 1)

    monkeypatch.setattr(reward, "get_scores", get_scores)
    metrics, _ = run("reward", max_updates=1)
    assert metrics["eval/left_minus_right_padding"] > 0.5


def test_ilqls_q_and_v_are_means_over_the_summarys_tokens(run, monkeypatch):
    def generate(model, queries, tokenizer, length, betas, *rest):
        responses = torch.full((len(queries), len(betas), length), PAD)
        responses[..., :2] = torch.tensor([5, 0])
        values = torch.where(responses == PAD, 1e6, 1.0)  # what follows EOS must not count
        return responses, values, 2 * values

    monkeypatch.setattr(ilql, "generate_ilql", generate)
    metrics, _ = run("ilql", max_updates=1)
    names = ("q", "v", "eos_rate", "response_length")
    for beta in (0, 1, 2, 4):
        assert [metrics[f"eval/validation/beta{beta}/{name}"] for name in names] == [1, 2, 1, 2]
