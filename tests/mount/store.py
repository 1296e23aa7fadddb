#!/usr/bin/env python3
"""A store that speaks as much S3 as lockbox asks for: store.py PORT DIRECTORY. Objects are files there, so that another run goes on with them.

Whose name stands in the file .refused there is let in no more. The file .portal there, METHODS STATUS [once], is a portal on the way that answers
requests of these methods with that status in the store's place: all of them, or the next one."""

import hashlib
import os
import pathlib
import re
import sys
import urllib.parse
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from xml.sax.saxutils import escape, unescape

PLACE = pathlib.Path(sys.argv[2])


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def parse_request(self):
        if not super().parse_request():
            return False
        refused = PLACE / ".refused"
        if self.is_taken():
            return False
        who = self.headers.get("Authorization", "").partition("Credential=")[2].split("/")[0]
        if refused.exists() and who in refused.read_text().split():
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            self.answer(403)
            return False
        return True

    def is_taken(self):
        """Whether a portal answers."""
        portal = PLACE / ".portal"
        if not portal.exists():
            return False
        methods, status, *once = portal.read_text().split()
        if self.command not in methods.split(","):
            return False
        if once:
            portal.unlink()
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        page = b"" if status == "204" else b"<!DOCTYPE html><html><body>Welcome. <a href=/login>Log in</a></body></html>"
        self.send_response_only(int(status))
        self.send_header("Date", "Sat, 01 Jan 2000 00:00:00 GMT")
        if page:
            self.send_header("Content-Type", "text/html")
            self.send_header("Content-Length", str(len(page)))
            self.send_header("ETag", '"5f3c-1a"')
        if status == "302":
            self.send_header("Location", "https://portal.invalid/login")
        self.end_headers()
        self.wfile.write(page)
        return True

    def asked(self):
        url = urllib.parse.urlsplit(self.path)
        key = urllib.parse.unquote(url.path).removeprefix("/bucket").lstrip("/")
        return key, PLACE / urllib.parse.quote(key, safe=""), dict(urllib.parse.parse_qsl(url.query))

    def answer(self, status, body=b"", **fields):
        self.send_response_only(status)
        self.send_header("Date", formatdate(usegmt=True))
        # As each answer of such a store has one, and none of what is on the way to it.
        self.send_header("x-amz-request-id", os.urandom(8).hex().upper())
        self.send_header("Content-Length", str(len(body)))
        for name, value in fields.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        self.wfile.write(body)

    def do_PUT(self):
        _, file, _ = self.asked()
        body = self.rfile.read(int(self.headers["Content-Length"]))
        assert self.headers["If-None-Match"] == "*"
        new = PLACE / f".{os.urandom(8).hex()}"
        new.write_bytes(body)
        try:
            os.link(new, file)
            status = 200
        except FileExistsError:
            status = 412
        new.unlink()
        self.answer(status, ETag=f'"{hashlib.md5(body).hexdigest()}"')

    def do_DELETE(self):
        _, file, _ = self.asked()
        file.unlink(missing_ok=True)
        self.answer(204)

    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"])).decode()
        assert "delete" in urllib.parse.parse_qs(urllib.parse.urlsplit(self.path).query, keep_blank_values=True)
        keys = [unescape(key) for key in re.findall("<Key>(.*?)</Key>", body)]
        for key in keys:
            (PLACE / urllib.parse.quote(key, safe="")).unlink(missing_ok=True)
        rows = "".join(f"<Deleted><Key>{escape(key)}</Key></Deleted>" for key in keys)
        self.answer(200, f'<DeleteResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/">{rows}</DeleteResult>'.encode())

    def do_GET(self):
        key, file, query = self.asked()
        if not key:
            return self.list(query)
        if not file.exists():
            return self.answer(404)
        whole = file.read_bytes()
        first, last = self.headers["Range"].removeprefix("bytes=").split("-")
        start = int(first) if first else max(len(whole) - int(last), 0)
        end = min(int(last) + 1, len(whole)) if first else len(whole)
        if start >= len(whole):
            return self.answer(416)
        self.answer(206, whole[start:end], Content_Range=f"bytes {start}-{end - 1}/{len(whole)}")

    def list(self, query):
        names = sorted(urllib.parse.unquote(file.name) for file in PLACE.iterdir() if not file.name.startswith("."))
        prefix, after = query.get("prefix", ""), query.get("start-after", "")
        found = [name for name in names if name.startswith(prefix) and name > after][: int(query.get("max-keys", 1000))]
        sizes = [(PLACE / urllib.parse.quote(name, safe="")).stat().st_size for name in found]
        rows = "".join(f"<Contents><Key>{escape(name)}</Key><Size>{size}</Size></Contents>" for name, size in zip(found, sizes))
        self.answer(200, f'<ListBucketResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/">{rows}</ListBucketResult>'.encode())


PLACE.mkdir(exist_ok=True)
# A program asks on more connections at once than the backlog of five holds, and a connection that is dropped takes a second.
ThreadingHTTPServer.request_queue_size = 128
ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
