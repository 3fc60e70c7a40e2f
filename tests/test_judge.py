"""judge.py against real servers on loopback: the replay server with its faults, and `transformers serve`."""

import asyncio
import contextlib
import json
import math
import os
import signal
import subprocess
import sys
import time
import urllib.request
from email.utils import formatdate
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))
sys.path.insert(0, str(ROOT / "tests"))
from replay_server import post_hash  # noqa: E402

import judge  # noqa: E402

SHARED = ROOT.parent / "shared" / "data"
VERDICTS = SHARED / "judge" / "recorded_verdicts.jsonl"
needs_verdicts = pytest.mark.skipif(not VERDICTS.exists(), reason=f"needs the recorded verdicts, {VERDICTS}")


def write_rows(path: Path, rows: list[dict]) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def read_rows(path) -> list[dict]:
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


@contextlib.contextmanager
def replay_server(verdicts, **options):
    """Yields the server's root URL."""
    flags = [f"--{name}={value}" for name, value in options.items()]
    command = [sys.executable, ROOT / "tests" / "replay_server.py", "--verdicts", verdicts, *flags]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        yield f"http://127.0.0.1:{int(process.stdout.readline())}"
    finally:
        process.kill()
        process.wait()


def get(url: str):
    return json.load(urllib.request.urlopen(url, timeout=10))


def small_rows(n: int) -> list[dict]:
    """Verdicts of an invented judge: the response wins two times of three and is shown first two times of four."""
    return [
        {
            "id": f"row-{i}",
            "query": f"SUBREDDIT: r/{i}\n\nTITLE: t\n\nPOST: p {i}\n\nTL;DR:",
            "response": f" response {i} " + "x" * (i % 7),
            "reference": f" reference {i} " + "y" * (i % 5),
            "explanation": "Summary A is better than Summary B.",
            "preferred": "reference" if i % 3 == 0 else "response",
            "reference_shown_as": "A" if i % 4 < 2 else "B",
        }
        for i in range(n)
    ]


def run(url: str, samples, output_dir, **options) -> pd.DataFrame:
    """Runs judge.main in this process; returns results.csv."""
    options = {"judge": "replay", "timeout": 5.0} | options
    args = judge.Args(samples=(str(samples),), base_url=f"{url}/v1", output_dir=str(output_dir), **options)
    judge.main(args)
    return pd.read_csv(Path(output_dir) / "results.csv", index_col="name")


def start(url: str, samples, output_dir, *flags, key="sk-0123456789abcdef") -> subprocess.Popen:
    command = [sys.executable, ROOT / "judge.py", "--samples", samples, "--base_url", f"{url}/v1", "--judge", "replay"]
    command += ["--output_dir", output_dir, *flags]
    return subprocess.Popen(command, env=os.environ | {"OPENAI_API_KEY": key}, stderr=subprocess.PIPE, text=True)


@pytest.mark.parametrize(
    "reply, verdict",
    [
        ("Comparison: B misses the point.\nPreferred: A", "A"),
        ('Comparison: x\nPreferred: "B"\n', "B"),
        ("**Comparison:** x\n**Preferred:** A", "A"),
        ("Comparison: x\nPreferred: Summary B.", "B"),
        ("", None),
        ("A", None),
        ("Preferred: C", None),
        ("Preferred: A or B", None),
        ("Preferred: AB", None),
        ("Preferred: a", None),
        ('Comparison: x\nPreferred: <"A" or "B">', None),
        ("Preferred: A\nPreferred: B", None),
        ("Preferred: A\nOn second thoughts, B.", None),
        ("Comparison: x Preferred: A", None),
    ],
)
def test_verdicts_are_parsed_strictly(reply, verdict):
    assert judge.parse_verdict(reply) == verdict


def test_prompt_holds_the_texts_in_the_order_asked_for():
    row = pd.Series({"query": "POST: {braces}\n\nTL;DR:", "response": " mine", "reference": " theirs"})
    as_a, as_b = judge.make_prompt(row, "A"), judge.make_prompt(row, "B")
    assert "Post:\nPOST: {braces}\n\nTL;DR:\n\nSummary A:\nmine\n\nSummary B:\ntheirs\n\nFIRST" in as_a
    assert "Summary A:\ntheirs\n\nSummary B:\nmine\n\nFIRST" in as_b
    assert as_a.endswith('explanation>\nPreferred: <"A" or "B">')


def test_orders_are_balanced_seeded_and_stable_when_a_file_grows():
    orders = judge.balanced_orders(1001, seed=1)
    assert abs(orders.count("A") - orders.count("B")) == 1
    assert judge.balanced_orders(400, seed=1) == orders[:400]
    assert judge.balanced_orders(1001, seed=2) != orders
    runs = sum(a != b for a, b in zip(orders, orders[1:]))
    assert 650 < runs < 850  # random blocks of two change side at 3 of 4 steps; alternation would at all of them


ROW = {"query": "q", "response": "a", "reference": "b"}


@pytest.mark.parametrize(
    "files, against, message",
    [
        ({"a.jsonl": []}, (), "a.jsonl: expected samples, found an empty file"),
        ({}, (), "none.jsonl.*No such file"),
        ({"a.jsonl": [{"query": "q", "response": "a"}]}, (), "expected text in `reference`.*found None, row 1"),
        ({"a.jsonl": [ROW, ROW | {"response": None}]}, (), "expected text in `response`.*found None, row 2"),
        ({"a.jsonl": [ROW, ROW | {"response": "cut \ud83d"}]}, (), r"a.jsonl: .*no lone surrogate.*found 'cut.*row 2"),
        ({"a.jsonl": [ROW | {"id": 1}, ROW | {"id": 1}]}, (), "duplicate id: 1"),
        ({"a.jsonl": [ROW], "b.jsonl": [ROW | {"query": "other"}]}, (), "expected the same queries"),
        (
            {"a.jsonl": [ROW]},
            [ROW | {"query": "other"}],
            r"expected the same queries, found 2 of one file only: \('other',\)",
        ),
        ({"a.jsonl": [ROW]}, [], "found an empty file"),
        (
            {"a.jsonl": [ROW | {"id": 1}, ROW | {"id": 2}]},
            [ROW | {"id": 2}, ROW | {"id": 3}],
            "expected the same queries",
        ),
        ({"x/s.jsonl": [ROW], "y/s.jsonl": [ROW]}, (), "--names"),
    ],
)
def test_bad_input_is_named_before_any_request(tmp_path, files, against, message):
    samples = tuple(write_rows(tmp_path / name, rows) for name, rows in files.items()) or (
        str(tmp_path / "none.jsonl"),
    )
    against = () if against == () else (write_rows(tmp_path / "against.jsonl", against),)
    args = judge.Args(
        samples=samples, against=against, output_dir=str(tmp_path / "out"), base_url="http://127.0.0.1:9/v1"
    )
    with pytest.raises(judge.JudgeError, match=message):
        judge.main(args)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "field, value, message",
    [
        ("reference_shown_as", "b", "reference_shown_as.* A or B.*found 'b', row 2"),
        ("concurrency", 0, "--concurrency"),
        ("tokenizer", "no.json", "a file as --tokenizer; found 32, no.json"),
    ],
)
def test_an_argument_or_an_order_that_cannot_be_is_named(tmp_path, field, value, message):
    rows = [row | ({field: value} if row["id"] == "row-1" else {}) for row in small_rows(4)]
    options = {"recorded_order": True} if field == "reference_shown_as" else {field: value}
    with pytest.raises(judge.JudgeError, match=message):
        judge.load_pairs(judge.Args(samples=(write_rows(tmp_path / "s.jsonl", rows),), **options))


def test_the_order_is_the_seeds(tmp_path):
    samples = (write_rows(tmp_path / "s.jsonl", small_rows(40)),)
    first, again, second = (judge.load_pairs(judge.Args(samples, seed=seed)).shown_as.tolist() for seed in (1, 1, 2))
    assert first == again != second


def test_rows_without_ids_are_numbered(tmp_path):
    samples = write_rows(tmp_path / "s.jsonl", [ROW, ROW | {"query": "r"}])
    Path(samples).write_text(Path(samples).read_text().replace("\n", "\n\n"))  # empty lines are none
    assert judge.load_pairs(judge.Args(samples=(samples,))).id.tolist() == ["0", "1"]


@pytest.mark.parametrize("line", ["{torn", "[1, 2]"])
def test_a_line_that_is_not_json_is_named(tmp_path, line):
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps(ROW) + "\n" + line)
    with pytest.raises(judge.JudgeError, match="a.jsonl: expected a file with a JSON object on each line"):
        judge.load_samples(str(path), ["query"])


@needs_verdicts
def test_800_verdicts_come_out_once_each_and_are_not_asked_again(tmp_path):
    rows = [{k: row[k] for k in ("id", "query", "response", "reference")} for row in read_rows(VERDICTS)]
    samples = write_rows(tmp_path / "samples.jsonl", rows)
    with replay_server(VERDICTS) as url:
        results = run(url, samples, tmp_path / "out")
        stats = get(f"{url}/stats")
        run(url, samples, tmp_path / "out")
        assert get(f"{url}/stats") == stats
    assert stats["requests"] == stats["answered"] == 800
    assert stats.get("streaming", 0) == 0 and stats.get("warm", 0) == 0
    assert 1 < stats["max_in_flight"] <= 32
    record = read_rows(tmp_path / "out" / "record.jsonl")
    assert len(record) == 800 and sum(line["shown_as"] == "A" for line in record) == 400
    assert_equal_to_the_record(tmp_path / "out")
    assert results.win_rate.item() == 516 / 800 and results.unparsed.item() == 0


def assert_equal_to_the_record(output_dir, n=800):
    wins = {row["id"]: float(row["preferred"] == "response") for row in read_rows(VERDICTS)[:n]}
    pairs = pd.read_csv(output_dir / "pairs.csv")
    assert dict(zip(pairs.id, pairs.outcome)) == wins and len(pairs) == n


@needs_verdicts
@pytest.mark.parametrize("n", [120, pytest.param(800, marks=pytest.mark.slow)])
def test_faults_and_kills_lose_nothing_and_pay_for_nothing_twice(tmp_path, n):
    rows = [{k: row[k] for k in ("id", "query", "response", "reference")} for row in read_rows(VERDICTS)][:n]
    samples, record = write_rows(tmp_path / "samples.jsonl", rows), tmp_path / "out" / "record.jsonl"
    faults = {"rate_limit": 0.2, "error": 0.05, "hang": 0.05, "cut": 0.05, "babble": 0.05}
    flags, done_before, log_before = ("--timeout", "1", "--concurrency", "64"), [], []
    with replay_server(VERDICTS, **faults) as url:
        for verdicts_until_kill in (n // 5, n // 2, 3 * n // 4):
            process = start(url, samples, tmp_path / "out", *flags)
            while not record.exists() or record.read_bytes().count(b'"verdict": "') < verdicts_until_kill:
                assert process.poll() is None, process.stderr.read()
                time.sleep(0.02)
            process.send_signal(signal.SIGKILL)
            process.wait()
            time.sleep(0.2)  # what was on its way reaches the server's log
            if verdicts_until_kill == n // 2:
                with open(record, "ab") as file:
                    file.write(b'{"time": 1, "judge": "replay", "prompt": "Which of the fol')  # a torn last line
            lines = [json.loads(line) for line in record.read_bytes().split(b"\n")[:-1]]
            done_before.append({line["id"] for line in lines if line.get("verdict")})
            log_before.append(len(get(f"{url}/log")))
            get(f"{url}/forget")
        process = start(url, samples, tmp_path / "out", *flags)
        assert process.communicate()[1] and process.returncode == 0
        stats, log = get(f"{url}/stats"), get(f"{url}/log")
    assert all(stats[fault] >= n / 80 for fault in faults), stats
    assert stats.get("early", 0) == 0  # nobody came back before Retry-After was over
    assert_equal_to_the_record(tmp_path / "out", n)
    verdicts = [line["id"] for line in read_rows(record) if line.get("verdict")]
    assert len(verdicts) == len(set(verdicts)) == n
    hashes = {row["id"]: post_hash(row["query"]) for row in rows}
    for done, start_of_run in zip(done_before, log_before):
        assert not {hashes[row_id] for row_id in done} & set(log[start_of_run:])


def test_the_key_is_never_written(tmp_path):
    key = "sk-a-secret-that-the-server-echoes"
    samples = write_rows(tmp_path / "s.jsonl", small_rows(40))
    with replay_server(samples, key="sk-another") as url:
        process = start(url, samples, tmp_path / "refused", key=key)
        message = process.communicate()[1]
        assert process.returncode == 1 and "Incorrect API key provided" in message and key not in message
        assert get(f"{url}/stats")["refused"] == 1
    with replay_server(samples, key=key, error=0.3, max_faults=1) as url:
        process = start(url, samples, tmp_path / "let_in", key=f"{key}\r\n")  # as of a file
        assert key not in process.communicate()[1] and process.returncode == 0
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(files) > 5 and not [path for path in files if key.encode() in path.read_bytes()]


def test_a_wrong_model_or_a_key_revoked_on_the_way_stops_at_once(tmp_path):
    samples = write_rows(tmp_path / "s.jsonl", small_rows(300))
    with replay_server(samples, revoke_after=50) as url:
        with pytest.raises(judge.JudgeError, match="404.*`gpt-9` does not exist") as stopped:
            run(url, samples, tmp_path / "model", judge="gpt-9")
        assert get(f"{url}/stats") == {"refused": 1}
        args = judge.Args(samples=(samples,), base_url=f"{url}/v1", judge="gpt-9", output_dir=str(tmp_path / "loop"))
        pair = next(judge.load_pairs(args).itertuples())
        with pytest.raises(ConnectionError, match="gpt-9"):  # not SystemExit: two of them at once end the event loop
            asyncio.run(judge.Judge(args).ask_all({judge.make_prompt(pair, "A"): (pair, "A")}))
        process = start(url, samples, tmp_path / "key", key="sk-revoked")  # all 32 workers are refused at once
        message = process.communicate()[1]
        assert process.returncode == 1 and "Incorrect API key" in message
        assert "Traceback" not in message and "never retrieved" not in message and "sk-revoked" not in message
        assert get(f"{url}/stats")["requests"] == 50
    assert sum("reply" in line for line in read_rows(tmp_path / "key" / "record.jsonl")) >= 50 - 32
    with replay_server(samples) as url:
        run(url, samples, tmp_path / "model")  # nothing of the run that stopped still locks the record
    assert stopped.traceback  # although all that it held is still there


def test_nonsense_is_asked_again_then_unparsed_and_never_a_win(tmp_path):
    samples = write_rows(tmp_path / "s.jsonl", small_rows(20))
    with replay_server(samples, always="I like Summary A.") as url:
        results = run(url, samples, tmp_path / "out")
        run(url, samples, tmp_path / "out")
        stats = get(f"{url}/stats")  # after the first reply the format is named
        assert stats["requests"] == 20 * judge.MAX_ASKS and stats["reminded"] == 20 * (judge.MAX_ASKS - 1)
    assert results.unparsed.item() == 20 and results.wins.item() == results.losses.item() == 0
    assert math.isnan(results.win_rate.item())


def completion_body(content, **fields) -> str:
    return json.dumps({"choices": [{"message": {"role": "assistant", "content": content}}]} | fields)


@pytest.mark.parametrize(
    "usage",
    [None, {}, {"prompt_tokens": None}, {"prompt_tokens": 5.5, "completion_tokens": 2}, {"prompt_tokens": "5"}, "5"],
)
def test_an_odd_usage_is_estimated_and_its_record_can_be_read(tmp_path, usage):
    samples = write_rows(tmp_path / "s.jsonl", small_rows(3))
    with replay_server(samples, body=completion_body("Preferred: A", usage=usage)) as url:
        run(url, samples, tmp_path / "out")
        assert run(url, samples, tmp_path / "out").unparsed.item() == 0
        assert get(f"{url}/stats")["requests"] == 3
    prompts = [line["prompt"] for line in read_rows(tmp_path / "out" / "record.jsonl")]
    opened = judge.Judge(judge.Args(samples=(), output_dir=str(tmp_path / "out"), judge="replay"))
    assert list(opened.tokens) == [sum(len(prompt) // 4 for prompt in prompts), 3 * (len("Preferred: A") // 4)]


def test_a_reply_in_parts_is_joined(tmp_path):
    parts = [{"type": "thinking", "thinking": []}, {"type": "text", "text": "Comparison: x\nPrefer"}]
    samples = write_rows(tmp_path / "s.jsonl", small_rows(3))
    with replay_server(samples, body=completion_body([*parts, {"type": "text", "text": "red: A"}])) as url:
        assert run(url, samples, tmp_path / "out").chose_A.item() == 1


def test_a_reply_without_text_is_unparsed(tmp_path, monkeypatch):
    """As some servers give it where a filter has stopped the reply; it is no failure."""
    monkeypatch.setattr(judge, "RETRIES", 0)
    samples = write_rows(tmp_path / "s.jsonl", small_rows(3))
    with replay_server(samples, body=completion_body(None)) as url:
        assert run(url, samples, tmp_path / "out").unparsed.item() == 3
        assert get(f"{url}/stats")["requests"] == 3 * judge.MAX_ASKS


class Refusal(Exception):
    """As the client raises it."""

    def __init__(self, status_code: int, **headers: str):
        self.status_code, self.response = status_code, SimpleNamespace(headers=headers)


def test_failures_are_waited_out_for_longer_and_longer_or_as_long_as_the_server_says(tmp_path):
    wait = judge.Judge(judge.Args(samples=(), output_dir=str(tmp_path))).seconds_to_wait
    for failures, longest in ((1, 0.5), (2, 1), (3, 2), (7, 32), (8, 60), (judge.RETRIES, 60)):
        waits = [wait(Refusal(429), "", failures) for _ in range(100)]
        assert 0.5 * longest <= min(waits) < 0.7 * longest < 0.8 * longest < max(waits) <= longest
    assert wait(Refusal(503, **{"retry-after": "70"}), "", 1) == 70
    date = formatdate(time.time() + 70, usegmt=True)
    assert 67 < wait(Refusal(503, **{"retry-after": date}), "", 1) <= 70
    assert wait(TimeoutError(), "", 1) <= 0.5  # no answer at all


@pytest.mark.parametrize(
    ("status", "message", "failures"),
    [(429, "Error code: 429 insufficient_quota", 1), (401, "", 1), (404, "", 1), (500, "", judge.RETRIES + 1)],
)
def test_what_waiting_does_not_mend_stops_the_run(tmp_path, status, message, failures):
    wait = judge.Judge(judge.Args(samples=(), output_dir=str(tmp_path))).seconds_to_wait
    with pytest.raises(ConnectionError, match=f"--judge gpt-3.5-turbo-0125.*{message}"):
        wait(Refusal(status), message, failures)


@pytest.mark.parametrize("body", ["<html>Welcome!</html>", '{"error": {"message": "overloaded"}}', '{"choices": []}'])
def test_what_is_no_completion_is_shown_while_it_is_asked_again_and_at_the_end(tmp_path, monkeypatch, capsys, body):
    monkeypatch.setattr(judge, "RETRIES", 1)
    samples = write_rows(tmp_path / "s.jsonl", small_rows(3))
    with replay_server(samples, body=body) as url, pytest.raises(judge.JudgeError) as error:
        run(url, samples, tmp_path / "out")
    assert body in str(error.value) and f"{body} from {url}/v1, failure 1" in capsys.readouterr().err


def test_the_url_of_a_refused_connection_is_shown(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(judge, "RETRIES", 1)
    with pytest.raises(judge.JudgeError, match="http://127.0.0.1:9/v1.*Connection error"):
        run("http://127.0.0.1:9", write_rows(tmp_path / "s.jsonl", small_rows(3)), tmp_path / "out")
    assert "Connection error. from http://127.0.0.1:9/v1, failure 1" in capsys.readouterr().err


def test_the_timeout_is_for_the_whole_request(tmp_path, monkeypatch):
    monkeypatch.setattr(judge, "RETRIES", 0)
    samples = write_rows(tmp_path / "s.jsonl", small_rows(3))
    with replay_server(samples, trickle=0.02) as url, pytest.raises(judge.JudgeError, match="Timeout"):
        run(url, samples, tmp_path / "out", timeout=0.5)


def test_a_refused_prompt_is_unparsed_and_the_others_are_judged(tmp_path):
    rows = small_rows(20)
    verdicts = write_rows(tmp_path / "verdicts.jsonl", rows[:10] + rows[11:])
    samples = write_rows(tmp_path / "s.jsonl", rows)
    with replay_server(verdicts) as url:
        results = run(url, samples, tmp_path / "out")
    assert results.unparsed.item() == 1 and results.wins.item() + results.losses.item() == 19
    errors = [line["error"] for line in read_rows(tmp_path / "out" / "record.jsonl") if "error" in line]
    assert errors and all("this prompt was not recorded" in error for error in errors)


def test_a_judge_that_always_chooses_A_is_found_out(tmp_path):
    samples = write_rows(tmp_path / "s.jsonl", small_rows(60))
    with replay_server(samples, always="Comparison: x\nPreferred: A") as url:
        one = run(url, samples, tmp_path / "one").iloc[0]
        both = run(url, samples, tmp_path / "both", both_orders=True).iloc[0]
    assert one.win_rate == 0.5 and one.chose_A == 1 and one.chose_A_p < 1e-9
    assert both.ties == 60 and both.wins == both.losses == 0 and both.chose_A == 1 and both.chose_A_p < 1e-9
    assert both.win_rate == both.win_rate_low == both.win_rate_high == 0.5  # a bootstrap of ties


def test_both_orders_ask_what_is_missing_and_a_consistent_judge_has_no_ties(tmp_path):
    samples = write_rows(tmp_path / "s.jsonl", small_rows(60))
    with replay_server(samples) as url:
        run(url, samples, tmp_path / "out")
        both = run(url, samples, tmp_path / "out", both_orders=True).iloc[0]
        assert get(f"{url}/stats")["requests"] == 120
    assert (both.wins, both.losses, both.ties) == (40, 20, 0)
    assert both.chose_A == 0.5 and both.chose_A_p == 1


def test_the_win_rate_is_shown_on_the_way(tmp_path, monkeypatch):
    shown, samples = [], write_rows(tmp_path / "s.jsonl", small_rows(60))
    bar = SimpleNamespace(n=0, set_postfix_str=lambda text, *_: shown.append(text), update=lambda: None)
    monkeypatch.setattr(judge, "tqdm", lambda **_: bar)
    with replay_server(samples) as url:
        run(url, samples, tmp_path / "out")
    assert shown[-1].startswith("win rate 0.667, ")


def test_recorded_order_shows_each_pair_as_the_samples_say(tmp_path):
    rows = small_rows(40)
    samples = write_rows(tmp_path / "s.jsonl", rows)
    with replay_server(samples) as url:
        run(url, samples, tmp_path / "out", recorded_order=True)
    shown = {line["id"]: line["shown_as"] for line in read_rows(tmp_path / "out" / "record.jsonl")}
    assert shown == {row["id"]: "AB".replace(row["reference_shown_as"], "") for row in rows}


def test_dry_run_tells_the_price_and_asks_nothing(tmp_path, capsys):
    samples = write_rows(tmp_path / "s.jsonl", small_rows(50))
    with replay_server(samples) as url:
        args = {"samples": (samples,), "base_url": f"{url}/v1", "output_dir": str(tmp_path / "out")}
        judge.main(judge.Args(**args, dry_run=True, prices=(10.0, 20.0), both_orders=True))
        assert get(f"{url}/stats") == {}
    pairs = judge.load_pairs(judge.Args(**args))
    characters = sum(len(judge.make_prompt(pair, side)) for pair in pairs.itertuples() for side in "AB")
    money = (characters // 4 * 10 + 100 * 64 * 20) / 1e6
    assert f"100 to ask: about {characters // 4:,} + 6,400 tokens for {money:.4f}" in capsys.readouterr().out


def test_two_runs_cannot_share_a_record_at_once(tmp_path):
    args = judge.Args(samples=(), output_dir=str(tmp_path))
    first = judge.Judge(args)
    with pytest.raises(judge.JudgeError, match="in use by another run"):
        judge.Judge(args)
    first.file.close()
    judge.Judge(args)


def test_against_compares_two_models_on_the_same_queries(tmp_path):
    rows = small_rows(40)
    ours = [{"id": r["id"], "query": r["query"], "response": r["response"], "score": 2.0} for r in rows]
    theirs = [{"id": r["id"], "query": r["query"], "response": r["reference"], "score": 1.0} for r in rows[::-1]]
    with replay_server(write_rows(tmp_path / "verdicts.jsonl", rows)) as url:
        a, b = write_rows(tmp_path / "a.jsonl", ours), write_rows(tmp_path / "b.jsonl", theirs)
        forward = run(url, a, tmp_path / "forward", against=(b,)).iloc[0]
        backward = run(url, b, tmp_path / "backward", against=(a,)).iloc[0]
    assert forward.wins == backward.losses == sum(row["preferred"] == "response" for row in rows)
    assert forward.win_rate == pytest.approx(1 - backward.win_rate)
    assert forward.agreement == pytest.approx(forward.win_rate)  # scores always favour a; so do the wins, but only they
    assert backward.agreement == pytest.approx(forward.agreement)


@pytest.mark.parametrize("others", [1, 2])
def test_against_takes_one_file_for_all_or_one_for_each(tmp_path, others):
    rows = [{"query": f"q{i}"} for i in range(2)]
    paths = [write_rows(tmp_path / f"{x}.jsonl", [row | {"response": f"by {x}"} for row in rows]) for x in "abyz"]
    ours, theirs = tuple(paths[:2]), tuple(paths[2 : 2 + others])
    with pytest.raises(judge.JudgeError, match="give --names, a different one for each"):
        judge.load_pairs(judge.Args(samples=ours, against=theirs, names=("a", "a", "b")))
    pairs = judge.load_pairs(judge.Args(samples=ours, against=theirs))
    assert pairs[["name", "response"]].drop_duplicates().to_numpy().tolist() == [["a", "by a"], ["b", "by b"]]
    assert pairs.reference.tolist() == ["by y"] * 2 + [f"by {'yz'[others - 1]}"] * 2
    with pytest.raises(judge.JudgeError, match="0, 1 or as many --against"):
        judge.load_pairs(judge.Args(samples=ours, against=tuple(paths[1:])))


def test_a_torn_last_line_is_cut_off_and_the_rest_is_kept(tmp_path):
    args = judge.Args(samples=(), output_dir=str(tmp_path), judge="j")
    line = {"judge": "j", "prompt": "p", "reply": "Comparison: c\nPreferred: B", "tokens": [3, 4]}
    (tmp_path / "record.jsonl").write_text(json.dumps(line) + "\n" + json.dumps(line | {"prompt": "q"})[:-9])
    opened = judge.Judge(args)
    assert opened.verdict("p") == "B" and opened.verdict("q") is None and list(opened.tokens) == [3, 4]
    opened.add({"prompt": "q", "reply": "?", "tokens": [1, 1], "judge": "j"})
    assert [line["prompt"] for line in read_rows(tmp_path / "record.jsonl")] == ["p", "q"]


def test_two_judges_share_a_record_and_not_their_verdicts(tmp_path):
    prices, reply = {"output_dir": str(tmp_path), "prices": (1e6, 2e6)}, {"prompt": "p", "tokens": [3, 4]}
    first = judge.Judge(judge.Args(samples=(), judge="first", **prices))
    first.add(reply | {"reply": "Preferred: A"})
    first.file.close()
    second = judge.Judge(judge.Args(samples=(), judge="second", **prices))
    assert second.verdict("p") is None and second.cost(second.tokens) == "0 + 0 tokens for 0.0000"
    second.add(reply | {"reply": "Preferred: B"})
    assert second.verdict("p") == "B" and second.cost(second.tokens) == "3 + 4 tokens for 11.0000"
    second.file.close()
    assert judge.Judge(judge.Args(samples=(), judge="first", **prices)).verdict("p") == "A"


def test_agreement_with_a_reward_model_leaves_out_what_is_undecided(tmp_path):
    opened = judge.Judge(judge.Args(samples=(), output_dir=str(tmp_path), judge="j"))
    cases = [  # verdict with the response as A and as B, score, reference score, agreement
        ("A", "B", 2.0, 1.0, 1.0),
        ("A", "B", 1.0, 2.0, 0.0),
        ("B", "A", 1.0, 2.0, 1.0),
        ("A", "A", 2.0, 1.0, None),  # a tie
        ("A", "B", 1.0, 1.0, None),  # equal scores
        ("A", "B", None, None, None),  # no scores
        ("A", "?", 2.0, 1.0, None),  # unparsed
    ]
    rows = [
        {"query": f"{i}", "response": "a", "reference": "b", "score": case[2], "reference_score": case[3]}
        for i, case in enumerate(cases)
    ]
    samples = write_rows(tmp_path / "s.jsonl", rows)
    pairs = judge.load_pairs(judge.Args(samples=(samples,), both_orders=True))
    for pair, case in zip(pairs.itertuples(), cases):
        for side, letter in zip("AB", case):
            prompt = judge.make_prompt(pair, side)
            for _ in range(judge.MAX_ASKS if letter == "?" else 1):
                opened.add({"judge": "j", "prompt": prompt, "reply": f"Preferred: {letter}", "tokens": [0, 0]})
    judge.add_outcomes(pairs, opened)
    assert [None if math.isnan(value) else value for value in pairs.agreement] == [case[4] for case in cases]
    outcomes = [None if math.isnan(value) else value for value in pairs.outcome]
    assert outcomes == [1, 1, 0, 0.5, 1, 1, None]


def test_lengths_are_those_of_response_and_reference(tmp_path):
    rows = [{"query": f"{i}", "response": "x" * 20, "reference": "y" * n} for i, n in enumerate((10, 20, 40))]
    args = judge.Args(samples=(write_rows(tmp_path / "s.jsonl", rows),), output_dir=str(tmp_path / "out"), judge="j")
    pairs = judge.load_pairs(args)
    judge.add_outcomes(pairs, judge.Judge(args))
    assert pairs.length.tolist() == [20] * 3 and pairs.reference_length.tolist() == [10, 20, 40]
    assert pairs.log_length_ratio.tolist() == pytest.approx([math.log(2), 0, -math.log(2)])  # longer is above 0


def test_lengths_are_in_tokens_of_the_text_alone(tmp_path):
    """Without what the tokenizer puts in front of it."""
    tokenizer = Tokenizer(models.WordLevel({"x": 0, "[BOS]": 1}, unk_token="x"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.post_processor = processors.TemplateProcessing(single="[BOS] $A", special_tokens=[("[BOS]", 1)])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    samples = (write_rows(tmp_path / "s.jsonl", [{"query": "q", "response": "x x x", "reference": "x x"}]),)
    args = judge.Args(samples, output_dir=str(tmp_path / "out"), tokenizer=str(tmp_path / "tokenizer.json"))
    judge.add_outcomes(pairs := judge.load_pairs(args), judge.Judge(args))
    assert (pairs.length.item(), pairs.reference_length.item()) == (3, 2)


def test_with_both_orders_the_position_test_is_on_the_pairs_that_lean(tmp_path):
    """Of 30 pairs it chose A twice in 6 and B twice in 2; in the others each letter once, which is no evidence."""
    table = synthetic([0.5] * 30, np.zeros(30))
    table["shown_as"], verdicts = "AB", [("A", "A")] * 6 + [("B", "B")] * 2 + [("A", "B")] * 22
    table[["as_A", "as_B"]] = verdicts
    row = judge.summarise(table, 0)
    assert row.chose_A == pytest.approx((12 + 22) / 60)
    assert row.chose_A_p == pytest.approx(2 * sum(math.comb(8, k) for k in (6, 7, 8)) / 2**8)


def synthetic(outcomes, ratios, queries=None, shown_as=None) -> pd.DataFrame:
    n = len(outcomes)
    shown_as = list(shown_as) if shown_as is not None else ["A", "B"] * (n // 2)
    letters = [{1: side, 0: "AB".replace(side, "")}.get(y) for y, side in zip(outcomes, shown_as)]
    return pd.DataFrame(
        {
            "query": queries if queries is not None else [f"q{i}" for i in range(n)],
            "outcome": np.asarray(outcomes, float),
            "log_length_ratio": ratios,
            "shown_as": shown_as,
            "as_A": [letter if side == "A" else None for letter, side in zip(letters, shown_as)],
            "as_B": [letter if side == "B" else None for letter, side in zip(letters, shown_as)],
            "length": 10.0 * np.exp(ratios),
            "reference_length": 10.0,
            "agreement": np.nan,
        }
    )


def test_length_control_recovers_the_rate_that_made_the_data():
    rng = np.random.default_rng(0)
    ratios = rng.normal(0.5, 0.4, 6000)  # the summaries are longer, and long ones win
    position = np.where(np.arange(6000) % 2 == 0, 0.5, -0.5)  # and so do those shown as A
    wins = rng.random(6000) < 1 / (1 + np.exp(-(-0.3 + 2.0 * ratios + 0.8 * position)))
    row = judge.summarise(synthetic(wins, ratios), 0)
    truth = sum(0.5 / (1 + math.exp(0.3 + lean)) for lean in (-0.4, 0.4))
    assert row.win_rate > 0.6 and row.equal_length_win_rate_low < truth < row.equal_length_win_rate_high
    assert row.equal_length_win_rate_high - row.equal_length_win_rate_low < 0.06
    assert row.length_slope == pytest.approx(2.0, abs=0.25) and row.length_slope_p < 1e-6
    assert row.chose_A > 0.52 and row.chose_A_p < 0.01


@pytest.mark.parametrize(("as_A", "as_B"), [(0.95, 0.55), (1.0, 0.5), (0.6, 0.0)])
def test_a_lean_to_one_position_is_no_win_at_equal_length(as_A, as_B):
    """Length has no effect here, so the win rate at equal length is the win rate; with no loss as A the fit's
    coefficient of the position has no finite value, and its mean over the positions has."""
    rng = np.random.default_rng(1)
    wins = rng.random(2000) < np.where(np.arange(2000) % 2 == 0, as_A, as_B)
    row = judge.summarise(synthetic(wins, rng.normal(0.5, 0.4, 2000)), 0)
    assert row.equal_length_win_rate_low < (as_A + as_B) / 2 < row.equal_length_win_rate_high
    assert row.equal_length_win_rate == pytest.approx(row.win_rate, abs=0.03)


def test_no_length_control_where_it_cannot_be_fitted():
    ratios, wins = np.linspace(-1, 1, 40), np.arange(40) % 4 < 2
    by_length = judge.summarise(synthetic(ratios > 0, ratios), 0)  # the slope is infinite
    one_query = judge.summarise(synthetic(wins, ratios, ["q"] * 40), 0)  # no spread between queries
    few = judge.summarise(synthetic([1, 0, 0.5], [0.1, 0.2, -0.3], shown_as="ABA"), 0)  # as many as coefficients
    for row in (by_length, one_query, few):
        assert row.win_rate == 0.5 and "equal_length_win_rate" not in row
    assert "equal_length_win_rate" in judge.summarise(synthetic(wins, ratios), 0)


def test_equal_summaries_tell_nothing_of_lengths_or_positions():
    """They are ties of the win rate, without a verdict."""
    judged, equal = synthetic(np.arange(40) % 4 < 2, np.linspace(-1, 1, 40)), synthetic([0.5] * 40, np.zeros(40))
    both = pd.concat([judged, equal.assign(shown_as="", query=[f"e{i}" for i in range(40)])], ignore_index=True)
    alone, row = judge.summarise(judged, 0), judge.summarise(both, 0)
    columns = [*alone.filter(regex="^(equal_length|length_slope|chose_A)").index]
    assert len(columns) == 7 and row[columns].tolist() == pytest.approx(alone[columns].tolist())
    assert row.ties == 40 and row.win_rate == 0.5 and row.pairs == 80


def record_verdicts(args: judge.Args, wins) -> None:
    """Fill the record, so that nothing is left to be asked: wins[i] says whether pair i is one for the response."""
    pairs, opened = judge.load_pairs(args), judge.Judge(args)
    for pair, win in zip(pairs.itertuples(), wins):
        if pair.shown_as:
            letter = pair.shown_as if win else "AB".replace(pair.shown_as, "")
            line = {"prompt": judge.make_prompt(pair, pair.shown_as), "reply": f"Preferred: {letter}", "tokens": [1, 1]}
            opened.add(line)
    opened.file.close()


@pytest.mark.parametrize("wins", [[i >= 7 and i % 2 for i in range(70)], [i < 63 or i % 2 for i in range(70)]])
def test_report_with_a_bin_of_wins_or_of_losses_only(tmp_path, wins):
    """Seven pairs a bin: Wilson's interval of 0 (or 7) of 7 misses 0 (or 1) by a rounding error, to the wrong side."""
    rows = [{"query": f"q{i}", "response": "x" * (10 + i), "reference": "y" * 20} for i in range(70)]
    samples = write_rows(tmp_path / "s.jsonl", rows)
    args = judge.Args(samples=(samples,), output_dir=str(tmp_path / "out"), judge="j")
    record_verdicts(args, wins)
    judge.main(args)
    curves = pd.read_csv(tmp_path / "out" / "curves.csv")
    assert list(curves.n) == [7] * 10
    assert ((curves.rate_low <= curves.rate) & (curves.rate <= curves.rate_high)).all()
    assert (tmp_path / "out" / "report.png").exists()


def test_equal_summaries_are_a_tie_and_not_asked_for(tmp_path):
    rows = [{"query": f"q{i}", "response": "same ", "reference": " same" if i else "other"} for i in range(4)]
    samples = write_rows(tmp_path / "s.jsonl", rows)
    args = judge.Args(samples=(samples,), output_dir=str(tmp_path / "out"), judge="j")
    record_verdicts(args, [True] * 4)
    assert len(read_rows(tmp_path / "out" / "record.jsonl")) == 1
    judge.main(args)
    result = pd.read_csv(tmp_path / "out" / "results.csv").iloc[0]
    assert (result.wins, result.ties, result.losses, result.win_rate) == (1, 3, 0, 0.625)
    assert result.chose_A in (0, 1) and result.unparsed == 0  # by the one verdict


def test_bootstrap_is_by_query():
    wins, empty = np.random.default_rng(0).random(200) < 0.6, pd.Series([np.nan] * 3)
    once = judge.interval("w", pd.Series(wins.astype(float)), pd.Series(range(200)), seed=0)
    repeated = pd.Series(np.repeat(wins, 8).astype(float))
    assert once == pytest.approx(judge.interval("w", repeated, pd.Series(np.repeat(range(200), 8)), seed=0))
    exact = 1.96 * math.sqrt(once["w"] * (1 - once["w"]) / 200)
    assert once["w_high"] - once["w_low"] == pytest.approx(2 * exact, rel=0.1)
    assert [once["w_low"], once["w_high"]] == pytest.approx([once["w"] - exact, once["w"] + exact], abs=0.006)
    assert all(map(math.isnan, judge.interval("w", empty, pd.Series(range(3)), seed=0).values()))


def test_intervals_of_bins_are_by_query():
    wins = np.random.default_rng(0).random(200) < 0.6
    once = judge.interval("w", pd.Series(wins.astype(float)), pd.Series(range(200)))
    repeated = pd.Series(np.repeat(wins, 8).astype(float))
    clustered = judge.interval("w", repeated, pd.Series(np.repeat(range(200), 8)))
    assert once == pytest.approx(clustered)  # eight copies of a pair are no new evidence
    p, z = wins.mean(), 1.959964  # where each query comes once: Wilson's interval
    centre, half = p + z**2 / 400, z * math.sqrt(p * (1 - p) / 200 + z**2 / 160_000)
    ends = [(centre + sign * half) / (1 + z**2 / 200) for sign in (-1, 1)]
    assert [once["w"], once["w_low"], once["w_high"]] == pytest.approx([p, *ends])


@pytest.mark.parametrize(("queries", "samples", "rate"), [(10, 1, 0.8), (40, 4, 0.5), (40, 4, 0.9)])
def test_intervals_of_bins_cover_the_true_rate_95_times_of_100(queries, samples, rate):
    """Queries differ in how often the response wins, so several samples of a query are less evidence than as many
    queries: over the pairs, Wilson's interval covers 40 queries with 4 samples each about 80 times of 100."""
    rng, groups = np.random.default_rng(0), pd.Series(np.repeat(range(queries), samples))
    covered = []
    for _ in range(300):
        rates = rng.beta(1.2 * rate, 1.2 * (1 - rate), queries)
        wins = rng.random((queries, samples)) < rates[:, None]
        found = judge.interval("w", pd.Series(wins.ravel().astype(float)), groups)
        covered.append(found["w_low"] <= rate <= found["w_high"])
    assert 0.92 <= np.mean(covered) <= 0.985  # standard error 0.013


def test_intervals_of_bins_where_the_values_have_no_spread():
    def ends(values, queries):
        found = judge.interval("w", pd.Series(values, dtype=float), pd.Series(queries))
        return [found["w"], found["w_low"], found["w_high"]]

    wilson = 20 / (20 + 1.959964**2)  # 20 of 20: n / (n + z^2) to 1
    assert ends([1] * 20, range(20)) == pytest.approx([1, wilson, 1])
    assert ends([1] * 40, [*range(20)] * 2) == pytest.approx([1, wilson, 1])  # by query
    assert ends([0] * 20, range(20)) == pytest.approx([0, 0, 1 - wilson])
    rate, low, high = ends([1, 1, 1, 0], ["q"] * 4)  # one query says little
    assert rate == 0.75 and low < 0.2 and high > 0.97
    assert all(map(math.isnan, ends([np.nan] * 3, range(3))))


def test_report_without_any_spread_in_the_outcome_has_no_length_control():
    row = judge.summarise(synthetic(np.ones(20), np.linspace(-1, 1, 20)), 0)
    assert row.win_rate == row.win_rate_high == 1 and "equal_length_win_rate" not in row


def test_several_files_stand_side_by_side_with_mean_and_spread_over_seeds(tmp_path):
    rows = small_rows(60)
    paths = []
    for size, method, seed in (("1b", "ppo", 1), ("1b", "ppo", 2), ("1b", "sft", 1), ("7b", "ppo", 1)):
        scored = [row | {"response": row["response"] + f" {size} {seed}"} for row in rows]
        scored = [row | {"score": float(i % 3 > 0), "reference_score": 0.5} for i, row in enumerate(scored)]
        if seed == 2:  # a worse seed
            scored = [row | {"preferred": "reference"} if i < 30 else row for i, row in enumerate(scored)]
        if method == "sft":
            scored = [row | {"response": row["response"] + " by sft"} for row in scored]
        paths.append(write_rows(tmp_path / "models" / size / f"{method}_{seed}" / "samples_validation.jsonl", scored))
    verdicts = write_rows(tmp_path / "verdicts.jsonl", [row for path in paths for row in read_rows(path)])
    with replay_server(verdicts) as url:
        args = {"judge": "replay", "base_url": f"{url}/v1", "output_dir": str(tmp_path / "out")}
        judge.main(judge.Args(samples=tuple(paths), **args))
    results = pd.read_csv(tmp_path / "out" / "results.csv", index_col="name")
    assert list(results.index) == ["1b/ppo/1", "1b/ppo/2", "1b/sft/1", "7b/ppo/1"]
    assert list(results.win_rate) == pytest.approx([40 / 60, 20 / 60, 40 / 60, 40 / 60])
    assert list(results.agreement) == pytest.approx([1.0, 40 / 60, 1.0, 1.0])
    files, spread = (tmp_path / "out" / "report.md").read_text().split("Over seeds:")
    assert [sum(line.startswith(f"{name} ") for line in files.splitlines()) for name in results.index] == [3] * 4
    rows = [line.split() for line in spread.splitlines() if line.startswith(("1b/", "7b/"))]
    assert [row[0] for row in rows] == ["1b/ppo", "1b/sft", "7b/ppo"] and [row[3] for row in rows] == ["2", "1", "1"]
    assert [float(row[1]) for row in rows] == pytest.approx([0.5, 2 / 3, 2 / 3], abs=1e-3)
    curves = pd.read_csv(tmp_path / "out" / "curves.csv")
    sizes = curves[curves.y == "outcome"].groupby("model").n.sum()
    assert dict(sizes) == {"1b/ppo": 120, "1b/sft": 60, "7b/ppo": 60}  # seeds of one model together
    assert (tmp_path / "out" / "report.png").stat().st_size > 20_000


def test_report_of_72_files_has_a_colour_and_a_legend_entry_for_each_of_18_models(tmp_path, monkeypatch):
    figures, rng = [], np.random.default_rng(0)
    monkeypatch.setattr(judge.matplotlib.figure.Figure, "savefig", lambda figure, *_, **__: figures.append(figure))
    names = [f"{size}b/{method}/{seed}" for size in (1, 3, 7) for method in "abcdef" for seed in range(4)]
    tables = [synthetic(rng.random(40) < 0.6, rng.normal(0, 0.5, 40)).assign(name=name) for name in names]
    pairs = pd.concat(tables, ignore_index=True).assign(margin=rng.random(72 * 40))
    pairs["agreement"] = pairs.outcome.where(pairs["name"].str.contains("/a/"))  # three models have scores
    judge.write_report(pairs, judge.Args(samples=(), output_dir=str(tmp_path)), "")
    report = (tmp_path / "report.md").read_text()
    assert max(map(len, report.split("Paid:")[0].splitlines())) <= 120
    models = list(dict.fromkeys(name.rsplit("/", 1)[0] for name in names))
    figures[0].draw_without_rendering()  # the layout
    axes, legend = figures[0].axes, figures[0].legends[0]
    assert [text.get_text() for text in legend.get_texts()] == models
    colours = [[bars[0].get_color() for bars in axis.containers] for axis in axes]
    assert len(set(colours[0])) == 18 and colours[0] == colours[1] == colours[2] and colours[3] == colours[0][::6]
    frames = [axis.get_window_extent() for axis in axes]
    assert all(frame.x1 < legend.get_window_extent().x0 and frame.width > 500 for frame in frames)
    ticks = axes[0].get_xticklabels()
    assert [tick.get_text() for tick in ticks] == models and ticks[0].get_rotation() == 45


def test_copies_of_the_pairs_change_no_interval(tmp_path):
    """In the summary and in the curves, whose ten bins have as many judged pairs each: ten of twelve lengths are."""
    steps, found = np.arange(240) % 12, []
    pairs = synthetic(np.random.default_rng(0).random(240) < 0.6, steps / 10).assign(name="a", margin=steps + 1.0)
    pairs["outcome"] = pairs["agreement"] = pairs.outcome.where(steps < 10)  # the others are unparsed
    for copies in (1, 8):
        table = pd.concat([pairs] * copies, ignore_index=True)
        judge.write_report(table, judge.Args(samples=(), output_dir=str(tmp_path)), "")
        curves = pd.read_csv(tmp_path / "curves.csv")
        assert curves.n.tolist() == [20 * copies] * 20
        found.append((judge.summarise(table, 0), curves[["mean_x", "rate", "rate_low", "rate_high"]].to_numpy()))
    (once, bins), (eight, bins_of_eight) = found
    ends = [f"{name}_{end}" for name in ("win_rate", "equal_length_win_rate", "agreement") for end in ("low", "high")]
    assert eight[ends].tolist() == pytest.approx(once[ends].tolist(), abs=1e-3)
    assert bins_of_eight == pytest.approx(bins)
    assert bins[:, 0] == pytest.approx([*np.arange(10) / 10, *np.arange(1, 11)])  # a length ratio, or margin, each


def test_report_without_scores_says_so(tmp_path, monkeypatch):
    figures, pairs = [], synthetic([1, 0, 1, 1] * 5, np.linspace(-1, 1, 20)).assign(name="a")
    monkeypatch.setattr(judge.matplotlib.figure.Figure, "savefig", lambda figure, *_, **__: figures.append(figure))
    for margin in (pd.Series([np.nan] * 20), pd.Series(range(20))):
        table = pairs.assign(margin=margin, agreement=pairs.outcome.where(margin.notna()))
        judge.write_report(table, judge.Args(samples=(), output_dir=str(tmp_path)), "")
    assert [[axis.get_title() for axis in figure.axes[2:]] for figure in figures] == [["", "no scores"], ["", ""]]
    assert [len(figure.axes[3].containers) for figure in figures] == [0, 1]
    assert figures[0].axes[1].containers[0][0].get_xdata() == pytest.approx([pairs.length.mean()])


SERVE_PACKAGES = find_spec("fastapi") and find_spec("uvicorn")


@pytest.mark.slow
@pytest.mark.skipif(not SERVE_PACKAGES, reason="transformers serve needs fastapi and uvicorn")
@pytest.mark.skipif(not (SHARED / "models").exists(), reason="needs the model ../shared/data/models/stories260k")
def test_transformers_serve_and_a_model_too_small_to_judge(tmp_path):
    import socket

    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = tmp_path / "stories260k"
    AutoModelForCausalLM.from_pretrained(SHARED / "models" / "stories260k").save_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(SHARED / "models" / "stories260k")
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}\n"
    tokenizer.save_pretrained(folder)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [
        Path(sys.executable).parent / "transformers",
        "serve",
        folder,
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
    ]
    with open(tmp_path / "serve.log", "wb") as log:
        server = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
    try:
        for _ in range(120):
            with contextlib.suppress(OSError):
                get(f"http://127.0.0.1:{port}/health")
                break
            assert server.poll() is None, (tmp_path / "serve.log").read_text()[-2000:]
            time.sleep(0.5)
        samples = write_rows(tmp_path / "s.jsonl", small_rows(6))
        results = run(
            f"http://127.0.0.1:{port}", samples, tmp_path / "out", judge=str(folder), concurrency=4, timeout=60.0
        )
    finally:
        server.kill()
        server.wait()
    record = read_rows(tmp_path / "out" / "record.jsonl")
    assert results.unparsed.item() == 6 and results.wins.item() == results.losses.item() == 0
    assert len(record) == 6 * judge.MAX_ASKS and all(line["reply"].strip() for line in record)
    assert all(line["tokens"][0] > 100 and line["tokens"][1] > 0 for line in record)


def test_each_beta_of_an_ilql_run_has_a_name_of_its_own(tmp_path):
    folder = tmp_path / "pythia-1b" / "ilql_44413"
    folder.mkdir(parents=True)
    paths = [folder / f"samples_validation_beta{beta}.jsonl" for beta in ("0", "0.5", "-1", "1e-05")]
    for path in paths:
        path.write_text(json.dumps(ROW) + "\n")
    names = judge.load_pairs(judge.Args(samples=tuple(map(str, paths)))).name.tolist()
    assert names == [f"pythia-1b/ilql_beta{beta}/44413" for beta in ("0", "0.5", "-1", "1e-05")]
