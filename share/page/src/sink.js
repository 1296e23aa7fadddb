// Where the opened file goes: straight to disk where the browser can, else through the origin's private storage, else through memory.

const PREFIX = "lockbox-";
/** What stays in memory at most: private storage is missing in private windows of some browsers. */
const MOST_IN_MEMORY = 2 * 1024 * 1024 * 1024;

/** The browser has no place for so large a file. */
export class TooLarge extends Error {}

/** Hands a finished file to the browser's downloads. */
export function save(content, name) {
    const address = URL.createObjectURL(content);
    const anchor = Object.assign(document.createElement("a"), { href: address, download: name });
    document.body.append(anchor);
    anchor.click();
    anchor.remove();
    setTimeout(() => URL.revokeObjectURL(address), 60_000);
}

/** Files that an earlier visit left in private storage. */
async function sweep(root) {
    for await (const name of root.keys()) {
        if (name.startsWith(PREFIX)) await root.removeEntry(name).catch(() => {});
    }
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
    await sweep(root);
    const hidden = PREFIX + crypto.randomUUID();
    const handle = await root.getFileHandle(hidden, { create: true });
    const writer = await handle.createWritable();
    return {
        write: (bytes) => writer.write(bytes),
        async finish() {
            await writer.close();
            save(await handle.getFile(), name);
        },
        async discard() {
            await writer.abort().catch(() => {});
            await root.removeEntry(hidden).catch(() => {});
        },
    };
}

function toMemory(name, size) {
    if (size > MOST_IN_MEMORY) throw new TooLarge();
    let parts = [];
    return {
        write(bytes) {
            parts.push(bytes);
        },
        finish: () => save(new Blob(parts, { type: "application/octet-stream" }), name),
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
