"""Budgets and boundaries that nobody should have to remember."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PRODUCT = sorted(
    path
    for folder in ("jaxpaged", "pallas_kernels", "server")
    for path in (ROOT / folder).rglob("*.py")
)
MAX_LINES, MAX_KERNEL_LINES = 320, 400
PRIVATE_JAX_ALLOWED = {"tests/support/cuda_compile.py"}
PICKLE_ALLOWED = {"jaxpaged/engine/executables.py"}
DANGEROUS = re.compile(
    r"\b(pickle|cloudpickle|dill|marshal|shelve)\b|torch\.load|allow_pickle\s*=\s*True"
)


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def test_files_stay_short_enough_to_read():
    long = {}
    for path in PRODUCT:
        most = MAX_KERNEL_LINES if "_kernel" in path.name else MAX_LINES
        lines = len(path.read_text().splitlines())
        if lines > most:
            long[name_of(path)] = lines
    assert not long


def test_only_one_file_imports_private_jax():
    pattern = re.compile(r"^\s*(from|import) jax\._src", re.MULTILINE)
    files = [*PRODUCT, *(ROOT / "tests").rglob("*.py"), *(ROOT / "benchmarks").rglob("*.py")]
    found = {name_of(path) for path in files if pattern.search(path.read_text())}
    assert found <= PRIVATE_JAX_ALLOWED


def test_nothing_reads_objects_that_can_run_code():
    found = set()
    for path in PRODUCT:
        tree = ast.parse(path.read_text())
        names = {n.id for n in ast.walk(tree) if isinstance(n, ast.Name)} & {"eval", "exec"}
        code = "\n".join(
            ast.unparse(n) for n in ast.walk(tree) if isinstance(n, ast.Import | ast.ImportFrom)
        )
        if names or DANGEROUS.search(code):
            found.add(name_of(path))
    assert found <= PICKLE_ALLOWED


def test_no_environment_variable_of_our_own_steers_anything():
    found = [name_of(path) for path in PRODUCT if re.search(r"[\"']JAXPAGED_", path.read_text())]
    assert not found


@pytest.mark.parametrize(
    "module", ["jaxpaged.core.scheduler", "jaxpaged.text.tokenizer", "server.app"]
)
def test_parts_that_need_no_device_leave_jax_alone(module):
    code = f"import sys, {module}; sys.exit('jax' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr or "jax was imported"


def test_public_names_are_all_there():
    import jaxpaged

    for name in jaxpaged.__all__:
        assert getattr(jaxpaged, name) is not None
