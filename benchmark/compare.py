"""Compare the policies of compare.sh: base, SFT, DPO, ILQL at each beta, and PPO, and DPO with the reward model.

    python benchmark/compare.py --folder benchmark/out --seed 44413
    python benchmark/compare.py --folder benchmark/out --all      one table of all seeds

True quality and true win rate over the references are those of the all but greedy summaries that each script wrote,
with 95% bootstrap intervals over posts. `sampled win rate`, KL to the SFT model (in nats a summary), rate of EOS and
length in tokens are those of summaries sampled at temperature 0.7, as in PPO's rollouts, one for each validation post.
Writes compare_<seed>.csv and compare_<seed>.md; with another --temperature it prints the table, and writes nothing.
"""

import json
import sys
from dataclasses import dataclass
from pathlib import Path

import pandas as pd
import torch
import tyro
from transformers import AutoModelForCausalLM

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]
from report import read_runs, sample_base  # noqa: E402
from synthetic import RESPONSE_LENGTH, read_samples, score_rows  # noqa: E402

import ilql  # noqa: E402
import ppo  # noqa: E402

TOP_K, BETAS = 20, (0.0, 1.0, 2.0, 4.0)


@dataclass
class Args:
    folder: Path = Path("benchmark/out")
    """Folder that compare.sh wrote."""
    seed: int = 44413
    """Seed of the run."""
    temperature: float = 0.7
    """Temperature of the summaries that are sampled here."""
    all: bool = False
    """Gather compare_<seed>.csv of all seeds into compare.md instead."""


def ilql_logprobs(model, queries, responses, pad: int, size: int, beta: float, temperature: float) -> torch.Tensor:
    """Log-probabilities (B, T), 0 at [PAD], of responses (B, T) to left-padded queries, under the distribution that
    ILQL samples from; size is that of the tokenizer: no other rows of the vocabulary are sampled."""
    batch = ilql.pack_actions(queries, responses, torch.zeros(len(queries)), pad)
    mask, hidden = responses != pad, model.policy.base_model(**ilql.model_inputs(batch["tokens"], pad))
    hidden = hidden.last_hidden_state[batch["rows"], batch["positions"]]  # (actions, D)
    logits, ids = model.policy.get_output_embeddings()(hidden).float(), torch.arange(model.policy.config.vocab_size)
    logits = logits.masked_fill((ids >= size) | (ids == pad), -torch.inf)
    inputs = (logits, model.min_target_q(hidden), model.v_head(hidden).float(), torch.full((len(hidden), 1), beta))
    probabilities, kept = ilql.decoding_distribution(*inputs, TOP_K, temperature)
    chosen = (probabilities * (kept == batch["actions"][:, None])).sum(1)
    return torch.zeros(mask.shape).masked_scatter(mask, chosen.log())


@torch.no_grad()
def sampled(models: dict, reference, queries: torch.Tensor, tokenizer, temperature: float) -> tuple:
    """KL to the reference, rate of EOS and length of summaries that are sampled for queries (N, Q), a row for each
    policy of models; and the summaries {policy: (N,)}."""
    summaries, rows, pad, eos = {}, {}, tokenizer.pad_token_id, tokenizer.eos_token_id
    for name, (model, beta) in models.items():
        torch.manual_seed(0)
        parts, texts = [], summaries.setdefault(name, [])
        for batch in queries.split(100):
            if beta is None:
                responses, _ = ppo.generate(model, batch, tokenizer, RESPONSE_LENGTH, temperature)
            else:
                settings = (RESPONSE_LENGTH, [beta], TOP_K, temperature)
                responses = ilql.generate_ilql(model, batch, tokenizer, *settings)[0][:, 0]
            inputs = (batch, responses, pad)
            theirs, _ = ppo.get_logprobs(reference, *inputs, temperature)
            if beta is None:
                ours, _ = ppo.get_logprobs(model, *inputs, temperature)
            else:
                ours = ilql_logprobs(model, *inputs, len(tokenizer), beta, temperature)
            texts += tokenizer.batch_decode(responses, skip_special_tokens=True)
            columns = ((ours - theirs).sum(1), (responses == eos).any(1).float(), (responses != pad).sum(1).float())
            parts.append(torch.stack(columns, dim=1))
        rows[name] = dict(zip(("KL", "EOS rate", "tokens"), torch.cat(parts).mean(0).tolist()))
    return pd.DataFrame(rows).T, summaries


def seconds_of(folder: Path, seed: int) -> dict:
    """Seconds of each stage, the base model's from the seed that trained it; PPO's hold its reward model's."""
    read = [pd.read_csv(path, names=["stage", "seconds"]) for path in folder.glob("seconds_*.csv")]
    own = pd.read_csv(folder / f"seconds_{seed}.csv", names=["stage", "seconds"])
    seconds, own = (t.groupby("stage").seconds.sum().to_dict() for t in (pd.concat(read), own))
    return {"base": seconds["base"]} | own | {"ppo": own["reward"] + own["ppo"]}


def compare(folder: Path, seed: int, temperature: float) -> pd.DataFrame:
    """One row a policy: true quality and win rate with intervals, words, KL, rate of EOS, tokens, win rate of samples,
    seconds."""
    read_runs(folder, seed, ("sft", "reward", "ppo", "dpo", "ilql"))  # refuses what is out of date
    load = AutoModelForCausalLM.from_pretrained
    names = {"base": "base", "SFT": f"sft_{seed}", "DPO": f"dpo_{seed}", "PPO": f"ppo_{seed}"}
    models = {name: (load(folder / path).eval(), None) for name, path in names.items()}
    offline = ilql.load_ilql(str(folder / f"ilql_{seed}"))
    models |= {f"ILQL, beta {beta:g}": (offline, beta) for beta in BETAS}
    tokenizer = ppo.load_tokenizer(str(folder / f"sft_{seed}"))
    options = (["query_token"], tokenizer, models["SFT"][0].config)
    dataset, tokens = ppo.load_split(str(folder / "data_sft/sft"), "validation", *options)
    samples = {name: folder / path / "samples_validation.jsonl" for name, path in names.items() if name != "base"}
    samples |= {f"ILQL, beta {b:g}": folder / f"ilql_{seed}" / f"samples_validation_beta{b:g}.jsonl" for b in BETAS}
    rows = {name: read_samples(path) for name, path in samples.items()}
    rows["base"] = sample_base(folder, seed, rows["SFT"])
    table, summaries = sampled(models, models["SFT"][0], tokens["query_token"], tokenizer, temperature)
    for name, texts in summaries.items():
        scores = score_rows([row | {"response": text} for row, text in zip(rows["SFT"], texts)])
        table.loc[name, "sampled win rate"] = scores["win_rate"]
    for name, policy_rows in rows.items():
        scores = score_rows(policy_rows)
        for key in ("quality", "win_rate"):
            table.loc[name, [key, f"{key} low", f"{key} high"]] = [scores[key], *scores[f"{key}_interval"]]
        table.loc[name, ["words", "invented"]] = [scores["words"], scores["invented_share"]]
    seconds = seconds_of(folder, seed)
    table["seconds"] = [seconds[name.split(",")[0].lower()] for name in table.index]
    return table


def accuracies(folder: Path, seed: int) -> pd.DataFrame:
    """Accuracy of the reward model and of DPO's implicit reward: on comparisons of the policies whose comparisons they
    were trained on (valid1), of policies that they have not seen (valid2), and on CNN/DM; and ECE of whole splits."""
    rows = {}
    for name, path in (("reward model", f"reward_{seed}"), ("DPO's implicit reward", f"dpo_{seed}")):
        metrics = json.loads((folder / path / "run.json").read_text())["metrics"]
        table = pd.read_csv(folder / path / "accuracy_validation.csv").set_index(["group", "value"]).accuracy
        rows[name] = {"seen policies": table["split"]["valid1"], "unseen policies": table["split"]["valid2"]}
        rows[name]["CNN/DM"] = metrics["eval/validation_cnndm/accuracy"]
        splits = {"TL;DR": "validation", "CNN/DM": "validation_cnndm"}
        rows[name] |= {f"ECE, {split}": metrics[f"eval/{key}/ece"] for split, key in splits.items()}
    return pd.DataFrame(rows).T


def markdown(table: pd.DataFrame, digits: int = 2) -> str:
    """A table as GitHub markdown; columns `x low` and `x high` become brackets after x."""
    names = [name for name in table if not name.endswith((" low", " high"))]
    lines = ["| | " + " | ".join(names) + " |", "|" + " --- |" * (len(names) + 1)]
    for index, row in table.iterrows():
        cells = []
        for name in names:
            text = f"{row[name]:.0f}" if name == "seconds" else f"{row[name]:.{digits}f}"
            if f"{name} low" in table:
                text += f" [{row[f'{name} low']:.{digits}f}, {row[f'{name} high']:.{digits}f}]"
            cells.append(text)
        lines.append(f"| {index} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def gather(folder: Path) -> str:
    """All seeds: win rate of each policy by seed, means of the rest, seeds on which it is apart from the SFT model."""
    paths = {path.stem.split("_")[1]: path for path in sorted(folder.glob("compare_[0-9]*.csv"))}
    if not paths:
        raise FileNotFoundError(f"{folder}: expected compare_<seed>.csv, found none; run benchmark/compare.sh")
    tables = {seed: pd.read_csv(path, index_col=0) for seed, path in paths.items()}
    lines = [
        "| | "
        + " | ".join(f"win rate, {seed}" for seed in tables)
        + " | better than SFT | quality | words | invented |"
        " sampled win rate | KL | EOS rate | seconds |"
    ]
    lines.append("|" + " --- |" * (len(tables) + 9))
    mean = sum(tables.values()) / len(tables)
    for name in next(iter(tables.values())).index:
        rows = [table.loc[name] for table in tables.values()]
        cells = [f"{row.win_rate:.2f} [{row['win_rate low']:.2f}, {row['win_rate high']:.2f}]" for row in rows]
        apart = sum(
            row["win_rate low"] > table.loc["SFT", "win_rate high"] for row, table in zip(rows, tables.values())
        )
        cells.append(f"{apart} of {len(rows)}" if name not in ("SFT", "base") else "")
        keys = ("quality", "words", "invented", "sampled win rate", "KL", "EOS rate")
        cells += [f"{mean.loc[name, key]:.2f}" for key in keys]
        lines.append(f"| {name} | " + " | ".join(cells) + f" | {mean.loc[name, 'seconds']:.0f} |")
    return "\n".join(lines)


def gather_accuracies(folder: Path) -> str:
    """Accuracy by part of the validation data, and calibration error (ECE), of both kinds of reward, by seed."""
    seeds = [int(path.stem.split("_")[1]) for path in sorted(folder.glob("compare_[0-9]*.csv"))]
    tables = [accuracies(folder, seed) for seed in seeds]
    lines = ["| | | " + " | ".join(map(str, seeds)) + " |", "|" + " --- |" * (len(seeds) + 2)]
    for column in tables[0]:
        for name in tables[0].index:
            cells = [f"{table.loc[name, column]:.3f}" for table in tables]
            lines.append(f"| {column} | {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main(args: Args) -> None:
    if args.all:
        text = gather(args.folder)
        text += "\n\n" + gather_accuracies(args.folder)
        (args.folder / "compare.md").write_text(text + "\n")
        print(text)
        return
    table = compare(args.folder, args.seed, args.temperature)
    if args.temperature != Args.temperature:
        print(markdown(table))
        return
    table.to_csv(args.folder / f"compare_{args.seed}.csv")
    text = markdown(table) + "\n\n" + markdown(accuracies(args.folder, args.seed), 3)
    (args.folder / f"compare_{args.seed}.md").write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    main(tyro.cli(Args))
