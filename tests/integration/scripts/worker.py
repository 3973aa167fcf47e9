"""Uses what a training uses: a pickled class of `__main__`, spawned processes, data workers."""

import json
import multiprocessing
import os
import pickle
import random
import socket
import sys

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset


class Numbers(Dataset[int]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> int:
        return index


class Thing:
    pass


def square(number: int) -> int:
    return number * number


def asked_over_unix(path: str) -> str:
    with socket.socket(socket.AF_UNIX) as wire:
        wire.connect(path)
        wire.sendall(b"POST /handler/ping HTTP/1.0\r\nContent-Length: 0\r\n\r\n")
        return wire.recv(4096).decode().splitlines()[0]


if __name__ == "__main__":
    assert type(pickle.loads(pickle.dumps(Thing()))) is Thing
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        squares = pool.map(square, [1, 2, 3])
    loaded = [batch.tolist() for batch in DataLoader(Numbers(), batch_size=4, num_workers=2)]
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(5):
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
    print(
        json.dumps(
            {
                "squares": squares,
                "loaded": loaded,
                "numpy": int(np.random.randint(1 << 30)),
                "random": random.random(),
                "torch": torch.initial_seed(),
                "threads": torch.get_num_threads(),
                "pong": asked_over_unix(os.environ["EVERSTEP_RANK_DIR"] + "/worker.sock"),
                "argv": sys.argv[1:],
            }
        )
    )
