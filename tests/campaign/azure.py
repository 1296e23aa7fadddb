#!/usr/bin/env python3
"""What a container on Azurite needs beside what lockbox asks for, signed with the emulators' key, which Microsoft publishes:

azure.py ENDPOINT make CONTAINER               makes the container
azure.py ENDPOINT put CONTAINER NAME FILE      puts a file there
azure.py ENDPOINT names CONTAINER              prints the names of what lies there
azure.py ENDPOINT token CONTAINER RIGHTS SECS  prints a SAS token for the container
"""

import base64
import datetime
import hashlib
import hmac
import sys
import urllib.parse
import urllib.request
from email.utils import formatdate
from xml.etree import ElementTree

ACCOUNT = "devstoreaccount1"
KEY = base64.b64decode("Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw==")
VERSION = "2021-12-02"


def signature(lines):
    return base64.b64encode(hmac.new(KEY, "\n".join(lines).encode(), hashlib.sha256).digest()).decode()


def ask(endpoint, method, path, query, body=b"", **more):
    own = {"x-ms-date": formatdate(usegmt=True), "x-ms-version": VERSION} | {name.replace("_", "-"): value for name, value in more.items()}
    kind = "application/octet-stream" if body else ""
    lines = [method, "", "", str(len(body) or ""), "", kind, "", "", "", "", "", ""]
    lines += [f"{name}:{own[name]}" for name in sorted(own)]
    lines += [f"/{ACCOUNT}{urllib.parse.urlsplit(endpoint).path}/{path}"] + [f"{name}:{query[name]}" for name in sorted(query)]
    headers = own | {"Authorization": f"SharedKey {ACCOUNT}:{signature(lines)}"} | ({"Content-Type": kind} if body else {})
    url = f"{endpoint}/{path}?{urllib.parse.urlencode(query)}"
    request = urllib.request.Request(url, method=method, headers=headers, data=body or None)
    return urllib.request.urlopen(request, timeout=60).read()


def token(container, rights, seconds):
    until = datetime.datetime.now(datetime.timezone.utc) + datetime.timedelta(seconds=int(seconds))
    fields = {"sp": rights, "se": until.strftime("%Y-%m-%dT%H:%M:%SZ"), "sv": VERSION, "sr": "c"}
    lines = [fields["sp"], "", fields["se"], f"/blob/{ACCOUNT}/{container}", "", "", "", fields["sv"], fields["sr"], "", "", "", "", "", "", ""]
    return urllib.parse.urlencode(fields | {"sig": signature(lines)})


def main(endpoint, what, container, *more):
    if what == "make":
        ask(endpoint, "PUT", container, {"restype": "container"})
    elif what == "put":
        with open(more[1], "rb") as file:
            ask(endpoint, "PUT", f"{container}/{more[0]}", {}, file.read(), x_ms_blob_type="BlockBlob")
    elif what == "names":
        marker = ""
        while marker is not None:
            query = {"restype": "container", "comp": "list"} | ({"marker": marker} if marker else {})
            listed = ElementTree.fromstring(ask(endpoint, "GET", container, query).decode("utf-8-sig"))
            print("".join(f"{name.text}\n" for name in listed.iter("Name")), end="")
            marker = listed.findtext("NextMarker") or None
    elif what == "token":
        print(token(container, *more))
    else:
        sys.exit(__doc__)


main(*sys.argv[1:])
