"""The embedded world: TL;DR data whose TRUE quality is known, so that RLHF can be watched without the Hub or a judge.

A post tells of one person who did something ("my roommate Kevin wrecked my guitar") and states up to seven facts about
it, among distractors that look alike: a bystander with a deed of their own, other places, other numbers. A summary is
good when it carries the facts, invents nothing, repeats nothing, names the right person and is short. Posts and
summaries come from the same templates that `true_quality` parses, so a summary that a model wrote is judged from the
text of its query alone.

Write a world, or score samples of a policy (JSONL with `query, response, reference`, as ppo.py and sft.py write):

    python benchmark/synthetic.py --output_dir world --seed 1
    python benchmark/synthetic.py score benchmark/out/ppo_44413/samples_validation.jsonl

Output of the first form (benchmark/quickstart.sh trains on it):

    sft/{train,validation,test}.jsonl     posts with references of uneven quality, in the Hub's SFT schema
    comparisons/{train,validation}.jsonl  two policies' summaries and a noisy worker's choice, as the Hub has them
    pretrain/{train,validation}.jsonl     posts with summaries that carry every fact; stands for Pythia's pre-training
    tokenizer/, init/                     a byte-level tokenizer of whole words; a GPT-NeoX with random weights
    world.json                            settings, lengths in tokens, accuracy of true and of blind quality

Everything follows from the seed: two runs with the same arguments write the same bytes.
"""

from __future__ import annotations

import json
import math
import random
import re
import sys
from dataclasses import asdict, dataclass
from functools import cache, lru_cache
from pathlib import Path

import numpy as np
import tyro

# Lengths in tokens that users pass to tldr_dataset.py. A typical post is far below the limit, about 3% are above it.
MAX_QUERY_LENGTH = 144
RESPONSE_LENGTH = 48  # what the policy may sample; the longest reference is shorter
QUERY_TEMPLATE = "SUBREDDIT: r/{subreddit}\n\nTITLE: {title}\n\nPOST: {post}\n\nTL;DR:"
CNNDM_TEMPLATE = "Article:\n{article}\n\nTL;DR:\n"
EOS, PAD = "<|endoftext|>", "[PAD]"


@dataclass
class Args:
    output_dir: Path
    """Folder to write the world into; it must not hold one yet."""
    seed: int = 1
    """Seed of the data and of the random weights."""
    size: str = "small"
    """Size of the random model: tiny (tests), small (0.9M parameters) or medium (3M parameters)."""
    pretrain_rows: int = 16000
    """Rows of pretrain/train.jsonl."""
    sft_rows: int = 6400
    """Rows of sft/train.jsonl; PPO draws its prompts from the same posts."""
    comparison_rows: int = 16000
    """Rows of comparisons/train.jsonl."""
    eval_rows: int = 400
    """Rows of each SFT validation and test file; the comparisons' validation file has five times as many."""


# ---------------------------------------------------------------------------------------------------------------------
# Language: lexicons, and templates that serve both for writing and for parsing
# ---------------------------------------------------------------------------------------------------------------------

LEXICON: dict[str, list[str]] = {
    "relation": """roommate sister brother boss neighbor cousin coworker uncle aunt landlord teacher girlfriend
        boyfriend friend nephew niece stepmom stepdad""".split(),
    "name": """Anna Ben Carla David Emma Felix Grace Henry Irene Jack Karen Kevin Laura Marco Nina Oscar Paula Quinn
        Rosa Steve Tina Victor Wendy Xavier Yvonne Zach Alice Boris Clara Diego Elena Frank Hanna Ivan Julia Leo Maria
        Nora Peter Sofia""".split(),
    "verb": "wrecked lost sold burned painted scratched dropped damaged ruined kept copied shredded".split(),
    "object": """guitar bike laptop camera phone car couch jacket watch tent piano drone kettle lamp mirror notebook
        printer ring scooter skateboard speaker table telescope toaster trumpet vase violin wallet blender
        carpet""".split(),
    "place": """library beach office garage airport museum gym hospital park station market school church cinema
        theater bakery harbor hotel stadium campus farm bridge lake mall""".split(),
    "number": [str(n) for n in range(2, 14)],
    "unit": "days weeks months".split(),
    "cost": [str(n) for n in range(20, 980, 20)],
    "excuse": [
        "it was an accident", "it was already old", "the dog did it", "nobody told them", "it was a gift",
        "they needed money", "the rain did it", "I said it was fine", "someone else did it", "it was only a joke",
        "they were drunk", "they were tired", "it was too heavy", "the police took it", "it was insured",
        "I never asked for it back",
    ],
    "feeling": """angry sad confused betrayed guilty tired scared lonely relieved jealous ashamed worried bitter numb
        stupid hurt nervous calm""".split(),
    "action": [
        "call the police", "move out", "ask for money", "end the friendship", "forgive them", "talk to a lawyer",
        "tell our parents", "wait another month", "write a letter", "buy a new one", "change the locks", "stay quiet",
        "cancel our trip", "tell their boss", "post about it online", "sell their things", "take them to court",
        "ignore it", "demand an apology", "see a therapist",
    ],
}  # fmt: skip

# Facts of a post: which slots each holds, and what a summary earns for carrying it (5.0 together).
FACTS: dict[str, tuple[str, ...]] = {
    "deed": ("verb", "object"),
    "place": ("place",),
    "time": ("number", "unit"),
    "cost": ("cost",),
    "excuse": ("excuse",),
    "feeling": ("feeling",),
    "ask": ("action",),
}
WEIGHT = {"deed": 1.0, "place": 0.5, "time": 0.5, "cost": 0.75, "excuse": 0.75, "feeling": 0.5, "ask": 1.0}
INVENTED, WRONG_PERSON, REPEATED, STRAY, OVERLONG, EMPTY = 1.0, 1.0, 0.5, 0.1, 0.1, 1.0
LONGEST_GOOD_SUMMARY = 32  # words; every fact fits into it in the short phrasings, not in the long ones

POST_TEMPLATES: dict[str, list[str]] = {
    "who": ["this is about my {relation} {name}.", "I have a {relation} called {name}.", "{name} is my {relation}."],
    "deed": ["so {name} {verb} my {object}.", "my {object} got {verb} by {name}.", "{name} just {verb} my {object}."],
    "place": ["it happened at the {place}.", "this was at the {place}.", "at the {place}, of all things."],
    "time": ["that was {number} {unit} ago.", "it has been {number} {unit} since.", "it happened {number} {unit} ago."],
    "cost": ["it cost me {cost} dollars.", "a new one is {cost} dollars.", "I am out {cost} dollars."],
    "excuse": ["{name} says {excuse}.", "the excuse is that {excuse}.", "when asked, {name} told me {excuse}."],
    "feeling": ["honestly I feel {feeling}.", "it makes me {feeling}.", "now I am {feeling} all day."],
    "ask": ["should I {action}?", "part of me wants to {action}.", "do I {action} or not?"],
}
SUMMARY_TEMPLATES: dict[str, list[str]] = {
    "deed": [
        "my {relation} {name} {verb} my {object}", "my {relation} {verb} my {object}", "{name} {verb} my {object}",
        "my {object} got {verb} by my {relation}",
    ],
    "place": ["at the {place}"],
    "time": ["{number} {unit} ago"],
    "cost": ["it cost {cost} dollars", "I lost {cost} dollars over it"],
    "excuse": ["says {excuse}", "the excuse is that {excuse}"],
    "feeling": ["I feel {feeling}", "it makes me {feeling}"],
    "ask": ["should I {action}?", "not sure if I should {action}"],
}  # fmt: skip
# None of these matches a template of a fact: a careful reader tells them apart, a careless copier does not.
DISTRACTORS = [
    "my {relation} {name} once {verb} a {object} too, but that is another story.",
    "my {relation} {name} was there too.",
    "my {relation} {name} thinks it is not a big deal.",
    "we usually meet near the {place}.",
    "I grew up near a {place}.",
    "we have known each other for {number} years.",
    "I make {cost} dollars a week.",
    "most days I am not {feeling} at all.",
]
FILLER = [
    "sorry for the long post.", "english is not my first language.", "I could really use some advice.",
    "I know this sounds silly.", "there is more to it, of course.", "please be kind.", "we had a good time before.",
    "I have not slept much.", "throwaway for obvious reasons.", "thanks for reading.",
]  # fmt: skip
TITLES = [
    "need advice about my {relation}", "my {relation} {name} and my {object}", "trouble with {name}",
    "what do I do about {name}?", "my {relation} {verb} my {object}",
]  # fmt: skip
SUBREDDITS = "relationships advice legaladvice offmychest tifu family roommates work pettyrevenge self".split()
NEWS = [
    "our column answers the letters of our readers.", "the editors have shortened this letter.",
    "a reader writes to us this week.", "names were not changed.", "write to the editors with your own story.",
]  # fmt: skip
PADDING = ["so yeah", "to be honest", "I do not know what to do", "it is what it is", "long story short"]
# Up to two marks right after a word, or one that opens right before it. All else that is no word and no space is junk.
ORDINARY_MARKS = re.compile(r"""(?<=\w)[.,;:!?'")-]{1,2}|(?<!\S)["'(](?=\w)""")


@cache
def template_regex(template: str) -> re.Pattern:
    """A template as a regular expression with one named group per slot, to be matched on lower-cased text."""
    body = re.escape(template.rstrip(".?").lower())
    for slot, values in LEXICON.items():
        # Longest first, so that no value hides behind a shorter one that it starts with.
        choices = "|".join(re.escape(v.lower()) for v in sorted(values, key=len, reverse=True))
        body = body.replace(re.escape("{" + slot + "}"), f"(?P<{slot}>{choices})")
    return re.compile(rf"(?<!\w){body}(?!\w)")


@lru_cache(maxsize=1)  # for the two summaries of a comparison
def parse_post(query: str) -> dict[str, dict[str, str]]:
    """Facts that a query states: {"who": {"relation", "name"}, "deed": {"verb", "object"}, ...}, lower case."""
    text, facts = query.lower(), {}
    for kind, templates in POST_TEMPLATES.items():
        for match in filter(None, (template_regex(t).search(text) for t in templates)):
            facts[kind] = {slot: match[slot] for slot in FACTS.get(kind, ("relation", "name"))}
            break
    return facts


def parse_summary(summary: str) -> tuple[list[tuple[str, dict[str, str]]], int, int]:
    """Read a summary from left to right as clauses.

    Returns (clauses as (kind, slots), number of words and of junk characters outside every clause, number of words).
    """
    text = summary.lower()
    for special in (EOS, PAD.lower()):
        text = text.replace(special, " ")
    stray = len(re.findall(r"[^\w\s]", ORDINARY_MARKS.sub("", text)))
    text = " ".join(re.findall(r"\w+", text))
    clauses, words, at = [], len(text.split()), 0
    patterns = [(kind, template_regex(t)) for kind, templates in SUMMARY_TEMPLATES.items() for t in templates]
    while at < len(text):
        found = [(m.end(), kind, m) for kind, p in patterns if (m := p.match(text, at))]
        if found:
            end, kind, match = max(found, key=lambda f: f[0])
            clauses.append((kind, match.groupdict()))
        else:
            end = text.find(" ", at) if " " in text[at:] else len(text)
            stray += text[at:end] != "and"
        at = end + 1
    return clauses, stray, words


def is_stated(facts: dict[str, dict[str, str]], kind: str, slots: dict[str, str]) -> bool:
    """Whether a clause of a summary says what the post says, whose facts are those of `parse_post`."""
    return all(facts.get(kind, {}).get(slot) == slots[slot] for slot in FACTS[kind])


def judge_summary(query: str, summary: str) -> dict[str, float]:
    """What a summary does right and wrong, counted.

    Returns `quality` (see true_quality), `coverage` (weight of the facts carried over weight of the facts stated),
    counts `facts, invented, wrong_person, repeated, stray`, and `words`.
    Raises ValueError if the query states no deed, i.e. is not one of this world.
    """
    truth = parse_post(query)
    if "deed" not in truth or "who" not in truth:
        raise ValueError(
            "expected a query of the embedded world, which names a person and a deed; "
            f"found {query[:120]!r}. Score only samples of a world that `benchmark/synthetic.py --output_dir` wrote."
        )
    clauses, stray, words = parse_summary(summary)
    carried: set[str] = set()
    invented = wrong_person = 0
    for kind, slots in clauses:
        is_true = is_stated(truth, kind, slots)
        is_right_person = all(truth["who"][slot] == slots[slot] for slot in ("relation", "name") if slot in slots)
        invented += not is_true
        wrong_person += not is_right_person
        if is_true and is_right_person:
            carried.add(kind)
    repeated = len(clauses) - len({kind for kind, _ in clauses})
    earned = sum(WEIGHT[kind] for kind in carried)
    quality = earned - INVENTED * invented - WRONG_PERSON * wrong_person - REPEATED * repeated - STRAY * stray
    quality -= OVERLONG * max(0, words - LONGEST_GOOD_SUMMARY) + EMPTY * (words == 0)
    return {
        "quality": quality,
        "coverage": earned / sum(WEIGHT[kind] for kind in truth if kind in FACTS),
        "facts": len(carried),
        "invented": invented,
        "wrong_person": wrong_person,
        "repeated": repeated,
        "stray": stray,
        "words": words,
    }


def true_quality(query: str, summary: str) -> float:
    """Quality of `summary` for `query`, from the two texts alone; at most 5, with no floor.

    The sum of WEIGHT over the facts carried, less 1 for each invented fact and for a wrong person, 0.5 for each clause
    of a kind that was there already, 0.1 for each word or junk character outside every clause and for each word beyond
    32, and 1 if empty. A fact that the query lost by truncation counts as invented: who summarises can't know it. Not
    seen: what stray words do to the sense ("it is not true that ..." costs 0.1 a word), the word "and", a missing EOS.
    """
    return judge_summary(query, summary)["quality"]


def blind_quality(query: str, summary: str) -> float:
    """true_quality of `summary` for who believes all that it says: the query is not read."""
    clauses, stray, words = parse_summary(summary)
    kinds = {kind for kind, _ in clauses}
    quality = sum(WEIGHT[kind] for kind in kinds) - REPEATED * (len(clauses) - len(kinds)) - STRAY * stray
    return quality - OVERLONG * max(0, words - LONGEST_GOOD_SUMMARY) - EMPTY * (words == 0)


# ---------------------------------------------------------------------------------------------------------------------
# Writers: posts, and the policies that summarise them
# ---------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Policy:
    """How a writer of summaries behaves. Each field but `verbose` is a probability."""

    coverage: float  # of carrying each fact other than the deed (the question a little more often)
    invent: float = 0.0  # per clause: of stating a wrong value, or a fact that the post does not hold
    repeat: float = 0.0  # of saying one or two things twice
    wrong_person: float = 0.0  # of naming a bystander as the culprit
    mangle: float = 0.0  # of losing, swapping or doubling some words
    verbose: float = 0.0  # of padding


# The authors' own summaries are of uneven quality: usually they leave most facts out.
AUTHORS = [Policy(0.12, 0.01), Policy(0.3, 0.03, wrong_person=0.02, verbose=0.05), Policy(0.65, 0.05, mangle=0.05)]
AUTHOR_WEIGHTS = [0.35, 0.5, 0.15]

TRAIN_POLICIES: dict[str, Policy] = {
    "sup1": Policy(0.25, 0.25, repeat=0.2, wrong_person=0.2, mangle=0.3),
    "sup2": Policy(0.4, 0.12, repeat=0.1, wrong_person=0.1, mangle=0.1),
    "sup4": Policy(0.5, 0.04, repeat=0.03, wrong_person=0.03),
    "sup4_bo8": Policy(0.75, 0.04, repeat=0.05, verbose=0.1),
    "sup4_ppo_kl6": Policy(0.85, 0.08, repeat=0.1, wrong_person=0.1),
    "sup4_ppo_kl60": Policy(0.95, 0.35, repeat=0.4, wrong_person=0.2, verbose=0.2),
    "sup4_ppo_kl260": Policy(0.7, 0.5, repeat=0.7, wrong_person=0.4, mangle=0.6, verbose=0.5),
}
UNSEEN_POLICIES: dict[str, Policy] = {
    "sup5": Policy(0.6, 0.06, repeat=0.04, wrong_person=0.05),
    "sup5_bo64": Policy(0.9, 0.1, repeat=0.15, wrong_person=0.04),
    "sup5_ppo_kl15": Policy(0.98, 0.04, repeat=0.05, wrong_person=0.15, verbose=0.1),
    "pretrain": Policy(0.45, 0.3, repeat=0.3, wrong_person=0.3, mangle=0.4, verbose=0.3),
}
# Batches of the two comparison files: (batch, split, policies, share of the file's rows).
TRAIN_BATCHES = [("batch3", "train", TRAIN_POLICIES, 0.4), ("batch4", "train", TRAIN_POLICIES, 0.6)]
VALIDATION_BATCHES = [
    ("batch4", "valid1", TRAIN_POLICIES, 0.2),
    ("batch5", "valid1", TRAIN_POLICIES, 0.2),
    ("batch8", "valid2", UNSEEN_POLICIES, 0.2),
    ("batch9", "valid2", UNSEEN_POLICIES, 0.2),
    ("batch0_cnndm", "valid1", UNSEEN_POLICIES, 0.04),
    ("cnndm0", "valid2", UNSEEN_POLICIES, 0.08),
    ("cnndm2", "valid2", UNSEEN_POLICIES, 0.08),
]


@dataclass
class Post:
    subreddit: str
    title: str
    post: str
    facts: dict[str, dict[str, str]]
    other: dict[str, str]
    """Values of the distractors, one per slot: what a careless summary copies instead of the fact."""


def sample_slots(rng: random.Random, avoid: dict[str, str]) -> dict[str, str]:
    """One value per slot, each different from the one in `avoid`."""
    options = {slot: [v for v in LEXICON[slot] if v != value] for slot, value in avoid.items()}
    return {slot: rng.choice(options.get(slot, values)) for slot, values in LEXICON.items()}


def write_post(rng: random.Random, long_share: float = 0.03, changes: dict[str, str] | None = None) -> Post:
    """A post: who it is about, facts and distractors in shuffled order, the question last.

    Long posts get paragraphs without facts at the end, so that cutting whole paragraphs loses none. `changes` gives
    slots other values than rng would; a distractor that has such a value gets the old one.
    """
    slots = sample_slots(rng, {})
    other = sample_slots(rng, slots)
    for slot, value in (changes or {}).items():
        other[slot] = slots[slot] if other[slot] == value else other[slot]
        slots[slot] = value
    kinds = [k for k in FACTS if k in ("deed", "ask") or rng.random() < 0.8]
    facts = {kind: {slot: slots[slot] for slot in FACTS[kind]} for kind in kinds}
    facts["who"] = {slot: slots[slot] for slot in ("relation", "name")}

    def say(kind: str) -> str:
        return rng.choice(POST_TEMPLATES[kind]).format(**slots)

    body = [say(kind) for kind in kinds if kind not in ("deed", "ask")]
    body += [sentence.format(**other) for sentence in rng.sample(DISTRACTORS, rng.choice([1, 2, 2, 3]))]
    body += rng.sample(FILLER, rng.choice([0, 1, 1]))
    rng.shuffle(body)
    half = rng.randint(1, max(1, len(body) - 1))
    paragraphs = [[say("who"), say("deed")], body[:half], [*body[half:], say("ask")]]
    if rng.random() < long_share:
        paragraphs += [rng.sample(FILLER, 4) for _ in range(rng.randint(2, 4))]
    return Post(
        subreddit=rng.choice(SUBREDDITS),
        title=rng.choice(TITLES).format(**slots),
        post="\n\n".join(" ".join(p) for p in paragraphs),
        facts=facts,
        other=other,
    )


def mangle_words(rng: random.Random, text: str) -> str:
    words = text.split()
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(words))
        match rng.choice(["drop", "double", "swap"]):
            case "drop" if len(words) > 3:
                del words[at]
            case "swap":
                to = rng.randrange(len(words))
                words[at], words[to] = words[to], words[at]
            case _:
                words.insert(at, words[at])
    return " ".join(words)


def write_summary(rng: random.Random, post: Post, policy: Policy, content_seed: int) -> str:
    """A summary of `post`, without leading space.

    Which facts and which words are chosen follows `content_seed`, which errors are made follows `rng`: writers that
    share a content seed write alike, and differ in how much they carry and in their errors.
    """
    content = random.Random(content_seed)
    draw = {kind: (content.random(), content.choice(SUMMARY_TEMPLATES[kind])) for kind in FACTS}
    order = [*FACTS] if content.random() < 0.7 else ["deed", *content.sample([*FACTS][1:], len(FACTS) - 1)]
    joints = [content.choice([", ", ", ", " and ", ". "]) for _ in range(3 * len(FACTS))]
    clauses = []
    for kind in order:
        u, template = draw[kind]
        share = policy.coverage * (1.2 if kind == "ask" else 1.0)
        is_stated = kind in post.facts
        if kind != "deed" and not (u < share if is_stated else rng.random() < share * policy.invent):
            continue
        slots = {**post.facts["who"], **post.facts.get(kind, {})}
        if not is_stated or rng.random() < policy.invent:
            wrong = post.other if rng.random() < 0.4 else sample_slots(rng, slots)
            swapped = FACTS[kind] if not is_stated or kind != "deed" else [rng.choice(FACTS[kind])]
            slots |= {slot: wrong[slot] for slot in swapped}
        if kind == "deed" and rng.random() < policy.wrong_person:
            wrong = post.other if rng.random() < 0.6 else sample_slots(rng, slots)
            slots |= {slot: wrong[slot] for slot in ("relation", "name")}
        clauses.append(template.format(**slots))
    if rng.random() < policy.repeat:
        for clause in rng.sample(clauses, min(len(clauses), rng.choice([1, 1, 2]))):
            clauses.insert(rng.randint(1, len(clauses)), clause)
    if rng.random() < policy.verbose:
        for phrase in rng.sample(PADDING, rng.choice([1, 2])):
            clauses.insert(rng.randint(0, len(clauses)), phrase)
    text = clauses[0]
    for joint, clause in zip(joints, clauses[1:]):
        spaced = clause.split()[0] in ("at",) or clause.endswith("ago")
        text += (" " if spaced else " " if text.endswith("?") else joint) + clause
    if rng.random() < policy.mangle:
        text = mangle_words(rng, text)
    return text if text.endswith("?") else text + "."


def write_reference(rng: random.Random, post: Post) -> str:
    """The author's own summary."""
    author = rng.choices(AUTHORS, AUTHOR_WEIGHTS)[0]
    return write_summary(rng, post, author, rng.getrandbits(32))


def sft_rows(rng: random.Random, n: int, prefix: str, *, complete: bool = False) -> list[dict]:
    """Rows in the Hub's SFT schema; with `complete`, summaries carry every fact."""
    rows = []
    for i in range(n):
        post = write_post(rng)
        summary = write_summary(rng, post, Policy(1.0), rng.getrandbits(32)) if complete else write_reference(rng, post)
        rows.append({"id": f"{prefix}_{i}", "subreddit": post.subreddit, "title": post.title, "post": post.post,
                     "summary": summary})  # fmt: skip
    return rows


# ---------------------------------------------------------------------------------------------------------------------
# Comparisons
# ---------------------------------------------------------------------------------------------------------------------


def post_query(subreddit: str, title: str, post: str) -> str:
    return QUERY_TEMPLATE.format(subreddit=subreddit, title=title, post=post)


def write_article(rng: random.Random, post: Post) -> str:
    """A news column that prints the post as a letter: other words around the same facts, and longer."""
    before, after = rng.sample(NEWS, 2), rng.sample(FILLER, 5)
    return "\n\n".join([" ".join(before), post.post, " ".join(after)])


def compare(rng: random.Random, worker_noise: float, qualities: tuple[float, float]) -> tuple[int, int]:
    """A worker's choice (0 or 1) and confidence (1: surely the first, 4: barely, 6: barely the second, 9: surely).

    The worker sees the difference in quality through noise; the confidence is how large it looked, so that choices of
    low confidence are wrong more often.
    """
    seen = qualities[1] - qualities[0] + rng.gauss(0.0, worker_noise)
    strength = 1 + sum(abs(seen) > bound for bound in (0.6, 1.3, 2.2))
    return int(seen > 0), 5 + strength if seen > 0 else 5 - strength


def comparison_row(rng: random.Random, row_id: str, batch: str, split: str, policies: dict[str, Policy]) -> dict:
    """One row in the schema of openai/summarize_from_feedback, config comparisons."""
    is_news = "cnndm" in batch
    post = write_post(rng)
    article = write_article(rng, post) if is_news else None
    query = CNNDM_TEMPLATE.format(article=article) if is_news else post_query(post.subreddit, post.title, post.post)
    names = [rng.choice(["ref", *policies, *policies]), rng.choice([*policies])]
    rng.shuffle(names)
    texts = ["", ""]
    while texts[0] == texts[1]:
        seeds = [rng.getrandbits(32)] * 2 if rng.random() < 0.6 else [rng.getrandbits(32), rng.getrandbits(32)]
        texts = [
            write_reference(rng, post) if name == "ref" else write_summary(rng, post, policies[name], seed)
            for name, seed in zip(names, seeds)
        ]
    worker = rng.randrange(12)
    choice, confidence = compare(rng, 0.5 + worker / 11, tuple(true_quality(query, text) for text in texts))
    return {
        "info": {
            "id": row_id,
            "post": None if is_news else post.post,
            "title": None if is_news else post.title,
            "subreddit": None if is_news else post.subreddit,
            "article": article,
            "site": "cnn" if is_news else None,
        },
        "summaries": [{"text": " " + text, "policy": name, "note": None} for text, name in zip(texts, names)],
        "choice": choice,
        "worker": f"worker{worker:02d}",
        "batch": batch,
        "split": split,
        "extra": {"confidence": confidence},
    }


def write_twins(rng: random.Random) -> tuple[str, list[str], list[str]]:
    """Two posts that differ in the value of one fact -> (its kind, their queries, their summaries of every fact).

    What is true of one twin is wrong of the other, so that who never looks at the post is right for one of them. The
    kind is one that the posts state, or "who", the person; half of the changed values were a distractor's.
    """
    seed, content_seed = rng.getrandbits(32), rng.getrandbits(32)
    post = write_post(random.Random(seed), long_share=0.0)
    kind = rng.choice([*post.facts])
    value = post.other if rng.random() < 0.5 else sample_slots(rng, post.facts[kind])
    changed = post.facts[kind] if kind == "who" else [rng.choice(FACTS[kind])]
    twin = write_post(random.Random(seed), long_share=0.0, changes={slot: value[slot] for slot in changed})
    queries = [post_query(x.subreddit, x.title, x.post) for x in (post, twin)]
    return kind, queries, [" " + write_summary(rng, x, Policy(1.0), content_seed) for x in (post, twin)]


def comparison_rows(rng: random.Random, n: int, prefix: str, batches: list[tuple]) -> list[dict]:
    rows = []
    for batch, split, policies, share in batches:
        rows += [
            comparison_row(rng, f"{prefix}_{len(rows) + i}", batch, split, policies) for i in range(round(n * share))
        ]
    rng.shuffle(rows)
    return rows


# ---------------------------------------------------------------------------------------------------------------------
# Tokenizer, model, files
# ---------------------------------------------------------------------------------------------------------------------

# (layers, width, heads, rotary_pct). Copying needs two layers at least; small has 0.9M parameters, medium about 3M.
# Heads of 16, a quarter of each rotary, make the reward model look at the post sooner than heads of 32 did
# (docs/synthetic.md).
SIZES = {"tiny": (2, 32, 2, 0.5), "small": (4, 128, 8, 0.25), "medium": (6, 192, 12, 0.25)}


def build_tokenizer():
    """Byte-level BPE without merges whose vocabulary is the bytes and the world's words, each one token.

    EOS is id 0, as in GPT-NeoX; there is no pad token (the scripts add theirs). Any other text is spelt in bytes.
    The vocabulary comes from a sample of the language under a fixed seed, so all worlds share one tokenizer.
    """
    # Scoring needs neither library, so that they are imported where they are used.
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    splitter = pre_tokenizers.ByteLevel(add_prefix_space=False)
    rng, texts = random.Random(0), [" " + phrase for phrase in [*NEWS, *PADDING]]
    for _ in range(3000):
        post = write_post(rng, long_share=0.1)
        texts.append(post_query(post.subreddit, post.title, post.post))
        texts.append(" " + write_summary(rng, post, Policy(0.7, 0.2), rng.getrandbits(32)))
    texts.append(CNNDM_TEMPLATE.format(article="\n\n".join([*NEWS, *FILLER])))
    words = {token for text in texts for token, _ in splitter.pre_tokenize_str(text)}
    vocabulary = [EOS, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    vocabulary += sorted(words - set(vocabulary))
    model = models.BPE(vocab={t: i for i, t in enumerate(vocabulary)}, merges=[], ignore_merges=True)
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer, tokenizer.decoder = splitter, decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=EOS, eos_token=EOS, unk_token=EOS)


def write_model(tokenizer, size: str, seed: int, folder: Path) -> int:
    """Save a GPT-NeoX with random weights, its tokenizer beside it. Returns the number of parameters."""
    import torch
    from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

    layers, width, heads, rotary_pct = SIZES[size]
    config = GPTNeoXConfig(
        # Rounded up as Pythia's is, so that [PAD] at len(tokenizer) and the unused rows above it are in range.
        vocab_size=math.ceil((len(tokenizer) + 1) / 64) * 64,
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        intermediate_size=4 * width,
        max_position_embeddings=512,
        # Copying words out of the post appears three times as early with tied embeddings, since a copy is then the
        # same direction going in and out, and with larger weights than the usual 0.02, which suit larger widths.
        tie_word_embeddings=True,
        initializer_range=0.1,
        rotary_pct=rotary_pct,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    torch.manual_seed(seed)
    model = GPTNeoXForCausalLM(config)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return sum(p.numel() for p in model.parameters())


def choice_accuracy(rows: list[dict], quality) -> dict[str, float]:
    """Share of the rows whose choice is the summary of higher quality(query, summary); a tie counts a half. By part.

    With true_quality it is the noise ceiling, about what a perfect reward model reaches, since it can know the quality
    and not the workers' noise; with blind_quality, what one reaches that believes every summary and weighs it as true
    quality does. That is no bound for who never looks at the post: a classifier of summaries alone may learn from the
    comparisons which policies invent, and do better.
    """
    parts: dict[str, list[float]] = {}
    for row in rows:
        info, is_news = row["info"], row["info"]["article"] is not None
        query = (
            CNNDM_TEMPLATE.format(article=info["article"])
            if is_news
            else post_query(info["subreddit"], info["title"], info["post"])
        )
        first, second = (quality(query, s["text"]) for s in row["summaries"])
        right = 0.5 if first == second else float((second > first) == bool(row["choice"]))
        split = "validation_cnndm" if is_news else "validation"
        for part in (split, f"{split}/{row['split']}", f"{split}/{row['batch']}"):
            parts.setdefault(part, []).append(right)
    return {part: round(float(np.mean(rights)), 4) for part, rights in sorted(parts.items())}


def token_lengths(tokenizer, rows: list[dict]) -> dict[str, float]:
    queries = [post_query(r["subreddit"], r["title"], r["post"]) for r in rows]
    query_lengths = np.array([len(ids) for ids in tokenizer(queries).input_ids])
    responses = [" " + r["summary"] + EOS for r in rows]
    response_lengths = np.array([len(ids) for ids in tokenizer(responses).input_ids])
    return {
        "query_mean": round(float(query_lengths.mean()), 1),
        "query_max": int(query_lengths.max()),
        "query_over_limit": round(float((query_lengths > MAX_QUERY_LENGTH).mean()), 4),
        "reference_mean": round(float(response_lengths.mean()), 1),
        "reference_max": int(response_lengths.max()),
    }


def write_jsonl(path: Path, rows: list[dict]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def main(args: Args) -> None:
    if args.size not in SIZES:
        raise ValueError(f"expected --size to be one of {', '.join(SIZES)}; found {args.size!r}")
    # The smallest batch of CNN/DM-like pairs is 0.04 of five times eval_rows: 3 give it a row.
    for name, least in {"pretrain_rows": 1, "sft_rows": 1, "comparison_rows": 1, "eval_rows": 3}.items():
        if (rows := getattr(args, name)) < least:
            raise ValueError(f"expected --{name} to be {least} or more, so that every split has rows; found {rows}")
    if (args.output_dir / "world.json").exists():
        raise FileExistsError(
            f"expected no world in {args.output_dir}, found its world.json; "
            "give another --output_dir, or delete that folder to build it again"
        )

    def rng(part: str) -> random.Random:
        # A generator for each file, so that the length of one changes nothing in another.
        return random.Random(f"{args.seed}/{part}")

    files = {
        "sft/train": sft_rows(rng("sft"), args.sft_rows, "train"),
        "sft/validation": sft_rows(rng("sft_validation"), args.eval_rows, "validation"),
        "sft/test": sft_rows(rng("sft_test"), args.eval_rows, "test"),
        "pretrain/train": sft_rows(rng("pretrain"), args.pretrain_rows, "pretrain", complete=True),
        "pretrain/validation": sft_rows(rng("pretrain_validation"), args.eval_rows, "pretrain_val", complete=True),
        "comparisons/train": comparison_rows(rng("comparisons"), args.comparison_rows, "train", TRAIN_BATCHES),
        "comparisons/validation": comparison_rows(
            rng("comparisons_validation"), 5 * args.eval_rows, "validation", VALIDATION_BATCHES
        ),
    }
    for name, rows in files.items():
        write_jsonl(args.output_dir / f"{name}.jsonl", rows)
    tokenizer = build_tokenizer()
    tokenizer.save_pretrained(args.output_dir / "tokenizer")
    parameters = write_model(tokenizer, args.size, args.seed, args.output_dir / "init")
    world = {
        "args": {k: v for k, v in asdict(args).items() if k != "output_dir"},
        "parameters": parameters,
        "vocabulary": len(tokenizer),
        "max_query_length": MAX_QUERY_LENGTH,
        "response_length": RESPONSE_LENGTH,
        "token_lengths": {name: token_lengths(tokenizer, files[f"{name}/train"]) for name in ("sft", "pretrain")},
        "rows": {name: len(rows) for name, rows in files.items()},
        "noise_ceiling": choice_accuracy(files["comparisons/validation"], true_quality),
        "blind_accuracy": choice_accuracy(files["comparisons/validation"], blind_quality),
        "reference_quality": round(
            float(np.mean([true_quality(post_query(r["subreddit"], r["title"], r["post"]), r["summary"])
                           for r in files["sft/validation"]])), 4),
    }  # fmt: skip
    # Last, so that its presence says that the world is whole.
    (args.output_dir / "world.json").write_text(json.dumps(world, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(world, indent=2))


# ---------------------------------------------------------------------------------------------------------------------
# Scoring
# ---------------------------------------------------------------------------------------------------------------------


@dataclass
class ScoreArgs:
    file: tyro.conf.Positional[Path]
    """JSONL with `query`, `response` and `reference` in each row."""
    bootstrap: int = 2000
    """Resamples of the rows for the intervals."""


def mean_interval(x, bootstrap: int = 2000) -> list[float]:
    """95% percentile bootstrap interval [low, high] of the mean of x (N,), under a fixed seed."""
    draws = np.random.default_rng(0).integers(len(x), size=(bootstrap, len(x)))
    return [round(float(q), 4) for q in np.percentile(np.asarray(x)[draws].mean(axis=1), [2.5, 97.5])]


def score_rows(rows: list[dict], bootstrap: int = 2000) -> dict:
    """True quality of responses and references, and the win rate over the references (a tie is half a win).

    `[low, high]` are the intervals of mean_interval, over rows.
    """
    response = [judge_summary(row["query"], row["response"]) for row in rows]
    reference = [judge_summary(row["query"], row["reference"]) for row in rows]
    quality = np.array([r["quality"] for r in response])  # (N,)
    reference_quality = np.array([r["quality"] for r in reference])  # (N,)
    wins = np.where(quality == reference_quality, 0.5, quality > reference_quality)  # (N,)

    def mean(x) -> float:
        return round(float(np.mean(x)), 4)

    return {
        "rows": len(rows),
        "quality": mean(quality),
        "quality_interval": mean_interval(quality, bootstrap),
        "reference_quality": mean(reference_quality),
        "win_rate": mean(wins),
        "win_rate_interval": mean_interval(wins, bootstrap),
        "coverage": mean([r["coverage"] for r in response]),
        "reference_coverage": mean([r["coverage"] for r in reference]),
        "facts": mean([r["facts"] for r in response]),
        **{f"{k}_share": mean([r[k] > 0 for r in response]) for k in ("invented", "wrong_person", "repeated", "stray")},
        "words": mean([r["words"] for r in response]),
        "reference_words": mean([r["words"] for r in reference]),
    }


def read_samples(path: Path) -> list[dict]:
    """Samples of a policy: rows with query, response and reference. Raises ValueError, with file and line, for a line
    that is torn, lacks one of these or is not of a world; and for a file without rows."""
    rows = []
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            texts = [row.get(name) for name in ("query", "response", "reference")] if isinstance(row, dict) else [None]
            if not all(isinstance(text, str) for text in texts):
                raise ValueError(f"no texts query, response and reference in {line.decode()[:120]!r}")
            judge_summary(row["query"], row["response"])
        except ValueError as error:  # of json.loads, too
            expected = "expected a sample, as ppo.py and sft.py write them at the end of a run"
            raise ValueError(f"{path}, line {number}: {expected}; {error}") from error
        rows.append(row)
    if not rows:
        raise ValueError(f"expected at least one row in {path}, found none")
    return rows


def score(args: ScoreArgs) -> None:
    print(json.dumps(score_rows(read_samples(args.file), args.bootstrap), indent=2))


if __name__ == "__main__":
    if sys.argv[1:2] == ["score"]:
        score(tyro.cli(ScoreArgs, prog="synthetic.py score", args=sys.argv[2:]))
    else:
        main(tyro.cli(Args, description=__doc__))
