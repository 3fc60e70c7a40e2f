"""Report of a quickstart run: tables, one figure, a few summaries side by side.

    python benchmark/report.py --folder benchmark/out --seed 44413

Reads what the stages left in the folder; writes report_<seed>.md, .csv and .png there and prints the first. Intervals
are 95% bootstrap intervals over posts, those of the reward model over pairs; other runs would differ by more. `--all`
gathers the reports of all seeds into one table.
"""

import json
import random
import sys
from dataclasses import dataclass
from pathlib import Path

import matplotlib.figure
import numpy as np
import pandas as pd
import torch
import tyro
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from transformers import AutoModelForCausalLM

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]
from synthetic import (  # noqa: E402
    EOS,
    FACTS,
    RESPONSE_LENGTH,
    is_stated,
    mean_interval,
    parse_post,
    parse_summary,
    read_samples,
    score_rows,
    true_quality,
    write_twins,
)

import ppo  # noqa: E402
import reward  # noqa: E402

SPLITS = ("validation", "validation_cnndm")
PARTS = ("pretrain", "sft")  # that are tokenised one after the other
# The models that a stage reads, in the order of `stage_ids` in its run.json.
NEEDS = {"sft": ("base",), "reward": ("sft",), "ppo": ("sft", "reward"), "dpo": ("sft",), "ilql": ("sft",)}
NUM_TWINS, WRONG_FACT = 500, "true summary preferred to one wrong fact"
LAST_TEN = "mean of the last ten updates"  # one batch of 64 is noisy


@dataclass
class Args:
    folder: Path = Path("benchmark/out")
    """Folder that quickstart.sh wrote."""
    seed: int = 44413
    """Seed of the run."""
    all: bool = False
    """Gather report_<seed>.csv of all seeds into report.md instead."""


def read_runs(folder: Path, seed: int, stages: tuple[str, ...]) -> dict[str, dict]:
    """run.json of each stage. Raises FileNotFoundError where there is none, and ValueError, with the folders to delete,
    where a stage started from another model than the one that is there now: the shell scripts skip what has finished,
    whatever it started from."""
    paths = {stage: folder / f"{stage}_{seed}" for stage in stages} | {"base": folder / "base"}
    if missing := [str(path) for path in paths.values() if not (path / "run.json").exists()]:
        script = "compare.sh" if {"dpo", "ilql"} & set(stages) else "quickstart.sh"
        command = f"SEED={seed} OUT={folder} bash benchmark/{script}"
        raise FileNotFoundError(f"expected runs in {', '.join(missing)}, found none; run this first: {command}")
    runs = {stage: json.loads((path / "run.json").read_text()) for stage, path in paths.items()}
    stale: list[str] = []
    for stage in stages:
        ids = [runs[name]["tracker_id"] for name in NEEDS[stage]]
        if runs[stage]["stage_ids"] != ids or set(stale) & set(NEEDS[stage]):
            stale.append(stage)
    if stale:
        folders = " ".join(str(paths[stage]) for stage in stale)
        raise ValueError(
            f"expected stages that started from the models in {folder}, found {', '.join(stale)} from others, since "
            f"trained again. Delete these, then run quickstart.sh (or compare.sh) again: {folders}"
        )
    return runs


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


@torch.no_grad()
def check_reward_model(folder: Path, seed: int) -> tuple[dict[str, np.ndarray], pd.DataFrame]:
    """Does the reward model look at the post? -> ({check: whether it is right (N,)}, the last check by kind of fact).
    The checks: which of a split's pairs it orders as the workers do, with their own post and with that of the row
    before; and whether it prefers a true summary to the same with one wrong fact, on pairs of posts of which each makes
    the other's summary wrong: without a look at the post that is 0.5 on average over them. All models get the same."""
    path, right = folder / f"reward_{seed}", {}
    tokenizer, columns = reward.load_tokenizer(str(path)), ["query_token", "chosen_token", "rejected_token"]
    pad = tokenizer.pad_token_id
    model = reward.load_reward_model(str(path), pad).eval()
    scorer = reward.Scorer(model, pad)

    def prefers(first: torch.Tensor, second: torch.Tensor) -> np.ndarray:
        scores = torch.cat([scorer(*pair) for pair in zip(first.split(16), second.split(16))], dim=1)  # (2, N)
        return (scores[0] > scores[1]).numpy()

    for split in SPLITS:
        source = str(folder / "data_sft/comparisons")
        tokens = reward.load_split(source, split, columns, tokenizer, model.config)[1]
        overall = pd.read_csv(path / f"accuracy_{split}.csv").iloc[0]  # which pairs are right does not matter here
        right[f"accuracy, {split}"] = np.arange(overall.pairs) < round(overall.accuracy * overall.pairs)
        posts = tokens["query_token"].roll(1, 0)
        others = (torch.cat([posts, tokens[column]], dim=1) for column in columns[1:])
        right[f"accuracy with another row's post, {split}"] = prefers(*others)
    rng = random.Random(0)
    kinds, queries, summaries = zip(*(write_twins(rng) for _ in range(NUM_TWINS)))

    def sees(post: int) -> np.ndarray:
        """Whether it prefers the post's own summaries to its twins'."""
        texts = [q[post] + told[which] + EOS for which in (post, 1 - post) for q, told in zip(queries, summaries)]
        return prefers(*tokenizer(texts, padding=True, return_tensors="pt").input_ids.chunk(2))

    share = np.mean([sees(0), sees(1)], axis=0)
    right[WRONG_FACT] = share  # (N,), of each pair of posts
    by_kind = pd.Series(share).groupby(["person" if kind == "who" else kind for kind in kinds])
    rows = {kind: (len(x), x.mean(), *mean_interval(x)) for kind, x in by_kind}
    wrong_facts = pd.DataFrame(rows, index=["twins", "value", "low", "high"]).T
    return right, wrong_facts.reindex([*FACTS, "person"]).dropna()


@torch.no_grad()
def sample_base(folder: Path, seed: int, rows: list[dict]) -> list[dict]:
    """The SFT model's samples with the base model's all but greedy responses in place of its own."""
    tokenizer = ppo.load_tokenizer(str(folder / f"sft_{seed}"))
    model, options = AutoModelForCausalLM.from_pretrained(folder / "base").eval(), (tokenizer, RESPONSE_LENGTH, 0.01)
    tokens = ppo.load_split(str(folder / "data_sft/sft"), "validation", ["query_token"], tokenizer, model.config)[1]
    torch.manual_seed(0)
    responses = torch.cat([ppo.generate(model, batch, *options)[0] for batch in tokens["query_token"].split(100)])
    texts = tokenizer.batch_decode(responses, skip_special_tokens=True)
    return [row | {"response": text} for row, text in zip(rows, texts)]


def facts_by_kind(rows: list[dict]) -> pd.DataFrame:
    """Shares, by kind of fact and for all kinds: of posts that state one (`stated`), of these whose summary says one,
    true or not (`said`), of the others whose summary says one all the same (`made up`), and of the clauses of that kind
    that are not true (`invented per clause`)."""
    records = []
    for row in rows:
        facts, clauses = parse_post(row["query"]), parse_summary(row["response"])[0]
        for kind in FACTS:
            truths = [is_stated(facts, kind, slots) for name, slots in clauses if name == kind]
            records += [(name, kind in facts, bool(truths), len(truths), truths.count(False)) for name in (kind, "all")]
    frame = pd.DataFrame(records, columns=["kind", "stated", "said", "clauses", "invented"])
    by_kind = frame.groupby("kind")
    said = frame.groupby(["kind", "stated"]).said.mean().unstack().reindex(columns=[True, False])
    shares = {"stated": by_kind.stated.mean(), "said": said[True], "made up": said[False]}
    shares["invented per clause"] = by_kind.invented.sum() / by_kind.clauses.sum()
    return pd.DataFrame(shares).reindex([*FACTS, "all"])


def to_table(rows: list[tuple]) -> pd.DataFrame:
    """Rows of stage, metric, value and, where there is one, the low and high end of its interval."""
    rows = [(*row, None, None)[:5] for row in rows]
    return pd.DataFrame(rows, columns=["stage", "metric", "value", "low", "high"])


def make_table(folder: Path, seed: int, runs: dict, samples: dict, curves: dict, right: dict) -> pd.DataFrame:
    """One row a number: stage, seconds, metric, value, low and high end of its interval (or nothing)."""
    world = json.loads((folder / "world" / "world.json").read_text())
    lengths = world["token_lengths"]
    rows = [("world", "posts over the query limit", lengths["sft"]["query_over_limit"])]
    rows += [(f"tokenise_{part}", "tokens of a summary", lengths[part]["reference_mean"]) for part in PARTS]
    rows += [(stage, "ROUGE-L", runs[stage]["metrics"]["eval/validation/rougeL"]) for stage in ("base", "sft")]
    checks = [("reward", name, x.mean(), *mean_interval(x)) for name, x in right.items()]
    for split in SPLITS:
        bounds = {"noise_ceiling": "noise ceiling", "blind_accuracy": "believing every summary"}
        rows += [row for row in checks if row[1].endswith(f", {split}")]
        rows += [("reward", f"{bounds[key]}, {split}", world[key][split]) for key in bounds if key in world]
    rows.append(checks[-1])
    rows.append(("ppo", "score, first update", curves["objective/score"].iloc[0]))
    for name in ("score", "kl", "eos_rate", "response_length"):
        rows.append(("ppo", f"{name}, {LAST_TEN}", curves[f"objective/{name}"].iloc[-10:].mean()))
    for stage in ("base", "sft", "ppo"):
        scores = score_rows(samples[stage])
        rows.append((stage, "true quality", scores["quality"], *scores["quality_interval"]))
        rows.append((stage, "true win rate over references", scores["win_rate"], *scores["win_rate_interval"]))
        rows += [(stage, f"{name} (true)", scores[name]) for name in ("coverage", "invented_share", "words")]
    rows.append(("references", "true quality", scores["reference_quality"]))
    table = to_table(rows)
    shared = ["world", *(f"tokenise_{part}" for part in PARTS), "base"]  # which the first seed ran for all
    seconds = {}
    for path in folder.glob("seconds_*.csv"):
        for stage, x in pd.read_csv(path, names=["stage", "seconds"]).itertuples(index=False):
            if stage in shared or path.stem == f"seconds_{seed}":
                seconds[stage] = seconds.get(stage, 0) + x
    table.insert(1, "seconds", [seconds.get(stage, "") for stage in table.stage])
    return table


def plot(folder: Path, seed: int, curves: dict, path: Path) -> None:
    """PPO's score, KL, length and EOS rate over episodes, and the calibration of the reward model."""
    figure = matplotlib.figure.Figure(figsize=(15, 3), layout="constrained")
    axes = figure.subplots(1, 5)
    for ax, name in zip(axes, ("objective/score", "objective/kl", "objective/response_length", "objective/eos_rate")):
        ax.plot(curves[name].index, curves[name].to_numpy())
        ax.set(title=f"PPO {name}", xlabel="episodes", ylim=(0, 1.05) if name.endswith("rate") else None)
    x = np.linspace(0, 5, 100)
    axes[4].plot(x, 1 / (1 + np.exp(-x)), color="black", label="perfect")
    for split in SPLITS:
        table = pd.read_csv(folder / f"reward_{seed}" / f"calibration_{split}.csv")
        axes[4].plot(table.margin, table.accuracy, "o-", label=split)
    axes[4].set(title="reward model calibration", xlabel="score difference", ylabel="accuracy")
    axes[4].legend(fontsize=7)
    figure.savefig(path, dpi=110)


def number(value: float, low: float = np.nan, high: float = np.nan, digits: int = 3) -> str:
    """A number with its interval in brackets, each where there is one."""
    interval = "" if pd.isna(low) else f" [{low:.{digits}f}, {high:.{digits}f}]"
    return "" if pd.isna(value) else f"{value:.{digits}f}{interval}"


def markdown(lines: list[list]) -> str:
    """Lines of cells, the first of them the header, as a GitHub markdown table."""
    lines = [lines[0], ["---"] * len(lines[0]), *lines[1:]]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)


def table_by_kind(facts: dict[str, pd.DataFrame], wrong_facts: pd.DataFrame) -> pd.DataFrame:
    """What markdown_by_kind shows, one row a number."""
    rows = [("reward", f"{WRONG_FACT}, {x.Index}", x.value, x.low, x.high) for x in wrong_facts.itertuples()]
    for stage, table in facts.items():
        rows += [(stage, f"{name}, {kind}", value) for name in table for kind, value in table[name].items()]
    return to_table(rows)


def markdown_by_kind(facts: dict[str, pd.DataFrame], wrong_facts: pd.DataFrame) -> list[str]:
    """What the policies say of each kind of fact, and how often the reward model sees that one is wrong."""
    names = ["said", "made up", "invented per clause"]
    lines = [["kind", "stated", *(f"{name}: {stage}" for name in names for stage in facts)]]
    for kind, stated in facts["sft"].stated.items():
        cells = [number(table[name][kind], digits=2) for name in names for table in facts.values()]
        lines.append([kind, number(stated, digits=2), *cells])
    reward_lines = [["wrong fact", "posts", "reward model prefers the true one"]]
    reward_lines += [
        [x.Index, f"{2 * x.twins:.0f}", number(x.value, x.low, x.high, 2)] for x in wrong_facts.itertuples()
    ]
    legend = (
        "Of the posts that state a fact of a kind (`stated`), the share whose summary says one, true or not (`said`); "
        "of the other posts, the share whose summary says one all the same (`made up`); of the clauses, the share that "
        "is not true (`invented per clause`). Below, the reward model on summaries that differ in one fact."
    )
    return [legend, "", markdown(lines), "", markdown(reward_lines)]


def gather(folder: Path) -> None:
    """All seeds in one table: quality and win rate of SFT and PPO, whether the win rates' intervals part, in what share
    of its checks the reward model is right, and PPO's KL."""
    if not (paths := sorted(folder.glob("report_*.csv"))):
        raise FileNotFoundError(f"{folder}: expected report_<seed>.csv, found none; run benchmark/quickstart.sh")
    lines = [["seed", "SFT quality", "PPO quality", "SFT win rate", "PPO win rate", "win rates disjoint"]]
    lines[0] += ["RM accuracy", "with another post", "on one wrong fact", "PPO KL"]
    for path in paths:
        table = pd.read_csv(path).set_index(["stage", "metric"])
        checks = [f"{name}, validation" for name in ("accuracy", "accuracy with another row's post")] + [WRONG_FACT]
        pairs = [(stage, m) for m in ("true quality", "true win rate over references") for stage in ("sft", "ppo")]
        pairs += [("reward", check) for check in checks]
        cells = [number(x.value, x.low, x.high, 2) for x in (table.loc[pair] for pair in pairs)]
        sft, tuned = (table.loc[(stage, "true win rate over references")] for stage in ("sft", "ppo"))
        cells.insert(4, "yes" if sft.high < tuned.low else "no")
        cells.append(number(table.loc[("ppo", f"kl, {LAST_TEN}"), "value"], digits=2))
        lines.append([path.stem.split("_")[1], *cells])
    (folder / "report.md").write_text(markdown(lines) + "\n")
    print(markdown(lines))


def main(args: Args) -> None:
    if args.all:
        return gather(args.folder)
    runs = read_runs(args.folder, args.seed, ("sft", "reward", "ppo"))
    samples = {x: read_samples(args.folder / f"{x}_{args.seed}" / "samples_validation.jsonl") for x in ("sft", "ppo")}
    samples = {"base": sample_base(args.folder, args.seed, samples["sft"]), **samples}
    facts = {stage: facts_by_kind(rows) for stage, rows in samples.items()}
    right, wrong_facts = check_reward_model(args.folder, args.seed)
    curves = read_curves(args.folder / f"ppo_{args.seed}" / "runs")
    table = make_table(args.folder, args.seed, runs, samples, curves, right)
    everything = pd.concat([table, table_by_kind(facts, wrong_facts)])
    everything.to_csv(args.folder / f"report_{args.seed}.csv", index=False)
    plot(args.folder, args.seed, curves, args.folder / f"report_{args.seed}.png")
    lines = [[x.stage, x.seconds, x.metric, number(x.value, x.low, x.high)] for x in table.itertuples()]
    text = [markdown([["stage", "seconds", "metric", "value"], *lines]), f"\n![curves](report_{args.seed}.png)\n"]
    text += [*markdown_by_kind(facts, wrong_facts), ""]
    for row, tuned in list(zip(samples["sft"], samples["ppo"]))[:4]:
        text.append(f"```\n{row['query']}\n```\n")
        for name, summary in (("SFT", row["response"]), ("PPO", tuned["response"]), ("reference", row["reference"])):
            text.append(f"- {name} (true quality {true_quality(row['query'], summary):.1f}):{summary}")
        text.append("")
    report = "\n".join(text)
    (args.folder / f"report_{args.seed}.md").write_text(report)
    print(report)


if __name__ == "__main__":
    main(tyro.cli(Args))
