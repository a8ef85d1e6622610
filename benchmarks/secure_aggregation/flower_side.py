"""Flower's SecAgg+: its workflow of the server and its client mod, in one process, and no network between them.

Prints one line of JSON per case that it reads: seconds of one core, bytes to and from the server, and the largest error
of the mean.
"""
# Runs in an environment of its own, whose packages the type checker does not see.
# pyright: basic, reportMissingImports=false

from __future__ import annotations

import json
import logging
import sys
import time

import numpy as np
from flwr.client.mod import secaggplus_mod
from flwr.common import ConfigRecord, Context, Message, RecordDict, ndarrays_to_parameters, parameters_to_ndarrays
from flwr.common.serde import message_from_proto, message_to_proto
from flwr.common.typing import Code, FitIns, FitRes, Status
from flwr.compat.common import recorddict_compat as compat
from flwr.server import LegacyContext, ServerConfig
from flwr.server.workflow import SecAggPlusWorkflow
from flwr.server.workflow.constant import MAIN_CONFIGS_RECORD, MAIN_PARAMS_RECORD, Key
from flwr.supercore.task_identity import TaskIdentity

TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, 1 << 40, 1
logging.getLogger("flwr").setLevel(logging.ERROR)


class Proxy:
    def __init__(self, node_id: int) -> None:
        self.node_id, self.cid = node_id, str(node_id)


class Strategy:
    """The cohort, and what comes out."""

    def __init__(self, clients: int, parameters: object) -> None:
        self.proxies = [Proxy(number + 1) for number in range(clients)]
        self._parameters = parameters
        self.results: list = []

    def configure_fit(self, server_round, parameters, client_manager):
        return [(proxy, FitIns(self._parameters, {})) for proxy in self.proxies]

    def aggregate_fit(self, server_round, results, failures):
        self.results = results
        return results[0][1].parameters, {}


class Manager:
    def num_available(self) -> int:
        return 0


class InProcess:
    """A grid whose clients are functions. Of every `lost` clients one has no reply after it dealt its shares."""

    def __init__(self, updates: list[np.ndarray], lost: int) -> None:
        self._updates, self._lost = updates, lost
        self._contexts: dict[int, Context] = {}
        self.up = self.down = self.stages = 0
        self.copying_s = 0.0
        """Of serializing messages, which does not count."""

    def send_and_receive(self, messages, *, timeout=None):
        self.stages += 1
        replies = []
        for asked in messages:
            message = asked
            node = message.metadata.dst_node_id
            begun = time.process_time()
            sent = message_to_proto(message)  # as clients get a copy
            self.down += sent.content.ByteSize()
            message = message_from_proto(sent)
            self.copying_s += time.process_time() - begun
            if self.stages >= 3 and self._lost and node % self._lost == 0:
                continue
            if node not in self._contexts:
                self._contexts[node] = Context(1, node, {}, RecordDict(), {})
            reply = secaggplus_mod(message, self._contexts[node], self._train)
            begun = time.process_time()
            self.up += message_to_proto(reply).content.ByteSize()
            self.copying_s += time.process_time() - begun
            replies.append(reply)
        return replies

    def _train(self, message: Message, context: Context) -> Message:
        values = ndarrays_to_parameters([self._updates[context.node_id - 1]])
        result = FitRes(Status(Code.OK, ""), values, 100, {})
        return Message(compat.fitres_to_recorddict(result, keep_input=False), reply_to=message)


def measured(case: dict[str, int]) -> dict[str, float]:
    draws = np.random.default_rng(0)
    updates = [draws.standard_normal(case["numbers"]).astype(np.float32) for _ in range(case["sites"])]
    parameters = ndarrays_to_parameters([np.zeros(case["numbers"], dtype=np.float32)])
    strategy = Strategy(case["sites"], parameters)
    content = RecordDict()
    context = LegacyContext(Context(0, 0, {}, content, {}), ServerConfig(num_rounds=1), strategy, Manager())
    context.state.array_records[MAIN_PARAMS_RECORD] = compat.parameters_to_arrayrecord(parameters, keep_input=True)
    context.state.config_records[MAIN_CONFIGS_RECORD] = ConfigRecord({Key.CURRENT_ROUND: 1})
    workflow = SecAggPlusWorkflow(num_shares=case["shares"], reconstruction_threshold=case["threshold"])
    grid = InProcess(updates, case["lost"])
    begun = time.process_time()
    workflow(grid, context)
    seconds = time.process_time() - begun - grid.copying_s
    there = [u for n, u in enumerate(updates, 1) if not (case["lost"] and n % case["lost"] == 0)]
    (_, result) = strategy.results[0]
    (found,) = parameters_to_ndarrays(result.parameters)
    error = float(np.abs(found - np.mean(there, 0)).max())
    return {"seconds": seconds, "up": grid.up, "down": grid.down, "error": error}


for line in sys.stdin:
    print(json.dumps(measured(json.loads(line))), flush=True)
