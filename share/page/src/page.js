// The page: shows that a file waits, asks before it is claimed, and hands it over when it is whole.
import * as capsules from "./capsule.js";
import { LinkError, readLink } from "./link.js";
import { safeName, size as sized } from "./name.js";
import * as server from "./server.js";
import * as sink from "./sink.js";

const part = (id) => document.getElementById(id);
/** Writes to disk are made in pieces of this size. */
const BATCH = 1024 * 1024;
/** Text up to so many bytes can be shown instead of saved. */
const MOST_SHOWN = 8 * 1024;

/** Sets what the card shows. What is not named is hidden. */
function show({ state, title, text, meta, content, progress, primary, secondary, note }) {
    part("card").dataset.state = state;
    part("title").textContent = title;
    document.title = title;
    part("text").textContent = text ?? "";
    part("text").hidden = !text;
    part("file").hidden = !meta;
    if (meta) {
        part("name").textContent = safeName(meta.name);
        part("size").textContent = sized(meta.size);
    }
    part("content").hidden = content === undefined;
    part("content").textContent = content ?? "";
    part("progress").hidden = !progress;
    for (const [id, action] of [["primary", primary], ["secondary", secondary]]) {
        const button = part(id);
        button.hidden = !action;
        button.disabled = false;
        button.textContent = action?.label ?? "";
        button.onclick = action ? () => action.run(button) : null;
    }
    part("note").hidden = !note;
    part("note").textContent = note ?? "";
}

function when(at) {
    return at ? new Date(at * 1000).toLocaleString(undefined, { dateStyle: "long", timeStyle: "short" }) : null;
}

/** Failures in the words of the one who has the link. */
function explain(error) {
    if (error instanceof LinkError && error.kind === "missing") {
        return ["Part of the link is missing", "What stands behind the # sign was lost on the way. Ask the sender for the whole link, or copy it again from the message."];
    }
    if (error instanceof LinkError) {
        return ["Damaged link", "Some of its letters were lost or changed on the way. Copy the whole link again from the message, or ask the sender for it. Nothing was used up."];
    }
    if (error instanceof capsules.Damaged) {
        return ["The file is damaged", `What arrived is not what the sender sealed: ${error.message}. Nothing was saved. Ask the sender to share it again.`];
    }
    if (error instanceof server.OutOfReach) {
        return ["The connection is lost", "The server could not be reached again in time. Check your connection and try once more."];
    }
    if (error instanceof sink.TooLarge) {
        return ["Too large for this browser", "Use another browser, or lockbox receive on the command line."];
    }
    const at = when(error.at);
    switch (error.code) {
        case "refused":
            return ["This link opens nothing", "It was used, taken back or has expired, or it was never a link of this server."];
        case "consumed":
            return ["This link was used", `${at ? `The file was handed out on ${at}. ` : ""}If that was not you, tell the sender.`];
        case "revoked":
            return ["This link was taken back", `${at ? `Its owner took it back on ${at}. ` : ""}Ask the sender for a new one.`];
        case "expired":
            return ["This link has expired", `${at ? `It expired on ${at}. ` : ""}Ask the sender for a new one.`];
        case "leased":
            return ["Somebody is downloading the file", "It is handed out once. If that is not you on another device, tell the sender."];
        case "limited":
            return ["Too many requests", "The server has no time just now. Wait a minute and try again."];
        default:
            return ["Something went wrong", `${error.message || error}`];
    }
}

function fail(error, secondary) {
    const [title, text] = explain(error);
    show({ state: "wrong", title, text, secondary });
}

/** What a reload of the page needs to go on: no secret, that stays in the address. */
const notes = {
    key: (link) => `lockbox-${link.handle}`,
    read(link) {
        try {
            return JSON.parse(sessionStorage.getItem(this.key(link))) ?? {};
        } catch {
            return {};
        }
    },
    write(link, note) {
        try {
            sessionStorage.setItem(this.key(link), JSON.stringify(note));
        } catch {
            // Without storage a reload asks for a new claim.
        }
    },
    forget(link) {
        try {
            sessionStorage.removeItem(this.key(link));
        } catch {
            // Nothing was remembered.
        }
    },
};

/** The link has done its work: it leaves the address bar and the history. */
function forgetLink(link) {
    notes.forget(link);
    history.replaceState(null, "", location.pathname);
}

function start() {
    let link;
    try {
        link = readLink(location);
    } catch (error) {
        fail(error);
        return;
    }
    history.replaceState(null, "", link.repaired);
    if (!window.isSecureContext) {
        needsHttps();
        return;
    }
    const note = notes.read(link);
    if (note.capsule) {
        claimed(link, note).catch((error) => fail(error));
        return;
    }
    // A claim whose answer was lost holds the link itself.
    if (note.claim) {
        waiting(link, note, null);
        return;
    }
    look(link, note);
}

/** With another port than the usual one, the same port with https is mostly nothing. */
function needsHttps() {
    const usual = location.port === "";
    show({
        state: "wrong",
        title: "This page needs https",
        text: `Over plain http others on the way could change its script. Nothing was used up. ${usual ? "Try the same link with https. If that does not open, use" : "Use"} 'lockbox receive' on the command line, or ask the sender for a link that begins with https://.`,
        note: "For whoever runs this server: 'lockbox-share setup' leads to a certificate.",
        primary: usual ? { label: "Try with https", run: () => location.replace(location.href.replace(/^http:/, "https:")) } : undefined,
    });
}

/** Tells before the click what the link has come to. */
async function look(link, note) {
    try {
        const until = await server.look(link);
        if (isShown(link)) waiting(link, note, until);
    } catch (error) {
        if (isShown(link)) fail(error, again(error, (next) => {
            next.disabled = true;
            look(link, note);
        }));
    }
}

/** Whether the address still has this link: another one may have been put there meanwhile. */
function isShown(link) {
    return link.repaired.endsWith(location.hash);
}

function waiting(link, note, until) {
    show({
        state: "waiting",
        title: "A file is waiting for you",
        text: "Opening it counts as a download, and most links allow only one. Go on if the file was meant for you and you are ready to save it on this device.",
        note: until === null ? undefined : `The link works until ${when(until)}.`,
        primary: { label: "Open the file", run: (button) => claim(link, note, button) },
    });
}

/** What passes by itself can be tried again. */
function again(error, run) {
    const passes = error instanceof server.OutOfReach || error.code === "limited" || error.code === "leased";
    return passes ? { label: "Try again", run } : undefined;
}

async function claim(link, note, button) {
    button.disabled = true;
    part("card").dataset.state = "claiming";
    note.claim ??= server.newClaimId();
    notes.write(link, note);
    try {
        const { capsule, lease } = await server.claim(link, note.claim);
        note.capsule = capsules.toBase64(capsule);
        note.lease = lease;
        notes.write(link, note);
        await claimed(link, note);
    } catch (error) {
        if (error instanceof server.Refused) notes.forget(link);
        fail(error, again(error, (next) => claim(link, note, next)));
    }
}

async function claimed(link, note) {
    const capsule = capsules.parse(capsules.fromBase64(note.capsule));
    const meta = await capsules.open(link.secret, capsule.sealed);
    if (capsule.size === null) {
        const verifier = new capsules.Verifier(meta);
        verifier.update(meta.content);
        verifier.finish();
        small(link, meta);
        return;
    }
    show({
        state: "claimed",
        title: "Ready to download",
        text: "The file is reserved for you.",
        meta,
        note: folderNote(meta),
        primary: { label: "Save the file", run: (button) => download(link, note, capsule, meta, button) },
    });
}

/** Content that came with the claim. */
function small(link, meta) {
    const saved = () => {
        sink.save(new Blob([meta.content], { type: "application/octet-stream" }), safeName(meta.name));
        forgetLink(link);
        show({ state: "done", title: "Saved", text: "The file is among your downloads, whole and as it was sealed.", meta, secondary: onceMore });
    };
    const onceMore = { label: "Save it once more", run: saved };
    const text = shownText(meta.content);
    const ready = { state: "claimed", title: "Here it is", text: "This download is counted: save the file before you leave this page.", meta, note: folderNote(meta) };
    const save = { label: "Save the file", run: saved };
    const copied = { label: "Copy the text", run: (button) => copy(text, button) };
    if (text !== null && meta.kind === "text") {
        show({
            ...ready,
            text: "This download is counted: the text is here until you leave this page.",
            meta: undefined,
            content: text,
            primary: copied,
            secondary: { ...save, label: "Save it as a file" },
        });
        return;
    }
    show({
        ...ready,
        primary: save,
        secondary: text === null ? undefined : {
            label: "Show the text",
            run: () => show({ ...ready, content: text, primary: save, secondary: copied }),
        },
    });
}

/** A directory comes as a tar, which `lockbox receive` unpacks and a page cannot. */
function folderNote(meta) {
    return meta.kind === "directory" ? "It is a folder, packed into one tar file: programs that open archives unpack it." : undefined;
}

async function copy(text, button) {
    try {
        await navigator.clipboard.writeText(text);
        button.textContent = "Copied";
    } catch {
        getSelection().selectAllChildren(part("content"));
    }
}

/** The content as text, or null when it is none that can be shown. */
function shownText(content) {
    if (content.length === 0 || content.length > MOST_SHOWN) return null;
    try {
        const text = new TextDecoder("utf-8", { fatal: true }).decode(content);
        return /[\u0000-\u0008\u000b\u000c\u000e-\u001f\u007f]/u.test(text) ? null : text;
    } catch {
        return null;
    }
}

async function download(link, note, capsule, meta, button) {
    button.disabled = true;
    let target;
    try {
        target = await sink.open(safeName(meta.name), meta.size);
    } catch (error) {
        button.disabled = false;
        if (error.name !== "AbortError") fail(error);
        return;
    }
    show({ state: "loading-file", title: "Downloading", text: "Keep this page open.", meta, progress: true });
    const leave = (event) => event.preventDefault();
    addEventListener("beforeunload", leave);
    try {
        await transfer(link, note, capsule, meta, target);
        // Only now: everything arrived, every piece is authentic, and the digest is the one that was sealed.
        await target.finish();
    } catch (error) {
        await target.discard();
        if (isGivenBack(error)) {
            givenBack(link);
            return;
        }
        const told = error instanceof DOMException && error.name === "QuotaExceededError" ? new sink.TooLarge() : error;
        const retry = error instanceof server.OutOfReach;
        fail(told, retry ? { label: "Try again", run: (next) => download(link, note, capsule, meta, next) } : undefined);
        return;
    } finally {
        removeEventListener("beforeunload", leave);
    }
    forgetLink(link);
    show({ state: "done", title: "Saved", text: "The file arrived whole and as it was sealed.", meta, note: folderNote(meta) });
    await server.complete(link, note.lease);
}

/** The daemon knows the lease no more: it ended before anything was downloaded, or the owner took it back and armed the link again. */
function isGivenBack(error) {
    return error instanceof server.Refused && error.code === "refused";
}

/** A new claim tells whether the link still opens something. */
function givenBack(link) {
    notes.forget(link);
    show({
        state: "wrong",
        title: "The file is no longer reserved for you",
        text: "A file is reserved for two minutes until its download begins. Nothing was saved. Unless somebody else has opened it since, you can have it still.",
        primary: { label: "Try again", run: (button) => claim(link, {}, button) },
    });
}

async function transfer(link, note, capsule, meta, target) {
    const total = capsule.size;
    const watch = (position, cut) => {
        const percent = total === 0 ? 100 : Math.floor((position / total) * 100);
        part("fill").style.width = `${percent}%`;
        part("bar").setAttribute("aria-valuenow", String(percent));
        part("percent").textContent = `${percent} %`;
        part("amount").textContent = cut ? "Connection lost, trying again\u2026" : `${sized(position)} of ${sized(total)}`;
    };
    watch(0, false);
    const source = server.ciphertext(link, note.lease, capsule, watch);
    const verifier = new capsules.Verifier(meta);
    const plain = await capsules.decrypter(link.secret).decrypt(source).catch((error) => {
        throw authentic(error);
    });
    let batch = [];
    let held = 0;
    const flush = async () => {
        if (held === 0) return;
        const joined = new Uint8Array(held);
        let at = 0;
        for (const bytes of batch) {
            joined.set(bytes, at);
            at += bytes.length;
        }
        batch = [];
        held = 0;
        await target.write(joined);
    };
    const reader = plain.getReader();
    try {
        for (;;) {
            const { done, value } = await reader.read();
            if (done) break;
            verifier.update(value);
            batch.push(value);
            held += value.length;
            if (held >= BATCH) await flush();
        }
    } catch (error) {
        await reader.cancel().catch(() => {});
        throw authentic(error);
    }
    await flush();
    verifier.finish();
}

/** Errors of ours as they are; any other is age's, which found that a piece is not authentic. */
function authentic(error) {
    const ours = [server.Refused, server.OutOfReach, capsules.Damaged, DOMException];
    return ours.some((kind) => error instanceof kind) ? error : new capsules.Damaged("a part of it is not authentic");
}

start();
addEventListener("hashchange", start);
// Without private storage nothing is left in it.
sink.sweep().catch(() => {});
