"""The algorithm of job.toml: FedAvg, with momentum on the server. Change it as you like.

A model is one vector: its parameters, one after another. Keep operations elementwise, or over the last dimension: then
the same lines train many clients at once.
"""

from isthmus.federated import Algorithm, ClientUpdate


class MyAlgorithm(Algorithm, frozen=True):
    """Options of [federated] in job.toml are these fields."""

    momentum: float = 0.5

    @property
    def returns(self):
        """The client's results, and how the server combines them."""
        return {"change": "weighted_mean"}

    def init_server(self, model):
        """The server's values before the first round."""
        return {"model": model, "velocity": 0 * model}

    def client(self, local, broadcast, state):
        """One client in one round: SGD from the server's model, over its own data."""
        return ClientUpdate(values={"change": local.descend(broadcast["model"])})

    def server(self, server, combined, cohort):
        """The server's next values."""
        velocity = self.momentum * server["velocity"] + combined["change"]
        return {"model": server["model"] + velocity, "velocity": velocity}
