// Builds the page from src into a directory: node build.mjs DIRECTORY
import { build } from "esbuild";
import { copyFile, mkdir, readFile } from "node:fs/promises";
import { join } from "node:path";
import { fileURLToPath } from "node:url";

const here = (name) => fileURLToPath(new URL(name, import.meta.url));
const target = process.argv[2];
if (!target) throw new Error("usage: node build.mjs DIRECTORY");

// Licences of what is bundled go with it.
const bundled = ["age-encryption", "@noble/hashes", "@noble/ciphers", "@noble/curves", "@noble/post-quantum", "@scure/base"];
const licences = await Promise.all(bundled.map(async (name) => {
    const { version } = JSON.parse(await readFile(here(`node_modules/${name}/package.json`), "utf8"));
    const text = await readFile(here(`node_modules/${name}/LICENSE`), "utf8");
    return `${name} ${version}\n\n${text.trim()}`;
}));

await mkdir(target, { recursive: true });
await build({
    entryPoints: [here("src/page.js")],
    outfile: join(target, "page.js"),
    bundle: true,
    format: "esm",
    target: ["es2022", "chrome110", "firefox115", "safari16.4"],
    minify: true,
    charset: "ascii",
    legalComments: "none",
    banner: { js: `/*\nlockbox, MIT OR Apache-2.0. With parts of:\n\n${licences.join("\n\n\n").replaceAll("*/", "* /")}\n*/` },
    logLevel: "warning",
});
for (const name of ["index.html", "page.css"]) await copyFile(here(`src/${name}`), join(target, name));
