"""What two numbers of a reward model would be by themselves, on the quickstart's world: its accuracy if it never read a
post, and its calibration error if it were calibrated.

    python benchmark/bounds.py --folder benchmark/out --seed 44413

The first: boosted trees that are trained on the same comparisons, and know of the two summaries only what can be
counted in them. The second: the reward model's own score differences, its verdicts drawn with the probabilities that
it claims (Detail 18); ten bins of a finite number of pairs never agree exactly.
"""

import json
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
import torch
import tyro
from sklearn.ensemble import HistGradientBoostingClassifier

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]
from report import SPLITS, markdown, read_runs  # noqa: E402
from synthetic import FACTS, parse_summary  # noqa: E402

import reward  # noqa: E402


@dataclass
class Args:
    folder: Path = Path("benchmark/out")
    """Folder that quickstart.sh wrote."""
    seed: int = 44413
    """Seed of the run whose reward model is looked at."""
    draws: int = 400
    """Draws of verdicts for the calibration error."""


def count(summary: str) -> list[int]:
    """Clauses of each kind, all clauses, repeated ones, stray and all words, and marks of a summary."""
    clauses, stray, words = parse_summary(summary)
    kinds = [kind for kind, _ in clauses]
    marks = [summary.count(mark) for mark in (",", ".", "?", " and ")]
    return [
        *map(kinds.count, FACTS),
        len(kinds),
        len(kinds) - len(set(kinds)),
        stray,
        words,
        max(0, words - 32),
        *marks,
    ]


def read_comparisons(path: Path) -> pd.DataFrame:
    """One row a comparison: split (cnndm for articles), choice, and the difference of counts, second minus first."""
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    frame = pd.DataFrame({"split": ["cnndm" if row["info"]["article"] else row["split"] for row in rows]})
    frame["choice"] = [row["choice"] for row in rows]
    counts = (np.subtract(*(count(summary["text"]) for summary in row["summaries"][::-1])) for row in rows)
    return frame.assign(counts=list(counts))


def blind_accuracies(folder: Path) -> pd.Series:
    """Accuracy of a reader who never sees a post, trained on the train comparisons, on each part of the validation."""
    train, validation = (read_comparisons(folder / f"world/comparisons/{x}.jsonl") for x in ("train", "validation"))
    x, y = np.stack(train.counts), train.choice.to_numpy()
    reader = HistGradientBoostingClassifier(max_iter=200, learning_rate=0.05, random_state=0)
    reader.fit(np.concatenate([x, -x]), np.concatenate([y, 1 - y]))  # in both orders
    x = np.stack(validation.counts)
    second = reader.predict_proba(x)[:, 1] > reader.predict_proba(-x)[:, 1]
    return (second == validation.choice).groupby(validation.split).mean()


@torch.no_grad()
def calibrated_errors(folder: Path, seed: int, split: str, draws: int) -> tuple[float, np.ndarray]:
    """Calibration error of the reward model, and those (draws,) of a calibrated one with the same differences."""
    path, columns = str(folder / f"reward_{seed}"), ["query_chosen_token", "query_rejected_token"]
    tokenizer = reward.load_tokenizer(path)
    model = reward.load_reward_model(path, tokenizer.pad_token_id).eval()
    _, tokens = reward.load_split(str(folder / "data_sft/comparisons"), split, columns, tokenizer, model.config)
    batches = (tokens[column].split(32) for column in columns)
    chosen, rejected = (torch.cat([reward.get_scores(model, x, tokenizer.pad_token_id) for x in b]) for b in batches)
    margins, rng = (chosen - rejected).numpy(), np.random.default_rng(0)
    right = rng.random((draws, len(margins))) < 1 / (1 + np.exp(-abs(margins)))
    errors = [reward.calibration_table(np.where(row, abs(margins), -abs(margins)))[1] for row in right]
    return reward.calibration_table(margins)[1], np.array(errors)


def main(args: Args) -> None:
    if args.draws < 1:
        raise ValueError(f"--draws: expected 1 or more, found {args.draws}")
    read_runs(args.folder, args.seed, ("sft", "reward"))  # refuses what is missing or out of date
    names = {"valid1": "seen policies", "valid2": "unseen policies", "cnndm": "CNN/DM"}
    accuracies = blind_accuracies(args.folder).rename(names)
    lines = [[part, f"{accuracy:.3f}"] for part, accuracy in accuracies.items()]
    print(markdown([["trained without the posts", "accuracy"], *lines]) + "\n")
    lines = [["calibration error", "reward model", "calibrated: mean", "95% below"]]
    for split in SPLITS:
        found, errors = calibrated_errors(args.folder, args.seed, split, args.draws)
        lines.append([split, *(f"{x:.3f}" for x in (found, errors.mean(), np.quantile(errors, 0.95)))])
    print(markdown(lines))


if __name__ == "__main__":
    main(tyro.cli(Args))
