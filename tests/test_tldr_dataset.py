"""tldr_dataset.py: columns, lengths and truncation on the real posts, bad input, and files."""

import csv
import functools
import json
import os
import re
import warnings
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"

import numpy as np
import pytest
from datasets import Dataset, DatasetDict, load_from_disk
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

import tldr_dataset
from tldr_dataset import Args, load_tokenizer, main, tokenize_queries, write_counts

ROOT = Path(__file__).parents[1]
SHARED = ROOT.parent / "shared" / "data"
TOKENIZERS = {
    "pythia": SHARED / "tokenizers" / "pythia",
    "gpt2": SHARED / "tokenizers" / "gpt2",
    "stories": SHARED / "models" / "stories260k",
}
SFT_COLUMNS = {
    *("query", "query_token", "query_token_len"),
    *("reference_response", "reference_response_token", "reference_response_token_len"),
    *("query_reference_response_token", "query_reference_response_token_len"),
    "query_reference_response_token_response_label",
}
COMPARISON_COLUMNS = {
    *("query", "query_token", "query_token_len", "chosen", "rejected"),
    *(f"{name}_token{end}" for name in ("chosen", "rejected") for end in ("", "_len")),
    *(f"query_{name}_token{end}" for name in ("chosen", "rejected") for end in ("", "_len", "_response_label")),
    *("policies", "chosen_policy", "rejected_policy", "batch", "split", "choice", "extra.confidence"),
}
pytestmark = pytest.mark.skipif(not SHARED.exists(), reason="the data in ../shared is not there")


def read_jsonl(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def write_splits(folder: Path, **splits: list[dict]) -> str:
    folder.mkdir(parents=True, exist_ok=True)
    for split, rows in splits.items():
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(folder)


def run(folder: Path, tokenizer: str = "pythia", **settings) -> dict[str, DatasetDict]:
    settings = {"sft": "", "comparisons": "", "num_proc": 1} | settings
    return main(Args(output_dir=str(folder / "out"), tokenizer=str(TOKENIZERS.get(tokenizer, tokenizer)), **settings))


def post_row(i: int = 0, **fields) -> dict:
    text = {"post": f"Post number {i}.\nIt goes on.", "summary": f"Summary number {i}."}
    return {"id": f"p{i}", "subreddit": "cats", "title": "My cat"} | text | fields


def comparison_row(i: int = 0, texts=(" First.", " Second one."), **fields) -> dict:
    info = {"id": f"c{i}", "subreddit": "cats", "title": "My cat", "post": f"Post {i}", "article": None, "site": None}
    summaries = [{"text": text, "policy": policy, "note": None} for text, policy in zip(texts, ("sup2", "ref"))]
    bookkeeping = {"choice": 1, "worker": "w", "batch": "batch3", "split": "train", "extra": {"confidence": None}}
    return {"info": info, "summaries": summaries} | bookkeeping | fields


def cnndm_row(i: int = 0, article: str | None = "News.\nMore news.\n\n", batch: str = "cnndm2") -> dict:
    row = comparison_row(i, batch=batch, split="valid2", extra={"confidence": 7})
    return row | {"info": {"id": f"n{i}", "subreddit": None, "title": None, "post": None, "article": article}}


def without(row: dict, field: str) -> dict:
    return {name: value for name, value in row.items() if name != field}


@pytest.fixture(scope="module", params=[*TOKENIZERS])
def real(request, tmp_path_factory):
    """(name, tokenizer, datasets, folder) of the real data: all of it with Pythia's tokenizer, a part with others."""
    folder, limit = tmp_path_factory.mktemp(request.param), 400 if request.param == "stories" else 512
    sources = {kind: str(SHARED / "tldr" / kind) for kind in ("sft", "comparisons")}
    if request.param != "pythia":
        for kind, source in sources.items():
            splits = {path.stem: read_jsonl(path)[:100] for path in Path(source).iterdir()}
            sources[kind] = write_splits(folder / kind, **splits)
    datasets = run(folder, request.param, **sources, max_query_length=limit)
    return request.param, load_tokenizer(str(TOKENIZERS[request.param])), datasets, folder / "out"


@pytest.fixture(scope="module", autouse=True)
def quick_runs(tmp_path_factory):
    """Drawing, and reading the tokenizer again, take most of the time of a small run; the test of figures draws."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tldr_dataset, "write_counts", lambda dataset, columns, path: None)
        patch.setattr(tldr_dataset, "load_tokenizer", functools.cache(load_tokenizer))
        patch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path_factory.mktemp("cache"))
        yield


@pytest.fixture
def pythia():
    return load_tokenizer(str(TOKENIZERS["pythia"]))


def token_columns(dataset: Dataset) -> dict[str, np.ndarray]:
    names = [name for name in dataset.column_names if name.endswith(("_token", "_label"))]
    return {name: dataset.with_format("numpy")[name][:] for name in names}


def test_columns_splits_and_rows(real):
    name, _, datasets, _ = real
    num_posts, num_comparisons = (1045, 700) if name == "pythia" else (100, 100)
    assert {split: len(rows) for split, rows in datasets["sft"].items()} == {
        "train": num_posts,
        "validation": 100,
        "test": 100,
    }
    assert {split: len(rows) for split, rows in datasets["comparisons"].items()} == {
        "train": num_comparisons,
        "validation": 100,
    }
    assert {*datasets["sft"]["train"].column_names} == SFT_COLUMNS
    assert {*datasets["comparisons"]["train"].column_names} == COMPARISON_COLUMNS


def test_pythia_lengths_are_the_papers_and_others_fit_the_data(real):
    name, _, datasets, folder = real
    sft, comparisons = (token_columns(datasets[kind]["train"]) for kind in ("sft", "comparisons"))
    response, joint = sft["reference_response_token"].shape[1], sft["query_reference_response_token"].shape[1]
    if name == "pythia":
        assert sft["query_token"].shape == (1045, 512) and (response, joint) == (53, 562)
        assert sft["query_reference_response_token_response_label"].shape[1] == 562
        assert comparisons["query_chosen_token"].shape == comparisons["query_rejected_token"].shape == (700, 638)
        assert comparisons["chosen_token"].shape == comparisons["rejected_token"].shape == (700, 169)
    else:
        rows = [rows for rows in datasets["sft"].values()]
        assert response == max(max(split["reference_response_token_len"]) for split in rows)
        assert joint == max(max(split["query_reference_response_token_len"]) for split in rows)
    metadata = json.loads((folder / "sft" / "metadata.json").read_text())
    assert [*metadata["lengths"]["test"].values()] == [sft["query_token"].shape[1], response, joint]
    assert metadata["tokenizer"] == str(TOKENIZERS[name]) and metadata["args"]["num_proc"] == 1


def test_queries_left_and_responses_right_padded_with_one_eos(real):
    name, tokenizer, datasets, _ = real
    pad, eos = tokenizer.pad_token_id, tokenizer.eos_token_id
    assert pad != eos and (name != "pythia" or pad == 50277)
    for dataset in (datasets["sft"]["train"], datasets["comparisons"]["train"]):
        for column, tokens in token_columns(dataset).items():
            is_pad = tokens == pad
            if column == "query_token":
                assert (is_pad[:, :-1] >= is_pad[:, 1:]).all()
            elif not column.endswith("_label"):
                assert (is_pad[:, :-1] <= is_pad[:, 1:]).all()
            if column != "query_token":
                assert ((tokens == eos).sum(1) == 1).all()
            if not column.endswith("_label"):
                assert ((~is_pad).sum(1) == np.array(dataset[f"{column}_len"][:])).all()


def test_sequences_are_query_and_response_and_labels_hide_the_query(real):
    _, tokenizer, datasets, _ = real
    pad = tokenizer.pad_token_id
    for kind, names in (("sft", ["reference_response"]), ("comparisons", ["chosen", "rejected"])):
        columns = token_columns(datasets[kind]["validation"])
        for name in names:
            for i, query in enumerate(columns["query_token"]):
                query, response = query[query != pad], columns[f"{name}_token"][i]
                joint, label = columns[f"query_{name}_token"][i], columns[f"query_{name}_token_response_label"][i]
                assert joint[joint != pad].tolist() == [*query, *response[response != pad]]
                assert (label[: len(query)] == pad).all() and (label[len(query) :] == joint[len(query) :]).all()


def test_tokens_are_those_of_the_whole_text_tokenised_at_once(real):
    _, tokenizer, datasets, _ = real
    rows = datasets["sft"]["train"]
    texts = [query + response for query, response in zip(rows["query"], rows["reference_response"])]
    for tokens, text in zip(rows["query_reference_response_token"], tokenizer(texts, verbose=False).input_ids):
        assert [token for token in tokens if token != tokenizer.pad_token_id] == text


def test_round_trip_to_the_raw_texts(real):
    name, tokenizer, datasets, _ = real
    raw = read_jsonl(SHARED / "tldr" / "sft" / "validation.jsonl")
    for row, post in zip(datasets["sft"]["validation"], raw):
        assert row["reference_response"] == f" {post['summary']}{tokenizer.eos_token}"
        assert (
            tokenizer.decode(row["query_token"], skip_special_tokens=True).strip() == row["query"] or name == "stories"
        )
        head = f"SUBREDDIT: r/{post['subreddit']}\n\nTITLE: {post['title']}\n\nPOST: "
        assert row["query"].startswith(head) and row["query"].endswith("\n\nTL;DR:")
        assert post["post"].startswith(row["query"].removeprefix(head).removesuffix("\n\nTL;DR:"))
    raw = read_jsonl(SHARED / "tldr" / "comparisons" / "validation.jsonl")
    for row, pair in zip(datasets["comparisons"]["validation"], raw):
        chosen, rejected = pair["summaries"][pair["choice"]], pair["summaries"][1 - pair["choice"]]
        assert row["chosen"] == chosen["text"] + tokenizer.eos_token and row["chosen_policy"] == chosen["policy"]
        assert (
            row["rejected"] == rejected["text"] + tokenizer.eos_token and row["rejected_policy"] == rejected["policy"]
        )
        assert row["policies"] == "ref--sup_ppo_1.3b" and row["extra.confidence"] is None
        assert {name: row[name] for name in ("batch", "split", "choice")} == {
            x: pair[x] for x in ("batch", "split", "choice")
        }


@pytest.mark.parametrize("real", ["pythia"], indirect=True)
def test_five_long_posts_lose_whole_paragraphs(real):
    _, tokenizer, datasets, _ = real
    cut = []
    for row, post in zip(datasets["sft"]["train"], read_jsonl(SHARED / "tldr" / "sft" / "train.jsonl")):
        kept = row["query"].partition("\n\nPOST: ")[2].removesuffix("\n\nTL;DR:")
        if kept != post["post"]:
            cut.append(post["id"])
            assert post["post"][len(kept)] == "\n"
            longer = kept + "\n" + post["post"][len(kept) + 1 :].split("\n")[0]
            assert len(tokenizer(row["query"].replace(kept, longer)).input_ids) > 512 >= row["query_token_len"]
            assert row["query"].endswith("\n\nTL;DR:") and row["query_token"][-3:] == tokenizer("TL;DR:").input_ids[-3:]
    assert len(cut) == 5


@pytest.mark.parametrize("text", ["wordy " * 300, "🙂é漢" * 120, "internationalisation" * 40])
@pytest.mark.parametrize("name", [*TOKENIZERS])
def test_a_single_paragraph_is_cut_by_the_character(name, text):
    tokenizer, row = load_tokenizer(str(TOKENIZERS[name])), post_row(post=text, name="row 0")
    tokenize_queries([row], tldr_dataset.TLDR_TEMPLATE, "post", tokenizer, 100)
    query = tldr_dataset.TLDR_TEMPLATE.format(**row)
    assert row["query"] == query and row["query_token"] == tokenizer(query).input_ids and len(row["query_token"]) <= 100
    one_by_one = text  # the longest prefix that fits, found the slow way
    while len(tokenizer(tldr_dataset.TLDR_TEMPLATE.format(**row | {"post": one_by_one})).input_ids) > 100:
        one_by_one = one_by_one[:-1]
    assert row["post"] == one_by_one


def test_cnndm_rows_are_a_split_with_their_own_template_and_lengths(tmp_path, pythia):
    train = [comparison_row(i) for i in range(3)]
    validation = [comparison_row(9), *(cnndm_row(i, batch=x) for i, x in enumerate(tldr_dataset.CNNDM_BATCHES))]
    source = write_splits(tmp_path / "raw", train=train, validation=validation)
    dataset = run(tmp_path, comparisons=source)["comparisons"]
    assert {split: len(rows) for split, rows in dataset.items()} == {"train": 3, "validation": 1, "validation_cnndm": 3}
    columns, row = token_columns(dataset["validation_cnndm"]), dataset["validation_cnndm"][2]
    assert columns["query_token"].shape[1] == 1919 and columns["query_chosen_token"].shape[1] == 2021
    assert columns["rejected_token"].shape[1] == 155
    assert row["query"] == "Article:\nNews.\nMore news.\n\n\n\nTL;DR:\n"
    assert pythia.decode([x for x in row["query_token"] if x != pythia.pad_token_id]) == row["query"]
    assert row["extra.confidence"] == 7 and row["batch"] == "cnndm2" and row["split"] == "valid2"
    assert (row["policies"], row["chosen_policy"], row["rejected_policy"]) == ("ref--sup2", "ref", "sup2")
    assert row["chosen"] == " Second one.<|endoftext|>" and row["choice"] == 1
    assert dataset["train"][0]["extra.confidence"] is None
    lengths = json.loads((tmp_path / "out/comparisons/metadata.json").read_text())["lengths"]
    assert lengths["validation_cnndm"] == {"query": 1919, "response": 155, "query_response": 2021}
    assert lengths["train"] == {"query": 512, "response": 169, "query_response": 638}


@pytest.mark.parametrize(("summary", "post"), [(80, 505), (80, 5), (50, 505)])
def test_a_response_that_does_not_fit_keeps_its_eos(tmp_path, pythia, summary, post):
    """It is longer than 53 tokens, or with its query than 562."""
    long = post_row(1, summary="word " * summary, post="word " * post)
    source = write_splits(tmp_path / "raw", train=[post_row(), long], validation=[post_row()])
    with pytest.warns(UserWarning, match="1 responses are cut"):
        row = run(tmp_path, sft=source)["sft"]["train"][1]
    length = row["reference_response_token_len"]
    assert length == min(53, 562 - row["query_token_len"]) <= summary
    tokens = row["reference_response_token"]
    assert tokens[length - 1] == pythia.eos_token_id and set(tokens[length:]) <= {pythia.pad_token_id}
    assert row["reference_response"] == " word" * (length - 1) + "<|endoftext|>"
    joint = [token for token in row["query_reference_response_token"] if token != pythia.pad_token_id]
    assert joint[-1] == pythia.eos_token_id and len(joint) == row["query_token_len"] + length


def test_what_fits_exactly_is_not_cut(tmp_path, pythia):
    """A query of 509 tokens and a response of 53, which are 562 together."""
    head = len(pythia(tldr_dataset.TLDR_TEMPLATE.format(**post_row(post="word"))).input_ids)
    rows = [post_row(post="word" + " word" * (509 - head), summary=" word" * 52)]
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        row = run(tmp_path, sft=write_splits(tmp_path / "raw", train=rows, validation=rows))["sft"]["train"][0]
    assert (row["query_token_len"], row["reference_response_token_len"]) == (509, 53)
    assert row["reference_response"] == " word" * 52 + "<|endoftext|>"


def test_a_post_may_hold_an_eos(tmp_path, pythia):
    rows = [post_row(post="one<|endoftext|>two")]
    row = run(tmp_path, sft=write_splits(tmp_path / "raw", train=rows, validation=rows))["sft"]["train"][0]
    assert row["query_token"].count(pythia.eos_token_id) == 1 and "one<|endoftext|>two" in row["query"]


def test_a_tokenizer_that_ends_every_text_in_eos_is_refused(tmp_path, pythia):
    """Else the query ends in EOS, and the response comes after the end of the text."""
    eos = (pythia.eos_token, pythia.eos_token_id)
    template = TemplateProcessing(single=f"$A {eos[0]}", special_tokens=[eos])
    pythia.backend_tokenizer.post_processor = template
    pythia.save_pretrained(tmp_path / "tokenizer")
    source = write_splits(tmp_path / "raw", train=[post_row()], validation=[post_row()])
    with pytest.raises(
        ValueError, match=r"field 'query': expected .* 0 \(EOS\) .* after a query, found .*add_eos_token"
    ):
        run(tmp_path, str(tmp_path / "tokenizer"), sft=source)
    assert not (tmp_path / "out").exists()


def test_another_query_length_computes_the_other_lengths(tmp_path):
    source = write_splits(tmp_path / "raw", train=[post_row(post="word " * 90)], validation=[post_row()])
    columns = token_columns(run(tmp_path, sft=source, max_query_length=60)["sft"]["train"])
    assert columns["query_token"].shape == (1, 60) and columns["reference_response_token"].shape[1] < 53


GOOD_SFT, GOOD_COMPARISONS = [post_row(1), post_row(2)], [comparison_row(1), comparison_row(2)]
BAD_ROWS = {
    "empty summary": ("sft", post_row(7, summary=" \n"), r"train row 1 \(id p7\), field 'summary': .*not empty"),
    "no summary": (
        "sft",
        post_row(7, summary=None),
        r"train row 1 \(id p7\), field 'summary': expected a text, found None",
    ),
    "title": ("sft", post_row(7, title=None), "field 'title': expected a text"),
    "PAD": ("sft", post_row(7, post="a [PAD] b"), r"field 'query': expected no token 50277"),
    "EOS": ("sft", post_row(7, summary="a<|endoftext|>b"), "field 'reference_response': expected no token"),
    "EOS last": ("sft", post_row(7, summary="a<|endoftext|>"), "field 'reference_response': expected no token"),
    "too long": (
        "sft",
        post_row(7, title="long " * 600),
        r"\(id p7\), field 'post': expected a query of at most 512 tokens",
    ),
    "same": (
        "comparisons",
        comparison_row(7, (" Same.", " Same. ")),
        r"train row 1 \(id c7\).*two different summaries",
    ),
    "choice": ("comparisons", comparison_row(7, choice=2), "field 'choice': expected 0 or 1, found 2"),
    "text choice": ("comparisons", comparison_row(7, choice=None), "field 'choice': expected 0 or 1, found None"),
    "empty": ("comparisons", comparison_row(7, (" First.", "")), r"field 'summaries\[1\]\.text': .*not empty"),
    "one summary": ("comparisons", comparison_row(7, (" First.",)), "field 'summaries': expected two objects"),
    "no object": (
        "comparisons",
        comparison_row(7) | {"summaries": [None, comparison_row()["summaries"][0]]},
        "field 'summaries': expected two objects with text and policy, found .None",
    ),
    "bare texts": (
        "comparisons",
        comparison_row(7) | {"summaries": [" a", " b"]},
        "field 'summaries': expected two obj",
    ),
    "part": (
        "comparisons",
        comparison_row(7, extra={"confidence": 0.5}),
        "'extra.confidence': expected 0 to 99, whole, or null, found 0.5",
    ),
    "article": ("comparisons", cnndm_row(7, article=None), "field 'article': expected a text, found None"),
    "post": ("comparisons", comparison_row(7, info={"id": "c7"}), "field 'subreddit': expected a text"),
}


def test_a_post_that_is_no_object_is_named(tmp_path):
    rows = [comparison_row(1, info="a post")]
    with pytest.raises(ValueError, match=r"train row 0 \(id None\), field 'info': expected an object .*found 'a post'"):
        run(tmp_path, comparisons=write_splits(tmp_path / "raw", train=rows, validation=rows))


@pytest.mark.parametrize("case", [*BAD_ROWS])
def test_bad_rows_stop_the_run_before_anything_is_written(tmp_path, case):
    kind, bad, message = BAD_ROWS[case]
    good = GOOD_SFT if kind == "sft" else GOOD_COMPARISONS
    source = write_splits(tmp_path / "raw", train=[good[0], bad, good[1]], validation=good)
    with pytest.raises(ValueError, match=message) as error:
        run(tmp_path, **{kind: source})
    assert f"--{kind} {source}: 1 bad rows" in str(error.value) and "--drop_bad_rows" in str(error.value)
    assert [path.name for path in tmp_path.iterdir()] == ["raw"]
    if case != "article":  # there it is the only row of its split
        train = run(tmp_path, **{kind: source}, drop_bad_rows=True)[kind]["train"]
        assert len(train) == 2 and "7" not in train["query"][0] + train["query"][1]
        dropped = json.loads((tmp_path / "out" / "run.json").read_text())["datasets"][kind]["dropped"]
        assert len(dropped) == 1 and f"train row 1 (id {'p' if kind == 'sft' else 'c'}7)" in dropped[0]


@pytest.mark.parametrize("field", ["subreddit", "title", "post", "summary"])
def test_missing_post_column(tmp_path, field):
    source = write_splits(tmp_path / "raw", train=[without(row, field) for row in GOOD_SFT], validation=GOOD_SFT)
    with pytest.raises(ValueError, match=rf"--sft .*split train: expected columns .* rename or add \['{field}'\]"):
        run(tmp_path, sft=source)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("field", ["info", "summaries", "choice", "batch", "split"])
def test_missing_comparison_column(tmp_path, field):
    rows = [without(row, field) for row in GOOD_COMPARISONS]
    source = write_splits(tmp_path / "raw", train=GOOD_COMPARISONS, validation=rows)
    with pytest.raises(ValueError, match=rf"split validation: expected columns .* rename or add \['{field}'\]"):
        run(tmp_path, comparisons=source)


def test_missing_split_and_rows(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"expected files train\.\* and validation\.\*, found \['train'\]"):
        run(tmp_path, sft=write_splits(tmp_path / "raw", train=GOOD_SFT))
    source = write_splits(tmp_path / "bad", train=[post_row(summary="")], validation=GOOD_SFT)
    with pytest.raises(ValueError, match="1 bad rows"):
        run(tmp_path, sft=source, drop_bad_rows=True)


def test_pad_that_is_eos(tmp_path, pythia):
    pythia.pad_token = pythia.eos_token
    pythia.save_pretrained(tmp_path / "tokenizer")
    with pytest.raises(ValueError, match="expected an EOS and another PAD"):
        run(
            tmp_path,
            str(tmp_path / "tokenizer"),
            sft=write_splits(tmp_path / "raw", train=GOOD_SFT, validation=GOOD_SFT),
        )


def test_optional_fields_may_be_null_first_and_given_later(tmp_path):
    """The type of a field that is null in the first 10 MB, or in a whole split, does not come from those rows."""
    early = [comparison_row(i) | {"worker": "w" * 6_000_000} for i in range(2)]
    late = comparison_row(2, extra={"confidence": 3}) | {"batch": "batch9"}
    late["summaries"][0]["note"] = "short"
    source = write_splits(tmp_path / "raw", train=[*early, late], validation=[comparison_row(), cnndm_row()])
    dataset = run(tmp_path, comparisons=source)["comparisons"]
    assert dataset["train"]["extra.confidence"][:] == [None, None, 3] and len(dataset["validation_cnndm"]) == 1


def test_confidence_and_article_may_be_absent(tmp_path):
    rows = [without(row, "extra") | {"info": without(row["info"], "article")} for row in GOOD_COMPARISONS]
    dataset = run(tmp_path, comparisons=write_splits(tmp_path / "raw", train=rows, validation=rows))["comparisons"]
    assert dataset["train"]["extra.confidence"][:] == [None, None]


def test_parquet_and_relative_folders_give_the_same(tmp_path, monkeypatch):
    jsonl = write_splits(tmp_path / "raw", train=GOOD_SFT, validation=GOOD_SFT)
    (tmp_path / "parquet").mkdir()
    for split in ("train", "validation"):
        Dataset.from_list(GOOD_SFT).to_parquet(tmp_path / "parquet" / f"{split}-00000-of-00001.parquet")
    expected = run(tmp_path / "a", sft=jsonl)["sft"]["train"][:]
    monkeypatch.chdir(tmp_path)
    assert run(tmp_path / "b", sft="parquet")["sft"]["train"][:] == expected
    assert run(tmp_path / "c", sft="raw")["sft"]["train"][:] == expected


def test_one_and_two_processes_give_the_same_dataset(tmp_path):
    rows = [post_row(i, post="\n".join([f"{i} words " * (i % 30)] * 3)) for i in range(2001)]
    source = write_splits(tmp_path / "raw", train=rows, validation=GOOD_SFT)
    one, two = (run(tmp_path / str(n), sft=source, num_proc=n, max_query_length=128)["sft"] for n in (1, 2))
    assert one["train"][:] == two["train"][:] and one["validation"][:] == two["validation"][:]


def test_files_and_refusal_to_overwrite(tmp_path, monkeypatch):
    monkeypatch.setattr(tldr_dataset, "write_counts", write_counts)
    comparisons = write_splits(tmp_path / "c", train=[comparison_row(), comparison_row(1)], validation=GOOD_COMPARISONS)
    settings = {"sft": write_splits(tmp_path / "s", train=GOOD_SFT, validation=GOOD_SFT), "comparisons": comparisons}
    datasets, out = run(tmp_path, **settings), tmp_path / "out"
    assert load_from_disk(out / "sft")["train"][:] == datasets["sft"]["train"][:]
    assert {path.name for path in out.iterdir()} == {"sft", "comparisons", "figures", "run.json"}
    names = {"sft_token_lengths", "comparisons_token_lengths", "policy_pairs", "confidence"}
    assert {path.name for path in (out / "figures").iterdir()} == {
        f"{x}.{end}" for x in names for end in ("csv", "png")
    }
    csv = (out / "figures" / "policy_pairs.csv").read_text().splitlines()
    assert csv[:2] == ["split,column,value,count", 'train,policies,"ref--sup2",2']
    told = json.loads((out / "run.json").read_text())
    assert told["finished"] and told["datasets"]["sft"]["rows"] == {"train": 2, "validation": 2}
    assert {*told["datasets"]["sft"]["raw_fingerprint"]} == {"train", "validation"} and "datasets" in told["versions"]
    assert told["policy_pairs"] == {"train": 1, "validation": 1} and told["args"]["num_proc"] == 1
    with pytest.raises(FileExistsError, match="--overwrite"):
        run(tmp_path, **settings)
    assert {*run(tmp_path, **settings | {"sft": ""}, overwrite=True)} == {"comparisons"}
    assert not (out / "sft").exists()


def test_what_a_killed_run_left_is_no_obstacle_and_no_part(tmp_path):
    (tmp_path / "out.unfinished" / "figures").mkdir(parents=True)
    (tmp_path / "out.unfinished" / "figures" / "old.csv").write_text("")
    run(tmp_path, sft=write_splits(tmp_path / "s", train=GOOD_SFT, validation=GOOD_SFT))
    assert {path.name for path in tmp_path.iterdir()} == {"s", "out"}
    assert not (tmp_path / "out" / "figures" / "old.csv").exists()


def test_overwrite_deletes_no_folder_but_a_runs(tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.txt").write_text("mine")
    with pytest.raises(FileExistsError):
        run(tmp_path, sft=write_splits(tmp_path / "s", train=GOOD_SFT, validation=GOOD_SFT), overwrite=True)
    assert (tmp_path / "out" / "thesis.txt").read_text() == "mine"


def test_same_files_have_the_same_fingerprint(tmp_path):
    source = write_splits(tmp_path / "s", train=GOOD_SFT, validation=GOOD_SFT)
    prints = []
    for name in "ab":
        run(tmp_path / name, sft=source)
        prints.append(json.loads((tmp_path / name / "out/run.json").read_text())["datasets"]["sft"]["raw_fingerprint"])
    assert prints[0] == prints[1] and prints[0]["train"] != prints[0]["validation"]


def test_local_data_is_not_compared_with_the_papers_pairs(tmp_path):
    source = write_splits(tmp_path / "raw", train=GOOD_COMPARISONS, validation=GOOD_COMPARISONS)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        run(tmp_path, comparisons=source)


def test_another_number_of_pairs_than_the_papers_is_told(tmp_path, monkeypatch):
    source = write_splits(tmp_path / "raw", train=GOOD_COMPARISONS, validation=[comparison_row(1), cnndm_row()])
    monkeypatch.setattr(Args, "comparisons", source)  # the default
    pairs = {"train": 1, "validation": 1, "validation_cnndm": 1}
    with pytest.warns(UserWarning, match=re.escape(f"pairs of policies, found {pairs}")):
        run(tmp_path, comparisons=source)
    monkeypatch.setattr(tldr_dataset, "PAPER_PAIRS", pairs)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        run(tmp_path, comparisons=source, overwrite=True)


@pytest.mark.parametrize("summary", ["\nhello world", "hello world", " hello world", "\t\n hello world"])
def test_a_response_begins_with_one_space(summary):
    """Llama 3's pattern makes one token of a colon and newlines after it, which would be lost with the colon."""
    split = pre_tokenizers.Split(Regex(r"[^\r\n\p{L}\p{N}]?\p{L}+| ?[^\s\p{L}\p{N}]+[\r\n]*|\s+"), "isolated")
    tokenizer = Tokenizer(models.BPE())
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.Sequence([split, byte_level]), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(special_tokens=["<eos>"], initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(["TL;DR:\nhello world: hello"] * 9, trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", pad_token="[PAD]")
    assert tokenizer.tokenize(":\nhello")[0] == ":Ċ"
    batch = {name: [value] for name, value in (post_row(summary=summary) | {"origin": "train row 0"}).items()}
    row = tldr_dataset.tokenize(batch, "sft", tokenizer, 512)
    assert row["reference_response"] == [" hello world<eos>"]
    assert tokenizer.decode(row["reference_response_token"][0]) == " hello world<eos>"


def test_details_are_marked_once():
    text = (ROOT / "tldr_dataset.py").read_text()
    marked = re.findall(r"^ *# Detail (\d+) \((.+)\):", text, re.MULTILINE)
    assert {int(number) for number, _ in marked} == {*range(1, 7)} and len({*marked}) == len(marked)
    assert [number for number, _ in marked if number != "3"] == [*{number: 0 for number, _ in marked if number != "3"}]
    assert len(text.splitlines()) <= 360


def test_files_of_a_split_may_differ_in_types_and_columns(tmp_path):
    source = write_splits(tmp_path / "raw", validation=GOOD_COMPARISONS)
    write_splits(tmp_path / "raw", **{"train-0": [comparison_row(i) for i in range(2)]})
    write_splits(tmp_path / "raw", **{"train-1": [comparison_row(2, extra={"confidence": 3}) | {"origin": "crowd"}]})
    (tmp_path / "raw" / "train-2.jsonl").write_text("")
    dataset = run(tmp_path, comparisons=source)["comparisons"]
    assert dataset["train"]["extra.confidence"][:] == [None, None, 3]


def test_columns_of_other_names_are_let_be(tmp_path):
    rows = [row | {"info": {"source": "csv"}, "origin": "x"} for row in GOOD_SFT]
    assert len(run(tmp_path, sft=write_splits(tmp_path / "raw", train=rows, validation=rows))["sft"]["train"]) == 2


def test_validation_without_posts(tmp_path):
    source = write_splits(tmp_path / "raw", train=GOOD_COMPARISONS, validation=[cnndm_row()])
    with pytest.raises(ValueError, match="expected posts in each, found {'train': 2, 'validation': 0}"):
        run(tmp_path, comparisons=source)


def test_a_long_post_after_an_empty_line_is_cut_and_not_lost(pythia):
    rows = [post_row(post=start + "wordy " * 300, name="row 0") for start in ("", "\n", " \n\n", "Hi.\n\n")]
    tokenize_queries(rows, tldr_dataset.TLDR_TEMPLATE, "post", pythia, 100)
    texts = [row["post"] for row in rows]
    assert all(len(row["query_token"]) == 100 and "wordy wordy" in row["post"] for row in rows[:3])
    assert texts[1].startswith("\nwordy") and texts[3] == "Hi.\n"  # the paper's rule where a paragraph is left


def test_comparisons_of_one_post_get_its_tokens_which_are_made_once(pythia):
    """Among them a post that is cut, and one that equals another from its start on."""
    posts, counts = ["Short.", "Long. " * 200, "Short. Not so.", "Long. " * 200, "Short.", "Short."], []

    def tokenizer(texts, **settings):
        counts.append(len(texts))
        return pythia(texts, **settings)

    rows, alone = ([post_row(post=post, name="row") for post in posts] for _ in range(2))
    tokenize_queries(rows, tldr_dataset.TLDR_TEMPLATE, "post", tokenizer, 100)
    for row in alone:
        tokenize_queries([row], tldr_dataset.TLDR_TEMPLATE, "post", pythia, 100)
    assert rows == alone and "problem" not in rows[1]
    assert counts[0] == 3 and set(counts[1:]) == {1}


@pytest.mark.parametrize("kind", ["working folder", "link"])
def test_the_output_may_be_the_working_folder_or_a_link(tmp_path, monkeypatch, kind):
    source = write_splits(tmp_path / "raw", train=GOOD_SFT, validation=GOOD_SFT)
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    monkeypatch.chdir(tmp_path / "real" if kind == "working folder" else tmp_path)
    output = "." if kind == "working folder" else "link"
    main(Args(output_dir=output, tokenizer=str(TOKENIZERS["pythia"]), sft=source, comparisons="", num_proc=1))
    monkeypatch.chdir(tmp_path)
    assert (tmp_path / "link" / "run.json").exists() and not (tmp_path / "real.unfinished").exists()


def test_confidences_of_zero_and_policies_with_dollars_and_quotes_are_drawn(tmp_path, monkeypatch):
    drawn = {}
    monkeypatch.setattr(tldr_dataset.Figure, "savefig", lambda figure, path, **_: drawn.update({path.stem: figure}))
    summaries = [{"text": text, "policy": policy} for text, policy in ((" a", "$\\x"), (" b", 'q$",'))]
    rows = [comparison_row(i, summaries=summaries, extra={"confidence": i}) for i in range(3)]
    dataset = run(tmp_path, comparisons=write_splits(tmp_path / "raw", train=rows, validation=rows))["comparisons"]
    for column in ("extra.confidence", "policies"):
        write_counts(dataset, [column], tmp_path / column.replace(".", "_"))
        drawn[column.replace(".", "_")].draw_without_rendering()
    assert sum(bar.get_height() for bar in drawn["extra_confidence"].axes[0].patches) == 3
    rows = list(csv.DictReader((tmp_path / "policies.csv").open()))
    assert [(row["value"], row["count"]) for row in rows] == [('$\\x--q$",', "3")] * 2


@pytest.mark.parametrize("longest", [5, 605, 638, 2021])
def test_the_longest_sequences_are_in_the_histogram(tmp_path, monkeypatch, longest):
    drawn = []
    monkeypatch.setattr(tldr_dataset.Figure, "savefig", lambda figure, path, **_: drawn.append(figure))
    rows = Dataset.from_dict({"query_chosen_token_len": [*range(1, longest + 1)]})
    write_counts(DatasetDict({"train": rows}), ["query_chosen_token_len"], tmp_path / "lengths")
    assert sum(bar.get_height() for bar in drawn[0].axes[0].patches) == longest
