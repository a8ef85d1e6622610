"""A job file that is another command's, and help texts with square brackets."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from isthmus.cli.app import commands
from isthmus.engines import CLUSTER_ENGINES, ENGINES
from isthmus.federated import job as federated_job
from isthmus.runtime.launchers import launcher
from tests.federated.sites import write_job
from tests.runtime.commands import isthmus, refused

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.parametrize("more", [(), ("--compare", "all"), ("--verify", "plan.json"), ("--explain",), ("--json",)])
def test_plan_says_what_runs_a_federated_job(more: tuple[str, ...]) -> None:
    words = ("got a federated job", "`isthmus simulate`", "`train`", "`serve`")
    refused(isthmus("plan", EXAMPLES / "fed-digits.toml", *more), 2, *words)


@pytest.mark.parametrize(
    ("command", "why"),
    [
        ("graph", "clients train the whole model"),
        ("describe-data", "clients' data are described by their partition"),
        ("probe --job", "its rounds measure executors"),
    ],
)
def test_commands_of_stages_say_what_a_federated_job_has_in_their_place(command: str, why: str) -> None:
    refused(isthmus(*command.split(), EXAMPLES / "fed-digits.toml"), 2, "got a federated job", why)


@pytest.mark.parametrize(
    ("command", "option", "value"),
    [
        ("simulate", "--devices", "2"),
        ("simulate", "--objective", "cost"),
        ("simulate", "--steps", "2"),
        ("train", "--devices", "2"),
        ("train", "--steps", "2"),
        ("submit", "--steps", "2"),
    ],
)
def test_options_of_the_other_kind_are_refused(command: str, option: str, value: str) -> None:
    refused(isthmus(command, EXAMPLES / "fed-digits.toml", option, value), 2, f"{option}: got ", " in a federated job")


def test_a_federated_simulation_has_no_trace() -> None:
    done = isthmus("simulate", EXAMPLES / "fed-digits.toml", "--trace", "t.json")
    refused(done, 2, "--trace: got ", "t.json in a federated job")
    assert "Path(" not in done.err and "--scheme" not in done.err
    steps = isthmus("train", EXAMPLES / "fed-digits.toml", "--steps", "3")
    refused(steps, 2, "--steps: got 3 in a federated job, expected --rounds")


@pytest.mark.parametrize(
    ("command", "option"),
    [("train", "--scheme"), ("train", "--executors"), *((name, "--rounds") for name in ("train", "plan", "simulate"))],
)
def test_a_pipelines_job_is_no_federated_one(command: str, option: str) -> None:
    value = "ours" if option == "--scheme" else "2"
    done = isthmus(command, EXAMPLES / "gpt-stdlib.toml", option, value)
    refused(done, 2, f"{option}: ", "without a table [federated]")


def test_all_commands_that_run_or_simulate_a_job_have_rounds() -> None:
    for command in ("train", "simulate", "serve", "submit", "up"):
        assert {"--steps", "--rounds"} <= {
            option for parameter in commands()[command].params for option in parameter.opts
        }
    done = isthmus("simulate", EXAMPLES / "fed-digits.toml", "--set", "fleet=parrot-a", "--rounds", "7")
    assert done.code == 0 and "7 simulated rounds" in done.out


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (("store.url=nowhere://bucket/run",), "store nowhere://bucket/run: "),
        (("runtime.backend=ray", "runtime.ray.address=127.0.0.1:1"), "runtime.backend"),
    ],
)
def test_a_dry_run_looks_for_the_store_and_the_cluster(overrides: tuple[str, ...], words: str) -> None:
    given = [word for override in overrides for word in ("--set", override)]
    refused(isthmus("train", EXAMPLES / "fed-digits.toml", "--dry-run", *given), 2, words)


def test_a_sites_file_is_no_job_and_no_job_a_sites_file(tmp_path: Path) -> None:
    job = write_job(tmp_path, ("a", "b"))
    for command in ("plan", "train", "simulate", "submit", "serve"):
        refused(isthmus(command, tmp_path / "a.toml"), 2, "is a site's file", "isthmus join --site")
    for wrong in (job, EXAMPLES / "gpt-stdlib.toml"):
        done = isthmus("join", "--site", wrong, "--state", tmp_path / "state")
        refused(done, 2, "is a coordinator's job, expected a site's file")


@pytest.mark.parametrize("command", commands())
def test_nothing_of_a_help_text_is_taken_for_markup(command: str) -> None:
    found = commands()[command]
    shown = re.sub(r"[\s│]+", "", isthmus(command, "--help").out)
    texts = [(found.callback.__doc__ or "").split("\f")[0]]
    texts += [getattr(parameter, "help", None) or "" for parameter in found.params]
    for bracketed in re.findall(r"\[[^\]]*\]", " ".join(text.replace("\\[", "[") for text in texts)):
        assert re.sub(r"\s+", "", bracketed) in shown, bracketed


@pytest.mark.parametrize(
    ("command", "option", "names"),
    [
        ("up", "--on", tuple(launcher._OURS)),
        ("train", "--scheme", tuple(federated_job._SCHEMES)),
        ("join", "--engine", ENGINES),
        ("probe", "--engine", ENGINES),
    ],
)
def test_a_help_text_names_all_that_there_is(command: str, option: str, names: tuple[str, ...]) -> None:
    (text,) = [parameter.help for parameter in commands()[command].params if option in parameter.opts]
    assert "..." not in text
    given = re.split(r", | or ", text.partition(": ")[2].rstrip("."))
    assert {name for name in given if name and " " not in name} == set(names)


def test_cluster_engines_are_those_of_the_registry() -> None:
    assert tuple(launcher._OURS) and set(CLUSTER_ENGINES) == set(launcher._OURS)
