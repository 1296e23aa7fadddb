// Speaks with the daemon: claims, downloads in ranges that go on after a cut, completes.
import { fromBase64, toBase64 } from "./capsule.js";
import { authOf } from "./link.js";

/** The daemon refused: `code` is its error, `at` the second since 1970 when the share ended. */
export class Refused extends Error {
    constructor({ error, message, at }) {
        super(message);
        this.code = error;
        this.at = at;
    }
}

/** The daemon could not be reached for longer than the lease lasts. */
export class OutOfReach extends Error {}

const pause = (milliseconds) => new Promise((resolve) => setTimeout(resolve, milliseconds));
/** Bytes asked for at once: a proxy that ends long answers costs one range. */
const RANGE = 16 * 1024 * 1024;
/** A connection without a byte for so long is tried again. */
const SILENCE = 20_000;
/** What the link is worth is told before the click when the server says so within this time; else the click tells. */
const LOOK = 5000;
const WAITS = [200, 500, 1000, 2000, 4000, 5000];
const CLAIM_ATTEMPTS = 8;
/** A claim without a reply for so long is sent again: the daemon repeats its reply for a minute. */
export const CLAIM_SILENCE = 10_000;
/** No claim is sent again later than this after the first: a repeat after the minute would be refused. */
export const CLAIM_REPEAT = 50_000;

async function refusal(response) {
    try {
        return new Refused(await response.json());
    } catch {
        return new Refused({ error: "unavailable", message: `the server answered with status ${response.status}` });
    }
}

const passes = (error) => !(error instanceof Refused) || ["limited", "unavailable", "timeout"].includes(error.code);

/** A claim id to be kept until the reply came: the same id within a minute gets the same reply. */
export function newClaimId() {
    return toBase64(crypto.getRandomValues(new Uint8Array(16)));
}

const proof = (link) => ({ handle: link.handle, auth: toBase64(authOf(link.secret)) });

async function post(link, path, message, more) {
    const response = await fetch(`${link.base}${path}`, {
        method: "POST",
        headers: { "content-type": "application/json" },
        body: JSON.stringify(message),
        cache: "no-store",
        redirect: "error",
        ...more,
    });
    if (!response.ok) throw await refusal(response);
    return response.json();
}

/** The second since 1970 until which the link opens something, or null when the server cannot be asked. Uses nothing up. */
export async function look(link) {
    try {
        return (await post(link, "/v1/look", proof(link), { signal: AbortSignal.timeout(LOOK) })).expires_at;
    } catch (error) {
        if (!passes(error)) throw error;
        return null;
    }
}

/** Claims the share: `{ capsule, lease }`. A reply that was lost is asked for again. */
export async function claim(link, id, silence = CLAIM_SILENCE, repeat = CLAIM_REPEAT) {
    const message = { ...proof(link), claim: id };
    const begun = performance.now();
    for (let attempt = 0; ; attempt += 1) {
        try {
            const { capsule, lease } = await post(link, "/v1/claim", message, { signal: AbortSignal.timeout(silence) });
            return { capsule: fromBase64(capsule), lease: lease ?? null };
        } catch (error) {
            if (!passes(error)) throw error;
            const wait = WAITS[Math.min(attempt, WAITS.length - 1)];
            const isLate = performance.now() - begun + wait > repeat;
            if (isLate || attempt + 1 >= CLAIM_ATTEMPTS) throw new OutOfReach();
            await pause(wait);
        }
    }
}

/** Confirms the complete download. Without it the owner sees the download as interrupted. */
export async function complete(link, lease) {
    for (let attempt = 0; attempt < 3; attempt += 1) {
        try {
            const response = await fetch(`${link.base}/v1/shares/${link.handle}/complete`, {
                method: "POST",
                headers: { authorization: `Bearer ${lease.token}` },
                keepalive: true,
            });
            return response.ok;
        } catch {
            await pause(WAITS[attempt]);
        }
    }
    return false;
}

/** The ciphertext as a stream. `watch` hears how many bytes came, and whether the connection is cut just now. */
export function ciphertext(link, lease, { size, digest }, watch) {
    let position = 0;
    let reader = null;
    let end = 0;
    let failures = 0;
    let advanced = performance.now();
    let timer = 0;
    let abort = null;

    const request = async () => {
        end = Math.min(position + RANGE, size);
        abort = new AbortController();
        timer = setTimeout(() => abort.abort(), SILENCE);
        const response = await fetch(`${link.base}/v1/shares/${link.handle}/ciphertext`, {
            headers: {
                authorization: `Bearer ${lease.token}`,
                range: `bytes=${position}-${end - 1}`,
                "if-range": `"${digest}"`,
            },
            cache: "no-store",
            redirect: "error",
            signal: abort.signal,
        });
        if (response.status !== 206) throw await refusal(response);
        if (response.headers.get("content-range") !== `bytes ${position}-${end - 1}/${size}`) {
            throw new Refused({ error: "foreign", message: "the server sent another part than was asked for" });
        }
        reader = response.body.getReader();
    };

    const next = async () => {
        if (!reader) await request();
        clearTimeout(timer);
        timer = setTimeout(() => abort.abort(), SILENCE);
        const { done, value } = await reader.read();
        clearTimeout(timer);
        if (!done) return value.subarray(0, end - position);
        reader = null;
        if (position < end) throw new Error("cut");
        return null;
    };

    return new ReadableStream({
        async pull(controller) {
            while (position < size) {
                try {
                    const part = await next();
                    if (!part?.length) continue;
                    position += part.length;
                    failures = 0;
                    advanced = performance.now();
                    watch(position, false);
                    controller.enqueue(part);
                    return;
                } catch (error) {
                    clearTimeout(timer);
                    abort?.abort();
                    reader = null;
                    if (!passes(error)) throw error;
                    if (performance.now() - advanced > Math.max(lease.expires_in * 1000, 2000)) throw new OutOfReach();
                    watch(position, true);
                    await pause(WAITS[Math.min(failures, WAITS.length - 1)]);
                    failures += 1;
                }
            }
            controller.close();
        },
        cancel() {
            clearTimeout(timer);
            abort?.abort();
        },
    }, { highWaterMark: 0 });
}
