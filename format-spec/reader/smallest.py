"""Makes the smallest archive from ../format.md with nothing random in it, and tells its bytes: section 16 of the specification.

`python3 smallest.py` writes both anew, the section and ../vectors/smallest.json; a test compares them with what is made here.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import struct
from pathlib import Path
from typing import NamedTuple

from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.kdf.argon2 import Argon2id
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

import lockbox_format as fmt
from lockbox_format import BLOCK

SPECIFICATION = Path(__file__).parent.parent / "format.md"
VECTOR = Path(__file__).parent.parent / "vectors" / "smallest.json"
BEGIN, END = "<!-- smallest.py writes from here -->\n", "<!-- to here -->\n"

PASSPHRASE = b"open sesame"
ARCHIVE = bytes(range(0xA0, 0xB0))
VOLUME_KEY = bytes(range(32))
SALT = bytes(range(0x40, 0x60))
KDF = (8, 1, 1)
SLOT, RECORD_BLOCK, RECORD_INDEX, ROOT_BLOCK, BLOCKS = 0, 353, 32, 385, 386
TIME = struct.pack("<qI", 1_700_000_000, 5)


def nonce(first: int) -> bytes:
    return bytes(range(first, first + 24))


def key(label: str) -> bytes:
    return fmt.hkdf(VOLUME_KEY, ARCHIVE, f"lockbox/v1/{label}")


def aad(label: str, *rest: bytes) -> bytes:
    return fmt.associated_data(f"lockbox/v1/{label}", ARCHIVE, *rest)


class Sealed(NamedTuple):
    """One message of XAES or of a page, with all that goes into it."""

    key: bytes
    nonce: bytes
    aad: bytes
    plain: bytes
    bytes: bytes


def xaes(key: bytes, nonce: bytes, aad: bytes, plain: bytes) -> Sealed:
    sealed = AESGCM(fmt.xaes_key(key, nonce)).encrypt(nonce[12:], plain, aad)
    return Sealed(key, nonce, aad, plain, sealed)


class Slot:
    """Section 3.2."""

    def __init__(self) -> None:
        memory, passes, lanes = KDF
        self.kek = Argon2id(salt=SALT, length=32, iterations=passes, lanes=lanes, memory_cost=memory).derive(PASSPHRASE)
        self.commitment = fmt.hkdf(self.kek, ARCHIVE, "lockbox/v1/slot/commit")
        self.rewrap = fmt.hkdf(self.kek, ARCHIVE, "lockbox/v1/slot/rewrap")
        public = X25519PrivateKey.from_private_bytes(self.rewrap).public_key()
        self.public = public.public_bytes(Encoding.Raw, PublicFormat.Raw)
        clear = SALT + struct.pack("<IIII", memory, passes, lanes, 0) + self.commitment
        place = bytes([SLOT, 1])
        part = (VOLUME_KEY + self.public + TIME + struct.pack("<HH", 0, 0)).ljust(512, b"\0")
        wrap = fmt.hkdf(self.kek, ARCHIVE, "lockbox/v1/slot/wrap")
        self.part = xaes(wrap, nonce(0x60), aad("slot", place, clear), part)
        about = (TIME + struct.pack("<BBH", 1, 0, 0) + self.public).ljust(1736, b"\0")
        self.about = xaes(key("slot/description"), nonce(0x80), aad("slot/description", place, clear), about)
        head = clear + self.part.nonce + self.part.bytes
        self.bytes = head.ljust(2320, b"\0") + self.about.nonce + self.about.bytes


class Page:
    """Sections 5 and 6: the leaf with the root directory."""

    def __init__(self) -> None:
        inode = struct.pack("<IIIIQQ", 0o040755, 0, 0, 2, 0, 0) + TIME * 4
        inode += struct.pack("<IIQQQI", 0, 0, 1, 3, fmt.NO_TRIM, 1) + bytes(28)
        entry = struct.pack("<QBQ", 1, fmt.INODE, 0) + struct.pack("<H", len(inode)) + inode
        fences = struct.pack("<QBQ", *fmt.LEAST) + struct.pack("<QBQ", *fmt.GREATEST)
        self.node = struct.pack("<BBHI", 0, fmt.LIVE, 1, 0) + fences + entry
        # One segment of one raw block: the frame that any decoder takes and nobody needs a compressor for.
        block = (len(self.node) << 3 | 1).to_bytes(3, "little")
        self.frame = bytes.fromhex("28b52ffd20") + bytes([len(self.node)]) + block + self.node
        prologue = struct.pack("<BBHIII", fmt.NODE, 1, 1, len(self.frame), len(self.node), 0)
        prologue += struct.pack("<QQQQ", 1, fmt.LIVE, 0, 0)
        self.nonce, place = nonce(0xC0), struct.pack("<Q", ROOT_BLOCK)
        self.key = fmt.xaes_key(key("page"), self.nonce)

        def seal(number: int, data: bytes, label: str, *rest: bytes) -> Sealed:
            iv, extra = fmt.message_iv(self.nonce, number), aad(label, place, *rest)
            return Sealed(self.key, iv, extra, data, AESGCM(self.key).encrypt(iv, data, extra))

        self.prologue = seal(0, prologue, "prologue")
        self.body = seal(1, self.frame.ljust(BLOCK - 104, b"\0"), "body", prologue)
        self.bytes = self.nonce + self.prologue.bytes + self.body.bytes
        self.tag = self.body.bytes[-16:]
        self.run = struct.pack("<Q", ROOT_BLOCK | 1 << 48)


def record(page: Page) -> Sealed:
    """Section 9.1: generation 1, closed."""
    plain = struct.pack("<Q", 1) + bytes(16) + bytes(range(0x10, 0x20)) + struct.pack("<QQ", 1, 1) + TIME
    plain += struct.pack("<I", 2) + page.run + struct.pack("<Q", 1) + page.tag + bytes(8) + bytes(40 * 4)
    plain += struct.pack("<9Q", 2, 1, 1, BLOCKS, 1, 1, 0, 1, 0) + bytes(32) + struct.pack("<HHI", 1, 0, 0)
    plain += page.run + page.tag
    return xaes(key("commit"), nonce(0xE0), aad("commit", bytes([RECORD_INDEX])), plain.ljust(4056, b"\0"))


class Header(NamedTuple):
    """Section 3.1, one copy; the slots that are not used are zeros here, not random."""

    mac: bytes
    checksum: bytes
    bytes: bytes


def header(copy: int, slot: Slot) -> Header:
    head = fmt.MAGIC + struct.pack("<IHBBQQQ", 1, 1, copy, 0, 0, 0, 0) + ARCHIVE + struct.pack("<Q", 1)
    head = (head + key("commitment") + b"\1").ljust(4032, b"\0")
    slots = slot.bytes.ljust(32 * BLOCK, b"\0")
    mac = hmac.digest(key("header"), head + bytes(64) + slots, "sha256")
    checksum = hashlib.sha256(head + mac + bytes(32) + slots).digest()
    return Header(mac, checksum, head + mac + checksum + slots)


class Smallest:
    def __init__(self) -> None:
        self.slot, self.page = Slot(), Page()
        self.record = record(self.page)
        self.headers = [header(copy, self.slot) for copy in (0, 1)]
        self.pieces = {
            0: self.headers[0].bytes[: 2 * BLOCK],
            320 * BLOCK: self.headers[1].bytes[: 2 * BLOCK],
            RECORD_BLOCK * BLOCK: self.record.nonce + self.record.bytes,
            ROOT_BLOCK * BLOCK: self.page.bytes,
        }

    def image(self) -> bytes:
        image = bytearray(BLOCKS * BLOCK)
        for at, piece in self.pieces.items():
            image[at : at + len(piece)] = piece
        return bytes(image)

    def vector(self) -> str:
        pieces = ",\n    ".join(json.dumps({"at": at, "bytes": grouped(piece)}) for at, piece in self.pieces.items())
        return (f'{{\n  "section": "16",\n  "passphrase": "{PASSPHRASE.decode()}",\n  "length": {BLOCKS * BLOCK},\n'
                f'  "pieces": [\n    {pieces}\n  ]\n}}\n')  # fmt: skip

    def section(self) -> str:
        return "".join(self._parts())

    def _parts(self) -> list[str]:
        slot, page, first = self.slot, self.page, self.headers[0].bytes
        root_field = page.run + struct.pack("<Q", 1) + page.tag + bytes(8)
        return [
            "\n### 16.1 Chosen values\n\nA writer takes these at random, but for passphrase, parameters and times.\n\n",
            table([
                ("passphrase", PASSPHRASE), ("archive id", ARCHIVE), ("volume key", VOLUME_KEY), ("salt of slot 0", SALT),
                ("Argon2id", f"{KDF[0]} KiB, {KDF[1]} pass, {KDF[2]} lane"), ("nonce of the slot", slot.part.nonce),
                ("nonce of its description", slot.about.nonce), ("nonce of the page", page.nonce),
                ("nonce of the record", self.record.nonce), ("session id", bytes(range(0x10, 0x20))),
                ("all times", "1,700,000,000 s and 5 ns: `" + TIME.hex() + "`"),
            ]),
            "\n### 16.2 Keys\n\nAll of the volume key, by HKDF with the archive id as salt (4.1).\n\n",
            table([(f"`lockbox/v1/{label}`", key(label)) for label in
                   ("header", "commitment", "commit", "page", "name", "slot/description")]),
            "\n### 16.3 Slot 0 (3.2), bytes 4,096 to 8,191 of the file\n\n",
            table([("KEK, by Argon2id", slot.kek), ("HKDF(KEK, `lockbox/v1/slot/commit`)", slot.commitment),
                   ("HKDF(KEK, `lockbox/v1/slot/wrap`)", slot.part.key), ("HKDF(KEK, `lockbox/v1/slot/rewrap`)", slot.rewrap),
                   ("its public half", slot.public)]),
            message("the sealed part", slot.part), message("the description (3.4)", slot.about),
            "\nThe slot:\n\n", dump(slot.bytes, 8),
            "\n### 16.4 Framing block of header copy 0 (3.1), bytes 0 to 4,095\n\n",
            "Copy 1 differs in byte 22, MAC and checksum. The MAC is taken over the 33 blocks with the bytes 4,032..4,096 zero,\n"
            "the checksum over the 33 blocks with the bytes 4,064..4,096 zero. The slots 1 to 31 are zeros.\n\n",
            table([(f"{what} of copy {copy}", value) for copy, head in enumerate(self.headers)
                   for what, value in (("MAC", head.mac), ("checksum", head.checksum))]),
            "\n", dump(first[:BLOCK]),
            "\n### 16.5 The record of generation 1 (9.1), block 353, slot index 32\n",
            message("the record", self.record),
            "\nIn the plain bytes: generation 1 at 0; session id at 24; first generation of the session 1 at 40; header sequence 1 at 48; time at 56;\n"
            "flags 2 (closed) at 68; root of tree 1 at 72; next inode 2, inodes 1, blocks in use 1, blocks of the file 386, next dead-list\n"
            "sequence 1, next snapshot id 1 from 272 on; checkpoint generation 1 at 328; one allocated entry, counted at 376 and standing at 384.\n\n",
            table([("root field of tree 1", root_field), ("entry of the allocated list", page.run + page.tag)]),
            "\nThe block:\n\n", dump(self.pieces[RECORD_BLOCK * BLOCK], 6),
            "\n### 16.6 The page of the root node (5 and 6.1), block 385\n\n",
            table([("the key of its messages, by XAES (4.1)", page.key)]),
            message("message 0, the prologue", page.prologue), message("message 1, the body", page.body),
            "\nThe node, as the frame holds it (the frame is `28 b5 2f fd`, descriptor `20`, content size `cd`, a raw last block of 205 bytes):\n\n",
            dump(page.node), "\nThe block:\n\n", dump(page.bytes, 6),
        ]  # fmt: skip


def grouped(data: bytes) -> str:
    """As the vectors have it: hexadecimal, runs of zeros as `00*n`."""
    out, at = [], 0
    while at < len(data):
        zeros = len(data[at:]) - len(data[at:].lstrip(b"\0"))
        if zeros >= 16:
            out.append(f"00*{zeros}")
            at += zeros
            continue
        end = data.find(bytes(16), at)
        end = len(data) if end < 0 else end
        out.append(data[at:end].hex())
        at = end
    return " ".join(out)


def table(rows: list[tuple[str, bytes | str]]) -> str:
    shown = [(name, f"`{value.hex()}`" if isinstance(value, bytes) else value) for name, value in rows]
    return "| content | bytes |\n|---|---|\n" + "".join(f"| {name} | {value} |\n" for name, value in shown)


def message(what: str, sealed: Sealed) -> str:
    parts = [("key", sealed.key), ("IV" if len(sealed.nonce) == 12 else "nonce", sealed.nonce), ("tag", sealed.bytes[-16:])]
    head = "".join(f"; {name} `{value.hex()}`" for name, value in parts)[2:]
    return (f"\nOf {what}: {head}.\nAssociated data ({len(sealed.aad)} bytes):\n\n{dump(sealed.aad)}\n"
            f"Plain ({len(sealed.plain):,} bytes):\n\n{dump(sealed.plain)}")  # fmt: skip


def dump(data: bytes, most: int | None = None) -> str:
    """Lines of 32 bytes; lines of zeros are left out, and with `most` what is behind that many lines but the last."""
    lines = [(at, data[at : at + 32]) for at in range(0, len(data), 32)]
    kept = [(at, line) for at, line in lines if any(line) or at == 0]
    if most is not None and len(kept) > most:
        kept = [*kept[: most - 1], kept[-1]]
    out, last = [], -32
    for at, line in kept:
        if at != last + 32:
            out.append("        ...")
        out.append(f"{at:6}  {line.hex(' ', -4)}")
        last = at
    if last + 32 < len(data):
        out.append(f"        ... zeros to {len(data):,}")
    return "```\n" + "\n".join(out) + "\n```\n"


def main() -> None:
    smallest = Smallest()
    VECTOR.write_text(smallest.vector())
    before, _, rest = SPECIFICATION.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    SPECIFICATION.write_text(before + BEGIN + smallest.section() + END + after)


if __name__ == "__main__":
    main()
