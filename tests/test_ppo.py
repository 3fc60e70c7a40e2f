"""ppo.py: rewards, advantages, losses, rollout and update against hand-worked numbers and the plain computation."""

import json
import math
import threading
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from conftest import KINDS, lean_to_eos, make_policy, make_reward_model, make_sft_rows, pad_rows, read_events
from datasets import load_from_disk
from transformers import AutoModelForCausalLM

import ppo

PAD, EOS_ID = 320, 0


def one_rank(tensor):
    return tensor


def on_two_ranks(function, first: tuple, second: tuple) -> list:
    """Run function(*first, reduce_sum) and function(*second, reduce_sum) side by side; reduce_sum adds up over both."""
    barrier, slots, results = threading.Barrier(2, timeout=20), [None, None], [None, None]

    def work(rank: int, inputs: tuple) -> None:
        def reduce_sum(tensor):
            slots[rank] = tensor
            barrier.wait()
            total = slots[0] + slots[1]
            barrier.wait()
            return total

        results[rank] = function(*inputs, reduce_sum)

    threads = [threading.Thread(target=work, args=(rank, inputs)) for rank, inputs in enumerate((first, second))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


# ----------------------------------------------------------------------------------------------- rewards and advantages


def test_masks_keep_eos_and_the_state_after_it():
    response_mask, value_mask = ppo.make_masks(torch.tensor([3, 5, 1]), 5)
    assert response_mask.int().tolist() == [[1, 1, 1, 0, 0], [1, 1, 1, 1, 1], [1, 0, 0, 0, 0]]
    assert value_mask.int().tolist() == [[1, 1, 1, 1, 0], [1, 1, 1, 1, 1], [1, 1, 0, 0, 0]]


def test_rewards_by_hand():
    """EOS within; EOS at the last position (or missing): the score comes one after EOS, else at the last position."""
    logprobs = torch.tensor([[-1.0, -2.0, -1.0, 0.0, 0.0], [-1.0, -1.0, -1.0, -1.0, -3.0]])
    ref_logprobs = torch.tensor([[-2.0, -1.0, -1.0, 0.0, 0.0], [-1.0, -1.0, -1.0, -1.0, -1.0]])
    rewards = ppo.compute_rewards(logprobs, ref_logprobs, torch.tensor([3.0, 7.0]), torch.tensor([3, 5]), kl_coef=0.1)
    expected = torch.tensor([[-0.1, 0.1, 0.0, 3.0, 0.0], [0.0, 0.0, 0.0, 0.0, 7.2]])
    torch.testing.assert_close(rewards, expected)


def test_eos_just_before_the_end_puts_the_score_in_the_last_position():
    zeros = torch.zeros(1, 4)
    assert ppo.compute_rewards(zeros, zeros, torch.tensor([2.0]), torch.tensor([3]), 0.05).tolist() == [[0, 0, 0, 2.0]]


def test_gae_by_hand():
    rewards, values = torch.tensor([[0.0, 0.0, 1.0]]), torch.tensor([[0.5, 0.6, 0.7]])
    advantages, returns = ppo.compute_gae(rewards, values, gamma=1.0, gae_lambda=0.95)
    torch.testing.assert_close(advantages, torch.tensor([[0.46575, 0.385, 0.3]]))
    torch.testing.assert_close(returns, torch.tensor([[0.96575, 0.985, 1.0]]))
    advantages, _ = ppo.compute_gae(rewards, values, gamma=0.9, gae_lambda=0.5)
    # delta = (.9 x .6 - .5, .9 x .7 - .6, 1 - .7) = (.04, .03, .3); A1 = .03 + .45 x .3; A0 = .04 + .45 x A1
    torch.testing.assert_close(advantages, torch.tensor([[0.11425, 0.165, 0.3]]))


@pytest.mark.parametrize("gamma", [1.0, 0.9])
def test_gae_at_lambda_one_is_the_return_and_at_zero_the_td_error(gamma):
    rewards, values = torch.randn(3, 6), torch.randn(3, 6)
    _, returns = ppo.compute_gae(rewards, values, gamma, 1.0)
    expected = torch.stack([sum(gamma ** (k - t) * rewards[:, k] for k in range(t, 6)) for t in range(6)], dim=1)
    torch.testing.assert_close(returns, expected)
    advantages, _ = ppo.compute_gae(rewards, values, gamma, 0.0)
    torch.testing.assert_close(advantages, rewards + gamma * F.pad(values, (0, 1))[:, 1:] - values)


def test_whitening_by_hand():
    values, mask = torch.tensor([[1.0, 3.0, 100.0], [5.0, -50.0, -50.0]]), torch.tensor([[1, 1, 0], [1, 0, 0]]).bool()
    whitened = ppo.whiten(values, mask, one_rank)
    scale = 1 / math.sqrt(8 / 3)  # variance of 1, 3, 5
    torch.testing.assert_close(whitened, torch.tensor([[-2 * scale, 0, 0], [2 * scale, 0, 0]]))
    kept = ppo.whiten(values, mask, one_rank, shift_mean=False)
    torch.testing.assert_close(kept, torch.tensor([[3 - 2 * scale, 3, 0], [3 + 2 * scale, 0, 0]]))


@pytest.mark.parametrize("shift_mean", [True, False])
def test_whitening_of_two_halves_is_that_of_the_whole(shift_mean):
    values, mask = torch.randn(6, 5) + 2, torch.rand(6, 5) < 0.7
    whole = ppo.whiten(values, mask, one_rank, shift_mean)

    def work(rows, reduce_sum):
        return ppo.whiten(values[rows], mask[rows], reduce_sum, shift_mean)

    halves = on_two_ranks(work, (slice(0, 2),), (slice(2, 6),))  # of different size
    torch.testing.assert_close(torch.cat(halves), whole)


# --------------------------------------------------------------------------------------------------------------- losses


def test_policy_loss_by_hand():
    """Ratios 1.5 (clipped for A > 0), .5 (clipped for A < 0), 1.1, and one that the mask leaves out."""
    ratios = torch.tensor([[1.5, 1.5, 0.5, 0.5, 1.1, 9.0]])
    advantages = torch.tensor([[1.0, -1.0, 1.0, -1.0, 2.0, 5.0]])
    mask = torch.tensor([[1, 1, 1, 1, 1, 0]]).bool()
    loss, sums = ppo.policy_loss(ratios.log(), torch.zeros(1, 6), advantages, mask, cliprange=0.2)
    assert loss.item() == pytest.approx(-1.2 + 1.5 - 0.5 + 0.8 - 2.2)
    kl = sum(0.5 * math.log(ratio) ** 2 for ratio in (1.5, 1.5, 0.5, 0.5, 1.1))
    assert sums.tolist() == pytest.approx([5.1, kl, 2])


def test_policy_loss_passes_no_gradient_where_it_is_clipped():
    new = torch.tensor([[1.5, 1.5, 1.0]]).log().requires_grad_()
    advantages, mask = torch.tensor([[1.0, -1.0, 1.0]]), torch.ones(1, 3).bool()
    ppo.policy_loss(new, torch.zeros(1, 3), advantages, mask, 0.2)[0].backward()
    torch.testing.assert_close(new.grad, torch.tensor([[0.0, 1.5, -1.0]]))


def test_value_loss_by_hand():
    """Half the larger of plain and clipped squared error; the third is clipped and smaller, so the plain one counts."""
    values, returns = torch.zeros(1, 4), torch.tensor([[1.0, 1.0, -1.0, 99.0]])
    new_values, mask = torch.tensor([[0.1, 0.9, 0.9, 5.0]]), torch.tensor([[1, 1, 1, 0]]).bool()
    loss, num_clipped = ppo.value_loss(new_values, values, returns, mask, cliprange_value=0.2)
    assert loss.item() == pytest.approx(0.5 * (0.9**2 + 0.8**2 + 1.9**2))
    assert num_clipped.item() == 1


# --------------------------------------------------------------------------------- log-probabilities, values and scores


@pytest.fixture
def batch(tokenizer) -> SimpleNamespace:
    """Six left-padded queries and right-padded responses of 8 tokens, with and without EOS, and their unpadded rows."""
    queries = torch.tensor(make_sft_rows(tokenizer, 6, 4)["query_token"])
    responses = [
        [5, 6, 0],
        [7, 8, 9, 10, 11, 12, 13, 0],
        [14, 15, 16, 17, 18, 19, 20, 21],
        [0],
        [22, 0],
        [23, 24, 25, 0],
    ]
    tokens = torch.tensor(pad_rows(responses, PAD, length=8))
    return SimpleNamespace(
        queries=queries, responses=tokens, query_rows=[row[row != PAD].tolist() for row in queries], rows=responses
    )


def plain_logprobs(policy, batch, temperature: float) -> list[torch.Tensor]:
    """All logits of one unpadded row after the other -> log-probabilities of its response tokens."""
    results = []
    for query, response in zip(batch.query_rows, batch.rows):
        logits = policy(torch.tensor([query + response])).logits[0].float() / temperature
        logprobs = logits.log_softmax(-1)[len(query) - 1 : -1]
        results.append(logprobs[torch.arange(len(response)), torch.tensor(response)])
    return results


def test_logprobs_and_gradients_are_those_of_the_plain_computation(batch, kind):
    """Response logits only, trimmed and padded, against all logits of single rows: values and gradients."""
    results = []
    for padded in (True, False):
        policy = make_policy(kind)
        if padded:
            logprobs, entropies = ppo.get_logprobs(policy, batch.queries, batch.responses, PAD, 0.7)
            assert entropies is None and (logprobs[batch.responses == PAD] == 0).all()
            logprobs = torch.cat([row[: len(ids)] for row, ids in zip(logprobs, batch.rows)])
        else:
            logprobs = torch.cat(plain_logprobs(policy, batch, 0.7))
        (logprobs * torch.linspace(-1, 1, len(logprobs))).mean().backward()
        gradients = [p.grad.flatten() for p in policy.parameters() if p.grad is not None]
        results.append((logprobs.detach(), torch.cat(gradients)))
    torch.testing.assert_close(results[0], results[1], atol=1e-5, rtol=1e-5)


def test_no_logits_are_taken_of_queries(batch, tokenizer):
    """One row for each response token that is scored, and one for each sequence at every token that is sampled."""
    policy, rows = make_policy("gpt_neox"), []
    policy.get_output_embeddings().register_forward_hook(lambda *call: rows.append(call[-1].shape[:-1].numel()))
    ppo.get_logprobs(policy, batch.queries, batch.responses, PAD, 0.7)
    ppo.generate(policy, batch.queries, tokenizer, 2, 0.7)
    assert rows == [sum(map(len, batch.rows)), len(batch.queries), len(batch.queries)]


@pytest.mark.parametrize("kind", KINDS)
def test_padding_does_not_reach_an_embedding_that_lacks_it(batch, kind):
    policy = make_policy(kind, vocab_size=320)
    wider = F.pad(batch.queries, (9, 0), value=PAD), F.pad(batch.responses, (0, 9), value=PAD)
    with torch.no_grad():
        logprobs, _ = ppo.get_logprobs(policy, *wider, PAD, 1.0)
        for found, expected in zip(logprobs, plain_logprobs(policy, batch, 1.0)):
            torch.testing.assert_close(found[: len(expected)], expected, atol=1e-5, rtol=1e-5)


def test_entropy_is_that_of_the_tempered_distribution(batch):
    policy = make_policy("gpt_neox")
    with torch.no_grad():
        _, entropies = ppo.get_logprobs(policy, batch.queries, batch.responses, PAD, 0.7, entropy=True)
        logprobs = (policy(torch.tensor([batch.query_rows[0] + batch.rows[0]])).logits[0] / 0.7).log_softmax(-1)
    expected = -(logprobs.exp() * logprobs).sum(-1)[len(batch.query_rows[0]) - 1 : -1]
    torch.testing.assert_close(entropies[0, :3], expected, atol=1e-5, rtol=1e-5)


def test_values_are_those_of_the_plain_computation(batch, kind):
    """Value t belongs to the state before response token t; the state after EOS has one, too, where it fits."""
    model = make_reward_model(kind)
    with torch.no_grad():
        values = ppo.get_values(model, batch.queries, batch.responses, PAD)
        for query, response, found in zip(batch.query_rows, batch.rows, values):
            hidden = model.base_model(torch.tensor([query + response])).last_hidden_state
            expected = model.score(hidden)[0, len(query) - 1 :, 0][:8]
            torch.testing.assert_close(found[: len(expected)], expected, atol=1e-5, rtol=1e-5)


def test_scores_are_those_of_the_plain_computation(batch, kind):
    model = make_reward_model(kind)
    with torch.no_grad():
        scores = ppo.get_scores(model, torch.cat([batch.queries, batch.responses], dim=1), PAD)
        for query, response, score in zip(batch.query_rows, batch.rows, scores):
            hidden = model.base_model(torch.tensor([query + response])).last_hidden_state
            torch.testing.assert_close(score, model.score(hidden)[0, -1, 0], atol=1e-5, rtol=1e-5)


# --------------------------------------------------------------------------------------------------- rollout and update


def make_args(**overrides):
    fields = {
        "response_length": 8,
        "micro_batch_size": 2,
        "batch_size": 6,
        "temperature": 1.0,
    }
    return ppo.Args(**fields | overrides)


def fixed_rollout(batch, policy, value_model) -> dict:
    """A rollout of given responses by a policy that has moved since: ratios differ from 1, clipping happens."""
    T, mask = 8, batch.responses != PAD
    logprobs = torch.zeros(6, T)
    with torch.no_grad():
        for i, row in enumerate(plain_logprobs(policy, batch, 1.0)):
            logprobs[i, : len(row)] = row + 0.3 * torch.randn(len(row))
    rollout = {"queries": batch.queries, "responses": batch.responses, "logprobs": logprobs}
    rollout |= {"ref_logprobs": (logprobs + 0.1 * torch.randn(6, T)) * mask, "values": torch.randn(6, T)}
    rollout |= {
        "sampled_logprobs": logprobs,
        "entropies": torch.rand(6, T),
        "scores": torch.randn(6),
        "num_tokens": mask.sum(1),
    }
    return rollout | {"has_eos": (batch.responses == EOS_ID).any(1)}


def test_missing_eos_replaces_the_score(batch):
    """DESIGN: the score IS -1, not lowered by 1; summaries that end keep theirs."""
    rollout = fixed_rollout(batch, make_policy("gpt_neox"), None)
    rollout["scores"] = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0, 6.0])
    assert rollout["has_eos"].tolist() == [True, True, False, True, True, True]
    assert ppo.add_advantages(rollout, make_args(), one_rank)["scores"].tolist() == [1, 2, -1, 4, 5, 6]
    other = ppo.add_advantages(rollout, make_args(missing_eos_score=-7.0), one_rank)["scores"]
    assert other.tolist() == [1, 2, -7, 4, 5, 6]


def test_advantages_are_white_over_all_response_tokens(batch):
    rollout = ppo.add_advantages(fixed_rollout(batch, make_policy("gpt_neox"), None), make_args(), one_rank)
    kept = rollout["advantages"][rollout["response_mask"]]
    assert kept.mean().item() == pytest.approx(0, abs=1e-6)
    assert kept.square().mean().item() == pytest.approx(1, abs=1e-4)
    assert (rollout["advantages"][~rollout["response_mask"]] == 0).all()
    assert rollout["response_mask"].sum() == sum(map(len, batch.rows))


def test_returns_by_hand(batch):
    """lambda 1: the return of a token is the sum of rewards from it on; the state after EOS returns the score."""
    rollout = fixed_rollout(batch, make_policy("gpt_neox"), None)
    rollout = ppo.add_advantages(rollout, make_args(gae_lambda=1.0, kl_coef=0.5), one_rank)
    kl = rollout["logprobs"] - rollout["ref_logprobs"]
    for i, row in enumerate(batch.rows):
        score = rollout["scores"][i] if 0 in row else -1.0
        for t in range(min(len(row) + 1, 8)):
            assert rollout["returns"][i, t].item() == pytest.approx((score - 0.5 * kl[i, t:].sum()).item(), abs=1e-5)


def test_returns_at_lambda_below_1_by_hand(batch):
    """Here values do not cancel: they count at the tokens and at the state after EOS, and are 0 after that."""
    plain = fixed_rollout(batch, make_policy("gpt_neox"), None)
    rollout = ppo.add_advantages(plain, make_args(gae_lambda=0.9, gamma=0.8, kl_coef=0.5), one_rank)
    kl = rollout["logprobs"] - rollout["ref_logprobs"]
    for i, row in enumerate(batch.rows):
        n = min(len(row) + 1, 8)  # states of the tokens, and the one after EOS
        rewards = (-0.5 * kl[i, :n]).tolist()
        rewards[-1] += rollout["scores"][i].item()
        values, advantage = [*plain["values"][i, :n].tolist(), 0.0], 0.0
        for t in reversed(range(n)):
            advantage = rewards[t] + 0.8 * values[t + 1] - values[t] + 0.8 * 0.9 * advantage
            assert rollout["returns"][i, t].item() == pytest.approx(advantage + values[t], abs=1e-5)


def test_reward_whitening_keeps_the_mean(batch, monkeypatch):
    seen = {}
    real = ppo.compute_gae
    monkeypatch.setattr(ppo, "compute_gae", lambda rewards, *rest: seen.update(rewards=rewards) or real(rewards, *rest))
    rollout = fixed_rollout(batch, make_policy("gpt_neox"), None)
    mask = ppo.add_advantages(rollout, make_args(), one_rank)["value_mask"]
    plain = seen["rewards"][mask]
    ppo.add_advantages(rollout, make_args(whiten_rewards=True), one_rank)
    white = seen["rewards"][mask]
    assert white.mean().item() == pytest.approx(plain.mean().item(), abs=1e-5)
    assert white.var(correction=0).item() == pytest.approx(1, abs=1e-4) != pytest.approx(plain.var(correction=0).item())


def test_advantages_of_two_ranks_are_those_of_the_whole(batch):
    rollout, args = fixed_rollout(batch, make_policy("gpt_neox"), None), make_args(whiten_rewards=True)
    whole = ppo.add_advantages(rollout, args, one_rank)

    def work(rows, reduce_sum):
        half = {name: tensor[rows] for name, tensor in rollout.items()}
        half = ppo.add_advantages(half, args, reduce_sum)
        return half, ppo.summarise_rollout(half | {"entropies": rollout["entropies"][rows]}, 0.05, reduce_sum)

    halves = on_two_ranks(work, (slice(0, 2),), (slice(2, 6),))
    for name in ("advantages", "returns"):
        torch.testing.assert_close(torch.cat([half[name] for half, _ in halves]), whole[name], atol=1e-5, rtol=1e-5)
    expected = ppo.summarise_rollout(whole, 0.05, one_rank)
    for _, metrics in halves:
        assert metrics == pytest.approx(expected, abs=1e-5)


def test_rollout_metrics_by_hand():
    """Two summaries of 3 (without EOS) and 1 tokens; what the masks leave out is absurd and must not count."""
    response_mask, value_mask = ppo.make_masks(torch.tensor([3, 1]), 3)
    rollout = {
        "response_mask": response_mask,
        "value_mask": value_mask,
        "scores": torch.tensor([-1.0, 3.0]),
        "has_eos": torch.tensor([False, True]),
        "num_tokens": torch.tensor([3, 1]),
        "logprobs": torch.tensor([[-1.0, -1.0, -1.0], [-2.0, 0.0, 0.0]]),
        "ref_logprobs": torch.tensor([[-2.0, -1.0, -1.5], [-2.5, 0.0, 0.0]]),
        "sampled_logprobs": torch.tensor([[-1.1, -1.0, -0.9], [-2.2, 1e6, 1e6]]),
        "entropies": torch.tensor([[1.0, 2.0, 3.0], [2.0, 1e6, 1e6]]),
        "values": torch.tensor([[1.0, 1.0, 1.0], [2.0, 0.0, 1e6]]),
        "returns": torch.tensor([[1.0, 1.0, 1.0], [3.0, 4.0, -1e6]]),
    }
    metrics = ppo.summarise_rollout(rollout, kl_coef=0.1, reduce_sum=one_rank)
    expected = {"score": 1.0, "kl": 1.0, "eos_rate": 0.5, "response_length": 2.0, "entropy": 2.0, "rlhf_reward": 0.9}
    assert {name: metrics[f"objective/{name}"] for name in expected} == pytest.approx(expected)
    assert metrics["policy/sampling_gap"] == pytest.approx(0.1)
    assert metrics["policy/sampling_kl"] == pytest.approx(-0.05)
    assert metrics["value/mean"] == pytest.approx(1.0)
    # returns 1 1 1 3 4: variance 1.6; errors 0 0 0 1 4: variance 2.4
    assert metrics["value/explained_variance"] == pytest.approx(1 - 2.4 / 1.6)


def plain_update_gradients(batch, policy, value_model, rollout: dict, args) -> tuple[torch.Tensor, dict]:
    """Gradients of the losses as the papers have them: single unpadded rows, all logits, one mean over all tokens."""
    logprobs = plain_logprobs(policy, batch, args.temperature)
    policy_terms, value_terms, ratios = [], [], []
    for i, (query, response) in enumerate(zip(batch.query_rows, batch.rows)):
        n, m = len(response), min(len(response) + 1, args.response_length)
        ratio = (logprobs[i] - rollout["logprobs"][i, :n]).exp()
        advantages = rollout["advantages"][i, :n]
        clipped = ratio.clamp(1 - args.cliprange, 1 + args.cliprange)
        policy_terms.append(-torch.min(ratio * advantages, clipped * advantages))
        hidden = value_model.base_model(torch.tensor([query + response])).last_hidden_state
        values = value_model.score(hidden)[0, len(query) - 1 :, 0][:m]
        old, returns = rollout["values"][i, :m], rollout["returns"][i, :m]
        clipped = old + (values - old).clamp(-args.cliprange_value, args.cliprange_value)
        value_terms.append(0.5 * torch.max((values - returns) ** 2, (clipped - returns) ** 2))
        ratios.append(ratio)
    policy_mean, value_mean = torch.cat(policy_terms).mean(), torch.cat(value_terms).mean()
    (policy_mean + args.vf_coef * value_mean).backward()
    parts = ((p, p.grad) for model in (policy, value_model) for p in model.parameters())
    gradients = [(torch.zeros_like(p) if grad is None else grad.clone()).flatten() for p, grad in parts]
    metrics = {"policy/loss": policy_mean, "value/loss": value_mean, "policy/ratio": torch.cat(ratios).mean()}
    return torch.cat(gradients), {name: value.item() for name, value in metrics.items()}


@pytest.mark.parametrize("micro_batch_size", [1, 4, 6])
def test_update_is_that_of_the_plain_computation(tmp_path, batch, kind, micro_batch_size, monkeypatch):
    """One optimiser step: trimmed, sorted by length and accumulated, against single rows; losses and gradients."""
    clips = {"cliprange": 0.1, "cliprange_value": 0.6}
    args = make_args(num_ppo_epochs=1, micro_batch_size=micro_batch_size, **clips)
    policy, value_model = make_policy(kind), make_reward_model(kind, seed=1)
    rollout = ppo.add_advantages(fixed_rollout(batch, policy, value_model), args, one_rank)
    expected, expected_metrics = plain_update_gradients(batch, policy, value_model, rollout, args)
    policy.zero_grad()
    value_model.zero_grad()

    accelerator = Accelerator(project_dir=str(tmp_path))
    model = ppo.ActorCritic(policy, value_model)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
    found, real = [], ppo.step

    def step(*inputs):
        found.extend(parameter.grad.flatten() for parameter in model.parameters())
        return real(*inputs)

    monkeypatch.setattr(ppo, "step", step)
    steps = list(ppo.update_model(accelerator, model, optimizer, rollout, PAD, args, update=0))
    assert len(steps) == 1
    for name, value in expected_metrics.items():
        assert steps[0][name] == pytest.approx(value, abs=1e-5)
    assert steps[0]["train/grad_norm"] == pytest.approx(expected.norm().item(), rel=1e-5)
    torch.testing.assert_close(torch.cat(found), expected, atol=1e-5, rtol=1e-5)


def test_minibatches_are_the_steps_and_cover_each_row_once_an_epoch(tmp_path, batch, monkeypatch):
    args, seen = make_args(num_ppo_epochs=3, num_minibatches=2, micro_batch_size=3), []
    policy, value_model = make_policy("gpt_neox"), make_reward_model("gpt_neox")
    rollout = ppo.add_advantages(fixed_rollout(batch, policy, value_model), args, one_rank)
    real = ppo.make_micro_batches
    monkeypatch.setattr(ppo, "make_micro_batches", lambda rows, *rest: seen.append(rows.tolist()) or real(rows, *rest))
    accelerator = Accelerator(project_dir=str(tmp_path))
    model = ppo.ActorCritic(policy, value_model)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-4))
    steps = list(ppo.update_model(accelerator, model, optimizer, rollout, PAD, args, update=0))
    assert len(steps) == len(seen) == 6
    assert all(sorted(seen[i] + seen[i + 1]) == list(range(6)) for i in (0, 2, 4))
    assert len({tuple(rows) for rows in seen}) > 2  # shuffled anew
    assert {int(state["step"]) for state in optimizer.state.values()} == {6}


def frozen_steps(tmp_path, batch, args, rows=slice(None), update: int = 0) -> list[dict]:
    """Steps of update_model at learning rate 0 on rows of one rollout."""
    policy, value_model = make_policy("gpt_neox"), make_reward_model("gpt_neox", seed=1)
    torch.manual_seed(0)
    rollout = ppo.add_advantages(fixed_rollout(batch, policy, value_model), args, one_rank)
    accelerator, model = Accelerator(project_dir=str(tmp_path)), ppo.ActorCritic(policy, value_model)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.0))
    rollout = {name: tensor[rows] for name, tensor in rollout.items()}
    return list(ppo.update_model(accelerator, model, optimizer, rollout, PAD, args, update))


def test_a_minibatch_is_a_mean_over_its_own_tokens(tmp_path, batch, monkeypatch):
    seen, real = [], ppo.make_micro_batches
    monkeypatch.setattr(ppo, "make_micro_batches", lambda rows, *rest: seen.append(rows) or real(rows, *rest))
    steps = frozen_steps(tmp_path, batch, make_args(num_ppo_epochs=1, num_minibatches=2, micro_batch_size=3))
    for step, rows in zip(steps, list(seen), strict=True):
        (alone,) = frozen_steps(tmp_path, batch, make_args(num_ppo_epochs=1, micro_batch_size=3), rows=rows)
        assert step == pytest.approx(alone, rel=1e-4)


def test_metrics_of_a_step_are_means_over_their_own_tokens(tmp_path, batch, monkeypatch):
    policy_sums = torch.tensor([1.0, 2.0, 3.0])
    monkeypatch.setattr(ppo, "policy_loss", lambda new, *rest: (new.sum(), rest[2].sum() * policy_sums))
    monkeypatch.setattr(ppo, "value_loss", lambda new, *rest: (new.sum(), rest[2].sum() * 4.0))
    (step,) = frozen_steps(tmp_path, batch, make_args(num_ppo_epochs=1))
    names = ("policy/ratio", "policy/approxkl", "policy/clipfrac", "value/clipfrac")
    assert [step[name] for name in names] == pytest.approx([1, 2, 3, 4])


def test_each_update_shuffles_anew(tmp_path, batch, monkeypatch):
    seen, real = [], ppo.make_micro_batches
    monkeypatch.setattr(ppo, "make_micro_batches", lambda rows, *rest: seen.append(rows.tolist()) or real(rows, *rest))
    for update in (0, 1):
        frozen_steps(tmp_path, batch, make_args(num_minibatches=2, micro_batch_size=3), update=update)
    assert seen[: len(seen) // 2] != seen[len(seen) // 2 :]


def test_a_ranks_loss_is_scaled_up_since_ranks_average(tmp_path, batch, monkeypatch):
    (one,) = frozen_steps(tmp_path, batch, make_args(num_ppo_epochs=1))
    monkeypatch.setattr(Accelerator, "num_processes", property(lambda accelerator: 2))
    (two,) = frozen_steps(tmp_path, batch, make_args(num_ppo_epochs=1))
    assert two["train/grad_norm"] == pytest.approx(2 * one["train/grad_norm"], rel=1e-5)
    assert two["policy/loss"] == one["policy/loss"]


def test_rollout_holds_what_the_plain_computation_gives(tokenizer, kind):
    """Sampled, sorted by length, trimmed, in micro-batches; each quantity row by row from the unpadded sequence."""
    queries = torch.tensor(make_sft_rows(tokenizer, 7, 4)["query_token"])
    policy, ref_policy = make_policy(kind), make_policy(kind, seed=3)
    value_model, reward_model = make_reward_model(kind, seed=1), make_reward_model(kind, seed=2)

    def favour_eos(module, args, output):
        output[..., EOS_ID] += 6.0 if kind == "gpt2" else 4.0

    for model in (policy, ref_policy):
        model.get_output_embeddings().register_forward_hook(favour_eos)
    torch.manual_seed(1)
    args = make_args(temperature=0.7, response_length=9)
    rollout = ppo.collect_rollout(
        ppo.ActorCritic(policy, value_model), ref_policy, reward_model, queries, tokenizer, args
    )
    lengths = rollout["num_tokens"].tolist()
    assert 1 < len(set(lengths))  # or the test says nothing on padding
    rows = [row[:n].tolist() for row, n in zip(rollout["responses"], lengths)]
    batch = SimpleNamespace(query_rows=[row[row != PAD].tolist() for row in queries], rows=rows)
    with torch.no_grad():
        plain = {"logprobs": plain_logprobs(policy, batch, 0.7), "ref_logprobs": plain_logprobs(ref_policy, batch, 0.7)}
        for i, (query, row) in enumerate(zip(batch.query_rows, rows)):
            ids = torch.tensor([query + row])
            values = value_model.score(value_model.base_model(ids).last_hidden_state)[0, len(query) - 1 :, 0]
            score = reward_model.score(reward_model.base_model(ids).last_hidden_state)[0, -1, 0]
            m, n = min(len(row) + 1, 9), len(row)
            torch.testing.assert_close(rollout["values"][i, :m], values[:m], atol=1e-5, rtol=1e-5)
            torch.testing.assert_close(rollout["scores"][i], score, atol=1e-5, rtol=1e-5)
            assert rollout["has_eos"][i] == (0 in row)
            for name, expected in plain.items():
                torch.testing.assert_close(rollout[name][i, :n], expected[i], atol=1e-5, rtol=1e-5)
                assert (rollout[name][i, n:] == 0).all()


# ------------------------------------------------------------------------------------------------- first-update checks


def first_update(kl=0.0, ratio=1.0, taken=4, gap=0.0):
    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.AdamW([parameter])
    for _ in range(taken):
        parameter.grad = torch.ones(1)
        optimizer.step()
    metrics = {"objective/kl": kl, "objective/response_length": 10.0, "policy/sampling_kl": gap}
    ppo.check_first_update(metrics, [{"policy/ratio": ratio}] * 4, optimizer, 4, 1e-3)


def test_first_update_as_it_should_be_passes():
    first_update()


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"kl": 0.5}, "KL .* is 0.05000 a token, expected 0"),
        ({"kl": -0.5}, "KL"),
        ({"ratio": 1.01}, "ratio .* is 1.01000, expected 1"),
        ({"ratio": 0.99}, "ratio .* is 0.99000, expected 1"),
        ({"gap": 0.01}, "tokens are 0.01000 nats less likely when scored"),
        ({"gap": -0.01}, "tokens are -0.01000 nats less likely"),
        ({"taken": 8}, "8 optimiser steps were taken, expected 4"),
        ({"taken": 0}, "0 optimiser steps were taken, expected 4"),
    ],
)
def test_first_update_that_is_wrong_stops_the_run(wrong, message):
    with pytest.raises(RuntimeError, match=message):
        first_update(**wrong)


def test_sampling_that_sees_the_padding_stops_the_run(tmp_path, chain, run_ppo, monkeypatch):
    model_inputs = ppo.model_inputs

    def see_all(tokens, pad_token_id):
        return model_inputs(tokens, pad_token_id) | {"attention_mask": torch.ones_like(tokens)}

    monkeypatch.setattr(ppo, "model_inputs", see_all)
    with pytest.raises(RuntimeError, match="first update: tokens are .* nats less likely"):
        run_ppo(chain.sft, chain.reward, tmp_path / "run")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("ref_logprobs", "KL from the SFT policy"),
        ("logprobs", "ratio of new and old policy"),
        ("sampled_logprobs", "nats less likely when scored"),
    ],
)
def test_run_stops_at_a_wrong_first_update(tmp_path, chain, run_ppo, monkeypatch, name, message):
    """Log-probabilities that are off by about 1%, as by dropout, another precision or another temperature."""
    real = ppo.collect_rollout

    def spoil(*inputs):
        rollout = real(*inputs)
        return rollout | {name: rollout[name] * 1.005}

    monkeypatch.setattr(ppo, "collect_rollout", spoil)
    with pytest.raises(RuntimeError, match=message):
        run_ppo(chain.sft, chain.reward, tmp_path / "ppo")
    assert not (tmp_path / "ppo" / "model.safetensors").exists()


# ----------------------------------------------------------------------------------------------------------- whole runs


def test_first_ratio_is_one_and_first_kl_zero(chain):
    events = read_events(chain.ppo)
    assert events["objective/kl"][0] == (8, pytest.approx(0, abs=1e-4))
    assert [step for step, _ in events["objective/score"]] == [8, 16, 24]
    rates = [value for _, value in events["train/lr"]]
    assert rates == pytest.approx([1e-3, 1e-3 * 2 / 3, 1e-3 / 3])


def test_prompts_are_the_stream_of_train_rows(tmp_path, chain, run_ppo, monkeypatch, sft_dataset):
    """Each row once a pass, shuffled anew; 13 rows in batches of 8."""
    real, seen = ppo.collect_rollout, []

    def record(model, ref_policy, reward_model, queries, *rest):
        seen.extend(tuple(row[row != PAD].tolist()) for row in queries)
        return real(model, ref_policy, reward_model, queries, *rest)

    monkeypatch.setattr(ppo, "collect_rollout", record)
    run_ppo(chain.sft, chain.reward, tmp_path / "ppo", total_episodes=32, eval_rows=2)
    train = [tuple(t for t in row if t != PAD) for row in load_from_disk(sft_dataset)["train"]["query_token"]]
    expected = [train[i] for i in ppo.stream_rows(44413, 13, 0, 32)]
    for start in range(0, 32, 8):
        assert sorted(seen[start : start + 8]) == sorted(expected[start : start + 8])


def test_value_model_starts_as_the_reward_model(tmp_path, chain, run_ppo):
    """With lr 0 what is saved is the SFT policy and the reward model, its normalisation included."""
    _, folder = run_ppo(chain.sft, chain.reward, tmp_path / "ppo", lr=0.0, total_episodes=8)
    value_model, reward_model = (ppo.load_reward_model(str(p), PAD) for p in (folder / "value_model", chain.reward))
    for name, weight in reward_model.state_dict().items():
        assert torch.equal(weight, value_model.state_dict()[name])
    policies = [AutoModelForCausalLM.from_pretrained(path).state_dict() for path in (folder, chain.sft)]
    assert all(torch.equal(weight, policies[1][name]) for name, weight in policies[0].items())


def test_run_trains_policy_and_value_model_but_not_the_reward_model(chain):
    for path, start in ((chain.ppo, chain.sft),):
        weights, before = (AutoModelForCausalLM.from_pretrained(p).state_dict() for p in (path, start))
        assert any(not torch.equal(weights[name], before[name]) for name in weights)
    value_model, reward_model = (ppo.load_reward_model(str(p), PAD) for p in (chain.ppo / "value_model", chain.reward))
    assert not torch.equal(value_model.score.weight, reward_model.score.weight)


def test_final_samples_are_the_whole_validation_split(chain, tokenizer, sft_dataset):
    """And their scores are what the saved reward model gives the saved texts' references."""
    rows = [json.loads(line) for line in (chain.ppo / "samples_validation.jsonl").read_text().splitlines()]
    keys = {"query", "response", "reference", "score", "reference_score"}
    assert len(rows) == 6 and all(row.keys() == keys for row in rows)
    validation = load_from_disk(sft_dataset)["validation"]
    assert [row["query"] for row in rows] == validation["query"][:]
    assert [row["reference"] + "<|endoftext|>" for row in rows] == validation["reference_response"][:]
    model = ppo.load_reward_model(str(chain.reward), PAD)
    tokens = torch.tensor(validation["query_reference_response_token"])
    with torch.no_grad():
        expected = ppo.get_scores(model, tokens, PAD).tolist()
    assert [row["reference_score"] for row in rows] == pytest.approx(expected, abs=1e-4)
    metrics = chain.metrics["ppo"]
    assert metrics["eval/validation/reference_score"] == pytest.approx(sum(expected) / 6, abs=1e-4)
    assert metrics["eval/validation/score"] == pytest.approx(sum(row["score"] for row in rows) / 6, abs=1e-4)


def test_the_same_few_posts_are_sampled_through_training(chain):
    texts = [path.read_text() for path in sorted(chain.ppo.rglob("samples_training*")) if path.is_file()]
    texts += [path.read_text() for path in sorted((chain.ppo / "samples_training").glob("*.jsonl"))]
    rows = [json.loads(line) for text in texts for line in text.splitlines()]
    assert len(rows) >= 4 * 2 and all({"query", "response"} <= row.keys() for row in rows)
    queries = [row["query"] for row in rows]
    assert all(queries.count(query) == 4 for query in queries)  # before training, and after each of the three updates
    of_sft = [json.loads(line) for line in (chain.sft / "samples_validation.jsonl").read_text().splitlines()]
    assert [row["response"] for row in rows[:4]] == [row["response"] for row in of_sft[:4]]


def test_policy_learns_to_end_its_summaries(tmp_path, tokenizer, chain, run_ppo):
    """A reward that any policy can learn: -10 for a missing EOS. The SFT policy ends about half of its summaries."""
    policy = make_policy("gpt_neox", initializer_range=0.1)
    lean_to_eos(policy, 2.5)
    policy.save_pretrained(tmp_path / "sft")
    tokenizer.save_pretrained(tmp_path / "sft")
    settings = {"total_episodes": 640, "batch_size": 32, "micro_batch_size": 32, "lr": 3e-3, "missing_eos_score": -10.0}
    _, folder = run_ppo(tmp_path / "sft", chain.reward, tmp_path / "ppo", response_length=8, **settings)
    rates = [value for _, value in read_events(folder)["objective/eos_rate"]]
    assert 0.1 < rates[0] < 0.7 and sum(rates[-3:]) / 3 > 0.95


def test_sampling_more_often_does_not_change_the_run(tmp_path, chain, run_ppo):
    weights = []
    for every in (1, 2, 100):
        _, folder = run_ppo(chain.sft, chain.reward, tmp_path / str(every), sample_every=every)
        weights.append(AutoModelForCausalLM.from_pretrained(folder).state_dict())
    for other in weights[1:]:
        assert all(torch.equal(weight, other[name]) for name, weight in weights[0].items())


def test_models_of_all_kinds_train(tmp_path, base_models, run_reward, run_ppo, kind):
    _, reward_path = run_reward(base_models[kind], tmp_path / "reward", max_updates=1, eval_rows=2)
    metrics, folder = run_ppo(base_models[kind], reward_path, tmp_path / "ppo", total_episodes=16)
    assert all(math.isfinite(value) for value in metrics.values())
    assert ppo.load_reward_model(str(folder / "value_model"), PAD).config.model_type == kind


def test_offload_and_checkpointing_change_nothing(tmp_path, chain, run_ppo):
    results = []
    for on in (False, True):
        settings = {"offload": on, "gradient_checkpointing": on, "total_episodes": 16}
        _, folder = run_ppo(chain.sft, chain.reward, tmp_path / str(on), **settings)
        events = read_events(folder)
        results.append([value for key in ("objective/score", "policy/loss", "value/loss") for _, value in events[key]])
    assert results[0] == pytest.approx(results[1], abs=1e-4)


def test_papers_settings_are_the_defaults():
    """Table 7."""
    args = ppo.Args()
    found = (args.total_episodes, args.batch_size, args.num_minibatches, args.num_ppo_epochs, args.lr, args.adam_eps)
    assert found == (1_000_000, 512, 1, 4, 3e-6, 1e-5)
    found = (args.kl_coef, args.gamma, args.gae_lambda, args.cliprange, args.cliprange_value, args.vf_coef)
    assert found == (0.05, 1.0, 0.95, 0.2, 0.2, 0.1)
    assert (args.temperature, args.response_length, args.missing_eos_score, args.whiten_rewards) == (
        0.7,
        53,
        -1.0,
        False,
    )
