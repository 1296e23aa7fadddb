#!/usr/bin/env python3
"""Hands connections on to port argv[1] of this machine, from a port that it prints. The first upload that goes on for more than argv[2] bytes is cut there, which it says: both sides see an orderly end."""

import socket
import sys
import threading

PORT, MOST = int(sys.argv[1]), int(sys.argv[2])
cut = threading.Event()


def pump(source, sink, is_upload):
    total = 0
    try:
        while data := source.recv(65536):
            total += len(data)
            sink.sendall(data)
            if is_upload and total > MOST and not cut.is_set():
                cut.set()
                print("cut", flush=True)
                break
    except OSError:
        pass
    for end in (source, sink):
        try:
            end.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass


listener = socket.create_server(("127.0.0.1", 0))
print(listener.getsockname()[1], flush=True)
while True:
    client, _ = listener.accept()
    server = socket.create_connection(("127.0.0.1", PORT))
    threading.Thread(target=pump, args=(client, server, True), daemon=True).start()
    threading.Thread(target=pump, args=(server, client, False), daemon=True).start()
