"""Train a small network on scikit-learn's data set of handwritten digits, on a Ray cluster.

    python examples/cluster/ray_digits.py                        # 2 to 4 workers, if Ray has resources for them
    python examples/cluster/ray_digits.py --workers 2 16 --sync elastic-bsp

Without a cluster, Ray starts one on this machine, which needs at least 3 CPUs: one for the server and one for each of
two workers. All nodes need the same packages: pip install 'paceline[ray,demo]'
"""

import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split

import paceline


def load() -> tuple[TensorDataset, TensorDataset]:
    """Return the training data and the test data."""
    digits = load_digits()
    images = torch.tensor(digits.images / 16, dtype=torch.float32).flatten(1)
    data = TensorDataset(images, torch.tensor(digits.target))
    train_part, test_part = random_split(data, [0.8, 0.2], generator=torch.Generator().manual_seed(0))
    return TensorDataset(*train_part[:]), TensorDataset(*test_part[:])


def make() -> nn.Module:
    """Return the untrained model."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


def train(epochs: int) -> None:
    """Train the model; each worker calls this function."""
    plain = make()
    sgd = torch.optim.SGD(plain.parameters(), lr=0.05, momentum=0.9)
    batches = DataLoader(load()[0], batch_size=16, shuffle=True)
    model, optimizer, loader = paceline.prepare(plain, sgd, batches)
    # The loss of the last batch. A worker that joins late may have no batch in its first epoch.
    loss = torch.tensor(float("nan"))
    for epoch in paceline.epochs(epochs):
        for x, y in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
        if paceline.is_main():
            print(f"epoch {epoch}: loss {loss.item():.3f}")


def main() -> None:
    """Train on the cluster, and evaluate the weights that return to this program."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--workers", type=int, nargs=2, default=[2, 4], metavar=("MIN", "MAX"))
    parser.add_argument("--sync", default="bsp", help="Sync model. Default: bsp.")
    parser.add_argument("--epochs", type=int, default=10, help="Number of epochs. Default: 10.")
    parser.add_argument("--engine", default="ray", help="Where the workers run. Default: ray.")
    options = parser.parse_args()
    workers = tuple(options.workers) if options.engine == "ray" else options.workers[0]
    result = paceline.launch(
        train, args=(options.epochs,), workers=workers, sync=options.sync, engine=options.engine
    )
    model = make()
    model.load_state_dict(result.state_dict)
    x, y = load()[1][:]
    with torch.inference_mode():
        accuracy = (model(x).argmax(dim=1) == y).float().mean()
    print(f"accuracy on {len(y)} test images: {accuracy:.1%}")


if __name__ == "__main__":
    main()
