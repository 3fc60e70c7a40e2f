"""benchmark/compare.py: ILQL's sampling distribution, and the table."""

import json
import sys

import pandas as pd
import pytest
import torch
from conftest import ROOT, lean_to_eos, make_policy

import ilql
import ppo

sys.path.insert(0, str(ROOT / "benchmark"))
import compare  # noqa: E402

PAD = 320


@pytest.fixture
def model():
    torch.manual_seed(0)
    return ilql.ILQL(make_policy("gpt_neox", width=16)).eval()


@torch.no_grad()
def test_logprobs_of_ilql_at_beta_0_are_the_policys(model, monkeypatch):
    """Without top-k and with a tokenizer that owns every row but [PAD], the distribution is the language model's."""
    torch.manual_seed(1)
    pad = model.policy.config.vocab_size - 1
    monkeypatch.setattr(compare, "TOP_K", 0)
    queries, responses = torch.randint(1, pad, (3, 5)), torch.randint(1, pad, (3, 7))
    queries[0, :2] = pad
    responses[1, 4:] = pad
    found = compare.ilql_logprobs(model, queries, responses, pad, pad, 0.0, 0.7)
    plain = torch.cat([queries, responses], dim=1)  # padded on both sides
    logits = model.policy(**ppo.model_inputs(plain, pad)).logits[:, 4:-1] / 0.7
    logits[..., pad] = -torch.inf
    expected = logits.log_softmax(-1).gather(2, responses[..., None])[..., 0].masked_fill(responses == pad, 0.0)
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


@torch.no_grad()
@pytest.mark.parametrize("beta", [0.0, 8.0])
def test_logprobs_of_ilql_are_those_of_its_samples(model, tokenizer, beta):
    """20,000 samples of one token; top-k of the tokens that the tokenizer owns."""
    queries = torch.randint(1, 300, (1, 6)).repeat(20_000, 1)
    samples = ilql.generate_ilql(model, queries, tokenizer, 1, [beta], compare.TOP_K, 0.7)[0]
    found = samples.flatten().bincount(minlength=PAD) / 20_000
    every = torch.arange(PAD)[:, None]
    expected = compare.ilql_logprobs(model, queries[:PAD], every, PAD, len(tokenizer), beta, 0.7).exp()[:, 0]
    assert (expected > 0).sum() == compare.TOP_K and expected.sum().item() == pytest.approx(1, abs=1e-5)
    assert (found - expected).abs().max() < 4 * 0.5 / 20_000**0.5


@torch.no_grad()
def test_kl_of_a_summary_that_ends_at_once_and_of_one_that_never_does(tokenizer):
    """The first is sure of EOS, so its KL is what the reference is not: a sum over tokens, here of one."""
    reference, ends, goes_on = (make_policy("gpt_neox", width=16) for _ in range(3))
    lean_to_eos(ends, 100.0)
    lean_to_eos(goes_on, -100.0)
    queries = torch.randint(1, 300, (8, 6))
    policies = {"ends": (ends, None), "goes on": (goes_on, None)}
    table, summaries = compare.sampled(policies, reference, queries, tokenizer, 0.7)
    logprobs, _ = ppo.get_logprobs(reference, queries, torch.zeros(8, 1).long(), PAD, 0.7)
    assert table.loc["ends"].tolist() == pytest.approx([-logprobs.mean().item(), 1, 1], rel=1e-4)
    assert table.loc["goes on", ["EOS rate", "tokens"]].tolist() == [0, 48]
    assert summaries["ends"] == [""] * 8 and len(summaries["goes on"]) == 8 and all(summaries["goes on"])


@torch.no_grad()
def test_kl_to_itself_is_0_and_of_another_policy_above(model, tokenizer):
    policy = make_policy("gpt_neox", width=16)
    queries = torch.randint(1, 300, (8, 6))
    table, _ = compare.sampled({"same": (policy, None), "ILQL": (model, 2.0)}, policy, queries, tokenizer, 0.7)
    assert table.loc["same", "KL"] == pytest.approx(0, abs=1e-4) and table.loc["ILQL", "KL"] > 0.5
    assert ((table["EOS rate"] >= 0) & (table["EOS rate"] <= 1)).all() and (table.tokens <= 48).all()


def test_seconds_of_a_policy(tmp_path):
    """PPO's hold its reward model's; the base model is trained once, for all seeds; what was interrupted adds up."""
    (tmp_path / "seconds_1.csv").write_text("base,10\nsft,5\nreward,3\nppo,7\n")
    (tmp_path / "seconds_2.csv").write_text("sft,50\nreward,30\nppo,70\nppo,2\ndpo,6\n")
    seconds = compare.seconds_of(tmp_path, 2)
    assert {name: seconds[name] for name in ("base", "sft", "ppo", "dpo")} == {
        "base": 10,
        "sft": 50,
        "ppo": 102,
        "dpo": 6,
    }


def test_table_as_markdown():
    columns = {"quality": 1.234, "quality low": 1.0, "quality high": 1.5, "KL": 2.0, "seconds": 61.7}
    text = compare.markdown(pd.DataFrame(columns, index=["SFT"]))
    assert text.splitlines()[0] == "| | quality | KL | seconds |"
    assert text.splitlines()[2] == "| SFT | 1.23 [1.00, 1.50] | 2.00 | 62 |"


def test_seeds_are_gathered_and_counted_where_intervals_part(tmp_path):
    names = ["base", "SFT", "DPO"]
    for seed, low in ((1, 0.5), (2, 0.2)):
        win_rate = {"win_rate": [0.2, 0.25, 0.6], "win_rate low": [0.1, 0.2, low], "win_rate high": [0.3, 0.3, 0.7]}
        others = {"quality": 1.0, "words": 9.0, "invented": 0.1, "KL": 2.0, "EOS rate": 1.0, "seconds": 10.0 * seed}
        others["sampled win rate"] = 0.4
        pd.DataFrame(win_rate | others, index=names).to_csv(tmp_path / f"compare_{seed}.csv")
    lines = {line.split("|")[1].strip(): line for line in compare.gather(tmp_path).splitlines()}
    assert "1 of 2" in lines["DPO"] and "0.60 [0.50, 0.70]" in lines["DPO"] and lines["DPO"].endswith("| 15 |")
    assert "of 2" not in lines["SFT"]


def test_accuracies_are_gathered_by_what_the_policies_were_trained_on(tmp_path):
    for seed in (1, 2):
        pd.DataFrame().to_csv(tmp_path / f"compare_{seed}.csv")
        for i, stage in enumerate(("reward", "dpo")):
            folder = tmp_path / f"{stage}_{seed}"
            folder.mkdir()
            rows = [("overall", "", 0.7), ("split", "valid1", 0.6 + seed / 10), ("split", "valid2", 0.5 + i / 10)]
            table = pd.DataFrame(rows, columns=["group", "value", "accuracy"])
            table.to_csv(folder / "accuracy_validation.csv", index=False)
            metrics = {"eval/validation_cnndm/accuracy": 0.51, "eval/validation/ece": 0.01}
            metrics["eval/validation_cnndm/ece"] = 0.02
            (folder / "run.json").write_text(json.dumps({"metrics": metrics}))
    lines = compare.gather_accuracies(tmp_path).splitlines()
    assert lines[0] == "| | | 1 | 2 |" and "| seen policies | reward model | 0.700 | 0.800 |" in lines
    assert "| unseen policies | DPO's implicit reward | 0.600 | 0.600 |" in lines
    assert "| ECE, CNN/DM | reward model | 0.020 | 0.020 |" in lines


def test_policies_that_are_out_of_date_are_refused(tmp_path):
    needs = {"base": [], "sft_1": ["base"], "reward_1": ["sft_1"], "ppo_1": ["sft_1", "reward_1"]}
    needs |= {"dpo_1": ["an older one"], "ilql_1": ["sft_1"]}
    for path, ids in needs.items():
        (tmp_path / path).mkdir()
        (tmp_path / path / "run.json").write_text(json.dumps({"tracker_id": path, "stage_ids": ids}))
    with pytest.raises(ValueError, match="found dpo from others.*/dpo_1$"):
        compare.main(compare.Args(tmp_path, seed=1))


def test_nothing_to_gather_says_what_to_run(tmp_path):
    with pytest.raises(FileNotFoundError, match="compare_<seed>.csv, found none; run benchmark/compare.sh"):
        compare.main(compare.Args(tmp_path, all=True))
