"""Text by the model of a run: its devices, its plan or another one, and requests that are answered side by side."""

from __future__ import annotations

import asyncio
import contextlib
import queue
import secrets
import threading
import time
from collections.abc import AsyncGenerator, Callable, Generator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import msgspec

from isthmus.api.folder import RunFolder
from isthmus.api.given import is_given
from isthmus.api.pipeline import places_of
from isthmus.api.serving_fleet import Serving, address_of, serving_fleet
from isthmus.api.states import PORT
from isthmus.combinations import refused
from isthmus.data.tokenizer import BYTES, Tokenizer, load_tokenizer
from isthmus.errors import PeerError, UserError
from isthmus.fleet import Fleet
from isthmus.graph import Flow, assign
from isthmus.graph.partition import align
from isthmus.job import Job
from isthmus.job.first_weights import Served, prepare_served
from isthmus.planners.generation import Chain, Objective, ServingProblem, chain_of_plan, plan_chain
from isthmus.protocol.generation import Prompt, Sampling
from isthmus.runtime.coordinator.backend import Backend, DevicesAtWork, LocalBackend, RunRequest
from isthmus.runtime.coordinator.generation_host import GenerationHost, HostAnswer, ServingSettings, ServingStatistics
from isthmus.simulator.options import Fault, RecoveryTimes, SimulationOptions
from isthmus.simulator.run import check_faults
from isthmus.simulator.serving import ServedRequest, ServingSimulation, SimulatedServing, check_serving_faults
from isthmus.units import format_duration

INCOMPLETE = "\ufffd"  # stands for a character whose last bytes are still to come
NEIGHBOURS = 8  # tokens with which those that follow are decoded: a character has at most four
MOST = 1 << 63  # whole numbers of a request are below it: torch's seeds, and what a frame can say


class ServingChoices(msgspec.Struct, frozen=True, kw_only=True):
    objective: Objective | None = None
    """Plan a chain of devices for least time per token, or most tokens per second; None: as the run's plan has
    it, or for latency where the run is of decoupled replicas."""
    at_once: int = 16  # requests in flight
    joined: Serving | None = None  # devices that joined compute, coordinated from here; None: processes on this machine


def joined_at(where: str | None, addresses: Sequence[str], state: Path | None) -> Serving | None:
    """Where to listen for devices that joined, of HOST or HOST:PORT; None where nothing is given. UserError."""
    if where is None:
        if addresses or state is not None:
            option = "--address" if addresses else "--state"
            raise UserError(f"{option}: got it without --joined, expected both: it is for devices that joined")
        return None
    host, port = address_of(where, PORT, "--joined")
    return Serving(host=host, port=port, addresses=tuple(addresses), state=state)


class Piece(NamedTuple):
    token: int
    text: str
    """The text that the token adds. A character may wait for the next token; half a one at the end is left out."""
    last: bool


class _AnswerText:
    """The text that tokens add to a prompt: that of all tokens, less that of the prompt. Tokenizers decode neighbours
    together, as spaces mark beginnings of words, and characters reach over tokens."""

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._ids, self._before, self._given = list(prompt), "", 0
        if not self._shorten():
            self._before = tokenizer.text(self._ids)

    def add(self, token: int) -> str:
        """Return the text that is complete now. The beginning of a character waits for its end."""
        self._ids.append(token)
        text = self._tokenizer.text(self._ids)
        known = self._before if text.startswith(self._before) else self._before.rstrip(INCOMPLETE)
        whole = text[len(known) :].rstrip(INCOMPLETE)
        added, self._given = whole[self._given :], max(self._given, len(whole))
        if added and text.endswith(whole):
            self._shorten()
        return added

    def _shorten(self) -> bool:
        """Keep the last few tokens that have a text from a character's beginning on: what follows is decoded beside
        them as beside all. False where there are none."""
        for count in range(1, NEIGHBOURS + 1):
            text = self._tokenizer.text(self._ids[-count:])
            if text and not text.startswith(INCOMPLETE):
                self._ids, self._before, self._given = self._ids[-count:], text, 0
                return True
        return False


class _Answer:
    def __init__(self, tokenizer: Tokenizer | None, prompt: Sequence[int]) -> None:
        self._text = None if tokenizer is None else _AnswerText(tokenizer, prompt)
        self.over = False

    def piece(self, given: HostAnswer) -> Piece:
        """UserError or PeerError where there is no further token."""
        if isinstance(given, Exception):
            self.over = True
            raise given
        token, self.over = given
        return Piece(token, "" if self._text is None else self._text.add(token), self.over)


def _known(tokenizer: Tokenizer | None) -> Tokenizer:
    if tokenizer is None:
        raise UserError("prompt: the run's data have no tokenizer: expected token ids (--tokens 1,2,3)")
    return tokenizer


def _prompt_tokens(prompt: str | Sequence[int], served: Served, tokenizer: Tokenizer | None) -> tuple[int, ...]:
    if isinstance(prompt, str):
        try:
            text = prompt.encode()
        except UnicodeEncodeError as e:
            raise UserError(f"prompt: got {prompt[e.start]!r} at {e.start}, expected a text in UTF-8") from None
        found = _known(tokenizer).tokens(text).tolist()
    else:
        found = prompt
    most, vocabulary = served.context - 1, served.vocabulary
    if not 0 < len(found) <= most:
        raise UserError(f"prompt: got {len(found)} tokens, expected 1 to {most}: the model knows {most + 1} places")
    if strange := [token for token in found if not 0 <= token < vocabulary]:
        raise UserError(f"prompt: got token {strange[0]}, the model has 0 to {vocabulary - 1}")
    return tuple(found)


class ModelService:
    """A model that answers. Any thread may ask."""

    def __init__(self, host: GenerationHost, served: Served, tokenizer: Tokenizer | None, name: str) -> None:
        self._host = host
        self._served = served
        self._tokenizer = tokenizer
        self.name = name  # the name of the model in requests
        self.context = served.context  # tokens of a prompt and its answer together, at most
        self.ends = served.ends  # tokens with which the model ends a text

    @property
    def statistics(self) -> ServingStatistics:
        return self._host.statistics()

    @property
    def step(self) -> int:
        """Optimizer steps behind the weights."""
        return self._served.step

    def tokens(self, prompt: str | Sequence[int]) -> tuple[int, ...]:
        """A prompt as token ids. UserError for one that is empty or too long, or has other ids than the model."""
        return _prompt_tokens(prompt, self._served, self._tokenizer)

    def text(self, tokens: Sequence[int]) -> str:
        """Return the text of a prompt's token ids. UserError where the run's data have no tokenizer."""
        if self._tokenizer is None:
            raise UserError("echo: the run's data have no tokenizer, so token ids have no text")
        return self._tokenizer.text(tokens)

    def chat_tokens(self, messages: Sequence[Mapping[str, object]]) -> tuple[int, ...]:
        """A conversation as a prompt. UserError where the tokenizer has no template for it."""
        return self.tokens(self.tokenizer.chat(messages))

    @property
    def tokenizer(self) -> Tokenizer:
        """UserError where the run's data have none."""
        return _known(self._tokenizer)

    def stream(self, tokens: Sequence[int], sampling: Sampling) -> Generator[Piece]:
        """The answer's tokens as they come. PeerError when there are no further ones, UserError where that is the
        request's fault. An answer that is not read to its end is cancelled."""
        found: queue.SimpleQueue[HostAnswer] = queue.SimpleQueue()
        with self._asked(tokens, sampling, found.put) as answer:
            while not answer.over:
                yield answer.piece(found.get())

    async def pieces(self, tokens: Sequence[int], sampling: Sampling) -> AsyncGenerator[Piece]:
        """Return the same as `stream`, without a thread that waits."""
        found: asyncio.Queue[HostAnswer] = asyncio.Queue()
        loop = asyncio.get_running_loop()

        def put(given: HostAnswer) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody reads any more
                loop.call_soon_threadsafe(found.put_nowait, given)

        with self._asked(tokens, sampling, put) as answer:
            while not answer.over:
                yield answer.piece(await found.get())

    @contextlib.contextmanager
    def _asked(
        self, tokens: Sequence[int], sampling: Sampling, put: Callable[[HostAnswer], None]
    ) -> Generator[_Answer]:
        """`put` gets what the host says, in the host's thread."""
        sampling = msgspec.structs.replace(sampling, stop=(*sampling.stop, *self.ends))
        prompt = Prompt(number=0, tokens=tuple(tokens), sampling=sampling)
        answer = _Answer(self._tokenizer, prompt.tokens)
        number = self._host.submit(prompt, put)
        try:
            yield answer
        finally:
            if not answer.over:
                self._host.cancel(number)

    def stop(self) -> None:
        """Refuse what is not answered yet."""
        self._host.stop()

    def wait_ended(self) -> None:
        self._host.over.wait()


class _Prepared(NamedTuple):
    """A run's model, and the first chain of devices that serves it."""

    folder: RunFolder
    job: Job
    fleet: Fleet
    served: Served
    problem: Callable[[Sequence[str]], ServingProblem]
    chain: Chain
    objective: Objective

    def plan(self, devices: Sequence[str]) -> Chain:
        """UserError where none of these devices can serve it."""
        return plan_chain(self.problem(devices), self.objective)


def _prepared(run: str | Path, choices: ServingChoices, note: Callable[[str], None]) -> _Prepared:
    folder = RunFolder.existing(Path(run))
    folder.check_kind("pipeline")
    job, fleet = folder.job(), folder.fleet()
    if is_given(job):
        raise refused("Python objects", "generation", "one", f"run folder {run}: model")
    note(f"capturing {job.model.name} ...")
    served = prepare_served(job, folder.checkpoints, _trained_length(folder))
    flow = Flow(served.graph)

    def problem(devices: Sequence[str]) -> ServingProblem:
        return ServingProblem(flow, fleet.subset(devices), context=served.context, at_once=choices.at_once)

    chain = _first_chain(folder, problem(fleet.names), choices.objective)
    return _Prepared(folder, job, fleet, served, problem, chain, choices.objective or "latency")


@contextlib.contextmanager
def served_run(
    run: str | Path,
    choices: ServingChoices,
    note: Callable[[str], None],
    prompts: Sequence[str | tuple[int, ...]] = (),
) -> Generator[ModelService]:
    """The model of a run's newest checkpoint, served while the block lasts: by a process for each device, or by devices
    that joined, once all of the chain are there. UserError, before a device begins, for a run that is not there, has no
    checkpoint or has a model that cannot be served, and where the model cannot take one of the prompts; PeerError when
    too few devices come."""
    ready = _prepared(run, choices, note)
    folder, served, job, fleet, chain = ready.folder, ready.served, ready.job, ready.fleet, ready.chain
    settings = ServingSettings(
        run=secrets.token_hex(16),
        timeout_s=job.timeout_s,
        threads=job.runtime.threads,
        emulate=choices.joined is None and job.runtime.emulate,
    )
    host = GenerationHost(served, chain, fleet, settings, ready.plan, note)
    service = ModelService(host, served, tokenizer_of(folder), folder.path.resolve().name)
    for prompt in prompts:
        service.tokens(prompt)
    note(chain_text(chain))
    call = RunRequest(
        run=settings.run,
        devices=chain.devices,
        others=tuple(name for name in fleet.names if name not in chain.devices),
        timeout_s=settings.timeout_s,
        threads=settings.threads,
        logs=folder.path / "logs" / "serving",
    )
    failures: list[Exception] = []
    with contextlib.ExitStack() as stack:
        backend: Backend = LocalBackend(places=places_of(job, fleet))
        if choices.joined is not None:
            backend = stack.enter_context(serving_fleet(choices.joined, note))
        session = stack.enter_context(backend.at_work(call, host.acceptor))
        thread = threading.Thread(target=partial(_serve, host, session, failures), name="serving", daemon=True)
        thread.start()
        try:
            host.ready.wait()
            if failures:
                raise failures[0]
            yield service
        finally:
            host.stop()
            thread.join()
    if failures:
        raise failures[0]


def _serve(host: GenerationHost, session: DevicesAtWork, failures: list[Exception]) -> None:
    try:
        host.serve(session)
    except Exception as e:  # of any kind: the caller's thread raises it
        failures.append(e)
    finally:
        host.ready.set()


def _first_chain(folder: RunFolder, problem: ServingProblem, objective: Objective | None) -> Chain:
    if objective is not None or not folder.planned:
        return plan_chain(problem, objective or "latency")
    plan, train = folder.plan(), Flow(folder.captured_graph())
    stages = plan.replicas[0].stages
    stage_of = align(train, problem.flow, assign(train, [stage.first for stage in stages[1:]]))
    return chain_of_plan(
        problem, [stage.device for stage in stages], [stage_of[op.name] for op in problem.flow.operators]
    )


def _trained_length(folder: RunFolder) -> int:
    """Tokens of a sample; 0 where that is not known."""
    columns = [c for found in folder.described().values() for name, c in found.columns.items() if name == "input_ids"]
    return max((column.shape[0] for column in columns if column.shape), default=0)


def tokenizer_of(folder: RunFolder) -> Tokenizer | None:
    """None where the run's data are no text."""
    data = folder.job().data
    described = folder.described()
    if described and not any("input_ids" in found.columns for found in described.values()):
        return None
    return load_tokenizer(str(data.located.get("tokenizer", BYTES)))


def chain_text(chain: Chain) -> str:
    return (
        f"stages on {' > '.join(chain.devices)}: predicted {format_duration(chain.token_s)} per token, "
        f"{chain.tokens_per_s:.3g} tokens/s with {chain.at_once} requests at once"
    )


class Generated(NamedTuple):
    prompt: str | tuple[int, ...]
    text: str
    tokens: tuple[int, ...]
    failure: UserError | PeerError | None = None  # why it has no further tokens

    def shown(self) -> str:
        """For a terminal: with a prompt that is text in front, or as ids."""
        if isinstance(self.prompt, str):
            return self.prompt + self.text
        return ",".join(map(str, (*self.prompt, *self.tokens)))


class Generation(NamedTuple):
    answers: list[Generated]  # in the order of the prompts
    tokens_per_s: float  # all answers' tokens by the time from the first request to the last answer
    statistics: ServingStatistics

    def document(self) -> dict[str, object]:
        answers = [
            {"prompt": a.prompt, "text": a.text, "tokens": a.tokens, "failure": a.failure and str(a.failure)}
            for a in self.answers
        ]
        return {"answers": answers, "tokens_per_s": self.tokens_per_s, **msgspec.structs.asdict(self.statistics)}

    def check(self) -> None:
        """Raise the first failure, where an answer has one."""
        for number, answer in enumerate(self.answers, 1):
            if (failure := answer.failure) is not None:
                of = f"prompt {number} of {len(self.answers)}: " if len(self.answers) > 1 else ""
                raise type(failure)(f"{of}{failure}")


def sampling_of(**options: object) -> Sampling:
    """UserError for an option out of its range."""
    for name, given in options.items():
        if isinstance(given, int) and given >= MOST:
            raise UserError(f"sampling: {name}: got {given}, expected less than {MOST}")
    try:
        return msgspec.convert(options, Sampling)
    except msgspec.ValidationError as e:  # as: Expected `float` > 0.0 - at `$.top_p`
        expected, _, name = str(e).rstrip("`").partition(" - at `$.")
        raise UserError(f"sampling: {name}: got {options[name]}, {expected.lower()}") from None


def prompts_of(texts: Sequence[str], ids: Sequence[str]) -> list[str | tuple[int, ...]]:
    """Texts, and lists of token ids as `1,2,3`. UserError where there are none, or an id is no number."""
    found: list[str | tuple[int, ...]] = [*texts]
    for given in ids:
        try:
            found.append(tuple(int(token) for token in given.split(",")))
        except ValueError:
            raise UserError(f"--tokens: got {given!r}, expected token ids, as 1,2,3") from None
    if not found:
        raise UserError("generate: got no prompt, expected --prompt TEXT or --tokens IDS")
    return found


def generate(
    service: ModelService,
    prompts: Sequence[str | tuple[int, ...]],
    sampling: Sampling,
    on_piece: Callable[[Piece], None] = lambda _: None,
) -> Generation:
    """Answer all prompts side by side; an answer that fails says why, and the others go on. `on_piece` gets each token,
    in a thread for each prompt. UserError for a prompt that the model cannot take."""
    tokens = [service.tokens(prompt) for prompt in prompts]
    found: list[list[Piece]] = [[] for _ in prompts]
    failures: dict[int, UserError | PeerError] = {}
    broken: list[Exception] = []

    def read(number: int) -> None:
        try:
            for piece in service.stream(tokens[number], sampling):
                found[number].append(piece)
                on_piece(piece)
        except (UserError, PeerError) as e:
            failures[number] = e
        except Exception as e:  # of any kind: the caller's thread raises it
            broken.append(e)

    began_s = time.monotonic()
    threads = [threading.Thread(target=read, args=(number,), daemon=True) for number in range(len(prompts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if broken:
        raise broken[0]
    elapsed_s = time.monotonic() - began_s
    answers = [
        Generated(prompt, "".join(p.text for p in one), tuple(p.token for p in one), failures.get(number))
        for number, (prompt, one) in enumerate(zip(prompts, found, strict=True))
    ]
    return Generation(answers, sum(len(one) for one in found) / elapsed_s, service.statistics)


def simulate_generation(
    run: str | Path,
    choices: ServingChoices,
    prompts: Sequence[str | tuple[int, ...]],
    most_tokens: int,
    faults: tuple[Fault, ...] = (),
    note: Callable[[str], None] = lambda _: None,
) -> SimulatedServing:
    """Simulate when the tokens of answers would come, of `most_tokens` each, on the run's fleet; faults strike
    meanwhile. Errors as `served_run`, and UserError for a fault of what is not there or that ends a service."""
    if choices.joined is not None:
        raise refused("devices that join", "simulation", "them")
    check_serving_faults(faults)
    ready = _prepared(run, choices, note)
    check_faults(faults, ready.fleet)
    tokenizer = tokenizer_of(ready.folder)
    sizes = [len(_prompt_tokens(prompt, ready.served, tokenizer)) for prompt in prompts]
    later = {fault.device for fault in faults if fault.kind == "join"}
    if not later.isdisjoint(ready.chain.devices):
        ready = ready._replace(chain=ready.plan([name for name in ready.fleet.names if name not in later]))
    note(chain_text(ready.chain))
    requests = [ServedRequest(size, min(most_tokens, ready.served.context - size)) for size in sizes]
    options = SimulationOptions(faults=faults, recovery=RecoveryTimes(timeout_s=ready.job.timeout_s))
    return ServingSimulation(ready.problem(ready.fleet.names), ready.chain, ready.plan, requests, options).run()
