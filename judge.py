"""Win rate of a model's summaries over the references, or over another model's, by an LLM judge (docs/judge.md).

N+ Appendix I (the prompt), Detail 17, Figures 1, 8 and 13. JSONL of `query, response, reference[, score,
reference_score, id]` -> record.jsonl (every request and reply), report.md, report.png and CSVs in --output_dir:
    python judge.py --samples models/*/ppo_*/samples_validation.jsonl --judge gpt-4o-mini --dry_run
The judge sees a pair as A and B, half of the pairs each way, as the seed draws it. Replies are recorded as they arrive
and not asked for again: after a crash or Ctrl-C, run the same command. A reply without a verdict is never guessed at.
"""

import asyncio
import fcntl
import json
import os
import re
from dataclasses import dataclass
from pathlib import Path

import matplotlib.figure
import numpy as np
import pandas as pd
import statsmodels.api as sm
import tyro
from openai import AsyncOpenAI
from tokenizers import Tokenizer
from tqdm import tqdm

PROMPT = """Which of the following summaries does a better job of summarizing the most important points in the given \
forum post, without including unimportant or irrelevant details? Judge based on accuracy, coverage, and coherence.\n
Post:\n{post}\n\nSummary A:\n{a}\n\nSummary B:\n{b}\n
FIRST provide a one-sentence comparison of the two summaries, explaining which you prefer and why. SECOND, on a new \
line, state only "A" or "B" to indicate your choice. Your response should use the format:\n
Comparison: <one-sentence comparison and explanation>\nPreferred: <"A" or "B">"""
REMINDER = '\n\nEnd your response with one line that is exactly "Preferred: A" or "Preferred: B".'  # when asked again
VERDICT = re.compile(r'[\s*]*Preferred:[\s*]*(?:Summary )?"?([AB])"?[\s*.]*')
SETTINGS, MAX_ASKS = {"temperature": 0.0, "max_tokens": 256, "stream": False}, 3  # asks until a pair is unparsed
RETRIED, RETRIES = (408, 409, 425, 429, *range(500, 600)), 10  # HTTP status asked again; failures of a request


@dataclass
class Args:
    samples: tuple[str, ...]
    """JSONL files of samples to be judged."""
    against: tuple[str, ...] = ()
    """Compare with the responses in these files (one for all, or one for each) instead of with the references."""
    names: tuple[str, ...] = ()
    """Names of the files, "size/method/seed"; by default read from .../<size>/<method>_<seed>/<file>."""
    output_dir: str = "runs/judge"
    """Where the record and the report go; runs that share it share the record."""
    base_url: str = "https://api.openai.com/v1"
    """An OpenAI-compatible server; the key is read from the environment's OPENAI_API_KEY and from nowhere else."""
    judge: str = "gpt-3.5-turbo-0125"
    """The judge's name on that server."""
    both_orders: bool = False
    """Ask for each pair in both orders: a win only if both agree, else a tie."""
    recorded_order: bool = False
    """Show the pairs in the order of the samples' own field `reference_shown_as` ("A" or "B"), not the seed's."""
    seed: int = 44413
    """Seed of the order of A and B, and of the bootstrap."""
    concurrency: int = 32
    """Requests in flight at once."""
    timeout: float = 60.0
    """Seconds until a request counts as lost and is sent again."""
    dry_run: bool = False
    """Check the input, print the number of requests with their tokens and price, and stop."""
    prices: tuple[float, float] = (0.0, 0.0)
    """Price of a million prompt tokens and of a million reply tokens (0: no money is shown)."""
    tokenizer: str = ""
    """Count summary lengths in tokens of this tokenizer.json; by default in characters."""


class JudgeError(SystemExit):
    """Ends the run with a message: the input cannot be judged (before any request), or the server refuses."""


def load_samples(path: str, fields: list[str]) -> pd.DataFrame:
    """Rows of a JSONL file. Raises JudgeError: no file, no rows, not JSON, a bad field, an id used twice."""
    try:
        rows = [dict(json.loads(line)) for line in open(path, encoding="utf-8") if line.strip()]
    except (OSError, TypeError, ValueError) as error:
        raise JudgeError(f"{path}: expected a file with a JSON object on each line, found {error!r}") from None
    if not rows:
        raise JudgeError(f"{path}: expected samples, found an empty file; run the script that writes it again")
    table = pd.DataFrame([dict.fromkeys([*fields, "id", "score", "reference_score"]) | x for x in rows], dtype=object)
    for field in fields:
        ok = re.compile("[AB]" if field == "reference_shown_as" else "[^\ud800-\udfff]*").fullmatch
        if bad := [f"{x!r:.80}, row {i}" for i, x in enumerate(table[field], 1) if not (isinstance(x, str) and ok(x))]:
            raise JudgeError(f"{path}: expected text in `{field}` (no lone surrogate; order: A or B), found {bad[0]}")
    if (twice := table.id.notna() & table.id.duplicated()).any():
        raise JudgeError(f"{path}: expected every id once, found a duplicate id: {table.id[twice].iloc[0]!r}")
    return table.assign(id=table.id.where(table.id.notna(), table.index).astype(str))


def balanced_orders(n: int, seed: int) -> list[str]:
    """Which summary each response is: A and B once in every two pairs, so a growing file keeps its earlier orders."""
    flip = np.random.default_rng(seed).random((n + 1) // 2) < 0.5
    return ["AB"[int(flip[i // 2]) ^ (i % 2)] for i in range(n)]


def load_pairs(args: Args) -> pd.DataFrame:
    """One row per pair: `name, id, query, response, reference, score, reference_score, shown_as` (A, B, AB or none)."""
    paths = [str(Path(path).resolve()) for path in args.samples]
    found = [re.search(r"([^/]+)/([^/]+)_(\d+)/[^/]*?((?:_beta[-+.\de]+)?)(?:\.[^/.]+)?$", path) for path in paths]
    names = args.names or [f"{m[1]}/{m[2]}{m[4]}/{m[3]}" if m else Path(p).stem for m, p in zip(found, paths)]
    if not len(set(names)) == len(names) == len(args.samples) or len(args.against) not in (0, 1, len(args.samples)):
        raise JudgeError(f"give --names, a different one for each --samples, 0, 1 or as many --against; found {names}")
    if args.concurrency < 1 or (args.tokenizer and not Path(args.tokenizer).is_file()):
        raise JudgeError(f"need --concurrency > 0, a file as --tokenizer; found {args.concurrency}, {args.tokenizer}")
    fields = ["query", "response"] + ["reference"] * (not args.against) + ["reference_shown_as"] * args.recorded_order
    tables = [load_samples(path, fields) for path in args.samples]
    others = [load_samples(path, ["query", "response"]) for path in args.against]
    by = ["query", "id"] if any(table["query"].duplicated().any() for table in tables + others) else ["query"]
    for path, table in zip(args.samples + args.against, tables + others):
        if odd := set(table[by].itertuples(False, None)) ^ set(tables[0][by].itertuples(False, None)):
            raise JudgeError(f"{path}: expected the same queries, found {len(odd)} of one file only: {min(odd)!r:.80}")
    for i, (t, name) in enumerate(zip(tables, names)):
        recorded = t.reference_shown_as.map({"A": "B", "B": "A"}).tolist() if args.recorded_order else []
        if args.against:
            other = t[by].join(others[i % len(others)].set_index(by)[["response", "score"]], on=by)
            t = t.assign(reference=other.response, reference_score=other.score)
        sides = "AB" if args.both_orders else recorded or balanced_orders(len(t), args.seed)  # equal ones: a tie
        tables[i] = t.assign(name=name, shown_as=np.where(t.response.str.strip() == t.reference.str.strip(), "", sides))
    return pd.concat(tables, ignore_index=True)


def make_prompt(pair, shown_as: str) -> str:
    """The prompt of N+ Appendix I, with the response as summary `shown_as`."""
    a, b = (pair.response.strip(), pair.reference.strip())[:: 1 if shown_as == "A" else -1]
    return PROMPT.format(post=pair.query.strip(), a=a, b=b)


def parse_verdict(reply: str) -> str | None:
    """A or B if the last line is "Preferred: A" or "Preferred: B" and no other line prefers anything, else None."""
    match = VERDICT.fullmatch((reply.strip().splitlines() or [""])[-1])
    return match.group(1) if match and reply.count("Preferred:") == 1 else None


class Judge:
    """The server and the record of what it was asked: `replies[prompt]` are its replies, with or without a verdict."""

    def __init__(self, args: Args):
        self.args, self.replies, path = args, {}, Path(args.output_dir) / "record.jsonl"
        self.encode = Tokenizer.from_file(args.tokenizer).encode if args.tokenizer else lambda text, **_: text
        self.key, self.tokens = os.environ.get("OPENAI_API_KEY", "").strip() or "no OPENAI_API_KEY", np.zeros(2, int)
        path.parent.mkdir(parents=True, exist_ok=True)
        self.file = open(path, "ab", buffering=0)
        try:
            fcntl.flock(self.file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise JudgeError(f"{path} is in use by another run; wait for it, or give another --output_dir") from None
        self.file.truncate(path.read_bytes().rfind(b"\n") + 1)  # a kill can tear the last line, and no other
        for line in path.read_bytes().splitlines():
            self.add(json.loads(line), save=False)

    def add(self, line: dict, save: bool = True) -> None:
        if save:
            line = {"time": round(pd.Timestamp.now("UTC").timestamp(), 3), "judge": self.args.judge} | line
            self.file.write(json.dumps(line).encode() + b"\n")
        if "reply" in line and line["judge"] == self.args.judge:
            self.replies.setdefault(line["prompt"], []).append(line["reply"])
            odd = not all(isinstance(n, int) and n < 1e9 for n in line["tokens"])  # the server does not count, or oddly
            self.tokens += [len(line["prompt"]) // 4, len(line["reply"]) // 4] if odd else line["tokens"]

    def verdict(self, prompt: str) -> str | None:
        """A, B, "unparsed" (MAX_ASKS replies and no verdict), or None: still to be asked."""
        replies = self.replies.get(prompt, [])
        return next(filter(None, map(parse_verdict, replies)), "unparsed" if len(replies) >= MAX_ASKS else None)

    def cost(self, tokens) -> str:
        money = f" for {np.dot(tokens, self.args.prices) / 1e6:,.4f}"
        return f"{tokens[0]:,} + {tokens[1]:,} tokens" + money * any(self.args.prices)

    def seconds_to_wait(self, error: Exception, message: str, failures: int) -> float:
        """Seconds until the next try. Raises ConnectionError, with the server's message, if that would be of no use."""
        if failures > RETRIES or "insufficient_quota" in message or getattr(error, "status_code", 500) not in RETRIED:
            raise ConnectionError(f"--base_url {self.args.base_url}, --judge {self.args.judge}, its key: {message}")
        asked = getattr(getattr(error, "response", None), "headers", {}).get("retry-after", "0")  # seconds, or a date
        date = pd.to_datetime(asked, utc=True, errors="coerce", format="%a, %d %b %Y %H:%M:%S GMT")
        waits = [pd.to_numeric(asked, errors="coerce"), (date - pd.Timestamp.now("UTC")).total_seconds()]
        return np.nanmax([min(60, 2 ** (failures - 2)) * np.random.uniform(0.5, 1), *waits])

    async def ask(self, create, prompt: str, pair, shown_as: str) -> None:
        """Ask until there is a verdict, or MAX_ASKS replies without one; it waits failures out, the client does not."""
        line, failures = {"name": pair.name, "id": pair.id, "shown_as": shown_as, "prompt": prompt}, 0
        while self.verdict(prompt) is None:  # with a reminder, since the same words would bring the same nonsense
            messages, body = [{"role": "user", "content": prompt + REMINDER * (prompt in self.replies)}], ""
            try:
                async with asyncio.timeout(self.args.timeout):  # the client's is for each read
                    body = (await create(model=self.args.judge, messages=messages, **SETTINGS)).text
                content, usage = (got := json.loads(body))["choices"][0]["message"]["content"], got.get("usage")
                reply = content if isinstance(content, str) else "".join(part.get("text", "") for part in content or [])
            except Exception as error:  # the client's errors, and a reply that is not a completion
                failures += 1  # below: a server may echo the key
                message = " ".join(f"{type(error).__name__}: {error} {body}".split()).replace(self.key, "***")[:1000]
                refused = self.replies and getattr(error, "status_code", 0) in (400, 413, 422)  # only this prompt is
                self.add(line | {"error": message} | ({"reply": "", "tokens": [0, 0]} if refused else {}))
                self.bar.set_postfix_str(f"{message:.200} from {self.args.base_url}, failure {failures}")
                await asyncio.sleep(0 if refused else self.seconds_to_wait(error, message, failures))
                continue
            tokens = [usage.get(f"{k}_tokens") if isinstance(usage, dict) else None for k in ("prompt", "completion")]
            self.add(line | {"reply": reply, "verdict": parse_verdict(reply), "tokens": tokens})

    async def ask_all(self, requests: dict) -> None:
        """Ask the first request alone, so that a wrong key or model costs one; then `concurrency` at a time."""
        client = AsyncOpenAI(base_url=self.args.base_url, api_key=self.key, max_retries=0, timeout=self.args.timeout)
        self.bar, wins, todo = tqdm(total=len(requests), unit="request", mininterval=0.5), [], iter(requests.items())

        async def worker(requests) -> None:
            for prompt, (pair, shown_as) in requests:
                await self.ask(client.chat.completions.with_raw_response.create, prompt, pair, shown_as)
                wins.extend([self.verdict(prompt) == shown_as] * (self.verdict(prompt) != "unparsed"))
                rate, unparsed = sum(wins) / max(len(wins), 1), self.bar.n + 1 - len(wins)
                self.bar.set_postfix_str(f"win rate {rate:.3f}, {unparsed} unparsed, {self.cost(self.tokens)}", False)
                self.bar.update()

        await worker([first for _, first in zip(range(1), todo)])
        await asyncio.gather(*(worker(todo) for _ in range(self.args.concurrency)))


def interval(label: str, values: pd.Series, queries: pd.Series, seed: int | None = None) -> dict:
    """Mean and 95% interval over queries: bootstrap (2,000 draws), or Wilson's, which suits the few pairs of a bin."""
    mean, table = values.mean(), values.dropna().groupby(queries).agg(["sum", "count"]).to_numpy()
    if seed is None:  # of as many independent pairs as have the variance that is found between queries
        squares = np.square(table[:, 0] - mean * table[:, 1]).sum()
        n = mean * (1 - mean) * table[:, 1].sum() ** 2 / squares if squares > 1e-9 else max(len(table), 1)
        low, high = np.round(sm.stats.proportion_confint(mean * n, n, method="wilson"), 9)  # 1 - 1e-16 is below 1
    else:
        draws = np.random.default_rng(seed).multinomial(n := len(table), [1 / (n or 1)] * (n or 1), 2000)[:, :n] @ table
        low, high = np.quantile(draws[:, 0] / draws[:, 1], [0.025, 0.975]) if n else (np.nan, np.nan)
    return {label: mean, f"{label}_low": low, f"{label}_high": high}


def add_outcomes(t: pd.DataFrame, judge: Judge) -> None:
    """Adds as_A, as_B (verdicts with the response shown so), outcome (1, 0, 0.5 tie, NaN unparsed), lengths, margin."""
    for side in "AB":
        t[f"as_{side}"] = [judge.verdict(make_prompt(p, side)) if side in p.shown_as else None for p in t.itertuples()]
    wins = pd.DataFrame({side: t[f"as_{side}"].map({side: 1.0, "AB".strip(side): 0.0}) for side in "AB"})
    t["outcome"] = wins.mean(axis=1).where(wins.count(axis=1) == t.shown_as.str.len()).mask(t.shown_as == "", 0.5)
    for column, texts in (("length", t.response), ("reference_length", t.reference)):
        t[column] = [max(len(judge.encode(text, add_special_tokens=False)), 1) for text in texts]
    t["log_length_ratio"] = np.log(t.length / t.reference_length)
    t["margin"] = (difference := pd.to_numeric(t.score, "coerce") - pd.to_numeric(t.reference_score, "coerce")).abs()
    # Detail 17 (consistency with an LLM judge): does the reward model order the two summaries as the judge does?
    t["agreement"] = (t.outcome.eq(1) == difference.gt(0)).astype(float).where(t.outcome.isin([0, 1]) & t.margin.gt(0))


def summarise(t: pd.DataFrame, seed: int) -> pd.Series:
    """Counts, win rate, position bias and its test, win rate at equal length, and agreement of one file's pairs."""
    judged = t[t.outcome.notna() & t.shown_as.ne("")]
    y, groups = judged.outcome, pd.factorize(judged["query"])[0]
    row = {"pairs": len(t), "unparsed": sum(t.outcome.isna()), **t[["length", "reference_length"]].mean()}
    row |= {label: sum(t.outcome == value) for label, value in (("wins", 1), ("ties", 0.5), ("losses", 0))}
    row |= interval("win_rate", t.outcome, t["query"], seed)
    a, b = (t[["as_A", "as_B"]].eq(letter).sum(axis=1) for letter in "AB")  # 1 and 1: both orders, no lean to either
    row |= {"chose_A": sum(a) / max(sum(a + b), 1), "chose_A_p": sm.stats.binom_test(sum(a > b), max(sum(a != b), 1))}
    x = judged[["log_length_ratio"]].assign(one=1.0, shown_as=judged.shown_as.map({"A": 0.5, "B": -0.5}))
    x = x[[column for column in x if column == "one" or x[column].nunique() > 1]]
    if y.nunique() > 1 and len(set(groups)) > x.shape[1] and "log_length_ratio" in x:  # P ~ log(ratio) + position
        fit = sm.GLM(y, x, family=sm.families.Binomial()).fit(cov_type="cluster", cov_kwds={"groups": groups})
        even = x.assign(log_length_ratio=0.0).drop_duplicates()  # equal lengths, once in each position
        rates = fit.get_prediction(even, which="mean", average=True).summary_frame().iloc[0].drop("se").clip(0, 1)
        if np.abs(fit.fittedvalues - y).max() > 1e-3:  # else length tells every outcome, and the slope is infinite
            keys = [f"equal_length_win_rate{end}" for end in ("", "_low", "_high")] + ["length_slope", "length_slope_p"]
            row |= zip(keys, [*rates, fit.params.log_length_ratio, fit.pvalues.log_length_ratio])
    return pd.Series(row | interval("agreement", t.agreement, t["query"], seed))


def write_report(pairs: pd.DataFrame, args: Args, cost: str) -> None:
    """Writes pairs.csv, results.csv, curves.csv (ten bins), report.png and report.md, and prints the last."""
    out, curves, tab20 = Path(args.output_dir), [pd.DataFrame()], matplotlib.colormaps["tab20"]
    results = pd.DataFrame([summarise(t, args.seed).rename(name) for name, t in pairs.groupby("name", sort=False)])
    models = results.index.to_series().str.replace(r"/\d+$", "", regex=True)  # "size/method/seed" without the seed
    spread = results.filter(regex="(rate|agreement)$").groupby(models, sort=False).agg(["mean", "std", "count"])
    look = {m: {"color": tab20((2 * i + i // 10) % 20), "marker": "."} for i, m in enumerate(spread.index)}
    axes = (figure := matplotlib.figure.Figure(figsize=(16, 10), layout="constrained")).subplots(2, 2).ravel()
    for i, (model, t) in enumerate(results.groupby(models, sort=False)):  # Figures 1 and 8 (left): a point per seed
        ends = np.abs(t[["win_rate_low", "win_rate_high"]].T - t.win_rate)
        for axis, x in zip(axes, (i + np.linspace(-0.3, 0.3, len(t) + 2)[1:-1], t.length)):
            axis.errorbar(x, t.win_rate, ends, ls="", ms=8, label=model, **look[model])
    axes[0].set_xticks(range(len(look)), look, rotation=45, rotation_mode="xtick", fontsize=min(8, 250 / len(look)))
    for axis, x, y in ((axes[2], "log_length_ratio", "outcome"), (axes[3], "margin", "agreement")):  # 8 (right), 13
        axis.set_title("no scores" if pairs[x].isna().all() else "", y=0.55)
        tenth = pd.qcut(pairs[x].where(pairs[y].notna()), 10, duplicates="drop")
        for model, t in pairs[tenth.notna()].groupby(pairs["name"].map(models), sort=False):
            groups = t.groupby(tenth, observed=True)
            rows = [interval("rate", g[y], g["query"]) | {"n": len(g), "mean_x": g[x].mean()} for _, g in groups]
            curves.append(bins := pd.DataFrame(rows).assign(bin=list(groups.groups), model=model, y=y, x=x))
            axis.errorbar(bins.mean_x, bins.rate, np.abs(bins[["rate_low", "rate_high"]].T - bins.rate), **look[model])
    lengths = f"mean length ({'tokens' if args.tokenizer else 'characters'})", "log(length / reference length)"
    for axis, label in zip(axes, ("", *lengths, "|difference of reward scores|")):
        axis.axhline(0.5, color="grey", lw=0.5)
        axis.set(xlabel=label, ylabel="agreement with the judge" if axis is axes[3] else "win rate", ylim=(0, 1))
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside right upper", fontsize=8, ncols=1 + i // 50)
    figure.savefig(out / "report.png", dpi=110)
    for name, table in (("pairs", pairs), ("results", results.rename_axis("name")), ("curves", pd.concat(curves))):
        table.to_csv(out / f"{name}.csv")
    tables = [f"```\n{t.to_string(line_width=120, float_format='{:.4g}'.format)}\n```" for t in (results, spread)]
    text = f"# Win rates by {args.judge}\n\n{tables[0]}\n\nOver seeds:\n\n{tables[1]}\n\nPaid: {cost}. {args}\n"
    (out / "report.md").write_text(text)
    print(text)


def main(args: Args) -> None:
    pairs, judge = load_pairs(args), Judge(args)
    with judge.file:  # locked until it is closed
        asks = {make_prompt(pair, side): (pair, side) for pair in pairs.itertuples() for side in pair.shown_as}
        todo = {prompt: ask for prompt, ask in asks.items() if judge.verdict(prompt) is None}
        price = judge.cost([sum(map(len, todo)) // 4, 64 * len(todo)])  # 4 characters a token, 64 tokens a reply
        print(f"{len(pairs)} pairs; {len(asks) - len(todo)} verdicts in the record, {len(todo)} to ask: about {price}")
        if args.dry_run:
            return
        try:
            asyncio.run(judge.ask_all(todo))
        except (KeyboardInterrupt, ConnectionError) as stop:  # a SystemExit of two workers would end in tracebacks
            raise JudgeError(f"stopped; the same command goes on from the record. {stop}") from None
        add_outcomes(pairs, judge)
        write_report(pairs, args, judge.cost(judge.tokens))


if __name__ == "__main__":
    main(tyro.cli(Args))
