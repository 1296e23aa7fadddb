// The link as the page reads it. The secret and its proof are those of the Rust client's tests.
import assert from "node:assert/strict";
import { test } from "node:test";
import { toBase64 } from "../src/capsule.js";
import { LinkError, authOf, fragmentOf, identityOf, readLink } from "../src/link.js";
import { safeName, size } from "../src/name.js";

const SECRET = Uint8Array.from({ length: 32 }, (_, at) => at + 1);
const FRAGMENT = "qypqxpq9qcrsszg2pvxq6rs0zqg3yyc5z5tpwxqergd3c8g7rusqgpqyee";
const PATH = "/s/1482719382210";

test("the secret is spelled and the proof derived as the command line does", () => {
    assert.equal(fragmentOf(SECRET), FRAGMENT);
    assert.equal(identityOf(SECRET), `AGE-SECRET-KEY-1${FRAGMENT.toUpperCase()}`);
    assert.equal(toBase64(authOf(SECRET)), "VmnHhOnvChivN_gYLC5tAQxVR6mKuxoCjtiZZUyu3f8");
});

test("mangled links are repaired", () => {
    for (const [pathname, hash] of [
        [PATH, `#${FRAGMENT}`],
        [PATH, `#${FRAGMENT.toUpperCase()}`],
        [PATH, `#${FRAGMENT}.`],
        [PATH, `#${FRAGMENT}%3E`],
        [PATH, `#${FRAGMENT}&utm_source=mail`],
        [PATH, `#%20${FRAGMENT.slice(0, 20)}%0A${FRAGMENT.slice(20)}`.replace("%20", " ").replace("%0A", "\n")],
        [PATH, `#${FRAGMENT.replaceAll("0", "O")}`],
        [PATH, `#${identityOf(SECRET)}`],
        [`${PATH}/`, `#${FRAGMENT}`],
        [`${PATH}%23${FRAGMENT}`, ""],
        [`${PATH}%2523${FRAGMENT}`, ""],
        [`${PATH}%23${FRAGMENT}`, "#top"],
    ]) {
        const link = readLink({ pathname, hash });
        assert.equal(link.repaired, `${PATH}#${FRAGMENT}`, pathname + hash);
        assert.deepEqual([link.base, link.handle, link.secret], ["", "1482719382210", SECRET]);
    }
    assert.equal(readLink({ pathname: `/a/b${PATH}`, hash: `#${FRAGMENT}` }).base, "/a/b");
});

test("what cannot be repaired is told", () => {
    const kind = (pathname, hash) => {
        try {
            readLink({ pathname, hash });
        } catch (error) {
            assert.ok(error instanceof LinkError);
            return error.kind;
        }
        return "read";
    };
    assert.equal(kind(PATH, ""), "missing");
    assert.equal(kind(PATH, "#"), "missing");
    assert.equal(kind(PATH, `#${FRAGMENT.slice(1)}`), "damaged");
    assert.equal(kind(PATH, `#${FRAGMENT.replace("y", "z")}`), "damaged");
    assert.equal(kind("/s/12", `#${FRAGMENT}`), "damaged");
    assert.equal(kind("/s/", `#${FRAGMENT}`), "damaged");
});

test("names and sizes are shown harmlessly", () => {
    const names = { "../../a.txt": "a.txt", "..": "received", ".bashrc": "_bashrc", "x\u202efdp.exe": "x_fdp.exe", "-rf": "_rf" };
    for (const [name, expected] of Object.entries(names)) assert.equal(safeName(name), expected);
    assert.ok(safeName(`${"a".repeat(500)}.pdf`).length <= 120);
    assert.deepEqual([0, 1, 1023, 1536, 64 * 2 ** 20].map(size), ["0 bytes", "1 byte", "1023 bytes", "1.5 KiB", "64 MiB"]);
});
