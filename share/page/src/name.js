// Makes the name of a received file safe: a sender must not choose where it lands or what is shown.

const HARMFUL = /[\u0000-\u001f\u007f-\u009f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufffd:*?"<>|]/gu;

export function safeName(name) {
    const last = name.split(/[/\\]/).filter((part) => part.replace(/^[. ]+|[. ]+$/g, "") !== "").pop() ?? "";
    const shown = last.replace(HARMFUL, "_").replace(/[. ]+$/, "").trimStart();
    if (shown === "") return "received";
    const visible = /^[.\-~]/.test(shown) ? `_${shown.slice(1)}` : shown;
    if (visible.length <= 120) return visible;
    const dot = visible.lastIndexOf(".");
    const ending = dot > 0 && visible.length - dot <= 16 ? visible.slice(dot) : "";
    return visible.slice(0, 120 - ending.length).replace(/[. ]+$/, "") + ending;
}

/** `64.0 MiB` */
export function size(bytes) {
    const units = ["bytes", "KiB", "MiB", "GiB", "TiB"];
    let value = bytes;
    let unit = 0;
    while (value >= 1024 && unit < units.length - 1) {
        value /= 1024;
        unit += 1;
    }
    if (unit === 0) return bytes === 1 ? "1 byte" : `${bytes} bytes`;
    return `${value < 10 ? value.toFixed(1) : Math.round(value)} ${units[unit]}`;
}
