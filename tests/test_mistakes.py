"""Mistakes, each made for real: one line says what is wrong, the exit code is that of an error of the user's, and no
file is changed."""

from __future__ import annotations

import contextlib
import hashlib
import io
import shlex
import shutil
import socket
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import pytest
from torch import Tensor, nn

import isthmus
from isthmus.errors import IsthmusError
from tests.runtime.commands import isthmus as command
from tests.runtime.commands import write_job

EXAMPLES = Path(__file__).parents[1] / "examples"
FEDERATED = """
name = "few"

[model]
name = "mlp"
options = { features = 64, width = 4, layers = 1, classes = 10 }

[data]
kind = "digits"
options = { flat = true, holdout = 0.2 }

[federated.partition]
clients = 10

[federated]
algorithm = "fedavg"
rounds = 2

[federated.participation]
clients = 3

[runtime]
executors = 1
"""
SWEEP = 'name = "rates"\njob = "job.toml"\nseeds = [0]\n[grid]\ntraining.steps = [1, 2]\n'
FLEET = '[[device]]\nname = "a"\nregion = "x"\ncompute = "1 GFLOPS"\nmemory = "{memory}"\n'

COMMANDS = """
trian job.toml                                        | No such command 'trian'. Did you mean 'train'
plan                                                  | isthmus plan: Missing argument 'JOB.toml'
plan nothing.toml                                     | job file nothing.toml: not found
plan .                                                | job file .: cannot be read: Is a directory
plan notes.txt                                        | not valid TOML: Expected '='
plan binary.toml                                      | binary.toml: cannot be read: not UTF-8 text (byte 128)
plan empty.toml                                       | empty.toml: missing key 'name'
plan fleet.toml                                       | is a fleet's file: a job names it, or `--fleet fleet.toml`
plan sweep.toml                                       | is a sweep's file: `isthmus sweep sweep.toml`
plan site.toml                                        | is a site's file: `isthmus join --site site.toml`
plan fed.toml                                         | fed.toml: got a federated job
plan job.toml --stesp 3                               | No such option: --stesp (Possible options: --max-step, --set
plan job.toml extra                                   | Got unexpected extra argument(s) (extra)
plan job.toml --fleet laptpo                          | unknown fleet 'laptpo': did you mean 'laptop'?
plan job.toml --fleet nothing.toml                    | nothing.toml: cannot read the fleet: No such file
plan job.toml --fleet job.toml                        | job.toml: top level: unknown key 'fleet'
plan job.toml --fleet random:0:1                      | random fleet: got 0 devices, expected 1 to 100000
plan job.toml --fleet small.toml                    3 | short
plan job.toml --planner atuo                          | unknown planner 'atuo': did you mean 'auto'?
plan job.toml --planner nomodule:f                    | planner 'nomodule:f': cannot import nomodule
plan job.toml --planner math:pi                       | planner 'math:pi': got a float, expected a function
plan job.toml --devices 0                             | Invalid value for '--devices': expected at least 1
plan job.toml --devices two                           | Invalid value for '--devices': expected a valid integer
plan job.toml --devices 9                             | fleet 'laptop': got 9 devices to keep, expected 1 to 2
plan job.toml --objective speed                       | '--objective': 'speed' is not one of 'time', 'cost'
plan job.toml --objective cost                        | plan.objective: got 'cost', which planner 'even' cannot
plan job.toml --max-step 3                            | --max-step: got '3' (the unit is missing)
plan job.toml --objective cost --max-price 3          | plan.max_price: got 3 with objective 'cost'
plan job.toml --set training.stepz=3                  | unknown key 'training.stepz': did you mean 'training.steps'?
plan job.toml --set training.steps                    | --set: got 'training.steps', expected KEY=VALUE
plan job.toml --set training.steps=many               | training.steps: expected 'integer', got 'text'
plan job.toml --set training.steps=-1                 | training.steps: expected 'integer' >= 1, got -1
plan job.toml --set runtime.timeout=5                 | runtime.timeout: got 5, expected a text with a unit, as "5 s"
plan job.toml --set runtime.emulate=maybe             | runtime.emulate: expected 'true or false', got 'text'
plan job.toml --set model.options.width=15            | gpt option 'width': 15 is no multiple of heads=2
plan job.toml --set model.options.wdith=16            | unknown gpt option 'wdith': did you mean 'width'?
plan job.toml --set model.name=gtp                    | unknown model 'gtp': did you mean 'gpt'?
plan job.toml --set model.name=nomodule:build         | model 'nomodule:build': cannot import nomodule
plan job.toml --set data.kind=txt                     | unknown data kind 'txt': did you mean 'text'?
plan job.toml --set data.options.files=nothing.txt    | text option 'files': no file matches 'nothing.txt'
plan job.toml --set data.options.max_bytes=3          | got 3 tokens from 1 texts, expected at least sequence_length + 1
plan job.toml --set training.batch_size=7             | training.batch_size: got 7, expected a multiple of
plan job.toml --set training.batch_size=100000        | training.batch_size: got 100000, expected at most
plan job.toml --set 'optimizer=[{name="adamm"}]'      | unknown optimizer[0].name 'adamm': did you mean 'adamw'?
plan job.toml --set 'optimizer=[{lr=-3}]'             | optimizer[0].lr: expected 'number' >= 0.0, got -3
plan job.toml --set 'metrics=["acuracy"]'             | unknown metric 'acuracy': did you mean 'accuracy'?
plan job.toml --set schedule=1f2b                     | unknown schedule '1f2b': did you mean '1f1b'?
plan job.toml --set sync.mode=none                    | unknown sync.mode 'none': expected one of: decoupled
plan job.toml --set 'compression={method="int5"}'     | compression.method: unknown method 'int5'
plan job.toml --set 'learning_rate={schedule="cosin"}'| unknown learning_rate.schedule 'cosin'
plan job.toml --set runtime.engine=jaxx               | runtime.engine: unknown engine 'jaxx': did you mean 'jax'?
plan job.toml --set run_dir=s3://x                    | run_dir: got 's3://x', expected a path of this machine
plan job.toml --set name=a/b                          | job.toml: name: expected 'text' matching
plan job.toml --set plan.data_holder=nobody           | plan.data_holder: fleet 'laptop': unknown device or region
plan job.toml --compare atuo                          | unknown planner 'atuo': did you mean 'auto'?
plan job.toml --compare even --explain                | got --compare and --explain, expected --compare without the oth
plan job.toml --prove 5                               | --prove: got '5' (the unit is missing), expected a duration
plan job.toml --what-if devic=laptop-0                | --what-if: got 'devic=laptop-0', expected all; device=NAME
plan job.toml --what-if device=laptop-7               | unknown device 'laptop-7': did you mean 'laptop-1'?
plan job.toml --loss-budget -1                        | --loss-budget: got -1, expected a share of at least 0
plan job.toml --picture nodir/plan.png                | --picture nodir/plan.png: nodir is not a folder
plan job.toml --picture job.toml                      | --picture: got job.toml, expected a name that ends in .png
plan job.toml --picture s3://bucket/plan.png          | '--picture': got 's3://bucket/plan.png', expected a path of th
plan job.toml --verify nothing.json                   | plan file nothing.json: not found
plan job.toml --verify runs/small/job.json            | Expected `text`, got `table` - at `$.model`; `isthmus plan --jso
plan job.toml --bound-unchecked                       | plan: --bound-unchecked is for --verify
plan decoupled.toml --explain                         | got --explain with sync.mode 'decoupled'
init --task texts new                                 | unknown task 'texts': did you mean 'text'?
init --devices 1 new                                  | devices: got 1, expected at least 2
init --name 'a b' new                                 | name: got 'a b', expected letters
init --data nothing.txt new                           | data: no file nothing.txt
init --clients 3 new                                  | --clients: got it for text, expected it with --task federated
init .                                                | has job.toml, fleet.toml already, which `init` does not over
example gpt                                           | unknown example 'gpt': expected one of: decoupled
example gpt-stdlib notes.txt                          | notes.txt: File exists
simulate job.toml --fault laptop-0                    | --fault: got 'laptop-0', expected a device, link:A:B or
simulate job.toml --fault laptop-9@1s                 | unknown device in --fault 'laptop-9': did you mean 'laptop-1'?
simulate job.toml --slow laptop-0@1s                  | --slow: got 'laptop-0@1s', expected a device, a time and a fact
simulate job.toml --plan notes.txt                    | plan file notes.txt: cannot be read: JSON is malformed
simulate job.toml --plan runs/small/plan.json --fleet three-sites | plan file runs/small/plan.json: unknown device 'lapt
simulate job.toml --trace nodir/t.json                | --trace nodir/t.json: nodir is not a folder
simulate fed.toml --trace t.json                      | --trace: got t.json in a federated job
simulate fed.toml --fault executor-7@1s               | unknown executor in --fault 'executor-7'
simulate decoupled.toml --picture t.png              | got --picture with sync.mode 'decoupled', expected --trace
graph fed.toml                                        | fed.toml: got a federated job
describe-data job.toml --out nodir/x                  | --out nodir/x: nodir is not a folder
train job.toml --scheme ours                          | --scheme: got ours in a job without a table [federated]
train fed.toml --steps 3                              | --steps: got 3 in a federated job
train fed.toml --fleet laptop                         | --fleet: got laptop in a federated job
train fed.toml --scheme our                           | unknown scheme 'our': did you mean 'ours'?
train fed.toml --set federated.rounds=0               | federated.rounds: expected 'integer' >= 1, got 0
train fed.toml --set federated.algorithm=fedavgg      | unknown algorithm 'fedavgg': did you mean 'fedavg'?
train fed.toml --set federated.participation.clients=30 | federated.participation.clients: got 30, expected at most
train fed.toml --set federated.participation.fraction=0.5 | federated.participation: got both of clients and fraction
train fed.toml --set training.epochs=null              | training.epochs: expected 'integer', got 'null'
train fed.toml --set federated.partition.scheme=dirichlt | unknown federated.partition.scheme 'dirichlt'
train fed.toml --set federated.partition.clients=100000 | federated.partition.clients: got 100000, expected at most
train fed.toml --set runtime.planner=certifid       | unknown runtime.planner 'certifid'
train net.toml --set 'metrics=["accuracy"]'            | model (it takes x, labels), given evaluation columns pixel
train net.toml --set data.options.holdout=0 --set training.eval_clients=2| given client 0's columns pixel
train fed.toml --set 'metrics=["acc"]'                | unknown metric 'acc': did you mean 'accuracy'?
train deploy.toml                                     | this job has sites: `isthmus serve JOB` trains there
train deploy.toml --set data.kind=digits               | among clients: this job has sites: `isthmus serve JOB`
train job.toml --resume --run nothing                 | run folder nothing: not found, or not a run (no job.json)
train job.toml --resume --run runs                    | run folder runs: not found, or not a run (no job.json)
train job.toml --resume --run runs/few                | run folder runs/few: holds a federated job
train fed.toml --resume --run runs/small              | run folder runs/small: holds a pipeline job
train job.toml --run runs/small                       | --run runs/small: holds a run already; add --resume
train job.toml --run notes.txt                        | --run notes.txt: exists and is not an empty directory
train job.toml --resume --steps 6 --set model.options.width=32 + | model.options.width was 16, is now 32
train job.toml --resume --steps 6 --set data.options.max_bytes=50000 + | resume: data: device 'laptop-0' has other
train fed.toml --set training.epoch=3                  | unknown key 'training.epoch': did you mean 'training.epochs'?
train fed.toml --set training.learning_rate=3          | 'learning_rate' belongs to the top of the file
train fed.toml --resume --set training.epochs=3        | is of another job: training.epochs was 1, is now 3
train fed.toml --resume --set model.options.width=8   | is of another job: model.options.width was 4, is now 8
train job.toml --plan nothing.json                    | plan file nothing.json: not found
train job.toml --plan twice.json +                    | plan file twice.json: plan: got devices
train decoupled.toml --plan runs/small/plan.json      | --plan: got one with sync.mode 'decoupled'
train job.toml --set 'callback=[{name="nomodule:C"}]' | callback 'nomodule:C': cannot import nomodule
train job.toml --set 'track={with=["wandb"]}'         | unknown key 'track.with': expected one of: track.group
train job.toml --resume --run cut                     | stage-0.safetensors is not as it was saved: truncated or altered
train job.toml --resume --run unnamed                 | manifest.json: cannot be read: Input data was truncated
sweep nothing.toml                                    | sweep file nothing.toml: not found
sweep job.toml                                        | job.toml: is a job: `isthmus train job.toml` trains it
sweep sweep.toml --at-once 0                          | Invalid value for '--at-once': expected at least 1
sweep sweep.toml --resume                             | sweep folder runs/rates: not found, or no sweep
sweep sweep.toml --run runs/small                     | --run runs/small: exists and is not an empty directory
sweep sweep-key.toml                                  | unknown key 'training.stepz': did you mean 'training.steps'?
sweep sweep-job.toml                                  | job: got 'nothing.toml', expected a job file
describe gpd                                          | unknown name 'gpd': did you mean 'gpt'?
describe sites                                        | unknown name 'sites': did you mean 'site'?
trace nothing                                         | run folder nothing: not found, or not a run (no job.json)
trace unread                                          | run folder unread: job.json: cannot be read: Input data was
trace half                                            | trace half/trace.jsonl: not a trace: line
calibrate runs/few                                    | run folder runs/few: holds a federated job
calibrate runs/small --out nodir/f.toml               | --out nodir/f.toml: cannot be written: No such file or dir
export runs/small                                     | export: expected either DIR or --push USER/NAME
export runs/small notes.txt                           | export: notes.txt exists and is not an empty directory
export runs/small out --merge                         | --merge: the run's model has no LoRA
export runs/small s3://x                              | 'DIR': got 's3://x', expected a path of this machine
export cut out                                        | stage-0.safetensors is not as it was saved
export runs out                                       | run folder runs: not found, or not a run (no job.json)
audit runs/small --step 1                             | has no fingerprints, expected a run with `fingerprints = true`
audit runs/small                                      | isthmus audit: Missing option '--step'
generate runs/small                                   | got no prompt, expected --prompt TEXT or --tokens IDS
generate runs/small --tokens 1,b                      | --tokens: got '1,b', expected token ids, as 1,2,3
generate runs/small --prompt a --top-p 2              | Invalid value for '--top-p': expected at most 1
generate runs/small --prompt a --joined host:x        | --joined host:x: port: got 'x', expected a number
generate runs/few --prompt a                          | run folder runs/few: holds a federated job
serve-model runs                                      | run folder runs: not found, or not a run (no job.json)
serve-model runs/small --port {port}                  | cannot listen on 127.0.0.1:{port}: Address already in use
dashboard runs --port {port}                          | --port 0 takes a free one
dashboard nothing                                     | nothing: is not there, expected the folder of a run
dashboard --fleet --state nothing                     | no fleet was served from it: start `isthmus serve`
runs s3://x                                         | 'FOLDER': got 's3://x', expected a path of this machine
runs notes.txt                                        | notes.txt: is a file, expected the folder of a run
runs --remove nothing                                 | run folder runs/nothing: not found, or not a run
runs --remove .                                       | run folder .: not found, or not a run (no job.json)
serve --resume --port 0                               | --resume: got it without a job, expected JOB.toml
serve --fleet laptop --port 0                         | --fleet: got it without a job
serve job.toml --timeout soon --state state           | --timeout: got 'soon', expected a duration
serve job.toml --fleet laptpo --state state           | unknown fleet 'laptpo': did you mean 'laptop'?
serve job.toml --port {port} --state state            | cannot listen on 127.0.0.1:{port}: Address already in use
serve deploy.toml --port {port} --state state         | cannot listen on 127.0.0.1:{port}: Address already in use
serve fed.toml --state state --set runtime.scheme=sd  | runtime.scheme: got 'sd' with executors on devices that
serve --state notes.txt                               | notes.txt: cannot be made: File exists
submit job.toml --state nothing                       | no fleet was served from it: start `isthmus serve`
probe --engine jaxx                                   | --engine: unknown engine 'jaxx': did you mean 'jax'?
probe --device cuda:99                                | --device: got 'cuda:99', expected one of: auto, cpu
probe --out nodir/f.toml                              | --out nodir/f.toml: nodir is not a folder
probe --memory lots                                   | --memory: got 'lots', expected a size
up job.toml                                           | isthmus up: Missing option '--on'
up job.toml --on slrum                                | unknown --on 'slrum': did you mean 'slurm'?
up fed.toml --on local                                | --nodes: got none, and --on local starts as many as it is
up deploy.toml --on local --nodes 2                   | federated.deployment: got sites with `isthmus up`, expected
up fed.toml --on local --nodes 2 --measure            | --measure: got True in a federated job
up job.toml --on local                                | --nodes: got none, and --on local starts as many as it is
up job.toml --on slurm --on-option partitionn=x       | option 'partitionn': did you mean 'partition'?
join --data nodir                                     | --data nodir: not a folder
join --ticket-file nothing.txt --state state          | ticket nothing.txt: cannot be read: No such file or directory
join --ticket-file notes.txt --state state            | ticket notes.txt: got mode 0644, expected 0600
join --data-kinds txt --state state                   | unknown --data-kinds 'txt': did you mean 'text'?
join --device cpu --devices all --state state         | --devices: got it beside --device, expected one of the two
join --site job.toml --state state                    | job.toml: is a coordinator's job, expected a site's file
join --shard --state state                            | --shard: got it without torchrun
jobs --state nothing                                  | no fleet was served from it: start `isthmus serve`
status --state nothing                                | no fleet was served from it: start `isthmus serve`
logs 3 --state nothing                                | no fleet was served from it: start `isthmus serve`
stop --state nothing                                  | no fleet was served from it: start `isthmus serve`
resume --state nothing                                | no fleet was served from it: start `isthmus serve`
ticket --count 0                                      | Invalid value for '--count': expected at least 1
devices --state nothing --revoke x                    | no fleet was served from it: start `isthmus serve`
drain --state nothing                                 | isthmus drain: Missing argument 'DEVICE'
site maybe                                            | 'maybe' is not one of 'log', 'yes', 'no'
site log --state nothing                              | --state nothing: no such folder, expected the one of
doctor --ticket-file nothing.txt                      | ticket nothing.txt: cannot be read: No such file or directory
"""
"""What is typed, the exit code where it is not 2, and a piece of the one line. A `+` marks a mistake that is known
once the model is captured: progress is printed before."""
CALLS = """
train()                                               | model, data: missing, expected a job, or a model and its data
train(3)                                              | job: got 3, expected a Job or a job file
train('nothing.toml')                                 | job file nothing.toml: not found
plan('fed.toml')                                      | fed.toml: got a federated job
train('job.toml', overrides={'training.stepz': 3})    | unknown key 'training.stepz': did you mean 'training.steps'?
train('job.toml', model=net)                          | train: got a job and model, expected one or the other
train('job.toml', plan='nothing.json')                | plan file nothing.json: not found
train('job.toml', run='runs/small')                   | runs/small: holds a run already
train(model=net, data=data, stepz=1)                  | unknown train argument 'stepz': did you mean 'steps'?
train(model=net, data=data, steps=0)                  | training.steps: expected 'integer' >= 1, got 0
train(model=net, data=data, batch=16)                 | batch: got 16, expected at most 8
train(model=net, data=none)                           | data: holds no samples
train(model=net, data=one, batch=4)                   | batch: got 4, expected at most 1
train(model=net, data=uneven)                         | data: columns differ in length: {'x': 8, 'labels': 5}
train(model=net, data='nothing')                      | data: str has no __len__ and no __getitem__, expected a mapping
train(model=net, data=data, fleet='laptpo')           | unknown fleet 'laptpo': did you mean 'laptop'?
train(model=net, data=data, optimizer='adam')         | optimizer: got 'adam', expected an optimizer of torch.optim
train(model=net, data=data, metrics=['acc'])          | unknown metric 'acc': did you mean 'accuracy'?
train(model='net', data=data)                         | model: got 'net', expected an nn.Module
plan(net, 'laptop')                                   | plan: inputs: missing
plan(net, 'laptop', inputs=3)                         | plan: inputs: got 3, expected tensors
plan(net, 'laptop', inputs=data, planner='atuo')      | unknown planner 'atuo': did you mean 'auto'?
plan(net, 'laptop', inputs=data, batch=0)             | batch: got 0, expected at least 1
simulate('nothing.json', 'laptop')                    | nothing.json: not found
federate(3)                                           | job: got 3, expected a FederatedJob or a job file
federate('job.toml')                                  | job.toml: unknown key
federate(model=net, clients=[])                       | clients: got none, expected at least one
federate(model=net, clients=data)                     | clients: got columns x, labels, expected the data of each client
federate(model=net, clients=[data], rounds=0)         | federated.rounds: expected 'integer' >= 1, got 0
federate(model=net, clients=[data], algorithm='avg')  | unknown algorithm 'avg'
federate(model=net, clients=[data, {'x': data['x']}]) | clients: 1: has columns x, expected x, labels
sweep('sweep.toml', at_once=-1)                       | at_once: got -1, expected at least 1
what_if('job.toml', ['devic=x'])                      | --what-if: got 'devic=x', expected all
Run('nothing')                                        | run folder nothing: not found, or not a run (no job.json)
Run('runs/small').load(net)                           | is not in Net
up('job.toml', on='slrum')                            | unknown --on 'slrum': did you mean 'slurm'?
probe(device='cuda:99')                               | --device: got 'cuda:99', expected one of: auto, cpu
"""
"""In Python: what is raised, with exit code 2."""


def rows(table: str) -> list[tuple[str, str]]:
    found = (line.partition("|") for line in table.strip().splitlines())
    return [(typed.strip(), said.strip()) for typed, _, said in found]


class Net(nn.Module):
    """Two columns are enough to make mistakes with."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 2)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.inner(x), labels)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Jobs, runs, and files that are damaged or of another kind."""
    path = tmp_path_factory.mktemp("mistakes")
    job = write_job(path, steps=3)
    job.write_text(job.read_text().replace(f'run_dir = "{path}/runs"', ""))
    for name, text in (
        ("fed.toml", FEDERATED),
        ("net.toml", FEDERATED.replace('"mlp"\noptions', '"tests.test_mistakes:Net"\n# options')),
        ("sweep.toml", SWEEP),
        ("sweep-key.toml", SWEEP.replace("steps", "stepz")),
        ("sweep-job.toml", SWEEP.replace("job.toml", "nothing.toml")),
        ("fleet.toml", FLEET.format(memory="1 GiB")),
        ("small.toml", FLEET.format(memory="10 kB")),
        ("notes.txt", "hello\n"),
        ("empty.toml", ""),
    ):
        (path / name).write_text(text)
    (path / "notes.txt").chmod(0o644)
    (path / "binary.toml").write_bytes(bytes(range(256)))
    shutil.copy(EXAMPLES / "decoupled.toml", path)
    shutil.copy(EXAMPLES / "pipeline-client" / "north.toml", path / "site.toml")
    shutil.copy(EXAMPLES / "pipeline-client" / "fed.toml", path / "deploy.toml")
    with contextlib.chdir(path):
        assert command("train", "job.toml").code == 0
        assert command("train", "fed.toml").code == 0
    damage(path)
    yield path


def damage(path: Path) -> None:
    """Copies of the run, of which a file each is no longer whole."""
    run = path / "runs" / "small"
    for name in ("unread", "half", "cut", "unnamed"):
        shutil.copytree(run, path / name)
    (path / "unread" / "job.json").write_text('{"name"')
    traced = (run / "trace.jsonl").read_text()
    (path / "half" / "trace.jsonl").write_text(traced[: len(traced) // 2])
    saved = Path("checkpoints") / "step-000003"
    (path / "cut" / saved / "stage-0.safetensors").write_bytes(b"short")
    (path / "unnamed" / saved / "manifest.json").write_text("{")
    (path / "twice.json").write_text((run / "plan.json").read_text().replace("laptop-1", "laptop-0"))


def contents(path: Path) -> Mapping[str, str]:
    """Digests of all files, but for what a fleet's state folder gets."""
    files = (file for file in path.rglob("*") if file.is_file() and "state" not in file.relative_to(path).parts)
    return {str(file.relative_to(path)): hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


@pytest.fixture
def unchanged(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The test is in the folder, and leaves it as it was."""
    monkeypatch.chdir(folder)
    before = contents(folder)
    yield
    assert contents(folder) == before


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    """One that is in use."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener.getsockname()[1]


@pytest.mark.usefixtures("unchanged")
@pytest.mark.parametrize(("typed", "said"), rows(COMMANDS), ids=lambda text: text[:60])
def test_a_mistake_is_answered_in_one_line(typed: str, said: str, port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO()))
    *words, last = shlex.split(typed.replace("{port}", str(port)))
    progress, code = last == "+", int(last) if last == "3" and words[-1] == "small.toml" else 2
    done = command(*words, *([] if progress or code == 3 else [last]))
    lines = done.err.splitlines()
    assert (done.code, len(lines) == 1 or progress) == (code, True), done
    assert lines[-1].startswith("error: ") and said.replace("{port}", str(port)) in lines[-1], lines
    assert "Traceback" not in done.err and (progress or not done.out), done


@pytest.mark.usefixtures("unchanged")
@pytest.mark.parametrize(("call", "said"), rows(CALLS), ids=lambda text: text[:60])
def test_a_mistake_in_python_is_raised_in_one_line(call: str, said: str) -> None:
    data = {"x": np.zeros((8, 4), np.float32), "labels": np.zeros(8, np.int64)}
    given = {
        "net": Net(),
        "data": data,
        "none": {name: column[:0] for name, column in data.items()},
        "one": {name: column[:1] for name, column in data.items()},
        "uneven": {**data, "labels": data["labels"][:5]},
    }
    with pytest.raises(IsthmusError) as raised:
        eval(f"isthmus.{call}", {"isthmus": isthmus, **given})
    assert raised.value.exit_code == 2
    assert said in str(raised.value) and "\n" not in str(raised.value), raised.value
