"""ilql.py: losses, packed actions, a chain with known values, memory, sampling, checkpoints, whole runs, real input."""

import itertools
import json
import math
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from conftest import (
    ENVIRONMENT,
    ROOT,
    lean_to_eos,
    make_config,
    make_policy,
    need_shared,
    pad_rows,
    read_events,
    run_main,
)
from datasets import Dataset, DatasetDict, load_from_disk
from safetensors.torch import load_file, save_file
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, AutoTokenizer, GPTNeoXConfig, TemperatureLogitsWarper, TopKLogitsWarper

import ilql
import sft
import tldr_dataset

PAD = 320
QUERIES = [[5, 6, 7, 8], [9], [11, 12, 13]]
RESPONSES = [[21, 22, 0], [0], [31, 32, 33, 34, 35, 0]]
REWARDS = [1.0, -1.0, 0.5]
SCALES = {"gamma": 0.9, "tau": 0.7, "cql_scale": 0.3, "awac_scale": 0.8, "beta_train": 0.5}


def make_model(kind: str = "gpt_neox", seed: int = 0, **overrides) -> ilql.ILQL:
    """A tiny ILQL whose target heads are not its Q heads."""
    model = ilql.ILQL(make_policy(kind, seed, **overrides)).eval()
    for parameter in model.target_q_heads.parameters():
        parameter.data += 0.2 * torch.randn_like(parameter)
    return model


def make_batch(wider: int = 0, queries=QUERIES, responses=RESPONSES, rewards=REWARDS) -> dict:
    """The rows above, with `wider` columns of padding more than needed."""
    width = (max(map(len, queries)) + wider, max(map(len, responses)) + wider)
    columns = (pad_rows(queries, PAD, True, width[0]), pad_rows(responses, PAD, length=width[1]))
    return ilql.pack_actions(*map(torch.tensor, columns), torch.tensor(rewards), PAD)


def plain_outputs(model, query: list[int], response: list[int]) -> tuple:
    """What transformers' own forward pass says, unpadded, with every head on every position: logits, Q1, Q2, smaller
    target Q of each token of the vocabulary, V."""
    outputs = model.policy(torch.tensor([query + response]), output_hidden_states=True)
    hidden = outputs.hidden_states[-1][0]  # (L, D)
    qs, targets = ([head(hidden) for head in heads] for heads in (model.q_heads, model.target_q_heads))
    return outputs.logits[0], *qs, torch.minimum(*targets).detach(), model.v_head(hidden)[:, 0]


def plain_loss(model, queries, responses, rewards, gamma, tau, cql_scale, awac_scale, beta_train) -> dict:
    """The four terms by the formulas of DESIGN, one token after the other, summed over all."""
    terms = {name: 0.0 for name in ("q_loss", "v_loss", "cql_loss", "awac_loss", "q", "v", "target_q", "advantage")}
    for query, response, reward in zip(queries, responses, rewards):
        logits, q1, q2, target, v = plain_outputs(model, query, response)
        for i, action in enumerate(response):
            s, is_last = len(query) - 1 + i, i + 1 == len(response)
            y = reward if is_last else gamma * v[s + 1].item()
            u = target[s, action] - v[s]
            terms["q_loss"] += (q1[s, action] - y) ** 2 + (q2[s, action] - y) ** 2
            terms["v_loss"] += abs(tau - (1 if u.item() < 0 else 0)) * u**2
            terms["cql_loss"] -= q1[s].log_softmax(0)[action] + q2[s].log_softmax(0)[action]
            terms["awac_loss"] -= math.exp(beta_train * u.item()) * logits[s].log_softmax(0)[action]
            terms["q"] += (q1[s, action] + q2[s, action]).item() / 2
            terms["v"] += v[s].item()
            terms["target_q"] += target[s, action].item()
            terms["advantage"] += u.item()
    losses = terms["q_loss"] + terms["v_loss"], cql_scale * terms["cql_loss"], awac_scale * terms["awac_loss"]
    return {"loss": sum(losses)} | terms


def gradients(model) -> dict[str, torch.Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


# --------------------------------------------------------------------------------------------------------------- losses


def by_hand(next_value: float = 9.0) -> tuple[tuple, dict]:
    """DESIGN 4, number 3: two actions of one response; behind it another response, of one action, that costs nothing.
    The value in its state is what stands where the first response is over."""
    v = torch.tensor([0.5, 0.2, next_value], requires_grad=True)
    actions = torch.tensor([0, 1, 0])
    qs = [
        torch.zeros(3, 2).scatter(1, actions[:, None], torch.tensor(q)[:, None]) for q in ([0.4, 0.6, 1], [0.6, 0.8, 1])
    ]
    target_q = torch.tensor([0.3, 0.5, next_value])
    batch = {"actions": actions, "rewards": torch.tensor([0.0, 1, 1]), "is_last": torch.tensor([False, True, True])}
    return (torch.zeros(3, 2), [q.requires_grad_() for q in qs], target_q, v), batch


def test_q_and_v_loss_by_hand():
    for next_value in (9.0, -50.0):
        outputs, batch = by_hand(next_value)
        loss, sums = ilql.ilql_loss(outputs, batch, 0.9, 0.7, 0.0, 0.0, 0.0)
        assert sums["q_loss"].item() / 2 == pytest.approx(0.2124, abs=1e-6)
        assert sums["v_loss"].item() / 2 == pytest.approx(0.0375, abs=1e-6)
        assert loss.item() == pytest.approx(2 * (0.2124 + 0.0375), abs=1e-6)


def test_gradients_by_hand():
    """Q: 2 (Q - y) with y = [.18, 1], from L_Q alone; V: -2 |tau - 1[u < 0]| u with u = [-.2, .3], from L_V alone: the
    target y moves no V, and the weight of the language model's loss moves nothing."""
    outputs, batch = by_hand()
    loss, _ = ilql.ilql_loss(outputs, batch, 0.9, 0.7, 0.0, 1.0, 3.0)
    loss.backward()
    _, (q1, q2), _, v = outputs
    assert v.grad.tolist() == pytest.approx([-2 * 0.3 * -0.2, -2 * 0.7 * 0.3, 0])
    assert q1.grad.tolist() == [pytest.approx([0.44, 0]), pytest.approx([0, -0.8]), [0, 0]]
    assert q2.grad.tolist() == [pytest.approx([0.84, 0]), pytest.approx([0, -0.4]), [0, 0]]


@pytest.mark.parametrize(("beta_train", "expected"), [(0.0, 1.386294), (2.0, 1.727627)])
def test_awac_and_cql_by_hand(beta_train, expected):
    """DESIGN 4, number 4: uniform logits, vocabulary 4, u = [-.2, .3]."""
    q, v = torch.zeros(2, 4), torch.tensor([0.4, 0.1])
    batch = {"actions": torch.tensor([1, 3]), "rewards": torch.zeros(2), "is_last": torch.tensor([False, True])}
    outputs = (torch.zeros(2, 4), [q, q], torch.tensor([0.2, 0.4]), v)
    loss, sums = ilql.ilql_loss(outputs, batch, 0.9, 0.7, 0.5, 2.0, beta_train)
    assert sums["awac_loss"].item() / 2 == pytest.approx(expected, abs=1e-6)
    assert sums["cql_loss"].item() / 2 == pytest.approx(2 * math.log(4))
    parts = sums["q_loss"] + sums["v_loss"] + 0.5 * sums["cql_loss"] + 2.0 * sums["awac_loss"]
    assert loss.item() == pytest.approx(parts.item())


@pytest.mark.parametrize("tau", [0.5, 0.6, 0.9])
def test_fixed_point_of_the_expectile(tau):
    """Where target Q is 1 in a fourth of the data and 0 else, L_V is least at V = tau / (tau + 3 (1 - tau)):
    the mean for tau = .5, and for tau -> 1 the best of the data."""
    target_q, value = torch.tensor([1.0, 0, 0, 0]), torch.zeros((), requires_grad=True)
    batch = {"actions": torch.zeros(4).long(), "rewards": torch.zeros(4), "is_last": torch.ones(4).bool()}
    q = torch.zeros(4, 1)
    optimizer = torch.optim.SGD([value], lr=0.1)
    for _ in range(300):
        loss, _ = ilql.ilql_loss((q, [q, q], target_q, value.expand(4)), batch, 0.9, tau, 0.0, 0.0, 0.0)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert value.item() == pytest.approx(tau / (tau + 3 * (1 - tau)), abs=1e-4)


def test_polyak_by_hand():
    """DESIGN 4, number 6; also where the source is in bf16 and a step is far below its resolution."""
    target, source = torch.nn.Linear(1, 1), torch.nn.Linear(1, 1)
    for module, value in ((target, 0.0), (source, 1.0)):
        for parameter in module.parameters():
            parameter.data.fill_(value)
    for _ in range(3):
        ilql.polyak_update(target, source, 0.25)
    assert (target.weight.item(), target.bias.item()) == pytest.approx((0.578125, 0.578125))
    assert source.weight.item() == 1.0
    ilql.polyak_update(target, source.bfloat16(), 1e-4)
    assert target.weight.item() == pytest.approx(0.578125 + 1e-4 * 0.421875, abs=1e-7)


def test_targets_move_while_the_model_is_in_bf16():
    """As DeepSpeed has it: all is put into bf16, and the target heads back into fp32."""
    model = make_model().bfloat16()
    model.target_q_heads.float()
    before = [parameter.clone() for parameter in model.target_q_heads.parameters()]
    loss, _ = ilql.ilql_loss(model(make_batch(), PAD), make_batch(), **SCALES)
    loss.backward()
    ilql.polyak_update(model.target_q_heads, model.q_heads, 1e-4)
    for old, new, q in zip(before, model.target_q_heads.parameters(), model.q_heads.parameters()):
        torch.testing.assert_close(new - old, 1e-4 * (q.float() - old), atol=1e-7, rtol=1e-2)
    assert all(torch.isfinite(p.grad).all() for p in model.q_heads.parameters())


# ------------------------------------------------------------------------------------------------------- packed actions


def test_actions_by_hand():
    """Query [PAD] 5 6 of response 7 8 EOS, and query 9 10 11 of response EOS; two columns are padding everywhere."""
    queries, responses = [[PAD, PAD, 5, 6], [PAD, 9, 10, 11]], [[7, 8, 0, PAD], [0, PAD, PAD, PAD]]
    batch = ilql.pack_actions(torch.tensor(queries), torch.tensor(responses), torch.tensor([2.0, -3.0]), PAD)
    assert batch["tokens"].tolist() == [[PAD, 5, 6, 7, 8, 0], [9, 10, 11, 0, PAD, PAD]]
    assert batch["actions"].tolist() == [7, 8, 0, 0]
    assert batch["rows"].tolist() == [0, 0, 0, 1] and batch["positions"].tolist() == [2, 3, 4, 2]
    assert batch["is_last"].tolist() == [False, False, True, True]
    assert batch["rewards"].tolist() == [0, 0, 2, -3]


def test_gathered_heads_are_those_on_all_positions(kind):
    """Loss, each term, and all gradients; queries and responses of three lengths, padded to any width, [PAD] without a
    row in the embedding."""
    model = make_model(kind, vocab_size=320)
    expected = plain_loss(model, QUERIES, RESPONSES, REWARDS, **SCALES)
    expected["loss"].backward()
    expected_gradients = gradients(model)
    assert not any(name.startswith("target") for name in expected_gradients)
    for wider in (0, 7):
        model.zero_grad()
        batch = make_batch(wider)
        loss, sums = ilql.ilql_loss(model(batch, PAD), batch, **SCALES)
        loss.backward()
        assert {name: x.item() for name, x in sums.items()} == pytest.approx(
            {name: torch.as_tensor(expected[name]).item() for name in sums}, rel=1e-5, abs=1e-4
        )
        torch.testing.assert_close(gradients(model), expected_gradients, atol=1e-5, rtol=1e-5)


class FixedHidden(torch.nn.Module):
    """A policy whose hidden state at each position is a parameter."""

    def __init__(self, *shape: int):
        super().__init__()
        self.config = SimpleNamespace(hidden_size=shape[-1], vocab_size=PAD)
        self.hidden, self.head = torch.nn.Parameter(torch.randn(*shape)), torch.nn.Linear(shape[-1], PAD)

    def base_model(self, input_ids, attention_mask, position_ids, use_cache):
        return SimpleNamespace(last_hidden_state=self.hidden)

    def get_output_embeddings(self):
        return self.head


def test_only_states_where_an_action_was_taken_count():
    """Neither what the heads say of the query's other positions nor of the terminal state (at EOS) nor of padding."""
    batch, columns = make_batch(), list(range(10))
    model = ilql.ILQL(FixedHidden(3, 10, 8))
    loss, _ = ilql.ilql_loss(model(batch, PAD), batch, **SCALES)
    loss.backward()
    counts = model.policy.hidden.grad.abs().sum(2) > 0  # (B, L)
    assert counts.tolist() == [[3 <= i < 3 + len(response) for i in columns] for response in RESPONSES]
    with torch.no_grad():
        model.policy.hidden[~counts] += torch.randn(8)
        same, _ = ilql.ilql_loss(model(batch, PAD), batch, **SCALES)
        torch.testing.assert_close(same, loss)
        model.policy.hidden[0, 5] += 1.0  # the state in which [21, 22, EOS] ends
        changed, _ = ilql.ilql_loss(model(batch, PAD), batch, **SCALES)
    assert abs(changed - loss).item() > 1e-3


def test_the_eos_action_counts():
    model = make_model()
    before, _ = ilql.ilql_loss(model(make_batch(), PAD), make_batch(), **SCALES)
    for other in (make_batch(responses=[[21, 22, 40], *RESPONSES[1:]]), make_batch(rewards=[2.0, *REWARDS[1:]])):
        loss, _ = ilql.ilql_loss(model(other, PAD), other, **SCALES)
        assert abs(loss - before).item() > 0.01


# ------------------------------------------------------------------------------------------- a chain with known values


class ChainPolicy(torch.nn.Module):
    """The last token tells the state: 1 -> s0, 2 -> s1, 3 -> s2; the hidden state is one-hot."""

    def __init__(self):
        super().__init__()
        self.config, self.head = SimpleNamespace(hidden_size=16, vocab_size=4), torch.nn.Linear(16, 4)

    def base_model(self, input_ids, attention_mask, position_ids, use_cache):
        return SimpleNamespace(last_hidden_state=F.one_hot((input_ids - 1).clamp(min=0), 16).float())

    def get_output_embeddings(self):
        return self.head


def test_chain_of_three_states_converges_to_its_values():
    """s0 -2-> s1 -3-> s2, and at s2 token 1 ends with reward 1; EOS (0) ends everywhere, with 0. gamma .9, tau .8.
    Data from s0: [0], [2, 0], [2, 3, 0], [2, 3, 1]. V is the expectile of Q over a state's data: with the better token
    (worth q > 0) in a part p of it, V = .8 p q / (.8 p + .2 (1 - p)).

    s2: q = 1,             p = 1/2, V = .4 / .5               = .8
    s1: q = .9 x .8 = .72, p = 2/3, V = 1.6 x .72 / 1.8       = .64
    s0: q = .9 x .64 = .576, p = 3/4, V = 2.4 x .576 / 2.6    = .531692

    And the language model, trained with beta_train 1, says token 1 at s2 with e^.2 / (e^.2 + e^-.8) = .731059."""
    responses = [[0], [2, 0], [2, 3, 0], [2, 3, 1]]
    model = ilql.ILQL(ChainPolicy())
    batch = make_batch(0, [[1]] * 4, responses, [0.0, 0.0, 0.0, 1.0])
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    for _ in range(1500):
        loss, _ = ilql.ilql_loss(model(batch, PAD), batch, 0.9, 0.8, 0.0, 1.0, 1.0)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        ilql.polyak_update(model.target_q_heads, model.q_heads, 0.05)
    hidden = torch.eye(16)[:3]
    expected = torch.tensor(
        [[0.0, torch.nan, 0.576, torch.nan], [0, torch.nan, torch.nan, 0.72], [0, 1, torch.nan, torch.nan]]
    )
    seen = ~expected.isnan()
    with torch.no_grad():
        for q in (model.q_heads[0](hidden), model.q_heads[1](hidden), model.min_target_q(hidden)):
            torch.testing.assert_close(q[seen], expected[seen], atol=0.01, rtol=0)
        torch.testing.assert_close(model.v_head(hidden)[:, 0], torch.tensor([0.531692, 0.64, 0.8]), atol=0.01, rtol=0)
        probabilities = model.policy.head(hidden).softmax(1)
    assert probabilities[2, 1].item() == pytest.approx(0.731059, abs=0.01)


# --------------------------------------------------------------------------------------------------------------- memory


NARROW = GPTNeoXConfig(
    hidden_size=64, num_hidden_layers=2, num_attention_heads=2, intermediate_size=256, vocab_size=50304
)


def fixed_batch(num_rows: int, query_length: int, length: int) -> dict:
    tokens = torch.ones(num_rows, length, dtype=torch.long)
    return ilql.pack_actions(tokens[:, :query_length], tokens[:, query_length:], torch.ones(num_rows), 50277)


class WidestOutput(TorchDispatchMode):
    """Most rows that a tensor of the vocabulary's width has, in any operation; weights and their gradients apart."""

    def __init__(self, widths: set[int]):
        super().__init__()
        self.widths, self.rows = widths, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else [result]:
            if isinstance(tensor, torch.Tensor) and tensor.dim() > 1 and tensor.shape[-1] == 50304:
                rows = tensor.numel() // 50304
                self.rows = max(self.rows, 0 if rows in self.widths else rows)
        return result


def test_no_tensor_holds_the_vocabulary_for_query_positions():
    """4 sequences of 100 tokens, 10 of them the response: 40 actions and not 400 positions, forward and backward."""
    model, batch = ilql.ILQL(AutoModelForCausalLM.from_config(NARROW)), fixed_batch(4, 90, 100)
    with WidestOutput({64, 128}) as widest:
        loss, _ = ilql.ilql_loss(model(batch, 50277), batch, **SCALES)
        loss.backward()
    assert widest.rows == 40
    assert all(p.grad.shape == p.shape for p in model.q_heads.parameters())


def peak_gib(config, batch: dict) -> float:
    """The same of a real pass, by the profiler's record of each allocation."""
    model = ilql.ILQL(AutoModelForCausalLM.from_config(config)).train()
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        loss, _ = ilql.ilql_loss(model(batch, 50277), batch, **SCALES)
        loss.backward()
        del loss
    events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    sizes = [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]
    return max(itertools.accumulate(sizes)) / 2**30


def test_peak_memory_with_and_without_the_gather():
    """Pythia's vocabulary on a narrow model, 4 sequences of 100 tokens, 10 of them the response. Without the gather:
    every token but the first is an action, as where heads see all positions and the loss is masked."""
    gathered, everywhere = (peak_gib(NARROW, fixed_batch(4, query_length, 100)) for query_length in (90, 1))
    one_output = 50304 * 4 / 2**30  # of a head for one position
    assert gathered < 14 * 40 * one_output  # three heads, their log-probabilities and gradients, for 40 actions
    assert everywhere > 6 * 396 * one_output and everywhere > 5 * gathered


COUNT = """
import json, sys, torch, ilql
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker
from transformers import AutoModelForCausalLM, GPTNeoXConfig

settings = json.loads(sys.argv[1])
tokens, query_length = torch.ones(settings["rows"], settings["length"], dtype=torch.long), settings["query_length"]
batch = ilql.pack_actions(tokens[:, :query_length], tokens[:, query_length:], torch.ones(len(tokens)), 50277)
with FakeTensorMode(allow_non_fake_inputs=True) as mode:
    policy = AutoModelForCausalLM.from_config(GPTNeoXConfig(**settings["config"]))
    if settings["checkpointing"]:
        policy.gradient_checkpointing_enable()
    model = ilql.ILQL(policy).train()
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
    model.target_q_heads.requires_grad_(True)  # the tracker wants it; they are used under no_grad all the same
    batch = {name: mode.from_tensor(tensor) for name, tensor in batch.items()}
    with MemTracker() as tracker:
        tracker.track_external(model)
        loss, _ = ilql.ilql_loss(model(batch, 50277), batch, 0.99, 0.6, 0.1, 1.0, 0.0)
        loss.backward()
peak = tracker.get_tracker_snapshot("peak")[torch.device("cpu")]
used = sum(size for kind, size in peak.items() if getattr(kind, "name", "") in ("ACT", "TEMP", "OTH"))
print("GiB", used / 2**30, flush=True)
"""


def count_gib(config, rows: int, query_length: int, length: int, checkpointing: bool = False) -> float:
    """Activations and temporary tensors at the peak of a forward and backward pass, weights and gradients apart,
    counted on fake tensors, which have shapes and no numbers. In a process of its own: with fake tensors torch is not
    stable, so how the process ends does not matter once it has printed the count."""
    settings = {"rows": rows, "query_length": query_length, "length": length, "checkpointing": checkpointing}
    command = [sys.executable, "-c", COUNT, json.dumps(settings | {"config": config.to_diff_dict()})]
    environment = {**os.environ, **ENVIRONMENT, "PYTHONPATH": str(ROOT)}
    for _ in range(3):
        result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200)
        if "GiB" in result.stdout:
            return float(result.stdout.split()[-1])
    raise AssertionError(result.stderr[-2000:])


@pytest.mark.slow
def test_memory_of_a_pythia_1b_step():
    """The table of docs/ilql.md; without the gather every token but the first is an action. On a narrow model the count
    is what the profiler sees in a real step."""
    for query_length in (90, 1):
        counted, measured = count_gib(NARROW, 4, query_length, 100), peak_gib(NARROW, fixed_batch(4, query_length, 100))
        print(f"narrow model, {4 * (100 - query_length)} actions: {counted:.3f} GiB counted, {measured:.3f} measured")
        assert counted == pytest.approx(measured, rel=0.03)
    size = {"num_hidden_layers": 16, "num_attention_heads": 8, "intermediate_size": 8192, "vocab_size": 50304}
    config, peaks = GPTNeoXConfig(hidden_size=2048, **size), {}
    for checkpointing, query_length in itertools.product((False, True), (364, 1)):
        peaks[checkpointing, query_length] = gib = count_gib(config, 16, query_length, 400, checkpointing)
        print(f"Pythia-1B, checkpointing {checkpointing}, {16 * (400 - query_length)} actions: {gib:.2f} GiB")
    assert peaks[True, 364] < 0.25 * peaks[True, 1] and peaks[False, 364] < peaks[False, 1] - 7


# ------------------------------------------------------------------------------------------------------------- sampling


def test_decoding_by_hand():
    """DESIGN 4, number 5."""
    logits, q, v = torch.tensor([[0.5, 0.3, 0.2]]).log() + 3, torch.tensor([[0.0, 1.0, 2.0]]), torch.tensor([[1.0]])

    def probabilities(beta: float, top_k: int, temperature: float = 1.0) -> list[float]:
        found, tokens = ilql.decoding_distribution(logits, q, v, torch.tensor([[beta]]), top_k, temperature)
        return torch.zeros(1, 3).scatter(1, tokens, found)[0].tolist()

    assert probabilities(1.0, 3) == pytest.approx([0.1790, 0.2919, 0.5291], abs=1e-4)
    assert probabilities(1.0, 2) == pytest.approx([0, 0.3556, 0.6444], abs=1e-4)
    for top_k in (0, 3, 20):
        assert probabilities(0.0, top_k) == pytest.approx([0.5, 0.3, 0.2])
    assert probabilities(0.0, 2, 0.5) == pytest.approx([0.25 / 0.34, 0.09 / 0.34, 0])


def left_padded(queries=QUERIES) -> torch.Tensor:
    return torch.tensor(pad_rows(queries, PAD, left=True))


def test_beta_0_is_top_k_sampling_of_the_plain_policy(tokenizer):
    """First tokens of 4,000 samples against transformers' own top-k and temperature."""
    model, query = make_model(seed=3), [5, 6, 7]
    with torch.no_grad():
        logits = model.policy(torch.tensor([query])).logits[:, -1]
    logits[:, PAD:] = -torch.inf
    expected = TopKLogitsWarper(5)(None, TemperatureLogitsWarper(2.0)(None, logits)).softmax(-1)[0]
    tokens, *_ = ilql.generate_ilql(model, torch.tensor([query] * 4000), tokenizer, 1, [0.0], 5, 2.0)
    frequencies = torch.bincount(tokens.flatten(), minlength=len(expected)) / 4000
    assert (expected > 0).sum() == 5 and (frequencies[expected == 0] == 0).all()
    torch.testing.assert_close(frequencies, expected, atol=0.035, rtol=0)  # over 4 standard errors


def test_beta_0_is_the_plain_policys_greedy_decoding(kind, tokenizer):
    model = make_model(kind)
    plain, _ = sft.generate(model.policy, left_padded(), tokenizer, 8, 1e-6)  # nearest logits: 2e-4 apart
    found, *_ = ilql.generate_ilql(model, left_padded(), tokenizer, 8, [0.0], 20, 1e-6)
    assert found[:, 0].tolist() == plain.tolist()


def test_cached_decoding_is_that_without_a_cache(kind, tokenizer):
    """One row, one beta and one token at a time, all heads on all positions, all of the sequence anew: the same tokens,
    Q and V; three betas in one call, which say different things."""
    model, betas = make_model(kind, seed=1), (0.0, 1.0, 4.0)
    responses, q, v = ilql.generate_ilql(model, left_padded(), tokenizer, 8, betas, 20, 1e-5)
    assert responses.shape == q.shape == v.shape == (3, 3, 8)
    for row, query in enumerate(QUERIES):
        for k, beta in enumerate(betas):
            expected = []
            for t in range(8):
                with torch.no_grad():
                    logits, _, _, target, value = (x[-1] for x in plain_outputs(model, query, expected))
                scores = logits[:PAD].log_softmax(0) + beta * (target[:PAD] - value)
                expected.append(scores.argmax().item())
                assert q[row, k, t].item() == pytest.approx(target[expected[-1]].item(), abs=1e-4)
                assert v[row, k, t].item() == pytest.approx(value.item(), abs=1e-4)
                if expected[-1] == 0:
                    break
            assert responses[row, k].tolist() == expected + [PAD] * (8 - len(expected))
    assert len({tuple(row.tolist()) for row in responses[0]}) > 1


def count_passes(model) -> list[tuple[int, ...]]:
    """Shape of the input of each pass through the trunk, from now on."""
    shapes, real = [], model.policy.base_model.forward

    def forward(input_ids, **inputs):
        shapes.append(tuple(input_ids.shape))
        return real(input_ids=input_ids, **inputs)

    model.policy.base_model.forward = forward
    return shapes


def test_one_pass_through_the_trunk_per_token(tokenizer):
    """The query once for all betas, then one token of each."""
    model = make_model()
    lean_to_eos(model.policy, -50.0)
    shapes = count_passes(model)
    ilql.generate_ilql(model, left_padded(), tokenizer, 5, [0.0, 2.0], 20, 1.0)
    assert shapes == [(3, 4)] + [(6, 1)] * 4


def test_sampling_ends_when_every_row_has_its_eos(tokenizer):
    model = make_model()
    lean_to_eos(model.policy, 50.0)
    shapes = count_passes(model)
    responses, *_ = ilql.generate_ilql(model, left_padded(), tokenizer, 50, [0.0, 0.5], 20, 1.0)
    assert len(shapes) < 10 and responses.shape == (3, 2, 50)
    for row in responses.flatten(0, 1).tolist():
        assert row[row.index(0) + 1 :] == [PAD] * (49 - row.index(0))


def test_pad_and_rows_without_a_token_are_never_sampled(tokenizer):
    """Though both policy and Q prefer them by far: [PAD] 320, and 321 to 329, which are no one's."""
    model = make_model()
    lean_to_eos(model.policy, 0.0)
    model.policy.get_output_embeddings().weight.data[PAD:] = 100.0
    for head in model.target_q_heads:
        head[2].bias.data[PAD:] = 100.0
    responses, *_ = ilql.generate_ilql(model, left_padded(QUERIES * 20), tokenizer, 10, [0.0, 4.0], 0, 5.0)
    first_eos = (responses == 0).int().argmax(2)
    assert (responses[..., 0] < PAD).all() and (responses[responses != PAD] < PAD).all()
    assert ((responses == PAD).any(2) <= (first_eos > 0) | (responses[..., 0] == 0)).all()  # [PAD] after EOS alone


# ----------------------------------------------------------------------------------------------------------- checkpoint


@pytest.fixture
def saved(tmp_path, chain) -> Path:
    """A copy of the trained model that a test may spoil."""
    for path in chain.ilql.iterdir():
        if path.is_file():
            (tmp_path / path.name).write_bytes(path.read_bytes())
    return tmp_path


def test_checkpoint_round_trip(chain, tokenizer, saved):
    """The language model loads with plain transformers; load_ilql gives it and all heads; saved and loaded again."""
    model, policy = ilql.load_ilql(str(chain.ilql)), AutoModelForCausalLM.from_pretrained(chain.ilql)
    for name, weight in policy.state_dict().items():
        torch.testing.assert_close(model.policy.state_dict()[name], weight)
    heads = load_file(chain.ilql / "heads.safetensors")
    assert heads.keys() == {name for name in model.state_dict() if not name.startswith("policy.")}
    assert {name.split(".")[0] for name in heads} == {"q_heads", "target_q_heads", "v_head"}
    assert heads["q_heads.0.0.weight"].shape == (32, 16) and heads["q_heads.1.2.weight"].shape == (330, 32)
    assert heads["v_head.2.weight"].shape == (1, 32)
    probes = json.loads((chain.ilql / "probes.json").read_text())
    assert len(probes) == 4
    for probe in probes:
        with torch.no_grad():
            _, _, _, target, v = plain_outputs(model, probe["query"], probe["response"])
        assert probe["values"] == pytest.approx([target[-2, 0].item(), v[-2].item()], abs=1e-4)
    expected = ilql.generate_ilql(model, left_padded(), tokenizer, 6, [2.0], 20, 1e-5)
    found = ilql.generate_ilql(ilql.load_ilql(str(saved)), left_padded(), tokenizer, 6, [2.0], 20, 1e-5)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("name", ["heads.safetensors", "probes.json"])
def test_a_model_without_heads_is_refused(saved, name):
    (saved / name).unlink()
    with pytest.raises(ValueError, match=r"(?s)expected heads.safetensors and probes.json.*ilql.py"):
        ilql.load_ilql(str(saved))


@pytest.mark.parametrize("part", ["target_q_heads.1.2.bias", "v_head.2.bias"])
def test_changed_heads_do_not_match_the_probes(saved, part):
    heads = load_file(saved / "heads.safetensors")
    heads[part] -= 1.0
    save_file(heads, saved / "heads.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=r"(?s)target Q and V of a probe.*when they were saved.*ilql.py"):
        ilql.load_ilql(str(saved))


# ----------------------------------------------------------------------------------------------------------- whole runs


def losses_of(folder: Path, name: str = "train/loss") -> list[float]:
    return [value for _, value in read_events(folder)[name]]


def heads_of(folder: Path) -> tuple[dict, dict]:
    """Weights of Q heads and of target heads, under the same names."""
    heads = load_file(folder / "heads.safetensors")
    return tuple(
        {k.removeprefix(p): w for k, w in heads.items() if k.startswith(p)} for p in ("q_heads", "target_q_heads")
    )


def test_run_logs_the_mean_over_actions(tmp_path, run_ilql, comparisons):
    """First batch at lr 0, from the heads that were saved, by the formulas: no micro-batch counts more. 13 comparisons
    are 26 labels of mean 0 and standard deviation sqrt(26 / 25)."""
    fields = {"lr": 0.0, "max_updates": 1, "seed": 5, "micro_batch_size": 1, "eval_rows": 2, "beta_train": 0.7}
    _, folder = run_ilql(tmp_path / "run", gamma=0.8, tau=0.9, cql_scale=0.2, awac_scale=1.5, **fields)
    rows = load_from_disk(comparisons)["train"].select(ilql.stream_rows(5, 13, 0, 4).tolist())
    queries, *responses = ([[t for t in row if t != PAD] for row in rows[column]] for column in ilql.COLUMNS)
    rewards, model = [math.sqrt(25 / 26)] * 4 + [-math.sqrt(25 / 26)] * 4, ilql.load_ilql(str(folder))
    scales = {"gamma": 0.8, "tau": 0.9, "cql_scale": 0.2, "awac_scale": 1.5, "beta_train": 0.7}
    with torch.no_grad():
        expected = plain_loss(model, queries * 2, responses[0] + responses[1], rewards, **scales)
    num_actions, events = sum(map(len, responses[0] + responses[1])), read_events(folder)
    for name, value in expected.items():
        assert events[f"train/{name}"] == [(4, pytest.approx(float(value) / num_actions, abs=1e-5, rel=1e-4))], name


def test_accumulation_changes_nothing(tmp_path, run_ilql):
    """Micro-batches of 4, 2 and 1 in batches of 4; the last batch has a single comparison."""
    results, greedy = [], {"lr": 1e-3, "eval_temperature": 1e-6}
    for size in (4, 2, 1):
        metrics, folder = run_ilql(tmp_path / str(size), micro_batch_size=size, alpha=0.1, eval_rows=3, **greedy)
        names = ("loss", "q_loss", "v_loss", "cql_loss", "awac_loss", "advantage", "grad_norm")
        results.append([x for name in names for x in losses_of(folder, f"train/{name}")] + [*metrics.values()])
    assert len(losses_of(folder)) == 4
    assert results[1] == pytest.approx(results[0], abs=2e-4) and results[2] == pytest.approx(results[0], abs=2e-4)


def test_targets_follow_after_every_update_or_every_few(tmp_path, run_ilql):
    """alpha 1: the target is Q as it was at the last Polyak step. Neither gradient nor weight decay moves it."""
    fields = {"max_updates": 3, "eval_rows": 1, "weight_decay": 0.5, "lr": 1e-2}
    start, _ = heads_of(run_ilql(tmp_path / "start", **fields | {"lr": 0.0})[1])
    for every, at_end in ((1, True), (3, True), (4, False)):
        q, target = heads_of(run_ilql(tmp_path / str(every), alpha=1.0, polyak_every=every, **fields)[1])
        torch.testing.assert_close(target, q if at_end else start)
        assert not torch.allclose(q[".0.0.weight"], start[".0.0.weight"])
    q, target = heads_of(run_ilql(tmp_path / "slow", alpha=1e-4, **fields)[1])
    for name, weight in target.items():  # three steps of 1e-4
        assert (weight - start[name]).abs().max() < 3.1e-4 * (q[name] - start[name]).abs().max()
    assert not torch.equal(target[".0.2.weight"], start[".0.2.weight"])


def test_run_learns_which_responses_are_chosen(tmp_path, run_ilql, comparisons, tokenizer):
    """Losses fall; the end of a chosen response is worth more than that of a rejected one; sampling with a larger beta
    finds tokens of a larger advantage."""
    fields = {"num_epochs": 60.0, "lr": 1e-2, "alpha": 0.1, "batch_size": 8}
    metrics, folder = run_ilql(tmp_path / "run", **fields)
    for name in ("loss", "q_loss", "cql_loss", "awac_loss"):
        losses = losses_of(folder, f"train/{name}")
        assert sum(losses[-4:]) < sum(losses[:4]), name
    model, rows = ilql.load_ilql(str(folder)), load_from_disk(comparisons)["train"]
    queries, *sides = ([[t for t in row if t != PAD] for row in rows[column]] for column in ilql.COLUMNS)
    q = torch.tensor([[ilql.probe_values(model, *pair)[0] for pair in zip(queries, side)] for side in sides])
    assert q[0].mean() > 0.5 > -0.5 > q[1].mean() and (q[0] > q[1]).float().mean() > 0.9
    advantages = [metrics[f"eval/validation/beta{b}/q"] - metrics[f"eval/validation/beta{b}/v"] for b in (0, 1, 4)]
    assert advantages[0] < advantages[1] and advantages[0] < advantages[2]


def test_samples_of_each_beta(chain, sft_dataset, tokenizer):
    rows, metrics = load_from_disk(sft_dataset)["validation"], chain.metrics["ilql"]
    for beta in (0, 1, 2, 4):
        lines = (chain.ilql / f"samples_validation_beta{beta}.jsonl").read_text().splitlines()
        samples = [json.loads(line) for line in lines]
        assert [row["query"] for row in samples] == rows["query"]
        assert [row["reference"] + "<|endoftext|>" for row in samples] == rows["reference_response"]
        assert all(row.keys() == {"query", "response", "reference"} for row in samples)
        assert 0 < metrics[f"eval/validation/beta{beta}/response_length"] <= 12
    assert json.loads((chain.ilql / "run.json").read_text())["finished"]


def test_sampling_does_not_change_the_run(tmp_path, run_ilql):
    """Other betas, top-k and temperature leave the weights as they are."""
    weights = []
    for i, fields in enumerate(({}, {"eval_betas": (0.5,), "top_k": 3, "eval_temperature": 1.0})):
        metrics, folder = run_ilql(tmp_path / str(i), max_updates=3, eval_rows=2, **fields)
        weights.append(load_file(folder / "model.safetensors") | load_file(folder / "heads.safetensors"))
    torch.testing.assert_close(weights[0], weights[1], atol=0, rtol=0)
    assert (folder / "samples_validation_beta0.5.jsonl").exists() and "eval/validation/beta0.5/eos_rate" in metrics


def test_start_from_the_base_model_or_from_sft(tmp_path, chain, run_ilql, run_sft, base_models, monkeypatch):
    """With lr 0 what is saved is what it started from."""
    fields = {"lr": 0.0, "max_updates": 1, "eval_rows": 1}

    def assert_starts_from(source: Path, name: str, **more):
        _, folder = run_ilql(tmp_path / name, **fields, **more)
        torch.testing.assert_close(load_file(folder / "model.safetensors"), load_file(source / "model.safetensors"))

    assert_starts_from(base_models["gpt_neox"], "base")
    assert_starts_from(chain.sft, "given", sft_model=str(chain.sft))
    monkeypatch.chdir(tmp_path)
    command = r"models/gpt_neox\w*/sft_7.*accelerate launch sft.py --model .*gpt_neox.* --seed 7"
    with pytest.raises(FileNotFoundError, match=command):
        run_ilql(tmp_path / "missing", init="sft", seed=7)
    shutil.copytree(chain.sft, tmp_path / "models" / base_models["gpt_neox"].name / "sft_7")
    assert_starts_from(chain.sft, "init", init="sft", seed=7)
    assert not (tmp_path / "missing").exists()


def test_models_of_all_kinds_train(tmp_path, base_models, run_ilql, kind):
    _, folder = run_ilql(tmp_path / kind, model=str(base_models[kind]), max_updates=3, eval_rows=2)
    assert ilql.load_ilql(str(folder)).policy.config.model_type == kind
    assert all(map(math.isfinite, losses_of(folder)))


def test_mixed_precision_and_gradient_checkpointing(tmp_path, run_ilql, monkeypatch):
    """bf16 within its precision of fp32, recomputed activations exactly."""
    fields = {"lr": 1e-3, "max_updates": 3, "eval_rows": 2, "alpha": 0.1}
    plain = losses_of(run_ilql(tmp_path / "plain", **fields)[1])
    again = losses_of(run_ilql(tmp_path / "again", gradient_checkpointing=True, **fields)[1])
    assert again == pytest.approx(plain, rel=1e-5)
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    _, folder = run_ilql(tmp_path / "bf16", **fields)
    assert losses_of(folder) == pytest.approx(plain, rel=0.02)
    assert ilql.load_ilql(str(folder)).policy.dtype == torch.float32


class Killed(Exception):
    pass


def test_interrupted_run_ends_as_an_unbroken_one(tmp_path, run_ilql, monkeypatch):
    """Q heads, target heads, V and language model, to the bit."""
    fields = {"save_every": 2, "alpha": 0.3, "eval_rows": 2}
    _, whole = run_ilql(tmp_path / "whole", **fields)
    real = ilql.Checkpoints.save

    def save_and_die(self, update: int, num_updates: int):
        real(self, update, num_updates)
        if update == 2:
            raise Killed

    monkeypatch.setattr(ilql.Checkpoints, "save", save_and_die)
    with pytest.raises(Killed):
        run_ilql(tmp_path / "broken", **fields)
    monkeypatch.setattr(ilql.Checkpoints, "save", real)
    _, broken = run_ilql(tmp_path / "broken", **fields)
    for name in ("model.safetensors", "heads.safetensors"):
        torch.testing.assert_close(load_file(broken / name), load_file(whole / name), atol=0, rtol=0)
    assert losses_of(broken) == losses_of(whole) and len(losses_of(whole)) == 4


# ------------------------------------------------------------------------------------------------ processes, DeepSpeed


def launch(launcher: list[str], folder: Path, base: Path, posts: Path, pairs: Path, environment: dict | None = None):
    """The run of `run_ilql` with batches of 4 and micro-batches of 2, from the command line."""
    arguments = {"model": base, "dataset": pairs, "sft_dataset": posts, "output_dir": folder, "lr": 1e-3, "alpha": 0.2}
    arguments |= {"batch_size": 4, "micro_batch_size": 2, "response_length": 12, "save_every": 2}
    arguments["eval_temperature"] = 1e-6
    command = [sys.executable, *launcher, str(ROOT / "ilql.py")]
    command += [str(word) for name, value in arguments.items() for word in (f"--{name}", value)]
    environment = {**os.environ, **ENVIRONMENT} | (environment or {})
    environment = {name: value for name, value in environment.items() if value is not None}
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-4000:]


def assert_same_run(first: Path, second: Path, tolerance: float) -> None:
    expected, found = read_events(first), read_events(second)
    assert expected.keys() == found.keys()
    for name in expected:
        if not name.startswith("perf/"):
            values = [value for _, value in expected[name]]
            assert [value for _, value in found[name]] == pytest.approx(values, abs=tolerance, rel=tolerance), name
    for name in ("model.safetensors", "heads.safetensors"):
        torch.testing.assert_close(load_file(second / name), load_file(first / name), atol=2e-3, rtol=1e-2)


def test_two_processes_give_the_run_of_one(tmp_path, run_ilql, base_models, sft_dataset, comparisons):
    """Real DDP over gloo. 13 comparisons in batches of 4: in the last one process has none of its own."""
    run_ilql(tmp_path / "one", lr=1e-3, alpha=0.2, micro_batch_size=2, eval_temperature=1e-6)
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    launch(launcher, tmp_path / "two", base_models["gpt_neox"], sft_dataset, comparisons)
    assert_same_run(tmp_path / "one", tmp_path / "two", 2e-4)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_deepspeed_zero2_gives_the_plain_run(
    tmp_path, run_ilql, base_models, sft_dataset, comparisons, precision, ranks
):
    """benchmark/zero2.yaml. (accelerate leaves DeepSpeed out if it is told to use the CPU.) With all else in bf16 the
    target heads stay in fp32."""
    pytest.importorskip("deepspeed")
    run_ilql(tmp_path / "plain", lr=1e-3, alpha=0.2, micro_batch_size=2, eval_temperature=1e-6)
    launcher = ["-m", "accelerate.commands.launch", "--num_processes", str(ranks), "--mixed_precision", precision]
    launcher += ["--main_process_port", "0", "--config_file", str(ROOT / "benchmark" / "zero2.yaml")]
    launcher += [str(ROOT / "tests" / "deepspeed_on_cpu.py")]
    environment = {"ACCELERATE_USE_CPU": None, "CUDA_VISIBLE_DEVICES": ""}
    launch(launcher, tmp_path / "zero2", base_models["gpt_neox"], sft_dataset, comparisons, environment)
    states = list((tmp_path / "zero2" / "checkpoints" / "00000002").rglob("*zero*optim_states*"))
    assert len(states) == ranks, "DeepSpeed was not in use, or not on as many ranks"
    if precision == "no":
        assert_same_run(tmp_path / "plain", tmp_path / "zero2", 1e-3)
    else:
        assert losses_of(tmp_path / "zero2") == pytest.approx(losses_of(tmp_path / "plain"), rel=0.02)
        q, target = heads_of(tmp_path / "zero2")
        assert {w.dtype for w in q.values()} == {torch.bfloat16}
        assert {w.dtype for w in target.values()} == {torch.float32}
        ilql.load_ilql(str(tmp_path / "zero2"))


# ------------------------------------------------------------------------------------------------------------ bad input


def assert_stops(run_ilql, tmp_path, error, match: str, **fields) -> None:
    with pytest.raises(error, match=match):
        run_ilql(tmp_path / "out", **fields)
    assert not (tmp_path / "out").exists()


def spoil(comparisons: Path, target: Path, change) -> str:
    """Copy of the comparisons whose train split went through change(columns)."""
    data = load_from_disk(comparisons)
    columns = data["train"].to_dict()
    change(columns)
    DatasetDict(dict(data) | {"train": Dataset.from_dict(columns)}).save_to_disk(target)
    return str(target)


@pytest.mark.parametrize("column", ilql.COLUMNS)
def test_a_query_or_response_that_is_all_padding(run_ilql, tmp_path, comparisons, column):
    """Its first action would be taken at position -1, or its reward paid there."""

    def empty(columns: dict):
        columns[column][6] = [PAD] * len(columns[column][6])

    dataset = spoil(comparisons, tmp_path / "data", empty)
    match = rf"(?s)data, split train.*'{column}' is all padding in row 6.*tldr_dataset.py"
    assert_stops(run_ilql, tmp_path, ValueError, match, dataset=dataset)


@pytest.mark.parametrize("column", ilql.COLUMNS)
def test_missing_column(run_ilql, tmp_path, comparisons, column):
    dataset = spoil(comparisons, tmp_path / "data", lambda columns: columns.pop(column))
    match = rf"(?s)split train.*'{column}' is missing.*tldr_dataset.py"
    assert_stops(run_ilql, tmp_path, ValueError, match, dataset=dataset)


def test_comparisons_of_another_tokenizer(run_ilql, tmp_path, comparisons):
    def shift(columns: dict):
        columns["query_token"] = [
            [t if t in (0, PAD) else (t + 7) % 319 + 1 for t in r] for r in columns["query_token"]
        ]

    dataset = spoil(comparisons, tmp_path / "data", shift)
    assert_stops(run_ilql, tmp_path, ValueError, "(?s)another tokenizer.*tldr_dataset.py", dataset=dataset)


@pytest.mark.parametrize(("fields", "expected"), [
    ({"tau": 1.0}, "less than 1"), ({"tau": 0.0}, "greater than 0"),
    ({"alpha": 0.0}, "greater than 0"), ({"alpha": 1.5}, "less than or equal to 1"),
    ({"polyak_every": 0}, "greater than 0"),
    ({"eval_betas": ()}, "at least 1 item"), ({"eval_betas": (0.0, math.inf)}, "finite number"),
], ids=str)  # fmt: skip
def test_settings_out_of_range(run_ilql, tmp_path, fields, expected):
    [name] = fields
    assert_stops(run_ilql, tmp_path, ValueError, rf"{name}(\.1)?\n.*{expected}", **fields)


def test_nan_stops_the_run(run_ilql, tmp_path, monkeypatch):
    real, calls = ilql.ilql_loss, []

    def break_down(*inputs, **scales):
        calls.append(1)
        loss, sums = real(*inputs, **scales)
        return loss * (math.nan if len(calls) > 2 else 1), sums

    monkeypatch.setattr(ilql, "ilql_loss", break_down)
    with pytest.raises(FloatingPointError, match=r"(?s)update 2.*not finite.*nan.*--lr"):
        run_ilql(tmp_path / "out", save_every=1)
    assert not (tmp_path / "out" / "heads.safetensors").exists()


# ----------------------------------------------------------------------------------------------------------- real input


def run_on_real_comparisons(tmp_path, base: Path, tokenizer: Path, max_query_length: int, **settings) -> Path:
    """The first real comparisons and posts through tldr_dataset.py and ilql.py, checked."""
    source = need_shared("data", "tldr")
    for kind, split, number in itertools.product(("sft", "comparisons"), ("train", "validation"), (16,)):
        (tmp_path / "raw" / kind).mkdir(parents=True, exist_ok=True)
        with open(source / kind / f"{split}.jsonl") as lines:
            text = "".join(itertools.islice(lines, number))
        (tmp_path / "raw" / kind / f"{split}.jsonl").write_text(text)
    data = tldr_dataset.Args(str(tmp_path / "data"), tokenizer=str(tokenizer), num_proc=1)
    data.sft, data.comparisons = (str(tmp_path / "raw" / kind) for kind in ("sft", "comparisons"))
    data.max_query_length = max_query_length
    tldr_dataset.main(data)
    fields = {
        "model": str(base),
        "dataset": str(tmp_path / "data" / "comparisons"),
        "output_dir": str(tmp_path / "out"),
    }
    fields |= {"sft_dataset": str(tmp_path / "data" / "sft"), "batch_size": 4, "micro_batch_size": 4, "eval_rows": 2}
    metrics, folder = run_main(ilql, fields | settings), tmp_path / "out"
    losses = losses_of(folder)
    assert sum(losses[-2:]) < sum(losses[:2]), f"the loss does not fall: {losses}"
    assert (
        ilql.load_ilql(str(folder)).policy.config.vocab_size
        == AutoModelForCausalLM.from_pretrained(base).config.vocab_size
    )
    for beta in (0, 1, 2, 4):
        lines = (folder / f"samples_validation_beta{beta}.jsonl").read_text().splitlines()
        assert len(lines) == 2 and all(json.loads(line)["query"].endswith("TL;DR:") for line in lines)
        assert 0 < metrics[f"eval/validation/beta{beta}/response_length"] <= settings.get("response_length", 53)
    return folder


def test_real_comparisons_with_pythias_tokenizer(tmp_path):
    """[PAD] 50277, a random GPT-NeoX with Pythia's 50,304 rows, 53 tokens."""
    tokenizer_path = need_shared("data", "tokenizers", "pythia")
    config = make_config("gpt_neox", 16, 50304, initializer_range=0.02)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "base")
    AutoTokenizer.from_pretrained(tokenizer_path).save_pretrained(tmp_path / "base")
    settings = {"max_updates": 4, "lr": 1e-2}
    folder = run_on_real_comparisons(tmp_path, tmp_path / "base", tokenizer_path, 512, **settings)
    samples = [json.loads(line)["response"] for line in (folder / "samples_validation_beta4.jsonl").open()]
    assert not any("[PAD]" in sample for sample in samples)


@pytest.mark.slow
def test_real_comparisons_with_a_trained_llama(tmp_path):
    """260 thousand parameters, its own tokenizer, lengths computed from the data."""
    base = need_shared("data", "models", "stories260k")
    run_on_real_comparisons(tmp_path, base, base, 256, max_updates=12, num_epochs=3.0, lr=1e-3)
