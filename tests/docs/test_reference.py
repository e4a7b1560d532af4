"""docs/reference.md names everything that users can reach, as the code has it; and no link leads nowhere."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
from pathlib import Path

import msgspec
import pytest

import nbelastic as nbe
from nbelastic.notebook.magics import ElasticMagics
from nbelastic.protocol.chaos import KINDS
from nbelastic.protocol.local_clusters import ClusterInfo
from nbelastic.protocol.status import EventRecord, HostStatus, Status, WorkerStatus

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "reference.md").read_text()
CODE = "\n".join(re.findall(r"```.*?```", PAGE, re.DOTALL) + re.findall(r"`[^`\n]+`", PAGE))
WITHOUT_PARENTHESES = ("elastic", "load_ipython_extension", "unload_ipython_extension", "warmup")
MARKDOWN = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
LINKS = [(page, link) for page in MARKDOWN for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text())]


def section(heading: str, mark: str = "##") -> str:
    """The text under a heading, up to the next one of its kind."""
    found = re.search(rf"^{mark} {re.escape(heading)}$(.*?)(?=^{mark} |\Z)", PAGE, re.DOTALL | re.MULTILINE)
    assert found, f"there is no section {heading!r}"
    return found[1]


def public(cls: type) -> list[str]:
    own = {name: None for one in cls.__mro__ if one.__module__.startswith("nbelastic") for name in vars(one)}
    return [name for name in own if not name.startswith("_")]


def arguments(call: object) -> list[str]:
    """As they are written in a call's signature, without types."""
    bare = [p.replace(annotation=inspect.Parameter.empty) for p in inspect.signature(call).parameters.values()]
    return [str(p).replace("'", '"') for p in bare if p.name != "self"]


def written(name: str, text: str) -> list[str]:
    """The arguments that the page gives to `name`."""
    found = re.search(rf"(?<![\w])(?:nbe\.)?{name}\(((?:[^()]|\([^()]*\))*)\)", text)
    assert found, f"{name}(…) is not there"
    parts = re.findall(r"(?:[^,()]|\([^()]*\))+", found[1])
    return [" ".join(part.split()) for part in parts if part.strip() != "*"]


@pytest.mark.parametrize("name", nbe.__all__)
def test_every_public_name_is_there(name):
    """As code, not as an ordinary word; functions with their parentheses."""
    is_call = inspect.isfunction(getattr(nbe, name)) and name not in WITHOUT_PARENTHESES
    assert re.search(rf"(?<![\w.]){name}" + (r"\(" if is_call else r"\b"), CODE)


def test_the_constructor_is_written_as_it_is():
    """Every argument, its default, and a line that says what it means."""
    text = section("Cluster")
    assert written("Cluster", text) == arguments(nbe.Cluster.__init__)
    table = text.split("| method or property")[0]
    for name in inspect.signature(nbe.Cluster).parameters:
        assert re.search(rf"^\|[^|]*`{name}`", table, re.MULTILINE), f"{name} has no line"


@pytest.mark.parametrize(
    ("heading", "cls", "name"),
    [(cls.__name__, cls, name) for cls in (nbe.Cluster, nbe.Job, nbe.State) for name in public(cls)],
)
def test_methods_have_their_arguments_and_defaults(heading, cls, name):
    """Every public method and property has a line of its own."""
    lines = [row.split("|")[1] for row in section(heading).splitlines() if row.startswith("|")]
    text = "\n".join(line for line in lines if re.search(rf"`{name}[`(]", line))
    assert text, f"{heading}.{name} has no line"
    if inspect.isfunction(getattr(cls, name)):
        assert written(name, text) == arguments(getattr(cls, name))


@pytest.mark.parametrize("name", ["ElasticSampler", "FixedHosts", "ScriptDiscovery"])
def test_other_constructors_too(name):
    """With their arguments and defaults."""
    assert written(name, PAGE) == arguments(getattr(nbe, name).__init__)


@pytest.mark.parametrize("name", public(nbe.ElasticSampler))
def test_the_samplers_methods_are_there(name):
    assert f"`{name}(" in section("Sampler")


@pytest.mark.parametrize("struct", [Status, HostStatus, WorkerStatus, EventRecord, ClusterInfo])
def test_every_field_of_a_status_is_there(struct):
    """In the table that follows the struct's name."""
    table = re.search(rf"`{struct.__name__}`(?:s)?:\n(.*?)\n\n", section("Status and events"), re.DOTALL)
    assert table, f"{struct.__name__} has no table"
    fields = dataclasses.fields(struct) if dataclasses.is_dataclass(struct) else msgspec.structs.fields(struct)
    for field in fields:
        assert f"`{field.name}`" in table[1], f"{struct.__name__}.{field.name} is missing"


def test_every_kind_of_event_is_there_and_no_other():
    """Found in the sources, where records are made."""
    kinds: set[str] = set()
    for path in (ROOT / "nbelastic").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "cmd.Record":
                kind = node.args[0]
                if isinstance(kind, ast.Constant):
                    kinds.add(kind.value)
                elif ast.unparse(kind) != "kind":
                    kinds |= {
                        "f'job-{outcome}'": {"job-succeeded", "job-failed", "job-stopped"},
                        "f'fault-{kind}'": {f"fault-{kind}" for kind in KINDS},
                    }[ast.unparse(kind)]
            if isinstance(node, ast.Call):  # of a function that records an event of this kind
                kinds |= {
                    kw.value.value for kw in node.keywords if kw.arg == "kind" and isinstance(kw.value, ast.Constant)
                }
            if isinstance(node, ast.FunctionDef):
                named = zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True)
                kinds |= {value.value for arg, value in named if arg.arg == "kind" and value is not None}
    table = section("Status and events").partition("| kind | when |")[2]
    rows = [row.split("|")[1] for row in table.splitlines() if row.startswith("| `")]
    assert set(re.findall(r"`([a-z-]+)`", " ".join(rows))) == kinds


@pytest.mark.parametrize(
    ("kind", "name"), [(kind, name) for kind, names in ElasticMagics.magics.items() for name in names]
)
def test_every_magic_has_a_section_with_all_its_options(kind, name):
    """Options, and the names of what stands without one, as the parsers have them."""
    sign = "%%" if kind == "cell" else "%"
    heading = next((h for h in re.findall(r"^### (.*)$", PAGE, re.MULTILINE) if f"`{sign}{name}`" in h), "")
    assert heading, f"{sign}{name} has no section"
    text = section(heading, "###")
    for action in getattr(ElasticMagics, ElasticMagics.magics[kind][name]).parser._actions:
        names = [option for option in action.option_strings if option.startswith("--")] or [action.metavar]
        for option in names:
            assert re.search(rf"(?<![\w-]){option}(?![\w-])", text), f"{option} is missing"
        for choice in action.choices or ():
            assert f"`{choice}`" in text


def test_the_tree_of_errors_is_the_code_s():
    """Every error stands under its base."""
    tree = re.findall(r"^([│├└─ ]*)(\w+Error)\b", section("Errors"), re.MULTILINE)
    above: dict[int, type] = {}
    for indent, name in tree:
        depth = len(indent) // 4
        error = getattr(nbe, name)
        above[depth] = error
        assert error.__bases__[0] is (above[depth - 1] if depth else Exception)
    assert {name for _, name in tree} == {name for name in nbe.__all__ if name.endswith("Error")}


@pytest.mark.parametrize(("source", "link"), LINKS, ids=[f"{source.name}: {link}" for source, link in LINKS])
def test_links_lead_somewhere(source, link):
    """To a file of the repository, and to a heading that it has. Other sites are not asked."""
    if "://" in link:
        return
    path, _, anchor = link.partition("#")
    target = (source.parent / path) if path else source
    assert target.exists(), f"{source.name} links to {link}"
    if anchor:
        headings = re.findall(r"^#+ (.*)$", target.read_text(), re.MULTILINE)
        assert anchor in {re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in headings}
