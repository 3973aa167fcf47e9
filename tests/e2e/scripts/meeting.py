"""Ranks that meet at every step over TCP, as those of a real training do, without torch."""

import os
import socket
import time

LOST = "Connection closed by peer"


class Meeting:
    """All ranks of a round. `step` raises when one of them is gone, as a collective would."""

    def __init__(self) -> None:
        self.rank, self.world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        address = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
        if self.rank == 0:
            with socket.create_server(address, backlog=self.world) as server:
                self._peers = [server.accept()[0] for _ in range(self.world - 1)]
        else:
            self._peers = [_connected(address)]

    def step(self, *, go_on: bool) -> bool:
        """Whether rank 0 wants to go on; everybody has come when it returns."""
        if self.rank:
            self._peers[0].sendall(b"!")
            return _byte(self._peers[0]) == b"!"
        for peer in self._peers:
            _byte(peer)
        for peer in self._peers:
            peer.sendall(b"!" if go_on else b".")
        return go_on

    def close(self) -> None:
        """Leave: the others lose this rank."""
        for peer in self._peers:
            peer.close()


def _byte(peer: socket.socket) -> bytes:
    found = peer.recv(1)
    if not found:
        raise RuntimeError(LOST)
    return found


def _connected(address: tuple[str, int]) -> socket.socket:
    while True:
        try:
            return socket.create_connection(address)
        except ConnectionError:
            time.sleep(0.01)
