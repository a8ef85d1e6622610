"""Flower 1.41's simulation: Ray actors of one core each, its FedAvg, messages in memory.

The strategy says which client a message is for, so that the cohort is everybody's. Model and samples stay in an actor's
memory from one client to the next: Flower's examples build both anew, which would be slower.
"""
# Runs in an environment of its own, whose packages the type checker does not see.
# pyright: basic, reportMissingImports=false

from __future__ import annotations

import os
from functools import cache
from pathlib import Path

import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation
from task import Rounds, Task, weights_of

FOLDER = "COMPARED_TASK"
ACTORS = 2
"""That share a GPU, as our executors do."""

client_app = ClientApp()


@cache
def kept() -> tuple[Task, torch.nn.Module]:
    torch.set_num_threads(1)
    task = Task(Path(os.environ[FOLDER]))
    return task, task.model()


@client_app.train()
def train(message: Message, context: Context) -> Message:
    task, module = kept()
    config = message.content["config"]
    round_, client = int(config["round"]), int(config["client"])
    module.load_state_dict(message.content["arrays"].to_torch_state_dict())
    optimizer = torch.optim.SGD(module.parameters(), lr=task.learning_rate)
    for pixels, labels in task.batches(round_, client):
        optimizer.zero_grad()
        module(pixels, labels)["loss"].backward()
        optimizer.step()
    content = {
        "arrays": ArrayRecord(module.state_dict()),
        "metrics": MetricRecord({"num-examples": task.samples(client)}),
    }
    return Message(content=RecordDict(content), reply_to=message)


class Given(FedAvg):
    """FedAvg with the cohorts that are given."""

    def __init__(self, task: Task) -> None:
        super().__init__(fraction_evaluate=0.0, min_available_nodes=task.clients)
        self._task = task
        self.rounds = Rounds()

    def configure_train(self, server_round, arrays, config, grid):
        if server_round > 1:
            self.rounds.end()
        nodes = list(grid.get_node_ids())
        while len(nodes) < self._task.clients:
            nodes = list(grid.get_node_ids())
        round_ = server_round - 1
        return [
            Message(
                content=RecordDict({"arrays": arrays, "config": ConfigRecord({"round": round_, "client": client})}),
                message_type="train",
                dst_node_id=node,
            )
            for client, node in zip(self._task.cohorts[round_], nodes, strict=False)
        ]


def run(task: Task, folder: Path, _: dict[str, int]) -> None:
    os.environ[FOLDER] = str(task.folder)
    server_app = ServerApp()

    @server_app.main()
    def main(grid: Grid, context: Context) -> None:
        module = task.model()
        strategy = Given(task)
        result = strategy.start(grid, ArrayRecord(module.state_dict()), num_rounds=task.rounds)
        strategy.rounds.end()
        module.load_state_dict(result.arrays.to_torch_state_dict())
        strategy.rounds.write(folder, weights_of(module))

    run_simulation(
        server_app,
        client_app,
        num_supernodes=task.clients,
        backend_config={
            "client_resources": {"num_cpus": 1, "num_gpus": 0.0 if task.device == "cpu" else 1 / ACTORS},
            "init_args": {"num_cpus": ACTORS, "logging_level": "error", "log_to_driver": False},
        },
    )
