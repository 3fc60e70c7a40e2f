"""What alignment changed: every token of a response, coloured by its rank under the base model.

N+ Appendix F.2, Table 8 and Appendix K (after Lin et al., 2024):

    python benchmark/visualize_tokens.py --base_model pythia-1b --names SFT PPO --samples \
        models/pythia-1b/sft_44413/samples_validation.jsonl models/pythia-1b/ppo_44413/samples_validation.jsonl
    python benchmark/visualize_tokens.py --base_model pythia-1b --models my/ppo my/dpo --posts samples_validation.jsonl

Inputs:  samples as the training scripts write them (`query, response, reference[, score, reference_score]`), or folders
         of models that are sampled here, and the base model.
Outputs: <output_dir>/index.html (one file, no scripts), shifted.png and shifted.csv (shares by position).

The base model reads query and response. A token that it ranks first is unshifted (blue), second or third marginal
(yellow), further down shifted (red): the last is what the aligned model does differently.

Shapes: B rows of a batch, T response tokens with EOS, V vocabulary.
"""

import base64
import html
import json
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import pandas as pd
import torch
import tyro
from matplotlib.figure import Figure
from transformers import AutoModelForCausalLM, AutoTokenizer

SIZES = ("70m", "160m", "410m", "1b", "1.4b", "2.8b", "6.9b", "12b")
PYTHIA = {f"pythia-{size}": f"EleutherAI/pythia-{size}-deduped" for size in SIZES}
KINDS = {"unshifted": "#d3e6ff", "marginal": "#ffefb0", "shifted": "#ffc4bd"}  # rank 1; 2 and 3; over 3


@dataclass
class Args:
    base_model: str = "pythia-1b"
    """Base model: pythia-{70m,160m,410m,1b,1.4b,2.8b,6.9b,12b}, any Hub id, or a local folder."""
    samples: tuple[str, ...] = ()
    """JSONL files of samples, one for each aligned model."""
    models: tuple[str, ...] = ()
    """Aligned models (folders or Hub ids) that are sampled here, besides or instead of --samples."""
    posts: str = ""
    """JSONL file of `query, reference` that --models summarise. Empty: the first of --samples."""
    names: tuple[str, ...] = ()
    """Names of the models, first those of --samples, then those of --models. Empty: from the paths."""
    output_dir: str = "runs/visualize_tokens"
    """Folder for the page, the plot and the table."""
    num_posts: int = 10
    """Posts on the page."""
    num_samples: int = 200
    """Posts that the shares by position are taken over."""
    response_length: int = 53
    """Longest response, in tokens; a shorter one is taken to have ended with EOS."""
    temperature: float = 0.01
    """Sampling temperature of --models; 0.01 is all but greedy. The base model's own response is greedy."""
    micro_batch_size: int = 4
    """Rows in one forward pass."""
    seed: int = 44413
    """Seed of sampling."""


def load_rows(path: str, fields: tuple[str, ...]) -> list[dict]:
    """Rows of a JSONL file. Raises ValueError for an empty file or a missing field."""
    rows = [json.loads(line) for line in open(path, encoding="utf-8") if line.strip()]
    if not rows:
        raise ValueError(f"{path}: expected samples, found an empty file; run the script that writes it again")
    for number, row in enumerate(rows, 1):
        for field in ("score", "reference_score"):
            if not isinstance(row.get(field), int | float | None):
                raise ValueError(f"{path}:{number}: expected a number or null as {field}, found {row[field]!r:.80}")
        if missing := [field for field in fields if not isinstance(row.get(field), str)]:
            raise ValueError(f"{path}:{number}: expected text in the fields {fields}, found none in {missing}")
    return rows


def load_model(path: str):
    """(model, tokenizer), in evaluation mode on the GPU if there is one."""
    path = PYTHIA.get(path, path)
    # ranks of close logits differ in bf16, and Pythia is saved in fp16
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    return model.to("cuda" if torch.cuda.is_available() else "cpu"), AutoTokenizer.from_pretrained(path)


def encode_response(tokenizer, text: str, response_length: int) -> list[int]:
    """Tokens of a response. Sample files hold no EOS: a response with room for one ended with it."""
    tokens = tokenizer(text, add_special_tokens=False).input_ids[:response_length]
    return tokens + [tokenizer.eos_token_id] * (len(tokens) < response_length)


def encode_query(model, tokenizer, query: str, response_length: int) -> list[int]:
    """Tokens of a query; of one that does not fit into the model's context with a response, the end."""
    context = getattr(model.config, "max_position_embeddings", None) or 10**9
    return tokenizer(query).input_ids[-max(context - response_length, 1) :]


@torch.no_grad()
def generate(model, tokenizer, query: str, response_length: int, temperature: float) -> list[int]:
    """Tokens of a sampled response, with its EOS if it ended; temperature 0 is greedy."""
    query = torch.tensor([encode_query(model, tokenizer, query, response_length)], device=model.device)
    sampling = {"temperature": temperature, "top_k": 0, "top_p": 1.0} if temperature else {}
    unused = list(range(len(tokenizer), model.config.vocab_size))  # rows of the embedding without a token
    sampling |= {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.eos_token_id}
    sampling |= {"do_sample": bool(temperature), "suppress_tokens": unused or None}
    output = model.generate(query, attention_mask=torch.ones_like(query), max_new_tokens=response_length, **sampling)
    return output[0, query.shape[1] :].tolist()


@torch.no_grad()
def rank_tokens(model, num_tokens: int, queries: list[list[int]], responses: list[list[int]]) -> list[list[tuple]]:
    """For each token of each response: (rank, probability, [(token, probability) of the base model's first three]).

    rank = 1 + the number of tokens with a higher logit; `num_tokens` entries of the vocabulary belong to a token.
    """
    length = max(len(q) + len(r) for q, r in zip(queries, responses))
    rows = [[-1] * (length - len(q) - len(r)) + q + r for q, r in zip(queries, responses)]
    tokens = torch.tensor(rows, device=model.device)  # (B, L), padded on the left with -1
    mask = tokens >= 0
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    width = max(map(len, responses))
    inputs = {"input_ids": tokens * mask, "attention_mask": mask.long(), "position_ids": positions}
    logits = model(**inputs, logits_to_keep=width + 1).logits[:, :-1, :num_tokens].float()  # (B, T, V)
    probs = logits.softmax(-1)
    chosen = tokens[:, -width:].clamp(min=0, max=num_tokens - 1).unsqueeze(-1)  # (B, T, 1)
    ranks = 1 + (logits > logits.gather(-1, chosen)).sum(-1)  # (B, T)
    chosen_probs, top = probs.gather(-1, chosen).squeeze(-1), probs.topk(3)
    return [
        [
            (
                ranks[i, j].item(),
                chosen_probs[i, j].item(),
                list(zip(top.indices[i, j].tolist(), top.values[i, j].tolist())),
            )
            for j in range(width - len(response), width)
        ]
        for i, response in enumerate(responses)
    ]


def kind_of(rank: int) -> str:
    """Unshifted, marginal or shifted (Lin et al., 2024)."""
    return "unshifted" if rank == 1 else "marginal" if rank <= 3 else "shifted"


def decode_pieces(tokenizer, tokens: list[int]) -> list[str]:
    """Text that each token adds; "" for the first bytes of a character that several tokens make up."""
    texts = [tokenizer.decode(tokens[:end], clean_up_tokenization_spaces=False) for end in range(len(tokens) + 1)]
    texts = [text.rstrip("\ufffd") if end < len(tokens) else text for end, text in enumerate(texts)]
    return [after[len(before) :] for before, after in zip(texts, texts[1:])]


def render_tokens(tokenizer, tokens: list[int], ranked: list[tuple]) -> str:
    """HTML of a response: a coloured span per token, with rank and probabilities as its tooltip."""
    spans = []
    for piece, (rank, prob, top) in zip(decode_pieces(tokenizer, tokens), ranked):
        first = [f"{i}. {tokenizer.decode([token])!r} {p:.1%}" for i, (token, p) in enumerate(top, 1)]
        title = html.escape("\n".join([f"rank {rank}, probability {prob:.2%}", "base model:", *first]))
        text = html.escape(piece).replace("\n", "⏎\n") or "·"
        spans.append(f'<span class="{kind_of(rank)}" title="{title}">{text}</span>')
    return "".join(spans)


def shares_by_position(ranked: dict[str, list[list[tuple]]]) -> pd.DataFrame:
    """Share of each kind by position, counted from the start (1, 2, ...) and from the end (-1 is the last token)."""
    rows = [
        (name, side, position, kind_of(rank))
        for name, responses in ranked.items()
        for response in responses
        for index, (rank, _, _) in enumerate(response)
        for side, position in (("start", index + 1), ("end", index - len(response)))
    ]
    table = pd.DataFrame(rows, columns=["name", "from", "position", "kind"])
    counts = table.groupby(["name", "from", "position"], sort=False).kind.value_counts().unstack(fill_value=0)
    counts = counts.reindex(columns=list(KINDS), fill_value=0)
    shares = counts.div(counts.sum(axis=1), axis=0).assign(n=counts.sum(axis=1))
    shares = shares.sort_index(level=["from", "position"]).reset_index()
    return shares.sort_values("name", key=lambda names: names.map(list(ranked).index), kind="stable")


def plot_shares(shares: pd.DataFrame, path: Path) -> None:
    figure = Figure(figsize=(11, 3.8), layout="constrained")
    for axis, side in zip(figure.subplots(1, 2, sharey=True), ("start", "end")):
        for name, table in shares[shares["from"] == side].groupby("name", sort=False):
            table = table[table.n >= 0.1 * table.n.max()]  # few responses reach the other positions
            axis.plot(table.position, table.shifted, "o-", markersize=3, label=name)
        axis.set(xlabel=f"position from the {side}", ylabel="share of shifted tokens", ylim=(0, 1))
        axis.legend(fontsize=8)
    figure.savefig(path, dpi=110)


STYLE = """body{font:15px/1.5 system-ui,sans-serif;max-width:1100px;margin:2em auto;padding:0 1em;color:#222}
table{border-collapse:collapse;width:100%;margin:0 0 2.5em}td,th{border:1px solid #ccc;padding:.5em;vertical-align:top}
th{text-align:left;background:#f3f3f3}td:first-child{width:9em;font-weight:600}td:last-child{width:5em;text-align:right}
.text{white-space:pre-wrap}small{font-weight:400;color:#555}
img{max-width:100%}span{border-radius:2px;padding:1px 0;margin-right:1px}
.marginal{border-bottom:2px dotted #a80}.shifted{border-bottom:2px solid #b21}"""


def render_page(title: str, posts: list[dict], plot: Path) -> str:
    """The page: legend, plot, and a table for each post, {query, rows: [(type, HTML, ranks or None, score)]}."""
    style = STYLE + "".join(f".{kind}{{background:{colour}}}" for kind, colour in KINDS.items())
    legend = (
        '<span class="unshifted">unshifted: the base model ranks the token first</span>, '
        '<span class="marginal">marginal: second or third</span>, <span class="shifted">shifted: further down</span>'
    )
    image = base64.b64encode(plot.read_bytes()).decode()
    parts = [f'<!DOCTYPE html><html lang="en"><meta charset="utf-8"><title>{html.escape(title)}</title>']
    parts += [f"<style>{style}</style><h1>{html.escape(title)}</h1><p>{legend}. Point at a token for probabilities."]
    parts += [f'<p><img alt="share of shifted tokens by position" src="data:image/png;base64,{image}">']
    for number, post in enumerate(posts, 1):
        parts.append(f"<h2>Post {number}</h2><table><tr><th>Type<th>Content<th>Score (RM)</tr>")
        parts.append(f'<tr><td>Query<td class="text">{html.escape(post["query"])}<td>N/A</tr>')
        for name, content, ranked, score in post["rows"]:
            kinds = [kind_of(rank) for rank, _, _ in ranked or []]
            share = ", ".join(f"{kinds.count(kind) / len(kinds):.0%} {kind}" for kind in KINDS) if kinds else ""
            shown = "N/A" if score is None else f"{score:.4f}"
            parts.append(
                f'<tr><td>{html.escape(name)}<br><small>{share}</small><td class="text">{content}<td>{shown}</tr>'
            )
        parts.append("</table>")
    return "\n".join(parts)


def collect_responses(args: Args, names: list[str]) -> tuple[list[dict], dict[str, list[dict]]]:
    """(posts, {model: a row for each post}) from the sample files and the models that are sampled here."""
    if not args.samples and not (args.models and args.posts):
        raise ValueError("expected --samples, or --models with --posts, found neither")
    posts = load_rows(args.posts or args.samples[0], ("query", "reference"))
    posts = posts[: max(args.num_posts, args.num_samples)]
    files = [load_rows(path, ("query", "response")) for path in args.samples]
    for path in args.models:
        torch.manual_seed(args.seed)
        model, tokenizer = load_model(path)
        tokens = [generate(model, tokenizer, p["query"], args.response_length, args.temperature) for p in posts]
        texts = [tokenizer.decode(t, skip_special_tokens=True, clean_up_tokenization_spaces=False) for t in tokens]
        files.append([{"query": post["query"], "response": text} for post, text in zip(posts, texts)])
    responses = {}
    for name, rows in zip(names, files):
        of_query = defaultdict(list)  # the rows of each query, in their order
        for row in rows:
            of_query[row["query"]].append(row)
        if missing := [post["query"] for post in posts if post["query"] not in of_query]:
            found = f"{len(missing)} posts without one, such as {missing[0][:80]!r}"
            raise ValueError(f"{name}: expected a response to every post, found {found}; sample from the same split")
        same_query = [of_query[post["query"]] for post in posts]
        responses[name] = [rows.pop(0) if len(rows) > 1 else rows[0] for rows in same_query]
    return posts, responses


def main(args: Args) -> None:
    for name in ("num_posts", "num_samples", "response_length", "micro_batch_size"):
        if getattr(args, name) < 1:
            raise ValueError(f"--{name}: expected 1 or more, found {getattr(args, name)}")
    paths = args.samples + args.models
    names = list(args.names or [str(Path(p).parent if p in args.samples else Path(p)) for p in paths])
    if len(set(names)) != len(paths) or {"Reference", "Base model"} & set(names):
        raise ValueError(f"expected a different name for each of {len(paths)} models, found {names}; give --names")
    posts, responses = collect_responses(args, names)
    model, tokenizer = load_model(args.base_model)
    responses["Reference"] = [post | {"response": post["reference"]} for post in posts]

    ranked, tokens = defaultdict(list), {}
    for name, rows in responses.items():
        tokens[name] = [encode_response(tokenizer, row["response"], args.response_length) for row in rows]
        queries = [encode_query(model, tokenizer, post["query"], args.response_length) for post in posts]
        for i in range(0, len(posts), args.micro_batch_size):
            batch = slice(i, i + args.micro_batch_size)
            ranked[name] += rank_tokens(model, len(tokenizer), queries[batch], tokens[name][batch])

    pages = []
    for i, post in enumerate(posts[: args.num_posts]):
        rows = []
        for name, of_post in responses.items():
            score = of_post[i].get("reference_score" if name == "Reference" else "score")
            content = render_tokens(tokenizer, tokens[name][i], ranked[name][i])
            rows.append((name, content, ranked[name][i], score))
        base_tokens = generate(model, tokenizer, post["query"], args.response_length, temperature=0)
        base_text = tokenizer.decode(base_tokens, clean_up_tokenization_spaces=False)
        rows.append(("Base model", html.escape(base_text), None, None))
        pages.append({"query": post["query"], "rows": rows})

    folder = Path(args.output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    shares = shares_by_position({name: rows[: args.num_samples] for name, rows in ranked.items()})
    shares.to_csv(folder / "shifted.csv", index=False)
    plot_shares(shares, folder / "shifted.png")
    page = render_page(f"Tokens that {Path(args.base_model).name} would not have chosen", pages, folder / "shifted.png")
    (folder / "index.html").write_text(page, encoding="utf-8")
    for name, rows in ranked.items():
        kinds = [kind_of(rank) for row in rows for rank, _, _ in row]
        print(f"{name}: " + ", ".join(f"{kinds.count(kind) / len(kinds):.1%} {kind}" for kind in KINDS))
    print(f"page: {folder / 'index.html'}")


if __name__ == "__main__":
    main(tyro.cli(Args))
