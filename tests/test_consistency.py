"""What holds between the scripts: shared code is one code, flags are read, imports do nothing, docs are true."""

import ast
import difflib
import os
import re
import runpy
import socket
import subprocess
import sys
from itertools import combinations
from pathlib import Path

import pytest
from conftest import ROOT, read_events

SCRIPTS = sorted(path.stem for path in ROOT.glob("*.py"))
STAGES = ["sft", "reward", "ppo", "dpo", "ilql"]
# what differs between the stages on purpose, and how
DEFAULTS = {
    "batch_size": {"sft": 128, "reward": 64, "ppo": 512, "dpo": 64, "ilql": 64},
    "dataset": {
        "sft": "vwxyzjn/summarize_from_feedback_tldr_3_filtered_oai_preprocessing_1706381144",
        "reward": "vwxyzjn/summarize_from_feedback_oai_preprocessing_1706381144",
        "ppo": "vwxyzjn/summarize_from_feedback_tldr_3_filtered_oai_preprocessing_1706381144",
        "dpo": "vwxyzjn/summarize_from_feedback_oai_preprocessing_1706381144",
        "ilql": "vwxyzjn/summarize_from_feedback_oai_preprocessing_1706381144",
    },
    "lr": {"sft": 3e-6, "reward": 3e-6, "ppo": 3e-6, "dpo": 3e-6, "ilql": 1e-6},
    "gamma": {"ppo": 1.0, "ilql": 0.99},
}
# the base model, or a name; posts, or comparisons; their use; cosine, or linear; of rollouts, or of evaluations
TEXTS = {"model", "dataset", "sft_dataset", "lr", "temperature"}
# fields of other scripts that have a name in common with a stage's, and another default and text
OTHERS = {"judge": {"output_dir", "seed", "tokenizer"}, "tldr_dataset": {"output_dir", "push_to_hub", "tokenizer"}}


def definitions(script: str) -> dict[str, str]:
    """Source of each top-level function, class and constant of a script, decorators included."""
    text = (ROOT / f"{script}.py").read_text()
    lines, found = text.splitlines(), {}
    for node in ast.parse(text).body:
        names = [node.name] if isinstance(node, ast.FunctionDef | ast.ClassDef) else []
        targets = [name for target in getattr(node, "targets", []) for name in ast.walk(target)]
        names += [name.id for name in targets if isinstance(name, ast.Name)]
        first = min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", []))])
        while lines[first - 2].startswith("#"):  # a comment right above belongs to what follows
            first -= 1
        found |= {name: "\n".join(lines[first - 1 : node.end_lineno]) for name in names}
    return found


def fields(script: str) -> dict[str, tuple[str, str, str]]:
    """Args fields of a script: {name: (annotation, default, docstring)}."""
    tree = ast.parse((ROOT / f"{script}.py").read_text())
    args = next(node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "Args")
    found = {}
    for field, docstring in zip(args.body, [*args.body[1:], None]):
        if isinstance(field, ast.AnnAssign):
            text = docstring.value.value if isinstance(docstring, ast.Expr) else ""
            default = ast.unparse(field.value) if field.value else ""
            found[field.target.id] = (ast.unparse(field.annotation), default, text)
    return found


@pytest.mark.parametrize("pair", combinations(SCRIPTS, 2), ids="-".join)
def test_shared_definitions_are_the_same_to_the_byte(pair):
    first, second = map(definitions, pair)
    for name in (first.keys() & second.keys()) - {"Args", "main"}:
        diff = difflib.unified_diff(first[name].splitlines(), second[name].splitlines(), *pair, lineterm="")
        assert first[name] == second[name], f"{name} differs:\n" + "\n".join(diff)


@pytest.mark.parametrize("pair", combinations(SCRIPTS, 2), ids="-".join)
def test_shared_fields_have_one_type_and_one_meaning(pair):
    first, second = map(fields, pair)
    free = OTHERS.get(pair[0], set()) | OTHERS.get(pair[1], set())
    for name in first.keys() & second.keys():
        if "judge" not in pair or name != "seed":  # judge.py's Args are a plain dataclass
            assert first[name][0] == second[name][0], f"--{name} has two types"
        if name not in TEXTS | free:
            assert first[name][2] == second[name][2], f"--{name} has two texts"
        if name not in DEFAULTS.keys() | free:
            assert first[name][1] == second[name][1], f"--{name} has two defaults"


@pytest.mark.parametrize("stage", STAGES)
def test_differing_defaults_are_those_that_are_meant(stage):
    for name, defaults in DEFAULTS.items():
        if name in fields(stage):
            assert ast.literal_eval(fields(stage)[name][1]) == defaults[stage]


@pytest.mark.parametrize("script", SCRIPTS)
def test_every_field_has_a_docstring_and_is_read(script):
    text = (ROOT / f"{script}.py").read_text()
    for name, (_, _, docstring) in fields(script).items():
        assert docstring.strip(), f"{script}.py: --{name} has no docstring"
        read = rf"args\.{name}\b|args\[.{name}.\]"
        assert re.search(read, text), f"{script}.py: --{name} is never read"


@pytest.mark.parametrize("script", SCRIPTS)
def test_scripts_are_self_contained(script):
    tree = ast.parse((ROOT / f"{script}.py").read_text())
    imported = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    imported |= {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert not {name.split(".")[0] for name in imported if name} & {*SCRIPTS, "benchmark", "tests"}


def test_importing_has_no_effect(tmp_path):
    code = f"""
import socket, sys
class Refuse(socket.socket):
    def __init__(self, *args, **kwargs):
        raise AssertionError("a socket was opened at import")
socket.socket = socket.create_connection = socket.getaddrinfo = Refuse
sys.path.insert(0, {str(ROOT)!r})
import wandb
from accelerate.state import PartialState
for script in {SCRIPTS}:
    __import__(script)
    assert wandb.run is None, script
    assert not PartialState._shared_state, f"{{script}} made an Accelerator at import"
"""
    command = [sys.executable, "-B", "-c", code]
    environment = {k: v for k, v in os.environ.items() if k != "OPENAI_API_KEY"} | {"HF_HUB_OFFLINE": "0"}
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env=environment)
    assert result.returncode == 0, result.stderr
    assert not list(tmp_path.iterdir()) and not result.stdout


@pytest.mark.parametrize("script", SCRIPTS)
def test_help_explains_every_flag(script, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "1000")
    monkeypatch.setattr(socket.socket, "connect", None)  # it needs no network
    monkeypatch.setattr(sys, "argv", [f"{script}.py", "--help"])
    with pytest.raises(SystemExit) as stopped:
        runpy.run_path(str(ROOT / f"{script}.py"), run_name="__main__")
    text = capsys.readouterr().out
    assert not stopped.value.code
    shown = re.sub(r"\s+", " ", re.sub(r"[│─╭╮╰╯]", " ", text))
    for name, (_, _, docstring) in fields(script).items():
        assert f"--{name.replace('_', '-')}" in shown or f"--{name}" in shown
        first_words = " ".join(docstring.split()[:3])
        assert first_words in shown, f"{script}.py --help does not explain --{name}"


def rows_of(page: Path) -> list[list[str]]:
    """Cells of each row of a markdown page's tables, without head and rule."""
    rows = [line.strip().strip("|").split("|") for line in page.read_text().splitlines() if line.startswith("|")]
    rows = [[cell.strip() for cell in row] for row in rows]
    return [row for i, row in enumerate(rows) if not set("".join(row)) <= set("-: ") and i != 0]


def test_every_marked_detail_is_on_the_map():
    """The other way round: `Detail N` in a function means that the map names this function in the row of N."""
    page = {row[0]: row[2] for row in rows_of(ROOT / "docs" / "details.md") if row[0].isdigit()}
    for script in SCRIPTS:
        for name, source in definitions(script).items():
            comments = [line for line in source.splitlines() if re.search(r"#.*Detail \d", line)]
            for number in re.findall(r"# Detail (\d+) \(", "\n".join(comments)):
                where = re.findall(r"`(\w+)\.py: (\w+)`", page[number])
                shared = [other for other, at in where if at == name and definitions(other)[at] == source]
                assert (script, name) in where or shared, f"Detail {number} of {script}.py: {name} is not on the map"


def line_of(number: str, script: str, name: str) -> int:
    """Line of a script on which a Detail is marked in one of its functions."""
    source, text = definitions(script).get(name, ""), (ROOT / f"{script}.py").read_text()
    marked = re.search(rf"Detail {number}\b", source)
    assert marked, f"Detail {number} is not marked in {script}.py: {name}"
    return text[: text.index(source) + marked.start()].count("\n") + 1


def with_lines(page: str) -> str:
    """The map of details with the links to lines that the scripts now have."""
    lines = page.splitlines(keepends=True)
    for i, line in enumerate(lines):
        if row := re.match(r"\| (\d+) \|", line):
            links = r"\[?`(\w+)\.py: (\w+)`(\]\([^)]*\))?"
            lines[i] = re.sub(
                links, lambda m: f"[`{m[1]}.py: {m[2]}`](../{m[1]}.py#L{line_of(row[1], m[1], m[2])})", line
            )
    return "".join(lines)


def test_details_map_leads_to_code_and_tests():
    page = (ROOT / "docs" / "details.md").read_text()
    assert page == with_lines(page), "lines have moved; run this first: python tests/test_consistency.py"
    rows = [row for row in rows_of(ROOT / "docs" / "details.md") if row[0].isdigit()]
    assert {int(row[0]) for row in rows} == set(range(1, 26))
    for number, _, where, tests in (row[:4] for row in rows):
        assert re.search(r"`\w+\.py: \w+`", where), f"Detail {number} leads to no code"
        named = re.findall(r"`tests/(\w+)\.py::(\w+)`", tests)
        assert named, f"Detail {number} leads to no test"
        for file, test in named:
            assert re.search(rf"^def {test}\(", (ROOT / "tests" / f"{file}.py").read_text(), re.M), f"no {file}::{test}"


@pytest.mark.parametrize("stage", STAGES)
def test_docs_list_the_metrics_that_are_logged(chain, stage):
    text = (ROOT / "docs" / f"{stage}.md").read_text()
    documented = set(re.findall(r"^\| `(\w+/[\w/<>]+)`", text, re.M))
    logged = {key for key in read_events(getattr(chain, stage)) if "/" in key}
    if stage in ("reward", "dpo"):  # which evaluate several splits
        tables = r"^eval/validation(_\w+)?/(?=accuracy|ece|score_)"
        logged = {re.sub(tables, "eval/<split>/", key) for key in logged}
    logged = {re.sub(r"/beta[\d.]+/", "/beta<b>/", key) for key in logged}
    assert documented == logged


if __name__ == "__main__":
    map_of_details = ROOT / "docs" / "details.md"
    map_of_details.write_text(with_lines(map_of_details.read_text()))
