"""benchmark/report.py: a small world's stages, run for some updates, and what the report says of them."""

import json
import os
import random
import shutil
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch
from conftest import ROOT, lean_to_eos, read_events, run_main
from datasets import load_from_disk
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import ppo
import reward
import sft
import tldr_dataset

sys.path.insert(0, str(ROOT / "benchmark"))
import bounds  # noqa: E402
import report  # noqa: E402
import synthetic  # noqa: E402


@pytest.fixture(scope="module")
def quickstart(tmp_path_factory) -> SimpleNamespace:
    """The quickstart's folder, as its stages leave it, from a tiny model on little data."""
    folder = tmp_path_factory.mktemp("quickstart")
    rows = {"pretrain_rows": 8, "sft_rows": 32, "comparison_rows": 32, "eval_rows": 8}
    synthetic.main(synthetic.Args(folder / "world", size="tiny", **rows))
    data = tldr_dataset.Args(str(folder / "data_sft"), tokenizer=str(folder / "world/tokenizer"), num_proc=1)
    data.sft, data.comparisons, data.max_query_length = (
        *(str(folder / "world" / x) for x in ("sft", "comparisons")),
        144,
    )
    tldr_dataset.main(data)
    posts, pairs = str(folder / "data_sft/sft"), str(folder / "data_sft/comparisons")
    models = {"sft_model": str(folder / "sft_1"), "reward_model": str(folder / "reward_1")}
    tuned = {"dataset": posts, "max_updates": 1, "response_length": 48}
    stages = {
        "base": (sft, tuned | {"model": str(folder / "world/init"), "loss_on": "response"}),
        "sft_1": (sft, tuned | {"model": str(folder / "base")}),
        "reward_1": (reward, {"sft_model": models["sft_model"], "dataset": pairs, "sft_dataset": posts}),
        "ppo_1": (ppo, models | {"dataset": posts, "total_episodes": 48, "response_length": 48}),
    }
    stages["reward_1"][1]["normalisation_rows"] = 8
    for name, (script, fields) in stages.items():
        run_main(script, {"output_dir": str(folder / name), "batch_size": 16, "seed": 1} | fields)
    # a stage that was interrupted has two lines
    (folder / "seconds_1.csv").write_text("world,3\nsft,5\nppo,7\nppo,11\n")
    (folder / "seconds_2.csv").write_text("base,40\nsft,50\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(report, "NUM_TWINS", 20)
        report.main(report.Args(folder, seed=1))
    table = pd.read_csv(folder / "report_1.csv").set_index(["stage", "metric"])
    return SimpleNamespace(folder=folder, table=table, text=(folder / "report_1.md").read_text())


def test_numbers_are_those_of_the_stages(quickstart):
    values, folder = quickstart.table.value, quickstart.folder
    metrics = {x: json.loads((folder / f"{x}_1/run.json").read_text())["metrics"] for x in ("sft", "reward")}
    world = json.loads((folder / "world/world.json").read_text())
    assert values["sft", "ROUGE-L"] == metrics["sft"]["eval/validation/rougeL"]
    base = json.loads((folder / "base/run.json").read_text())["metrics"]
    assert values["base", "ROUGE-L"] == base["eval/validation/rougeL"]
    assert values["world", "posts over the query limit"] == world["token_lengths"]["sft"]["query_over_limit"]
    for part in ("pretrain", "sft"):
        assert values[f"tokenise_{part}", "tokens of a summary"] == world["token_lengths"][part]["reference_mean"]
    for split in ("validation", "validation_cnndm"):
        row = quickstart.table.loc["reward", f"accuracy, {split}"]
        assert row.value == metrics["reward"][f"eval/{split}/accuracy"] and row.low <= row.value <= row.high
        assert values["reward", f"noise ceiling, {split}"] == world["noise_ceiling"][split]
        assert values["reward", f"believing every summary, {split}"] == world["blind_accuracy"][split]
    logged = read_events(folder / "ppo_1")
    assert len(logged["objective/score"]) == 3
    assert values["ppo", "score, first update"] == pytest.approx(logged["objective/score"][0][1])
    for name in ("score", "kl", "eos_rate", "response_length"):
        expected = sum(value for _, value in logged[f"objective/{name}"]) / 3  # of ten, where there are as many
        assert values["ppo", f"{name}, mean of the last ten updates"] == pytest.approx(expected)
    seconds = quickstart.table.seconds.dropna()
    assert list(seconds["ppo"].unique()) == [18] and list(seconds["sft"].unique()) == [5]
    assert seconds["world"].item() == 3 and seconds["base"].unique().tolist() == [40]  # the latter with another seed


def test_ppos_numbers_are_means_of_the_last_ten_updates(quickstart):
    folder, curves = quickstart.folder, defaultdict(lambda: pd.Series(range(30)))
    samples = {x: synthetic.read_samples(folder / f"{x}_1/samples_validation.jsonl") for x in ("sft", "ppo")}
    samples["base"], runs = samples["sft"], report.read_runs(folder, 1, ("sft",))
    table = report.make_table(folder, 1, runs, samples, curves, {"a check": np.ones(3)}).set_index(["stage", "metric"])
    assert table.value["ppo", "score, first update"] == 0
    for name in ("score", "kl", "eos_rate", "response_length"):
        assert table.value["ppo", f"{name}, mean of the last ten updates"] == 24.5


def test_the_base_models_samples_are_its_own(quickstart, tmp_path):
    """Here of one that ends each summary at once, to the queries of the SFT model's samples."""
    for path in ("sft_1", "data_sft"):
        (tmp_path / path).symlink_to(quickstart.folder / path)
    base = AutoModelForCausalLM.from_pretrained(quickstart.folder / "base")
    lean_to_eos(base, 100.0)
    base.save_pretrained(tmp_path / "base")
    rows = synthetic.read_samples(tmp_path / "sft_1/samples_validation.jsonl")
    assert all(row["response"] for row in rows)
    assert report.sample_base(tmp_path, 1, rows) == [row | {"response": ""} for row in rows]


def test_true_quality_is_that_of_the_samples(quickstart):
    for stage in ("sft", "ppo"):
        lines = (quickstart.folder / f"{stage}_1/samples_validation.jsonl").read_text().splitlines()
        rows = [json.loads(line) for line in lines]
        judged = [synthetic.judge_summary(row["query"], row["response"]) for row in rows]
        reference = [synthetic.true_quality(row["query"], row["reference"]) for row in rows]
        quality = pd.Series([x["quality"] for x in judged])
        wins = (quality > reference) + 0.5 * (quality == reference)
        found = quickstart.table.loc[stage]
        for name, expected in (("true quality", quality), ("true win rate over references", wins)):
            row = found.loc[name]
            assert row.value == pytest.approx(expected.mean(), abs=1e-4) and row.low <= row.value <= row.high
        assert found.value["invented_share (true)"] == pytest.approx(
            sum(x["invented"] > 0 for x in judged) / 8, abs=1e-4
        )
        assert found.value["words (true)"] == pytest.approx(sum(x["words"] for x in judged) / 8, abs=1e-4)
        assert all(row["response"] in quickstart.text and row["reference"] in quickstart.text for row in rows[:4])
    assert quickstart.table.value["references", "true quality"] == pytest.approx(pd.Series(reference).mean(), abs=1e-4)
    assert (quickstart.folder / "report_1.png").exists()


def test_the_reward_model_is_asked_with_another_post_and_about_one_wrong_fact(quickstart):
    """Its scores, each sequence by itself, give the numbers of the report."""
    folder, values = quickstart.folder, quickstart.table.loc["reward"].value
    tokenizer = reward.load_tokenizer(str(folder / "reward_1"))
    model = reward.load_reward_model(str(folder / "reward_1"), tokenizer.pad_token_id).eval()

    @torch.no_grad()
    def score(text: str) -> float:
        return reward.get_scores(model, torch.tensor([tokenizer(text).input_ids]), tokenizer.pad_token_id).item()

    for split in ("validation", "validation_cnndm"):
        rows = list(load_from_disk(str(folder / "data_sft/comparisons"))[split])
        others = [score(post["query"] + row["chosen"]) > score(post["query"] + row["rejected"])
                  for post, row in zip(rows[-1:] + rows, rows)]  # fmt: skip
        found = values[f"accuracy with another row's post, {split}"]
        assert found == pytest.approx(sum(others) / len(others), abs=0.5 / len(others))
    rng, right = random.Random(0), {}
    for kind, queries, texts in (synthetic.write_twins(rng) for _ in range(20)):
        for query, true, false in zip(queries, texts, texts[::-1]):
            first, second = (score(query + text + synthetic.EOS) for text in (true, false))
            right.setdefault("person" if kind == "who" else kind, []).append(first > second)
    for kind, outcomes in right.items():
        share = sum(outcomes) / len(outcomes)
        assert values[f"true summary preferred to one wrong fact, {kind}"] == pytest.approx(share)
        row = next(line for line in quickstart.text.splitlines() if line.startswith(f"| {kind} | {len(outcomes)} |"))
        assert f"| {share:.2f} [" in row
    outcomes = sum(right.values(), [])
    assert values["true summary preferred to one wrong fact"] == pytest.approx(sum(outcomes) / 40)


def test_bounds_are_of_the_reward_model_and_of_who_sees_no_post(quickstart, capsys):
    bounds.main(bounds.Args(quickstart.folder, seed=1, draws=20))
    rows = [line.split(" | ") for line in capsys.readouterr().out.splitlines()]
    cells = {
        row[0].strip("| "): [float(x.strip(" |")) for x in row[1:]]
        for row in rows
        if len(row) > 1 and row[1][0].isdigit()
    }
    metrics = json.loads((quickstart.folder / "reward_1/run.json").read_text())["metrics"]
    for split in ("validation", "validation_cnndm"):
        found, mean, high = cells[split]
        assert found == pytest.approx(metrics[f"eval/{split}/ece"], abs=1e-3) and 0 < mean <= high
    assert all(0 <= cells[part][0] <= 1 for part in ("seen policies", "unseen policies", "CNN/DM"))


def test_blind_accuracy_is_of_what_can_be_counted(tmp_path):
    """Trained where the longer summary is chosen, on parts in which it always is, never, and every other time."""
    texts = [" my roommate wrecked my guitar.", " my roommate wrecked my guitar at the library."]

    def row(i: int, longer_wins: bool, split: str, article: str | None = None) -> dict:
        first = i // 2 % 2  # 1: the longer one
        summaries = [{"text": texts[first]}, {"text": texts[1 - first]}]
        choice = 1 - first if longer_wins else first
        return {"info": {"article": article}, "summaries": summaries, "choice": choice, "split": split}

    parts = {"train": [row(i, True, "train") for i in range(80)]}
    parts["validation"] = [row(i, split == "valid1", split) for i in range(8) for split in ("valid1", "valid2")]
    parts["validation"] += [row(i, i % 2 == 0, "valid2", "news") for i in range(8)]
    for name, rows in parts.items():
        synthetic.write_jsonl(tmp_path / f"world/comparisons/{name}.jsonl", rows)
    assert bounds.blind_accuracies(tmp_path).to_dict() == {"cnndm": 0.5, "valid1": 1.0, "valid2": 0.0}


def test_a_calibrated_model_of_large_differences_is_always_right(quickstart, tmp_path):
    """So its calibration error is 0 at every draw; that of the model itself is its share of wrong pairs."""
    shutil.copytree(quickstart.folder / "reward_1", tmp_path / "reward_1", ignore=shutil.ignore_patterns("probes.json"))
    (tmp_path / "data_sft").symlink_to(quickstart.folder / "data_sft")
    weights = load_file(tmp_path / "reward_1/model.safetensors")
    weights["score.weight"] *= 1e6
    save_file(weights, tmp_path / "reward_1/model.safetensors", {"format": "pt"})
    found, errors = bounds.calibrated_errors(tmp_path, 1, "validation", 20)
    assert errors.shape == (20,) and errors.max() < 1e-3 and found > 0.1


def test_what_a_blind_reader_counts():
    """One deed, three clauses of a place, two stray words of sixteen, a comma and a full stop."""
    summary = "my roommate wrecked my guitar at the library, well yeah at the library at the gym."
    counts = dict(
        zip([*synthetic.FACTS, "clauses", "repeated", "stray", "words", "long", *",.?", "and"], bounds.count(summary))
    )
    expected = {"deed": 1, "place": 3, "clauses": 4, "repeated": 2, "stray": 2, "words": 16, ",": 1, ".": 1}
    assert {name: value for name, value in counts.items() if value} == expected


def sample(facts: str, response: str) -> dict:
    post = f"this is about my roommate Kevin. so Kevin wrecked my guitar. {facts} should I move out?"
    return {"query": synthetic.post_query("advice", "trouble with Kevin", post), "response": response}


def test_facts_are_counted_by_kind():
    rows = [
        sample("it happened at the library.", "my roommate wrecked my guitar at the library, I feel sad."),
        sample("it happened at the gym.", "my roommate wrecked my guitar at the library at the gym, I feel sad."),
        sample("honestly I feel sad.", "my roommate wrecked my piano. I feel numb. should I move out?"),
        sample("", "at the library at the gym, says the dog did it."),
    ]
    table = report.facts_by_kind(rows)
    assert table.stated.round(2).to_dict() == {
        "deed": 1, "place": 0.5, "time": 0, "cost": 0, "excuse": 0, "feeling": 0.25, "ask": 1, "all": round(11 / 28, 2),
    }  # fmt: skip
    assert table.said[["deed", "place", "feeling", "ask", "all"]].tolist() == [0.75, 1.0, 1.0, 0.25, 7 / 11]
    assert table["made up"][["place", "cost", "excuse", "all"]].tolist() == [0.5, 0.0, 0.25, 4 / 17]
    assert table["made up"].feeling == pytest.approx(2 / 3) and table["made up"][["deed", "ask"]].isna().all()
    invented = {"deed": 1 / 3, "place": 3 / 5, "excuse": 1.0, "feeling": 1.0, "ask": 0.0, "all": 8 / 13}
    assert table["invented per clause"].dropna().to_dict() == pytest.approx(invented)


def test_facts_of_the_base_model_and_of_both_policies_are_reported(quickstart):
    for stage in ("sft", "ppo"):
        rows = synthetic.read_samples(quickstart.folder / f"{stage}_1/samples_validation.jsonl")
        found, table = quickstart.table.loc[stage].value, report.facts_by_kind(rows)
        assert found["said, deed"] == pytest.approx(table.said.deed) and found["stated, all"] == table.stated["all"]
    assert {"said, place", "made up, place", "invented per clause, all"} <= set(quickstart.table.loc["base"].index)
    header = next(line for line in quickstart.text.splitlines() if line.startswith("| kind | stated |"))
    assert header.count(": base |") == header.count(": sft |") == header.count(": ppo |") == 3


@pytest.mark.parametrize(
    "again, stale",
    [
        ("base", ["sft", "reward", "ppo", "dpo"]),
        ("sft", ["reward", "ppo", "dpo"]),
        ("reward", ["ppo"]),
        ("ppo", []),
        ("dpo", []),
    ],
)
def test_a_stage_whose_model_was_trained_again_is_refused(tmp_path, again, stale):
    stages = ("sft", "reward", "ppo", "dpo")
    for stage in ("base", *stages):
        needs = [f"{need}'s" for need in report.NEEDS.get(stage, ["init"])]
        run = {"tracker_id": "another's" if stage == again else f"{stage}'s", "stage_ids": needs}
        path = tmp_path / ("base" if stage == "base" else f"{stage}_7")
        path.mkdir()
        (path / "run.json").write_text(json.dumps(run))
    if stale:
        with pytest.raises(ValueError, match="trained again. Delete these") as error:
            report.read_runs(tmp_path, 7, stages)
        assert str(error.value).endswith(": " + " ".join(str(tmp_path / f"{stage}_7") for stage in stale))
    else:
        assert set(report.read_runs(tmp_path, 7, stages)) == {"base", *stages}


def test_a_report_on_a_stage_that_is_out_of_date_is_refused(quickstart, tmp_path):
    for path in ("base", "sft_1", "reward_1", "ppo_1"):
        (tmp_path / path).mkdir()
        shutil.copy(quickstart.folder / path / "run.json", tmp_path / path)
    path = tmp_path / "reward_1/run.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"tracker_id": "0"}))
    with pytest.raises(ValueError, match="found ppo from others.*/ppo_1$"):
        report.main(report.Args(tmp_path, seed=1))


def test_seeds_are_gathered_and_their_win_rates_compared(tmp_path, capsys):
    for seed, low in ((1, 0.31), (2, 0.29)):
        rows = [("reward", "accuracy, validation", 0.7, 0.6, 0.8), ("ppo", f"kl, {report.LAST_TEN}", 4.0, None, None)]
        rows.append(("reward", "accuracy with another row's post, validation", 0.5, 0.4, 0.6))
        rows.append(("reward", "true summary preferred to one wrong fact", 0.6, 0.5, 0.7))
        for stage, value in (("sft", 0.2), ("ppo", 0.5)):
            rows.append((stage, "true quality", value, value - 0.1, value + 0.1))
            ends = (0.1, 0.3) if stage == "sft" else (low, 0.6)
            rows.append((stage, "true win rate over references", value, *ends))
        table = pd.DataFrame(rows, columns=["stage", "metric", "value", "low", "high"])
        table.to_csv(tmp_path / f"report_{seed}.csv", index=False)
    report.main(report.Args(tmp_path, all=True))
    lines = (tmp_path / "report.md").read_text().splitlines()
    policies = "0.20 [0.10, 0.30] | 0.50 [0.40, 0.60] | 0.20 [0.10, 0.30] | 0.50 [0.31, 0.60] | yes"
    assert lines[2] == f"| 1 | {policies} | 0.70 [0.60, 0.80] | 0.50 [0.40, 0.60] | 0.60 [0.50, 0.70] | 4.00 |"
    assert lines[0].count("|") == lines[1].count("|") == lines[2].count("|")
    assert "| no |" in lines[3] and "\n".join(lines) in capsys.readouterr().out


def test_nothing_to_gather_says_what_to_run(tmp_path):
    with pytest.raises(FileNotFoundError, match="report_<seed>.csv, found none; run benchmark/quickstart.sh"):
        report.main(report.Args(tmp_path, all=True))


def quickstart_sh(folder, **settings) -> subprocess.CompletedProcess:
    """quickstart.sh with its output in `folder`, in the environment that runs the tests."""
    environment = {**os.environ, "VENV": sys.prefix, "OUT": str(folder)} | settings
    command = ["bash", str(ROOT / "benchmark" / "quickstart.sh")]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100)


@pytest.mark.parametrize("processes", ["3", "0", "-2", "abc", "32", "2 "])
def test_quickstart_refuses_processes_that_cannot_share_its_batch(tmp_path, processes):
    result = quickstart_sh(tmp_path / "out", PROCESSES=processes)
    expected = f"PROCESSES: expected a divisor of 16, the rows of a step of PPO; found {processes}\n"
    assert result.returncode == 1 and result.stdout == expected and result.stderr == ""
    assert not (tmp_path / "out").exists()


def is_like(requirements: Path) -> bool:
    return requirements.exists() and requirements.read_text() == (ROOT / "requirements.txt").read_text()


@pytest.mark.skipif(not is_like(Path(sys.prefix, "requirements.txt")), reason="not run by tests/run.sh")
def test_quickstart_refuses_a_folder_of_another_size_and_times_what_was_interrupted(tmp_path):
    (tmp_path / "world").mkdir()
    (tmp_path / "world" / "world.json").write_text('{"args": {"size": "tiny"}}')
    result = quickstart_sh(tmp_path, SIZE="small")
    assert result.returncode == 1 and "a run of another SIZE than small" in result.stdout
    assert not (tmp_path / "seconds_44413.csv").exists()
    result = quickstart_sh(tmp_path, SIZE="tiny")  # this world has no data: the first stage that reads it fails
    assert result.returncode and (tmp_path / "seconds_44413.csv").read_text().startswith("tokenise_pretrain,")
