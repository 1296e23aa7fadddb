// What the browser test stands on: a daemon, a proxy that cuts connections, shares, and Chromium.
import { execFile, spawn } from "node:child_process";
import { createHash } from "node:crypto";
import { createReadStream, existsSync, mkdtempSync, rmSync } from "node:fs";
import { createConnection, createServer } from "node:net";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { promisify } from "node:util";
import { chromium } from "playwright-core";

const FLAGS = [
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--host-resolver-rules=MAP share.test 127.0.0.1",
];

export async function until(condition, what, seconds = 60) {
    const deadline = Date.now() + seconds * 1000;
    for (;;) {
        const value = await condition();
        if (value) return value;
        if (Date.now() > deadline) throw new Error(`not within ${seconds} s: ${what}`);
        await new Promise((resolve) => setTimeout(resolve, 50));
    }
}

export function sha256(path) {
    return new Promise((resolve, reject) => {
        const hash = createHash("sha256");
        createReadStream(path).on("data", (part) => hash.update(part)).on("end", () => resolve(hash.digest("hex"))).on("error", reject);
    });
}

/** A TCP proxy: each number in `cuts` ends one connection after so many bytes from the daemon. */
async function proxy(port) {
    const cuts = [];
    const open = new Set();
    const server = createServer((near) => {
        const far = createConnection(port, "127.0.0.1");
        let passed = 0;
        for (const socket of [near, far]) {
            open.add(socket);
            socket.on("error", () => {}).on("close", () => {
                near.destroy();
                far.destroy();
                open.delete(socket);
            });
        }
        near.pipe(far);
        far.on("data", (bytes) => {
            passed += bytes.length;
            // Only a download is longer than the page with its script.
            if (cuts.length > 0 && passed > cuts[0]) {
                cuts.shift();
                near.destroy();
                return;
            }
            if (!near.write(bytes)) {
                far.pause();
                near.once("drain", () => far.resume());
            }
        });
    });
    await new Promise((resolve) => server.listen(0, "127.0.0.1", resolve));
    const close = () => {
        server.close();
        for (const socket of open) socket.destroy();
    };
    return { port: server.address().port, cuts, close };
}

function freePort() {
    return new Promise((resolve) => {
        const server = createServer().listen(0, "127.0.0.1", () => {
            const { port } = server.address();
            server.close(() => resolve(port));
        });
    });
}

/** Starts everything; `close` ends it. */
export async function start({ lockbox, daemon: program }) {
    const directory = mkdtempSync(join(tmpdir(), "lockbox-browser-"));
    const path = (name) => join(directory, name);
    const port = await freePort();
    const between = await proxy(port);
    const origin = `http://127.0.0.1:${between.port}`;
    const socket = path("daemon.sock");
    const daemon = spawn(program, [
        "serve", "--state-dir", path("store"), "--unix-socket", socket, "--listen", `127.0.0.1:${port}`,
        "--metrics-listen", "none", "--public-url", origin, "--requests-per-minute", "0", "--misses-per-minute", "100000",
    ], { stdio: ["ignore", "pipe", "pipe"] });
    let log = "";
    for (const output of [daemon.stdout, daemon.stderr]) output.on("data", (text) => { log += text; });
    const close = async () => {
        between.close();
        daemon.kill("SIGTERM");
        if (daemon.exitCode === null) await new Promise((resolve) => daemon.once("exit", resolve));
        rmSync(directory, { recursive: true, force: true });
    };
    try {
        await until(() => existsSync(socket) || daemon.exitCode !== null, "the daemon's socket");
        if (daemon.exitCode !== null) throw new Error(`the daemon ended: ${log}`);
    } catch (error) {
        await close();
        throw error;
    }
    const environment = { PATH: process.env.PATH, HOME: directory, XDG_STATE_HOME: path("state"), XDG_RUNTIME_DIR: directory };
    const run = promisify(execFile);
    /** Shares a file or a directory and returns what `lockbox share --json` says. */
    const share = async (file, ...more) => {
        const { stdout } = await run(lockbox, ["share", file, "--socket", socket, "--json", ...more], { env: environment });
        return JSON.parse(stdout);
    };
    const shareText = async (text) => {
        const running = run(lockbox, ["share", "--text", "--socket", socket, "--json"], { env: environment });
        running.child.stdin.end(text);
        return JSON.parse((await running).stdout);
    };
    const info = async (id) => {
        const { stdout } = await run(lockbox, ["share", "info", id, "--json"], { env: environment });
        return JSON.parse(stdout);
    };
    const [rearm, revoke] = ["rearm", "revoke"].map((what) => (id) => run(lockbox, ["share", what, id], { env: environment }));
    return { directory, path, origin, cuts: between.cuts, share, shareText, info, rearm, revoke, close, log: () => log };
}

/** A browser with a profile of its own. */
export async function browse(directory, options) {
    return chromium.launchPersistentContext(mkdtempSync(join(directory, "profile-")), {
        executablePath: process.env.CHROMIUM ?? "/usr/bin/chromium",
        headless: true,
        args: FLAGS,
        acceptDownloads: true,
        ...options,
    });
}
