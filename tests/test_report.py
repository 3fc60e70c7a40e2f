"""benchmark/report.py: a small world's stages, run for some updates, and what the report says of them."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pandas as pd
import pytest
from conftest import ROOT, read_events, run_main

import ppo
import reward
import sft
import tldr_dataset

sys.path.insert(0, str(ROOT / "benchmark"))
import report  # noqa: E402
import synthetic  # noqa: E402


@pytest.fixture(scope="module")
def quickstart(tmp_path_factory) -> SimpleNamespace:
    """The quickstart's folder, as its stages leave it, from a tiny model on little data."""
    folder = tmp_path_factory.mktemp("quickstart")
    rows = {"pretrain_rows": 8, "sft_rows": 32, "comparison_rows": 32, "eval_rows": 8}
    synthetic.main(synthetic.Args(folder / "world", size="tiny", **rows))
    data = tldr_dataset.Args(str(folder / "data"), tokenizer=str(folder / "world/tokenizer"), num_proc=1)
    data.sft, data.comparisons, data.max_query_length = (
        *(str(folder / "world" / x) for x in ("sft", "comparisons")),
        144,
    )
    tldr_dataset.main(data)
    posts, pairs = str(folder / "data/sft"), str(folder / "data/comparisons")
    models = {"sft_model": str(folder / "sft_1"), "reward_model": str(folder / "reward_1")}
    stages = {
        sft: {"model": str(folder / "world/init"), "dataset": posts, "max_updates": 1, "response_length": 48},
        reward: {"sft_model": models["sft_model"], "dataset": pairs, "sft_dataset": posts, "normalisation_rows": 8},
        ppo: models | {"dataset": posts, "total_episodes": 48, "response_length": 48},
    }
    for script, fields in stages.items():
        output_dir = str(folder / f"{script.__name__}_1")
        run_main(script, {"output_dir": output_dir, "batch_size": 16, "seed": 1} | fields)
    # a stage that was interrupted has two lines
    (folder / "seconds_1.csv").write_text("world,3\nsft,5\nppo,7\nppo,11\n")
    report.main(report.Args(folder, seed=1))
    table = pd.read_csv(folder / "report_1.csv").set_index(["stage", "metric"])
    return SimpleNamespace(folder=folder, table=table, text=(folder / "report_1.md").read_text())


def test_numbers_are_those_of_the_stages(quickstart):
    values, folder = quickstart.table.value, quickstart.folder
    metrics = {x: json.loads((folder / f"{x}_1/run.json").read_text())["metrics"] for x in ("sft", "reward")}
    world = json.loads((folder / "world/world.json").read_text())
    assert values["sft", "ROUGE-L"] == metrics["sft"]["eval/validation/rougeL"]
    for split in ("validation", "validation_cnndm"):
        assert values["reward", f"accuracy, {split}"] == metrics["reward"][f"eval/{split}/accuracy"]
        assert values["reward", f"noise ceiling, {split}"] == world["noise_ceiling"][split]
        assert values["reward", f"without reading the post, {split}"] == world["blind_accuracy"][split]
    logged = read_events(folder / "ppo_1")
    assert len(logged["objective/score"]) == 3
    assert values["ppo", "score, first update"] == pytest.approx(logged["objective/score"][0][1])
    for name in ("score", "kl", "eos_rate", "response_length"):
        assert values["ppo", f"{name}, last update"] == pytest.approx(logged[f"objective/{name}"][-1][1])
    assert (
        list(quickstart.table.loc["ppo"].seconds.unique()) == [18] and quickstart.table.loc["sft"].seconds.iloc[0] == 5
    )


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


def test_seeds_are_gathered_and_their_win_rates_compared(tmp_path, capsys):
    for seed, low in ((1, 0.31), (2, 0.29)):
        rows = [("reward", "accuracy, validation", 0.7, None, None), ("ppo", "kl, last update", 4.0, None, None)]
        for stage, value in (("sft", 0.2), ("ppo", 0.5)):
            rows.append((stage, "true quality", value, value - 0.1, value + 0.1))
            ends = (0.1, 0.3) if stage == "sft" else (low, 0.6)
            rows.append((stage, "true win rate over references", value, *ends))
        table = pd.DataFrame(rows, columns=["stage", "metric", "value", "low", "high"])
        table.to_csv(tmp_path / f"report_{seed}.csv", index=False)
    report.main(report.Args(tmp_path, all=True))
    lines = (tmp_path / "report.md").read_text().splitlines()
    assert (
        lines[2]
        == "| 1 | 0.20 [0.10, 0.30] | 0.50 [0.40, 0.60] | 0.20 [0.10, 0.30] | 0.50 [0.31, 0.60] | yes | 0.700 | 4.00 |"
    )
    assert "| no |" in lines[3] and "\n".join(lines) in capsys.readouterr().out


def test_nothing_to_gather_says_what_to_run(tmp_path):
    with pytest.raises(FileNotFoundError, match="report_<seed>.csv, found none; run benchmark/quickstart.sh"):
        report.main(report.Args(tmp_path, all=True))


def quickstart_sh(folder, **settings) -> subprocess.CompletedProcess:
    """quickstart.sh with its output in `folder`, in the environment that runs the tests."""
    environment = {**os.environ, "VENV": sys.prefix, "OUT": str(folder)} | settings
    command = ["bash", str(ROOT / "benchmark" / "quickstart.sh")]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100)


def test_quickstart_refuses_processes_that_cannot_share_its_batch(tmp_path):
    result = quickstart_sh(tmp_path / "out", PROCESSES="3")
    assert result.returncode == 1 and "PROCESSES: expected a divisor of the batch, 32; found 3" in result.stdout
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
