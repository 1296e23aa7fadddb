// Where the opened file goes: straight to disk where the browser can, else through the origin's private storage, else through memory.

const PREFIX = "lockbox-";
/** What stays in memory at most: private storage is missing in private windows of some browsers. */
const MOST_IN_MEMORY = 2 * 1024 * 1024 * 1024;

/** The browser has no place for so large a file. */
export class TooLarge extends Error {}

/** A download that has not begun within this time cannot begin any more. One that has begun keeps what it reads. */
const BEGINS_WITHIN = 60_000;

/** Hands a finished file to the browser's downloads, which tell nobody when they end. Resolves when the page need not keep it any longer. */
export function save(content, name) {
    const address = URL.createObjectURL(content);
    const anchor = Object.assign(document.createElement("a"), { href: address, download: name });
    document.body.append(anchor);
    anchor.click();
    anchor.remove();
    return new Promise((resolve) => setTimeout(() => {
        URL.revokeObjectURL(address);
        resolve();
    }, BEGINS_WITHIN));
}

/** Takes the lock of a file in private storage, which ends with the page: what nobody holds was left behind. Resolves to its release. */
function hold(name) {
    return new Promise((granted, refused) => {
        navigator.locks.request(name, () => new Promise((release) => granted(release))).catch(refused);
    });
}

/** Removes what pages that are gone left in private storage: a browser that was killed, or closed in mid-download. */
export async function sweep() {
    const root = await navigator.storage.getDirectory();
    const names = [];
    for await (const name of root.keys()) if (name.startsWith(PREFIX)) names.push(name);
    // What Chromium writes beside a file is the file's.
    await Promise.all(names.map((name) => navigator.locks.request(name.replace(/\.crswap$/, ""), { ifAvailable: true }, async (lock) => {
        if (lock) await root.removeEntry(name).catch(() => {});
    })));
}

async function toDisk(name) {
    const handle = await window.showSaveFilePicker({ suggestedName: name, id: "lockbox" });
    // The browser writes beside the file, which appears when the writer is closed and never when it is aborted.
    const writer = await handle.createWritable();
    return {
        write: (bytes) => writer.write(bytes),
        finish: () => writer.close(),
        discard: () => writer.abort().catch(() => {}),
    };
}

async function toPrivateStorage(name) {
    const root = await navigator.storage.getDirectory();
    const hidden = PREFIX + crypto.randomUUID();
    const release = await hold(hidden);
    const remove = async () => {
        removeEventListener("pagehide", remove);
        await root.removeEntry(hidden).catch(() => {});
        release();
    };
    try {
        const handle = await root.getFileHandle(hidden, { create: true });
        const writer = await handle.createWritable();
        return {
            write: (bytes) => writer.write(bytes),
            async finish() {
                await writer.close();
                const saved = save(await handle.getFile(), name);
                // The browser still hears what a page asks for while it goes.
                addEventListener("pagehide", remove);
                saved.then(remove);
            },
            async discard() {
                await writer.abort().catch(() => {});
                await remove();
            },
        };
    } catch (error) {
        await remove();
        throw error;
    }
}

function toMemory(name, size) {
    if (size > MOST_IN_MEMORY) throw new TooLarge();
    let parts = [];
    return {
        write(bytes) {
            parts.push(bytes);
        },
        finish() {
            save(new Blob(parts, { type: "application/octet-stream" }), name);
        },
        discard() {
            parts = [];
        },
    };
}

/** Must be called from a click: the browser asks where the file goes. Rejects with AbortError when the user thinks better of it. */
export async function open(name, size) {
    if (window.showSaveFilePicker) {
        try {
            return await toDisk(name);
        } catch (error) {
            if (error.name === "AbortError") throw error;
        }
    }
    try {
        return await toPrivateStorage(name);
    } catch {
        return toMemory(name, size);
    }
}
