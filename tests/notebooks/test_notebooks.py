"""The notebooks run from top to bottom at tiny size; what is committed can be read by anyone."""

import ast
import re
import sys
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from tests.support.embedding import write_tiny
from tests.support.models import write_model

ROOT = Path(__file__).parent.parent.parent
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
MAX_FUNCTION_LINES, MAX_BYTES = 15, 1_000_000
OURS_ALLOWED = re.compile(r"(jaxpaged|jaxpaged\.core\.\w+|pallas_kernels(\.\w+)?)$")
CLIENTS = {"langchain_community", "langchain_openai"}
OTHERS_ALLOWED = {"jax", "numpy", "matplotlib", *CLIENTS, *sys.stdlib_module_names}

TINY = {
    "01_paging_by_hand": """
INTRO = "twelve bytes"
QUESTIONS = ["one?", "two?", "six?"]
PAGE_SIZE, NUM_PAGES, MAX_MODEL_LEN = 4, 20, 32
NEW_TOKENS = (4, 9, 3)
""",
    "02_attention_variants": """
PAGE, READ, SINKS = 4, 16, 2
MAX_MODEL_LEN, NEW_TOKENS = 64, 5
CONTEXTS = (32,)
SMOOTH = 4
""",
    "03_answers_from_texts": """
MAX_MODEL_LEN, MAX_EMBEDDING_LEN, NEW_TOKENS = 256, 64, 4
""",
}

# of the Jupyter client, not of ours: its sockets and loops are closed late
pytestmark = [
    pytest.mark.notebook,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


def read(path: Path) -> nbformat.NotebookNode:
    return nbformat.read(path, as_version=4)


def code_cells(notebook: nbformat.NotebookNode) -> list[nbformat.NotebookNode]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def syntax(path: Path) -> list[ast.AST]:
    cells = code_cells(read(path))
    return [node for cell in cells for node in ast.walk(ast.parse(cell.source))]


def imported(node: ast.AST) -> list[str]:
    if isinstance(node, ast.ImportFrom):
        return [node.module or ""]
    return [name.name for name in node.names] if isinstance(node, ast.Import) else []


@pytest.fixture
def tiny_model(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))  # programs die with this run
    monkeypatch.setenv("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")  # compiles in half the time
    return write_model("R", tmp_path)


def test_every_notebook_has_a_tiny_size():
    assert [path.stem for path in NOTEBOOKS] == sorted(TINY)


@pytest.mark.timeout(600)  # under a minute on two idle cores
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_at_tiny_size(path, tiny_model, tmp_path):
    notebook = read(path)
    [parameters] = [c for c in notebook.cells if "parameters" in c.metadata.get("tags", ())]
    models = f"MODEL = {str(tiny_model)!r}\n"
    if "EMBEDDING_MODEL" in parameters.source:
        embeds = write_tiny("bert", tmp_path / "bert", pooling="mean_tokens")
        models += f"EMBEDDING_MODEL = {str(embeds)!r}\n"
    parameters.source = models + TINY[path.stem]
    num_pictures = count_pictures(notebook)  # of the committed run
    for cell in code_cells(notebook):
        cell.outputs = []
    client = NotebookClient(
        notebook, timeout=500, kernel_name="python3", resources={"metadata": {"path": tmp_path}}
    )
    client.execute()  # raises where a cell does
    assert count_pictures(notebook) == num_pictures


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_the_committed_outputs_are_whole_and_name_no_machine(path):
    notebook = read(path)
    outputs = [output for cell in code_cells(notebook) for output in cell.outputs]
    assert count_pictures(notebook) >= 2
    assert {output.output_type for output in outputs} <= {"stream", "display_data"}
    assert not [output.text for output in outputs if output.get("name") == "stderr"]
    assert not re.search(r"/(home|root|tmp|work|usr)/", path.read_text())
    assert all("execution" not in cell.metadata for cell in notebook.cells)
    assert path.stat().st_size < MAX_BYTES


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_functions_in_notebooks_are_short(path):
    lengths = {
        node.name: node.end_lineno - node.lineno + 1
        for node in syntax(path)
        if isinstance(node, ast.FunctionDef)
    }
    assert lengths
    assert not {name: lines for name, lines in lengths.items() if lines > MAX_FUNCTION_LINES}


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebooks_import_public_names_only(path):
    modules = {module for node in syntax(path) for module in imported(node)}
    others = {m for m in modules if not m.startswith(("jaxpaged", "pallas_kernels"))}
    assert {m.split(".")[0] for m in others} <= OTHERS_ALLOWED
    assert all(OURS_ALLOWED.match(m) for m in modules - others)


def count_pictures(notebook: nbformat.NotebookNode) -> int:
    outputs = [output for cell in code_cells(notebook) for output in cell.outputs]
    return sum("image/png" in output.get("data", {}) for output in outputs)
