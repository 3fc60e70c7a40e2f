"""Tables and curves of an experiment: all runs of some models, seeds and stages, as the paper shows its own.

    python benchmark/results.py --folder models

Reads <folder>/<model>/<stage>_<seed>/, which is where the scripts write by default (and run.sh does), and writes there

    results.md    a table per stage: each metric of the finished runs by model, mean and standard deviation over seeds
    results.csv   the same numbers, one row a run and metric
    results.png   training curves, mean over seeds with their range as a band, and metrics against the size of the model
                  (N+ Figure 2 of SFT, 4 of reward models, 6 of DPO, 12 of PPO); each point of a curve is a trailing
                  mean over 2% of a run

It can be called while runs are on their way: their curves are shown, and their names are listed under the tables.
"""

import json
import math
import re
import sys
from dataclasses import dataclass
from pathlib import Path

import matplotlib.figure
import pandas as pd
import tyro
from safetensors import safe_open

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]
from report import markdown, read_curves  # noqa: E402

# Of each stage: the curves that are drawn, and the final metrics that are drawn against the size of the model.
ACCURACIES = ("eval/validation/accuracy", "eval/validation_cnndm/accuracy")
PANELS = {
    "sft": (("train/loss",), ("eval/validation/rouge1", "eval/validation/rougeL")),
    "reward": (("train/accuracy", "train/loss", "train/chosen_score"), ACCURACIES),
    "dpo": (("train/accuracy", "train/loss", "train/chosen_reward"), ACCURACIES),
    "ppo": (
        ("objective/rlhf_reward", "objective/kl", "objective/score", "objective/response_length"),
        ("eval/validation/score_win_rate",),
    ),
    "ilql": (("train/loss", "train/q_loss", "train/v_loss", "train/awac_loss"), ()),
}
# Fields in which seeds of one model differ without being another experiment.
OWN = (
    r"seed|output_dir|overwrite|sft_model|reward_model|push_to_hub|track|save_\w+|keep_checkpoints|resume|sample_every"
)
LAST_TENTH = ", mean of the last tenth of the run"


@dataclass
class Args:
    folder: Path = Path("models")
    """Folder of the runs; <model>/<stage>_<seed>/ below it. The results are written there."""


@dataclass
class Run:
    model: str
    stage: str
    seed: int
    settings: dict
    """run.json"""
    curves: dict[str, pd.Series]
    """What was logged, over episodes."""
    parameters: int
    """Of the saved model; 0 until the run has saved it."""


def count_parameters(folder: Path) -> int:
    """Numbers in the weights that a run saved, shards added up; 0 if there are none."""
    total = 0
    for path in folder.glob("model*.safetensors"):
        with safe_open(path, "pt") as weights:
            total += sum(math.prod(weights.get_slice(name).get_shape()) for name in weights.keys())
    return total


def read_experiment(folder: Path) -> list[Run]:
    """All runs below the folder. Raises FileNotFoundError if there are none."""
    runs = []
    for path in sorted(folder.glob("*/*/run.json")):
        if match := re.fullmatch(rf"({'|'.join(PANELS)})_(\d+)", path.parent.name):
            inputs = (json.loads(path.read_text()), read_curves(path.parent / "runs"), count_parameters(path.parent))
            runs.append(Run(path.parts[-3], match[1], int(match[2]), *inputs))
    if not runs:
        expected = "expected runs in <model>/<stage>_<seed>/ below it, found none"
        raise FileNotFoundError(f"{folder}: {expected}; run sft.py first, or bash benchmark/run.sh")
    return runs


def make_table(runs: list[Run]) -> pd.DataFrame:
    """Metrics of the finished runs: model, parameters, stage, seed, metric, value, in a row each."""
    rows = []
    for run in (run for run in runs if run.settings["finished"]):
        metrics, curves = dict(run.settings["metrics"]), run.curves
        for name in ("objective/score", "objective/kl", "objective/rlhf_reward"):
            if name in curves and name not in metrics:
                metrics[name + LAST_TENTH] = curves[name].iloc[-max(1, len(curves[name]) // 10) :].mean()
        for name, summary in (("perf/episodes_per_second", "median"), ("perf/peak_memory_gib", "max")):
            if name in curves:
                metrics[f"{name}, {summary}"] = curves[name].agg(summary)
        rows += [(run.model, run.parameters, run.stage, run.seed, *metric) for metric in metrics.items()]
    return pd.DataFrame(rows, columns=["model", "parameters", "stage", "seed", "metric", "value"])


def differences(runs: list[Run]) -> list[str]:
    """Settings in which the seeds of a model and stage differ, so that their mean is of different experiments."""
    groups: dict[tuple, list[dict]] = {}
    for run in runs:
        settings = {k: v for k, v in run.settings["args"].items() if not re.fullmatch(OWN, k)}
        settings |= {k: run.settings[k] for k in ("precision", "dataset_fingerprint", "versions")}
        groups.setdefault((run.model, run.stage), []).append(settings)
    found = []
    for (model, stage), all_settings in groups.items():
        first = all_settings[0]
        names = [name for name in first if any(other.get(name) != first[name] for other in all_settings)]
        found += [f"{model}, {stage}: seeds differ in {', '.join(names)}"] if names else []
    return found


def stage_tables(table: pd.DataFrame) -> list[str]:
    """A heading and a table for each stage: metrics by model, from small to large, mean and deviation over seeds."""
    text = []
    for stage in (stage for stage in PANELS if stage in set(table.stage)):
        rows = table[table.stage == stage]
        sizes = rows.groupby("model").parameters.max().sort_values()
        header = [f"{model}, {size:,} parameters" for model, size in sizes.items()]
        counts = rows.groupby("model").seed.nunique()
        lines = [["", *header], ["seeds", *(counts[model] for model in sizes.index)]]
        for metric in rows.metric.unique():
            cells = []
            for model in sizes.index:
                values = rows[(rows.metric == metric) & (rows.model == model)].value
                spread = f" ± {values.std():.3g}" if len(values) > 1 else ""
                cells.append(f"{values.mean():.4g}{spread}" if len(values) else "")
            lines.append([metric, *cells])
        text += [f"## {stage}", "", markdown(lines), ""]
    return text


def plot(runs: list[Run], table: pd.DataFrame, path: Path) -> None:
    """A row for each stage: curves in episodes, a colour for each model; then metrics against parameters."""
    stages = [stage for stage in PANELS if any(run.stage == stage for run in runs)]
    sizes = {model: max(r.parameters for r in runs if r.model == model) for model in {run.model for run in runs}}
    models = sorted(sizes, key=lambda model: (sizes[model], model))
    figure = matplotlib.figure.Figure(figsize=(20, 3.2 * len(stages)), layout="constrained")
    for row, stage in zip(figure.subplots(len(stages), 5, squeeze=False), stages):
        names, finals = PANELS[stage]
        for ax, name in zip(row, names):
            ax.set(title=f"{stage} {name}", xlabel="episodes")
            for color, model in enumerate(models):
                ours = [run for run in runs if (run.model, run.stage) == (model, stage) and name in run.curves]
                if ours:
                    curves = pd.DataFrame({run.seed: run.curves[name] for run in ours})
                    curves = curves.rolling(max(1, len(curves) // 50), min_periods=1).mean()
                    label = f"{model} ({len(ours)} seed{'s' * (len(ours) > 1)})"
                    ax.plot(curves.index, curves.mean(axis=1), color=f"C{color}", label=label)
                    ax.fill_between(curves.index, curves.min(axis=1), curves.max(axis=1), color=f"C{color}", alpha=0.2)
                    ax.legend(fontsize=7)
        ax = row[len(names)]
        ax.set(title=f"{stage}, finished runs", xlabel="parameters", ylabel="mean over seeds, and each", xscale="log")
        ax.margins(y=0.3)  # room for the legend
        for marker, name in zip("os", finals):
            values = table[(table.stage == stage) & (table.metric == name)]
            if len(values):
                means = values.groupby("parameters").value.mean()
                ax.plot(means.index, means.to_numpy(), label=name)
                ax.plot(values.parameters, values.value, marker, color=ax.lines[-1].get_color(), markersize=4)
                ax.legend(fontsize=7, loc="upper left")
        for ax in row:
            ax.set_visible(bool(ax.lines))
    figure.savefig(path, dpi=72)


def main(args: Args) -> None:
    runs = read_experiment(args.folder)
    table = make_table(runs)
    table.to_csv(args.folder / "results.csv", index=False)
    plot(runs, table, args.folder / "results.png")
    key = "A model is named by the folder that holds its runs."
    text = ["# Results\n", f"Mean and standard deviation over seeds, of finished runs. {key}\n", *stage_tables(table)]
    unfinished = [f"{run.model}/{run.stage}_{run.seed}" for run in runs if not run.settings["finished"]]
    text += [f"Not finished: {', '.join(unfinished)}.\n"] if unfinished else []
    text += [f"Not one experiment: {difference}.\n" for difference in differences(runs)]
    text += ["![curves over episodes, metrics over parameters](results.png)\n"]
    (args.folder / "results.md").write_text("\n".join(text))
    print("\n".join(text))


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
