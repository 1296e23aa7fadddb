// Opens links in Chromium against a real daemon: node run.mjs LOCKBOX LOCKBOX-SHARE [DIRECTORY FOR PICTURES]
import assert from "node:assert/strict";
import { execFileSync } from "node:child_process";
import { randomBytes } from "node:crypto";
import { mkdirSync, writeFileSync } from "node:fs";
import { join } from "node:path";
import { fragmentOf } from "../../src/link.js";
import { browse, sha256, start, until } from "./stage.mjs";

const [lockbox, daemon, pictures] = process.argv.slice(2);
const LARGE = 64 * 1024 * 1024;
/** Two ranges of a download. */
const MIDDLE = 20 * 1024 * 1024;

const stage = await start({ lockbox, daemon });
let failed = 0;
let context;
try {
    context = await browse(stage.directory, { viewport: { width: 1100, height: 760 } });
    const large = stage.path("Quarterly report.bin");
    writeFileSync(large, randomBytes(LARGE));
    const digest = await sha256(large);
    const middle = stage.path("photos.tar");
    writeFileSync(middle, randomBytes(MIDDLE));
    const middleDigest = await sha256(middle);
    const small = stage.path("password.txt");
    writeFileSync(small, "correct horse battery staple\n");

    const picture = async (page, name) => {
        if (!pictures) return;
        mkdirSync(pictures, { recursive: true });
        for (const colorScheme of ["light", "dark"]) {
            await page.emulateMedia({ colorScheme, reducedMotion: "reduce" });
            await page.screenshot({ path: join(pictures, `${name}-${colorScheme}.png`) });
        }
        const before = page.viewportSize();
        await page.emulateMedia({ colorScheme: "light" });
        await page.setViewportSize({ width: 320, height: 568 });
        await page.screenshot({ path: join(pictures, `${name}-telephone.png`), fullPage: true });
        assert.ok(await page.evaluate(() => document.documentElement.scrollWidth <= innerWidth), "wider than a small telephone");
        await page.setViewportSize(before);
    };

    /** Each scenario has a page of its own; nothing may be logged as an error by the browser's policy. */
    const scenario = async (name, body) => {
        const began = Date.now();
        const page = await context.newPage();
        const refused = [];
        page.on("console", (message) => {
            if (/Content Security Policy|Refused to/.test(message.text())) refused.push(message.text());
        });
        const thrown = [];
        page.on("pageerror", (error) => thrown.push(String(error)));
        try {
            await body(page);
            assert.deepEqual([refused, thrown], [[], []]);
            console.log(`ok      ${name} (${((Date.now() - began) / 1000).toFixed(1)} s)`);
        } catch (error) {
            failed += 1;
            const shown = await page.locator("main").innerText().catch(() => "nothing");
            console.log(`FAILED  ${name}\n${error.stack}\nthe page showed: ${shown}`);
        } finally {
            await page.close();
        }
    };
    const titled = (page, title) => until(
        async () => (await page.locator("#title").textContent()) === title,
        `the title '${title}'`,
    );
    const primary = (page) => page.locator("#primary");
    /** Claims, saves, and returns where the browser put the file. */
    const fetched = async (page, link) => {
        await page.goto(link);
        await titled(page, "A file is waiting for you");
        await primary(page).click();
        await titled(page, "Ready to download");
        const download = page.waitForEvent("download");
        await primary(page).click();
        const path = await (await download).path();
        await titled(page, "Saved");
        return { path, name: (await download).suggestedFilename() };
    };
    /** Saves without the browser's question, which nobody could answer here, through its private storage. */
    const withoutPicker = (page) => page.addInitScript(() => { delete window.showSaveFilePicker; });
    /** Saves as if somebody had chosen a file in the browser's question. */
    const withPicker = (page) => page.addInitScript(() => {
        window.showSaveFilePicker = async ({ suggestedName }) => {
            const root = await navigator.storage.getDirectory();
            window.picked = await root.getFileHandle(`${crypto.randomUUID()} ${suggestedName}`, { create: true });
            return window.picked;
        };
    });
    const state = async (share) => (await stage.info(share.id)).state;

    await scenario("64 MiB arrive with an equal hash, and the link works once", async (page) => {
        await withoutPicker(page);
        const share = await stage.share(large);
        await page.goto(share.link);
        await titled(page, "A file is waiting for you");
        await picture(page, "1-waiting");
        assert.equal(await state(share), "armed");
        const { path, name } = await fetched(page, share.link);
        assert.equal(name, "Quarterly report.bin");
        assert.equal(await sha256(path), digest);
        await picture(page, "4-saved");
        assert.ok(!page.url().includes("#"), "the link stays in the address bar");
        await until(async () => (await state(share)) === "consumed", "the share is used");

        const again = await context.newPage();
        await again.goto(share.link);
        // Before any click.
        await titled(again, "This link was used");
        assert.match(await again.locator("#text").textContent(), /handed out on/);
        assert.ok(await primary(again).isHidden());
        await picture(again, "5-used");
        await again.close();
    });

    await scenario("cut connections are gone on with", async (page) => {
        await withoutPicker(page);
        const share = await stage.share(large);
        await page.goto(share.link);
        await primary(page).click();
        await titled(page, "Ready to download");
        await picture(page, "2-ready");
        stage.cuts.push(LARGE / 100, 8_000_000, 4_000_000, 400_000);
        const download = page.waitForEvent("download");
        await primary(page).click();
        await until(() => stage.cuts.length === 0, "all connections that were to be cut");
        assert.equal(await sha256(await (await download).path()), digest);
        await titled(page, "Saved");
    });

    await scenario("a file goes straight to disk where the browser can", async (page) => {
        await withPicker(page);
        const share = await stage.share(middle);
        await page.goto(share.link);
        await primary(page).click();
        await titled(page, "Ready to download");
        await primary(page).click();
        await until(async () => Number(await page.locator("#bar").getAttribute("aria-valuenow")) > 20, "progress").catch(() => {});
        await picture(page, "3-downloading");
        await titled(page, "Saved");
        const hash = await page.evaluate(async () => {
            const bytes = await (await window.picked.getFile()).arrayBuffer();
            return [...new Uint8Array(await crypto.subtle.digest("SHA-256", bytes))].map((byte) => byte.toString(16).padStart(2, "0")).join("");
        });
        assert.equal(hash, middleDigest);
    });

    await scenario("a download that ends early is never saved", async (page) => {
        await withPicker(page);
        const share = await stage.share(middle);
        await page.goto(share.link);
        await primary(page).click();
        await titled(page, "Ready to download");
        let parts = 0;
        await page.route("**/ciphertext", async (route) => {
            parts += 1;
            if (parts < 2) await route.continue();
            else await route.fulfill({ status: 410, contentType: "application/json", body: '{"error":"consumed","message":"over"}' });
        });
        await primary(page).click();
        await titled(page, "This link was used");
        assert.equal(await page.evaluate(async () => (await window.picked.getFile()).size), 0);
    });

    await scenario("flipped bytes are never saved", async (page) => {
        await withPicker(page);
        const share = await stage.share(middle);
        await page.goto(share.link);
        await primary(page).click();
        await titled(page, "Ready to download");
        await page.route("**/ciphertext", async (route) => {
            const response = await route.fetch();
            const body = await response.body();
            body[body.length >> 1] ^= 1;
            await route.fulfill({ response, body });
        });
        await primary(page).click();
        await titled(page, "The file is damaged");
        assert.equal(await page.evaluate(async () => (await window.picked.getFile()).size), 0);
        await picture(page, "6-damaged-file");
    });

    await scenario("small text is shown, copied and saved", async (page) => {
        const share = await stage.share(small);
        await page.goto(share.link);
        await primary(page).click();
        await titled(page, "Here it is");
        await page.locator("#secondary").click();
        assert.equal(await page.locator("#content").textContent(), "correct horse battery staple\n");
        await picture(page, "7-text");
        const download = page.waitForEvent("download");
        await primary(page).click();
        assert.equal(await sha256(await (await download).path()), await sha256(small));
        await titled(page, "Saved");
        assert.equal(await state(share), "consumed");
    });

    await scenario("what a link has come to is told before the click, and looking uses nothing up", async (page) => {
        const share = await stage.share(small);
        for (let look = 0; look < 3; look += 1) {
            await page.goto("about:blank");
            await page.goto(share.link);
            await titled(page, "A file is waiting for you");
            await until(() => page.locator("#note").isVisible(), "until when the link works");
        }
        assert.equal(await state(share), "armed");
        await stage.revoke(share.id);
        await page.reload();
        await titled(page, "This link was taken back");
        await picture(page, "10-taken-back");
        const brief = await stage.share(small, "--expires", "1s");
        await until(async () => (await state(brief)) === "expired", "the share expires");
        await page.goto(brief.link);
        await titled(page, "This link has expired");
        await picture(page, "11-expired");
    });

    await scenario("a link that somebody is downloading can be looked at again", async (page) => {
        await withoutPicker(page);
        const share = await stage.share(middle);
        const other = await context.newPage();
        await other.goto(share.link);
        await primary(other).click();
        await titled(other, "Ready to download");
        await page.goto(share.link);
        await titled(page, "Somebody is downloading the file");
        await stage.rearm(share.id);
        await page.locator("#secondary").click();
        await titled(page, "A file is waiting for you");
        await other.close();
    });

    await scenario("a server that does not say what a link is worth leaves that to the click", async (page) => {
        const share = await stage.share(small);
        await page.route("**/v1/look", (route) => route.abort());
        await page.goto(share.link);
        await titled(page, "A file is waiting for you");
        assert.ok(await page.locator("#note").isHidden());
        await primary(page).click();
        await titled(page, "Here it is");
    });

    await scenario("over plain http the page opens nothing and names the way", async (page) => {
        const share = await stage.share(small);
        const asked = [];
        page.on("request", (request) => { if (request.url().includes("/v1/")) asked.push(request.url()); });
        await page.goto(share.link.replace("127.0.0.1", "share.test"));
        await titled(page, "This page needs https");
        assert.match(await page.locator("#text").textContent(), /lockbox receive/);
        assert.match(await page.locator("#note").textContent(), /lockbox-share setup/);
        // The daemon of this test has a port of its own, where https is not.
        assert.ok(await primary(page).isHidden());
        await picture(page, "12-needs-https");
        assert.deepEqual(asked, []);
        assert.equal(await state(share), "armed");
    });

    await scenario("a shared text is there at once, and can be copied and saved", async (page) => {
        await context.grantPermissions(["clipboard-read", "clipboard-write"]);
        const share = await stage.shareText("meet me at the bridge\nat noon");
        await page.goto(share.link);
        await primary(page).click();
        await titled(page, "Here it is");
        assert.equal(await page.locator("#content").textContent(), "meet me at the bridge\nat noon");
        await picture(page, "13-text");
        await primary(page).click();
        await until(async () => (await primary(page).textContent()) === "Copied", "the text is copied");
        assert.equal(await page.evaluate(() => navigator.clipboard.readText()), "meet me at the bridge\nat noon");
        const download = page.waitForEvent("download");
        await page.locator("#secondary").click();
        assert.equal((await download).suggestedFilename(), "text.txt");
    });

    await scenario("a directory is saved as a tar", async (page) => {
        await withoutPicker(page);
        const folder = stage.path("photos of the year");
        mkdirSync(join(folder, "spring"), { recursive: true });
        writeFileSync(join(folder, "spring", "one.jpg"), randomBytes(300_000));
        const share = await stage.share(folder);
        await page.goto(share.link);
        await primary(page).click();
        await titled(page, "Ready to download");
        await picture(page, "14-folder");
        const download = page.waitForEvent("download");
        await primary(page).click();
        assert.equal((await download).suggestedFilename(), "photos of the year.tar");
        const path = await (await download).path();
        execFileSync("tar", ["-xf", path, "-C", stage.directory, "--one-top-level=unpacked"]);
        const [got, sent] = ["unpacked/photos of the year", "photos of the year"].map((name) => stage.path(join(name, "spring", "one.jpg")));
        assert.equal(await sha256(got), await sha256(sent));
        await titled(page, "Saved");
    });

    await scenario("a damaged link is told without a request", async (page) => {
        const share = await stage.share(small);
        const asked = [];
        page.on("request", (request) => { if (request.url().includes("/v1/")) asked.push(request.url()); });
        await page.goto(share.link.slice(0, -1));
        await titled(page, "Damaged link");
        await picture(page, "8-damaged-link");
        await page.goto("about:blank");
        await page.goto(share.link.split("#")[0]);
        await titled(page, "Part of the link is missing");
        assert.deepEqual(asked, []);
        assert.equal(await state(share), "armed");
    });

    await scenario("a link with %23 for # is repaired", async (page) => {
        const share = await stage.share(small);
        await page.goto(share.link.replace("#", "%23"));
        await titled(page, "A file is waiting for you");
        assert.equal(page.url(), share.link);
        await primary(page).click();
        await titled(page, "Here it is");
    });

    await scenario("the wrong fragment opens nothing and uses nothing up", async (page) => {
        const share = await stage.share(small);
        const [url] = share.link.split("#");
        await page.goto(`${url}#${fragmentOf(new Uint8Array(randomBytes(32)))}`);
        await titled(page, "This link opens nothing");
        assert.equal(await state(share), "armed");
    });

    await scenario("a page that is loaded anew goes on with its claim", async (page) => {
        await withoutPicker(page);
        const share = await stage.share(middle);
        await page.goto(share.link);
        await primary(page).click();
        await titled(page, "Ready to download");
        await page.reload();
        await titled(page, "Ready to download");
        const download = page.waitForEvent("download");
        await primary(page).click();
        assert.equal(await sha256(await (await download).path()), middleDigest);
    });

    /** To the daemon as after two minutes without a download: it knows the lease no more, and the link is armed. */
    const reservationEnds = async (page, share) => {
        await page.goto(share.link);
        await primary(page).click();
        await titled(page, "Ready to download");
        await stage.rearm(share.id);
        await primary(page).click();
        await titled(page, "The file is no longer reserved for you");
    };

    await scenario("a reservation that ended unused is made anew by trying again", async (page) => {
        await withoutPicker(page);
        const share = await stage.share(middle);
        await reservationEnds(page, share);
        await picture(page, "9-reservation-ended");
        assert.equal(await state(share), "armed");
        await primary(page).click();
        await titled(page, "Ready to download");
        const download = page.waitForEvent("download");
        await primary(page).click();
        assert.equal(await sha256(await (await download).path()), middleDigest);
        await titled(page, "Saved");
        await until(async () => (await state(share)) === "consumed", "the share is used");
    });

    await scenario("trying again tells that somebody else has the file by now", async (page) => {
        await withoutPicker(page);
        const share = await stage.share(middle);
        await reservationEnds(page, share);
        const other = await context.newPage();
        await other.goto(share.link);
        await primary(other).click();
        await titled(other, "Ready to download");
        await primary(page).click();
        await titled(page, "Somebody is downloading the file");
        await other.close();
    });

    /** Files of the page in private storage, as seen from a document of the server that runs no script of its own. */
    const left = async (page) => page.evaluate(async () => {
        const names = [];
        for await (const name of (await navigator.storage.getDirectory()).keys()) names.push(name);
        return names.filter((name) => name.startsWith("lockbox-")).sort();
    });
    const onlooker = await context.newPage();
    await onlooker.goto(`${stage.origin}/assets/page.css`);
    await until(async () => (await left(onlooker)).length === 0, "what earlier scenarios opened is gone");

    await scenario("what was opened leaves the private storage after its download", async (page) => {
        await withoutPicker(page);
        await page.clock.install();
        const share = await stage.share(middle);
        const { path } = await fetched(page, share.link);
        assert.equal(await sha256(path), middleDigest);
        assert.equal((await left(onlooker)).length, 1);
        await page.clock.runFor(60_000);
        await until(async () => (await left(onlooker)).length === 0, "nothing is left");
    });

    await scenario("closing the page removes what was opened, and the download goes on", async () => {
        const page = await context.newPage();
        await withoutPicker(page);
        const share = await stage.share(large);
        await page.goto(share.link);
        await primary(page).click();
        await titled(page, "Ready to download");
        const download = page.waitForEvent("download");
        await primary(page).click();
        const begun = await download;
        await page.close();
        await until(async () => (await left(onlooker)).length === 0, "nothing is left");
        assert.equal(await sha256(await begun.path()), digest);
    });

    await scenario("what a closed page left is swept by the next, and what a living one holds is not", async (page) => {
        const begin = async (tab) => {
            await withoutPicker(tab);
            const share = await stage.share(middle);
            await tab.goto(share.link);
            await primary(tab).click();
            await titled(tab, "Ready to download");
            let go;
            const gate = new Promise((resolve) => { go = resolve; });
            let parts = 0;
            await tab.route("**/ciphertext", async (route) => {
                parts += 1;
                if (parts > 1) await gate;
                await route.continue().catch(() => {});
            });
            const download = tab.waitForEvent("download").catch(() => null);
            await primary(tab).click();
            await until(() => parts > 1, "the middle of the download");
            return { go, download };
        };
        const living = await begin(page);
        // The file, and what Chromium writes beside it.
        const held = await left(onlooker);
        assert.notEqual(held.length, 0);
        const closed = await context.newPage();
        const broken = await begin(closed);
        assert.ok((await left(onlooker)).length > held.length);
        await closed.close();
        broken.go();
        const next = await context.newPage();
        await next.goto((await stage.share(small)).link);
        await until(async () => String(await left(onlooker)) === String(held), "only what is held is left");
        await next.close();
        living.go();
        assert.equal(await sha256(await (await living.download).path()), middleDigest);
        await titled(page, "Saved");
    });
    await onlooker.close();

    const log = stage.log();
    assert.ok(!/password|Quarterly|Bearer|[?#][qpzry9x8gf2tvdw0s3jn54khce6mua7l]{58}/.test(log), `the daemon's log tells too much: ${log}`);
} finally {
    await context?.close();
    await stage.close();
}
process.exitCode = failed > 0 ? 1 : 0;
