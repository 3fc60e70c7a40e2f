"""benchmark/results.py: tables and curves over models and seeds, from real runs of all stages."""

import json
import statistics
import sys
from pathlib import Path

import matplotlib.image
import numpy as np
import pandas as pd
import pytest
from conftest import ROOT, read_events
from transformers import AutoModelForCausalLM

sys.path.insert(0, str(ROOT / "benchmark"))
import results  # noqa: E402


@pytest.fixture
def experiment(tmp_path, chain, run_sft, base_models) -> Path:
    """A model with a run of every stage, and a second seed of SFT; another model with SFT alone."""
    (tmp_path / "neox").mkdir()
    for stage in results.PANELS:
        (tmp_path / "neox" / f"{stage}_1").symlink_to(getattr(chain, stage))
    run_sft(tmp_path / "neox" / "sft_2", num_epochs=3.0, seed=2)
    run_sft(tmp_path / "gpt2" / "sft_1", model=str(base_models["gpt2"]))
    return tmp_path


def read_run(path: Path) -> dict:
    return json.loads((path / "run.json").read_text())


def test_means_over_seeds_are_those_of_the_runs(experiment, capsys):
    results.main(results.Args(experiment))
    text = (experiment / "results.md").read_text()
    assert capsys.readouterr().out.strip() == text.strip() and "Not finished" not in text
    losses = [read_run(experiment / "neox" / f"sft_{seed}")["metrics"]["eval/validation/loss"] for seed in (1, 2)]
    line = next(line for line in text.splitlines() if line.startswith("| eval/validation/loss"))
    assert f"{statistics.mean(losses):.4g} ± {statistics.stdev(losses):.3g} |" in line
    table = pd.read_csv(experiment / "results.csv")
    for stage in results.PANELS:
        rows = table[(table.model == "neox") & (table.stage == stage) & (table.seed == 1)].set_index("metric").value
        for name, value in read_run(experiment / "neox" / f"{stage}_1")["metrics"].items():
            assert rows[name] == pytest.approx(value, nan_ok=True), name
    kl = [value for _, value in read_events(experiment / "neox" / "ppo_1")["objective/kl"]]
    ppo = table[(table.stage == "ppo")].set_index("metric").value
    assert ppo["objective/kl" + results.LAST_TENTH] == pytest.approx(kl[-1])  # of three updates


def test_every_panel_of_a_whole_experiment_is_drawn(experiment):
    runs = results.read_experiment(experiment)
    assert len(runs) == 7
    for run in runs:
        missing = [name for name in results.PANELS[run.stage][0] if name not in run.curves]
        assert not missing, f"{run.stage} logs no {missing}"
        assert set(results.PANELS[run.stage][1]) <= set(run.settings["metrics"])
    results.plot(runs, results.make_table(runs), experiment / "all.png")
    image = matplotlib.image.imread(experiment / "all.png")[..., :3]
    for stage, part in zip(results.PANELS, np.array_split(image, 5)):  # one below the other
        assert (part < 0.5).any(-1).mean() > 0.01, f"nothing is drawn for {stage}"


def test_an_unfinished_run_is_named_and_left_out_of_the_means(experiment):
    path = experiment / "neox" / "sft_2" / "run.json"
    settings = json.loads(path.read_text())
    path.write_text(
        json.dumps({name: value for name, value in settings.items() if name != "metrics"} | {"finished": False})
    )
    results.main(results.Args(experiment))
    assert "Not finished: neox/sft_2." in (experiment / "results.md").read_text()
    table = pd.read_csv(experiment / "results.csv")
    assert set(table[table.model == "neox"].seed) == {1}


def test_seeds_of_different_settings_are_named(experiment, run_sft):
    assert results.differences(results.read_experiment(experiment)) == []
    run_sft(experiment / "neox" / "sft_3", num_epochs=3.0, seed=3, lr=1e-3, save_every=5)
    results.main(results.Args(experiment))
    assert "Not one experiment: neox, sft: seeds differ in lr.\n" in (experiment / "results.md").read_text()


def test_parameters_of_a_model_in_shards(tmp_path, chain):
    model = AutoModelForCausalLM.from_pretrained(chain.sft)
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    assert results.count_parameters(tmp_path) == results.count_parameters(chain.sft) == model.num_parameters()


def test_a_folder_without_runs(tmp_path):
    (tmp_path / "neox" / "notes_1").mkdir(parents=True)
    (tmp_path / "neox" / "notes_1" / "run.json").write_text("{}")
    with pytest.raises(FileNotFoundError, match=f"{tmp_path}: expected runs in <model>/<stage>_<seed>/ .* run sft.py"):
        results.main(results.Args(tmp_path))
