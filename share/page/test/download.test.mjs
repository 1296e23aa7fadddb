// The ciphertext as the page reads it: ranges, cuts, and answers that make no sense.
import assert from "node:assert/strict";
import { createServer } from "node:http";
import { test } from "node:test";
import { CLAIM_REPEAT, CLAIM_SILENCE, OutOfReach, Refused, ciphertext, claim } from "../src/server.js";

const BYTES = Uint8Array.from({ length: 40 * 2 ** 20 + 5 }, (_, at) => (at * 7 + (at >> 8)) & 255);
const CAPSULE = { size: BYTES.length, digest: "D" };
const LEASE = { token: "T", expires_in: 0 };

/** Answers with `handler` while `body` runs. */
async function serving(handler, body) {
    const server = createServer(handler).listen(0, "127.0.0.1");
    await new Promise((resolve) => server.once("listening", resolve));
    try {
        return await body({ base: `http://127.0.0.1:${server.address().port}`, handle: "1000000", secret: new Uint8Array(32) });
    } finally {
        server.closeAllConnections();
        server.close();
    }
}

/** Sends the range that was asked for, or the first `cut` bytes of it. */
function sendRange(request, response, cut = Infinity) {
    const [, first, last] = /bytes=(\d+)-(\d+)/.exec(request.headers.range).map(Number);
    response.writeHead(206, { "content-range": `bytes ${first}-${last}/${BYTES.length}`, "content-length": last + 1 - first });
    response.write(BYTES.subarray(first, Math.min(last + 1, first + cut)), () => {
        if (cut < last + 1 - first) response.destroy();
        else response.end();
    });
}

async function read(stream) {
    const parts = [];
    for await (const part of stream) parts.push(part);
    return Buffer.concat(parts);
}

test("a download in ranges goes on after every cut", async () => {
    const cuts = [1000, 0, 5_000_000, 1];
    const states = [];
    const heard = await serving(
        (request, response) => sendRange(request, response, cuts.shift()),
        (link) => read(ciphertext(link, LEASE, CAPSULE, (position, cut) => states.push(cut))),
    );
    assert.ok(heard.equals(BYTES));
    assert.ok(states.includes(true) && states.at(-1) === false);
});

test("another part than was asked for is refused", async () => {
    await assert.rejects(serving(
        (request, response) => {
            request.headers.range = "bytes=1-16777216";
            sendRange(request, response);
        },
        (link) => read(ciphertext(link, LEASE, CAPSULE, () => {})),
    ), (error) => error instanceof Refused && error.code === "foreign");
});

test("a lease that ended is told with its time", async () => {
    await assert.rejects(serving(
        (_, response) => response.writeHead(410).end(JSON.stringify({ error: "consumed", message: "used", at: 7 })),
        (link) => read(ciphertext(link, LEASE, CAPSULE, () => {})),
    ), (error) => error instanceof Refused && error.code === "consumed" && error.at === 7);
});

test("a lost reply to a claim is asked for again with the same id", async () => {
    const ids = [];
    const reply = await serving((request, response) => {
        let body = "";
        request.on("data", (part) => { body += part; }).on("end", () => {
            ids.push(JSON.parse(body).claim);
            if (ids.length < 3) response.destroy();
            else response.end(JSON.stringify({ capsule: "AQID" }));
        });
    }, (link) => claim(link, "one"));
    assert.deepEqual(ids, ["one", "one", "one"]);
    assert.deepEqual(reply, { capsule: Uint8Array.of(1, 2, 3), lease: null });
});

test("a claim without a reply is sent again with the same id", { timeout: 30_000 }, async () => {
    const ids = [];
    const reply = await serving((request, response) => {
        let body = "";
        request.on("data", (part) => { body += part; }).on("end", () => {
            // The connection stays open after the first.
            if (ids.push(JSON.parse(body).claim) > 1) response.end(JSON.stringify({ capsule: "AQID" }));
        });
    }, (link) => claim(link, "one", 100));
    assert.ok(ids.length > 1 && ids.every((id) => id === "one"));
    assert.deepEqual(reply, { capsule: Uint8Array.of(1, 2, 3), lease: null });
});

test("a claim is not sent again after the daemon stops repeating its reply", { timeout: 30_000 }, async () => {
    assert.ok(CLAIM_REPEAT + CLAIM_SILENCE <= 60_000);
    let count = 0;
    // Attempts 1 and 2 begin at 0 and 220 ms; the third would begin at 740 ms.
    await assert.rejects(serving(() => { count += 1; }, (link) => claim(link, "one", 20, 600)), OutOfReach);
    assert.ok(count <= 2, `${count} attempts`);
});

test("nobody waits for ever", { timeout: 30_000 }, async () => {
    await assert.rejects(serving(
        (_, response) => response.destroy(),
        (link) => read(ciphertext(link, LEASE, CAPSULE, () => {})),
    ), OutOfReach);
});
