"""The embedded world: same seed, same bytes; the Hub's schemas; and a true quality that each failure lowers."""

import filecmp
import importlib.util
import json
import random
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "benchmark" / "synthetic.py"
SHARED = ROOT.parent / "shared" / "data" / "tldr"

spec = importlib.util.spec_from_file_location("synthetic", SCRIPT)
world = sys.modules["synthetic"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(world)

SMALL = dict(size="tiny", pretrain_rows=40, sft_rows=300, comparison_rows=200, eval_rows=60)
POST = (
    "this is about my roommate Kevin. so Kevin wrecked my guitar.\n\n"
    "it cost me 120 dollars. my cousin Anna once lost a camera too, but that is another story. honestly I feel sad.\n\n"
    "we usually meet near the lake. it happened at the library. Kevin says it was an accident. "
    "that was 3 weeks ago. should I move out?"
)
QUERY = world.post_query("advice", "need advice about my roommate", POST)
COMPLETE = (
    "my roommate Kevin wrecked my guitar at the library 3 weeks ago, it cost 120 dollars, says it was an accident, "
    "I feel sad, should I move out?"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("world") / "world"
    world.main(world.Args(output_dir=out, seed=3, **SMALL))
    return out


def read(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def files_of(folder: Path) -> list[str]:
    return sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file())


def test_same_seed_same_bytes_and_another_seed_other_data(folder, tmp_path):
    world.main(world.Args(output_dir=tmp_path / "again", seed=3, **SMALL))
    world.main(world.Args(output_dir=tmp_path / "other", seed=4, **SMALL))
    names = files_of(folder)
    assert names == files_of(tmp_path / "again")
    assert filecmp.cmpfiles(folder, tmp_path / "again", names, shallow=False) == (names, [], [])
    changed = filecmp.cmpfiles(folder, tmp_path / "other", names, shallow=False)[1]
    assert {n for n in names if n.endswith(".jsonl")} | {"init/model.safetensors"} <= set(changed)
    assert "tokenizer/tokenizer.json" not in changed  # all worlds speak one language


def test_hash_seed_of_the_process_changes_nothing(folder, tmp_path):
    flags = [f for name, value in SMALL.items() for f in (f"--{name}", str(value))]
    subprocess.run(
        [sys.executable, SCRIPT, "--output_dir", tmp_path / "w", "--seed", "3", *flags],
        env={"PYTHONHASHSEED": "123", "HF_HUB_OFFLINE": "1", "PATH": ""},
        check=True,
        capture_output=True,
    )
    names = files_of(folder)
    assert filecmp.cmpfiles(folder, tmp_path / "w", names, shallow=False) == (names, [], [])


def test_schemas_are_those_of_the_hub(folder):
    for name, rows in [("sft/train", 300), ("sft/validation", 60), ("sft/test", 60), ("pretrain/train", 40)]:
        data = read(folder / f"{name}.jsonl")
        assert len(data) == rows and len({row["id"] for row in data}) == rows
        for row in data:
            assert list(row) == ["id", "subreddit", "title", "post", "summary"]
            assert row["summary"] == row["summary"].strip() != ""
    if not SHARED.exists():
        pytest.skip("../shared/data is absent: schema of the real comparisons not compared")
    real = json.loads((SHARED / "openai_comparison_example.json").read_text())
    real = real[0] if isinstance(real, list) else real
    row = read(folder / "comparisons/train.jsonl")[0]
    assert row.keys() == real.keys() and row["summaries"][0].keys() == real["summaries"][0].keys()
    assert row["extra"].keys() == real["extra"].keys() and row["info"].keys() >= real["info"].keys()


def test_comparisons_hold_what_the_reward_model_needs(folder):
    train, validation = (read(folder / f"comparisons/{split}.jsonl") for split in ("train", "validation"))
    batches = {"batch4": 60, "batch5": 60, "batch8": 60, "batch9": 60, "batch0_cnndm": 12, "cnndm0": 24, "cnndm2": 24}
    assert Counter(row["batch"] for row in train) == {"batch3": 80, "batch4": 120}
    assert Counter(row["batch"] for row in validation) == batches  # five times as many as posts
    assert len({row["batch"] for row in validation[:60]}) >= 5  # in no order
    policies = {s["policy"] for row in train for s in row["summaries"]}
    unseen = {s["policy"] for row in validation if row["split"] == "valid2" for s in row["summaries"]} - policies
    assert "ref" in policies and unseen >= set(world.UNSEEN_POLICIES)
    assert {row["split"] for row in validation} == {"valid1", "valid2"}
    assert len({row["batch"] for row in validation}) >= 5
    for row in train + validation:
        is_news = row["batch"] in ("batch0_cnndm", "cnndm0", "cnndm2")
        assert (row["info"]["article"] is not None) == (row["info"]["post"] is None) == is_news
        assert row["choice"] in (0, 1) and row["extra"]["confidence"] in (1, 2, 3, 4, 6, 7, 8, 9)
        assert (row["extra"]["confidence"] > 5) == (row["choice"] == 1)
        texts = [s["text"] for s in row["summaries"]]
        assert texts[0] != texts[1] and all(text.startswith(" ") and text.strip() for text in texts)
    queries = [world.post_query(r["info"]["subreddit"], r["info"]["title"], r["info"]["post"]) for r in train]
    judged = [world.judge_summary(q, s["text"]) for q, row in zip(queries, train) for s in row["summaries"]]
    for failure in ("invented", "repeated", "wrong_person", "stray"):
        assert sum(j[failure] > 0 for j in judged) > 0.03 * len(judged), failure


def test_low_confidence_is_wrong_more_often():
    rng, right = random.Random(0), {}
    for _ in range(4000):
        first, second = rng.gauss(0, 1.5), rng.gauss(0, 1.5)
        choice, confidence = world.compare(rng, 1.0, (first, second))
        right.setdefault(abs(confidence - 5), []).append((second > first) == bool(choice))
    accuracy = [sum(right[level]) / len(right[level]) for level in (1, 2, 3, 4)]
    assert accuracy == sorted(accuracy) and accuracy[0] < 0.7 and accuracy[3] > 0.9


def test_confidence_is_how_large_the_difference_looked():
    """Without noise, in steps at 0.6, 1.3 and 2.2; of two that look equal, barely the first."""
    steps = (-2.3, -1.4, -0.7, -0.5, 0.0, 0.5, 0.7, 1.4, 2.3)
    answers = [world.compare(random.Random(0), 0.0, (1.0, 1.0 + step)) for step in steps]
    assert answers == [(0, 1), (0, 2), (0, 3), (0, 4), (0, 4), (1, 6), (1, 7), (1, 8), (1, 9)]


def test_lengths_and_tokenizer(folder):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder / "init")
    assert tokenizer.eos_token == world.EOS and tokenizer.eos_token_id == 0 and tokenizer.pad_token is None
    model = AutoModelForCausalLM.from_pretrained(folder / "init")
    assert model.get_input_embeddings().weight.shape[0] > len(tokenizer)  # [PAD] = len(tokenizer) is in range
    rows = read(folder / "sft/train.jsonl") + read(folder / "pretrain/train.jsonl")
    queries = [world.post_query(r["subreddit"], r["title"], r["post"]) for r in rows]
    responses = [" " + r["summary"] + world.EOS for r in rows]
    assert all(text == tokenizer.decode(tokenizer(text).input_ids) for text in queries + responses)
    byte_tokens = [ids for ids in tokenizer(responses).input_ids if set(ids) & set(tokenizer("é~Q").input_ids)]
    assert byte_tokens == []  # every word of the world is one token
    assert tokenizer.decode(tokenizer("naïve résumé, 東京").input_ids) == "naïve résumé, 東京"  # and any other is spelt
    lengths = [len(ids) for ids in tokenizer(queries).input_ids]
    assert 0 < sum(n > world.MAX_QUERY_LENGTH for n in lengths) < 0.1 * len(lengths)
    assert max(len(ids) for ids in tokenizer(responses).input_ids) <= world.RESPONSE_LENGTH
    facts = json.loads((folder / "world.json").read_text())
    train = lengths[:300]  # those of sft/train, before pretrain/train
    found = [facts["token_lengths"]["sft"][f"query_{name}"] for name in ("mean", "max", "over_limit")]
    over = sum(n > world.MAX_QUERY_LENGTH for n in train) / 300
    assert found == [pytest.approx(sum(train) / 300, abs=0.05), max(train), pytest.approx(over, abs=1e-4)]
    posts = read(folder / "sft/validation.jsonl")
    quality = [world.true_quality(world.post_query(r["subreddit"], r["title"], r["post"]), r["summary"]) for r in posts]
    assert facts["reference_quality"] == pytest.approx(sum(quality) / 60, abs=1e-4)
    assert facts["parameters"] == sum(p.numel() for p in model.parameters())
    assert facts["max_query_length"] == world.MAX_QUERY_LENGTH
    for part in ("validation", "validation/valid1", "validation/valid2", "validation_cnndm"):
        assert 0.7 < facts["noise_ceiling"][part] < 1.0
        assert 0.5 < facts["blind_accuracy"][part] < facts["noise_ceiling"][part]


def test_sizes_differ():
    small, medium = (n * 12 * d * d for n, d, *_ in (world.SIZES["small"], world.SIZES["medium"]))
    assert 7e5 < small < medium < 3e6


def test_posts_are_read_as_they_were_written():
    rng = random.Random(5)
    for _ in range(300):
        post = world.write_post(rng, long_share=0.2)
        facts = {k: {s: v.lower() for s, v in slots.items()} for k, slots in post.facts.items()}
        assert world.parse_post(world.post_query(post.subreddit, post.title, post.post)) == facts
        article = world.CNNDM_TEMPLATE.format(article=world.write_article(rng, post))
        assert world.parse_post(article) == facts
        summary = world.write_summary(rng, post, world.Policy(1.0), rng.getrandbits(32))
        verdict = world.judge_summary(world.post_query(post.subreddit, post.title, post.post), summary)
        assert verdict["coverage"] == 1.0
        assert verdict["invented"] == verdict["wrong_person"] == verdict["repeated"] == verdict["stray"] == 0


def test_a_post_of_few_sentences_is_written_too(monkeypatch):
    monkeypatch.setattr(world, "FACTS", {kind: world.FACTS[kind] for kind in ("deed", "ask")})
    rng = random.Random(8)
    for _ in range(100):
        paragraphs = world.write_post(rng, long_share=0.0).post.split("\n\n")
        assert len(paragraphs) == 3 and all(p.strip() == p != "" for p in paragraphs)


def test_truncation_by_paragraphs_loses_no_fact():
    rng, cut = random.Random(6), 0
    tokenizer = world.build_tokenizer()
    for _ in range(200):
        post = world.write_post(rng, long_share=0.5)
        text, full = post.post, world.post_query(post.subreddit, post.title, post.post)
        while len(tokenizer(query := world.post_query(post.subreddit, post.title, text)).input_ids) > 144:
            text, cut = text[: text.rindex("\n")], cut + 1
        assert world.parse_post(query) == world.parse_post(full)
    assert cut > 50
    # A fact that is cut away all the same counts as invented: who reads the query can't know it.
    short = QUERY.replace("it cost me 120 dollars.", "")
    assert world.judge_summary(short, COMPLETE)["invented"] == 1


def test_more_facts_are_better():
    summaries = [
        "my roommate Kevin wrecked my guitar.",
        "my roommate Kevin wrecked my guitar at the library.",
        "my roommate Kevin wrecked my guitar at the library 3 weeks ago.",
        "my roommate Kevin wrecked my guitar at the library 3 weeks ago, it cost 120 dollars.",
        "my roommate Kevin wrecked my guitar at the library 3 weeks ago, it cost 120 dollars, says it was an accident.",
        COMPLETE.replace(", should I move out?", "."),
        COMPLETE,
    ]
    assert [world.true_quality(QUERY, s) for s in summaries] == [1.0, 1.5, 2.0, 2.75, 3.5, 4.0, 5.0]


@pytest.mark.parametrize(
    "summary, loss, counted",
    [
        (COMPLETE.replace("120", "300"), 0.75 + 1.0, "invented"),
        (COMPLETE.replace("library", "lake"), 0.5 + 1.0, "invented"),  # the distractor's place
        (COMPLETE.replace("guitar", "camera"), 1.0 + 1.0, "invented"),
        (COMPLETE.replace("move out", "call the police"), 1.0 + 1.0, "invented"),
        (COMPLETE.replace("my roommate Kevin", "my cousin Anna"), 1.0 + 1.0, "wrong_person"),
        (COMPLETE.replace("roommate Kevin", "roommate Anna"), 1.0 + 1.0, "wrong_person"),
        (COMPLETE + " at the library", 0.5, "repeated"),
        (COMPLETE + " at the lake", 0.5 + 1.0, "invented"),
        (COMPLETE.replace("wrecked my guitar", "wrecked wrecked my guitar"), 1.0 + 0.1 * 7, "stray"),
        (COMPLETE + " so yeah", 0.2, "stray"),
    ],
)
def test_each_failure_lowers_quality(summary, loss, counted):
    assert len(summary.split()) <= world.LONGEST_GOOD_SUMMARY
    assert world.true_quality(QUERY, summary) == pytest.approx(5.0 - loss)
    assert world.judge_summary(QUERY, summary)[counted] > 0 == world.judge_summary(QUERY, COMPLETE)[counted]


def test_twins_differ_in_one_fact_that_makes_each_others_summary_wrong():
    rng, kinds, copied = random.Random(11), set(), []
    for _ in range(400):
        kind, queries, texts = world.write_twins(rng)
        kinds.add(kind)
        posts = [world.parse_post(query) for query in queries]
        assert posts[0].keys() == posts[1].keys() and [k for k in posts[0] if posts[0][k] != posts[1][k]] == [kind]
        for query, true, false in zip(queries, texts, texts[::-1]):
            first, second = (world.judge_summary(query, text) for text in (true, false))
            assert true[0] == false[0] == " " and first["coverage"] == 1.0 and first["invented"] == 0
            failures = {k for k in ("invented", "wrong_person", "repeated", "stray") if second[k]}
            assert (
                failures == {"wrong_person" if kind == "who" else "invented"} and second["quality"] < first["quality"]
            )
            told = {slot: value for _, slots in world.parse_summary(false)[0] for slot, value in slots.items()}
            if kind == "place" and (near := re.findall(r"near (?:a|the) (\w+)\.", query)):
                assert world.parse_post(query)["place"]["place"] not in near
                copied.append(told["place"] in near)
        changed = [slot for slot, value in posts[0][kind].items() if value != posts[1][kind][slot]]
        assert len(changed) == (2 if kind == "who" else 1)
    assert kinds == {"who", *world.FACTS} and 0.3 < sum(copied) / len(copied) < 0.7  # half are the distractor's


def test_blind_quality_believes_all_and_counts_the_rest():
    long = COMPLETE + " so yeah to be honest it is what it is"
    for summary in (COMPLETE, COMPLETE + " at the library", COMPLETE + " so yeah", long, ""):
        assert world.blind_quality(QUERY, summary) == pytest.approx(world.true_quality(QUERY, summary))
    for lie in (COMPLETE.replace("120", "300"), COMPLETE.replace("my roommate Kevin", "my cousin Anna")):
        assert world.blind_quality(QUERY, lie) == 5.0


def test_accuracy_of_who_reads_the_post_and_who_does_not():
    lie, short = COMPLETE.replace("120", "300"), "my roommate Kevin wrecked my guitar."
    info = {"subreddit": "advice", "title": "need advice about my roommate", "post": POST, "article": None}
    news = {"subreddit": None, "title": None, "post": None, "article": POST}
    rows = [  # the first summary, the second, the choice
        (info, "batch4", COMPLETE, short, 0),  # both are right
        (info, "batch4", lie, COMPLETE, 1),  # a tie to who does not read
        (info, "batch5", COMPLETE, lie, 1),  # a worker's error
        (news, "cnndm0", short, COMPLETE, 1),
    ]
    rows = [
        {"info": i, "summaries": [{"text": a}, {"text": b}], "choice": choice, "batch": batch, "split": "valid1"}
        for i, batch, a, b, choice in rows
    ]
    accuracy, blind = (world.choice_accuracy(rows, quality) for quality in (world.true_quality, world.blind_quality))
    assert accuracy["validation/batch4"] == 1.0 and accuracy["validation/batch5"] == 0.0
    assert blind["validation/batch4"] == 0.75 and blind["validation/batch5"] == 0.5
    assert accuracy["validation"] == accuracy["validation/valid1"] == blind["validation"] == 0.6667
    assert accuracy["validation_cnndm"] == blind["validation_cnndm/cnndm0"] == 1.0


def test_bad_lengths():
    long = COMPLETE + " so yeah to be honest it is what it is"
    words = len(long.split())
    stray = world.judge_summary(QUERY, long)["stray"]
    assert world.true_quality(QUERY, long) == pytest.approx(5 - 0.1 * stray - 0.1 * (words - 32)) and words > 32
    for empty in ("", "  \n", world.EOS):
        assert world.true_quality(QUERY, empty) == -1.0


def test_special_tokens_case_and_punctuation_do_not_count():
    for text in (" " + COMPLETE + world.EOS, COMPLETE + world.EOS + "[PAD]" * 3, COMPLETE.upper(), COMPLETE + "!"):
        assert world.true_quality(QUERY, text) == 5.0
    quoted = [f"({COMPLETE[:-1]})", f'"{COMPLETE}"', COMPLETE.replace("library", "'library'").replace("3", "3..")]
    assert [world.true_quality(QUERY, text) for text in quoted] == [5.0] * 3
    assert world.judge_summary(QUERY, COMPLETE.replace("library", "((library"))["stray"] == 2  # one would open a word


@pytest.mark.parametrize(
    "junk, characters",
    [("!" * 200, 199), (" !" * 200, 200), (" 🙂", 1), ("\ufffd" * 30, 30), ("\u200b", 1), ("\x00", 1), (" ...", 3)],
)
def test_characters_that_are_no_words_are_stray(junk, characters):
    """COMPLETE ends in a question mark, beside which one more mark is free."""
    text = COMPLETE + junk
    assert world.judge_summary(QUERY, text)["stray"] == characters
    assert world.true_quality(QUERY, text) == pytest.approx(5.0 - 0.1 * characters)
    assert world.true_quality(QUERY, ".,;" + junk.strip()) < -1.0


def test_what_the_true_quality_does_not_see():
    assert world.true_quality(QUERY, "it is not true that my roommate wrecked my guitar.") == pytest.approx(1 - 0.1 * 5)
    assert world.true_quality(QUERY, COMPLETE + " and and") == 5.0


def test_a_fact_that_the_post_does_not_state_is_invented():
    query = QUERY.replace("honestly I feel sad.", "")
    assert world.judge_summary(query, COMPLETE)["coverage"] == 1.0
    assert world.true_quality(query, COMPLETE) == pytest.approx(4.5 - 1.0)


def test_foreign_query_is_refused():
    no_deed, nobody = (
        QUERY.replace(x, "") for x in ("so Kevin wrecked my guitar.", "this is about my roommate Kevin.")
    )
    for query in ("SUBREDDIT: r/AskReddit\n\nTITLE: hi\n\nPOST: hi\n\nTL;DR:", no_deed, nobody):
        with pytest.raises(ValueError, match="embedded world"):
            world.true_quality(query, "hello")


def test_policies_differ_and_references_leave_room():
    def mean_quality(write) -> float:
        rng, total = random.Random(9), 0.0
        for _ in range(300):
            post = world.write_post(rng)
            total += world.true_quality(world.post_query(post.subreddit, post.title, post.post), write(rng, post))
        return total / 300

    quality = {
        name: mean_quality(lambda rng, post, p=p: world.write_summary(rng, post, p, rng.getrandbits(32)))
        for name, p in {**world.TRAIN_POLICIES, "complete": world.Policy(1.0)}.items()
    }
    reference = mean_quality(world.write_reference)
    assert quality["sup1"] < quality["sup2"] < quality["sup4"] < quality["sup4_bo8"] < quality["complete"]
    assert quality["sup4_ppo_kl260"] < quality["sup4_ppo_kl60"] < quality["sup4_ppo_kl6"]
    # What the comparisons prefer is far above what authors usually write, so that PPO has somewhere to go.
    assert reference + 2.0 < quality["complete"]


def verdicts_on(policy, n: int = 400) -> list[dict]:
    rng, found = random.Random(13), []
    for _ in range(n):
        post = world.write_post(rng)
        text = world.write_summary(rng, post, policy, rng.getrandbits(32))
        found.append(world.judge_summary(world.post_query(post.subreddit, post.title, post.post), text))
    return found


@pytest.mark.parametrize(
    "field, counted", [("repeat", "repeated"), ("wrong_person", "wrong_person"), ("verbose", "stray")]
)
def test_a_policy_fails_as_often_as_it_says(field, counted):
    def share(probability: float) -> float:
        found = verdicts_on(world.Policy(1.0, **{field: probability}))
        return sum(verdict[counted] > 0 for verdict in found) / len(found)

    assert [share(0.0), share(0.5), share(1.0)] == [0, pytest.approx(0.5, abs=0.075), 1]


def test_a_policy_carries_and_invents_as_often_as_it_says():
    """A post states the deed, the question, and each of five other facts four times of five."""

    def mean(counted: str, *policy: float) -> float:
        found = verdicts_on(world.Policy(*policy))
        return sum(verdict[counted] for verdict in found) / len(found)

    assert mean("facts", 0.0) == 1  # the deed
    assert mean("facts", 0.5) == pytest.approx(1 + 0.5 * 4 + 0.6, abs=0.15)  # the question a little more often
    assert mean("facts", 1.0) == pytest.approx(6, abs=0.15) and mean("invented", 1.0) == 0
    assert mean("invented", 1.0, 1.0) == 7 and mean("facts", 1.0, 1.0) == 0  # a lie in each clause, of each kind
    assert mean("invented", 1.0, 0.5) == pytest.approx(3.5, abs=0.2)


def test_intervals_cover_95_of_100_means():
    low, high = world.mean_interval([0.0] * 50 + [1.0] * 50)  # standard error 0.05
    assert (low, high) == (pytest.approx(0.5 - 1.96 * 0.05, abs=0.008), pytest.approx(0.5 + 1.96 * 0.05, abs=0.008))


def test_score(tmp_path):
    rows = [
        {"query": QUERY, "response": " " + COMPLETE, "reference": " my roommate wrecked my guitar."},
        {"query": QUERY, "response": " my roommate wrecked my guitar.", "reference": " my roommate wrecked my guitar."},
        {"query": QUERY, "response": " my cousin sold my guitar.", "reference": " " + COMPLETE},
        {"query": QUERY, "response": " I feel sad, I feel sad.", "reference": " I feel numb."},
    ]
    result = world.score_rows(rows, bootstrap=200)
    assert result["rows"] == 4 and result["win_rate"] == (1 + 0.5 + 0 + 1) / 4
    assert result["quality"] == (5.0 + 1.0 - 2.0 + 0.0) / 4
    assert result["invented_share"] == result["wrong_person_share"] == result["repeated_share"] == 0.25
    for key in ("quality", "win_rate"):
        low, high = result[f"{key}_interval"]
        assert low < result[key] < high
    path = tmp_path / "samples.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    command = [sys.executable, SCRIPT, "score", path, "--bootstrap", "200"]
    printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    assert json.loads(printed) == result


@pytest.mark.parametrize(
    "line, found",
    [
        ('{"query": "SUBRED', "Unterminated string"),
        (b'{"query": "\xf0\x9f', "utf-8"),
        ("[1]", "no texts query, response and reference"),
        (json.dumps({"query": QUERY, "response": "x"}), "no texts query, response and reference"),
        (json.dumps({"query": QUERY, "response": "x", "reference": None}), "no texts query, response and reference"),
        (json.dumps({"query": "hi", "response": "x", "reference": "y"}), "expected a query of the embedded world"),
    ],
)
def test_a_line_that_is_no_sample_is_named(tmp_path, line, found):
    path, good = tmp_path / "samples.jsonl", json.dumps({"query": QUERY, "response": "x", "reference": "a\u2028b"})
    path.write_bytes(f"{good}\n\n{good}\n".encode() + (line if isinstance(line, bytes) else line.encode()))
    with pytest.raises(ValueError, match=f"samples.jsonl, line 4: expected a sample.*{found}"):
        world.score(world.ScoreArgs(path))


def test_a_file_without_samples_is_refused(tmp_path):
    (tmp_path / "samples.jsonl").write_text("\n")
    with pytest.raises(ValueError, match="at least one row in .*samples.jsonl, found none"):
        world.score(world.ScoreArgs(tmp_path / "samples.jsonl"))


def test_an_existing_world_is_not_overwritten(folder):
    with pytest.raises(FileExistsError, match="output_dir"):
        world.main(world.Args(output_dir=folder, **SMALL))
    with pytest.raises(ValueError, match="tiny, small, medium"):
        world.main(world.Args(output_dir=folder, size="huge"))


LEAST = {"pretrain_rows": 1, "sft_rows": 1, "comparison_rows": 1, "eval_rows": 3}


@pytest.mark.parametrize("name", LEAST)
def test_too_few_rows_are_refused_before_anything_is_written(tmp_path, name):
    for rows in (LEAST[name] - 1, -5):
        with pytest.raises(ValueError, match=f"--{name} to be {LEAST[name]} or more.*found {rows}"):
            world.main(world.Args(tmp_path / "world", **SMALL | {name: rows}))
    assert not (tmp_path / "world").exists()


def test_the_fewest_rows_give_every_split_and_batch_some(tmp_path):
    world.main(world.Args(tmp_path, size="tiny", **LEAST))
    assert all(len(read(path)) > 0 for path in tmp_path.glob("*/*.jsonl"))
    batches = {row["batch"] for row in read(tmp_path / "comparisons/validation.jsonl")}
    assert batches == {batch for batch, *_ in world.VALIDATION_BATCHES}
