"""reward.py: loss, score position, normalisation, probes, tables, calibration, and whole runs."""

import json
import math
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch
from conftest import make_policy, make_reward_model, pad_rows, read_events
from datasets import Dataset, load_from_disk
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, PreTrainedTokenizerFast
from transformers.modeling_utils import AttentionInterface

import reward

PAD = 320
ROWS = [[5, 6, 7, 8, 0], [9, 10, 0], [11, 12, 13, 14, 15, 16, 0]]


@pytest.fixture(autouse=True)
def own_attention(monkeypatch):
    """The scripts register theirs under one name: in one process, the one imported last would be tested."""
    monkeypatch.setitem(AttentionInterface._global_mapping, "packed", reward.pair_attention)


def plain_scores(model, rows: list[list[int]]) -> torch.Tensor:
    """Score at the last token, one unpadded row at a time, by transformers' own logits of every token."""
    with torch.no_grad():
        hidden = [model.base_model(torch.tensor([row])).last_hidden_state[0, -1] for row in rows]
        return torch.stack([model.score(h)[0] for h in hidden]) + getattr(model.config, "score_bias", 0.0)


# ----------------------------------------------------------------------------------------------------------------- loss


def test_reward_loss_by_hand():
    """DESIGN 4, number 2."""
    chosen, rejected = torch.tensor([1.0], requires_grad=True), torch.tensor([0.0])
    loss = reward.reward_loss(chosen, rejected)
    loss.backward()
    assert loss.item() == pytest.approx(0.313262, abs=1e-6)
    assert chosen.grad.item() == pytest.approx(-0.268941, abs=1e-6)
    assert reward.reward_loss(torch.zeros(1), torch.zeros(1)).item() == pytest.approx(math.log(2))
    assert reward.reward_loss(torch.tensor([1.0, 0.0]), torch.zeros(2)).item() == pytest.approx(0.313262 + math.log(2))


# ------------------------------------------------------------------------------------------------------- score position


def test_pairs_that_share_their_post_score_as_each_alone(kind):
    """Scores and gradients of pairs in one row, against each sequence by itself; [PAD] has no row in the embedding."""
    chosen, rejected = (
        [[5, 6, 7, 0], [9, 0], [11, 12, 13, 14, 15, 0], [5, 6, 0]],
        [[5, 6, 8, 9, 10, 0], [8, 9, 0], [11, 12, 13, 0], [5, 6, 0]],
    )
    results = []
    for together in (True, False):
        model = make_reward_model(kind, vocab_size=320, pad_token_id=None)
        if together:
            columns = (torch.tensor(pad_rows(rows, PAD, length=9)) for rows in (chosen, rejected))
            scores = reward.Scorer(model, PAD)(*columns)
        else:
            scores = torch.cat([reward.get_scores(model, torch.tensor([row]), PAD) for row in chosen + rejected])
            scores = scores.view(2, 4)
        reward.reward_loss(*scores).backward()
        gradients = torch.cat(
            [parameter.grad.flatten() for parameter in model.parameters() if parameter.grad is not None]
        )
        results.append((scores.detach(), gradients))
    torch.testing.assert_close(results[0], results[1], atol=1e-5, rtol=1e-5)


def test_pair_inputs_hold_the_post_once():
    """Padded on the right, and the post on the left, too; the second pair has nothing in common."""
    model = make_reward_model("gpt_neox")
    for left in (0, 2):
        columns = ([[5, 6, 7, 0, PAD], [9, 0, PAD, PAD, PAD]], [[5, 6, 8, 9, 0], [8, 9, 0, PAD, PAD]])
        tokens = [torch.tensor([[PAD] * left + row for row in rows]) for rows in columns]
        inputs, index = reward.pair_inputs(model, *tokens, PAD)
        assert inputs["input_ids"].tolist() == [[5, 6, 7, 0, 8, 9, 0, 9, 0, 8, 9, 0]]
        assert inputs["position_ids"].tolist() == [[0, 1, 2, 3, 2, 3, 4, 0, 1, 0, 1, 2]]
        assert inputs["attention_mask"].tolist() == [[[[4, 3, 2, 3], [0, 2, 0, 0]]]]
        assert index[0, 0, left : left + 4].tolist() == [0, 1, 2, 3] and index[0, 1, left : left + 2].tolist() == [7, 8]
        assert index[1, 0, left:].tolist() == [0, 1, 4, 5, 6] and index[1, 1, left : left + 3].tolist() == [9, 10, 11]


def test_score_is_read_at_eos_or_at_the_last_token():
    """Right-padded rows, and left-padded queries in front of right-padded responses; EOS comes first in one row."""
    rows = [[5, 6, 0], [5, 6, 7, 8, 0], [5, 6, 7, 8, 9], [0]]
    model = make_reward_model("gpt_neox")
    expected = plain_scores(model, rows)
    right = torch.tensor(pad_rows(rows, PAD, length=6))
    both = torch.cat([torch.full((4, 2), PAD), right], dim=1)
    with torch.no_grad():
        for tokens in (right, both):
            torch.testing.assert_close(reward.get_scores(model, tokens, PAD), expected, atol=1e-5, rtol=1e-5)


def test_padding_changes_no_score(kind):
    """Right, more right, and left padding of the query, with a [PAD] that has no row in the embedding."""
    model = make_reward_model(kind, vocab_size=320, pad_token_id=None)
    expected = plain_scores(model, ROWS)
    with torch.no_grad():
        for length in (7, 20):
            scores = reward.get_scores(model, torch.tensor(pad_rows(ROWS, PAD, length=length)), PAD)
            torch.testing.assert_close(scores, expected, atol=1e-5, rtol=1e-5)
        queries, responses = pad_rows([row[:2] for row in ROWS], PAD, True, 6), pad_rows([row[2:] for row in ROWS], PAD)
        tokens = torch.tensor([query + response for query, response in zip(queries, responses)])
        torch.testing.assert_close(reward.get_scores(model, tokens, PAD), expected, atol=1e-5, rtol=1e-5)


def test_trimmed_loss_and_gradients_are_those_of_the_padded_pairs(kind):
    results = []
    for length in (7, 25):
        model = make_reward_model(kind)
        scores = reward.get_scores(model, torch.tensor(pad_rows(ROWS + ROWS[:1], PAD, length=length)), PAD)
        loss = reward.reward_loss(*scores.chunk(2))
        loss.backward()
        results.append((loss, torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])))
    torch.testing.assert_close(results[0], results[1], atol=1e-5, rtol=1e-5)


def test_close_scores_do_not_tie_under_autocast():
    """In bf16 the two scores would round to the same of 8 bits."""
    model = make_reward_model("gpt_neox")
    with torch.no_grad():
        model.score.weight.fill_(1.0)
        hidden = torch.tensor([[2.0, 1.0], [2.0, 1.004]]).repeat(1, model.score.in_features // 2)
        with torch.autocast("cpu", torch.bfloat16):
            low, high = reward.apply_head(model, hidden)
        assert low.dtype == torch.float32 and low < high < low * 1.01
        assert reward.apply_head(model.bfloat16(), hidden.bfloat16()).dtype == torch.float32  # as under DeepSpeed


# -------------------------------------------------------------------------------------------------------- normalisation


@pytest.mark.parametrize("bias", [torch.nn.Parameter(torch.zeros(1)), None], ids=["norm with bias", "norm without"])
def test_shift_by_hand(bias):
    """DESIGN 4, number 8: scores [1, 3] -> shift 2 -> [-1, 1]; repeating leaves it."""
    norm, score = SimpleNamespace(bias=bias), torch.nn.Linear(1, 1, bias=False)
    score.weight.data.fill_(1.0)
    model = SimpleNamespace(base_model=SimpleNamespace(norm=norm), score=score, config=SimpleNamespace())

    def scores() -> list[float]:
        hidden = torch.tensor([[1.0], [3.0]]) + (norm.bias if norm.bias is not None else 0.0)
        return reward.apply_head(model, hidden).tolist()

    assert scores() == [1, 3]
    for _ in range(3):
        reward.shift_scores(model, sum(scores()) / 2)
        assert scores() == pytest.approx([-1, 1])


def test_shift_is_exact_repeats_and_survives_saving(tmp_path, kind):
    model, tokens = make_reward_model(kind), torch.tensor(pad_rows(ROWS, PAD))
    before = reward.get_scores(model, tokens, PAD).detach()
    reward.shift_scores(model, before.mean().item())
    after = reward.get_scores(model, tokens, PAD).detach()
    torch.testing.assert_close(after, before - before.mean(), atol=2e-5, rtol=1e-5)
    reward.shift_scores(model, after.mean().item())
    torch.testing.assert_close(reward.get_scores(model, tokens, PAD).detach(), after, atol=2e-5, rtol=1e-5)
    model.save_pretrained(tmp_path)
    loaded = reward.load_reward_model(str(tmp_path), PAD)
    torch.testing.assert_close(reward.get_scores(loaded, tokens, PAD).detach(), after, atol=2e-5, rtol=1e-5)
    loaded.save_pretrained(tmp_path / "again")
    again = reward.load_reward_model(str(tmp_path / "again"), PAD)
    torch.testing.assert_close(reward.get_scores(again, tokens, PAD).detach(), after, atol=2e-5, rtol=1e-5)


def test_plain_transformers_ranks_alike(tmp_path, kind):
    """AutoModelForSequenceClassification, without a line of this project, gives the same differences of scores."""
    model, tokens = make_reward_model(kind), torch.tensor(pad_rows(ROWS, PAD))
    reward.shift_scores(model, 0.7)
    ours = reward.get_scores(model, tokens, PAD).detach()
    model.save_pretrained(tmp_path)
    plain = AutoModelForSequenceClassification.from_pretrained(tmp_path, num_labels=1)
    with torch.no_grad():
        theirs = plain(tokens, attention_mask=(tokens != PAD).long()).logits[:, 0]
    torch.testing.assert_close(theirs - theirs[0], ours - ours[0], atol=1e-4, rtol=1e-4)
    if kind != "llama":  # folded into the final norm's bias, so the scores themselves are the same
        torch.testing.assert_close(theirs, ours, atol=1e-4, rtol=1e-4)


def test_plain_transformers_scores_eos_also_where_the_base_model_pads_with_it(tmp_path, run_reward, tokenizer):
    """Many a GPT-2: its config.json has EOS as PAD, and the embedding no row for [PAD]. One sequence at a time."""
    make_policy("gpt2", vocab_size=320, pad_token_id=0).save_pretrained(tmp_path / "sft")
    tokenizer.save_pretrained(tmp_path / "sft")
    _, folder = run_reward(tmp_path / "sft", tmp_path / "reward", max_updates=1, eval_rows=4)
    plain = AutoModelForSequenceClassification.from_pretrained(folder)
    with torch.no_grad():
        theirs = torch.cat([plain(torch.tensor([row])).logits[:, 0] for row in ROWS])
    ours = reward.get_scores(reward.load_reward_model(str(folder), PAD), torch.tensor(pad_rows(ROWS, PAD)), PAD)
    torch.testing.assert_close(theirs, ours.detach(), atol=1e-4, rtol=1e-4)


def test_references_score_zero_after_training(chain, tokenizer, sft_dataset):
    """Mean over all SFT train references, read back from the saved model."""
    model = reward.load_reward_model(str(chain.reward), PAD)
    tokens = torch.tensor(load_from_disk(sft_dataset)["train"]["query_reference_response_token"])
    scores = reward.get_scores(model, tokens, PAD)
    assert scores.mean().item() == pytest.approx(0, abs=1e-4) and scores.std() > 0.05


def test_training_again_keeps_head_and_normalisation(tmp_path, chain, run_reward):
    """A reward model is a start for another run: with lr 0 all its scores stay."""
    _, folder = run_reward(chain.reward, tmp_path / "again", lr=0.0, max_updates=1)
    tokens = torch.tensor(pad_rows(ROWS, PAD))
    first, second = (reward.load_reward_model(str(path), PAD) for path in (chain.reward, folder))
    expected, found = (reward.get_scores(model, tokens, PAD).detach() for model in (first, second))
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


# ------------------------------------------------------------------------------------------------------ probes and head


@pytest.fixture
def saved(tmp_path, chain):
    """A copy of the trained reward model that a test may spoil."""
    for path in chain.reward.iterdir():
        if path.is_file():
            (tmp_path / path.name).write_bytes(path.read_bytes())
    return tmp_path


def test_probes_are_the_scores_of_the_saved_model(chain):
    probes = json.loads((chain.reward / "probes.json").read_text())
    model = reward.load_reward_model(str(chain.reward), PAD)
    assert len(probes) >= 3
    expected = plain_scores(model, [probe["tokens"] for probe in probes]).tolist()
    assert [probe["score"] for probe in probes] == pytest.approx(expected, abs=1e-4)


def test_a_lost_head_is_an_error(saved):
    weights = load_file(saved / "model.safetensors")
    save_file(
        {k: v for k, v in weights.items() if not k.startswith("score")}, saved / "model.safetensors", {"format": "pt"}
    )
    with pytest.raises(ValueError, match=r"(?s)head.*score.weight.*reward.py"):
        reward.load_reward_model(str(saved), PAD)


def test_changed_weights_do_not_match_the_probes(saved):
    weights = load_file(saved / "model.safetensors")
    weights["score.weight"] *= -1
    save_file(weights, saved / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=r"(?s)probe scores.*reward.py"):
        reward.load_reward_model(str(saved), PAD)


@pytest.mark.parametrize("mean", [3.0, -3.0])
def test_a_lost_shift_does_not_match_the_probes(tmp_path, mean):
    """Llama's norm has no bias: the shift is in config.json, and a config.json without it is caught."""
    model = make_reward_model("llama")
    reward.shift_scores(model, mean)
    model.save_pretrained(tmp_path)
    probes = [{"tokens": row, "score": score} for row, score in zip(ROWS, plain_scores(model, ROWS).tolist())]
    (tmp_path / "probes.json").write_text(json.dumps(probes))
    reward.load_reward_model(str(tmp_path), PAD)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config.pop("score_bias") == pytest.approx(-mean)
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="probe scores"):
        reward.load_reward_model(str(tmp_path), PAD)


def test_head_starts_with_the_papers_deviation(tmp_path, run_reward, tokenizer_path):
    """1 / sqrt(D + 1), on a model of width 512 whose own initializer_range is far from it; lr 0 keeps it so."""
    make_policy("gpt_neox", width=512, initializer_range=0.5).save_pretrained(tmp_path / "base")
    PreTrainedTokenizerFast.from_pretrained(tokenizer_path).save_pretrained(tmp_path / "base")
    settings = {"lr": 0.0, "max_updates": 1, "eval_rows": 2, "normalisation_rows": 2}
    _, folder = run_reward(tmp_path / "base", tmp_path / "reward", **settings)
    weights = load_file(folder / "model.safetensors")
    head = weights["score.weight"]
    assert head.shape == (1, 512) and "score.bias" not in weights
    assert head.std().item() == pytest.approx(1 / math.sqrt(513), rel=0.12)  # 4 standard errors
    assert abs(head.mean().item()) < 4 / 512


# ----------------------------------------------------------------------------------------------- tables and calibration


def test_accuracy_tables_by_hand():
    dataset = Dataset.from_dict(
        {
            "batch": ["a", "a", "b", "b"],
            "split": ["train", "valid1", "valid1", "valid1"],
            "extra.confidence": [1, 9, 9, None],
            "policies": ["ref--sup1", "ref--sup1", "ref--sup4", "ref--sup4"],
            "other": [1, 2, 3, 4],
        }
    )
    chosen, rejected = (
        torch.tensor([1.0, 0.5, 2.0, -1.0]),
        torch.tensor([0.0, 0.5, 3.0, -2.0]),
    )  # right, tie, wrong, right
    table = reward.accuracy_table(dataset, chosen, rejected)
    rows = {(row.group, str(row.value)): (row.pairs, row.accuracy) for row in table.itertuples()}
    assert rows["overall", "all"] == (4, 0.5)  # a tie is not accurate
    assert rows["batch", "a"] == (2, 0.5) and rows["batch", "b"] == (2, 0.5)
    assert rows["split", "train"] == (1, 1.0) and rows["split", "valid1"] == (3, pytest.approx(1 / 3))
    assert rows["extra.confidence", "1.0"] == (1, 1.0) and rows["extra.confidence", "9.0"] == (2, 0.0)
    assert rows["extra.confidence", "nan"] == (1, 1.0)
    assert rows["policies", "ref--sup1"] == (2, 0.5)
    assert table.group.iloc[0] == "overall" and "other" not in set(table.group)


def test_metrics_of_a_split_by_hand(tmp_path):
    """Batch a is right in 1 of 1, b in 1 of 3: the metric is of all pairs, and its scores are those of both sides."""
    dataset = Dataset.from_dict({"batch": ["a", "b", "b", "b"]})
    chosen, rejected = torch.tensor([1.0, 2.0, 0.0, -1.0]), torch.tensor([0.0, 0.0, 2.0, 0.0])
    metrics = reward.evaluate_preferences(tmp_path, "validation", dataset, chosen, rejected)
    _, error = reward.calibration_table(np.array([1.0, 2.0, -2.0, -1.0]))
    expected = {"accuracy": 0.5, "ece": error, "score_mean": 0.5, "score_min": -1, "score_max": 2}
    expected["score_std"] = np.std([1, 2, 0, -1, 0, 0, 2, 0], ddof=1)
    assert metrics == {f"eval/validation/{name}": pytest.approx(value) for name, value in expected.items()}


def test_calibration_by_hand():
    """One bin of margin 2: confidence sigmoid(2) = .8808, accuracy 3/4, so the error is their difference."""
    table, error = reward.calibration_table(np.array([2.0, 2.0, -2.0, 2.0]))
    assert len(table) == 1 and table.pairs[0] == 4
    assert (table.confidence[0], table.accuracy[0]) == pytest.approx((0.880797, 0.75), abs=1e-6)
    assert error == pytest.approx(0.130797, abs=1e-6)


def test_calibration_weighs_bins_by_their_pairs():
    """Two bins: margin 0 right in 0 of 2 (confidence .5), margin 4 right in 6 of 6 (.982014)."""
    table, error = reward.calibration_table(np.array([0.0, 0.0, 4, 4, 4, 4, 4, 4]), num_bins=4)
    assert sum(table.pairs) == 8 and table.accuracy.tolist() == [0, 1]
    assert error == pytest.approx((2 * 0.5 + 6 * 0.017986) / 8, abs=1e-5)


def test_a_calibrated_model_has_a_small_error():
    rng = np.random.default_rng(0)
    size = rng.exponential(1.5, 20_000)
    margins = np.where(rng.random(20_000) < 1 / (1 + np.exp(-size)), size, -size)
    _, error = reward.calibration_table(margins)
    _, overconfident = reward.calibration_table(margins * 4)
    assert error < 0.02 and overconfident > 0.1


# ----------------------------------------------------------------------------------------------------------- whole runs


def test_run_logs_the_mean_over_pairs(tmp_path, chain, run_reward, comparisons):
    """Loss and accuracy of the first batch at lr 0, from the head that was saved: no micro-batch counts more."""
    settings = {"lr": 0.0, "max_updates": 1, "seed": 5, "micro_batch_size": 1}
    _, folder = run_reward(chain.sft, tmp_path / "run", **settings)
    model = reward.load_reward_model(str(folder), PAD)
    split = load_from_disk(comparisons)["train"].select(reward.stream_rows(5, 13, 0, 4).tolist())
    chosen, rejected = (
        plain_scores(model, [[t for t in row if t != PAD] for row in split[f"query_{name}_token"]])
        for name in ("chosen", "rejected")
    )
    events = read_events(folder)
    expected = torch.nn.functional.softplus(rejected - chosen).mean().item()
    assert events["train/loss"] == [(4, pytest.approx(expected, abs=1e-5))]
    assert events["train/accuracy"] == [(4, pytest.approx((chosen > rejected).float().mean().item()))]
    margin = events["train/chosen_score"][0][1] - events["train/rejected_score"][0][1]  # the shift came later
    assert margin == pytest.approx((chosen - rejected).mean().item(), abs=1e-4)


def test_a_tie_is_an_error_in_training_too(tmp_path, chain, run_reward, monkeypatch):
    monkeypatch.setattr(reward, "apply_head", lambda model, hidden: 0 * hidden.sum(-1))
    _, folder = run_reward(chain.sft, tmp_path / "run", max_updates=1, eval_rows=2)
    assert read_events(folder)["train/accuracy"] == [(4, 0)]


def test_accumulation_changes_nothing(tmp_path, chain, run_reward):
    results = []
    for size in (4, 1):
        metrics, folder = run_reward(chain.sft, tmp_path / str(size), micro_batch_size=size, lr=1e-3)
        losses = [value for _, value in read_events(folder)["train/loss"]]
        results.append(losses + [metrics["eval/validation/score_mean"]])
    assert len(results[0]) == 5  # four batches, the last of a single pair
    assert results[0] == pytest.approx(results[1], abs=2e-4)


def test_run_learns_and_reports(chain):
    losses = [value for _, value in read_events(chain.reward)["train/loss"]]
    assert sum(losses[-4:]) < sum(losses[:4])
    metrics = chain.metrics["reward"]
    for split, pairs in (("validation", 10), ("validation_cnndm", 5)):
        table = pd.read_csv(chain.reward / f"accuracy_{split}.csv")
        overall = table[table.group == "overall"].iloc[0]
        assert overall.pairs == pairs and overall.accuracy == pytest.approx(metrics[f"eval/{split}/accuracy"])
        assert table.groupby("group").pairs.sum().eq(pairs).all()
        assert set(table.group) == {"overall", "batch", "split", "extra.confidence", "policies"}
        assert pd.read_csv(chain.reward / f"calibration_{split}.csv").pairs.sum() == pairs
        assert (chain.reward / f"calibration_{split}.png").read_bytes().startswith(b"\x89PNG")
        assert (
            metrics[f"eval/{split}/score_min"]
            <= metrics[f"eval/{split}/score_mean"]
            <= metrics[f"eval/{split}/score_max"]
        )


def test_evaluation_is_that_of_the_saved_model(chain, comparisons):
    model = reward.load_reward_model(str(chain.reward), PAD)
    for split in ("validation", "validation_cnndm"):
        rows = load_from_disk(comparisons)[split]
        columns = (rows[f"query_{side}_token"] for side in ("chosen", "rejected"))
        scores = [plain_scores(model, [[t for t in row if t != PAD] for row in column]) for column in columns]
        found = pd.read_csv(chain.reward / f"accuracy_{split}.csv")
        assert found.accuracy.tolist() == pytest.approx(reward.accuracy_table(rows, *scores).accuracy.tolist())


def test_left_and_right_padding_score_alike(chain):
    assert abs(chain.metrics["reward"]["eval/left_minus_right_padding"]) < 1e-4


def test_token_logits_of_an_example_end_in_its_score(chain):
    table = pd.read_csv(chain.reward / "reward_logits_example.csv", keep_default_na=False)
    assert table.token.iloc[-1] == "<|endoftext|>"
    model, tokenizer = reward.load_reward_model(str(chain.reward), PAD).eval(), reward.load_tokenizer(str(chain.reward))
    with torch.no_grad():
        score = reward.get_scores(model, torch.tensor([tokenizer.convert_tokens_to_ids(table.token.tolist())]), PAD)
    assert table.reward_logit.iloc[-1] == pytest.approx(score.item(), abs=1e-4)


def test_probes_are_short(chain, sft_dataset):
    """Each stage that loads the model scores them on the CPU, which at 6.9B takes long."""
    rows = load_from_disk(sft_dataset)["train"]["query_reference_response_token"]
    lengths = sorted(sum(token != PAD for token in row) for row in rows)
    probes = json.loads((chain.reward / "probes.json").read_text())
    assert [len(probe["tokens"]) for probe in probes] == lengths[:4]


def test_run_starts_from_the_sft_policy(tmp_path, chain, run_reward):
    """With lr 0 the trunk that is saved is the policy's (but for the final norm's bias, which holds the shift)."""
    _, folder = run_reward(chain.sft, tmp_path / "run", lr=0.0, max_updates=1)
    policy = AutoModelForCausalLM.from_pretrained(chain.sft).base_model.state_dict()
    trunk = reward.load_reward_model(str(folder), PAD).base_model.state_dict()
    assert policy.keys() == trunk.keys()
    differing = [name for name in policy if not torch.equal(policy[name], trunk[name])]
    assert differing == ["final_layer_norm.bias"]


def test_models_of_all_kinds_train(tmp_path, base_models, run_reward, kind):
    """And a head that is read at EOS is found again by the next stage."""
    metrics, folder = run_reward(base_models[kind], tmp_path / kind, max_updates=3)
    assert math.isfinite(metrics["eval/validation/ece"])
    model = reward.load_reward_model(str(folder), PAD)
    assert model.config.model_type == kind and not math.isnan(
        reward.get_scores(model, torch.tensor([[5, 0]]), PAD).item()
    )
