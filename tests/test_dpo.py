"""dpo.py: losses, log-probabilities, the reference's file, evaluation, bad input, whole runs, and real comparisons."""

import gc
import itertools
import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pandas as pd
import pytest
import torch
import torch.nn.functional as F
import tyro
from conftest import (
    ENVIRONMENT,
    EOS,
    ROOT,
    make_comparison_rows,
    make_config,
    make_policy,
    need_shared,
    pad_rows,
    read_events,
)
from datasets import Dataset, DatasetDict, load_from_disk
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, GPTNeoXForCausalLM

import dpo
import reward
import tldr_dataset

PAD = 320
QUERIES = [[5, 6, 7, 8], [9], [11, 12, 13]]
CHOSEN = [[21, 22, 0], [23, 24, 25, 26, 0], [0]]
REJECTED = [[31, 0], [32, 33, 0], [34, 35, 36, 37, 38, 0]]


def make_pairs(wider: int = 0) -> dict:
    """The rows above as dpo.py reads them, with `wider` columns of padding more than needed."""
    columns = (pad_rows(QUERIES, PAD, True, 4 + wider), pad_rows(CHOSEN, PAD, length=6 + wider))
    columns += (pad_rows(REJECTED, PAD, length=6 + wider),)
    return {name: torch.tensor(rows) for name, rows in zip(dpo.COLUMNS, columns)}


def plain_logprob(model, query: list[int], response: list[int], temperature: float = 1.0) -> torch.Tensor:
    """Log-probability of one response, unpadded, from transformers' logits of every token."""
    logits = model(torch.tensor([query + response])).logits[0] / temperature
    chosen = logits.log_softmax(-1)[
        torch.arange(len(query) - 1, len(query) + len(response) - 1), torch.tensor(response)
    ]
    return chosen.sum()


def plain_pairs(model, average: bool = False) -> torch.Tensor:
    """Log-probabilities of the rows above, one response after the other -> (2, 3)."""
    sums = [[plain_logprob(model, q, r) for q, r in zip(QUERIES, side)] for side in (CHOSEN, REJECTED)]
    counts = torch.tensor([[len(r) for r in side] for side in (CHOSEN, REJECTED)])
    return torch.stack([torch.stack(side) for side in sums]) / (counts if average else 1)


def unpad(rows: list[list[int]]) -> list[list[int]]:
    return [[token for token in row if token != PAD] for row in rows]


# --------------------------------------------------------------------------------------------------------------- losses


def test_losses_by_hand():
    """DESIGN 4, number 1: h = 2, beta .05."""
    logprobs, references = torch.tensor([[-10.0], [-12.0]]), torch.tensor([[-11.0], [-11.0]])
    loss, rewards = dpo.dpo_loss(logprobs, references, 0.05)
    assert loss.item() == pytest.approx(0.644397, abs=1e-6)
    assert rewards.flatten().tolist() == pytest.approx([0.05, -0.05])
    assert dpo.dpo_loss(logprobs, references, 0.05, "sigmoid", 0.1)[0].item() == pytest.approx(0.654397, abs=1e-6)
    assert dpo.dpo_loss(logprobs, references, 0.05, "ipo")[0].item() == pytest.approx(64)


@pytest.mark.parametrize("loss, smoothing, value, slope", [
    ("sigmoid", 0.0, math.log(2), -0.1 / 2),
    ("sigmoid", 0.3, math.log(2), -0.1 / 2 * (1 - 2 * 0.3)),
    ("ipo", 0.0, 25.0, -1 / 0.1),
])  # fmt: skip
def test_gradient_where_policy_and_reference_are_one(loss, smoothing, value, slope):
    """beta .1: -beta/2 for the chosen, +beta/2 for the rejected response; (1 - 2e) of it smoothed; -1/beta for IPO."""
    logprobs = torch.tensor([[-7.0], [-9.0]], requires_grad=True)
    result, rewards = dpo.dpo_loss(logprobs, logprobs.detach().clone(), 0.1, loss, smoothing)
    result.backward()
    assert result.item() == pytest.approx(value, rel=1e-6) and rewards.tolist() == [[0], [0]]
    assert logprobs.grad.flatten().tolist() == pytest.approx([slope, -slope], rel=1e-6)


def test_loss_is_the_sum_over_pairs_and_survives_large_margins():
    logprobs, references = torch.randn(2, 5) * 10, torch.randn(2, 5) * 10
    for loss, smoothing in (("sigmoid", 0.2), ("ipo", 0.0)):
        single = [dpo.dpo_loss(logprobs[:, [i]], references[:, [i]], 0.3, loss, smoothing)[0] for i in range(5)]
        total, _ = dpo.dpo_loss(logprobs, references, 0.3, loss, smoothing)
        torch.testing.assert_close(total, torch.stack(single).sum())
    assert dpo.dpo_loss(torch.tensor([[-1e5], [0.0]]), torch.zeros(2, 1), 1.0)[0].item() == pytest.approx(1e5)


TRL_LOSSES = """
import json, sys, torch
from collections import defaultdict
from types import SimpleNamespace
from trl.trainer.dpo_trainer import DPOTrainer

results = []
for case in json.load(sys.stdin):
    mask, rows = torch.tensor(case["mask"]), torch.tensor(case["logprobs"], dtype=torch.float64)  # (2B, L), (2B, L - 1)
    model = lambda **inputs: SimpleNamespace(log_probs=rows, entropy=rows, mean_logits=rows, is_top1=rows > 0)
    identity = SimpleNamespace(gather=lambda x: x, gather_for_metrics=lambda x: x, device="cpu")
    trainer = SimpleNamespace(
        model=SimpleNamespace(training=True), accelerator=identity, aux_loss_enabled=False, ld_alpha=None,
        precompute_ref_logps=True, f_divergence_type="reverse_kl", loss_types=[case["loss"]], loss_weights=[1.0],
        beta=case["beta"], label_smoothing=case["smoothing"], use_weighting=False, _tp_size=1, _total_train_tokens=0,
        _metrics=defaultdict(lambda: defaultdict(list)),
    )
    chosen, rejected = torch.tensor(case["references"], dtype=torch.float64)
    inputs = {"input_ids": mask, "attention_mask": mask, "completion_mask": mask}
    inputs |= {"ref_chosen_logps": chosen, "ref_rejected_logps": rejected}
    loss = DPOTrainer._compute_loss(trainer, model, inputs, return_outputs=False)
    metrics = {name: values[0] for name, values in trainer._metrics["train"].items() if name.startswith("rewards")}
    results.append({"loss": loss.item()} | metrics)
print(json.dumps(results))
"""


@pytest.fixture(scope="session")
def trl_losses(pytestconfig):
    """Function that computes losses with TRL's own DPOTrainer, in a process of its own: it must not be installed here,
    and of its dependencies it needs none that this project has not."""
    target, name = Path(pytestconfig.cache.mkdir("trl_1_16_0")), "trl==1.16.0"
    if not (target / "trl").exists():
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(target), name]
        result = subprocess.run(pip, capture_output=True, text=True)
        if result.returncode:
            pytest.skip(f"needs {name}, and pip cannot install it: {result.stderr[-300:]}")

    def compute(cases: list[dict]) -> list[dict]:
        environment = {**os.environ, **ENVIRONMENT, "PYTHONPATH": str(target)}
        command, settings = [sys.executable, "-c", TRL_LOSSES], {"capture_output": True, "text": True}
        result = subprocess.run(command, input=json.dumps(cases), env=environment, timeout=300, **settings)
        assert result.returncode == 0, result.stderr
        return json.loads(result.stdout.splitlines()[-1])

    return compute


@pytest.mark.slow
def test_losses_are_those_of_trl(trl_losses):
    """Random token log-probabilities of 6 pairs with responses of 1 to 9 tokens, through TRL's DPOTrainer.

    TRL's name    here
    sigmoid       the default
    sigmoid_norm  --average_logprobs
    ipo           --loss ipo --average_logprobs; with responses of a single token also --loss ipo
    aot_unpaired  --label_smoothing: for a single pair, of which nothing can be sorted, it is the conservative loss
    """
    cases, expected = [], []

    def add(name: str, pairs: int, longest: int, beta: float, average: bool, loss: str, smoothing: float = 0.0):
        counts = torch.randint(1, longest + 1, (2 * pairs,))
        mask = (torch.arange(longest) < counts[:, None]).long()  # (2B, T)
        rows = -torch.rand(2 * pairs, longest, dtype=torch.float64) * 8 * mask
        logprobs = rows.sum(1).view(2, -1)
        references = logprobs + torch.randn(2, pairs, dtype=torch.float64) * 5
        fields = {"mask": F.pad(mask, (1, 0)).tolist(), "logprobs": rows.tolist(), "references": references.tolist()}
        cases.append(fields | {"loss": name, "beta": beta, "smoothing": smoothing})
        divisor = counts.view(2, -1) if average else 1
        total, rewards = dpo.dpo_loss(logprobs / divisor, references / divisor, beta, loss, smoothing)
        means = (beta * (logprobs - references)).mean(1).tolist()  # TRL's rewards are sums in any case
        expected.append({"loss": total.item() / pairs, "rewards/chosen": means[0], "rewards/rejected": means[1]})
        if not average:
            assert rewards.mean(1).tolist() == pytest.approx(means)

    for beta in (0.05, 0.5):
        add("sigmoid", 6, 9, beta, False, "sigmoid")
        add("sigmoid_norm", 6, 9, beta, True, "sigmoid")
        add("ipo", 6, 9, beta, True, "ipo")
        add("ipo", 6, 1, beta, False, "ipo")
        for _ in range(4):
            add("aot_unpaired", 1, 9, beta, False, "sigmoid", 0.2)
    for case, ours, theirs in zip(cases, expected, trl_losses(cases)):
        assert {name: theirs[name] for name in ours} == pytest.approx(ours, rel=1e-6), case["loss"]


def test_learning_rate_schedules():
    paper = [dpo.lr_factor(u, 4, "cosine", 0.0) for u in range(4)]
    assert paper == pytest.approx([1, 0.853553, 0.5, 0.146447], abs=1e-6)
    assert dpo.lr_factor(0, 5, "linear", 0.1) == 0.5  # a part of an update is one
    tulu = [dpo.lr_factor(u, 20, "linear", 0.1) for u in range(20)]
    assert tulu[:4] == pytest.approx([1 / 3, 2 / 3, 1, 17 / 18]) and tulu[-1] == pytest.approx(1 / 18)


# --------------------------------------------------------------------------------------------------- log-probabilities


@pytest.mark.parametrize("average", [False, True])
def test_logprobs_are_those_of_unpadded_responses(kind, average):
    """Queries of three lengths, [PAD] without a row in the embedding, any number of columns of padding."""
    model = make_policy(kind, vocab_size=320)
    with torch.no_grad():
        expected = plain_pairs(model, average)
        for wider in (0, 9):
            found = dpo.pair_logprobs(model, make_pairs(wider), torch.arange(3), PAD, average)
            torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
        found = dpo.pair_logprobs(model, make_pairs(), torch.tensor([2, 0]), PAD, average)
        torch.testing.assert_close(found, expected[:, [2, 0]], atol=1e-5, rtol=1e-5)


def test_loss_and_gradients_are_those_of_the_plain_padded_path(kind):
    """Right-padded query_chosen_token, logits of every position, a mask: the way without trimming and slicing."""

    def padded(model) -> torch.Tensor:
        rows = [q + r for side in (CHOSEN, REJECTED) for q, r in zip(QUERIES, side)]
        starts = torch.tensor([len(q) for q in QUERIES * 2])[:, None]
        tokens = torch.tensor(pad_rows(rows, PAD, length=20))
        mask = (tokens != PAD) & (torch.arange(20) >= starts)
        logits = model(tokens * (tokens != PAD), attention_mask=(tokens != PAD).long()).logits
        logprobs = logits.log_softmax(-1)[:, :-1].gather(2, (tokens * mask)[:, 1:, None])[..., 0]
        return (logprobs * mask[:, 1:]).sum(1).view(2, 3)

    references = torch.tensor([[-20.0, -30.0, -5.0], [-10.0, -18.0, -35.0]])
    paths = (padded, lambda model: dpo.pair_logprobs(model, make_pairs(3), torch.arange(3), PAD, False))
    results = []
    for path in paths:
        model = make_policy(kind)
        loss, _ = dpo.dpo_loss(path(model), references, 0.1)
        loss.backward()
        results.append((loss, {name: p.grad for name, p in model.named_parameters()}))
    torch.testing.assert_close(results[0], results[1], atol=1e-5, rtol=1e-5)


class FixedLogits(torch.nn.Module):
    """A policy whose logits at each token that it is fed are parameters. It is fed pair after pair, of each the query,
    the chosen response and the rejected one, none of which begins as the chosen one does."""

    config = SimpleNamespace(_attn_implementation="pairs")
    parts = [part for q, c, r in zip(QUERIES, CHOSEN, REJECTED) for part in (q + c, r)]

    def __init__(self):
        super().__init__()
        self.logits = torch.nn.Parameter(torch.randn(sum(map(len, self.parts)), 40))

    def forward(self, input_ids, position_ids, attention_mask, use_cache, logits_to_keep):
        shared = [n for query in QUERIES for n in (0, len(query))]
        assert input_ids[0].tolist() == sum(self.parts, [])
        assert attention_mask[0, 0].tolist() == [[len(part) for part in self.parts], shared]
        assert position_ids[0].tolist() == [n + i for n, part in zip(shared, self.parts) for i in range(len(part))]
        self.num_logits = len(logits_to_keep)
        return SimpleNamespace(logits=self.logits[None, logits_to_keep])


def test_only_response_tokens_with_eos_are_trained():
    """Which logits have a gradient: those that predict response tokens and EOS; queries and padding have none."""
    policy, expected = FixedLogits(), []
    dpo.pair_logprobs(policy, make_pairs(), torch.arange(3), PAD, False).sum().backward()
    for query, chosen, rejected in zip(QUERIES, CHOSEN, REJECTED):  # the query's last token predicts both first ones
        expected += [False] * (len(query) - 1) + [True] * len(chosen) + [False]
        expected += [True] * (len(rejected) - 1) + [False]
    assert (policy.logits.grad.abs().sum(1) > 0).tolist() == expected
    assert policy.num_logits == sum(map(len, CHOSEN + REJECTED))  # none for the query, but its last token's


def test_query_labels_and_pads_change_nothing_and_the_eos_logit_does():
    policy, ends = FixedLogits(), torch.tensor([len(part) for part in FixedLogits.parts]).cumsum(0)
    before = dpo.pair_logprobs(policy, make_pairs(), torch.arange(3), PAD, False).detach()
    with torch.no_grad():
        policy.logits[: len(QUERIES[0]) - 1] += torch.randn(len(QUERIES[0]) - 1, 40)  # for the query's own tokens
        policy.logits[ends - 1] += torch.randn(6, 40)  # past an EOS
        same = dpo.pair_logprobs(policy, make_pairs(), torch.arange(3), PAD, False)
        torch.testing.assert_close(same, before)
        policy.logits[ends[2] - 2, 0] += 1.0  # of the second pair's chosen response
        changed = dpo.pair_logprobs(policy, make_pairs(), torch.arange(3), PAD, False) - before
    assert changed[0, 1] > 0.1 and changed.abs().sum() == pytest.approx(changed[0, 1].item())


def test_responses_that_begin_alike_have_their_own_logprobs(kind):
    """Their common beginning goes through once, and counts for both; the last pair's are equal."""
    model, queries = make_policy(kind), [[5, 6], [9], [7, 8]]
    chosen, rejected = [[11, 12, 13, 0], [11, 12, 0], [4, 0]], [[11, 12, 14, 15, 0], [11, 12, 16, 0], [4, 0]]
    tokens = (
        torch.tensor(pad_rows(rows, PAD, left, 6)) for rows, left in ((queries, True), (chosen, 0), (rejected, 0))
    )
    pairs = dict(zip(dpo.COLUMNS, tokens))
    found = dpo.pair_logprobs(model, pairs, torch.arange(3), PAD, False)
    for responses, logprobs in zip((chosen, rejected), found):
        for query, response, logprob in zip(queries, responses, logprobs):
            all_logprobs = model(torch.tensor([query + response])).logits[0].log_softmax(1)
            expected = sum(all_logprobs[len(query) - 1 + i, token] for i, token in enumerate(response))
            torch.testing.assert_close(logprob, expected, atol=1e-5, rtol=1e-5)


# ------------------------------------------------------------------------------------------------- the reference's file


def settings(folder: Path) -> dict:
    return json.loads((folder / "run.json").read_text())["args"]


def losses_of(folder: Path, name: str = "train/loss") -> list[float]:
    return [value for _, value in read_events(folder)[name]]


@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_stored_and_live_reference_give_the_same_run(tmp_path, chain, run_dpo, monkeypatch, precision):
    """And the margin is 0 while the policy is the reference: exactly with the live one, which sees the very batch; with
    the stored one up to the rounding of other padding."""
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", precision)
    _, stored = run_dpo(chain.sft, tmp_path / "stored")
    _, live = run_dpo(chain.sft, tmp_path / "live", ref_on_the_fly=True)
    tolerance = 1e-5 if precision == "no" else 2e-3
    assert losses_of(live, "train/margin")[0] == 0 and losses_of(live)[0] == pytest.approx(math.log(2))
    assert losses_of(live, "train/accuracy")[0] == 0  # a tie is an error
    assert losses_of(stored, "train/margin")[0] == pytest.approx(0, abs=tolerance)
    for name in ("train/loss", "train/chosen_reward", "train/rejected_reward"):
        assert losses_of(stored, name) == pytest.approx(losses_of(live, name), abs=5 * tolerance)
    assert (stored / "ref_logprobs.safetensors").exists() and not (live / "ref_logprobs.safetensors").exists()


def test_file_holds_the_references_logprobs(chain, comparisons):
    stored = load_file(chain.dpo / "ref_logprobs.safetensors")["logprobs"]
    policy, rows = AutoModelForCausalLM.from_pretrained(chain.sft), load_from_disk(comparisons)["train"]
    queries = unpad(rows["query_token"])
    for i, column in enumerate(("chosen_token", "rejected_token")):
        responses = unpad(rows[column])
        assert rows[f"query_{column}"][0][: len(queries[0]) + len(responses[0])] == queries[0] + responses[0]
        with torch.no_grad():
            expected = torch.stack([plain_logprob(policy, *pair) for pair in zip(queries, responses)])
        torch.testing.assert_close(stored[:, i], expected, atol=1e-4, rtol=1e-5)


def test_one_model_in_memory_while_training(tmp_path, chain, run_dpo, monkeypatch):
    real, counts = dpo.dpo_loss, []

    def count_models(*inputs):
        gc.collect()
        counts.append(sum(isinstance(thing, GPTNeoXForCausalLM) for thing in gc.get_objects()))
        return real(*inputs)

    gc.collect()
    others = sum(isinstance(thing, GPTNeoXForCausalLM) for thing in gc.get_objects())
    monkeypatch.setattr(dpo, "dpo_loss", count_models)
    run_dpo(chain.sft, tmp_path / "stored", max_updates=1, eval_rows=2)
    run_dpo(chain.sft, tmp_path / "live", max_updates=1, eval_rows=2, ref_on_the_fly=True)
    assert [count - others for count in counts] == [1, 2]


def test_a_file_serves_other_runs(tmp_path, chain, run_dpo, monkeypatch):
    """--ref_logprobs: another beta, loss and seed start from the file, and do not run the reference to train."""
    file = chain.dpo / "ref_logprobs.safetensors"
    before, shared = file.read_bytes(), {"ref_logprobs": str(file), "eval_rows": 2}
    _, own = run_dpo(chain.sft, tmp_path / "own", beta=0.3, loss="ipo", seed=1, eval_rows=2)
    monkeypatch.setattr(dpo, "save_file", None)
    _, folder = run_dpo(chain.sft, tmp_path / "shared", beta=0.3, loss="ipo", seed=1, **shared)
    assert losses_of(folder) == losses_of(own)
    assert file.read_bytes() == before and not (folder / "ref_logprobs.safetensors").exists()


def test_file_holds_the_rows_that_runs_needed(tmp_path, chain, run_dpo, monkeypatch):
    """A run of one batch takes no more than its four rows; the next one adds what it lacks, and keeps the rest."""
    file, real, forwards = tmp_path / "new" / "ref.safetensors", dpo.map_rows, []
    expected = load_file(chain.dpo / "ref_logprobs.safetensors")["logprobs"]

    def count_rows(accelerator, function, lengths, size):
        forwards.append(len(lengths))
        return real(accelerator, function, lengths, size)

    monkeypatch.setattr(dpo, "map_rows", count_rows)
    known = set()
    for seed, updates in ((5, 1), (6, 2), (6, 1)):
        fields = {"seed": seed, "max_updates": updates, "ref_logprobs": str(file), "eval_rows": 2}
        needed = set(dpo.stream_rows(seed, 13, 0, 4 * updates).tolist())
        forwards.clear()
        run_dpo(chain.sft, tmp_path / f"run_{seed}_{updates}", **fields)
        new, known = needed - known, known | needed
        assert forwards == [len(new)] * bool(new) + [2, 2, 2]  # then two splits of comparisons and one of posts
        stored = load_file(file)["logprobs"]
        assert set((~stored.isnan().any(1)).nonzero()[:, 0].tolist()) == known
        torch.testing.assert_close(stored[sorted(known)], expected[sorted(known)], atol=1e-4, rtol=1e-5)
    assert not list(file.parent.glob("*.tmp"))


def test_files_of_something_else_are_refused(tmp_path, chain, run_dpo, tokenizer, base_models, monkeypatch):
    file = str(chain.dpo / "ref_logprobs.safetensors")
    other = tmp_path / "other_pairs"
    pairs = {name: make_comparison_rows(tokenizer, 13, 8) for name in ("train", "validation", "validation_cnndm")}
    DatasetDict(pairs).save_to_disk(other)

    def assert_refused(what: str, model: Path, **fields):
        with pytest.raises(ValueError, match=rf"(?s){file}.*expected {what} .*found.*--ref_logprobs"):
            run_dpo(model, tmp_path / "out", ref_logprobs=file, **fields)
        assert not (tmp_path / "out").exists()

    assert_refused("dataset", chain.sft, dataset=str(other))
    assert_refused("reference", base_models["gpt_neox"])
    assert_refused("average_logprobs", chain.sft, average_logprobs=True)
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    assert_refused("precision", chain.sft)


def test_a_damaged_file_of_the_reference_is_refused(tmp_path, chain, run_dpo):
    """One bit of one number: the file still can be read."""
    data = bytearray((chain.dpo / "ref_logprobs.safetensors").read_bytes())
    data[-3] ^= 1
    (tmp_path / "ref.safetensors").write_bytes(data)
    with pytest.raises(ValueError, match=r"ref.safetensors: expected values .*, found .*--ref_logprobs"):
        run_dpo(chain.sft, tmp_path / "out", ref_logprobs=str(tmp_path / "ref.safetensors"))
    assert not (tmp_path / "out").exists()


def test_overwritten_run_makes_its_file_anew(tmp_path, chain, run_dpo, base_models):
    _, folder = run_dpo(base_models["gpt_neox"], tmp_path / "run", max_updates=1, eval_rows=2)
    before = load_file(folder / "ref_logprobs.safetensors")["logprobs"]
    run_dpo(chain.sft, folder, max_updates=1, eval_rows=2, overwrite=True)
    after = load_file(folder / "ref_logprobs.safetensors")["logprobs"]
    rows = dpo.stream_rows(44413, 13, 0, 4)
    expected = load_file(chain.dpo / "ref_logprobs.safetensors")["logprobs"]
    torch.testing.assert_close(after[rows], expected[rows], atol=1e-4, rtol=1e-5)
    assert not torch.allclose(before[rows], after[rows])


# ----------------------------------------------------------------------------------------------------------- whole runs


@pytest.mark.parametrize("fields", [
    {"label_smoothing": 0.1}, {"loss": "ipo"}, {"average_logprobs": True, "beta": 2.0}
], ids=str)  # fmt: skip
def test_metrics_are_those_of_transformers_and_the_formula(tmp_path, chain, run_dpo, comparisons, fields):
    """The second batch of a run, with the policy that a run of a single update saved."""
    _, folder = run_dpo(chain.sft, tmp_path / "run", max_updates=2, seed=5, micro_batch_size=1, **fields)
    _, one = run_dpo(chain.sft, tmp_path / "one", max_updates=1, seed=5, **fields)
    policies = [AutoModelForCausalLM.from_pretrained(path) for path in (one, chain.sft)]
    rows = load_from_disk(comparisons)["train"].select(reward.stream_rows(5, 13, 4, 8).tolist())
    logprobs = []
    for policy in policies:
        sides = []
        for column in ("chosen_token", "rejected_token"):
            pairs = list(zip(unpad(rows["query_token"]), unpad(rows[column])))
            with torch.no_grad():
                sums = torch.stack([plain_logprob(policy, *pair) for pair in pairs])
            counts = torch.tensor([len(response) for _, response in pairs])
            sides.append(sums / counts if fields.get("average_logprobs") else sums)
        logprobs.append(torch.stack(sides))
    beta = fields.get("beta", 0.05)
    ratio = logprobs[0] - logprobs[1]
    h = ratio[0] - ratio[1]
    smoothing = fields.get("label_smoothing", 0.0)
    losses = (1 - smoothing) * F.softplus(-beta * h) + smoothing * F.softplus(beta * h)
    losses = (h - 1 / (2 * beta)) ** 2 if "loss" in fields else losses
    events = {name: values[1] for name, values in read_events(folder).items() if name.startswith("train/")}
    assert events["train/loss"] == (8, pytest.approx(losses.mean().item(), rel=1e-4))
    expected = {"margin": beta * h, "chosen_reward": beta * ratio[0], "rejected_reward": beta * ratio[1]}
    expected |= {"chosen_logprob": logprobs[0][0], "rejected_logprob": logprobs[0][1], "accuracy": (h > 0).float()}
    for name, values in expected.items():
        assert events[f"train/{name}"] == (8, pytest.approx(values.mean().item(), rel=1e-3, abs=2e-4)), name


def test_accumulation_changes_nothing(tmp_path, chain, run_dpo):
    results = []
    for size in (4, 1):
        metrics, folder = run_dpo(chain.sft, tmp_path / str(size), micro_batch_size=size)
        results.append(
            losses_of(folder) + losses_of(folder, "train/grad_norm") + [metrics["eval/validation/score_mean"]]
        )
    assert len(results[0]) == 9  # four batches, the last of a single pair
    assert results[0] == pytest.approx(results[1], abs=2e-4)


def test_run_learns_and_reports(chain):
    """Three passes over 13 pairs, of which the true summary is chosen nine times in ten."""
    losses, margins = losses_of(chain.dpo), losses_of(chain.dpo, "train/margin")
    assert losses[0] == pytest.approx(math.log(2), abs=1e-4) and sum(losses[-4:]) < sum(losses[:4]) - 0.1
    assert margins[-1] > 0.1 and losses_of(chain.dpo, "train/accuracy")[-1] == 1
    metrics = chain.metrics["dpo"]
    assert metrics["eval/validation/accuracy"] >= 0.8 and metrics["objective/kl"] > 0.01
    samples = [json.loads(line) for line in (chain.dpo / "samples_validation.jsonl").read_text().splitlines()]
    assert len(samples) == 6 and all(row.keys() == {"query", "response", "reference"} for row in samples)
    model = AutoModelForCausalLM.from_pretrained(chain.dpo)
    assert model.config.model_type == "gpt_neox" and (chain.dpo / "README.md").read_text().count("eval/") == 14


def test_implicit_rewards_go_through_the_reward_models_tables(chain, comparisons):
    """Detail 19: beta (log pi - log ref), from the saved policies by plain transformers, in reward.py's own tables."""
    policies = [AutoModelForCausalLM.from_pretrained(path) for path in (chain.dpo, chain.sft)]
    for split in ("validation", "validation_cnndm"):
        rows, rewards = load_from_disk(comparisons)[split], []
        for column in ("chosen_token", "rejected_token"):
            pairs = list(zip(unpad(rows["query_token"]), unpad(rows[column])))
            with torch.no_grad():
                sums = [torch.stack([plain_logprob(policy, *pair) for pair in pairs]) for policy in policies]
            rewards.append(0.05 * (sums[0] - sums[1]))
        table = reward.accuracy_table(rows, *rewards)
        found = pd.read_csv(chain.dpo / f"accuracy_{split}.csv")
        assert found.accuracy.tolist() == pytest.approx(table.accuracy.tolist())
        assert found.pairs.tolist() == table.pairs.tolist() and set(found.group) == set(table.group)
        _, error = reward.calibration_table((rewards[0] - rewards[1]).numpy())
        metrics = chain.metrics["dpo"]
        assert metrics[f"eval/{split}/ece"] == pytest.approx(error, abs=1e-4)
        assert metrics[f"eval/{split}/score_mean"] == pytest.approx(torch.cat(rewards).mean().item(), abs=1e-4)
        assert (chain.dpo / f"calibration_{split}.png").read_bytes().startswith(b"\x89PNG")
        names = {path.name for path in chain.reward.glob(f"*_{split}.*")}
        assert names == {path.name for path in chain.dpo.glob(f"*_{split}.*")} - {f"samples_{split}.jsonl"}


def test_implicit_rewards_are_means_where_the_loss_is_of_means(tmp_path, chain, run_dpo, comparisons):
    metrics, folder = run_dpo(chain.sft, tmp_path / "run", average_logprobs=True, beta=2.0)
    rewards, rows = [], load_from_disk(comparisons)["validation"]
    policies = [AutoModelForCausalLM.from_pretrained(path) for path in (folder, chain.sft)]
    for query, *responses in zip(*(unpad(rows[column]) for column in dpo.COLUMNS)):
        with torch.no_grad():
            for response in responses:
                policy, reference = (plain_logprob(policy, query, response) for policy in policies)
                rewards.append(2.0 * (policy - reference).item() / len(response))
    assert metrics["eval/validation/score_mean"] == pytest.approx(sum(rewards) / len(rewards), abs=1e-4)


def test_untrained_policy_is_the_sft_policy(tmp_path, chain, run_dpo):
    """lr 0: no KL, no reward, and the very summaries that sft.py sampled."""
    metrics, folder = run_dpo(chain.sft, tmp_path / "run", lr=0.0, max_updates=1)
    assert metrics["objective/kl"] == pytest.approx(0, abs=1e-4)
    assert metrics["eval/validation/score_max"] == pytest.approx(0, abs=1e-5)
    expected = (chain.sft / "samples_validation.jsonl").read_text()
    assert (folder / "samples_validation.jsonl").read_text() == expected


def test_kl_is_the_log_ratio_of_sampled_summaries_at_their_temperature(tmp_path, chain, run_dpo, monkeypatch):
    """By plain transformers on the saved policies, for the very summaries that the run sampled at temperature .7."""
    sampled, generate = [], dpo.generate

    def record(model, queries, tokenizer, response_length, temperature):
        responses, logprobs = generate(model, queries, tokenizer, response_length, temperature)
        if temperature == 0.7:
            sampled.extend(zip(unpad(queries.tolist()), unpad(responses.tolist())))
        return responses, logprobs

    monkeypatch.setattr(dpo, "generate", record)
    metrics, folder = run_dpo(chain.sft, tmp_path / "run", temperature=0.7)
    policies = [AutoModelForCausalLM.from_pretrained(path) for path in (folder, chain.sft)]
    with torch.no_grad():
        sums = [torch.stack([plain_logprob(policy, *pair, 0.7) for pair in sampled]) for policy in policies]
    assert len(sampled) == 6 and metrics["objective/kl"] == pytest.approx((sums[0] - sums[1]).mean().item(), abs=1e-4)


@pytest.mark.parametrize("kind", ["text", "folder", "another tensor"])
def test_a_file_of_another_kind_is_no_reference(tmp_path, chain, run_dpo, kind):
    path = tmp_path / "ref.safetensors"
    if kind == "text":
        path.write_text("log-probabilities")
    elif kind == "folder":
        path.mkdir()
    else:
        save_file({"weight": torch.zeros(2)}, path)
    with pytest.raises(ValueError, match=f"{path}: expected log-probabilities that dpo.py wrote: .*; --overwrite"):
        run_dpo(chain.sft, tmp_path / "out", ref_logprobs=str(path))
    assert not (tmp_path / "out").exists()


def test_a_file_of_the_reference_that_nothing_would_read_is_refused(tmp_path, chain, run_dpo):
    fields = {"ref_on_the_fly": True, "ref_logprobs": str(tmp_path / "ref.safetensors")}
    with pytest.raises(ValueError, match="--ref_on_the_fly reads no --ref_logprobs; give one of them"):
        run_dpo(chain.sft, tmp_path / "out", **fields)
    assert not (tmp_path / "out").exists()


def test_tulus_setting(tmp_path, chain, run_dpo):
    """By the flags that the docs give, of which Args' comment says the same."""
    assert dpo.Args().lr == 3e-6 and dpo.Args().beta == 0.05 and dpo.Args().num_epochs == 1
    flags = re.search(r"Tulu 2.5's: (.*)\)", Path(dpo.__file__).read_text())[1]
    assert f"`{flags}` is the setting" in (ROOT / "docs/dpo.md").read_text()
    args = tyro.cli(dpo.Args, args=flags.split())
    fields = dict(vars(args).items() - vars(dpo.Args()).items())  # what differs
    assert fields == {"num_epochs": 3.0, "lr": 5e-7, "lr_schedule": "linear", "warmup": 0.1, "beta": 0.1}
    _, folder = run_dpo(chain.sft, tmp_path / "tulu", **fields, eval_rows=2)
    rates = losses_of(folder, "train/lr")
    assert len(rates) == 10  # 39 pairs in batches of 4
    assert rates == pytest.approx(
        [5e-7 * f for f in (1 / 2, 1, 8 / 9, 7 / 9, 6 / 9, 5 / 9, 4 / 9, 3 / 9, 2 / 9, 1 / 9)]
    )


def test_models_of_all_kinds_train(tmp_path, base_models, run_dpo, kind):
    _, folder = run_dpo(base_models[kind], tmp_path / kind, lr=3e-3, num_epochs=2.0, gradient_checkpointing=True)
    losses = losses_of(folder)
    assert losses[0] == pytest.approx(math.log(2), abs=1e-4) and min(losses[-3:]) < losses[0] - 0.05
    assert AutoModelForCausalLM.from_pretrained(folder).config.model_type == kind


class Killed(Exception):
    pass


@pytest.mark.parametrize("fields", [{}, {"ref_on_the_fly": True}, {"lose": True}], ids=["stored", "live", "file lost"])
def test_interrupted_run_ends_bit_for_bit_as_an_unbroken_one(tmp_path, chain, run_dpo, monkeypatch, fields):
    """It dies right after the second of four updates. Where the reference's file has gone, it is made anew: from the
    SFT policy, not from the policy as it was trained until then."""
    lose, real = fields.pop("lose", False), dpo.Checkpoints.save

    def save_and_die(checkpoints, update, num_updates):
        real(checkpoints, update, num_updates)
        if update == 2:
            raise Killed

    metrics, whole = run_dpo(chain.sft, tmp_path / "whole", save_every=2, **fields)
    monkeypatch.setattr(dpo.Checkpoints, "save", save_and_die)
    with pytest.raises(Killed):
        run_dpo(chain.sft, tmp_path / "broken", save_every=2, **fields)
    monkeypatch.setattr(dpo.Checkpoints, "save", real)
    if lose:
        (tmp_path / "broken" / "ref_logprobs.safetensors").unlink()
    found, broken = run_dpo(chain.sft, tmp_path / "broken", save_every=2, **fields)
    assert found == metrics
    assert losses_of(broken) == losses_of(whole) and len(losses_of(whole)) == 4
    assert (broken / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes()


def launch(command: list, environment: dict) -> None:
    environment = {**os.environ, **ENVIRONMENT} | environment
    environment = {name: value for name, value in environment.items() if value is not None}
    result = subprocess.run(list(map(str, command)), env=environment, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-4000:]


def command_line(chain, comparisons, sft_dataset, folder: Path, *more) -> list:
    inputs = ["--sft_model", chain.sft, "--dataset", comparisons, "--sft_dataset", sft_dataset, "--output_dir", folder]
    return [ROOT / "dpo.py", *inputs, "--batch_size", 4, "--micro_batch_size", 2, "--response_length", 12, *more]


EQUAL = ("train/loss", "train/margin", "train/grad_norm", "eval/validation/score_mean", "eval/validation/score_std")


def test_two_processes_give_the_run_of_one(tmp_path, chain, run_dpo, comparisons, sft_dataset):
    """Real DDP over gloo. 13 rows in batches of 4: the last has one, so that one process has none of its own."""
    _, one = run_dpo(chain.sft, tmp_path / "one", micro_batch_size=2)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    launch([*torchrun, *command_line(chain, comparisons, sft_dataset, tmp_path / "two", "--lr", 1e-3)], {})
    for name in EQUAL:
        assert losses_of(tmp_path / "two", name) == pytest.approx(losses_of(one, name), abs=2e-4, rel=2e-4), name
    files = [load_file(path / "ref_logprobs.safetensors")["logprobs"] for path in (one, tmp_path / "two")]
    torch.testing.assert_close(files[0], files[1], atol=1e-4, rtol=1e-5)
    for name, weight in load_file(one / "model.safetensors").items():
        other = load_file(tmp_path / "two" / "model.safetensors")[name]
        torch.testing.assert_close(other, weight, atol=2e-3, rtol=1e-2)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(("precision", "tolerance"), [("no", 1e-3), ("bf16", 0.1)])
def test_deepspeed_zero2_gives_the_run_of_the_plain_one(
    tmp_path, chain, run_dpo, comparisons, sft_dataset, precision, tolerance, ranks
):
    """benchmark/zero2.yaml. (accelerate leaves DeepSpeed out if it is told to use the CPU.)"""
    pytest.importorskip("deepspeed")
    _, plain = run_dpo(chain.sft, tmp_path / "plain", micro_batch_size=2)
    accelerate = [sys.executable, "-m", "accelerate.commands.launch", "--num_processes", ranks]
    accelerate += ["--main_process_port", 0, "--mixed_precision", precision]
    accelerate += ["--config_file", ROOT / "benchmark" / "zero2.yaml", ROOT / "tests" / "deepspeed_on_cpu.py"]
    arguments = command_line(chain, comparisons, sft_dataset, tmp_path / "zero2", "--lr", 1e-3, "--save_every", 2)
    launch([*accelerate, *arguments], {"ACCELERATE_USE_CPU": None, "CUDA_VISIBLE_DEVICES": ""})
    states = list((tmp_path / "zero2" / "checkpoints" / "00000002").rglob("*zero*optim_states*"))
    assert len(states) == ranks, "DeepSpeed was not in use, or not on as many ranks"
    for name in EQUAL:
        found, expected = losses_of(tmp_path / "zero2", name), losses_of(plain, name)
        assert found == pytest.approx(expected, abs=tolerance, rel=tolerance), name


# ------------------------------------------------------------------------------------------------------------ bad input


def spoiled(source: Path, target: Path, change) -> str:
    """Copy of a dataset whose train split went through change(columns)."""
    data = load_from_disk(source)
    columns = data["train"].to_dict()
    change(columns)
    DatasetDict(dict(data) | {"train": Dataset.from_dict(columns)}).save_to_disk(target)
    return str(target)


def blank(columns):
    columns["rejected_token"][3] = [PAD] * len(columns["rejected_token"][3])


def blank_query(columns):  # else the first token would be predicted from the row before
    columns["query_token"][3] = [PAD] * len(columns["query_token"][3])


def cut_eos(columns):
    columns["chosen_token"][2] = [PAD if token == 0 else token for token in columns["chosen_token"][2]]


def shift(columns):
    columns["query_token"] = [[t % 319 + 1 if t not in (0, PAD) else t for t in row] for row in columns["query_token"]]


@pytest.mark.parametrize("change, match", [
    (blank, "(?s)train.*rejected_token.*all padding in row 3.*tldr_dataset.py"),
    (blank_query, "(?s)train.*query_token.*all padding in row 3.*tldr_dataset.py"),
    (cut_eos, "(?s)train.*chosen_token.*no EOS.*in row 2.*tldr_dataset.py"),
    (shift, "(?s)query_token.*another tokenizer.*tldr_dataset.py"),
    (lambda columns: columns.pop("query_token"), "(?s)'query_token' is missing.*tldr_dataset.py"),
    (lambda columns: columns["chosen_token"][1].pop(), "(?s)'chosen_token'.*one length.*tldr_dataset.py"),
], ids=["all padding", "no query", "no EOS", "tokenizer", "no column", "ragged"])  # fmt: skip
def test_unfit_comparisons_are_refused(tmp_path, chain, run_dpo, comparisons, change, match):
    dataset = spoiled(comparisons, tmp_path / "spoiled", change)
    with pytest.raises(ValueError, match=match):
        run_dpo(chain.sft, tmp_path / "out", dataset=dataset)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("fields, match", [
    ({"beta": 0.0}, r"beta\n.*greater than 0"),
    ({"label_smoothing": 0.5}, r"label_smoothing\n.*less than 0.5"),
    ({"label_smoothing": -0.1}, r"label_smoothing\n.*greater than or equal to 0"),
    ({"warmup": 100}, r"warmup\n.*less than or equal to 1"),
    ({"label_smoothing": 0.1, "loss": "ipo"}, "--label_smoothing: expected 0 with --loss ipo, found 0.1"),
    ({"micro_batch_size": 3}, "(?s)batch_size.*multiple.*= 3.*4"),
], ids=str)  # fmt: skip
def test_unfit_settings_are_refused(tmp_path, chain, run_dpo, fields, match):
    with pytest.raises(ValueError, match=match):
        run_dpo(chain.sft, tmp_path / "out", **fields)
    assert not (tmp_path / "out").exists()


def test_missing_sft_policy_names_the_command(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    match = r"models/pythia-1b/sft_7.*launch sft.py --model pythia-1b --seed 7 --output_dir models/pythia-1b/sft_7"
    with pytest.raises(FileNotFoundError, match=match):
        dpo.main(dpo.Args(model="pythia-1b", seed=7))
    assert not list(tmp_path.iterdir())


def test_finished_run_is_left_alone(chain, run_dpo):
    before = (chain.dpo / "model.safetensors").read_bytes()
    with pytest.raises(FileExistsError, match=r"(?s)--output_dir.*--overwrite"):
        run_dpo(chain.sft, chain.dpo, num_epochs=3.0)
    assert (chain.dpo / "model.safetensors").read_bytes() == before


# ----------------------------------------------------------------------------------------------------------- real input


def real_comparisons(folder: Path, tokenizer: Path, num_rows: int, max_query_length: int) -> dict:
    """The first of the real comparisons and posts, tokenised by tldr_dataset.py -> paths of the datasets."""
    source = need_shared("data", "tldr")
    for kind, split in itertools.product(("sft", "comparisons"), ("train", "validation")):
        (folder / "raw" / kind).mkdir(parents=True, exist_ok=True)
        with open(source / kind / f"{split}.jsonl") as lines:
            rows = itertools.islice(lines, num_rows if split == "train" else 4)
            (folder / "raw" / kind / f"{split}.jsonl").write_text("".join(rows))
    args = tldr_dataset.Args(str(folder / "data"), tokenizer=str(tokenizer), num_proc=1)
    args.sft, args.comparisons = str(folder / "raw" / "sft"), str(folder / "raw" / "comparisons")
    args.max_query_length = max_query_length
    tldr_dataset.main(args)
    return {"dataset": str(folder / "data" / "comparisons"), "sft_dataset": str(folder / "data" / "sft")}


def pythia_like(folder: Path) -> Path:
    """A random GPT-NeoX of one layer with Pythia's tokenizer and its 50,304 rows."""
    tokenizer = need_shared("data", "tokenizers", "pythia")
    model = AutoModelForCausalLM.from_config(make_config("gpt_neox", 32, 50304, initializer_range=0.02))
    model.gpt_neox.layers, model.config.num_hidden_layers = model.gpt_neox.layers[:1], 1
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(tokenizer).save_pretrained(folder)
    return folder


def hh_rows(tokenizer, path: Path, num_rows: int, max_query: int, max_response: int) -> Dataset:
    """Dialogues of Anthropic's HH as the columns that dpo.py reads: the prompt goes up to the last "Assistant:", what
    the assistant says then is the response. Pairs whose prompts differ, or which are too long, are left out."""
    rows, pad = [], tokenizer.pad_token_id
    for line in path.open():
        chosen, rejected = (text.rsplit("\n\nAssistant:", 1) for text in json.loads(line).values())
        tokens = [tokenizer(text).input_ids for text in (chosen[0] + "\n\nAssistant:", chosen[1], rejected[1])]
        fits = len(tokens[0]) <= max_query and max(map(len, tokens[1:])) < max_response
        if chosen[0] == rejected[0] and chosen[1] != rejected[1] and fits and len(rows) < num_rows:
            ids = [tokens[0], *(response + [tokenizer.eos_token_id] for response in tokens[1:])]
            rows.append([chosen[0] + "\n\nAssistant:", chosen[1] + EOS, *ids])
    columns = {"query": [row[0] for row in rows], "reference_response": [row[1] for row in rows]}
    columns["query_token"] = pad_rows([row[2] for row in rows], pad, left=True, length=max_query)
    for i, name in ((3, "chosen_token"), (4, "rejected_token"), (3, "reference_response_token")):
        columns[name] = pad_rows([row[i] for row in rows], pad, length=max_response)
    return Dataset.from_dict(columns)


def check_real_run(metrics: dict, folder: Path, updates: int, rows: int) -> None:
    losses = losses_of(folder)
    assert len(losses) == updates and losses[0] == pytest.approx(math.log(2), abs=1e-3)
    assert sum(losses[-3:]) < sum(losses[:3]) - 0.02, losses
    assert math.isfinite(metrics["objective/kl"]) and 0 <= metrics["eval/validation/accuracy"] <= 1
    samples = [json.loads(line) for line in (folder / "samples_validation.jsonl").read_text().splitlines()]
    assert len(samples) == rows and all(row["query"] and row["reference"] for row in samples)


REAL = {"batch_size": 4, "micro_batch_size": 2, "eval_splits": ("validation",), "num_epochs": 3.0}


def test_real_comparisons_with_pythias_tokenizer(tmp_path, run_dpo):
    """The paper's lengths (512, 169), 12 comparisons three times over."""
    base = pythia_like(tmp_path / "base")
    data = real_comparisons(tmp_path, base, 12, 512)
    metrics, folder = run_dpo(base, tmp_path / "run", **REAL | data | {"lr": 1e-3, "response_length": 53})
    check_real_run(metrics, folder, 9, 4)
    assert load_file(folder / "ref_logprobs.safetensors")["logprobs"].shape == (12, 2)


@pytest.mark.slow
def test_real_comparisons_with_a_trained_llama(tmp_path, run_dpo):
    """260 thousand parameters, its own tokenizer, lengths computed from the data."""
    base = need_shared("data", "models", "stories260k")
    data = real_comparisons(tmp_path, base, 32, 256)
    metrics, folder = run_dpo(base, tmp_path / "run", **REAL | data | {"lr": 3e-4, "response_length": 53})
    check_real_run(metrics, folder, 24, 4)


@pytest.mark.slow
@pytest.mark.parametrize("model", ["pythia", "stories260k"])
def test_real_dialogues_of_several_turns(tmp_path, run_dpo, model):
    """Anthropic's HH: prompts of up to 300 tokens, among them dialogues of several turns."""
    base = pythia_like(tmp_path / "base") if model == "pythia" else need_shared("data", "models", "stories260k")
    path, tokenizer = need_shared("data", "hh", "harmless_base_test.jsonl"), dpo.load_tokenizer(str(base))
    rows = hh_rows(tokenizer, path, 28, 300, 120)
    assert len(rows) == 28 and sum(query.count("\n\nHuman:") > 1 for query in rows["query"]) >= 5
    data = DatasetDict({"train": rows.select(range(24)), "validation": rows.select(range(24, 28))})
    data.save_to_disk(tmp_path / "hh")
    fields = {"dataset": str(tmp_path / "hh"), "sft_dataset": str(tmp_path / "hh"), "lr": 1e-3, "response_length": 40}
    metrics, folder = run_dpo(base, tmp_path / "run", **REAL | fields)
    check_real_run(metrics, folder, 18, 4)
