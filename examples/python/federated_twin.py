"""FedAvg twice: by Isthmus, and by the loop that everybody would write. Both end at the same weights.

Run it: python federated_twin.py
"""

import torch
from sklearn.datasets import load_digits
from torch import nn

import isthmus

ROUNDS, RATE = 5, 0.1
digits = load_digits()
pixels = torch.tensor(digits.data / 16, dtype=torch.float32)
labels = torch.tensor(digits.target)
parts = torch.arange(len(labels)).chunk(10)
clients = [{"input": pixels[part], "target": labels[part]} for part in parts]


def module() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))


def naive() -> dict[str, torch.Tensor]:
    """All clients in every round, one step on all data of a client: no order of batches to agree on."""
    server = {name: value.clone() for name, value in module().state_dict().items()}
    for _ in range(ROUNDS):
        total = {name: torch.zeros_like(value) for name, value in server.items()}
        for client in clients:
            model = module()
            model.load_state_dict(server)
            optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
            nn.functional.cross_entropy(model(client["input"]), client["target"]).backward()
            optimizer.step()
            for name, value in model.state_dict().items():
                total[name] += value * len(client["target"])
        server = {name: value / len(labels) for name, value in total.items()}
    return server


if __name__ == "__main__":
    result = isthmus.federate(
        model=module,
        clients=clients,
        loss=nn.functional.cross_entropy,
        rounds=ROUNDS,
        name="twin",
        test={"input": pixels, "target": labels},
        overrides={"training.batch_size": 1000, "learning_rate": RATE},
    )
    weights = result.model.state_dict()
    worst = max((weights[name] - value).abs().max().item() for name, value in naive().items())
    print(f"largest difference after {ROUNDS} rounds: {worst:.1e}")
