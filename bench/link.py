"""A link between this machine and a server that is far away: passes bytes on, some milliseconds later, and counts them and the requests among them.

link.py SERVER_PORT [MIB_A_SECOND]; prints the port that it listens at, on the loopback address. Then each line of standard input is answered by one line:
  delay MS      the round trip from now on; half of it each way
  reset         forgets what was counted
  report        JSON: requests by kind, bytes up and down, connections, and of the requests how many followed one after the other
  requests      JSON: each one with its connection, its milliseconds since the reset, its method, its path, its range and the bytes of its body

Each direction has the rate for all connections together (default 119, a gigabit a second). The bytes are left alone, since signatures cover them. A connection costs
no round trip of its own: those that are opened are counted instead. Whoever sends is held back as by a link with a queue of five milliseconds.
"""

import collections
import json
import queue
import re
import socket
import sys
import threading
import time

PIECE = 64 << 10
QUEUE = 0.005
# Pieces on their way in one direction of a connection: more than a long link holds.
MOST = 1024


class Direction:
    """One direction of the link, which all connections share."""

    def __init__(self, rate):
        self.rate, self.free, self.lock, self.bytes = rate, 0.0, threading.Lock(), 0

    def carry(self, count):
        """When the last of so many bytes has left."""
        with self.lock:
            self.bytes += count
            self.free = max(self.free, time.monotonic()) + count / self.rate
            return self.free


class Seen:
    """What was asked, as intervals from a request's first byte to its answer's last one."""

    def __init__(self):
        self.lock = threading.Lock()
        self.reset()

    def reset(self):
        with self.lock:
            self.kinds, self.intervals, self.names, self.connections = collections.Counter(), [], [], 0
            self.began = time.monotonic()

    def report(self):
        with self.lock:
            depth, end = 0, 0.0
            # The most that followed one after the other: those that end first come first.
            for interval in sorted(self.intervals, key=lambda one: one[1]):
                if interval[0] >= end:
                    depth, end = depth + 1, interval[1]
            return {
                "requests": sum(self.kinds.values()),
                "kinds": dict(sorted(self.kinds.items())),
                "one_after_the_other": depth,
                "connections": self.connections,
            }


    def requests(self):
        with self.lock:
            since = lambda at: round((at - self.began) * 1000, 1) if at < float("inf") else None
            return [[since(began), since(ended), *name] for (began, ended), name in zip(self.intervals, self.names)]


class Requests:
    """The requests of one connection, each of which begins when the one before was answered."""

    def __init__(self, seen, connection):
        self.seen, self.connection, self.head, self.body, self.interval = seen, connection, b"", 0, None

    def take(self, data):
        while data:
            if self.body:
                count = min(self.body, len(data))
                self.body, data = self.body - count, data[count:]
                continue
            if not self.head:
                self.began = time.monotonic()
            self.head += data
            head, end, data = self.head.partition(b"\r\n\r\n")
            if not end:
                return
            self.head = b""
            method, target = head.split(b"\r\n")[0].decode("ascii").split(" ")[:2]
            if re.search(rb"(?i)\r\ntransfer-encoding:", head):
                sys.exit("link.py: a request whose length is not told")
            length = re.search(rb"(?i)\r\ncontent-length: *(\d+)", head)
            self.body = int(length[1]) if length else 0
            path, _, query = target.partition("?")
            part = re.search(rb"(?i)\r\nrange: *([^\r]*)", head)
            if method == "GET" and ("list-type=" in query or "delimiter=" in query or path.count("/") < 2):
                method = "LIST"
            self.interval = [self.began, float("inf")]
            with self.seen.lock:
                self.seen.kinds[method] += 1
                self.seen.intervals.append(self.interval)
                self.seen.names.append((self.connection, method, path, part and part[1].decode("ascii"), self.body))

    def answered(self):
        if self.interval:
            self.interval[1] = time.monotonic()


class Link:
    def __init__(self, server, rate):
        self.server, self.delay, self.seen = server, 0.0, Seen()
        self.up, self.down = Direction(rate), Direction(rate)

    def listen(self):
        listener = socket.create_server(("127.0.0.1", 0), backlog=128)
        print(listener.getsockname()[1], flush=True)
        threading.Thread(target=self.accept, args=(listener,), daemon=True).start()

    def accept(self, listener):
        while True:
            client, _ = listener.accept()
            with self.seen.lock:
                self.seen.connections += 1
            try:
                server = socket.create_connection(("127.0.0.1", self.server))
            except OSError:
                client.close()
                continue
            for end in client, server:
                end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            requests = Requests(self.seen, client.getpeername()[1])
            self.pass_on(client, server, self.up, requests.take, lambda: None)
            self.pass_on(server, client, self.down, lambda data: None, requests.answered)

    def pass_on(self, source, target, direction, look, passed):
        coming = queue.Queue(MOST)

        def receive():
            while True:
                try:
                    data = source.recv(PIECE)
                except OSError:
                    data = b""
                if data:
                    look(data)
                gone = direction.carry(len(data))
                coming.put((gone + self.delay / 2, data))
                if not data:
                    return
                ahead = gone - time.monotonic() - QUEUE
                if ahead > 0:
                    time.sleep(ahead)

        def send():
            while True:
                due, data = coming.get()
                wait = due - time.monotonic()
                if wait > 0:
                    time.sleep(wait)
                try:
                    if not data:
                        target.shutdown(socket.SHUT_WR)
                        return
                    # Before, so that whoever hears it asks after that.
                    passed()
                    target.sendall(data)
                except OSError:
                    # The other side has gone: what still comes is for nobody.
                    source.close()
                    while data:
                        data = coming.get()[1]
                    return

        for work in receive, send:
            threading.Thread(target=work, daemon=True).start()

    def obey(self):
        for line in sys.stdin:
            word, *rest = line.split()
            answer = {}
            if word == "delay":
                self.delay = float(rest[0]) / 1000
            elif word == "requests":
                answer = self.seen.requests()
            elif word == "reset":
                self.seen.reset()
                self.up.bytes = self.down.bytes = 0
            else:
                answer = self.seen.report() | {"up": self.up.bytes, "down": self.down.bytes}
            print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    link = Link(int(sys.argv[1]), float(sys.argv[2] if sys.argv[2:] else 119.2) * (1 << 20))
    link.listen()
    link.obey()
