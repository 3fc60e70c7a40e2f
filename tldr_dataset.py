"""Pre-tokenised TL;DR datasets: posts with reference summaries for SFT and PPO, comparisons for reward models and DPO.

The data of "The N+ Implementation Details of RLHF with PPO" (Details 1-6, Appendices B and L):

    python tldr_dataset.py --tokenizer pythia-1b --output_dir data/tldr

Inputs:  raw posts and raw comparisons, from the Hub or from folders of JSONL or parquet files named by split.
Outputs: sft/ and comparisons/, each a save_to_disk DatasetDict with a metadata.json; figures/ of token lengths, policy
         pairs and confidences (CSV and PNG); run.json.

Each text is tokenised once, a sequence is the ids of query and response. Rows are checked, lengths chosen (the paper's
for Pythia's tokens, else the longest in the data), all is padded, and only then written. In this file a response is a
`reference_response`, or `chosen`, or `rejected`; a task is sft, comparisons (of posts), or cnndm (of articles).
"""

import json
import os
import shutil
import warnings
from collections import Counter
from dataclasses import asdict, dataclass
from importlib.metadata import version
from itertools import product
from pathlib import Path

import numpy as np
import tyro
from datasets import Dataset, DatasetDict, Features, List, Value, concatenate_datasets, disable_caching, load_dataset
from huggingface_hub import HfApi
from matplotlib.figure import Figure
from transformers import AutoTokenizer

SIZES = ("70m", "160m", "410m", "1b", "1.4b", "2.8b", "6.9b", "12b")
PYTHIA = {f"pythia-{size}": f"EleutherAI/pythia-{size}-deduped" for size in SIZES}
BOOKKEEPING = "policies chosen_policy rejected_policy batch split choice extra.confidence".split()
CNNDM_BATCHES = ["batch0_cnndm", "cnndm0", "cnndm2"]
TLDR_TEMPLATE = "SUBREDDIT: r/{subreddit}\n\nTITLE: {title}\n\nPOST: {post}\n\nTL;DR:"
# Detail 4 (lengths): summaries were filtered by length for SFT and not for comparisons, so each has its own; here are
# task: (template, what is cut of it, responses, the paper's lengths of query, response and both, in Pythia's tokens)
TASKS = {
    "sft": (TLDR_TEMPLATE, "post", ["reference_response"], (512, 53, 562)),
    "comparisons": (TLDR_TEMPLATE, "post", ["chosen", "rejected"], (512, 169, 638)),
    "cnndm": ("Article:\n{article}\n\nTL;DR:\n", "article", ["chosen", "rejected"], (1919, 155, 2021)),
}
QUIET = {"verbose": False, "return_attention_mask": False, "return_token_type_ids": False}  # the ids are enough
PAPER_PAIRS = {"train": 47, "validation": 241, "validation_cnndm": 7}  # unique pairs of policies (Table 2)


@dataclass
class Args:
    # run
    output_dir: str = "data/tldr"
    """Folder that the datasets are written to."""
    overwrite: bool = False
    """Delete the run that is in the output folder."""
    push_to_hub: str = ""
    """Hub name (user/name); the datasets go to user/name_sft and user/name_comparisons. Empty: not uploaded."""
    num_proc: int = 0
    """Processes that tokenise (0: one per core)."""
    # data
    sft: str = "vwxyzjn/summarize_from_feedback_tldr_3_filtered"
    """Raw posts: Hub id, or folder of JSONL or parquet files named by split. Empty: no SFT dataset."""
    comparisons: str = "openai/summarize_from_feedback"
    """Raw comparisons: Hub id (config comparisons), or folder of files named by split. Empty: none."""
    drop_bad_rows: bool = False
    """Leave out the rows that would stop the run (such as identical summaries), and report how many."""
    # tokens
    tokenizer: str = "pythia-1b"
    """Tokenizer: pythia-{70m,160m,410m,1b,1.4b,2.8b,6.9b,12b}, any Hub id, or a local folder."""
    max_query_length: int = 512
    """Tokens of the longest query; of a longer one the post's last paragraphs are cut."""
    max_cnndm_query_length: int = 1919
    """The same for the CNN/DM articles of the split validation_cnndm."""


def load_tokenizer(path: str):
    """Tokenizer with a [PAD] of its own. Raises ValueError if it has no EOS, or if its PAD is its EOS."""
    tokenizer = AutoTokenizer.from_pretrained(path)
    # Detail 3 ([PAD] is not EOS): else EOS is masked as padding, is never trained, and summaries never end
    eos, pad = tokenizer.eos_token, tokenizer.pad_token
    if eos in (None, pad):
        remedy = "set eos_token, and pad_token to null, in its tokenizer_config.json"
        raise ValueError(f"tokenizer {path}: expected an EOS and another PAD, found EOS {eos!r}, PAD {pad!r}; {remedy}")
    if pad != "[PAD]":  # transformers gives Pythia's a pad of its own choice, <|padding|>, which the datasets don't use
        tokenizer.add_special_tokens({"pad_token": "[PAD]"})
    return tokenizer


def load_raw(source: str, kind: str) -> DatasetDict:
    """Raw splits; `origin` names each row. Raises FileNotFoundError or ValueError if a split or a column is missing."""
    splits, config, raw = ["train", "validation", "test"], "comparisons" if kind == "comparisons" else None, {}
    columns = ["info", "summaries", "choice", "batch", "split"] if config else ["subreddit", "title", "post", "summary"]
    for split in splits:
        if files := sorted(str(path) for path in Path(source).glob(f"{split}[.-]*") if path.stat().st_size):
            # types are inferred from a source's first chunk, in which a field may always be null: one chunk, one file
            form, how = ("parquet", {}) if files[0].endswith(".parquet") else ("json", {"chunksize": 1 << 30})
            raw[split] = concatenate_datasets([load_dataset(form, data_files=x, split="train", **how) for x in files])
    try:
        raw = raw or load_dataset(source, config)
    except RuntimeError:  # a loading script, which `datasets` no longer runs; the Hub has its rows as parquet
        url = f"hf://datasets/{source}@refs/convert/parquet/{config or 'default'}"
        raw = load_dataset("parquet", data_files={split: f"{url}/{split}/*.parquet" for split in splits[:2]})
    if not {"train", "validation"} <= {*raw}:
        raise FileNotFoundError(f"--{kind} {source}: expected files train.* and validation.*, found {sorted(raw)}")
    raw = DatasetDict({split: raw[split] for split in splits if split in raw})
    for split, rows in raw.items():
        if missing := {*columns} - {*rows.column_names}:
            found = f"found {rows.column_names}; rename or add {sorted(missing)}"
            raise ValueError(f"--{kind} {source}, split {split}: expected columns {columns}, {found}")
        rows = rows.select_columns([name for name in rows.column_names if name in {*columns, "id", "extra"}])
        raw[split] = rows.add_column("origin", [f"{split} row {i}" for i in range(len(rows))])
    return raw


def split_tasks(raw: DatasetDict, kind: str) -> dict[str, dict[str, Dataset]]:
    """{task: its splits}: the comparisons of CNN/DM articles, if any, become the split validation_cnndm."""
    if kind == "sft":
        return {"sft": raw}
    is_cnndm = {split: np.isin(rows["batch"][:], CNNDM_BATCHES) for split, rows in raw.items()}
    # Detail 6 (out-of-distribution validation): validation has 241 pairs of policies to train's 47, and CNN/DM is
    # another task altogether, so the splits stay apart and show how far a reward model generalises
    tldr = {split: rows.select(np.flatnonzero(~is_cnndm[split])) for split, rows in raw.items()}
    cnndm = [rows.select(np.flatnonzero(is_cnndm[split])) for split, rows in raw.items() if is_cnndm[split].any()]
    return {"comparisons": tldr} | ({"cnndm": {"validation_cnndm": concatenate_datasets(cnndm)}} if cnndm else {})


def check(field: str, found, is_good: bool, expected: str) -> None:
    """Raises ValueError, which names the field, what was expected and what was found, unless it is good."""
    if not is_good:
        raise ValueError(f"field {field!r}: expected {expected}, found {found!r:.80}")


def read_row(row: dict, task: str) -> dict:
    """A raw row -> the parts of its query, its responses, and bookkeeping. Raises ValueError for a bad row."""
    info, summaries, choice = row.get("info", row), row.get("summaries"), row.get("choice")
    check("info", info, isinstance(info, dict), "an object with the post")
    fields = ["article"] if task == "cnndm" else ["subreddit", "title", "post"] + ["summary"] * (task == "sft")
    texts = {field: info.get(field) for field in fields}
    if task != "sft":
        two = isinstance(summaries, list) and [*map(type, summaries)] == [dict, dict]
        check("summaries", summaries, two, "two objects with text and policy")
        check("choice", choice, isinstance(choice, int) and choice in (0, 1), "0 or 1")
        texts |= {f"summaries[{i}].{x}": summaries[i].get(x) for i in (0, 1) for x in ("text", "policy")}
    for field, text in texts.items():
        check(field, text, isinstance(text, str), "a text")
        check(field, text, text.strip() != "" or "summar" not in field, "a text that is not empty")
    if task == "sft":
        return texts | {"reference_response": texts["summary"]}
    # Detail 1 (specification): summaries come from many policies, and ratings may have a confidence; both are kept, to
    # see on which policies, and at which confidence, a reward model is right
    chosen, rejected = summaries[choice], summaries[1 - choice]
    check("summaries", chosen["text"], chosen["text"].strip() != rejected["text"].strip(), "two different summaries")
    check("extra", extra := row.get("extra") or {}, isinstance(extra, dict), "fields such as confidence, or null")
    check("extra.confidence", level := extra.get("confidence"), level in (None, *range(100)), "0 to 99, whole, or null")
    texts |= {"choice": choice, "chosen": chosen["text"], "chosen_policy": chosen["policy"], "batch": row["batch"]}
    texts |= {"rejected": rejected["text"], "rejected_policy": rejected["policy"], "split": row["split"]}
    return texts | {"extra.confidence": level, "policies": "--".join(sorted([chosen["policy"], rejected["policy"]]))}


def tokenize_queries(rows: list[dict], template: str, field: str, tokenizer, max_length: int) -> None:
    """Give each row its `query` and `query_token`, cutting row[field] until they have at most max_length tokens."""
    pending = rows
    while pending:
        texts = [template.format(**row) for row in pending]
        unique = [*dict.fromkeys(texts)]  # a post has several comparisons, and is tokenised for all at once
        tokens = dict(zip(unique, tokenizer(unique, **QUIET).input_ids))
        for row, text in zip(pending, texts):
            row["query"], row["query_token"] = text, tokens[text]
        pending = [row for row in pending if len(row["query_token"]) > max_length and row[field]]
        for row in pending:
            # Detail 2 (truncate paragraphs): the query stays coherent, and ends in 'TL;DR:'. A first paragraph goes
            # by the character: as one is 4 bytes, so 4 tokens, at most, a quarter of the excess can go at once
            rest = row[field].rpartition("\n")[0]
            row[field] = rest if rest.strip() else row[field][: -max(1, (len(row["query_token"]) - max_length) // 4)]
    for row in rows:
        if len(row["query_token"]) > max_length:
            found = f"found {len(row['query_token'])} when all of it is cut; raise the maximum query length"
            row["problem"] = f"{row['name']}, field {field!r}: expected a query of at most {max_length} tokens, {found}"


def tokenize(batch: dict, task: str, tokenizer, max_length: int) -> dict:
    """Raw columns -> texts, unpadded tokens, bookkeeping, and `problem`: what is wrong with a bad row, else None."""
    template, field, responses, _ = TASKS[task]
    eos, pad, rows = tokenizer.eos_token_id, tokenizer.pad_token_id, []
    colon = len(tokenizer(":", add_special_tokens=False).input_ids)
    for raw in (dict(zip(batch, values)) for values in zip(*batch.values())):
        info = raw.get("info", raw)
        name = f"{raw['origin']} (id {info.get('id') if isinstance(info, dict) else None})"
        try:
            rows.append(read_row(raw, task) | {"name": name, "problem": None})
        except ValueError as error:
            rows.append({"problem": f"{name}, {error}"})
    good = [row for row in rows if not row["problem"]]
    tokenize_queries(good, template, field, tokenizer, max_length)
    for response in responses if good else []:
        # Detail 3 (leading space, EOS): 'TL;DR:' has no space after it, so the response brings its own, as the texts of
        # comparisons do and summaries of posts do not; it ends in EOS, from which the policy learns to stop
        texts = [text if text[0] == " " else f" {text.lstrip()}" for text in (row[response] for row in good)]
        # after a ':', as in the sequence; at the start of a text, Llama's tokenizer puts another space of its own
        tokens = tokenizer([f":{text}" for text in texts], add_special_tokens=False, **QUIET).input_ids
        for row, text, tokens_after in zip(good, texts, tokens):
            row[response], row[f"{response}_token"] = text + tokenizer.eos_token, [*tokens_after[colon:], eos]
    for row, name in product(good, ("query", *responses)):
        row[f"{name}_token_len"] = len(tokens := row[f"{name}_token"])
        if pad in tokens or (eos in tokens[:-1] if name in responses else tokens[-1] == eos):
            expected = f"expected no token {pad} (PAD), nor {eos} (EOS) in a response or after a query"
            expected += ", found one; take it out of the text, or have the tokenizer add none (add_eos_token)"
            row["problem"] = f"{row['name']}, field {name!r}: {expected}"
    return {column: [row.get(column) for row in rows] for column in column_types(task, padded=False)}


def column_types(task: str, padded: bool) -> Features:
    """Columns of the tokenised rows, before padding (with `problem`) or after it."""
    columns = ["query", "query_token", "query_token_len"]
    for name in TASKS[task][2]:
        joint = [f"query_{name}_token", f"query_{name}_token_len", f"query_{name}_token_response_label"]
        columns += [name, f"{name}_token", f"{name}_token_len"] + joint * padded
    columns += BOOKKEEPING * (task != "sft") + ["problem"] * (not padded)
    types = {"token": List(Value("int32")), "label": List(Value("int32"))}
    types |= dict.fromkeys(("len", "choice", "extra.confidence"), Value("int32"))
    return Features({column: types.get(column.split("_")[-1], Value("string")) for column in columns})


def pad_rows(rows: list[np.ndarray], length: int, pad_token_id: int, left: bool = False) -> np.ndarray:
    """Rows of tokens -> (B, length), padded on the right, [7, 8] -> [7, 8, PAD], or on the left, [PAD, 7, 8]."""
    tokens = np.full((len(rows), length), pad_token_id, dtype=np.int32)
    for i, row in enumerate(rows):
        tokens[i, slice(length - len(row), None) if left else slice(len(row))] = row
    return tokens


def pad_columns(batch: dict, task: str, tokenizer, lengths: tuple[int, int, int]) -> dict:
    """Unpadded rows -> the dataset's columns. A response that does not fit is cut, and keeps its EOS."""
    (query_length, response_length, joint_length), pad = lengths, tokenizer.pad_token_id
    queries = [np.array(tokens, np.int32) for tokens in batch["query_token"]]
    # Detail 5 (padding): queries on the left, since generation goes on at their end; all else on the right
    columns = dict(batch) | {"query_token": pad_rows(queries, query_length, pad, left=True)}
    for name in TASKS[task][2]:
        responses, texts = [np.array(tokens, np.int32) for tokens in batch[f"{name}_token"]], batch[name]
        for i, (query, tokens) in enumerate(zip(queries, responses)):
            limit = min(response_length, joint_length - len(query))
            if len(tokens) > limit:
                responses[i] = np.append(tokens[: limit - 1], np.int32(tokenizer.eos_token_id))
                texts[i] = tokenizer.decode(responses[i], clean_up_tokenization_spaces=False)
        joint = [np.concatenate(both) for both in zip(queries, responses)]
        labels = [np.append(np.full_like(query, pad), tokens) for query, tokens in zip(queries, responses)]
        columns |= {name: texts, f"{name}_token": pad_rows(responses, response_length, pad)}
        columns |= {f"{name}_token_len": [*map(len, responses)], f"query_{name}_token_len": [*map(len, joint)]}
        columns |= {f"query_{name}_token": pad_rows(joint, joint_length, pad)}
        columns |= {f"query_{name}_token_response_label": pad_rows(labels, joint_length, pad)}
    return {column: columns[column] for column in column_types(task, padded=True)}


def choose_lengths(splits: dict[str, Dataset], task: str, tokenizer, max_length: int) -> tuple[int, int, int]:
    """Lengths of query, response, and both: the paper's if these are Pythia's tokens, else the longest in the data."""
    columns = [(rows, f"{response}_token_len") for rows in splits.values() for response in TASKS[task][2]]
    responses = np.concatenate([rows[column][:] for rows, column in columns])
    joint = responses + np.concatenate([rows["query_token_len"][:] for rows, _ in columns])
    needed, paper = (max_length, int(responses.max()), int(joint.max())), TASKS[task][3]
    if tokenizer("[PAD]TL;DR: N+").input_ids != [50277, 14135, 28, 4976, 27, 427, 12] or max_length != paper[0]:
        return needed
    if num_long := ((responses > paper[1]) | (joint > paper[2])).sum():
        warnings.warn(f"{task}: expected lengths {paper}, found {needed}; {num_long} responses are cut", stacklevel=2)
    return paper


def parallel_map(rows: Dataset, function, num_proc: int, features: Features, **settings) -> Dataset:
    """Map batches of 1,000 rows, with no more processes than batches."""
    num_proc = min(num_proc or os.cpu_count(), -(-len(rows) // 1000))
    options = {"features": features, "remove_columns": rows.column_names, "desc": function.__name__}
    return rows.map(function, batched=True, num_proc=num_proc if num_proc > 1 else None, fn_kwargs=settings, **options)


def build(source: str, kind: str, tokenizer, args: Args) -> tuple[DatasetDict, dict]:
    """Load, tokenise, check and pad -> the dataset, and its facts for metadata.json. Raises ValueError for bad rows."""
    raw, dataset, bad = load_raw(source, kind), DatasetDict(), []
    facts = {"lengths": {}, "rows": {}, "dropped": bad, "raw_fingerprint": {x: y._fingerprint for x, y in raw.items()}}
    for task, splits in split_tasks(raw, kind).items():
        limit = args.max_cnndm_query_length if task == "cnndm" else args.max_query_length
        settings, types, tokens = {"task": task, "tokenizer": tokenizer}, column_types(task, padded=False), {}
        check(f"--{kind}", {x: len(y) for x, y in splits.items()}, all(map(len, splits.values())), "posts in each")
        for split, rows in splits.items():
            tokens[split] = parallel_map(rows, tokenize, args.num_proc, types, max_length=limit, **settings)
            found = tokens[split]["problem"][:]
            tokens[split] = tokens[split].select([i for i, problem in enumerate(found) if not problem])
            bad += filter(None, found)
        if (bad and not args.drop_bad_rows) or not all(map(len, tokens.values())):
            remedy = "mend them, or leave them out with --drop_bad_rows if each split has good ones"
            raise ValueError("\n".join([f"--{kind} {source}: {len(bad)} bad rows; {remedy}:", *bad[:10]]))
        lengths, types = choose_lengths(tokens, task, tokenizer, limit), column_types(task, padded=True)
        for split, rows in tokens.items():
            dataset[split] = parallel_map(rows, pad_columns, args.num_proc, types, lengths=lengths, **settings)
            facts["lengths"][split] = dict(zip(("query", "response", "query_response"), lengths))
            facts["rows"][split] = len(rows)
    return dataset, facts


def write_counts(dataset: DatasetDict, columns: list[str], path: Path) -> None:
    """How often each value of the columns occurs in each split: <path>.csv, and <path>.png with a panel for each."""
    figure, lines = Figure(figsize=(6.5 + 3.5 * len(columns), 3 * len(dataset)), layout="constrained"), []
    panels = figure.subplots(len(dataset), len(columns), squeeze=False)
    for panel, (split, column) in zip(panels.flat, product(dataset, columns)):
        values = dataset[split][column][:]
        counts = Counter(values).most_common()
        lines += [f'{split},{column},"{text}",{n}' for value, n in counts for text in [str(value).replace('"', '""')]]
        if column == "policies":
            panel.barh([name.replace("$", r"\$") for name, _ in counts[:20]], [count for _, count in counts[:20]])
            panel.set(ylim=(19.5, -0.5), title=f"{split}: {len(counts)} pairs of policies", xlabel="comparisons")
        else:
            known = np.array([value for value in values if value is not None], dtype=int)
            panel.hist(known, bins=np.arange(-0.5, 1.02 * known.max(initial=1) + 10, 1 + known.max(initial=0) // 60))
            facts = f"median {np.median(known):.0f}, largest {known.max()}" if len(known) else "none given"
            panel.set(title=f"{split}\n{facts}", xlabel=column, ylabel="rows", xlim=(-0.5, known.max(initial=1) + 1))
        panel.tick_params(labelsize=7)
    path.with_suffix(".csv").write_text("\n".join(["split,column,value,count", *lines, ""]))
    figure.savefig(path.with_suffix(".png"), dpi=100)


def main(args: Args) -> dict[str, DatasetDict]:
    """Build, write and perhaps upload the datasets -> {"sft": ..., "comparisons": ...}."""
    folder, path, datasets = Path(args.output_dir).resolve(), PYTHIA.get(args.tokenizer, args.tokenizer), {}
    if folder.exists() and any(folder.iterdir()) and not (args.overwrite and (folder / "run.json").exists()):
        remedy = "give another --output_dir, or --overwrite to delete the run in it"
        raise FileExistsError(f"--output_dir {folder}: expected a new or empty folder, found files; {remedy}")
    disable_caching()  # or each map would leave a copy of the dataset in the cache for ever
    os.environ["TOKENIZERS_PARALLELISM"] = str(args.num_proc == 1)  # the tokenizer's threads do not survive a fork
    tokenizer, versions = load_tokenizer(path), {x: version(x) for x in ("datasets", "tokenizers", "transformers")}
    run = {"args": asdict(args), "tokenizer": path, "versions": versions, "datasets": {}, "finished": True}
    for kind, source in (("sft", args.sft), ("comparisons", args.comparisons)):
        if source:
            datasets[kind], run["datasets"][kind] = build(source, kind, tokenizer, args)
    unfinished = folder.with_name(f"{folder.name}.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    (unfinished / "figures").mkdir(parents=True)
    for kind, dataset in datasets.items():
        dataset.save_to_disk(unfinished / kind)
        metadata = {"tokenizer": path, "args": asdict(args)} | run["datasets"][kind]
        (unfinished / kind / "metadata.json").write_text(json.dumps(metadata, indent=2))
        lengths = [column for column in dataset["train"].column_names if column.endswith("_len")]
        write_counts(dataset, lengths, unfinished / "figures" / f"{kind}_token_lengths")
        if kind == "comparisons":
            write_counts(dataset, ["policies"], unfinished / "figures" / "policy_pairs")
            write_counts(dataset, ["extra.confidence"], unfinished / "figures" / "confidence")
            run["policy_pairs"] = {split: len({*rows["policies"]}) for split, rows in dataset.items()}
            if args.comparisons == Args.comparisons and run["policy_pairs"] != PAPER_PAIRS:
                warnings.warn(f"expected {PAPER_PAIRS} pairs of policies, found {run['policy_pairs']}", stacklevel=2)
    (unfinished / "run.json").write_text(json.dumps(run, indent=2))
    shutil.rmtree(folder, ignore_errors=True)
    os.replace(unfinished, folder)
    for kind, dataset in datasets.items():
        print(f"{folder / kind}: {run['datasets'][kind]['rows']} rows, lengths {run['datasets'][kind]['lengths']}")
        if args.push_to_hub:
            dataset.push_to_hub(repo := f"{args.push_to_hub}_{kind}")
            HfApi().upload_folder(repo_id=repo, repo_type="dataset", folder_path=folder / kind, allow_patterns="meta*")
    return datasets


if __name__ == "__main__":
    main(tyro.cli(Args))
