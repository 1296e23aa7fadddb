// Reads a capsule: where the content is, and what the sender sealed about it.
import { Decrypter } from "age-encryption";
import { sha256 } from "@noble/hashes/sha2.js";
import { identityOf } from "./link.js";

/** What arrived is not what was sealed. */
export class Damaged extends Error {}

export function fromBase64(text) {
    const letters = atob(text.replaceAll("-", "+").replaceAll("_", "/"));
    return Uint8Array.from(letters, (letter) => letter.charCodeAt(0));
}

export function toBase64(bytes) {
    return btoa(String.fromCharCode(...bytes)).replaceAll("+", "-").replaceAll("/", "_").replaceAll("=", "");
}

/** `{ size, digest, sealed }`; size is null when the content is inside. */
export function parse(bytes) {
    const view = new DataView(bytes.buffer, bytes.byteOffset, bytes.byteLength);
    const magic = String.fromCharCode(...bytes.subarray(0, 4));
    if (bytes.length < 8 || magic !== "lbxs" || bytes[4] !== 1) throw new Damaged("the capsule is of an unknown version");
    const length = view.getUint16(6, true);
    const head = bytes[5] === 1 ? 8 : bytes[5] === 2 ? 48 : 0;
    if (head === 0 || bytes.length !== head + length) throw new Damaged("the capsule is of an unknown type");
    const sealed = bytes.subarray(head);
    if (head === 8) return { size: null, digest: null, sealed };
    return { size: Number(view.getBigUint64(8, true)), digest: toBase64(bytes.subarray(16, 48)), sealed };
}

/** The decrypter of a link's secret. */
export function decrypter(secret) {
    const age = new Decrypter();
    age.addIdentity(identityOf(secret));
    return age;
}

/** `{ name, size, sha256, content }` of a sealed part; content is empty unless it is inside. */
export async function open(secret, sealed) {
    let plain;
    try {
        plain = await decrypter(secret).decrypt(sealed);
    } catch {
        throw new Damaged("it was sealed for another link");
    }
    const end = plain.indexOf(10);
    let meta;
    try {
        meta = JSON.parse(new TextDecoder("utf-8", { fatal: true }).decode(plain.subarray(0, end)));
    } catch {
        throw new Damaged("its description is not understood");
    }
    if (typeof meta.name !== "string" || !Number.isSafeInteger(meta.size) || typeof meta.sha256 !== "string") {
        throw new Damaged("its description is not understood");
    }
    return { ...meta, content: plain.subarray(end + 1) };
}

/** Counts and hashes what passes, and fails at its end when it is not what was sealed. */
export class Verifier {
    #hash = sha256.create();
    #length = 0;

    constructor(meta) {
        this.meta = meta;
    }

    update(bytes) {
        this.#hash.update(bytes);
        this.#length += bytes.length;
        if (this.#length > this.meta.size) throw new Damaged("it is longer than what was sealed");
    }

    finish() {
        if (this.#length !== this.meta.size) throw new Damaged("it is shorter than what was sealed");
        if (toBase64(this.#hash.digest()) !== this.meta.sha256) throw new Damaged("its digest is not the one that was sealed");
    }
}
