"""Reads the golden archives of ../../tests/data/golden and compares everything with their manifests."""

from __future__ import annotations

import hashlib
import io
import json
import tempfile
import unittest
from pathlib import Path
from typing import Any, BinaryIO

import lockbox_bucket
import lockbox_format as fmt
import zstandard
from lockbox_keys import Secrets, describe, unlock
from lockbox_reader import Archive, Inode

GOLDEN = Path(__file__).parent.parent.parent / "tests" / "data" / "golden"
PENDING = Path(__file__).parent.parent / "vectors" / "pending.json"


def unpacked(name: str) -> bytes:
    packed = (GOLDEN / f"{name}.lbx.zst").read_bytes()
    return zstandard.ZstdDecompressor(max_window_size=1 << 27).stream_reader(io.BytesIO(packed)).read()


def content(archive: Archive, ino: int, inode: Inode) -> bytes:
    if inode.type == fmt.SYMLINK:
        return archive.target(ino, inode)
    if inode.type != fmt.FILE:
        return b""
    out = bytearray(inode.size)
    for piece in archive.content(ino, inode):
        out[piece.offset : piece.offset + len(piece.data)] = piece.data
    return bytes(out)


def seen(archive: Archive) -> dict[str, Any]:
    found = {}
    for path, ino, inode in archive.walk():
        directory = inode.type == fmt.DIRECTORY
        found[(b"/" + path if path else b"").hex()] = {
            "ino": ino,
            "mode": inode.mode,
            "uid": inode.uid,
            "gid": inode.gid,
            "links": 0 if directory else inode.links,
            "size": 0 if directory else inode.size,
            "rdev": inode.rdev,
            "sha256": hashlib.sha256(content(archive, ino, inode)).hexdigest(),
            "xattrs": {name.hex(): hashlib.sha256(value).hexdigest() for name, value in archive.xattrs(ino)},
            "mtime": list(inode.mtime),
        }
    return found


def seen_in_snapshots(archive: Archive) -> list[dict[str, Any]]:
    return [
        {
            "id": number,
            "name": snapshot.name.hex(),
            "time": list(snapshot.time),
            "inodes": snapshot.inodes,
            "objects": seen(archive.showing(snapshot.name)),
        }
        for number, snapshot in archive.snapshots()
    ]


def origin(archive: Archive) -> dict[str, Any] | None:
    if (of := archive.record.origin) is None:
        return None
    return {"session": of.session.hex(), "first": of.first, "generation": of.generation, "tag": of.tag.hex(), "time": list(of.time)}


class Golden(unittest.TestCase):
    def test_golden_archives(self) -> None:
        manifests = sorted(GOLDEN.glob("*.json"))
        self.assertGreaterEqual(len(manifests), 7)
        for path in manifests:
            manifest = json.loads(path.read_text())
            data = unpacked(path.stem)
            self.assertEqual(hashlib.sha256(data).hexdigest(), manifest["sha256"], path.stem)
            for passphrase in manifest["passphrases"]:
                with self.subTest(archive=path.stem, passphrase=passphrase), tempfile.TemporaryFile() as file:
                    file.write(data)
                    file.flush()
                    archive = Archive(file, passphrase.encode())
                    self.assertEqual(archive.record.generation, manifest["generation"])
                    self.assertEqual(seen(archive), manifest["objects"])
                    self.assertEqual(origin(archive), manifest.get("backup_of"))
                    self.assertEqual(len(archive.log.entries) if archive.has_log else 0, manifest.get("entries", 0))
                    # Archives frozen before snapshots could be read have no list of them.
                    if "snapshots" in manifest:
                        self.assertEqual(seen_in_snapshots(archive), manifest["snapshots"])
            for variant in (variant for variant in manifest["damaged"] if "snapshots" in variant):
                with self.subTest(archive=path.stem, damaged=variant["what"]), tempfile.TemporaryFile() as file:
                    file.write(data)
                    for at in variant["flip"]:
                        file.seek(at)
                        file.write(bytes([data[at] ^ 1]))
                    file.flush()
                    self.assert_damage_stays_in_snapshots(file, manifest, variant)
            for way in manifest.get("keys", []):
                if "identity" in way:
                    continue
                with self.subTest(archive=path.stem, slot=way["slot"]), tempfile.TemporaryFile() as file:
                    file.write(data)
                    file.flush()
                    passphrase = way["passphrase"].encode() if "passphrase" in way else None
                    key_file = bytes.fromhex(way["key_file"]) if "key_file" in way else None
                    secrets = Secrets(passphrase, key_file, way.get("recovery_code"))
                    archive = Archive(file, secrets)
                    self.assertEqual(seen(archive), manifest["objects"])
                    description = describe(archive.header, way["slot"], unlock(archive.header, secrets))
                    self.assertIsNotNone(description)
                    self.assertEqual(description.label, way["label"])

    def test_an_archive_with_log_pending(self) -> None:
        """`log`, after the first commit of a session that was killed then: its entries are laid over a record that names them."""
        vector = json.loads(PENDING.read_text())
        manifest = json.loads((GOLDEN / f"{vector['base']}.json").read_text())
        data = bytearray(unpacked(vector["base"])[: vector["length"]])
        for piece in vector["pieces"]:
            data[piece["at"] : piece["at"] + len(piece["bytes"]) // 2] = bytes.fromhex(piece["bytes"])
        self.assertEqual(hashlib.sha256(data).hexdigest(), vector["sha256"])
        with tempfile.TemporaryFile() as file:
            file.write(data)
            file.flush()
            archive = Archive(file, manifest["passphrases"][0].encode())
            self.assertEqual(archive.warnings, [])
            pending = archive.record.pending
            self.assertIsNotNone(pending)
            found = {name: value.hex() if isinstance(value, bytes) else value for name, value in pending._asdict().items()}
            self.assertEqual(found, vector["pending"])
            self.assertEqual((archive.record.generation, len(archive.log.entries)), (vector["generation"], vector["entries"]))
            self.assertEqual(seen(archive), manifest["objects"])

    def test_golden_bucket(self) -> None:
        """The objects of `bucket` have the archive `objects`."""
        manifest = json.loads((GOLDEN / "objects.json").read_text())
        data = lockbox_bucket.archive(GOLDEN / "bucket")
        self.assertEqual(hashlib.sha256(data).hexdigest(), manifest["sha256"])

    def assert_damage_stays_in_snapshots(self, file: BinaryIO, manifest: dict[str, Any], variant: dict[str, Any]) -> None:
        """Where a manifest says what becomes of snapshots, that and no more is refused."""
        archive = Archive(file, manifest["passphrases"][0].encode())
        self.assertEqual(seen(archive), manifest["objects"])
        whole = {snapshot["name"]: snapshot["objects"] for snapshot in manifest["snapshots"]}
        for name, outcome in variant["snapshots"].items():
            if outcome == "read":
                self.assertEqual(seen(archive.showing(bytes.fromhex(name))), whole[name])
            else:
                with self.assertRaises(fmt.Damaged):
                    seen(archive.showing(bytes.fromhex(name)))


if __name__ == "__main__":
    unittest.main()
