"""benchmark/visualize_tokens.py with a really trained tiny model, and its page in a browser."""

import json
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser

import matplotlib.image
import numpy as np
import pandas as pd
import pytest
import torch
from conftest import ROOT, need_shared
from transformers import AutoModelForCausalLM

sys.path.insert(0, str(ROOT / "benchmark"))
import visualize_tokens as vt  # noqa: E402


@pytest.fixture(scope="module")
def stories():
    """(folder, model, tokenizer) of the base model."""
    path = need_shared("data", "models", "stories260k")
    return path, *vt.load_model(str(path))


@pytest.fixture(scope="module")
def posts() -> list[dict]:
    path = need_shared("data", "tldr", "sampled_summaries.jsonl")
    rows = [json.loads(line) for line in path.read_text().splitlines()[:40]]
    return sorted(rows, key=lambda row: len(row["query"]))[:6]


@pytest.fixture(scope="module")
def tuned(stories, posts, tmp_path_factory):
    """Folder of a copy of the base model after some steps on references."""
    torch.manual_seed(0)
    path, _, tokenizer = stories
    model = AutoModelForCausalLM.from_pretrained(path)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for step in range(30):
        text = posts[step % len(posts)]["query"][-100:] + posts[step % len(posts)]["reference"]
        tokens = torch.tensor([tokenizer(text).input_ids + [tokenizer.eos_token_id]])
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    folder = tmp_path_factory.mktemp("tuned")
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def page(stories, posts, tuned, tmp_path_factory):
    """Folder that the script wrote: one model from a sample file (with scores), one sampled by the script."""
    folder = tmp_path_factory.mktemp("page")
    rows = [post | {"score": i - 1.5, "reference_score": 0.25} for i, post in enumerate(posts)]
    rows[0] |= {"response": ' <script>alert("x")</script> & more'}
    samples = folder / "samples.jsonl"
    samples.write_text("".join(json.dumps(row) + "\n" for row in rows))
    files = {"base_model": str(stories[0]), "samples": (str(samples),), "models": (str(tuned),)}
    settings = {"names": ("PPO 1.3B", "Tuned"), "num_posts": 3, "output_dir": str(folder / "out")}
    vt.main(vt.Args(**files, **settings))
    return folder / "out"


def test_ranks_are_those_of_single_sequences_without_padding(stories):
    _, model, tokenizer = stories
    queries = [tokenizer(text).input_ids for text in ("Once upon a time", "Lily saw a big red ball in the")]
    responses = [[5, 300, 2], [410, 411, 412, 413, 2]]
    ranked = vt.rank_tokens(model, len(tokenizer), queries, responses)
    for query, response, row in zip(queries, responses, ranked):
        assert len(row) == len(response)
        for i, (token, (rank, prob, top)) in enumerate(zip(response, row)):
            probs = model(torch.tensor([query + response[:i]])).logits[0, -1].softmax(-1)
            order = probs.argsort(descending=True).tolist()
            surely_above, maybe_above = (probs > probs[token] * (1 + tie) for tie in (1e-4, -1e-4))
            assert 1 + surely_above.sum() <= rank <= maybe_above.sum()  # of its peers, rounding decides
            assert prob == pytest.approx(probs[token].item(), rel=1e-4)
            assert [t for t, _ in top] == order[:3]
            assert [p for _, p in top] == pytest.approx(probs[order[:3]].tolist(), rel=1e-4)


def test_what_the_base_model_says_itself_is_unshifted(stories, posts, tuned):
    _, model, tokenizer = stories
    query = vt.encode_query(model, tokenizer, posts[0]["query"], 40)
    own = vt.generate(model, tokenizer, posts[0]["query"], 40, temperature=0)
    other = vt.generate(vt.load_model(str(tuned))[0], tokenizer, posts[0]["query"], 40, temperature=0)
    ranked = vt.rank_tokens(model, len(tokenizer), [query, query], [own, other])
    assert {vt.kind_of(rank) for rank, _, _ in ranked[0]} == {"unshifted"}
    assert "shifted" in {vt.kind_of(rank) for rank, _, _ in ranked[1]}


def test_kinds_of_ranks():
    assert [vt.kind_of(rank) for rank in (1, 2, 3, 4, 500)] == ["unshifted", "marginal", "marginal"] + ["shifted"] * 2


def test_a_response_gets_its_eos_back_if_it_had_room_for_one(stories):
    tokenizer = stories[2]
    tokens = tokenizer(" a cat", add_special_tokens=False).input_ids
    assert vt.encode_response(tokenizer, " a cat", 53) == [*tokens, tokenizer.eos_token_id]
    assert vt.encode_response(tokenizer, " a cat", len(tokens)) == tokens
    assert vt.encode_response(tokenizer, "", 53) == [tokenizer.eos_token_id]


def test_a_long_query_keeps_its_end_within_the_context(stories):
    _, model, tokenizer = stories
    tokens = vt.encode_query(model, tokenizer, "cat " * 2000 + "TL;DR:", 53)
    assert len(tokens) == model.config.max_position_embeddings - 53
    assert tokenizer.decode(tokens).endswith("TL;DR:")


def test_pieces_are_whole_characters(tokenizer):
    text = " so happy 😀 naïve"
    tokens = tokenizer(text).input_ids
    pieces = vt.decode_pieces(tokenizer, tokens)
    assert "".join(pieces) == text and len(pieces) == len(tokens)
    assert "😀" in pieces and pieces.count("") >= 3  # an emoji of four byte tokens: three add nothing yet


def test_shares_by_position_from_both_ends():
    first, second = [(1, 0.9, []), (2, 0.1, []), (9, 0.0, [])], [(7, 0.0, [])]
    shares = vt.shares_by_position({"m": [first, second]}).set_index(["from", "position"])
    assert shares.loc[("start", 1), ["unshifted", "marginal", "shifted", "n"]].tolist() == [0.5, 0, 0.5, 2]
    assert shares.loc[("start", 2), ["marginal", "n"]].tolist() == [1, 1]
    assert shares.loc[("end", -1), ["shifted", "n"]].tolist() == [1, 2]
    assert shares.loc[("end", -3), ["unshifted", "n"]].tolist() == [1, 1]


class Page(HTMLParser):
    def __init__(self, text):
        super().__init__()
        self.tags, self.spans, self.cells, self.open = [], [], [], None
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        attributes = dict(attributes)
        if tag == "span" and "title" in attributes:
            self.spans.append((attributes["class"], attributes["title"]))


def test_page_has_a_coloured_token_for_each_rank(page):
    parsed = Page((page / "index.html").read_text())
    assert "script" not in parsed.tags  # a response with tags in it is shown, not run
    assert parsed.tags.count("table") == 3
    for kind, title in parsed.spans:
        rank, prob = re.match(r"rank (\d+), probability ([\d.]+)%", title).groups()
        assert kind == vt.kind_of(int(rank)) and 0 <= float(prob) <= 100
        assert len(re.findall(r"^\d\. ", title, re.M)) == 3
    assert {kind for kind, _ in parsed.spans} == set(vt.KINDS)
    text = (page / "index.html").read_text()
    assert "&lt;" in text and "-1.5000" in text and "0.2500" in text
    for name in ("PPO 1.3B", "Tuned", "Reference", "Base model"):
        assert text.count(f"<td>{name}<br>") == 3


def test_shares_table_covers_all_posts(page):
    shares = pd.read_csv(page / "shifted.csv")
    assert set(shares.name) == {"PPO 1.3B", "Tuned", "Reference"}
    assert (shares[shares.position.isin([1, -1])].n == 6).all()
    assert np.allclose(shares[list(vt.KINDS)].sum(axis=1), 1)
    assert (page / "shifted.png").stat().st_size > 10_000


@pytest.mark.parametrize(
    "rows, overrides, message",
    [
        ([], {}, "empty file"),
        ([{"query": "q", "response": "r"}], {}, "samples.jsonl:1.*reference"),
        ([{"query": "q", "response": "r", "reference": "s"}], {"names": ("Reference",)}, "--names"),
        ([{"query": "q", "response": "r", "reference": "s"}], {"posts": "other"}, "expected a response to every post"),
        (
            [{"query": "q", "response": "r", "reference": "s"}],
            {"micro_batch_size": 0},
            "--micro_batch_size: .* found 0",
        ),
        (
            [{"query": "q", "response": "r", "reference": "s", "score": "high"}],
            {},
            "samples.jsonl:1: expected a number or null as score, found 'high'",
        ),
    ],
)
def test_bad_input_is_named(tmp_path, rows, overrides, message):
    samples, other = tmp_path / "samples.jsonl", tmp_path / "other.jsonl"
    samples.write_text("".join(json.dumps(row) + "\n" for row in rows))
    other.write_text(json.dumps({"query": "another", "reference": "s"}))
    overrides = {key: str(other) if key == "posts" else value for key, value in overrides.items()}
    with pytest.raises(ValueError, match=message):
        vt.main(vt.Args(samples=(str(samples),), base_model="none", output_dir=str(tmp_path), **overrides))


def test_rows_of_one_query_are_matched_in_their_order(tmp_path):
    def write(name: str, rows: list[tuple[str, str]]) -> str:
        lines = [json.dumps({"query": query, "response": text, "reference": f"ref of {text}"}) for query, text in rows]
        (tmp_path / name).write_text("\n".join(lines))
        return str(tmp_path / name)

    first = write("a.jsonl", [("q", "one"), ("q", "two"), ("p", "three")])
    second = write("b.jsonl", [("p", "THREE"), ("q", "ONE"), ("q", "TWO")])
    posts, responses = vt.collect_responses(vt.Args(samples=(first, second)), ["a", "b"])
    assert [post["reference"] for post in posts] == ["ref of one", "ref of two", "ref of three"]
    assert [row["response"] for row in responses["a"]] == ["one", "two", "three"]
    assert [row["response"] for row in responses["b"]] == ["ONE", "TWO", "THREE"]


def test_shares_stand_in_the_order_given():
    shares = vt.shares_by_position({name: [[(1, 0.9, [])]] for name in ("SFT", "PPO", "Reference")})
    assert list(shares.name.unique()) == ["SFT", "PPO", "Reference"]


CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


@pytest.mark.skipif(not CHROMIUM, reason="needs Chromium: apt-get install chromium")
def test_page_in_a_browser(page, tmp_path):
    switches = ["--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"]
    switches += ["--disable-component-update", "--disable-sync", f"--user-data-dir={tmp_path / 'profile'}"]
    picture = tmp_path / "page.png"
    command = [
        CHROMIUM,
        *switches,
        "--window-size=1200,2400",
        f"--screenshot={picture}",
        (page / "index.html").as_uri(),
    ]
    subprocess.run(command, check=True, capture_output=True, timeout=120)
    pixels = (matplotlib.image.imread(picture)[..., :3] * 255).round().astype(int).reshape(-1, 3)
    for kind, colour in vt.KINDS.items():
        wanted = [int(colour[i : i + 2], 16) for i in (1, 3, 5)]
        assert (pixels == wanted).all(axis=1).sum() > 1000, f"no {kind} tokens to be seen"
