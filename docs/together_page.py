"""Which capabilities go together, as a page: from the table of refusals and from the tests of what runs."""

from __future__ import annotations

import tomllib
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from isthmus.combinations import Refusal, refusals

TESTS = Path(__file__).parents[1] / "tests" / "together.toml"
PROGRAMS = {  # programs, and beside what each refuses (`combinations.toml`)
    "pipeline": (),
    "replicas": (),
    "decoupled": ("decoupled",),
    "decoupled pipelines": ("decoupled",),
    "rounds": ("federated", "a federated job"),
    "secure": ("secure sums", "federated", "a federated job"),
    "sites": ("sites", "federated", "a federated job"),
    "pipeline clients": ("pipeline clients", "federated", "a federated job"),
    "generation": ("generation",),
    "script": ("scripts",),
}
WORDS = """
| program | jobs |
|---|---|
| pipeline | a model in stages over devices |
| replicas | several pipelines that average in step |
| decoupled | replicas that never wait, each on one device |
| decoupled pipelines | replicas that never wait, each a pipeline |
| rounds | federated rounds, simulated clients |
| secure | federated rounds with secure sums |
| sites | a federated deployment |
| pipeline clients | a site that is a fleet |
| generation | `isthmus generate` |
| script | `isthmus.sync` in a script of your own |
""".strip()
RUNS, NO, NOT_YET, NOTHING = "yes", "no", "not yet", "-"
Cell = tuple[str, str]  # one of the four, and the test or the reason


def cells(kind: str) -> dict[str, dict[str, Cell]]:
    """Cells of capabilities or of ways to run, by row and program. KeyError for one of which nothing is known, and
    ValueError for one that is said twice."""
    rows: dict[str, dict[str, Any]] = tomllib.loads(TESTS.read_text(encoding="utf-8"))[kind]
    return {row: {program: _cell(row, program, said) for program in PROGRAMS} for row, said in rows.items()}


def _cell(row: str, program: str, said: dict[str, Any]) -> Cell:
    key = said.get("refused", {}).get(program)
    keys = [(key[0], key[1])] if key else [(row, beside) for beside in PROGRAMS[program]]
    found = [refusals()[key] for key in keys if key in refusals()]
    names = [name for name in ("none", "not_yet") if program in said.get(name, ())]
    if program == "decoupled pipelines" and program in said:
        found = []  # it can what a replica of one device cannot
    if len(found[:1]) + len(names) + (program in said) > 1:
        raise ValueError(f"{row}, {program}: said twice")
    if found:
        return (NO if found[0].built else NOT_YET), found[0].reason
    if names:
        return {"none": NOTHING, "not_yet": NOT_YET}[names[0]], ""
    if program not in said:
        raise KeyError(f"{row}, {program}: neither a test nor a refusal")
    return RUNS, str(said[program])


def together_page() -> str:
    """`docs/together.md`."""
    tables, rows = {kind: cells(kind) for kind in ("capability", "way")}, list(refusals().values())
    counted = Counter(cell[0] for table in tables.values() for row in table.values() for cell in row.values())
    built = Counter(row.built for row in rows)
    parts = [
        "# What goes together",
        "This page is made from the table of all refusals, `src/isthmus/combinations.toml`, and the tests of what runs "
        "(`make reference`). Every error that refuses a combination is made from the same table.",
        f"{len(rows)} combinations are refused: {built[True]} for a reason that stays, {built[False]} since nobody has "
        f"built them yet. Of the cells of the two tables {counted[RUNS]} run, each with its test, "
        f"{counted[NO]} cannot be, {counted[NOT_YET]} are not built yet.",
        WORDS,
        "## Capabilities",
        "\n".join(_matrix("capability", tables["capability"])),
        "## Ways to run",
        "\n".join(_matrix("way", tables["way"])),
        "`-`: the program has nothing of the kind.",
        "## Refused",
        "\n".join(_refused(row for row in rows if row.built)),
        "## Not built yet",
        "\n".join(_refused(row for row in rows if not row.built)),
        "## Tests of what runs",
        "\n".join(f"- {row}: {', '.join(_tests(found))}" for table in tables.values() for row, found in table.items()),
    ]
    return "\n\n".join(parts) + "\n"


def _matrix(head: str, table: dict[str, dict[str, Cell]]) -> Iterator[str]:
    yield f"| {head} | {' | '.join(PROGRAMS)} |"
    yield "|---" * (1 + len(PROGRAMS)) + "|"
    for row, found in table.items():
        yield f"| {row} | {' | '.join(cell[0] for cell in found.values())} |"


def _refused(rows: Iterable[Refusal]) -> Iterator[str]:
    yield "| what | where | key | expected | why |"
    yield "|---|---|---|---|---|"
    for row in rows:
        yield f"| {row.what} | {row.words} | `{row.field}` | {row.expected} | {row.reason} |"


def _tests(found: dict[str, Cell]) -> Iterator[str]:
    for program, (state, test) in found.items():
        if state == RUNS:
            yield f"{program} `{test}`"
