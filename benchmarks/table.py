"""The speed tables of README, made of the lines in `benchmarks/results`.

    python -m benchmarks.table          # puts them between README's markers
    python -m benchmarks.table --print

Of several lines on the same thing the one with the latest date counts. Lines after a note, which
tells of other flags, are left out.
"""

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from jaxpaged.bench.targets import (
    ATTENTION,
    HTTP,
    SAMPLER_MS,
    STARTUP_S,
    STEP_MS,
    WORKLOAD_UNITS,
    workload_target,
)

RESULTS = Path(__file__).parent / "results"
README = Path(__file__).parent.parent / "README.md"
BEGIN = "<!-- made by `python -m benchmarks.table`: begin -->"
END = "<!-- end -->"
HTTP_FIGURES = {  # name in the table: column of the client, and percentile
    "tok/s": ("output_tok_per_s", ""),
    "first token p50, ms": ("ttft_ms", "p50"),
    "p99": ("ttft_ms", "p99"),
    "gap p50, ms": ("itl_ms", "p50"),
    "gap p99": ("itl_ms", "p99"),
}

type Line = dict[str, Any]
type Found = dict[tuple[Any, ...], tuple[str, Line]]  # what was measured: its date, and the line


def read(folder: Path) -> tuple[Found, list[str]]:
    """The latest line on each thing, and what they were measured on."""
    found: Found = {}
    machines: dict[str, None] = {}
    for file in sorted(folder.glob("*.jsonl")):
        for header, line in _lines(file):
            key, date = key_of(line), header.get("date", "")
            if key is not None and ("GPU" in str(header) or "NVIDIA" in str(header)):
                if date >= found.get(key, ("", {}))[0]:
                    found[key] = (date, line)
                machines[f"{header['device']}, JAX {header['jax']}"] = None
    return found, list(machines)


def _lines(file: Path) -> Iterator[tuple[Line, Line]]:
    header: Line = {}
    is_variant = False
    for text in file.read_text(encoding="utf-8").splitlines():
        line = json.loads(text)
        if "command" in line:
            # a child that `bench peer` started writes a header of its own
            header, is_variant = line, False
        elif "note" in line:
            is_variant = True
        elif not is_variant:
            yield header, line


def key_of(line: Line) -> tuple[Any, ...] | None:
    """Names what a line measured; None for lines that no table shows."""
    if "workload" in line:
        return "workload", line["label"], line["workload"]
    if "cache" in line and "seconds" in line:
        return "startup", line["label"], line["cache"]
    is_8b = line.get("label", "llama3-8b") == "llama3-8b"
    if "context" in line and line.get("sampler") == "greedy" and is_8b:
        return "step", line["rows"], line["context"]
    if str(line.get("op", "")).startswith("attention-") and "us" in line:
        return "attention", line["label"], line["op"]
    if line.get("op") == "sample mixed":
        return "sampler", line["logits"]
    return ("http", line["load"], line["rate"]) if "load" in line and "ttft_ms" in line else None


def number(value: float | None) -> str:
    if value is None:
        return ""
    if value >= 1000:
        return f"{value:,.0f}"
    return f"{value:.0f}" if float(value).is_integer() or value >= 200 else f"{value:.3g}"


def percent(share: float | None) -> str:
    return "" if share is None else f"{100 * share:.0f} %"


def table(columns: list[str], rows: list[list[str]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def workloads(found: Found) -> str | None:
    rows = []
    for (_, model, workload), (_, line) in _of(found, "workload"):
        target = workload_target(model, workload)
        if target is not None:
            unit, column, _ = WORKLOAD_UNITS[workload]
            value, peer = line[column], target.peer or 1.0
            ratio = peer / value if unit == "ms" else value / peer
            cells = [number(value), number(peer), f"{ratio:.2f}", number(target.goal)]
            shown = "ms a token" if unit == "ms" else unit
            rows.append([model, f"{workload}, {shown}", *cells, percent(line.get("of_roofline"))])
    columns = ["model", "workload", "jaxpaged", "vLLM 0.26", "times as fast", "goal", "of roofline"]
    return table(columns, rows) if rows else None


def steps(found: Found) -> str | None:
    rows = []
    for (_, count, context), (_, line) in _of(found, "step"):
        target = STEP_MS.get((count, context))
        if target is not None:
            shown = [line["ms"], target.floor, target.goal, line.get("roofline_ms")]
            cells = [number(value) for value in shown]
            rows.append([f"{count} x {context}", *cells, percent(line.get("idle"))])
    columns = ["step of llama3-8b, rows x context", "ms", "wanted", "goal", "roofline", "GPU idle"]
    return table(columns, rows) if rows else None


def kernels(found: Found) -> str | None:
    """Of both attention kernels the one that a batch takes: decode, where it can."""
    rows = []
    for case, target in ATTENTION.items():
        taken = [found.get(("attention", case, f"attention-{k}")) for k in ("decode", "mixed")]
        line = next((entry[1] for entry in taken if entry), None)
        if line is not None and "measured" in line:
            shown = [line["measured"], target.peer, target.floor, target.goal]
            cells = [number(value) for value in shown]
            rows.append([case, target.unit, *cells, percent(line.get("of_roofline"))])
    for (_, logits), (_, line) in _of(found, "sampler"):
        shown = [line["ms"], None, SAMPLER_MS.floor, SAMPLER_MS.goal]
        name = f"sampler, mixed parameters, 256 x 128,256, {logits} logits"
        cells = [number(value) for value in shown]
        rows.append([name, "ms", *cells, percent(line.get("of_roofline"))])
    columns = ["kernel", "unit", "jaxpaged", "FlashAttention 3", "wanted", "goal", "of roofline"]
    return table(columns, rows) if rows else None


def startup(found: Found) -> str | None:
    rows = []
    for (_, model, state), (_, line) in _of(found, "startup"):
        target = STARTUP_S.get((model, state))
        if target is not None:
            shown = [line["seconds"], target.peer, target.floor, target.goal]
            rows.append([f"{model}, {state} cache", *(number(value) for value in shown)])
    columns = ["process start to ready, s", "jaxpaged", "vLLM 0.26", "wanted", "goal"]
    return table(columns, rows) if rows else None


def http(found: Found) -> str | None:
    ours = {line["label"].split()[-1]: line for _, (_, line) in _of(found, "http")}
    file = RESULTS.parent / "peer" / "vllm-http-qwen2.5-7b-h200.jsonl"
    peers = [json.loads(text) for text in file.read_text(encoding="utf-8").splitlines()]
    rows = []
    for load in HTTP if ours else ():
        servers = {"jaxpaged": ours.get(load, {})}
        servers |= {p["label"].rsplit(" ", 1)[0]: p for p in peers if p["label"].endswith(load)}
        for server, line in (servers | {"goal": HTTP[load]}).items():
            cells = []
            for column, point in HTTP_FIGURES.values():
                value = line.get(column)
                cells.append(number(value.get(point) if isinstance(value, dict) else value))
            rows.append([load, server, *cells])
    return table(["qwen2.5-7b over HTTP", "server", *HTTP_FIGURES], rows) if rows else None


def _of(found: Found, kind: str) -> list[tuple[tuple[Any, ...], tuple[str, Line]]]:
    """In the order of the targets, where the order of a dictionary gives one."""
    order = [*WORKLOAD_UNITS, "cold", "warm"]
    chosen = [item for item in found.items() if item[0][0] == kind]
    models: list[Any] = list(dict.fromkeys(key[1] for key, _ in chosen))
    return sorted(
        chosen,
        key=lambda item: (
            models.index(item[0][1]) if isinstance(item[0][1], str) else item[0][1],
            order.index(item[0][2]) if item[0][2:] and item[0][2] in order else 0,
        ),
    )


SECTIONS: tuple[Callable[[Found], str | None], ...] = (workloads, startup, http, steps, kernels)


def tables(folder: Path = RESULTS) -> str:
    """All that there are lines for, one after the other."""
    found, machines = read(folder)
    parts = [part for section in SECTIONS if (part := section(found)) is not None]
    dates = sorted({date[:10] for date, _ in found.values()})
    span = dates[0] if len(dates) == 1 else f"{dates[0]} to {dates[-1]}" if dates else ""
    measured = f"Measured on {'; '.join(machines)}; {span}. Commands stand in `benchmarks/results`."
    return "\n\n".join([*parts, measured])


def put(readme: str, text: str) -> str:
    """`readme` with `text` between its markers.

    Raises:
        ValueError: a marker is missing.
    """
    if BEGIN not in readme or END not in readme:
        raise ValueError(f"README needs the lines {BEGIN!r} and {END!r}")
    before, rest = readme.split(BEGIN, 1)
    return before + BEGIN + "\n" + text + "\n" + END + rest.split(END, 1)[1]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--print", action="store_true", help="to standard output instead")
    args = parser.parse_args()
    if args.print:
        print(tables())
    else:
        README.write_text(put(README.read_text(encoding="utf-8"), tables()), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
