"""Win rate of a model's summaries over the references, or over another model's, by an LLM judge (docs/judge.md).

N+ Appendix I (the prompt), Detail 17, Figures 1, 5, 8 and 13.

    python judge.py --samples models/*/ppo_*/samples_validation.jsonl --judge gpt-4o-mini --dry_run
    python judge.py --samples ppo.jsonl --against sft.jsonl --both_orders --base_url http://127.0.0.1:8000/v1

JSONL of `query, response, reference[, score, reference_score, id]` -> record.jsonl (every request and reply), report.md,
report.png, results.csv, curves.csv, pairs.csv in --output_dir. The judge sees a pair as A and B, in an order drawn from
the seed, half of the pairs each way. Replies are recorded as they arrive, and what the record holds is not asked again:
after a crash or Ctrl-C, run the same command. A reply without a verdict is asked again, then reported, never guessed.
"""

import asyncio
import fcntl
import json
import os
import re
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
import statsmodels.api as sm
import tyro
from matplotlib.figure import Figure
from openai import APIError, AsyncOpenAI
from scipy.stats import binomtest
from tqdm import tqdm

PROMPT = """Which of the following summaries does a better job of summarizing the most important points in the given \
forum post, without including unimportant or irrelevant details? Judge based on accuracy, coverage, and coherence.

Post:\n{post}\n\nSummary A:\n{a}\n\nSummary B:\n{b}\n
FIRST provide a one-sentence comparison of the two summaries, explaining which you prefer and why. SECOND, on a new \
line, state only "A" or "B" to indicate your choice. Your response should use the format:\n
Comparison: <one-sentence comparison and explanation>\nPreferred: <"A" or "B">"""
REMINDER = '\n\nEnd your response with one line that is exactly "Preferred: A" or "Preferred: B".'  # when asked again
VERDICT = re.compile(r'[\s*]*Preferred:[\s*]*(?:Summary )?"?([AB])"?[\s*.]*')
TEMPERATURE, MAX_TOKENS, MAX_ASKS = 0.0, 256, 3  # a reply has about 60 tokens; asks until a pair counts as unparsed
MAX_FAILURES, BACKOFF, MAX_BACKOFF = 10, 0.5, 60.0  # of one request in a row; seconds, doubled each time
BINS, BOOTSTRAP = 10, 2000  # of the curves; resamples for an interval


@dataclass
class Args:
    samples: tuple[str, ...]
    """JSONL files of samples to be judged"""
    against: tuple[str, ...] = ()
    """compare with the responses in these files (one for all, or one for each) instead of with the references"""
    names: tuple[str, ...] = ()
    """names of the files, "size/method/seed"; by default read from .../<size>/<method>_<seed>/<file>"""
    output_dir: str = "runs/judge"
    """where the record and the report go; runs that share it share the record"""
    base_url: str = "https://api.openai.com/v1"
    """an OpenAI-compatible server; the key is read from the environment's OPENAI_API_KEY and from nowhere else"""
    judge: str = "gpt-3.5-turbo-0125"
    """the judge's name on that server"""
    both_orders: bool = False
    """ask for each pair in both orders: a win only if both agree, else a tie"""
    recorded_order: bool = False
    """show the pairs in the order of the samples' own field `reference_shown_as` ("A" or "B"), not the seed's"""
    seed: int = 44413
    """seed of the order of A and B, and of the bootstrap"""
    concurrency: int = 32
    """requests in flight at once"""
    timeout: float = 60.0
    """seconds until a request counts as lost and is sent again"""
    dry_run: bool = False
    """check the input, print the number of requests with their tokens and price, and stop"""
    prices: tuple[float, float] = (0.0, 0.0)
    """price of a million prompt tokens and of a million reply tokens (0: no money is shown)"""
    tokenizer: str = ""
    """count summary lengths in tokens of this tokenizer (a folder or Hub id); by default in characters"""


class JudgeError(RuntimeError):
    """Input that cannot be judged (raised before any request), or a server that refuses; the record stays whole."""


def load_samples(path: str, fields: list[str]) -> pd.DataFrame:
    """Rows of a JSONL file. Raises JudgeError: no file, no rows, not JSON, a row without a field, an id that comes twice."""
    try:
        rows = [json.loads(line) for line in open(path, encoding="utf-8") if line.strip()]
    except (OSError, ValueError) as error:
        raise JudgeError(
            f"{path}: expected a JSON object on each line, found {type(error).__name__}: {error}"
        ) from None
    if not rows:
        raise JudgeError(f"{path}: expected samples, found an empty file; run the script that writes it again")
    table = pd.DataFrame(rows, dtype=object)
    for field in fields:
        if bad := [i for i, text in enumerate(table.get(field, [None]), 1) if not isinstance(text, str)]:
            raise JudgeError(f"{path}: expected text in the fields {fields}, found no `{field}` in row {bad[0]}")
    table = table.reindex(columns=table.columns.union(["id", "score", "reference_score"]))
    if (twice := table.id.notna() & table.id.duplicated()).any():
        raise JudgeError(f"{path}: expected every id once, found a duplicate id: {table.id[twice].iloc[0]!r}")
    return table


def balanced_orders(n: int, seed: int) -> list[str]:
    """Which summary each response is: A and B once in every two pairs, so a growing file keeps its earlier orders."""
    flip = np.random.default_rng(seed).random((n + 1) // 2) < 0.5
    return ["AB"[int(flip[i // 2]) ^ (i % 2)] for i in range(n)]


def load_pairs(args: Args) -> pd.DataFrame:
    """One row per pair: `name, id, query, response, reference, score, reference_score, shown_as` (A, B or AB)."""
    found = [re.search(r"([^/]+)/([^/]+)_(\d+)/[^/]+$", str(Path(path).resolve())) for path in args.samples]
    names = args.names or ["/".join(m.groups()) if m else Path(path).stem for m, path in zip(found, args.samples)]
    if len(set(names)) != len(args.samples) or len(args.against) not in (0, 1, len(args.samples)):
        raise JudgeError(f"expected one of --names for each of --samples and 0, 1 or as many --against, found {names}")
    fields = ["query", "response"] + ["reference"] * (not args.against) + ["reference_shown_as"] * args.recorded_order
    tables = [load_samples(path, fields) for path in args.samples]
    others = [load_samples(path, ["query", "response"]) for path in args.against]
    by = ["query", "id"] if any(table["query"].duplicated().any() for table in tables + others) else ["query"]
    for path, table in zip(args.samples + args.against, tables + others):
        if odd := set(table[by].itertuples(index=False)) ^ set(tables[0][by].itertuples(index=False)):
            what = f"{len(odd)} are only in one of them, such as {min(map(str, odd)):.120}"
            raise JudgeError(
                f"queries of {args.samples[0]} and {path} do not match: {what}; sample both from one split"
            )
        if args.against and table.duplicated(by).any():
            raise JudgeError(f"{path}: several responses to a query can only be matched by an `id` in each row")
    for i, table in enumerate(tables):
        shown_as = balanced_orders(len(table), args.seed)
        if args.against:
            other = others[i % len(others)].set_index(by)[["response", "score"]]
            other.columns = ["reference", "reference_score"]
            table = table.drop(columns=other.columns, errors="ignore").join(other, on=by)
        if args.recorded_order:
            shown_as = table.reference_shown_as.map({"A": "B"}).fillna("A")
        table["id"] = table.id.where(table.id.notna(), table.index)
        tables[i] = table.assign(name=names[i], shown_as="AB" if args.both_orders else shown_as)
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
        self.args, self.replies, self.tokens = args, {}, np.zeros(2, int)
        self.key, path = os.environ.get("OPENAI_API_KEY") or "none", Path(args.output_dir) / "record.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        self.file = open(path, "ab", buffering=0)
        try:
            fcntl.flock(self.file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise JudgeError(f"{path} is in use by another run; wait for it, or give another --output_dir") from None
        self.file.truncate(path.read_bytes().rfind(b"\n") + 1)  # a kill can tear the last line, and no other
        for line in path.read_bytes().splitlines():
            self.remember(json.loads(line))

    def remember(self, line: dict) -> None:
        if "reply" in line and line["judge"] == self.args.judge:
            self.replies.setdefault(line["prompt"], []).append(line["reply"])
            self.tokens += line["tokens"]

    def write(self, **line) -> None:
        text = json.dumps(line := {"time": time.time(), "judge": self.args.judge, **line})
        self.file.write(self.redact(text).encode() + b"\n")
        self.remember(line)

    def redact(self, text: str) -> str:
        """A server may echo the key."""
        return text.replace(self.key, "***") if self.key != "none" else text

    def verdict(self, prompt: str) -> str | None:
        """A, B, "unparsed" (MAX_ASKS replies and no verdict), or None: still to be asked."""
        replies = self.replies.get(prompt, [])
        letters = [letter for letter in map(parse_verdict, replies) if letter]
        return letters[0] if letters else "unparsed" if len(replies) >= MAX_ASKS else None

    def cost(self, tokens_in: int, tokens_out: int) -> str:
        money = (tokens_in * self.args.prices[0] + tokens_out * self.args.prices[1]) / 1e6
        return f"{tokens_in:,} + {tokens_out:,} tokens" + f", {money:,.4f} in money" * any(self.args.prices)

    async def wait_after(self, error: Exception, failures: int) -> None:
        """Sleep until the next try. Raises JudgeError, with the server's message, where there is no use in one."""
        status, response = getattr(error, "status_code", 500), getattr(error, "response", None)
        lasting = status < 500 and status not in (408, 409, 425, 429) or "insufficient_quota" in str(error)
        if lasting or failures > MAX_FAILURES:
            message = self.redact(f"{type(error).__name__}: {error}")
            raise JudgeError(
                f"--base_url {self.args.base_url} --judge {self.args.judge} with OPENAI_API_KEY: {message}"
            )
        asked = response.headers.get("retry-after", "0") if response is not None else "0"
        seconds = float(asked) if asked[0].isdigit() else pd.Timestamp(asked).timestamp() - time.time()
        await asyncio.sleep(max(seconds, min(MAX_BACKOFF, BACKOFF * 2 ** (failures - 1)) * np.random.uniform(0.5, 1)))

    async def ask(self, client: AsyncOpenAI, prompt: str, pair, shown_as: str) -> None:
        """Ask until there is a verdict or MAX_ASKS replies hold none; failures in between are waited out."""
        settings = {"model": self.args.judge, "temperature": TEMPERATURE, "max_tokens": MAX_TOKENS, "stream": False}
        line, failures = {"name": pair.name, "id": pair.id, "response_shown_as": shown_as, "prompt": prompt}, 0
        while self.verdict(prompt) is None:
            text = prompt + REMINDER * (prompt in self.replies)  # the same words would bring the same nonsense
            try:
                got = await client.chat.completions.create(messages=[{"role": "user", "content": text}], **settings)
                reply, usage = got.choices[0].message.content or "", got.usage
            except (
                APIError,
                AttributeError,
                TypeError,
                IndexError,
                ValueError,
            ) as error:  # the last four: no completion
                failures += 1
                self.write(**line, error=f"{type(error).__name__}: {error}")
                if self.replies and getattr(error, "status_code", 0) in (400, 413, 422):  # only this prompt is refused
                    self.write(**line, reply="", tokens=[0, 0])
                else:
                    await self.wait_after(error, failures)
                continue
            tokens = [usage.prompt_tokens, usage.completion_tokens] if usage else [len(text) // 4, len(reply) // 4]
            self.write(**line, reply=reply, verdict=parse_verdict(reply), tokens=tokens)
            failures = 0

    async def ask_all(self, requests: dict) -> None:
        """Ask the first request alone, so that a wrong key or model costs one; then `concurrency` at a time."""
        # The client's own retries are not in the record and pass over a Retry-After above two minutes: `ask` retries.
        client = AsyncOpenAI(base_url=self.args.base_url, api_key=self.key, max_retries=0, timeout=self.args.timeout)
        bar, wins, todo = tqdm(total=len(requests), unit="request", mininterval=0.5), [], iter(requests.items())

        async def worker(requests) -> None:
            for prompt, (pair, shown_as) in requests:
                await self.ask(client, prompt, pair, shown_as)
                wins.extend([self.verdict(prompt) == shown_as] * (self.verdict(prompt) != "unparsed"))
                rate, unparsed = sum(wins) / max(len(wins), 1), bar.n + 1 - len(wins)
                bar.set_postfix_str(
                    f"win rate {rate:.3f}, {unparsed} unparsed, {self.cost(*self.tokens)}", refresh=False
                )
                bar.update()

        await worker([next(todo)])
        try:
            async with asyncio.TaskGroup() as group:
                [group.create_task(worker(todo)) for _ in range(self.args.concurrency)]
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None


def interval(label: str, values: pd.Series, queries: pd.Series, seed: int) -> dict:
    """Mean and bootstrap 95% interval; queries are drawn, not pairs, for the pairs of one query are not independent."""
    groups = values.groupby(queries)
    sums, counts, n = groups.sum().to_numpy(float), groups.count().to_numpy(), groups.ngroups
    draws = np.random.default_rng(seed).multinomial(n, np.ones(n) / n, BOOTSTRAP) if n else np.zeros((1, 0))
    low, high = np.quantile((draws @ sums) / (draws @ counts), [0.025, 0.975]) if n else (np.nan, np.nan)
    return {label: values.mean(), f"{label}_low": low, f"{label}_high": high}


def add_outcomes(pairs: pd.DataFrame, judge: Judge) -> None:
    """Adds `as_A`, `as_B` (the verdict with the response shown so), `outcome` (1, 0, 0.5 tie, NaN unparsed), lengths..."""
    wins = {}
    for side in "AB":
        verdicts = [judge.verdict(make_prompt(p, side)) if side in p.shown_as else None for p in pairs.itertuples()]
        pairs[f"as_{side}"] = pd.Series(verdicts, dtype=object)
        wins[side] = pairs[f"as_{side}"].map({"A": 1.0 * (side == "A"), "B": 1.0 * (side == "B")})
    wins = pd.DataFrame(wins)
    pairs["outcome"] = wins.mean(axis=1).where(wins.count(axis=1) == pairs.shown_as.str.len())
    split = str  # characters
    if judge.args.tokenizer:
        from transformers import AutoTokenizer  # a slow import

        split = AutoTokenizer.from_pretrained(judge.args.tokenizer).tokenize
    pairs["length"] = [max(len(split(text)), 1) for text in pairs.response]
    pairs["reference_length"] = [max(len(split(text)), 1) for text in pairs.reference]
    pairs["log_length_ratio"] = np.log(pairs.length / pairs.reference_length)
    pairs["margin"] = pd.to_numeric(pairs.score) - pd.to_numeric(pairs.reference_score)
    pairs["abs_margin"] = pairs.margin.abs()
    # Detail 17 (consistency with an LLM judge): does the reward model order the two summaries as the judge does?
    decided = pairs.outcome.isin([0, 1]) & pairs.abs_margin.gt(0)
    pairs["agreement"] = 1.0 * (pairs.outcome.eq(1) == pairs.margin.gt(0)).where(decided)


def summarise(t: pd.DataFrame, seed: int) -> pd.Series:
    """Counts, win rate, position bias and its test, win rate at equal length, and agreement of one file's pairs."""
    judged = t[t.outcome.notna()]
    y, queries = judged.outcome, judged["query"]
    row = {
        "pairs": len(t),
        "unparsed": len(t) - len(y),
        "wins": sum(y == 1),
        "ties": sum(y == 0.5),
        "losses": sum(y == 0),
    }
    row |= interval("win_rate", y, queries, seed)
    letters = t[["as_A", "as_B"]]
    row["chose_A"] = letters.eq("A").sum().sum() / max(letters.isin(["A", "B"]).sum().sum(), 1)
    lean = letters.eq("A").sum(axis=1) - letters.eq("B").sum(axis=1)  # in both orders: 0 where the judge is consistent
    row["chose_A_p"] = binomtest(sum(lean > 0), max(sum(lean != 0), 1)).pvalue
    x = pd.DataFrame(
        {"one": 1.0, "slope": judged.log_length_ratio, "A": judged.shown_as.map({"A": 0.5, "B": -0.5, "AB": 0})}
    )
    x = x.loc[:, [c == "one" or x[c].nunique() > 1 for c in x]]
    if y.nunique() > 1 and "slope" in x:
        cluster = {"groups": pd.factorize(queries)[0]}
        fit = sm.GLM(y, x, family=sm.families.Binomial()).fit(cov_type="cluster", cov_kwds=cluster)
        logits = {"": fit.params.one, "_low": fit.conf_int()[0].one, "_high": fit.conf_int()[1].one}
        row |= {f"equal_length_win_rate{end}": 1 / (1 + np.exp(-logit)) for end, logit in logits.items()}
        row |= {"length_slope": fit.params.slope, "length_slope_p": fit.pvalues.slope}
    row |= {"length": t.length.mean(), "reference_length": t.reference_length.mean()}
    return pd.Series(row | interval("agreement", judged.agreement.dropna(), queries, seed))


def curve(t: pd.DataFrame, x: str, y: str, edges: np.ndarray) -> pd.DataFrame:
    """Mean of y by bins of x, with a Wilson 95% interval."""
    t = t.dropna(subset=[x, y]).groupby(pd.cut(t[x], edges, include_lowest=True), observed=True)
    bins = t.agg(mean_x=(x, "mean"), rate=(y, "mean"), n=(y, "size")).reset_index(names="bin")
    low, high = sm.stats.proportion_confint(bins.rate * bins.n, bins.n, method="wilson")
    return bins.assign(low=low, high=high)


def write_report(pairs: pd.DataFrame, args: Args, cost: str) -> str:
    """Writes pairs.csv, results.csv, curves.csv, report.png and report.md; returns the text of the last."""
    files = {name: t for name, t in pairs.groupby("name", sort=False)}
    results = pd.DataFrame({name: summarise(t, args.seed) for name, t in files.items()})
    models = [re.sub(r"/\d+$", "", name) for name in files]  # "size/method/seed" without the seed
    rates = results.loc[results.index.isin(["win_rate", "equal_length_win_rate", "agreement"])]
    spread = rates.T.astype(float).groupby(models, sort=False).agg(["mean", "std", "min", "max", "count"]).T
    axes = (figure := Figure(figsize=(13, 10), layout="constrained")).subplots(2, 2).flat
    curves = []
    for axis, x, y in ((axes[2], "log_length_ratio", "outcome"), (axes[3], "abs_margin", "agreement")):
        edges = np.unique(pairs[x][pairs[y].notna()].quantile(np.linspace(0, 1, BINS + 1)).dropna())
        for name, t in files.items() if len(edges) > 1 else ():
            bins = curve(t, x, y, edges)
            axis.errorbar(bins.mean_x, bins.rate, [bins.rate - bins.low, bins.high - bins.rate], fmt="o-", label=name)
            curves.append(bins.assign(name=name, x=x, y=y))
    for model, (name, row) in zip(models, results.items()):
        ends = [[row.win_rate - row.win_rate_low], [row.win_rate_high - row.win_rate]]
        axes[0].errorbar([model], [row.win_rate], ends, fmt="o", capsize=4, label=name)
        axes[1].errorbar([row.length], [row.win_rate], ends, fmt="o", capsize=4, label=name)
    if results.loc["agreement"].notna().any():
        axes[3].plot(grid := np.linspace(0, pairs.abs_margin.max()), 1 / (1 + np.exp(-grid)), "k--", label="calibrated")
    unit = "tokens" if args.tokenizer else "characters"
    labels = "", f"mean summary length ({unit})", "log(summary length / reference length)", "|reward score difference|"
    for axis, label in zip(axes, labels):
        axis.axhline(0.5, color="grey", lw=0.5)
        axis.set(xlabel=label, ylabel="agreement with the judge" if axis is axes[3] else "win rate", ylim=(0, 1))
        axis.legend(fontsize=8)
    out = Path(args.output_dir)
    figure.savefig(out / "report.png", dpi=110)
    pairs.to_csv(out / "pairs.csv", index=False)
    results.T.to_csv(out / "results.csv", index_label="name")
    pd.concat([pd.DataFrame(), *curves]).to_csv(out / "curves.csv", index=False)
    tables = [f"```\n{table.to_string(float_format='{:.4f}'.format)}\n```" for table in (results, spread)]
    text = f"# Win rates by {args.judge}\n\n{tables[0]}\n\nOver seeds:\n\n{tables[1]}\n\nPaid: {cost}. {args}\n"
    (out / "report.md").write_text(text)
    return text


def main(args: Args) -> None:
    pairs, judge = load_pairs(args), Judge(args)
    asks = {make_prompt(pair, side): (pair, side) for pair in pairs.itertuples() for side in pair.shown_as}
    todo = {prompt: ask for prompt, ask in asks.items() if judge.verdict(prompt) is None}
    cost = judge.cost(sum(map(len, todo)) // 4, 64 * len(todo))
    print(f"{len(pairs)} pairs, {len(asks) - len(todo)} replies in the record, {len(todo)} requests: about {cost}")
    if args.dry_run:
        return
    if todo:
        asyncio.run(judge.ask_all(todo))
    add_outcomes(pairs, judge)
    print(write_report(pairs, args, judge.cost(*judge.tokens)))


if __name__ == "__main__":
    try:
        main(tyro.cli(Args))
    except JudgeError as error:
        raise SystemExit(f"judge.py: {error}") from None
