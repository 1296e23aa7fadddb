// Reads the link that opened the page, and puts right what mail programs and telephones did to it.
import { bech32 } from "@scure/base";
import { hkdf } from "@noble/hashes/hkdf.js";
import { sha256 } from "@noble/hashes/sha2.js";

const PREFIX = "age-secret-key-";
const LETTERS = 58;

/** The link cannot be read: `missing` when nothing stands behind '#', else `damaged`. */
export class LinkError extends Error {
    constructor(kind) {
        super(kind);
        this.kind = kind;
    }
}

/** The letters of a fragment without what does not belong to it. */
function letters(text) {
    const plain = text.toLowerCase().replace(/[^a-z0-9]/g, "").replace(/o/g, "0").replace(/[i1]/g, "l");
    return plain.replace(/^agesecretkeyl/, "").slice(0, LETTERS);
}

function secretOf(fragment) {
    try {
        const { prefix, bytes } = bech32.decodeToBytes(`${PREFIX}1${letters(fragment)}`);
        if (prefix === PREFIX && bytes.length === 32) return bytes;
    } catch {
        // The checksum does not fit.
    }
    throw new LinkError("damaged");
}

function unescaped(text) {
    let plain = text;
    for (let round = 0; round < 3; round += 1) {
        plain = plain.replace(/%23/gi, "#").replace(/%2f/gi, "/").replace(/%25/g, "%");
    }
    return plain;
}

/** Handle, secret and the path of the server's API, from the parts of the page's address. */
export function readLink({ pathname, hash }) {
    const whole = unescaped(pathname + hash);
    const match = /^(.*)\/s\/(\d{7,13})\/?(?:[^#\d][^#]*)?(?:#(.*))?$/is.exec(whole);
    if (!match) throw new LinkError("damaged");
    const [, base, handle, fragment = ""] = match;
    if (letters(fragment) === "") throw new LinkError("missing");
    const secret = secretOf(fragment);
    return { base, handle, secret, repaired: `${base}/s/${handle}#${fragmentOf(secret)}` };
}

/** The fragment that spells a secret. */
export function fragmentOf(secret) {
    return bech32.encodeFromBytes(PREFIX, secret).slice(PREFIX.length + 1);
}

/** The secret as age reads it. */
export function identityOf(secret) {
    return bech32.encodeFromBytes(PREFIX, secret).toUpperCase();
}

/** What the daemon wants to see before it gives anything away. */
export function authOf(secret) {
    return hkdf(sha256, secret, undefined, new TextEncoder().encode("lockbox.share/v1/auth"), 32);
}
