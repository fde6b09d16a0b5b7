"""Messages between the processes of one host, through memory that they share.

gloo hands each message to threads on both sides, which wake each other: a sum of a few numbers over four ranks takes
milliseconds of processor time. Here the calling thread itself writes and reads. A small message goes through a Unix
socket; a larger one is written to blocks of the sender's memory, and the socket names them. Sending never waits for the
receiver. If a process ends, its sockets close and the others notice at once; no file is left behind.
"""

import json
import mmap
import os
import platform
import secrets
import select
import socket
import struct
import sys
import time
import weakref
import zlib
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

SWITCH = "SEQPAR_SHARED_MEMORY"  # 0: all messages go through gloo
LARGEST = 1 << 24  # bytes of a message; gloo sends larger ones in the background, without a copy of them
INLINE = 1 << 13  # bytes that go through the socket itself
_PAGE = 1 << 12
_FORMAT = 2  # of letters and blocks; processes with other ones send through gloo
_BLOCK = 1 << 18  # bytes
_NUM_BLOCKS = 1 << 13  # of a process's shared memory, at most
_NUM_MAPPED = 4
_HEADER = struct.Struct("<IIQ")  # channel, number of blocks that are listed next (0: the message itself), bytes
_BUFFER = 1 << 22  # bytes that a socket may hold; the kernel may allow fewer


class Address(NamedTuple):
    """Where a process can be reached by others of its host, and what they must show."""

    place: str  # equal for processes that can reach each other
    name: str
    secret: str


class _Blocks:
    """Blocks of a process's shared memory, as it and others see them, and marks that say who has yet to read them.

    The first few are mapped, which is quicker; those beyond are written and read by the kernel, as a socket's bytes
    are. They count towards the memory of a job or container, but are in no process's resident memory.
    """

    def __init__(self, file: int, num_readers: int) -> None:
        self.file, self._num_readers, self._all_read = file, num_readers, bytes(num_readers)
        self._start = -(-_NUM_BLOCKS * num_readers // _PAGE) * _PAGE  # after the marks
        size = self._start + _NUM_MAPPED * _BLOCK
        if os.fstat(file).st_size < size:
            os.ftruncate(file, size)
        self._map = mmap.mmap(file, size)

    def write(self, data: Tensor, blocks: Sequence[int]) -> None:
        for block, piece in zip(blocks, data.split(_BLOCK)):
            if block < _NUM_MAPPED:
                self._mapped(block, piece).copy_(piece)
            else:
                self._move(os.pwritev, block, piece)

    def read(self, into: Tensor, blocks: Sequence[int]) -> None:
        for block, piece in zip(blocks, into.split(_BLOCK)):
            if block < _NUM_MAPPED:
                piece.copy_(self._mapped(block, piece))
            else:
                self._move(os.preadv, block, piece)

    def _mapped(self, block: int, piece: Tensor) -> Tensor:
        offset = self._start + block * _BLOCK
        return torch.frombuffer(self._map, dtype=torch.uint8, count=piece.numel(), offset=offset)

    def _move(self, call: Callable[[int, list[memoryview], int], int], block: int, piece: Tensor) -> None:
        view, offset = piece.numpy().data, self._start + block * _BLOCK
        while view:
            moved = call(self.file, [view], offset)
            if moved == 0:
                raise RuntimeError(f"shared memory ends within block {block}")
            view, offset = view[moved:], offset + moved

    def mark(self, block: int, reader: int, is_unread: bool) -> None:
        self._map[block * self._num_readers + reader] = is_unread

    def is_read(self, block: int) -> bool:
        """Returns whether all its readers have said that they have read it."""
        return self._map[block * self._num_readers : (block + 1) * self._num_readers] == self._all_read


class _Peer:
    """Another process of this host: its socket, its memory and what has come from it."""

    def __init__(self, line: socket.socket, blocks: _Blocks) -> None:
        self.line, self.blocks = line, blocks
        self.letters: dict[tuple[int, int], tuple[int, int, bytearray]] = {}  # by channel and number
        self.arrived, self.expected = Counter[int](), Counter[int]()  # letters so far, by channel
        self.is_gone = False


class _Memory:
    """Shared memory of this process; the blocks of a message are free once it has been read by all."""

    def __init__(self, num_readers: int) -> None:
        try:
            self.blocks = _Blocks(os.memfd_create("seqpar"), num_readers)
        except OSError as error:
            raise _unwritable(error) from error
        self.num_blocks = 0  # so far
        self._free, self._unread = list[int](), list[list[int]]()  # unread: by message

    def write(self, data: Tensor, readers: Sequence[int]) -> list[int]:
        """Copies bytes into free blocks and returns them; readers are marked on the first block only."""
        blocks = self._take(-(-data.numel() // _BLOCK))
        try:
            self.blocks.write(data, blocks)
        except OSError as error:
            self._unread.append(blocks)  # which nobody will read, so that they are free again
            raise _unwritable(error) from error
        for reader in readers:
            self.blocks.mark(blocks[0], reader, True)
        self._unread.append(blocks)
        return blocks

    def _take(self, count: int) -> list[int]:
        if len(self._free) < count or self._free[-1] >= _NUM_MAPPED:
            self._collect()
        missing = count - len(self._free)
        if missing > 0:
            if self.num_blocks + missing > _NUM_BLOCKS:
                raise RuntimeError(
                    f"messages that other ranks have not received fill all {_NUM_BLOCKS} blocks of shared memory: "
                    f"set {SWITCH}=0 on all ranks"
                )
            self._free = [*range(self.num_blocks + missing - 1, self.num_blocks - 1, -1), *self._free]
            self.num_blocks += missing
        return [self._free.pop() for _ in range(count)]

    def _collect(self) -> None:
        """Frees what has been read; the blocks with the lowest numbers are used first."""
        unread = list[list[int]]()
        for blocks in self._unread:
            if self.blocks.is_read(blocks[0]):
                self._free += blocks
            else:
                unread.append(blocks)
        self._unread = unread
        self._free.sort(reverse=True)


class SharedMemory:
    """The connections of this process to the others of its host; ``address`` is None if it cannot have any.

    One thread at a time may send and receive.

    - ``rank``: of this process among all
    - ``is_offered``: whether this process wants any
    """

    def __init__(self, rank: int, is_offered: bool = True) -> None:
        self._rank = rank
        self._peers: dict[int, _Peer] = {}
        self._readers: dict[int, int] = {}  # each local rank's place in the marks of a block
        self._names: dict[int, int] = {}  # ranks by the number of their socket
        self._letter = bytearray(_HEADER.size + INLINE)
        self.timeout_s = 1800.0
        self.address = _own_address() if is_offered and os.environ.get(SWITCH) != "0" else None
        if self.address is not None:
            self._door = _socket()
            self._door.bind(f"\0{self.address.name}")
            self._door.listen(1024)

    def connect(self, addresses: Sequence[Address | None], timeout_s: float) -> None:
        """Connects this process with all that share its host; ``addresses`` are those of all ranks."""
        if self.address is None:
            return
        try:
            self._connect(self.address, addresses, timeout_s)
        except OSError as error:
            raise ConnectionError(
                f"rank {self._rank} did not reach the other ranks of its host through Unix sockets within "
                f"{timeout_s:.0f} s ({error}): set {SWITCH}=0 on all ranks"
            ) from error

    def _connect(self, own: Address, addresses: Sequence[Address | None], timeout_s: float) -> None:
        near = [rank for rank, other in enumerate(addresses) if other is not None and other.place == own.place]
        self._readers = {rank: place for place, rank in enumerate(near)}
        self._memory = _Memory(len(near))
        self._events = select.epoll()
        self._door.settimeout(timeout_s)
        for rank in near:
            other = addresses[rank]
            if rank < self._rank and other is not None:
                line = _socket()
                line.settimeout(timeout_s)
                line.connect(f"\0{other.name}")
                self._greet(line, {"rank": self._rank, "secret": other.secret})
                self._admit(rank, line)
        waiting = {rank for rank in near if rank > self._rank}
        while waiting:
            line, _ = self._door.accept()
            line.settimeout(timeout_s)
            shown, files, _, _ = socket.recv_fds(line, _PAGE, 1)
            greeting = json.loads(shown or "{}")
            if greeting.get("secret") != own.secret or greeting["rank"] not in waiting:  # a stranger
                line.close()
                continue
            waiting.remove(greeting["rank"])
            self._greet(line, {})
            self._add(greeting["rank"], line, files[0])
        self._door.close()
        _OPEN.add(self)

    def _greet(self, line: socket.socket, greeting: dict[str, object]) -> None:
        socket.send_fds(line, [json.dumps(greeting).encode()], [self._memory.blocks.file])

    def _admit(self, rank: int, line: socket.socket) -> None:
        _, files, _, _ = socket.recv_fds(line, _PAGE, 1)
        self._add(rank, line, files[0])

    def _add(self, rank: int, line: socket.socket, memory: int) -> None:
        line.setblocking(False)
        self._peers[rank] = _Peer(line, _Blocks(memory, len(self._readers)))
        self._names[line.fileno()] = rank
        self._events.register(line.fileno(), select.EPOLLIN)

    def reaches(self, ranks: Sequence[int]) -> bool:
        """Returns whether all of these ranks are here."""
        return all(rank == self._rank or rank in self._peers for rank in ranks)

    def close(self) -> None:
        """Ends all connections; in a process forked from this one, its copies of them."""
        if self not in _OPEN:
            return
        _OPEN.discard(self)
        for peer in self._peers.values():
            peer.line.close()
            os.close(peer.blocks.file)
        self._peers.clear()
        self._events.close()
        os.close(self._memory.blocks.file)

    def start(self, sends: Mapping[int, Tensor], receives: Mapping[int, Tensor], channel: int) -> "Receiving":
        """Sends tensors to other ranks, and returns what waits for those that they send.

        - ``channel``: between two processes, messages of a channel arrive in the order in which they were sent
        """
        receivers = defaultdict[int, list[int]](list)
        for rank, x in sends.items():
            receivers[id(x)].append(rank)
        tensors = {id(x): x for x in sends.values()}
        for key, ranks in receivers.items():
            self._send(_bytes_of(tensors[key]), ranks, channel)
        return Receiving(self, {rank: (x, self._expect(rank, channel)) for rank, x in receives.items()})

    def _expect(self, rank: int, channel: int) -> tuple[int, int]:
        """Returns the channel and the number of the next message of a rank that nobody waits for."""
        expected = self._peers[rank].expected
        expected[channel] += 1
        return channel, expected[channel]

    def _send(self, data: Tensor, ranks: Sequence[int], channel: int) -> None:
        count = data.numel()
        if count <= INLINE:
            letter = [_HEADER.pack(channel, 0, count), data.numpy().data]
        else:
            blocks = self._memory.write(data, [self._readers[rank] for rank in ranks])
            letter = [_HEADER.pack(channel, len(blocks), count), struct.pack(f"<{len(blocks)}I", *blocks)]
        for rank in ranks:
            peer = self._peers[rank]
            deadline = time.monotonic() + self.timeout_s
            while not self._fits(letter, peer, rank):  # its socket is full: it may itself wait for room in ours
                if time.monotonic() > deadline:
                    raise _late(rank)
                self._read_any(0.001)

    @staticmethod
    def _fits(letter: list[Any], peer: _Peer, rank: int) -> bool:
        try:
            peer.line.sendmsg(letter)
        except BlockingIOError:
            return False
        except OSError:
            raise _lost(rank) from None
        return True

    def receive(self, rank: int, x: Tensor, letter: tuple[int, int], timeout_s: float) -> None:
        """Waits for a message of a rank, by channel and number, and writes it to ``x``."""
        peer = self._peers[rank]
        if letter not in peer.letters:
            self._read(peer)
            deadline = time.monotonic() + timeout_s
            while letter not in peer.letters:
                if peer.is_gone:
                    raise _lost(rank)
                if not self._read_any(max(0.0, deadline - time.monotonic())) and time.monotonic() > deadline:
                    raise _late(rank)
        num_blocks, count, rest = peer.letters.pop(letter)
        into = _bytes_of(x)
        if count != into.numel():
            raise RuntimeError(
                f"rank {rank} sent {count} bytes where {into.numel()} were expected, so the ranks differ in what they "
                "compute: give all ranks of a group tiles of one size, and let forward take the same branches on all "
                "of them, also where it draws random numbers; seqpar.init_mesh(check=True) names the call that differs"
            )
        if num_blocks == 0:
            if count:  # a buffer may not be empty
                into.copy_(torch.frombuffer(rest, dtype=torch.uint8))
            return
        blocks = struct.unpack(f"<{num_blocks}I", rest)
        peer.blocks.read(into, blocks)
        peer.blocks.mark(blocks[0], self._readers[self._rank], False)

    def _read_any(self, patience_s: float) -> bool:
        """Reads what has come from anybody; returns whether something came in time."""
        ready = self._events.poll(patience_s)
        for number, _ in ready:
            self._read(self._peers[self._names[number]])
        return bool(ready)

    def _read(self, peer: _Peer) -> None:
        while not peer.is_gone:
            try:
                size = peer.line.recv_into(self._letter)
            except BlockingIOError:
                return
            except OSError:
                size = 0
            if size == 0:
                peer.is_gone = True
                self._events.unregister(peer.line.fileno())
                return
            channel, num_blocks, count = _HEADER.unpack_from(self._letter)
            peer.arrived[channel] += 1
            peer.letters[channel, peer.arrived[channel]] = num_blocks, count, self._letter[_HEADER.size : size]


class Receiving:
    """Messages that are to come; waited for like one of torch's works."""

    def __init__(self, memory: SharedMemory, receives: Mapping[int, tuple[Tensor, tuple[int, int]]]) -> None:
        self._memory, self._receives = memory, receives

    def wait(self, timeout: timedelta | None = None) -> None:
        limit_s = self._memory.timeout_s if timeout is None else timeout.total_seconds()
        for rank, (x, letter) in self._receives.items():
            self._memory.receive(rank, x, letter, limit_s)
        self._receives = {}


def _socket() -> socket.socket:
    line = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    line.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER)
    return line


def _bytes_of(x: Tensor) -> Tensor:
    return x.detach().view(-1).view(torch.uint8)


def _lost(rank: int) -> RuntimeError:
    return RuntimeError(f"Connection closed by peer: rank {rank}")


def _unwritable(error: OSError) -> RuntimeError:
    """Returns an error for what a limit on the size of files, for example, does not allow."""
    return RuntimeError(
        f"shared memory for messages to other ranks cannot be written ({error.strerror}): set {SWITCH}=0 on all ranks"
    )


def _late(rank: int) -> RuntimeError:
    return RuntimeError(f"Timed out waiting for rank {rank}")


def _own_address() -> Address | None:
    """Returns this process's address, or None where the order of writes to memory or Linux's sockets are missing."""
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return None
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        place = f"{boot} {os.readlink('/proc/self/ns/net')} {os.getuid()} {_FORMAT}"
    except OSError:  # a container that hides them
        return None
    return Address(place, f"seqpar-{secrets.token_hex(8)}", secrets.token_hex(16))


class Linked(NamedTuple):
    """How the ranks of a process group reach each other: by messages of one channel."""

    memory: SharedMemory
    channel: int


links: dict[str, Linked] = {}  # by the names of process groups, the same on all ranks


def link_groups(memory: SharedMemory, groups: Mapping[str, Sequence[int]]) -> None:
    """Lets messages of these process groups, by name, go through shared memory where all their ranks have it."""
    links.clear()
    for name, ranks in groups.items():
        if memory.reaches(ranks):
            links[name] = Linked(memory, zlib.crc32(name.encode()))


_OPEN = weakref.WeakSet[SharedMemory]()


def _close_in_child() -> None:
    for memory in list(_OPEN):  # a worker that outlives its rank must not keep the rank's sockets open
        memory.close()


os.register_at_fork(after_in_child=_close_in_child)
