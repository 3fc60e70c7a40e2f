"""Report of a quickstart run: one table, one figure, a few summaries side by side.

    python benchmark/report.py --folder benchmark/out --seed 44413

Reads what the stages left in the folder; writes report_<seed>.md and report_<seed>.png there and prints the table.
Intervals are 95% bootstrap intervals over posts. `--all` gathers the reports of all seeds into one table.
"""

import json
import sys
from dataclasses import dataclass
from pathlib import Path

import matplotlib.figure
import numpy as np
import pandas as pd
import tyro
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

sys.path.insert(0, str(Path(__file__).parent))
from synthetic import score_rows, true_quality  # noqa: E402


@dataclass
class Args:
    folder: Path = Path("benchmark/out")
    """Folder that quickstart.sh wrote."""
    seed: int = 44413
    """Seed of the run."""
    all: bool = False
    """Gather report_<seed>.csv of all seeds into report.md instead."""


def read_samples(path: Path) -> list[dict]:
    """Samples of a policy: rows with query, response and reference."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def read_curves(folder: Path) -> dict[str, pd.Series]:
    """Scalars that a run logged to TensorBoard: {metric: values over episodes}."""
    curves = {}
    # each start of a run wrote a file of its own; the folder's reader joins them, without what was done twice
    for path in sorted({file.parent for file in folder.rglob("events.out.tfevents.*")}):
        events = EventAccumulator(str(path), size_guidance={"scalars": 0}).Reload()
        for name in events.Tags()["scalars"]:
            points = events.Scalars(name)
            curves[name] = pd.Series([p.value for p in points], index=[p.step for p in points])
    return curves


def make_table(folder: Path, seed: int, samples: dict[str, list[dict]], curves: dict) -> pd.DataFrame:
    """One row a number: stage, seconds, metric, value, low and high end of its interval (or nothing)."""
    runs = {name: json.loads((folder / path / "run.json").read_text()) for name, path in stages(seed).items()}
    world = json.loads((folder / "world" / "world.json").read_text())
    rows = [("sft", "ROUGE-L", runs["sft"]["metrics"]["eval/validation/rougeL"])]
    for split in ("validation", "validation_cnndm"):
        rows.append(("reward", f"accuracy, {split}", runs["reward"]["metrics"][f"eval/{split}/accuracy"]))
        bounds = {"noise_ceiling": "noise ceiling", "blind_accuracy": "without reading the post"}
        rows += [("reward", f"{bounds[key]}, {split}", world[key][split]) for key in bounds if key in world]
    rows.append(("ppo", "score, first update", curves["objective/score"].iloc[0]))
    for name in ("score", "kl", "eos_rate", "response_length"):
        rows.append(("ppo", f"{name}, last update", curves[f"objective/{name}"].iloc[-1]))
    for stage, stage_samples in samples.items():
        scores = score_rows(stage_samples)
        rows.append((stage, "true quality", scores["quality"], *scores["quality_interval"]))
        rows.append((stage, "true win rate over references", scores["win_rate"], *scores["win_rate_interval"]))
        rows += [(stage, f"{name} (true)", scores[name]) for name in ("coverage", "invented_share", "words")]
    rows.append(("references", "true quality", scores["reference_quality"]))
    rows = [(*row, None, None)[:5] for row in rows]  # most have no interval
    table = pd.DataFrame(rows, columns=["stage", "metric", "value", "low", "high"])
    path = folder / f"seconds_{seed}.csv"
    seconds = pd.read_csv(path, names=["stage", "seconds"]).groupby("stage").seconds.sum() if path.exists() else {}
    table.insert(1, "seconds", [seconds.get(stage, "") for stage in table.stage])
    return table


def stages(seed: int) -> dict[str, str]:
    return {"sft": f"sft_{seed}", "reward": f"reward_{seed}", "ppo": f"ppo_{seed}"}


def plot(folder: Path, seed: int, curves: dict, path: Path) -> None:
    """PPO's score, KL, length and EOS rate over episodes, and the calibration of the reward model."""
    figure = matplotlib.figure.Figure(figsize=(15, 3), layout="constrained")
    axes = figure.subplots(1, 5)
    for ax, name in zip(axes, ("objective/score", "objective/kl", "objective/response_length", "objective/eos_rate")):
        ax.plot(curves[name].index, curves[name].to_numpy())
        ax.set(title=f"PPO {name}", xlabel="episodes", ylim=(0, 1.05) if name.endswith("rate") else None)
    x = np.linspace(0, 5, 100)
    axes[4].plot(x, 1 / (1 + np.exp(-x)), color="black", label="perfect")
    for split in ("validation", "validation_cnndm"):
        table = pd.read_csv(folder / f"reward_{seed}" / f"calibration_{split}.csv")
        axes[4].plot(table.margin, table.accuracy, "o-", label=split)
    axes[4].set(title="reward model calibration", xlabel="score difference", ylabel="accuracy")
    axes[4].legend(fontsize=7)
    figure.savefig(path, dpi=110)


def markdown(table: pd.DataFrame) -> str:
    """The table as GitHub markdown, intervals in brackets."""
    lines = ["| stage | seconds | metric | value |", "| --- | --- | --- | --- |"]
    for row in table.itertuples():
        interval = "" if pd.isna(row.low) else f" [{row.low:.3f}, {row.high:.3f}]"
        lines.append(f"| {row.stage} | {row.seconds} | {row.metric} | {row.value:.3f}{interval} |")
    return "\n".join(lines)


def gather(folder: Path) -> None:
    """All seeds in one table: quality and win rate of SFT and PPO, and whether the win rates' intervals part."""
    lines = [
        "| seed | SFT quality | PPO quality | SFT win rate | PPO win rate | win rates disjoint | RM accuracy | PPO KL |"
    ]
    lines.append("|" + " --- |" * 8)
    if not (paths := sorted(folder.glob("report_*.csv"))):
        raise FileNotFoundError(f"{folder}: expected report_<seed>.csv, found none; run benchmark/quickstart.sh")
    for path in paths:
        table = pd.read_csv(path).set_index(["stage", "metric"])
        pairs = [(stage, m) for m in ("true quality", "true win rate over references") for stage in ("sft", "ppo")]
        cells = [f"{r.value:.2f} [{r.low:.2f}, {r.high:.2f}]" for r in (table.loc[pair] for pair in pairs)]
        sft, ppo = (table.loc[(stage, "true win rate over references")] for stage in ("sft", "ppo"))
        cells += [
            "yes" if sft.high < ppo.low else "no",
            f"{table.loc[('reward', 'accuracy, validation'), 'value']:.3f}",
        ]
        cells.append(f"{table.loc[('ppo', 'kl, last update'), 'value']:.2f}")
        lines.append(f"| {path.stem.split('_')[1]} | " + " | ".join(cells) + " |")
    (folder / "report.md").write_text("\n".join(lines) + "\n")
    print("\n".join(lines))


def main(args: Args) -> None:
    if args.all:
        return gather(args.folder)
    names = {name: path for name, path in stages(args.seed).items() if name != "reward"}
    samples = {name: read_samples(args.folder / path / "samples_validation.jsonl") for name, path in names.items()}
    curves = read_curves(args.folder / f"ppo_{args.seed}" / "runs")
    table = make_table(args.folder, args.seed, samples, curves)
    table.to_csv(args.folder / f"report_{args.seed}.csv", index=False)
    plot(args.folder, args.seed, curves, args.folder / f"report_{args.seed}.png")
    text = [markdown(table), f"\n![curves](report_{args.seed}.png)\n"]
    for sft, ppo in list(zip(samples["sft"], samples["ppo"]))[:4]:
        text.append(f"```\n{sft['query']}\n```\n")
        for name, summary in (("SFT", sft["response"]), ("PPO", ppo["response"]), ("reference", sft["reference"])):
            text.append(f"- {name} (true quality {true_quality(sft['query'], summary):.1f}):{summary}")
        text.append("")
    report = "\n".join(text)
    (args.folder / f"report_{args.seed}.md").write_text(report)
    print(report)


if __name__ == "__main__":
    main(tyro.cli(Args))
