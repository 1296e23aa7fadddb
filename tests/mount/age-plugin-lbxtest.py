#!/usr/bin/env python3
"""A plugin of age for the tests: masks the file key with what recipient and identity have in common. It protects nothing.

age-plugin-lbxtest.py new         prints a recipient and its identity
age-plugin-lbxtest --age-plugin=recipient-v1|identity-v1 speaks the protocol of age plugins (C2SP, age-plugin)

LBXTEST_MODE makes it fail: "die" ends early, "error" reports one, "garbage" answers with nonsense, "wrong" gives another key.
"""

import base64
import hashlib
import os
import sys

CHARSET = "qpzry9x8gf2tvdw0s3jn54khce6mua7l"


def polymod(values):
    check = 1
    for value in values:
        top = check >> 25
        check = (check & 0x1FFFFFF) << 5 ^ value
        for bit, generator in enumerate((0x3B6A57B2, 0x26508E6D, 0x1EA119FA, 0x3D4233DD, 0x2A1462B3)):
            check ^= generator if top >> bit & 1 else 0
    return check


def expand(prefix):
    return [ord(c) >> 5 for c in prefix] + [0] + [ord(c) & 31 for c in prefix]


def encode(prefix, data):
    bits = "".join(f"{byte:08b}" for byte in data)
    bits += "0" * (-len(bits) % 5)
    values = [int(bits[at : at + 5], 2) for at in range(0, len(bits), 5)]
    check = polymod(expand(prefix) + values + [0] * 6) ^ 1
    values += [check >> 5 * (5 - number) & 31 for number in range(6)]
    return prefix + "1" + "".join(CHARSET[value] for value in values)


def decode(text):
    data = text.lower().rpartition("1")[2][:-6]
    bits = "".join(f"{CHARSET.index(c):05b}" for c in data)
    return bytes(int(bits[at : at + 8], 2) for at in range(0, len(bits) // 8 * 8, 8))


def b64(data):
    return base64.b64encode(data).decode().rstrip("=")


def unb64(text):
    return base64.b64decode(text + "=" * (-len(text) % 4))


def read_stanza():
    head = sys.stdin.readline().split()
    assert head[:1] == ["->"], head
    body = ""
    while True:
        line = sys.stdin.readline().rstrip("\n")
        body += line
        if len(line) < 64:
            return head[1], head[2:], unb64(body)


def send(command, *args, body=b""):
    text = b64(body)
    lines = [text[at : at + 64] for at in range(0, len(text), 64)]
    if not lines or len(lines[-1]) == 64:
        lines.append("")
    print("->", command, *args)
    print("\n".join(lines), flush=True)
    if command != "done":
        return read_stanza()


def masked(key, shared, nonce):
    mask = hashlib.sha256(b"lbxtest" + shared + nonce).digest()
    return bytes(a ^ b for a, b in zip(key, mask))


def received():
    commands = []
    while True:
        command, args, body = read_stanza()
        if command == "done":
            return commands
        commands.append((command, args, body))


def main():
    if sys.argv[1] == "new":
        shared = os.urandom(16)
        print(encode("age1lbxtest", shared))
        print(encode("age-plugin-lbxtest-", shared).upper())
        return
    mode = os.environ.get("LBXTEST_MODE", "")
    commands = received()
    if mode == "die":
        sys.exit(3)
    if mode == "garbage":
        print("certainly no stanza", flush=True)
        sys.exit(0)
    if sys.argv[1] == "--age-plugin=recipient-v1":
        if mode == "error":
            send("error", "recipient", "0", body=b"the token\x1b[31m is locked")
        else:
            (recipient,) = (args[0] for command, args, _ in commands if command == "add-recipient")
            for number, key in enumerate(body for command, _, body in commands if command == "wrap-file-key"):
                nonce = os.urandom(12)
                body = masked(key, decode(recipient), nonce)
                send("recipient-stanza", str(number), "lbxtest", b64(nonce), body=body)
    else:
        (identity,) = (args[0] for command, args, _ in commands if command == "add-identity")
        if mode == "error":
            send("error", "identity", "0", body=b"the token\x1b[31m is locked")
        else:
            for command, args, body in commands:
                if command == "recipient-stanza" and args[1] == "lbxtest":
                    key = masked(body, decode(identity), unb64(args[2]))
                    send("file-key", args[0], body=key if mode != "wrong" else bytes(16))
    send("done")


main()
