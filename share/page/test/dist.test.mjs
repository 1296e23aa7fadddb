// What is committed in dist is what the sources build.
import assert from "node:assert/strict";
import { execFileSync } from "node:child_process";
import { mkdtempSync, readFileSync, readdirSync, rmSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { test } from "node:test";
import { fileURLToPath } from "node:url";

const here = (name) => fileURLToPath(new URL(name, import.meta.url));

test("dist is what the sources build", () => {
    const built = mkdtempSync(join(tmpdir(), "lockbox-page-"));
    try {
        execFileSync(process.execPath, [here("../build.mjs"), built]);
        assert.deepEqual(readdirSync(here("../dist")).sort(), readdirSync(built).sort());
        for (const name of readdirSync(built)) {
            assert.ok(readFileSync(join(built, name)).equals(readFileSync(here(`../dist/${name}`))), `${name} differs: npm run build`);
        }
    } finally {
        rmSync(built, { recursive: true });
    }
});

test("the page loads nothing from elsewhere and runs nothing inline", () => {
    const page = readFileSync(here("../dist/index.html"), "utf8");
    assert.doesNotMatch(page, /<script(?![^>]*src="\.\.\/assets\/page\.js")/);
    assert.doesNotMatch(page, /\son[a-z]+=|style=/);
    for (const [, address] of page.matchAll(/(?:src|<link[^>]*href)="([^"]*)"/g)) assert.match(address, /^(?:\.\.\/assets\/|data:)/);
});

test("packages come from the public registry and are pinned", () => {
    const lock = JSON.parse(readFileSync(here("../package-lock.json"), "utf8"));
    for (const [name, entry] of Object.entries(lock.packages)) {
        if (name === "") continue;
        assert.match(entry.resolved, /^https:\/\/registry\.npmjs\.org\//, name);
        assert.match(entry.integrity, /^sha512-/, name);
    }
});
