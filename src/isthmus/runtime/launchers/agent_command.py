"""The command line of an agent. A ticket is no part of it: other users can read command lines.

A shell script that all nodes run: each starts the agent of its number. No ticket is in it.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from isthmus.runtime.launchers.launcher import AgentSpec

TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=auto")


def join_arguments(agent: AgentSpec, *state: str) -> list[str]:
    """Return the arguments of `isthmus`. `state` are options that say where the agent's key and its ticket are:
    `--state FOLDER`, `--attached` or `--ticket-file FILE`."""
    return ["join", "--name", agent.name, *state, *agent.arguments]


def agent_command(agent: AgentSpec, python: str, *state: str) -> list[str]:
    """`isthmus join` by this interpreter of the node, under torchrun for an island. `state` as of `join_arguments`."""
    start = (*TORCHRUN, "-m", "isthmus") if agent.island else ("-m", "isthmus")
    return [python, *start, *join_arguments(agent, *state)]


_BEGIN = """\
umask 077
ticket={ticket}
state={base}/$(sha256sum < "$ticket" | cut -c 1-16)
case "${number}" in
"""


def agent_script(agents: Sequence[AgentSpec], number: str, ticket: str, base: str, python: str = "python3") -> str:
    """For a POSIX shell. `number` is the variable with the node's number, from 0; `ticket` the path of its ticket's
    file, as a word of the shell, and `base` the folder of states. An agent that comes back with the same ticket finds
    its key there; with a new ticket it is a new member."""
    lines = [_BEGIN.format(ticket=ticket, base=base, number=number)]
    for place, agent in enumerate(agents):
        start, _, rest = shlex.join(agent_command(agent, python, "--state", "STATE")).partition(" --state STATE")
        lines.append(f'{place}) exec {start} --state "$state"{rest} < "$ticket" ;;\n')
    return "".join([*lines, "esac\n"])
